"""The other process of a test: ``child.py FILE FUNCTION ARGUMENTS`` calls a function of a test file and prints what it returned."""

import importlib.util
import json
import os
import sys

REAL = os.environ.get("TERRACE_PLACE") == "gpu"
"""Whether kernels run, so that values mean something."""


def main() -> None:
    file, function, arguments = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location("tested", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tested"] = module
    spec.loader.exec_module(module)
    answer = getattr(module, function)(*json.loads(arguments))
    print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
