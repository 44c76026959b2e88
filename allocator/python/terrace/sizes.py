"""Sizes and step keys as people write them, checked and made plain."""

from __future__ import annotations

import enum
import re
from typing import Union

Budget = Union[int, float, str]
"""Bytes; or a text such as ``"20GiB"``; or a share of the card's memory, such as ``0.9``."""

Key = Union[str, bytes, int, float, bool, None, enum.Enum, "tuple[Key, ...]"]
"""What a kind of forward is called: texts, numbers, enumerations, and tuples of them."""

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def bytes_of(budget: Budget, total: int | None) -> int:
    """A budget in bytes; a share is of ``total``, the bytes of the card."""
    wrong = ValueError(f"budget is {budget!r}; give bytes, a text such as '20GiB' or '512MiB', or a share of the card such as 0.9")
    if isinstance(budget, bool):
        raise wrong
    if isinstance(budget, float):
        if not 0.0 < budget <= 1.0:
            raise wrong
        if total is None:
            raise ValueError(f"budget is the share {budget}, but this memory has no size; give bytes or a text such as '20GiB'")
        return int(total * budget)
    if isinstance(budget, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", budget)
        if not found or found[2] not in _UNITS:
            raise wrong
        budget = int(float(found[1]) * _UNITS[found[2]]) if "." in found[1] else int(found[1]) * _UNITS[found[2]]
    if not isinstance(budget, int) or budget <= 0:
        raise wrong
    if budget >= 1 << 63:
        raise wrong
    return budget


def spelled(size: int) -> str:
    """Bytes for a person: ``20.00 GiB (21474836480 bytes)``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.2f} {unit} ({size} bytes)"
    return f"{size} bytes"


def key_bytes(key: Key) -> bytes:
    """A step key as the bytes that the allocator compares, the same in every process.

    A text stands for itself, everything else for its ``repr``. A text and a value that read alike are one key: harmless, since a step
    that differs from its plan is served all the same.
    """
    hint = "use a text, a number, or a tuple of them, such as ('prefill', 4128)"
    if isinstance(key, bytes):
        try:
            key = key.decode()
        except UnicodeDecodeError:
            raise TypeError(f"step key {key!r} is not printable: {hint}") from None
    if isinstance(key, str):
        if not key or not key.isprintable():
            raise ValueError(f"step key {key!r} is not printable: {hint}")
        return key.encode()
    return _spell(key, key, hint).encode()


def _spell(part: object, key: object, hint: str) -> str:
    if isinstance(part, enum.Enum):
        return f"{type(part).__name__}.{part.name}"
    if part is None or isinstance(part, bool):
        return repr(part)
    # Classes of the caller's own may spell themselves otherwise.
    if isinstance(part, int):
        return int.__repr__(part)
    if isinstance(part, float):
        return float.__repr__(part)
    if isinstance(part, str):
        return str.__repr__(part)
    if isinstance(part, tuple):
        inner = ", ".join(_spell(item, key, hint) for item in part)
        return f"({inner},)" if len(part) == 1 else f"({inner})"
    try:
        hash(part)
    except TypeError:
        raise TypeError(f"step key {key!r} is not hashable, because of its {type(part).__name__}: {hint}") from None
    raise TypeError(f"step key {key!r} holds a {type(part).__name__}, which does not read the same in each process: {hint}")
