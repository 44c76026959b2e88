"""Plans every byte of an inference forward in PyTorch, and replays the plan.

    import terrace

    alloc = terrace.install(budget="20GiB")        # before anything touches a CUDA device
    ...                                            # load the model
    with alloc.step(("prefill", tokens)):
        model(ids)                                 # the first of a kind is recorded, later ones are answered from its plan
    print(alloc.report())

``terrace.gdn`` has the Gated DeltaNet kernels, ``python -m terrace doctor`` looks for what gets in the way.

Importing this needs no PyTorch; each function that does says so.
"""

import importlib
from types import ModuleType

from terrace._terrace import TerraceError, __version__
from terrace.allocator import Allocator, Step, current, install
from terrace.errors import InstallError
from terrace.recording import Recording, record, snapshot
from terrace.wrapping import tag_of, unwrap, wrap

__all__ = [
    "Allocator",
    "InstallError",
    "Recording",
    "Step",
    "TerraceError",
    "__version__",
    "current",
    "install",
    "record",
    "snapshot",
    "tag_of",
    "unwrap",
    "wrap",
]


def __getattr__(name: str) -> ModuleType:
    # The one imports PyTorch, and the other is for those who ask.
    if name in ("doctor", "gdn"):
        return importlib.import_module(f"terrace.{name}")
    raise AttributeError(f"module 'terrace' has no attribute {name!r}")
