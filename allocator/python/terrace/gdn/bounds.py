"""Where packed sequences begin and end, on the host: given there, or read from the device once for each tensor.

A forward passes one `cu_seqlens` to all of its layers. The kernels need it on the host; reading it from the device waits for
everything that is queued, so it is done at the first layer and remembered as long as that tensor lives and is not written:

    layer 0   cu_seqlens (cuda, version 3)   not known: read, waits
    layer 1   the same tensor, version 3     known
    ...       the same tensor, version 4     written since: read again

A tensor made under `torch.inference_mode()` has no version; it is remembered by what it is, as FLA remembers it. Who writes such
a tensor anew, in place, passes `cu_seqlens_cpu` too.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_lock = threading.Lock()


class Bounds:
    """The borders of N sequences on the host: N + 1 numbers, the first 0."""

    def __init__(self, host: torch.Tensor):
        """`host`: int64 [N + 1], contiguous, on the CPU."""
        self.host = host
        self.sequences = host.numel() - 1

    def longest(self) -> int:
        """Tokens of the longest sequence; 0 if there is none."""
        return int(self.host.diff().max()) if self.sequences else 0

    def chunks(self) -> int:
        """Chunks of 64 tokens of all sequences."""
        return int((self.host.diff() + 63).div(64, rounding_mode="floor").sum())


@functools.lru_cache(maxsize=64)
def equal(batch: int, tokens: int) -> Bounds:
    """The bounds of `batch` sequences of as many tokens each."""
    return Bounds(torch.arange(batch + 1, dtype=torch.int64) * tokens)


def packed(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None) -> Bounds:
    """The bounds that `cu_seqlens` [N + 1] says; read from `cu_seqlens_cpu` if that is given, which must say the same."""
    _check("cu_seqlens", cu_seqlens)
    if cu_seqlens_cpu is not None:
        _check("cu_seqlens_cpu", cu_seqlens_cpu)
        if cu_seqlens_cpu.device.type != "cpu":
            raise ValueError(f"cu_seqlens_cpu is on {cu_seqlens_cpu.device}; pass it on the CPU, or leave it out")
        if cu_seqlens_cpu.numel() != cu_seqlens.numel():
            raise ValueError(
                f"cu_seqlens_cpu has {cu_seqlens_cpu.numel()} entries and cu_seqlens has {cu_seqlens.numel()}; both are the same numbers"
            )
        return Bounds(_int64(cu_seqlens_cpu))
    state = _state(cu_seqlens)
    with _lock:
        known: tuple[tuple[object, ...], Bounds] | None = _known.get(cu_seqlens)
    if known is not None and known[0] == state:
        return known[1]
    if capturing(cu_seqlens.device):
        raise RuntimeError(
            "cu_seqlens is not known on the host, and a graph's capture cannot wait to read it: pass cu_seqlens_cpu, "
            "or call once with this very tensor before the capture"
        )
    bounds = Bounds(_int64(cu_seqlens))
    with _lock:
        _known[cu_seqlens] = (state, bounds)
    return bounds


_steps: dict[tuple[torch.device, int, int], torch.Tensor] = {}


def steps(count: int, stride: int, device: torch.device) -> torch.Tensor:
    """0, stride, 2 stride, ..., `count` numbers in int32 on a device: the borders of equal sequences, or slots.

    Each is made once and copied from the host, which waits for that copy, so that every stream may read it. It is never dropped:
    a captured graph reads it at every replay. What is made inside a capture belongs to that graph, and has its numbers only once
    the graph runs, so it is not kept."""
    key = (device, count, stride)
    found = _steps.get(key)
    if found is None:
        if capturing(device):
            return torch.arange(count, dtype=torch.int32, device=device) * stride
        found = (torch.arange(count, dtype=torch.int32) * stride).to(device)
        with _lock:
            found = _steps.setdefault(key, found)
    return found


def capturing(device: torch.device) -> bool:
    """Whether the current stream of that device is in a graph's capture."""
    return device.type == "cuda" and bool(torch.cuda.is_current_stream_capturing())


def _state(tensor: torch.Tensor) -> tuple[object, ...]:
    version = None if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr(), tensor.shape, tensor.stride()


def _int64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.int64).contiguous()


def _check(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != 1 or tensor.numel() < 1:
        raise ValueError(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; expected int32 or int64 of shape [sequences + 1]")
