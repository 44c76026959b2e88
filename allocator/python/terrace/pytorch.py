"""What is asked of the PyTorch in this process: its version, whether CUDA has started, and the pluggable allocator with its hooks.

The functions that PyTorch calls are C symbols of the extension module; nothing of Python runs between PyTorch and the allocator.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from types import ModuleType
from typing import Any

from terrace import _terrace
from terrace.errors import InstallError

OLDEST = (2, 10)
"""Older ones end the process when a pluggable allocator and a MemPool meet (pytorch PR 162950)."""

TESTED = (2, 11)
"""What the tests and the measurements ran on."""

LIBRARY: str = str(_terrace.__file__)
"""The shared object with the C symbols of ``terrace.h`` and ``terrace_gdn.h``."""

_HOOKS = {
    "set_init_fn": "terrace_torch_init",
    "set_reset_fn": "terrace_torch_reset",
    "set_memory_fraction_fn": "terrace_torch_memory_fraction",
    "set_base_alloc_fn": "terrace_torch_base_alloc",
    "set_record_stream_fn": "terrace_torch_record_stream",
    "set_begin_allocate_to_pool": "terrace_torch_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "terrace_torch_end_allocate_to_pool",
    "set_release_pool": "terrace_torch_release_pool",
}


def version(torch: ModuleType) -> tuple[int, int]:
    """Major and minor version."""
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def supported() -> ModuleType:
    """The torch of this process, or an :class:`InstallError` that says what is wrong with it."""
    try:
        # By name, so that the types of a torch that is not there do not matter.
        torch = importlib.import_module("torch")
    except ImportError as missing:
        raise InstallError(f"PyTorch cannot be imported ({missing}); install torch {OLDEST[0]}.{OLDEST[1]} or newer for CUDA") from missing
    if version(torch) < OLDEST:
        raise InstallError(
            f"torch {torch.__version__} is not supported: its pluggable allocator can end the process; install {OLDEST[0]}.{OLDEST[1]} or newer"
        )
    if torch.version.cuda is None:
        raise InstallError(f"torch {torch.__version__} was built without CUDA; install a build for CUDA, or use backing='host'")
    if sys.platform != "linux":
        raise InstallError(f"PyTorch's pluggable allocator works on Linux, and this is {sys.platform}")
    return torch


def cuda_has_started(torch: ModuleType) -> bool:
    """Whether it is too late to change the allocator."""
    return bool(torch.cuda.is_initialized())


def address(symbol: str) -> int:
    """Where a C function of the extension module lies."""
    return ctypes.cast(getattr(ctypes.CDLL(LIBRARY), symbol), ctypes.c_void_p).value or 0


def pluggable(torch: ModuleType, alloc: str = "terrace_torch_malloc") -> Any:
    """The allocator as PyTorch takes it, with every hook set."""
    made = torch.cuda.memory.CUDAPluggableAllocator(LIBRARY, alloc, "terrace_torch_free")
    for hook, symbol in _HOOKS.items():
        setter = getattr(made._allocator, hook, None)
        if setter is None:
            raise InstallError(
                f"torch {torch.__version__} has no {hook}, without which memory in use would be given out again; "
                f"install {TESTED[0]}.{TESTED[1]}, which was tested"
            )
        setter(address(symbol))
    return made
