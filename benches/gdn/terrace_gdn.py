"""The C interface for the scripts here: argument structs filled once, so that what is timed is the library.

`prefill` and `decode` check nothing and run nothing; they return the call. The structs are those of the Python package, read from its
file: the scripts run with a libterrace_kernels.so alone, too. A status other than 0 raises `GdnError` with the library's sentence.
"""

import ctypes
import importlib.util
import os
import sys
from ctypes import byref, c_int64, sizeof

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
DTYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
KINDS = {"cpu": 1, "cuda": 2}
DESIGNS = {"fused": 0, "staged": 1}
ALIGN = 256


def _mirror():
    """allocator/python/terrace/gdn/library.py, which needs nothing of its package."""
    path = os.path.join(HERE, "../../allocator/python/terrace/gdn/library.py")
    spec = importlib.util.spec_from_file_location("terrace_gdn_library", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


library = _mirror()


def tensor(t):
    return library.Tensor(t.data_ptr(), t.stride(0), t.stride(1), DTYPES[t.dtype])


def pool(t):
    return library.Pool(t.data_ptr(), t.shape[0], t.stride(0), DTYPES[t.dtype])


class Terrace:
    def __init__(self, path=None, device="cuda", threads=0):
        self.device, self.threads = device, threads
        default = os.path.join(HERE, "../../target/release/libterrace_kernels.so")
        self.lib = library.Library(path or os.environ.get("TERRACE_KERNELS") or default)
        self.path = library.Path()
        # The header has 0 for the default window; tables should say which it is. On the CPU the workspace is the same for all of them.
        self.default_window = 0
        if device == "cuda":
            whole = self.workspace_bytes(1, 1, 0)
            self.default_window = next(w for w in range(64, 4097, 64) if self.workspace_bytes(1, 1, w) == whole)

    def _device(self):
        stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else None
        return library.Device(KINDS[self.device], 0, stream, self.threads)

    def workspace_bytes(self, key_heads, value_heads, window, design="fused"):
        return self.lib.workspace_bytes(KINDS[self.device], key_heads, value_heads, self.threads, window, DESIGNS[design])

    def workspace(self, size):
        """Uninitialised bytes, aligned as the library wants them."""
        whole = torch.empty(size + ALIGN, dtype=torch.uint8, device=self.device)
        skip = -whole.data_ptr() % ALIGN
        return whole[skip : skip + size]

    def prefill(self, x, o, last, workspace, window, design="fused"):
        """The call that writes `o` and the states `last` from `reference.Inputs`; `self.path` then says what ran."""
        cu = (c_int64 * len(x.cu))(*x.cu)
        a = library.PrefillArgs(sizeof(library.PrefillArgs), self._device(), x.v.shape[0], x.k.shape[1], x.v.shape[1])
        for name, t in (("q", x.q), ("k", x.k), ("v", x.v), ("g", x.g), ("beta", x.beta), ("o", o)):
            setattr(a, name, tensor(t))
        a.host_cu_seqlens, a.sequences = ctypes.addressof(cu), len(x.cu) - 1
        a.initial, a.last = pool(x.h0), pool(last)
        a.scale, a.window, a.design = x.scale, window, DESIGNS[design]
        a.workspace, a.workspace_bytes = workspace.data_ptr(), workspace.numel()
        return self._call(self.lib.raw.terrace_gdn_prefill, a, (x, o, last, workspace, cu))

    def decode(self, x, o, states, slots):
        """The call that writes `o` and advances the states in the int32 `slots` of the pool `states`."""
        a = library.DecodeArgs(sizeof(library.DecodeArgs), self._device(), x.v.shape[0], x.k.shape[1], x.v.shape[1])
        for name, t in (("q", x.q), ("k", x.k), ("v", x.v), ("g", x.g), ("beta", x.beta), ("o", o)):
            setattr(a, name, tensor(t))
        cu = x.bounds.int32
        a.cu_seqlens, a.slots, a.sequences = cu.data_ptr(), slots.data_ptr(), len(x.cu) - 1
        a.pool, a.scale = pool(states), x.scale
        return self._call(self.lib.raw.terrace_gdn_decode, a, (x, o, states, slots, cu))

    def _call(self, function, args, alive):
        def call(_alive=alive):
            if self.device == "cuda":  # inside a graph's capture it is another
                args.device.stream = torch.cuda.current_stream().cuda_stream
            self.lib.done(function(byref(args), byref(self.path)))

        return call
