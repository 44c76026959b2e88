"""What is installed: one shared object with both sets of C symbols, types for those who check them, and no PyTorch until it is needed."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

import terrace
from terrace import pytorch

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("header", ["allocator/include/terrace.h", "kernels/include/terrace_gdn.h"])
def test_every_function_of_a_header_is_exported(header):
    text = re.sub(r"/\*.*?\*/", "", (ROOT / header).read_text(), flags=re.S)
    names = set(re.findall(r"^[^#\n]*\b(terrace_\w+)\s*\(", text, flags=re.M))
    assert len(names) > 5, names
    library = ctypes.CDLL(pytorch.LIBRARY)
    missing = [name for name in sorted(names) if not hasattr(library, name)]
    assert missing == []


def test_the_symbols_are_of_this_version():
    library = ctypes.CDLL(pytorch.LIBRARY)
    major, minor, patch = map(int, terrace.__version__.split("."))
    version = major << 16 | minor << 8 | patch
    assert library.terrace_version() == library.terrace_gdn_version() == version
    assert terrace._terrace.VERSION == terrace._terrace.GDN_VERSION == version


def test_types_come_with_it():
    files = resources.files("terrace")
    assert files.joinpath("py.typed").is_file() and files.joinpath("_terrace.pyi").is_file()


def test_importing_it_imports_no_pytorch():
    code = "import sys, terrace, terrace.doctor; print('torch' in sys.modules, 'numpy' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_every_public_name_is_documented():
    for name in terrace.__all__:
        if name != "__version__":
            assert getattr(terrace, name).__doc__, name
