"""The parts of a transformers decoder in windows of tokens: what a part makes of each token is there for one window, never for all.

    for all T tokens     residual, a part's normed input, a part's output        [B, T, hidden] each
    for one window       projections, convolution, gates, fp32 copies, the MLP's inner rows, the experts' copies of tokens

A part's own forward is called for each window, and what it returns is written into one output. A Gated DeltaNet layer continues from
window to window as transformers continues a prompt that comes in pieces: through the two states of its cache, or, where the caller gave
no cache, through a stand-in that lives for the call. MLPs, norms and a sparse block's experts look at each token by itself. A sparse
block's router is left as it is, since its logits are an output of the model; so is attention, but for its norms of queries and keys.

Windows begin at multiples of their size, where the rule's chunks begin anyway. A last token alone goes with the window before it: a
layer that is called with one token takes it for a decode.
"""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

Forward = Callable[..., Any]
CHUNK = 64
"""Tokens of the rule's chunks."""

_SIZE = "_terrace_window"
_CACHES = ("cache", "cache_params", "past_key_values")  # by version
# Older ones restart the convolution, or the rule, at each piece of a prompt: 5.2 does. These were tested.
_OLDEST = (5, 17)
_CONTINUE = tuple(f"transformers.models.{name}." for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next"))


def forwards(model: torch.nn.Module, deltas: dict[str, torch.nn.Module], window: int) -> dict[str, tuple[torch.nn.Module, Forward]]:
    """{name: (module, its forward in windows of `window` tokens)} of all parts that can and do not yet; `deltas` are the Gated DeltaNet
    layers by name.

    Raises:
        ValueError: the window is no positive multiple of `CHUNK`, a layer is not known to continue from its cache, or a part runs in
            windows of another size already.
    """
    if not isinstance(window, int) or window <= 0 or window % CHUNK != 0:
        raise ValueError(f"window is {window!r}; pass a positive multiple of {CHUNK} tokens, such as 4096, or None for no windows")
    _expect_continuing(deltas)
    parts = {**deltas, **dict(_token_parts(model, deltas))}
    for name, part in parts.items():
        before = getattr(part.forward, _SIZE, window)
        if before != window:
            raise ValueError(f"{name} runs in windows of {before} tokens already; restore that patch before one of {window}")
    warned: set[str] = set()
    return {
        name: (part, _continuing(part, name, window, warned) if name in deltas else _by_token(part, window))
        for name, part in parts.items()
        if not hasattr(part.forward, _SIZE)
    }


def _expect_continuing(deltas: dict[str, torch.nn.Module]) -> None:
    if tuple(int(part) for part in _version().split(".")[:2]) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise ValueError(f"windows need transformers {oldest} or newer, and {_version()} is installed; leave window out")
    for name, layer in deltas.items():
        if not type(layer).__module__.startswith(_CONTINUE):
            raise ValueError(f"{name} is a {type(layer).__name__}, which is not known to continue from its cache; leave window out")


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def _token_parts(model: torch.nn.Module, deltas: dict[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of the decoder that compute each token by itself, by name."""
    modules = dict(model.named_modules())
    layers = {type(modules[name.rpartition(".")[0]]) for name in deltas if name}
    for name, module in modules.items():
        prefix = f"{name}." if name else ""
        children = dict(module.named_children())
        holds_layers = any(type(layer) in layers for child in children.values() for layer in child.children())
        if type(module) not in layers and not holds_layers:
            continue
        for child_name, child in children.items():
            if _is_norm(child) or _is_mlp(child):
                yield prefix + child_name, child
            elif hasattr(child, "q_proj") or (hasattr(child, "experts") and hasattr(child, "gate")):
                for part_name, part in child.named_children():
                    if _is_norm(part) or _is_mlp(part) or type(part).__name__.endswith("Experts"):
                        yield f"{prefix}{child_name}.{part_name}", part


def _is_norm(part: torch.nn.Module) -> bool:
    return type(part).__name__.endswith("RMSNorm")


def _is_mlp(part: torch.nn.Module) -> bool:
    return {name for name, _ in part.named_children()} - {"act_fn"} == {"gate_proj", "up_proj", "down_proj"}


def _by_token(part: torch.nn.Module, window: int) -> Forward:
    """`part`'s forward for tensors [T, n], [B, T, n] or, of attention's norms, [B, T, heads, n], without their names. Only the last
    dimension is looked at as a whole, so the windows may be of any other."""
    inner = _unbound(part)

    def forward(self: torch.nn.Module, *tensors: torch.Tensor, **named: Any) -> Any:
        if not tensors or named or tensors[0].dim() < 2:
            return inner(self, *tensors, **named)
        dim = min(1, tensors[0].dim() - 2)
        tokens = tensors[0].shape[dim]
        if tokens <= window + 1:
            return inner(self, *tensors)
        return _joined(tokens, window, dim, lambda begin, end: inner(self, *(t.narrow(dim, begin, end - begin) for t in tensors)))

    return _bound(forward, part, window)


def _continuing(layer: torch.nn.Module, name: str, window: int, warned: set[str]) -> Forward:
    """A Gated DeltaNet layer's forward for hidden states [B, T, hidden]. What is in `warned` was said before."""
    from transformers.cache_utils import Cache, LinearAttentionLayer

    inner = _unbound(layer)
    arguments = list(inspect.signature(layer.forward).parameters)[1:]
    cache_name = next((argument for argument in _CACHES if argument in arguments), None)
    if cache_name is None:
        raise ValueError(f"{name}.forward takes none of {', '.join(_CACHES)}, through which windows continue; leave window out")

    def forward(self: Any, hidden_states: torch.Tensor, *more: Any, **kwargs: Any) -> Any:
        tokens = hidden_states.shape[1]
        if tokens <= window + 1:
            return inner(self, hidden_states, *more, **kwargs)
        given = dict(zip(arguments, more)) | kwargs
        cache, mask = given.pop(cache_name, None), given.pop("attention_mask", None)
        why = _unserved(self, hidden_states, cache, mask, given)
        if why is not None:
            if why not in warned:
                warned.add(why)
                warnings.warn(f"a forward runs its Gated DeltaNet layers without windows, with more memory: {why}", stacklevel=2)
            return inner(self, hidden_states, *more, **kwargs)
        if cache is None:
            # A list as long as the model's, of which the layer looks at its own.
            cache = Cache(layers=[LinearAttentionLayer()] * (self.layer_idx + 1))

        def part(begin: int, end: int) -> Any:
            here = {**given, cache_name: cache, "attention_mask": None if mask is None else mask[:, begin:end]}
            return inner(self, hidden_states[:, begin:end], **here)

        return _joined(tokens, window, 1, part)

    return _bound(forward, layer, window)


def _unserved(layer: Any, hidden: torch.Tensor, cache: Any, mask: Any, more: dict[str, Any]) -> str | None:
    """Why a call cannot go in windows, or None."""
    from transformers.cache_utils import LinearAttentionLayer

    if cache is not None:
        layers = getattr(cache, "layers", ())
        states = layers[layer.layer_idx] if layer.layer_idx < len(layers) else None
        if not isinstance(states, LinearAttentionLayer):
            return f"its cache, a {type(cache).__name__}, holds no states that are known for them"
        if states.record_past:  # all that the convolution read is kept, and would be copied for each window
            return "its cache records the past"
    if mask is not None and mask.shape != hidden.shape[:2]:
        return "its attention mask is none of padding, [batch, tokens]"
    for name, value in more.items():
        if name in _CACHES and cache is None and value is not None:
            return f"it has {name}, which is not what these layers call their cache in transformers {_version()}"
        if isinstance(value, (list, tuple, dict)) or (isinstance(value, torch.Tensor) and value.dim() > 0):
            return f"it has {name}, which may say something of each token; sequences packed in one row can be rows of a batch instead"
    return None


def _joined(tokens: int, window: int, dim: int, part: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """The results of `part(begin, end)` for each window, one after the other in dimension `dim` of one tensor."""
    whole = None
    # Without the last token: it begins no window.
    starts = range(0, tokens - 1, window)
    for begin in starts:
        end = tokens if begin == starts[-1] else begin + window
        result = part(begin, end)
        if whole is None:
            shape = list(result.shape)
            shape[dim] = tokens
            whole = result.new_empty(shape)
        whole.narrow(dim, begin, end - begin).copy_(result)
        del result  # before the next window, and not after it
    assert whole is not None
    return whole


def _unbound(part: torch.nn.Module) -> Forward:
    """`part`'s forward as it is now, with the module as its first argument, so that a copy of the model runs its own weights."""
    own = vars(part).get("forward")
    if own is None:
        return type(part).forward
    return lambda _, *args, **kwargs: own(*args, **kwargs)


def _bound(forward: Forward, part: torch.nn.Module, window: int) -> Forward:
    setattr(forward, _SIZE, window)
    return types.MethodType(forward, part)
