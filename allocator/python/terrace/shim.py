"""PyTorch's memory functions, which raise or say 0 under a pluggable allocator, answered from the installed one.

What is replaced are the few functions of ``torch._C`` that everything else goes through, so that a caller who imported
``memory_allocated`` long before is served too:

    torch.cuda.memory_allocated, max_memory_*, memory_stats, memory_summary, nested dicts   <- _cuda_memoryStats
    torch.cuda.reset_peak_memory_stats, reset_accumulated_memory_stats                      <- _cuda_reset*MemoryStats
    torch.cuda.memory_snapshot, memory._snapshot, memory._dump_snapshot                     <- _cuda_memorySnapshot
    torch.accelerator.*                                                                     <- _accelerator_*

``mem_get_info`` works as it is: what the driver has free, the reservation being taken. ``empty_cache`` reaches the allocator by its hook.
"""

from __future__ import annotations

import json
import pickle
from types import ModuleType
from typing import TYPE_CHECKING, Any

from terrace._terrace import Device

if TYPE_CHECKING:
    from terrace.allocator import Allocator

_POOLS = ("all", "large_pool", "small_pool")


def put_on(torch: ModuleType, allocator: Allocator) -> None:
    """Replaces the functions, until the process ends, as the allocator is."""
    devices = allocator._devices

    def stats(ordinal: int) -> dict[str, Any]:
        return memory_stats(devices.get(ordinal))

    def reset_peak(ordinal: int) -> None:
        if device := devices.get(ordinal):
            device.reset_peak()

    def reset_accumulated(ordinal: int) -> None:
        if device := devices.get(ordinal):
            device.reset_accumulated()

    def memory_fraction(ordinal: int) -> float:
        total = torch.cuda.get_device_properties(ordinal).total_memory
        device = devices.get(ordinal)
        return device.reservation()[1] / total if device else 0.0

    def record_history(*args: Any, **kwargs: Any) -> None:
        # None turns it off, which it is.
        if (args and args[0] is not None) or kwargs.get("enabled") is not None:
            raise RuntimeError(
                "PyTorch keeps no memory history of another allocator; use `with terrace.record('run.profile'):` for what is asked for, "
                "and torch.cuda.memory_snapshot() for what lives"
            )

    native = torch._C
    native._cuda_memoryStats = stats
    native._cuda_resetPeakMemoryStats = reset_peak
    native._cuda_resetAccumulatedMemoryStats = reset_accumulated
    native._cuda_memorySnapshot = lambda *_: snapshot(list(devices.values()))
    native._cuda_getMemoryFraction = memory_fraction
    native._cuda_record_memory_history = record_history
    native._accelerator_isAllocatorInitialized = torch.cuda.is_initialized
    native._accelerator_getDeviceStats = stats
    native._accelerator_resetPeakStats = reset_peak
    native._accelerator_resetAccumulatedStats = reset_accumulated


def memory_stats(device: Device | None) -> dict[str, Any]:
    """The nested figures that PyTorch's caching allocator has, with every one of its names.

    There are no two pools, so all is in the large one. Sizes are rounded up to the alignment, requested ones too. The reservation is
    the one segment; what is free in it serves any request, so nothing counts as a split block that cannot be released.
    """
    none = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    usage = {name: {"bytes": 0, "buffers": 0} for name in ("now", "peak", "served", "freed")}
    reserved = exhausted = pending = 0
    if device is not None:
        usage = json.loads(device.usage_json())
        exhausted, pending, reserved = usage["exhausted"], device.pending_bytes(), device.reservation()[1]

    def live(unit: str, beside: int = 0) -> dict[str, int]:
        now, peak = usage["now"][unit] + beside, usage["peak"][unit]
        return {
            "current": now,
            "peak": max(now, peak),
            "allocated": usage["served"][unit],
            "freed": usage["freed"][unit],
        }

    def held(amount: int) -> dict[str, int]:
        return {"current": amount, "peak": amount, "allocated": amount, "freed": 0}

    figures = {
        "allocation": live("buffers"),
        "segment": held(int(device is not None)),
        "active": live("buffers"),
        "inactive_split": none,
        "allocated_bytes": live("bytes"),
        "reserved_bytes": held(reserved),
        # Freed, but another stream may still use it.
        "active_bytes": live("bytes", pending),
        "inactive_split_bytes": none,
        "requested_bytes": live("bytes"),
    }
    told: dict[str, Any] = {
        name: {pool: dict(none if pool == "small_pool" else figure) for pool in _POOLS} for name, figure in figures.items()
    }
    told |= {"oversize_allocations": dict(none), "oversize_segments": dict(none)}
    told |= {"num_alloc_retries": 0, "num_ooms": exhausted, "num_sync_all_streams": 0, "max_split_size": -1}
    return told | {"num_device_alloc": int(device is not None), "num_device_free": 0}


def snapshot(devices: list[Device]) -> dict[str, Any]:
    """What lives on all devices, in the form of PyTorch's snapshots; opens in its memory viewer."""
    whole: dict[str, Any] = {}
    for device in devices:
        one = pickle.loads(device.live_pickle())
        for name, value in one.items():
            if isinstance(whole.get(name), list):
                whole[name] += value
            else:
                whole.setdefault(name, value)
    return whole
