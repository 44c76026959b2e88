"""The allocators that are compared, behind one face. A process has one: PyTorch cannot change it once it was used.

`default` and `expandable` are PyTorch's own; the latter is set by the environment of the process. `terrace` is the package's. On a CPU
PyTorch's are `Dry`, which counts nothing, and Terrace's is on host memory, where steps and files are real and no tensor is asked of it.
"""

import contextlib

import torch

NAMES = ("default", "expandable", "terrace")


def environment(name):
    """What a process of that allocator needs to be started with."""
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if name == "expandable" else {}


def opened(name, device, budget=None, plan=None):
    """The allocator, put in place before CUDA starts. `budget` in bytes and `plan`, a file of plans to begin with, are Terrace's."""
    if name == "terrace":
        return Terrace(device, budget, plan)
    return Native() if device != "cpu" else Dry()


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


class Terrace:
    """The plan's arena in one reservation."""

    def __init__(self, device, budget, plan):
        import terrace

        self.native = device != "cpu"
        # No companion for PyTorch's own error: compiling it would take longer than a job, and nothing here catches it.
        self.alloc = terrace.install(budget=budget, backing="cuda" if self.native else "host", torch_errors=False)
        if plan:
            self.alloc.load(plan)

    def step(self, key):
        return self.alloc.step(key)

    def reset(self):
        """The reservation stays as it is, and the most that lives comes later."""

    def figures(self):
        stats = self.alloc.stats()
        free, total = torch.cuda.mem_get_info() if self.native else (0, 0)
        peak = stats["usage"]["peak"]["bytes"]
        return {"peak_live": peak, "peak_reserved": stats["reservation"], "device_used": total - free, "stats": stats}

    def restart(self):
        """Forgets how far from the reservation's end things lay."""
        if self.native:
            torch.cuda.reset_peak_memory_stats()

    def suggested_budget(self):
        """Bytes in which what was asked for since `restart` could lie again, in plans or outside."""
        return self.alloc.suggested_budget()

    def save(self, path):
        self.alloc.save(path)


class Dry:
    """No device: nothing is measured, and all figures are 0."""

    def step(self, key):
        return contextlib.nullcontext()

    def reset(self):
        pass

    def figures(self):
        return {"peak_live": 0, "peak_reserved": 0, "device_used": 0}
