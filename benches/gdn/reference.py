"""Inputs of the Gated DeltaNet comparisons and what they are judged by: the rule in float64.

`token_loop` is the definition, one token at a time. `chunked` is the same function 64 tokens at a time, fast enough for
60,000 tokens on a GPU; `self_check` holds it to the loop. Layouts are ours: q, k [T, Hk, 128]; v, o [T, Hv, 128]; g (natural
log decay, <= 0) and beta [T, Hv]; states V-first [N, Hv, V, K]; sequences packed, `cu` the N + 1 borders.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

DIM = 128
CHUNK = 64


@dataclass
class Bounds:
    """Where sequences begin and end: N + 1 borders, on the host and where the tensors are, in the types that callers want.

    Peers cache tables on the identity of such a tensor, so input sets of equal lengths share one of these."""

    host: torch.Tensor
    int64: torch.Tensor
    int32: torch.Tensor

    @classmethod
    def of(cls, cu, device):
        host = torch.tensor(cu, dtype=torch.int64)
        return cls(host, host.to(device), host.to(device, torch.int32))


@dataclass
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    h0: torch.Tensor  # [N, Hv, V, K] float32
    cu: list  # N + 1 borders
    bounds: Bounds
    scale: float = DIM**-0.5

    def tensors(self):
        return [self.q, self.k, self.v, self.g, self.beta, self.h0]

    def bytes(self):
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def sequence(self, n):
        """Sequence `n` alone, as if it were the whole call."""
        rows = slice(self.cu[n], self.cu[n + 1])
        return self.rows(rows, self.h0[n : n + 1])

    def rows(self, rows, h0):
        cut = [t[rows] for t in (self.q, self.k, self.v, self.g, self.beta)]
        cu = [0, cut[0].shape[0]]
        return replace(self, q=cut[0], k=cut[1], v=cut[2], g=cut[3], beta=cut[4], h0=h0, cu=cu,
                       bounds=Bounds.of(cu, self.q.device))


def make(lengths, key_heads, value_heads, seed, gates="mixed", keys="random", dtype=torch.bfloat16, device="cuda"):
    """Random inputs; q and k are normalised before they are rounded, so that no implementation has to.

    gates: `mixed` g = -A softplus(0.5 randn + 1), A in [0, 16] per head, first head 0, last 16; `weak` A = 0.02, a state that
    remembers; `none` g = 0. keys: `random`, or `correlated` (a common direction and 0.3 of noise).
    """
    gen = torch.Generator(device).manual_seed(seed)
    tokens = sum(lengths)

    def randn(*shape):
        return torch.randn(*shape, generator=gen, device=device)

    def unit(common):
        x = randn(tokens, key_heads, DIM)
        x = 0.3 * x + randn(1, key_heads, DIM) if common else x
        return F.normalize(x, dim=-1).to(dtype)

    a = 16 * torch.rand(value_heads, generator=gen, device=device)
    a[0], a[-1] = 0, 16
    a = {"mixed": a, "weak": torch.full_like(a, 0.02), "none": torch.zeros_like(a)}[gates]
    cu = [0]
    for length in lengths:
        cu.append(cu[-1] + length)
    return Inputs(
        q=unit(False),
        k=unit(keys == "correlated"),
        v=randn(tokens, value_heads, DIM).to(dtype),
        g=-a * F.softplus(0.5 * randn(tokens, value_heads) + 1),
        beta=randn(tokens, value_heads).sigmoid(),
        h0=randn(len(lengths), value_heads, DIM, DIM),
        cu=cu,
        bounds=Bounds.of(cu, device),
    )


def _heads_first(x, n):
    """One sequence's tensors as float64 [Hv, T, ..], each key head repeated for the value heads that share it."""
    s = x.sequence(n)
    group = s.v.shape[1] // s.k.shape[1]
    q, k = (t.double().repeat_interleave(group, 1).transpose(0, 1) for t in (s.q, s.k))
    return q, k, s.v.double().transpose(0, 1), s.g.double().T, s.beta.double().T


def token_loop(x):
    """o [T, Hv, V] and the last states [N, Hv, V, K], float64: decay, then error, then write, then read."""
    o = torch.empty(x.v.shape, dtype=torch.float64, device=x.v.device)
    ht = x.h0.double().clone()
    for n in range(len(x.cu) - 1):
        q, k, v, g, beta = _heads_first(x, n)
        s = ht[n]
        for t in range(v.shape[1]):
            s = s * g[:, t, None, None].exp()
            d = beta[:, t, None] * (v[:, t] - torch.einsum("hvk,hk->hv", s, k[:, t]))
            s = s + torch.einsum("hv,hk->hvk", d, k[:, t])
            o[x.cu[n] + t] = x.scale * torch.einsum("hvk,hk->hv", s, q[:, t])
        ht[n] = s
    return o, ht


def chunked(x):
    """`token_loop` in chunks of 64: (I + L) d = beta (v - e^G k S), the rest is matrix products."""
    o = torch.empty(x.v.shape, dtype=torch.float64, device=x.v.device)
    ht = x.h0.double().clone()
    for n in range(len(x.cu) - 1):
        q, k, v, g, beta = _heads_first(x, n)
        s = ht[n].transpose(1, 2)  # [Hv, K, V]
        for at in range(0, v.shape[1], CHUNK):
            part = slice(at, min(at + CHUNK, v.shape[1]))
            qc, kc, vc, bc = q[:, part], k[:, part], v[:, part], beta[:, part, None]
            total = g[:, part].cumsum(1)  # [Hv, m]: G
            decay = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
            grow, fade = total.exp()[..., None], (total[:, -1:] - total).exp()[..., None]
            system = (bc * (kc @ kc.mT) * decay).tril(-1)
            d = torch.linalg.solve_triangular(system, bc * (vc - grow * (kc @ s)), upper=False, unitriangular=True)
            out = grow * (qc @ s) + ((qc @ kc.mT) * decay) @ d
            o[x.cu[n] + at : x.cu[n] + at + vc.shape[1]] = (x.scale * out).transpose(0, 1)
            s = total[:, -1].exp()[:, None, None] * s + kc.mT @ (fade * d)
        ht[n] = s.transpose(1, 2)
    return o, ht


def error(reference, got):
    """RMS of the difference over RMS of the reference; NaN and infinities never pass."""
    got = got.double()
    if not torch.isfinite(got).all():
        return float("inf")
    return ((got - reference).square().mean().sqrt() / (reference.square().mean().sqrt() + 1e-8)).item()


def self_check(device):
    """The chunked reference against the token loop: ragged, empty and one-token sequences, every kind of gate."""
    for gates in ("mixed", "weak", "none"):
        x = make([65, 0, 1, 64, 130], 1, 3, seed=7, gates=gates, keys="correlated", device=device)
        for name, want, got in zip(("o", "ht"), token_loop(x), chunked(x)):
            e = error(want, got)
            assert e < 1e-11, f"the chunked float64 reference differs from the token loop: {name}, gates {gates}, {e:.1e}"
