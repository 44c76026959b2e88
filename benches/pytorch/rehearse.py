#!/usr/bin/env python3
"""`worker.py` on the imagined CUDA of allocator/python/tests/fake, where no kernel runs: what PyTorch asks of its allocator is real,
values are not. `run.py --rehearse` starts it.

Libraries that need a device to open a handle (cuBLAS, cuDNN, attention) are not called: their outputs are allocated and nothing else. FLA's
rule, which Triton cannot launch here, is imitated by the tensors that it allocates; Terrace's is called up to its library.
"""

import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as modeling
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import model
import worker

HANDLES = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "conv", "scaled_dot_product_attention", "linalg")


class Allocating(TorchDispatchMode):
    """Operators of those libraries by the shapes of what they return."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = op._schema.name.split("::")[1].lstrip("_")
        if not name.startswith(HANDLES):
            return op(*args, **kwargs)
        shapes = tree_map(lambda t: _like(t, "meta"), (args, kwargs))
        return tree_map(lambda t: _like(t, "cuda"), op(*shapes[0], **shapes[1]))


def _like(t, device):
    if not isinstance(t, torch.Tensor):
        return t
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)


def fla_prefill(q, k, v, g, beta, initial_state=None, output_final_state=False, **_):
    """GDN.md's table of what FLA 0.6.0 allocates, all of it alive at its last kernel."""

    def empty(*shape, dtype=v.dtype):
        return torch.empty(shape, dtype=dtype, device=v.device)

    batch, tokens, heads = v.shape[:3]
    normalised = [empty(*t.shape) for t in (q, k)]
    norms = [empty(*t.shape[:3], dtype=torch.float32) for t in (q, k)]
    gates, inverse = empty(*g.shape, dtype=torch.float32), empty(batch, tokens, heads, 64)
    w, u, v_new = (empty(*v.shape) for _ in range(3))
    states = empty(batch, -(-tokens // 64), heads, 128, 128)
    last = empty(batch, heads, 128, 128, dtype=torch.float32)
    o = empty(*v.shape)
    del normalised, norms, gates, inverse, w, u, v_new, states
    return o, last if output_final_state else None


def fla_decode(q, k, v, g, beta, initial_state=None, output_final_state=False, **_):
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    last = torch.empty(v.shape[0], v.shape[2], 128, 128, dtype=torch.float32, device=v.device)
    return o, last if output_final_state else None


def main():
    from terrace.gdn import library

    modeling.torch_chunk_gated_delta_rule, modeling.torch_recurrent_gated_delta_rule = fla_prefill, fla_decode
    library.Library.prefill = library.Library.decode = lambda self, args: library.Path()
    library.Library.prepare = lambda self, device, dtype: None
    forward = model.Model.forward

    def allocating(self, ids, cache):
        with Allocating():
            return forward(self, ids, cache)

    model.Model.forward = allocating
    worker.main()


if __name__ == "__main__":
    main()
