"""The allocators that are compared, behind one face. A process has one: PyTorch cannot change it once it was used.

`default` and `expandable` are PyTorch's own; the latter is set by the environment of the process. `terrace` is the package's. On a CPU
all of them are `Dry`, which counts nothing, so that everything else can be run without a GPU.
"""

import contextlib

import torch

NAMES = ("default", "expandable", "terrace")


def environment(name):
    """What a process of that allocator needs to be started with."""
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if name == "expandable" else {}


def opened(name, device, budget=None, plan=None):
    """The allocator, put in place before CUDA starts. `budget` in bytes and `plan`, a file of plans to begin with, are Terrace's."""
    if device == "cpu":
        return Dry()
    return Terrace(budget, plan) if name == "terrace" else Native()


class Native:
    """PyTorch's caching allocator."""

    def step(self, key):
        return contextlib.nullcontext()

    def reset(self):
        """Forgets what was freed and the peaks so far."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def figures(self):
        """Bytes: the most that lived and was reserved since `reset`, and what is taken of the device now, whoever took it."""
        free, total = torch.cuda.mem_get_info()
        return {
            "peak_live": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
            "device_used": total - free,
        }


class Terrace(Native):
    """The plan's arena in one reservation."""

    def __init__(self, budget, plan):
        import terrace

        self.alloc = terrace.install(budget=budget)
        if plan:
            self.alloc.load(plan)

    def step(self, key):
        return self.alloc.step(key)

    def reset(self):
        """The reservation stays as it is."""

    def figures(self):
        stats = dict(self.alloc.stats())
        free, total = torch.cuda.mem_get_info()
        return {"device_used": total - free, "peak_reserved": stats["reservation"], "stats": stats}

    def outside(self):
        """Bytes in use now that no plan places: weights, caches, what differed."""
        return self.alloc.stats()["outside"]

    def save(self, path):
        self.alloc.save(path)


class Dry:
    """No device: nothing is measured, and the figures say so."""

    def step(self, key):
        return contextlib.nullcontext()

    def reset(self):
        pass

    def figures(self):
        stats = dict.fromkeys(STATS, 0)
        return {"peak_live": 0, "peak_reserved": 0, "device_used": 0, "stats": stats, "dry": True}

    def outside(self):
        return 0

    def save(self, path):
        with open(path, "wb"):
            pass


STATS = ("reservation", "steps", "steps_on_script", "allocs", "replay_allocs", "hits", "replay_allocs_warm", "hits_warm", "outside",
         "outside_peak", "overflow_peak", "arena", "lower_bound", "plans", "plan_ns", "divergences_total")  # fmt: skip
