"""Records of what a run asks for, for ``plan solve``: of PyTorch's own allocator, or of the installed one.

    with terrace.record("run.profile"):
        model(ids)

``plan solve run.profile --caching`` then says what a plan would need and save.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from terrace import pytorch
from terrace._terrace import Device, TerraceError, import_profile
from terrace.allocator import installed
from terrace.shim import snapshot as live_snapshot
from terrace.sizes import Key, key_bytes


def snapshot() -> dict[str, Any]:
    """What lives now, in the form of ``torch.cuda.memory._snapshot()``: of the installed allocator, or else of PyTorch's own."""
    allocator = installed()
    if allocator is not None and allocator.mode == "global":
        return live_snapshot(list(allocator._devices.values()))
    told: dict[str, Any] = pytorch.supported().cuda.memory._snapshot()
    return told


class Recording:
    """A run being recorded; see :func:`record`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.events = 0
        """Events in the file, once it is written."""
        self._marks: list[tuple[int, str, str]] = []

    @contextlib.contextmanager
    def step(self, key: Key) -> Iterator[None]:
        """Marks a forward in the record, where no allocator is installed whose steps would be in it anyway."""
        name = key_bytes(key).decode()
        self._marks.append((_now_us(), name, "START"))
        try:
            yield
        finally:
            self._marks.append((_now_us(), name, "END"))


@contextlib.contextmanager
def record(path: str | os.PathLike[str], *, device: int | None = None, max_events: int = 1_000_000) -> Iterator[Recording]:
    """Records every request and free of a device inside the block and writes them as a profile. An exception writes nothing.

    Args:
        path: The profile; binary if it ends in ``.bin``.
        device: A CUDA ordinal; the current device by default.
        max_events: What PyTorch keeps at most. A run with more is refused, since its beginning would be missing.
    """
    recording = Recording(os.fspath(path))
    allocator = installed()
    if allocator is not None and allocator.mode == "global":
        with _taped(allocator._device(device), recording):
            yield recording
    else:
        with _recorded(pytorch.supported(), device, max_events, recording):
            yield recording


@contextlib.contextmanager
def _taped(device: Device, recording: Recording) -> Iterator[None]:
    device.start_tape()
    try:
        yield
    except BaseException:
        device.drop_tape()
        raise
    recording.events = device.stop_tape(recording.path, _name(recording.path)) or 0


@contextlib.contextmanager
def _recorded(torch: ModuleType, device: int | None, max_events: int, recording: Recording) -> Iterator[None]:
    history = torch.cuda.memory._record_memory_history
    history(max_entries=max_events, stacks="python")
    try:
        yield
        torch.cuda.synchronize()
        told = torch.cuda.memory._snapshot()
    finally:
        history(enabled=None)
    ordinal = torch.cuda.current_device() if device is None else device
    traces = told.get("device_traces", [])
    trace = traces[ordinal] if ordinal < len(traces) else []
    if not trace:
        raise TerraceError(f"device {ordinal} was asked for nothing inside the block; nothing was written")
    if len(trace) >= max_events:
        raise TerraceError(f"PyTorch kept {max_events} events and lost those before; record less, or raise max_events")
    marks = [{"name": f"ProfilerStep {name}", "stage": stage, "device": ordinal, "time_us": at} for at, name, stage in recording._marks]
    told["external_annotations"] = list(told.get("external_annotations", [])) + marks
    with tempfile.TemporaryDirectory() as folder:
        pickled = os.path.join(folder, f"{_name(recording.path)}.pickle")
        with open(pickled, "wb") as out:
            pickle.dump(told, out, protocol=4)
        recording.events = import_profile(pickled, recording.path, ordinal)


def _name(path: str) -> str:
    return os.path.basename(path).split(".")[0] or "run"


def _now_us() -> int:
    return time.time_ns() // 1000
