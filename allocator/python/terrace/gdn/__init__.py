"""Gated DeltaNet on this project's kernels, with the signatures of FLA's `fla.ops.gated_delta_rule`: forward only, for inference.

    from terrace.gdn import chunk_gated_delta_rule
    o, state = chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)

or, for a transformers model of the Qwen3.5 or Qwen3-Next family, `terrace.gdn.patch(model)`, or `patch(model, window=4096)`: then what is
around the rule goes in windows of tokens too.

A prefill needs a workspace of the same size at every number of tokens (54 MiB for 16 / 48 heads), taken from PyTorch's current
allocator; FLA's grows with the prompt. Work is queued on the current stream. Nothing waits for the device, but for one read of
a `cu_seqlens` that is not known on the host, once for each tensor; see `bounds`.

Differences from FLA, each an error where it matters: no gradients; heads of 128 elements; bf16 and fp16 (on the CPU fp32 too); no
context parallelism; `allow_neg_eigval`, `gk` and `gv` are not served. Final states are fp32, as FLA's; without `state_v_first` they
are a transposed view of V-first memory: call `.contiguous()` where the memory's order matters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F

from terrace.gdn import bounds, library, rule
from terrace.gdn.library import GdnArgumentError, GdnError
from terrace.gdn.patching import Patch, patch

__all__ = [
    "GdnArgumentError",
    "GdnError",
    "Patch",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "patch",
    "prepare",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def _eager(function: Function) -> Function:
    """Called outside of the graphs of `torch.compile`, as FLA's are."""
    return cast("Function", torch.compiler.disable(function))


@_eager
def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: object | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A prefill.

    Args:
        q, k: `[B, T, H, 128]`, bf16 or fp16.
        v: `[B, T, HV, 128]` of the same type; HV is a multiple of H, and value head h uses key head `h // (HV / H)`.
        g: `[B, T, HV]`, fp32 or the type of q: the natural logarithm of the decay, at most 0.
        beta: `[B, T, HV]`, fp32 or the type of q, from 0 to 1.
        scale: of the outputs; `128 ** -0.5` if None.
        initial_state: `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`, for each of the N sequences. It is not written.
        output_final_state: whether to return the states after the last tokens.
        use_qk_l2norm_in_kernel: normalise q and k here, and round them to their type.
        use_beta_sigmoid_in_kernel: `beta` are logits.
        state_v_first: states are `[.., V, K]`, which costs no transposition.
        cu_seqlens: `[N + 1]`, int32 or int64: token bounds of N sequences packed in one batch row. None: B sequences of T tokens.
        cu_seqlens_cpu: the same numbers on the host. Without it, `cu_seqlens` is read from the device once for each tensor.
        chunk_indices: `[chunks, 2]`, computed here; given ones are compared: on the host each row, on a device the shape.
        kwargs: `chunk_size` (16, 32 or 64, which change no more than rounding in FLA: it is always 64 here), and with
            `use_gate_in_kernel` also `A_log` [HV] and `dt_bias` [HV]: then `g` is what comes before
            `-exp(A_log) softplus(g + dt_bias)`.

    Returns:
        `o` `[B, T, HV, 128]` of the type of q, and the final states `[N, HV, K, V]` (or V-first) in fp32, or None.

    Raises:
        ValueError, TypeError: an argument is not served; the text says what is expected.
        RuntimeError: gradients are asked for; or, in a graph's capture, `cu_seqlens` is not known on the host.
        GdnError: what the kernels refused (also a ValueError if an argument is wrong), or what the driver said.
    """
    state_v_first = _deprecated(kwargs, state_v_first)
    _served("chunk_gated_delta_rule", cp_context=cp_context, allow_neg_eigval=allow_neg_eigval or None)
    if kwargs.pop("chunk_size", 64) not in (16, 32, 64):
        raise ValueError("chunk_size is not one of 16, 32 and 64; leave it out")
    g, beta = _gates(g, beta, use_beta_sigmoid_in_kernel, kwargs)
    _refuse_unknown("chunk_gated_delta_rule", kwargs)
    _no_gradients(q, k, v, g, beta, initial_state)
    packed = None
    if cu_seqlens is not None:
        _one_row(q)
        packed = bounds.packed(cu_seqlens, cu_seqlens_cpu)
    how = rule.How(_scale(scale), use_qk_l2norm_in_kernel, initial_state, output_final_state, state_v_first)
    return rule.chunk(q, k, v, g, beta, how, packed=packed, chunk_indices=chunk_indices if packed is not None else None)


@_eager
def fused_recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    gv: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A decode step: the decode kernel for up to 8 tokens of each sequence, a prefill for more.

    Arguments are those of [`chunk_gated_delta_rule`]; `g` None is no decay, `beta` None is 1. With `cu_seqlens` and more than 8 tokens in
    all, the longest sequence decides, so `cu_seqlens` has to be known on the host (`cu_seqlens_cpu` is taken too); the decode
    kernel itself reads it on the device, so that a captured graph can be replayed with other bounds.
    """
    state_v_first = _deprecated(kwargs, state_v_first)
    _served("fused_recurrent_gated_delta_rule", gk=gk, gv=gv, allow_neg_eigval=allow_neg_eigval or None)
    if g is None:
        if use_gate_in_kernel:
            raise ValueError("g is None; with use_gate_in_kernel pass what comes before the gate")
        g = torch.zeros(v.shape[:3], dtype=torch.float32, device=v.device)
    if beta is None:
        beta = torch.ones(v.shape[:3], dtype=torch.float32, device=v.device)
    gate = {"use_gate_in_kernel": use_gate_in_kernel, "A_log": A_log, "dt_bias": dt_bias}
    g, beta = _gates(g, beta, use_beta_sigmoid_in_kernel, gate)
    cu_seqlens_cpu = kwargs.pop("cu_seqlens_cpu", None)
    _refuse_unknown("fused_recurrent_gated_delta_rule", kwargs)
    _no_gradients(q, k, v, g, beta, initial_state)
    packed, longest = None, v.shape[1]
    if cu_seqlens is not None:
        _one_row(q)
        if longest > rule.MOST_DECODED:
            packed = bounds.packed(cu_seqlens, cu_seqlens_cpu)
            longest = packed.longest()
    how = rule.How(_scale(scale), use_qk_l2norm_in_kernel, initial_state, output_final_state, state_v_first)
    if longest > rule.MOST_DECODED:
        return rule.chunk(q, k, v, g, beta, how, packed=packed, chunk_indices=None)
    return rule.recurrent(q, k, v, g, beta, how, cu_seqlens=cu_seqlens)


def prepare(dtype: torch.dtype = torch.bfloat16, device: torch.device | str | int | None = None) -> None:
    """Compiles and loads the kernels for one type of q, k and v, so that no later call does: before a graph's capture, or while
    weights load. `device` is the current CUDA device if None.

    Raises:
        GdnError: there is no driver, no such device, or no compiler and nothing compiled before; the text says which.
    """
    if dtype not in rule._DTYPES:
        raise TypeError(f"dtype is {dtype}; expected torch.bfloat16 or torch.float16")
    at = torch.device("cuda" if device is None else device)
    if at.type == "cpu":
        return
    ordinal = torch.cuda.current_device() if at.index is None else at.index
    library.load().prepare(library.Device(library.CUDA, ordinal, None), rule._DTYPES[dtype])


def _deprecated(kwargs: dict[str, Any], state_v_first: bool) -> bool:
    """`transpose_state_layout`, as `state_v_first` was called before."""
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError("state_v_first and transpose_state_layout are one thing; pass only state_v_first")
    warnings.warn("transpose_state_layout is called state_v_first now", DeprecationWarning, stacklevel=3)
    return bool(kwargs.pop("transpose_state_layout"))


def _served(function: str, **refused: object) -> None:
    for name, value in refused.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not served by terrace.gdn.{function}; call FLA's for it")


def _refuse_unknown(function: str, kwargs: dict[str, Any]) -> None:
    for name in kwargs:
        raise TypeError(f"{function}() has no argument {name!r}")


def _no_gradients(*tensors: torch.Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            "terrace.gdn computes no gradients, and an argument requires one: run under torch.inference_mode() or torch.no_grad(), "
            "or train with FLA's function"
        )


def _one_row(q: torch.Tensor) -> None:
    if q.shape[0] != 1:
        raise ValueError(f"q has {q.shape[0]} batch rows; with cu_seqlens all sequences are packed in one")


def _scale(scale: float | None) -> float | None:
    if scale == 0:
        raise ValueError("scale is 0, which would make every output 0; leave it out for 128 ** -0.5")
    return scale


def _gates(g: torch.Tensor, beta: torch.Tensor, beta_is_logits: bool, kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """What FLA computes inside of its kernels if asked to: gates from A_log and dt_bias, and beta from logits, in fp32."""
    a_log, dt_bias = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    if kwargs.pop("use_gate_in_kernel", False):
        if a_log is None:
            raise ValueError("A_log is None; use_gate_in_kernel needs it")
        g = g.float() if dt_bias is None else g.float() + dt_bias
        g = -a_log.float().exp() * F.softplus(g)
    return g, beta.float().sigmoid() if beta_is_logits else beta
