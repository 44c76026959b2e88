"""Puts the kernels into a transformers model of the Qwen3.5 or Qwen3-Next family, and takes them out again.

    with terrace.gdn.patch(model) as patch:
        print(patch.replaced)
        model.generate(...)

Transformers calls the rule in one of two ways: through names of the modeling module, which all models of that architecture in
the process share (5.x), or through attributes of each layer (before). Whichever a layer has is replaced. With windows the forwards
of the model's own modules are replaced too; see `windows`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from terrace.gdn import windows

Rule = Callable[..., Any]
_MARK = "_terrace_gdn"
# How each of FLA's two functions is called in a modeling module, and on a layer.
_GLOBALS = {"chunk": "torch_chunk_gated_delta_rule", "recurrent": "torch_recurrent_gated_delta_rule"}
_ATTRIBUTES = {"chunk": "chunk_gated_delta_rule", "recurrent": "recurrent_gated_delta_rule"}


class Patch:
    """What [`patch`] replaced. [`restore`](Patch.restore), or the end of a `with` block, puts it back."""

    def __init__(self) -> None:
        self.replaced: list[str] = []
        """The names that now call this project's kernels, and the forwards that now run in windows."""
        self._undo: list[tuple[object, str, Rule, Rule | None]] = []

    def restore(self) -> None:
        """Puts back what was replaced, unless somebody else has replaced it since. Once is enough."""
        while self._undo:
            owner, name, ours, theirs = self._undo.pop()
            if getattr(owner, name) is not ours:
                continue
            if theirs is None:
                delattr(owner, name)
            else:
                setattr(owner, name, theirs)
        self.replaced.clear()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def _replace(self, owner: object, name: str, ours: Rule, shown: str) -> None:
        if getattr(getattr(owner, name), _MARK, False):
            return
        theirs = vars(owner).get(name)  # None: it is the class's, and shows again when ours is gone
        setattr(owner, name, ours)
        self._undo.append((owner, name, ours, theirs))
        self.replaced.append(shown)


def patch(model: torch.nn.Module, *, window: int | None = None) -> Patch:
    """Replaces the gated delta rule in `model`'s layers by this project's kernels.

    With transformers 5 the replaced names are those of the modeling module: every model of the same architecture in this process
    is served too. Patching a patched model replaces nothing more.

    Args:
        model: of the Qwen3.5 or Qwen3-Next family, dense or sparse.
        window: if given, forwards of more tokens run the decoder's Gated DeltaNet layers, MLPs, norms and experts in windows of so many
            tokens of each row, so that a long prompt takes a few tensors of the hidden size for all tokens and the rest for one
            window. A multiple of 64, such as 4096. Attention and routers run as they did, and so do decodes and short prompts. Where
            a call cannot go in windows, such as one with packed sequences, its Gated DeltaNet layers run without, and a warning says
            why, once. Only this model is changed by it. Needs transformers 5.17 or newer.

    Raises:
        ValueError: no layer of the model calls the rule in a way that is known, or its heads are not of 128 elements, or the window
            cannot be served; nothing is replaced then.
    """
    layers = {name: layer for name, layer in model.named_modules() if _is_gated_delta_net(layer)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no gated delta net layer that is known: expected a Qwen3.5 or Qwen3-Next model")
    for name, layer in layers.items():
        for which in ("head_k_dim", "head_v_dim"):
            if getattr(layer, which, 128) != 128:
                raise ValueError(f"{name}.{which} is {getattr(layer, which)}; the kernels serve heads of 128 elements only")
    in_windows = {} if window is None else windows.forwards(model, layers, window)
    done = Patch()
    for name, layer in layers.items():
        for which, ours in _ours().items():
            if hasattr(layer, _ATTRIBUTES[which]):
                done._replace(layer, _ATTRIBUTES[which], ours, f"{name}.{_ATTRIBUTES[which]}")
            else:
                module = sys.modules[type(layer).__module__]
                done._replace(module, _GLOBALS[which], ours, f"{module.__name__}.{_GLOBALS[which]}")
    for name, (part, forward) in in_windows.items():
        done._replace(part, "forward", forward, f"{name}.forward" if name else "forward")
    return done


def _is_gated_delta_net(layer: torch.nn.Module) -> bool:
    if all(hasattr(layer, name) for name in _ATTRIBUTES.values()):
        return True
    module = sys.modules.get(type(layer).__module__)
    # A subclass elsewhere calls the names of its parent's module; only a class that is defined beside them is known to use them.
    return type(layer).__name__.endswith("GatedDeltaNet") and all(hasattr(module, name) for name in _GLOBALS.values())


def _ours() -> dict[str, Rule]:
    """The two functions as transformers calls them: with what else a forward passes along, which FLA's are not given either."""
    from terrace import gdn

    return {
        "chunk": _dropping(gdn.chunk_gated_delta_rule),
        "recurrent": _dropping(gdn.fused_recurrent_gated_delta_rule),
    }


def _dropping(function: Rule) -> Rule:
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name in known})

    called.__name__ = function.__name__
    setattr(called, _MARK, True)
    return called
