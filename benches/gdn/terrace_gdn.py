"""kernels/include/terrace_gdn.h for PyTorch tensors, through ctypes: all that the scripts here know of the C interface.

`prefill` and `decode` check nothing and run nothing; they fill the argument struct once and return the call, so that what is timed
is the library. A status other than 0 raises `TerraceError` with the library's sentence.
"""

import ctypes
import os
from ctypes import POINTER, byref, c_char, c_char_p, c_float, c_int64, c_uint32, c_uint64, c_void_p, sizeof

import torch

DTYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
KINDS = {"cpu": 1, "cuda": 2}
DESIGNS = {"fused": 0, "staged": 1}
ALIGN = 256


class TerraceError(RuntimeError):
    pass


class Device(ctypes.Structure):
    _fields_ = [("kind", c_uint32), ("ordinal", c_uint32), ("stream", c_void_p), ("threads", c_uint32), ("reserved", c_uint32)]


class Tensor(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("token_stride", c_int64), ("head_stride", c_int64), ("dtype", c_uint32), ("reserved", c_uint32)]

    @classmethod
    def of(cls, t):
        return cls(t.data_ptr(), t.stride(0), t.stride(1), DTYPES[t.dtype])


class Pool(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("slots", c_int64), ("slot_stride", c_int64), ("dtype", c_uint32), ("reserved", c_uint32)]

    @classmethod
    def of(cls, t):
        return cls(t.data_ptr(), t.shape[0], t.stride(0), DTYPES[t.dtype])


_TOKENS = [("size", c_uint64), ("device", Device), ("tokens", c_int64), ("key_heads", c_uint32), ("value_heads", c_uint32)]
_TOKENS += [(name, Tensor) for name in ("q", "k", "v", "g", "beta", "o")]


class PrefillArgs(ctypes.Structure):
    _fields_ = _TOKENS + [
        ("host_cu_seqlens", c_void_p), ("sequences", c_int64),
        ("host_chunk_indices", c_void_p), ("chunks", c_int64), ("host_chunk_offsets", c_void_p),
        ("initial", Pool), ("host_initial_slots", c_void_p), ("host_has_initial", c_void_p),
        ("last", Pool), ("host_last_slots", c_void_p), ("in_place", c_uint32),
        ("checkpoint_every", c_uint32), ("checkpoints", Pool),
        ("scale", c_float), ("l2norm", c_uint32), ("window", c_uint32), ("design", c_uint32),
        ("workspace", c_void_p), ("workspace_bytes", c_uint64),
    ]  # fmt: skip


class DecodeArgs(ctypes.Structure):
    _fields_ = _TOKENS + [
        ("cu_seqlens", c_void_p), ("slots", c_void_p), ("sequences", c_int64), ("pool", Pool), ("scale", c_float), ("l2norm", c_uint32),
    ]  # fmt: skip


class Path(ctypes.Structure):
    """Which path a call took."""

    _fields_ = [("windows", c_uint64), ("chunks", c_uint64), ("launches", c_uint64), ("table_bytes", c_uint64),
                ("route", c_char * 32), ("arch", c_char * 32), ("why", c_char * 192)]  # fmt: skip


class Terrace:
    def __init__(self, path=None, device="cuda", threads=0):
        self.device, self.threads = device, threads
        default = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../target/release/libterrace_kernels.so")
        lib = ctypes.CDLL(path or os.environ.get("TERRACE_KERNELS") or default)
        lib.terrace_gdn_last_error.restype = c_char_p
        lib.terrace_gdn_workspace_bytes.argtypes = [POINTER(Device), c_uint32, c_uint32, c_uint32, c_uint32, POINTER(c_uint64)]
        lib.terrace_gdn_prefill.argtypes = [POINTER(PrefillArgs), POINTER(Path)]
        lib.terrace_gdn_decode.argtypes = [POINTER(DecodeArgs), POINTER(Path)]
        self.lib, self.path = lib, Path()
        # The header has 0 for the default window; tables should say which it is. On the CPU the workspace is the same for all of them.
        self.default_window = 0
        if device == "cuda":
            whole = self.workspace_bytes(1, 1, 0)
            self.default_window = next(w for w in range(64, 4097, 64) if self.workspace_bytes(1, 1, w) == whole)

    def _device(self):
        stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else None
        return Device(KINDS[self.device], 0, stream, self.threads)

    def _done(self, status):
        if status:
            raise TerraceError(self.lib.terrace_gdn_last_error().decode())

    def workspace_bytes(self, key_heads, value_heads, window, design="fused"):
        size = c_uint64()
        device = Device(KINDS[self.device], 0, None, self.threads)
        self._done(self.lib.terrace_gdn_workspace_bytes(byref(device), key_heads, value_heads, window, DESIGNS[design], byref(size)))
        return size.value

    def workspace(self, size):
        """Uninitialised bytes, aligned as the library wants them."""
        whole = torch.empty(size + ALIGN, dtype=torch.uint8, device=self.device)
        skip = -whole.data_ptr() % ALIGN
        return whole[skip : skip + size]

    def prefill(self, x, o, last, workspace, window, design="fused"):
        """The call that writes `o` and the states `last` from `reference.Inputs`; `self.path` then says what ran."""
        cu = (c_int64 * len(x.cu))(*x.cu)
        a = PrefillArgs(sizeof(PrefillArgs), self._device(), x.v.shape[0], x.k.shape[1], x.v.shape[1])
        for name, tensor in (("q", x.q), ("k", x.k), ("v", x.v), ("g", x.g), ("beta", x.beta), ("o", o)):
            setattr(a, name, Tensor.of(tensor))
        a.host_cu_seqlens, a.sequences = ctypes.addressof(cu), len(x.cu) - 1
        a.initial, a.last = Pool.of(x.h0), Pool.of(last)
        a.scale, a.window, a.design = x.scale, window, DESIGNS[design]
        a.workspace, a.workspace_bytes = workspace.data_ptr(), workspace.numel()
        return self._call(self.lib.terrace_gdn_prefill, a, (x, o, last, workspace, cu))

    def decode(self, x, o, pool, slots):
        """The call that writes `o` and advances the states in the int32 `slots` of `pool`."""
        a = DecodeArgs(sizeof(DecodeArgs), self._device(), x.v.shape[0], x.k.shape[1], x.v.shape[1])
        for name, tensor in (("q", x.q), ("k", x.k), ("v", x.v), ("g", x.g), ("beta", x.beta), ("o", o)):
            setattr(a, name, Tensor.of(tensor))
        cu = x.bounds.int32
        a.cu_seqlens, a.slots, a.sequences = cu.data_ptr(), slots.data_ptr(), len(x.cu) - 1
        a.pool, a.scale = Pool.of(pool), x.scale
        return self._call(self.lib.terrace_gdn_decode, a, (x, o, pool, slots, cu))

    def _call(self, function, args, alive):
        def call(_alive=alive):
            if self.device == "cuda":  # inside a graph's capture it is another
                args.device.stream = torch.cuda.current_stream().cuda_stream
            self._done(function(byref(args), byref(self.path)))

        return call
