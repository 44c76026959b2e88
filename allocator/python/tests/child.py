"""The other process of a test: calls a function of a test file and prints what it returned.

    child.py FILE FUNCTION ARGUMENTS     in this process
    child.py --serve                     in a fork of this one for each line of standard input, {"file", "function", "arguments", "env"};
                                         each is answered by a line {"status", "out", "err"}

A fork ends as a program does, with all that the interpreter then frees. CUDA has not started in what forks.
"""

import importlib
import importlib.util
import json
import os
import sys
import tempfile

REAL = os.environ.get("TERRACE_PLACE") == "gpu"
"""Whether kernels run, so that values mean something."""


def main() -> None:
    if sys.argv[1:] != ["--serve"]:
        file, function, arguments = sys.argv[1:]
        answer(file, function, json.loads(arguments))
        return
    request = serve()
    if request is not None:
        answer(request["file"], request["function"], request["arguments"])


def answer(file: str, function: str, arguments: list) -> None:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location("tested", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tested"] = module
    spec.loader.exec_module(module)
    print("ANSWER " + json.dumps(getattr(module, function)(*arguments)), flush=True)


def serve() -> dict | None:
    """The request, in its fork; ``None`` in the server, when there are no more."""
    for name in ("torch", "terrace"):
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            fork = os.fork()
            if fork == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os.environ.update(request["env"])
                return request
            status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
            told = {"status": status}
            for name, file in (("out", out), ("err", err)):
                file.seek(0)
                told[name] = file.read()
        print(json.dumps(told), flush=True)
    return None


if __name__ == "__main__":
    main()
