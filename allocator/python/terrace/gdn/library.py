"""`kernels/include/terrace_gdn.h` through ctypes: its structs, its calls, and an exception where a status is not 0.

Symbols come from the package's own shared object; `TERRACE_KERNELS` names another library, such as a `libterrace_kernels.so`.
Loading touches no device.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, byref, c_char, c_char_p, c_float, c_int64, c_uint32, c_uint64, c_void_p, sizeof
from typing import Any

VERSION = (0, 1)
"""Major and minor of the header that is mirrored here."""

BF16, FP16, FP32 = 1, 2, 3
CPU, CUDA = 1, 2


class GdnError(RuntimeError):
    """A call that the kernels refused, or that failed. `status` is the number in `terrace_gdn_status`."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class GdnArgumentError(GdnError, ValueError):
    """An argument is wrong; the text names it. Nothing was written."""


class Device(ctypes.Structure):
    _fields_ = [
        ("kind", c_uint32),
        ("ordinal", c_uint32),
        ("stream", c_void_p),
        ("threads", c_uint32),
        ("reserved", c_uint32),
    ]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("dtype", c_uint32),
        ("reserved", c_uint32),
    ]


class Pool(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("slots", c_int64),
        ("slot_stride", c_int64),
        ("dtype", c_uint32),
        ("reserved", c_uint32),
    ]


_TOKENS = [
    ("size", c_uint64),
    ("device", Device),
    ("tokens", c_int64),
    ("key_heads", c_uint32),
    ("value_heads", c_uint32),
    *((name, Tensor) for name in ("q", "k", "v", "g", "beta", "o")),
]


class PrefillArgs(ctypes.Structure):
    _fields_ = [
        *_TOKENS,
        ("host_cu_seqlens", c_void_p),
        ("sequences", c_int64),
        ("host_chunk_indices", c_void_p),
        ("chunks", c_int64),
        ("host_chunk_offsets", c_void_p),
        ("initial", Pool),
        ("host_initial_slots", c_void_p),
        ("host_has_initial", c_void_p),
        ("last", Pool),
        ("host_last_slots", c_void_p),
        ("in_place", c_uint32),
        ("checkpoint_every", c_uint32),
        ("checkpoints", Pool),
        ("scale", c_float),
        ("l2norm", c_uint32),
        ("window", c_uint32),
        ("design", c_uint32),
        ("workspace", c_void_p),
        ("workspace_bytes", c_uint64),
    ]


class DecodeArgs(ctypes.Structure):
    _fields_ = [
        *_TOKENS,
        ("cu_seqlens", c_void_p),
        ("slots", c_void_p),
        ("sequences", c_int64),
        ("pool", Pool),
        ("scale", c_float),
        ("l2norm", c_uint32),
    ]


class Path(ctypes.Structure):
    _fields_ = [
        ("windows", c_uint64),
        ("chunks", c_uint64),
        ("launches", c_uint64),
        ("table_bytes", c_uint64),
        ("route", c_char * 32),
        ("arch", c_char * 32),
        ("why", c_char * 192),
    ]


class Library:
    """The calls of one shared object; `raw` has them as C does. Methods raise [`GdnError`]; each of them may be called from any thread."""

    def __init__(self, path: str):
        self.path = path
        self.raw = lib = ctypes.CDLL(path)
        lib.terrace_gdn_version.restype = c_uint32
        lib.terrace_gdn_last_error.restype = c_char_p
        lib.terrace_gdn_workspace_bytes.argtypes = [POINTER(Device), *[c_uint32] * 4, POINTER(c_uint64)]
        lib.terrace_gdn_prepare.argtypes = [POINTER(Device), c_uint32]
        lib.terrace_gdn_prefill.argtypes = [POINTER(PrefillArgs), POINTER(Path)]
        lib.terrace_gdn_decode.argtypes = [POINTER(DecodeArgs), POINTER(Path)]
        version = lib.terrace_gdn_version()
        found = (version >> 16, version >> 8 & 0xFF)
        if found != VERSION:
            wanted, has = (".".join(map(str, v)) for v in (VERSION, found))
            raise ImportError(f"{path} has the kernels' interface {has}, and terrace.gdn needs {wanted}; build both from one checkout")
        # The size depends on few numbers, and a forward asks for the same one in each layer.
        self.workspace_bytes = functools.lru_cache(maxsize=256)(self._workspace_bytes)

    def _workspace_bytes(self, kind: int, key_heads: int, value_heads: int, threads: int = 0, window: int = 0, design: int = 0) -> int:
        """Bytes that a prefill's workspace needs at any number of tokens; window 0 and design 0 are the defaults."""
        size = c_uint64()
        device = Device(kind, 0, None, threads)
        self.done(self.raw.terrace_gdn_workspace_bytes(byref(device), key_heads, value_heads, window, design, byref(size)))
        return size.value

    def prepare(self, device: Device, dtype: int) -> None:
        """Compiles and loads the kernels of one type of q."""
        self.done(self.raw.terrace_gdn_prepare(byref(device), dtype))

    def prefill(self, args: PrefillArgs) -> Path:
        """Queues a prefill; which path it took."""
        return self._run(self.raw.terrace_gdn_prefill, args)

    def decode(self, args: DecodeArgs) -> Path:
        """Queues a decode step; which path it took."""
        return self._run(self.raw.terrace_gdn_decode, args)

    def _run(self, function: Any, args: PrefillArgs | DecodeArgs) -> Path:
        args.size, path = sizeof(args), Path()
        self.done(function(byref(args), byref(path)))
        return path

    def done(self, status: int) -> None:
        """Raises what a status other than 0 means."""
        if status:
            text = self.raw.terrace_gdn_last_error().decode()
            raise (GdnArgumentError if status == 1 else GdnError)(status, text)


@functools.cache
def load() -> Library:
    """The library of this process, loaded at the first call."""
    path = os.environ.get("TERRACE_KERNELS")
    if not path:
        from terrace import _terrace

        path = _terrace.__file__
    return Library(path)
