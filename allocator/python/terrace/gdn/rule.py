"""The gated delta rule with FLA's two signatures, on this project's kernels.

    q, k [B, T, H, 128]   v [B, T, HV, 128]   g, beta [B, T, HV]   state [N, HV, 128 (K), 128 (V)], or [.., V, K] with state_v_first

    S <- exp(g) S;   S <- S + beta k (v - k S);   o = scale q S             for each value head, with key head h // (HV / H)

Prefill works in windows, so its workspace is the same at every number of tokens. It is an ordinary tensor of the current allocator,
freed in stream order when the call returns: an installed arena records and plans it like any other. Nothing else is allocated but
the results, and copies of what the kernels cannot read where it lies (see `_rows`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TypeVar, Union

import torch

from terrace.gdn import bounds, library
from terrace.gdn.library import Device, Pool, Tensor

HEAD_DIM = 128
WORKSPACE_ALIGN = 256
MOST_DECODED = 8
"""Tokens of a sequence that one decode step takes; more are a prefill."""

_DTYPES = {torch.bfloat16: library.BF16, torch.float16: library.FP16, torch.float32: library.FP32}
Args = TypeVar("Args", library.PrefillArgs, library.DecodeArgs)
Result = tuple[torch.Tensor, Union[torch.Tensor, None]]

_KINDS = {"cpu": library.CPU, "cuda": library.CUDA}


@dataclasses.dataclass(frozen=True)
class How:
    """What both functions are told beside the tensors of their tokens."""

    scale: float | None
    l2norm: bool
    state: torch.Tensor | None
    want_state: bool
    v_first: bool


def chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    how: How,
    *,
    packed: bounds.Bounds | None,
    chunk_indices: torch.Tensor | None,
) -> Result:
    """`o` [B, T, HV, 128] and the final state, or None. `packed` is the bounds of one packed batch row, or None for B equal ones;
    tokens after the last sequence are padding, whose outputs are 0."""
    call = _Call(q, k, v, g, beta, how)
    at = packed or bounds.equal(call.batch, call.tokens_each)
    call.expect_states(how.state, at.sequences)
    args = call.fill(library.PrefillArgs())
    args.host_cu_seqlens, args.sequences = at.host.data_ptr(), at.sequences
    if chunk_indices is not None:
        indices = _chunk_indices(chunk_indices, at)
        if indices is not None:
            args.host_chunk_indices, args.chunks = indices.data_ptr(), indices.shape[0]
    if how.state is not None:
        # Read where it lies if it is V-first there already.
        initial = _pool_ready(how.state if how.v_first else how.state.transpose(-1, -2), call.align)
        args.initial = _pool(initial)
    last = None
    if how.want_state:
        last = call.new_states(at.sequences)
        args.last = _pool(last)
    size = library.load().workspace_bytes(call.device.kind, call.key_heads, call.value_heads, call.device.threads)
    workspace = torch.empty(size + WORKSPACE_ALIGN, dtype=torch.uint8, device=q.device)
    skip = -workspace.data_ptr() % WORKSPACE_ALIGN
    args.workspace, args.workspace_bytes = workspace.data_ptr() + skip, size
    library.load().prefill(args)
    if packed is not None:
        call.o[0, int(at.host[-1]) :].zero_()
    return call.o, None if last is None else (last if how.v_first else last.transpose(-1, -2))


def recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    how: How,
    *,
    cu_seqlens: torch.Tensor | None,
) -> Result:
    """The same by the decode step, for at most `MOST_DECODED` tokens of each sequence. It reads `cu_seqlens` on the device, so that a
    captured graph can be replayed with others."""
    call = _Call(q, k, v, g, beta, how)
    if cu_seqlens is None:
        sequences = call.batch
        cu = bounds.steps(sequences + 1, call.tokens_each, q.device)
    else:
        sequences = cu_seqlens.numel() - 1
        cu = cu_seqlens.to(q.device, torch.int32).contiguous()
        call.o.zero_()
    call.expect_states(how.state, sequences)
    # The step works in place; the caller's state stays as it was, as with FLA.
    pool = call.new_states(sequences)
    if how.state is None:
        pool.zero_()
    else:
        pool.copy_(how.state if how.v_first else how.state.transpose(-1, -2))
    args = call.fill(library.DecodeArgs())
    slots = bounds.steps(sequences, 1, q.device)
    args.cu_seqlens, args.slots, args.sequences = cu.data_ptr(), slots.data_ptr(), sequences
    args.pool = _pool(pool)
    library.load().decode(args)
    return call.o, (pool if how.v_first else pool.transpose(-1, -2)) if how.want_state else None


class _Call:
    """What both calls have in common: tensors as the kernels read them, the output, the device and its current stream."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        how: How,
    ) -> None:
        named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        _check(named)
        self.batch, self.tokens_each = v.shape[:2]
        self.key_heads, self.value_heads = k.shape[2], v.shape[2]
        self.how = how
        kind = q.device.type
        self.align = 16 if kind == "cuda" else q.element_size()
        if kind == "cuda":
            stream = torch.cuda.current_stream(q.device).cuda_stream
            self.device = Device(library.CUDA, q.device.index, stream)
        else:
            self.device = Device(library.CPU, 0, None, torch.get_num_threads())
        self.rows = {name: _rows(t, self.align) for name, t in named.items()}
        self.o = torch.empty(v.shape, dtype=v.dtype, device=v.device)

    def fill(self, args: Args) -> Args:
        """What both argument structs begin with, and the two numbers."""
        args.device, args.tokens = self.device, self.batch * self.tokens_each
        args.key_heads, args.value_heads = self.key_heads, self.value_heads
        for name, t in self.rows.items():
            setattr(args, name, _tensor(t))
        args.o = _tensor(self.o.flatten(0, 1))
        # A scale of 0 is the interface's default: only an output of zeros could mean it.
        args.scale, args.l2norm = HEAD_DIM**-0.5 if self.how.scale is None else self.how.scale, int(self.how.l2norm)
        return args

    def new_states(self, sequences: int) -> torch.Tensor:
        """Uninitialised states, V-first."""
        shape = (sequences, self.value_heads, HEAD_DIM, HEAD_DIM)
        return torch.empty(shape, dtype=torch.float32, device=self.o.device)

    def expect_states(self, state: torch.Tensor | None, sequences: int) -> None:
        if state is None:
            return
        expected = (sequences, self.value_heads, HEAD_DIM, HEAD_DIM)
        if tuple(state.shape) != expected or state.device != self.o.device or not state.is_floating_point():
            raise ValueError(
                f"initial_state is {state.dtype} of shape {tuple(state.shape)} on {state.device}; expected floating point of shape "
                f"{expected} on {self.o.device}: a state for each of the {sequences} sequences"
            )


def _check(named: dict[str, torch.Tensor]) -> None:
    q, k, v, g, beta = named.values()
    if q.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q is of shape {tuple(q.shape)} and v of {tuple(v.shape)}; expected [B, T, heads, {HEAD_DIM}]")
    batch, tokens, heads = v.shape[:3]
    key_heads = q.shape[2]
    expected = {
        "q": (batch, tokens, key_heads, HEAD_DIM),
        "k": (batch, tokens, key_heads, HEAD_DIM),
        "v": (batch, tokens, heads, HEAD_DIM),
        "g": (batch, tokens, heads),
        "beta": (batch, tokens, heads),
    }
    for name, t in named.items():
        if tuple(t.shape) != expected[name]:
            raise ValueError(
                f"{name} is of shape {tuple(t.shape)}; expected {expected[name]} beside v of {tuple(v.shape)}: heads of {HEAD_DIM} "
                f"elements, as many tokens, a g and a beta for each value head"
            )
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device} and q on {q.device}; expected one device")
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"v has {heads} heads and q has {key_heads}; expected a multiple, one key head for each group of value heads")
    kinds = (torch.bfloat16, torch.float16) if q.is_cuda else tuple(_DTYPES)
    for name in ("q", "k", "v"):
        if named[name].dtype != q.dtype or q.dtype not in kinds:
            served = ", ".join(map(str, kinds))
            raise TypeError(f"{name} is {named[name].dtype} and q is {q.dtype}; expected one of {served} for q, k and v")
    for name in ("g", "beta"):
        if named[name].dtype not in (torch.float32, q.dtype):
            raise TypeError(f"{name} is {named[name].dtype}; expected torch.float32 or the type of q, {q.dtype}")
    if q.device.type not in _KINDS:
        raise ValueError(f"q is on {q.device}; the kernels run on cuda and cpu")


def _rows(t: torch.Tensor, align: int) -> torch.Tensor:
    """`t` [B, T, heads(, 128)] as rows [B T, heads(, 128)] that the kernels can read, without a copy if it lies so already: batch
    rows one after another, a head's elements side by side, strides that the interface can say, rows at multiples of `align` bytes."""
    rows = t.flatten(0, 1) if t.shape[0] != 1 else t[0]
    return rows if _readable(rows, align) else rows.contiguous()


def _readable(rows: torch.Tensor, align: int) -> bool:
    size = rows.element_size()
    if rows.dim() == 2:  # g and beta: single elements, at their own alignment
        align = size
    elif rows.stride(2) != 1:
        return False
    # A stride of 0 would be read as "contiguous".
    apart = [stride for stride, n in zip(rows.stride()[:2], rows.shape[:2]) if n > 1]
    return rows.data_ptr() % align == 0 and all(stride > 0 and stride * size % align == 0 for stride in apart)


def _tensor(rows: torch.Tensor) -> Tensor:
    width = math.prod(rows.shape[2:])
    # The stride of a single token or head says nothing in PyTorch: give the one it would have.
    head = rows.stride(1) if rows.shape[1] > 1 else width
    token = rows.stride(0) if rows.shape[0] > 1 else rows.shape[1] * max(head, width)
    return Tensor(rows.data_ptr(), token, head, _DTYPES[rows.dtype])


def _pool_ready(states: torch.Tensor, align: int) -> torch.Tensor:
    """States [N, HV, V, K] as a pool of fp32 or bf16, without a copy if they lie so already."""
    if states.dtype not in (torch.float32, torch.bfloat16):
        states = states.float()
    inner = (HEAD_DIM * HEAD_DIM, HEAD_DIM, 1)
    strides = states.stride()
    dense = all(stride == want for stride, want, n in zip(strides[1:], inner, states.shape[1:]) if n > 1)
    apart = states.shape[0] <= 1 or strides[0] >= states.shape[1] * inner[0]
    aligned = states.data_ptr() % align == 0 and (states.shape[0] <= 1 or strides[0] * states.element_size() % align == 0)
    return states if dense and apart and aligned else states.contiguous()


def _pool(states: torch.Tensor) -> Pool:
    stride = states.stride(0) if states.shape[0] > 1 else states[0:1].numel()
    return Pool(states.data_ptr() or None, states.shape[0], stride, _DTYPES[states.dtype])


def _chunk_indices(given: torch.Tensor, at: bounds.Bounds) -> torch.Tensor | None:
    """Those on the host, int64, for the kernels to compare with what the bounds give; of those on a device only the shape can be
    compared without waiting for it."""
    chunks = at.chunks()
    if tuple(given.shape) != (chunks, 2):
        raise ValueError(f"chunk_indices is of shape {tuple(given.shape)}; expected {(chunks, 2)}: a row for each chunk of 64 tokens")
    return given.to(torch.int64).contiguous() if given.device.type == "cpu" else None
