"""Time and memory of GPU calls, the checks' ledger, tables, and what machine and commit a run was on."""

import json
import os
import statistics
import subprocess
import time

import torch

# Cycles the GPU idles before a timed call, about a millisecond: the host has queued the whole call by then, so that the events
# measure the kernels and not the interpreter. What the host adds is in the second figure, `call_ms`.
HEAD_START = 2_000_000
FLUSH_BYTES = 256 << 20


def rounds_for(ms, budget_s, least=11, most=101):
    return max(least, min(most, int(budget_s * 1e3 / max(ms, 0.01))))


def interleaved(calls, budget_s):
    """{name: {ms, p10, p90, call_ms, rounds}} for {name: [call per input set]}: every round times each implementation once, on the
    next input set, with a cold L2. `ms` is between CUDA events, `call_ms` on the host's clock around call and synchronisation."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events, walls = {n: [] for n in calls}, {n: [] for n in calls}

    def once(name, at):
        call = calls[name][at % len(calls[name])]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(HEAD_START)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def wall(name, at):
        flush.zero_()
        torch.cuda.synchronize()
        start = time.perf_counter()
        calls[name][at % len(calls[name])]()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    for name in calls:  # warm-up: compilation, autotuning, every input set's tables
        for at in range(max(3, len(calls[name]))):
            once(name, at)
    rounds = rounds_for(sum(once(name, 0) + wall(name, 0) for name in calls), budget_s)
    for at in range(rounds):
        for name in calls:
            events[name].append(once(name, at))
            walls[name].append(wall(name, at))
    return {n: summary(events[n]) | {"call_ms": statistics.median(walls[n])} for n in calls}


def summary(ms):
    ms = sorted(ms)
    return {"ms": statistics.median(ms), "p10": ms[len(ms) // 10], "p90": ms[-1 - len(ms) // 10], "rounds": len(ms)}


def graphed(fill, calls_in_graph, budget_s):
    """ms per call of a CUDA graph that `fill()` captures, replayed: no launch gaps of the host's making."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fill()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill()

    def replay():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    replay()
    times = [replay() for _ in range(rounds_for(replay(), budget_s))]
    return summary([t / calls_in_graph for t in times])


def workspace(call):
    """Peak bytes that a call takes from PyTorch's allocator beyond the output and final state it returns."""
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return max(0, peak - sum(t.numel() * t.element_size() for t in result))


def left_taken(call):
    """Bytes of the device that a repeated call leaves taken, as the driver counts them, whoever allocated."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    call()
    torch.cuda.synchronize()
    return before - torch.cuda.mem_get_info()[0]


class Checks:
    """What was asserted and how it came out; a run with a failed one ends with status 1."""

    def __init__(self):
        self.rows = []

    def add(self, name, ok, detail=""):
        self.rows.append({"check": name, "ok": bool(ok), "detail": detail})
        print(f"{'ok  ' if ok else 'FAIL'} {name} {detail}", flush=True)

    def failed(self):
        return [r for r in self.rows if not r["ok"]]

    def line(self):
        failed = self.failed()
        return f"Checks: {len(self.rows) - len(failed)} passed, {len(failed)} failed."


def table(head, rows):
    right = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(str(c) for c in row) + " |" for row in [head, right, *rows])


def machine():
    import triton

    gpu = torch.cuda.get_device_name()
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0")
    return {"gpu": gpu, "driver": driver, "torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__}


def commit():
    """The commit measured, `-dirty` with changes on top; `TERRACE_COMMIT` where the run is outside of a checkout."""
    here = os.path.dirname(os.path.abspath(__file__))
    return os.environ.get("TERRACE_COMMIT") or _output("git", "-C", here, "describe", "--always", "--dirty", "--exclude=*")


def heading(command, versions):
    m = machine()
    parts = [f"{n} {v}" for n, v in versions.items()]
    return (f"Command: {command}, {time.strftime('%Y-%m-%d', time.gmtime())}, commit {commit()}; {m['gpu']}, driver {m['driver']}, "
            f"torch {m['torch']}, triton {m['triton']}" + "".join(f", {p}" for p in parts) + ".")


def write_json(path, data):
    if path:
        with open(path, "w") as f:
            json.dump(data, f, indent=1)


def _output(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
