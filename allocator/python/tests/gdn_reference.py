"""The gated delta rule in float64, one token at a time: the definition that results are held to, and inputs for it."""

import torch
import torch.nn.functional as F

DIM = 128


def make(batch, tokens, key_heads, value_heads, dtype=torch.bfloat16, device="cpu", seed=0, decay=0.1, unit=True):
    """(q, k, v, g, beta) with FLA's shapes; q and k of unit length before they are rounded, unless `unit` is False."""
    gen = torch.Generator(device).manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=gen, device=device)

    q, k = (randn(batch, tokens, key_heads, DIM) for _ in range(2))
    if unit:
        q, k = (F.normalize(t, dim=-1) for t in (q, k))
    v = randn(batch, tokens, value_heads, DIM)
    g = -decay * F.softplus(randn(batch, tokens, value_heads))
    beta = randn(batch, tokens, value_heads).sigmoid()
    return q.to(dtype), k.to(dtype), v.to(dtype), g, beta


def states(sequences, value_heads, device="cpu", seed=1):
    """Random K-first states, as FLA has them by default."""
    gen = torch.Generator(device).manual_seed(seed)
    return torch.randn(sequences, value_heads, DIM, DIM, generator=gen, device=device)


def rule(q, k, v, g, beta, state=None, cu=None, scale=DIM**-0.5, l2norm=False):
    """o [B, T, HV, V] and K-first states [N, HV, K, V], float64. `cu`: the borders of sequences packed in one row."""
    if l2norm:
        q, k = (_normalised(t) for t in (q, k))
    group = v.shape[2] // k.shape[2]
    q, k = (t.double().repeat_interleave(group, 2) for t in (q, k))
    v, g, beta = v.double(), g.double(), beta.double()
    o = torch.zeros_like(v)
    if cu is None:
        rows = [(n, slice(0, v.shape[1])) for n in range(v.shape[0])]
    else:
        rows = [(0, slice(begin, end)) for begin, end in zip(cu[:-1], cu[1:])]
    last = torch.zeros(len(rows), v.shape[2], DIM, DIM, dtype=torch.float64, device=v.device)
    if state is not None:
        last.copy_(state)
    for n, (row, span) in enumerate(rows):
        s = last[n]
        for t in range(span.start, span.stop):
            s = s * g[row, t, :, None, None].exp()
            d = beta[row, t, :, None] * (v[row, t] - torch.einsum("hkv,hk->hv", s, k[row, t]))
            s = s + torch.einsum("hk,hv->hkv", k[row, t], d)
            o[row, t] = scale * torch.einsum("hkv,hk->hv", s, q[row, t])
        last[n] = s
    return o, last


def _normalised(t):
    """As the kernels do: the sum of squares in fp32, the result rounded to the type."""
    x = t.float()
    return (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)).to(t.dtype)


def error(want, got):
    """RMS of the difference over RMS; infinite if anything is not finite."""
    got = got.double()
    if not torch.isfinite(got).all():
        return float("inf")
    return ((want - got).square().mean().sqrt() / want.square().mean().sqrt().clamp_min(1e-30)).item()
