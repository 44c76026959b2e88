"""The allocator of this process: put in once, then told when a step begins and ends.

    install ---> Allocator ---> step(key): record, plan, replay        figures: stats, report, required_bytes
                                                                       files:   save, load

Everything that answers a request is native; what is here runs twice a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType, TracebackType
from typing import Any, Literal

from terrace import companion, pytorch, shim
from terrace._terrace import Device, TerraceError
from terrace.errors import InstallError
from terrace.sizes import Budget, Key, bytes_of, key_bytes, spelled

Mode = Literal["global", "pool"]
Backing = Literal["cuda", "host"]

_lock = threading.Lock()
_installed: Allocator | None = None


def current() -> Allocator:
    """The allocator of this process; an :class:`~terrace.InstallError` if none was installed."""
    if _installed is None:
        raise InstallError("terrace is not installed in this process; call terrace.install(budget=...) before CUDA starts")
    return _installed


def installed() -> Allocator | None:
    """The allocator of this process, if there is one."""
    return _installed


def install(
    budget: Budget,
    *,
    devices: Sequence[int] = (0,),
    tag: str = "",
    mode: Mode = "global",
    backing: Backing = "cuda",
    patience: int = 0,
    most_keys: int = 0,
    debug: bool = False,
    torch_errors: bool = True,
) -> Allocator:
    """Makes this PyTorch's allocator, before CUDA starts. Once for a process: PyTorch cannot change back.

    Args:
        budget: What each device's one reservation takes, at once and for good: bytes, ``"20GiB"``, or a share of the card (``0.9``).
        devices: CUDA ordinals. A device that is not named has no memory to give.
        tag: What the plans are for, such as the model and its precision; see :func:`terrace.tag_of`. Saved plans carry it, and a
            file with another tag is refused.
        mode: ``"global"`` serves every tensor. ``"pool"`` leaves PyTorch's allocator in place and serves only what is asked for inside
            ``alloc.use_mem_pool()``, in segments: for processes that cannot change their allocator, with little to gain from plans.
        backing: ``"cuda"``; ``"host"`` is memory of this process and leaves PyTorch alone, for tests.
        patience: Steps in a row that may differ by more than half from their plan before their key is given up; 0 for the default, 4.
        most_keys: Most kinds of steps with a plan; 0 for the default, 256.
        debug: Redzones around each buffer and poison on free. Slow.
        torch_errors: Build a small companion against this PyTorch (once, kept in the user's cache), so that a spent budget raises
            ``torch.OutOfMemoryError``. Where there is no C++ compiler it is a ``RuntimeError`` that begins with "CUDA out of memory".

    Raises:
        InstallError: PyTorch is missing, too old or built without CUDA; CUDA has started; terrace is installed already.
        ValueError: A budget that is none, or larger than the card.
        MemoryError: The card has less free than the budget.
    """
    global _installed
    if mode not in ("global", "pool"):
        raise ValueError(f"mode is {mode!r}, not 'global' or 'pool'")
    ordinals = _ordinals(devices)
    with _lock:
        if _installed is not None:
            raise InstallError(
                f"terrace is installed already, with {_installed}; use terrace.current(), since a process's allocator cannot be changed again"
            )
        torch = None if backing == "host" else _ready(mode)
        opened = {ordinal: _open(backing, ordinal, budget, patience, most_keys, debug) for ordinal in ordinals}
        made = Allocator(opened, torch, tag=tag, mode=mode)
        if torch is not None:
            _hand_over(made, torch, torch_errors)
        _installed = made
        return made


def _ordinals(devices: Sequence[int]) -> list[int]:
    ordinals = list(devices)
    whole = all(isinstance(ordinal, int) and not isinstance(ordinal, bool) and 0 <= ordinal < 64 for ordinal in ordinals)
    if not ordinals or not whole or len(set(ordinals)) != len(ordinals):
        raise ValueError(f"devices is {devices!r}; give CUDA ordinals such as [0], each once")
    return ordinals


def _ready(mode: Mode) -> ModuleType:
    torch = pytorch.supported()
    if mode == "global" and pytorch.cuda_has_started(torch):
        raise InstallError(
            "CUDA has started in this process, so its allocator cannot be changed; call terrace.install before the first .cuda(), "
            "device='cuda' or torch.cuda call that needs a device, or use mode='pool'"
        )
    if mode == "pool" and "expandable_segments:true" in _allocator_settings().lower():
        raise InstallError("expandable_segments does not work with a MemPool of another allocator; unset it in PYTORCH_ALLOC_CONF")
    return torch


def _allocator_settings() -> str:
    return ",".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))


def _open(backing: Backing, ordinal: int, budget: Budget, patience: int, most_keys: int, debug: bool) -> Device:
    memory = Device.memory_of(backing, ordinal)
    total = memory[0] if memory else None
    size = bytes_of(budget, total)
    if total is not None and size > total:
        raise ValueError(
            f"budget is {spelled(size)}, more than the {spelled(total)} of device {ordinal}; give less, or a share such as 0.9"
        )
    return Device(backing, size, ordinal=ordinal, patience=patience, most_keys=most_keys, debug=debug)


def _hand_over(made: Allocator, torch: ModuleType, torch_errors: bool) -> None:
    """From the first line on that can succeed only once, nothing else may fail."""
    if made.mode == "pool":
        made._pluggable = pytorch.pluggable(torch, "terrace_torch_try_malloc")
    else:
        made._pluggable = pytorch.pluggable(torch)
        made.companion = companion.load(torch) if torch_errors else "not asked for"
        try:
            torch.cuda.memory.change_current_allocator(made._pluggable)
        except RuntimeError as refused:
            raise InstallError(f"PyTorch does not change its allocator any more ({refused}); call terrace.install earlier") from refused
        shim.put_on(torch, made)
    for ordinal, device in made._devices.items():
        device.register(ordinal)


class Step(contextlib.ContextDecorator):
    """A forward of a kind, from :meth:`Allocator.step`. Ends when its block does, also by an exception."""

    def __init__(self, allocator: Allocator, key: Key, ordinals: Sequence[int]):
        self._allocator, self._key, self._ordinals = allocator, key_bytes(key), ordinals
        self._open: list[Device] = []

    def _recreate_cm(self) -> Step:
        again = Step.__new__(Step)
        again._allocator, again._key, again._ordinals, again._open = self._allocator, self._key, self._ordinals, []
        return again

    def __enter__(self) -> Step:
        if self._open:
            raise TerraceError("this step is open already; make another with alloc.step(key)")
        try:
            for ordinal in self._ordinals:
                device = self._allocator._devices[ordinal]
                device.begin_step(self._key, self._allocator._stream(ordinal))
                self._open.append(device)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        failed = self._end()
        if failed is not None and error is None:
            raise failed

    def _end(self) -> Exception | None:
        """Ends it on every device, whatever one of them says; the first failure."""
        failed: Exception | None = None
        while self._open:
            try:
                self._open.pop().end_step()
            except Exception as refused:
                failed = failed or refused
        return failed


class Allocator:
    """What :func:`terrace.install` made: the devices of this process and everything they can tell."""

    def __init__(self, devices: dict[int, Device], torch: ModuleType | None, *, tag: str, mode: Mode):
        self._devices, self._torch = devices, torch
        self._pluggable: Any = None
        self._pools: dict[int, Any] = {}
        self.tag, self.mode = tag, mode
        self.companion: str = "not needed"
        """How a spent budget is raised: ``"torch.OutOfMemoryError"``, or why it is a RuntimeError."""

    def __repr__(self) -> str:
        parts = [f"{spelled(device.reservation()[1])} on {device.name()} {ordinal}" for ordinal, device in self._devices.items()]
        return f"<terrace {self.mode}: {', '.join(parts)}>"

    # ---- Steps

    def step(self, key: Key, *, device: int | None = None) -> Step:
        """A step: a forward of the kind that ``key`` names, such as ``("prefill", padded_tokens)``. For ``with``, or as a decorator.

        The first step of a key is recorded, and planned at its end; later ones are answered from the plan. One that differs is served
        all the same and counted. The step is on the current stream of ``device``, or of every installed device.

        Raises:
            TypeError, ValueError: A key that is not hashable or not printable.
        """
        return Step(self, key, [self._ordinal(device)] if device is not None else list(self._devices))

    @contextlib.contextmanager
    def use_mem_pool(self, device: int | None = None) -> Iterator[Any]:
        """With ``mode="pool"``: what this thread asks for inside comes from the reservation, in PyTorch's segments."""
        if self.mode != "pool" or self._torch is None:
            raise TerraceError(f"use_mem_pool needs terrace.install(mode='pool'), and this is {self}")
        ordinal = self._ordinal(device)
        if ordinal not in self._pools:
            self._pools[ordinal] = self._torch.cuda.MemPool(self._pluggable.allocator())
        with self._torch.cuda.use_mem_pool(self._pools[ordinal], device=ordinal):
            yield self._pools[ordinal]

    # ---- Figures

    def stats(self, device: int | None = None) -> dict[str, Any]:
        """The figures since the device was opened, in bytes unless the name says otherwise; ``usage`` has what lives and the peak."""
        found = self._device(device)
        stats: dict[str, Any] = json.loads(found.stats_json())
        stats["usage"] = json.loads(found.usage_json())
        stats["reservations"] = found.reservations()
        return stats

    def report(self) -> str:
        """Where the bytes are, which features are active and why, and what steps left behind: for a person."""
        return "\n".join(device.report().rstrip("\n") for device in self._devices.values()) + "\n"

    def suggested_budget(self, device: int | None = None) -> int:
        """A ``budget`` in which the same can lie again where it lay, once the plans are loaded: the largest plan, and all that lay outside
        of plans, such as weights and caches, gaps included. A step that is recorded lies outside too, so reset the peak after the first
        ones (``torch.cuda.reset_peak_memory_stats()``) and run every step once more before you ask. It is what to begin with, and no
        promise: in less room other gaps are chosen, so less may do; add a little where nothing may fail."""
        return self._device(device).suggested_budget()

    def required_bytes(self, device: int | None = None) -> int:
        """Bytes to set aside for steps before anything else is sized, such as a KV cache."""
        return self._device(device).required_bytes()

    def arena_bytes(self, device: int | None = None) -> int:
        """The most that any plan so far needed."""
        return self._device(device).arena_bytes()

    def prometheus(self) -> str:
        """The figures of all devices in Prometheus' text format."""
        # Each metric is one group, whatever devices its samples are of.
        groups: dict[str, list[str]] = {}
        for ordinal, device in self._devices.items():
            name = ""
            for line in device.prometheus([("device", str(ordinal))]).splitlines():
                if line.startswith("# HELP "):
                    name = line.split()[2]
                known = groups.setdefault(name, [])
                if line not in known:
                    known.append(line)
        return "".join(f"{line}\n" for lines in groups.values() for line in lines)

    def plan_html(self, key: Key, device: int | None = None) -> str | None:
        """The plan of a key as a page with a memory map to zoom into; ``None`` while the key has none."""
        return self._device(device).plan_html(key_bytes(key))

    # ---- Files

    def save(self, path: str | os.PathLike[str], *, tag: str | None = None, rank: int | None = None) -> None:
        """Saves the plans of all keys. With several devices each has its own file, ``path`` with ``.0``, ``.1`` and so on.

        ``rank`` is RANK in the environment by default; a file is loaded only by the rank, tag and kind of device that saved it. Give
        each rank a path of its own.
        """
        for ordinal, device in self._devices.items():
            device.save(self._file(path, ordinal), *self._identity(rank, tag))

    def load(
        self, path: str | os.PathLike[str], *, tag: str | None = None, rank: int | None = None, replace: bool = False
    ) -> dict[int, dict[str, Any]]:
        """Loads saved plans, and says for each device what came of it. A refused file leaves everything as it was.

        Raises:
            TerraceError: The file is not there, damaged, or of another model, rank, device or version.
        """
        return {
            ordinal: json.loads(device.load(self._file(path, ordinal), *self._identity(rank, tag), replace))
            for ordinal, device in self._devices.items()
        }

    def resize(self, budget: Budget, device: int | None = None) -> None:
        """Replaces the reservation by one of that size, between steps and with nothing in it. Plans stay."""
        self._device(device).resize(bytes_of(budget, None))

    # ---- Inside

    def _ordinal(self, device: int | None) -> int:
        ordinal = next(iter(self._devices)) if device is None else device
        if ordinal not in self._devices:
            raise ValueError(f"device {device!r} is not one that terrace was installed on: {sorted(self._devices)}")
        return ordinal

    def _device(self, device: int | None) -> Device:
        return self._devices[self._ordinal(device)]

    def _stream(self, ordinal: int) -> int:
        return int(self._torch.cuda.current_stream(ordinal).cuda_stream) if self._torch else 0

    def _file(self, path: str | os.PathLike[str], ordinal: int) -> str:
        return os.fspath(path) if len(self._devices) == 1 else f"{os.fspath(path)}.{ordinal}"

    def _identity(self, rank: int | None, tag: str | None) -> tuple[int, str]:
        here = int(os.environ.get("RANK", "0")) if rank is None else rank
        name = self.tag if tag is None else tag
        # Another PyTorch asks for other workspaces.
        return here, f"{name} torch {self._torch.__version__}" if self._torch else name
