"""Models whose every forward is a step, and the tag that tells their plans from another model's."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

from terrace.allocator import current
from terrace.errors import InstallError
from terrace.sizes import Key

Model = TypeVar("Model")
_MARK = "_terrace_unwrapped_forward"


def wrap(model: Model, key: Key | Callable[..., Key] = None) -> Model:
    """Makes each forward of a model, or each call of a function, a step of the installed allocator; returns it, or the function's stand-in.

    Args:
        model: A ``torch.nn.Module``, whose ``forward`` is replaced, so that hooks and ``generate`` stay as they are; or any callable.
        key: What each step is called: a value, or a function of the call's arguments. By default the class and the shape of
            ``input_ids``, of ``inputs_embeds``, or of the first tensor.

    Wrap what ``torch.compile`` returned rather than compile what is wrapped: a step is not traced.
    """
    current()
    forward = getattr(model, "forward", None)
    if forward is None:
        if not callable(model):
            raise TypeError(f"a {type(model).__name__} has no forward and cannot be called; wrap a module or a function")
        stepped: Model = _stepped(model, key, getattr(model, "__name__", type(model).__name__))
        return stepped
    if hasattr(model, _MARK):
        raise InstallError(f"this {type(model).__name__} is wrapped already; call terrace.unwrap(model) first")
    setattr(model, _MARK, forward)
    model.forward = _stepped(forward, key, type(model).__name__)  # type: ignore[attr-defined]
    return model


def unwrap(model: Model) -> Model:
    """Undoes :func:`wrap` on a module."""
    forward = getattr(model, _MARK, None)
    if forward is None:
        raise InstallError(f"this {type(model).__name__} is not wrapped")
    # The class has it: what wrap put on the instance goes.
    del model.forward  # type: ignore[attr-defined]
    delattr(model, _MARK)
    return model


def _stepped(call: Any, key: Key | Callable[..., Key], name: str) -> Any:
    @functools.wraps(call)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        if callable(key):
            called = key(*args, **kwargs)
        else:
            called = (name, *_shape(args, kwargs)) if key is None else key
        with current().step(called):
            return call(*args, **kwargs)

    return stepped


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    named = (kwargs.get(name) for name in ("input_ids", "inputs_embeds"))
    for value in (*(value for value in named if value is not None), *args, *kwargs.values()):
        shape = getattr(value, "shape", None)
        if isinstance(shape, tuple):
            return tuple(int(size) for size in shape)
    return ()


def tag_of(model: Any, *more: object) -> str:
    """A text that is the same for models that ask for the same memory: class, and a hash of every parameter's name, shape and type.

    ``more`` is whatever else changes what a forward asks for, such as the kernels in use.
    """
    told = hashlib.sha256()
    for name, parameter in model.named_parameters():
        told.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    for part in more:
        told.update(f"{part}\n".encode())
    return f"{type(model).__name__} {told.hexdigest()[:16]}"
