"""What gets in the way of the allocator in this process or environment, each finding with what to do about it.

    python -m terrace doctor [--json] [--budget 20GiB]

Exit status 0: nothing stands in the way; 1: something does, or will; 2: the command was called wrongly. Nothing here starts CUDA.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal

from terrace import companion, pytorch
from terrace._terrace import Device, TerraceError, __version__
from terrace.errors import InstallError
from terrace.sizes import bytes_of, spelled

Verdict = Literal["ok", "note", "problem"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    found: str
    """What there is."""
    todo: str = ""
    """What to do, where there is something."""


def examine(budget: str | None = None) -> list[Finding]:
    """Everything, in the order in which it can go wrong."""
    findings = [Finding("terrace", "ok", f"{__version__}, C symbols in {pytorch.LIBRARY}")]
    try:
        torch = pytorch.supported()
    except InstallError as refused:
        findings.append(Finding("torch", "problem", str(refused), "install a torch for CUDA that is new enough"))
        return findings + [_device(None), _settings(), _ipc()]
    checks: list[Callable[[ModuleType], Finding]] = [
        _version,
        _hooks,
        _started,
        _out_of_memory,
        _benchmark,
        _compiled,
        _pools,
    ]
    return findings + [check(torch) for check in checks] + [_device(budget), _settings(), _ipc()]


def _version(torch: ModuleType) -> Finding:
    if pytorch.version(torch) == pytorch.TESTED:
        return Finding("torch", "ok", torch.__version__)
    tested = ".".join(map(str, pytorch.TESTED))
    return Finding("torch", "note", torch.__version__, f"the tests ran on {tested}; run `pytest allocator/python/tests` on yours")


def _hooks(torch: ModuleType) -> Finding:
    try:
        pytorch.pluggable(torch)
    except (InstallError, RuntimeError) as refused:
        return Finding("hooks", "problem", str(refused), "install the torch that was tested")
    return Finding("hooks", "ok", "record_stream, graph pools, empty_cache and the memory fraction reach the allocator")


def _started(torch: ModuleType) -> Finding:
    if pytorch.cuda_has_started(torch):
        return Finding("CUDA", "problem", "it has started in this process", "call terrace.install earlier, or use mode='pool'")
    return Finding("CUDA", "ok", "it has not started in this process, so the allocator can be changed")


def _out_of_memory(torch: ModuleType) -> Finding:
    came = companion.load(torch)
    if came == companion.RAISES:
        return Finding("out of memory", "ok", f"raises {came}")
    return Finding("out of memory", "note", f"raises {came}", "install g++, or match texts that begin with 'CUDA out of memory'")


def _benchmark(torch: ModuleType) -> Finding:
    if torch.backends.cudnn.benchmark:
        todo = "set torch.backends.cudnn.benchmark = False: with another allocator the first convolution raises cacheInfo"
        return Finding("cudnn.benchmark", "problem", "it is on", todo)
    return Finding("cudnn.benchmark", "ok", "it is off")


def _compiled(torch: ModuleType) -> Finding:
    name = "torch.compile"
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None and config.triton.cudagraphs:
        todo = "set torch._inductor.config.triton.cudagraphs = False: its graphs need the caching allocator's checkpoints"
        return Finding(name, "problem", "Inductor's CUDA graphs are on", todo)
    todo = "mode='reduce-overhead' and 'max-autotune' raise checkPoolLiveAllocations; use the default mode, or torch.cuda.graph"
    return Finding(name, "note", "the default mode works", todo)


def _pools(torch: ModuleType) -> Finding:
    name, makers = "MemPool", _makers()
    if makers:
        todo = "turn that off, or use mode='pool': a MemPool raises createOrIncrefPool while another allocator is PyTorch's"
        return Finding(name, "problem", f"{' and '.join(makers)} will make one", todo)
    return Finding(name, "ok", "nothing known to make one is on; torch.cuda.MemPool raises under mode='global'")


def _makers() -> list[str]:
    hook = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
    found = [hook] if os.environ.get(hook, "").lower() in ("1", "true") else []
    return found + [module for module in ("vllm.device_allocator.cumem", "torch_memory_saver") if module in sys.modules]


def _device(budget: str | None) -> Finding:
    try:
        memory = Device.memory_of("cuda", 0)
    except TerraceError as refused:
        return Finding("device", "problem", str(refused), "run where the driver shows a device (nvidia-smi)")
    if memory is None:
        return Finding("device", "note", "device 0 does not tell its memory", "give the budget in bytes")
    total, free = memory
    found = f"device 0 has {spelled(free)} free of {spelled(total)}"
    if budget is not None:
        wanted = bytes_of(float(budget) if budget.replace(".", "", 1).isdigit() and float(budget) <= 1 else budget, total)
        if wanted > free:
            return Finding(
                "device",
                "problem",
                found,
                f"a budget of {spelled(wanted)} is more than is free: give less, or end what holds it",
            )
    return Finding("device", "ok", found)


def _settings() -> Finding:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if "cudamallocasync" in value.lower().replace(" ", ""):
            return Finding("settings", "problem", f"{name}={value}", f"unset {name}: that backend cannot be changed for another")
        if "expandable_segments:true" in value.lower().replace(" ", ""):
            todo = "it does nothing under mode='global', where there are no segments; mode='pool' refuses it"
            return Finding("settings", "note", f"{name}={value}", todo)
    return Finding("settings", "ok", "no setting of PyTorch's own allocator is in the way")


def _ipc() -> Finding:
    todo = "share tensors between processes by copying: handles to the reservation (torch.multiprocessing, reductions) are refused"
    return Finding("IPC", "note", "CUDA tensors cannot be sent to other processes", todo)


def text(findings: Sequence[Finding]) -> str:
    """The findings as lines."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:<8} {finding.name:<16} {finding.found}")
        if finding.todo:
            lines.append(f"{'':<25} -> {finding.todo}")
    return "\n".join(lines) + "\n"


def run(as_json: bool, budget: str | None) -> int:
    """Prints the findings; the exit status."""
    findings = examine(budget)
    problems = sum(finding.verdict == "problem" for finding in findings)
    if as_json:
        print(json.dumps({"problems": problems, "findings": [dataclasses.asdict(finding) for finding in findings]}, indent=2))
    else:
        print(text(findings), end="")
    return 1 if problems else 0
