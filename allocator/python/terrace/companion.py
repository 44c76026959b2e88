"""A few lines of C++, compiled against the installed PyTorch, that throw its own out-of-memory error.

``torch.OutOfMemoryError`` is what callers catch, and only code compiled against this very PyTorch can throw it. It is built at first use,
kept in the user's cache by version and text, and loaded from there afterwards. Without a compiler everything else works, and a spent budget
is a ``RuntimeError`` whose text begins with "CUDA out of memory".
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

from terrace.pytorch import address

RAISES = "torch.OutOfMemoryError"

_SOURCE = r"""
#include <c10/util/Exception.h>
extern "C" void terrace_throw_out_of_memory(const char *text) {
    throw c10::OutOfMemoryError({__func__, "terrace", 0}, text);
}
"""

_kept: list[ctypes.CDLL] = []


def load(torch: ModuleType) -> str:
    """Has spent budgets raised as ``torch.OutOfMemoryError``; what came of it, for people."""
    try:
        library = ctypes.CDLL(str(_built(torch)))
    except (OSError, subprocess.SubprocessError) as failed:
        return f"a RuntimeError, since the companion could not be built: {failed}"
    _kept.append(library)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address("terrace_torch_on_out_of_memory"))(
        ctypes.cast(library.terrace_throw_out_of_memory, ctypes.c_void_p)
    )
    return RAISES


def folder() -> Path:
    """Where companions are kept: TERRACE_CACHE, else the user's cache."""
    given = os.environ.get("TERRACE_CACHE")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "terrace"


def _built(torch: ModuleType) -> Path:
    root = Path(torch.__file__ or "").parent
    abi = int(torch.compiled_with_cxx11_abi())
    told = hashlib.sha256(f"{torch.__version__} {torch.version.git_version} {root} {abi} {sysconfig.get_platform()} {_SOURCE}".encode())
    library = folder() / f"companion-{told.hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise OSError("there is no C++ compiler (c++, g++ or clang++, or CXX in the environment)")
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as beside:
        source, made = Path(beside) / "companion.cc", Path(beside) / "companion.so"
        source.write_text(_SOURCE)
        include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        link = [f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
        command = [
            compiler,
            "-std=c++17",
            "-O1",
            "-fPIC",
            "-shared",
            f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
            *include,
            str(source),
        ]
        run = subprocess.run([*command, "-o", str(made), *link], capture_output=True, text=True, timeout=120, check=False)
        if run.returncode != 0:
            raise OSError(f"{compiler} refused: {run.stderr.strip().splitlines()[0] if run.stderr.strip() else 'without a word'}")
        # Another process may be doing the same: the last one wins, and all are alike.
        os.replace(made, library)
    return library
