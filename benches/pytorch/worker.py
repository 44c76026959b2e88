#!/usr/bin/env python3
"""One configuration in one process: does a job and writes what it measured as JSON, after each part of it.

    worker.py JOB.json PID      as run.py, which is process PID, starts it; under torchrun for the job "ranks". It imports what it can, and
                                begins when there is such a file
"""

import concurrent.futures
import contextlib
import gc
import hashlib
import importlib.metadata
import inspect
import json
import os
import statistics
import sys
import time

import torch

import allocators
import model as models

SETTLING = 3  # rounds after which every key was seen twice, and what grows has grown


def main():
    path, starter = sys.argv[1], int(sys.argv[2])
    _ahead()
    while not os.path.exists(path):
        time.sleep(0.02)
        os.kill(starter, 0)  # an error if that process is gone: nobody will bring a job
    with open(path) as f:
        job = json.load(f)
    begin = time.perf_counter()
    result = {"job": job, "begun": True}

    def publish(**more):
        result.update(more, seconds=time.perf_counter() - begin)
        path = job["out"]
        with open(path + ".new", "w") as f:
            json.dump(result, f)
        os.replace(path + ".new", path)

    with torch.inference_mode():
        JOBS[job["kind"]](job, publish)
    publish(done=True)


def _ahead():
    """Imports without a CUDA context, which would count as memory of whoever measures now: FLA makes one, so it and the model come later."""
    import transformers.cache_utils
    import transformers.modeling_utils  # noqa: F401

    if torch.cuda.is_initialized():
        raise RuntimeError("importing transformers made a CUDA context: leave that import to the job, in worker.py's _ahead")


def tune(job, publish):
    """Compiles and tunes the kernels that the other processes then find on disk, and says what an idle context takes. One period of
    layers does, and one length: no key of FLA's tuning has the number of tokens in it."""
    if job["device"] != "cpu":
        free, total = torch.cuda.mem_get_info()
        publish(idle=total - free)
    model = models.Model(min(job["layers"], models.PERIOD), job["device"], job["tiny"])
    ids = model.inputs([models.Step("prefill", job["tokens"])])[0]
    cache = model.new_cache()
    _, logits = model.forward(ids, cache)
    model.forward(logits.argmax(-1), cache)
    _synchronize(job)
    publish(tuned=job["tokens"])
    if job["ours"]:
        from terrace import gdn

        gdn.prepare(torch.bfloat16, job["device"])
    import transformers

    weights = models.Model(job["layers"], "meta", job["tiny"]).weights()
    publish(versions={"transformers": transformers.__version__, **_fla_version()}, weights=weights, rule=_rule(model))


def workload(job, publish):
    """Rounds of a workload: the first one hashed, those in which all that grows has grown, more up to `forwards`, the last hashed again."""
    alloc, model, steps, inputs = _opened(job)
    alloc.reset()
    run = Run(job, alloc, model, steps, inputs)
    publish(weights=model.weights(), at_rest=alloc.figures())
    digests = [run.round(hashed=True)]
    publish(digests=digests, first=alloc.figures())
    for _ in range(SETTLING):
        run.round()
    publish(forwards=run.forwards, settled=alloc.figures())
    while run.forwards < job["forwards"] - len(steps):
        run.round()
    digests.append(run.round(hashed=True))
    publish(digests=digests, forwards=run.forwards, device_peak=run.device_peak, last=alloc.figures())
    if job["allocator"] == "terrace":
        publish(suggested_budget=run.suggested_budget(), stats=alloc.figures()["stats"])
        if job.get("save"):
            alloc.save(job["save"])
            publish(saved=os.path.getsize(job["save"]))


def turns(job, publish):
    """Rounds that are timed while the processes of the other allocators wait: a token goes round, and only who has it works."""
    alloc, model, steps, inputs = _opened(job)
    run = Run(job, alloc, model, steps, inputs)
    for _ in range(SETTLING):
        run.round()
    rounds, spans = [], []
    with open(job["turn"]["mine"], "rb", buffering=0) as mine, open(job["turn"]["next"], "wb", buffering=0) as following:
        # The first lap tells that all have settled, the last one keeps everybody until all are done: ending takes time as well.
        for lap in range(job["rounds"] + 2):
            mine.read(1)
            if 0 < lap <= job["rounds"]:
                begin = time.monotonic()
                rounds.append(run.timed())
                spans.append((begin, time.monotonic()))
            following.write(b".")
    publish(rounds=rounds, spans=spans, forwards={phase: sum(s.phase == phase for s in steps) for phase in rounds[0]})


def _opened(job):
    """The allocator, the model, and a workload with its inputs on the device."""
    alloc = allocators.opened(job["allocator"], job["device"], job.get("budget"), job.get("plan"))
    model = _model(job)
    steps = models.WORKLOADS[job["workload"]](job["short"])
    inputs = model.inputs(steps)
    _synchronize(job)
    gc.collect()
    return alloc, model, steps, inputs


class Run:
    """Rounds over one workload's steps, and what they took of host and device."""

    def __init__(self, job, alloc, model, steps, inputs):
        self.job, self.alloc, self.model, self.steps, self.inputs = job, alloc, model, steps, inputs
        self.forwards = self.device_peak = 0

    def round(self, hashed=False):
        """All steps once; a digest of each one's hidden states and logits if asked for, taken while the device is at the next step."""
        digests = []
        with concurrent.futures.ThreadPoolExecutor(1) as hasher:

            def hashing(*outputs):
                digests.append(hasher.submit(_digest, [_bytes(tensor) for tensor in outputs]))

            for _ in self._steps(hashing if hashed else None):
                self.device_peak = max(self.device_peak, self.alloc.figures()["device_used"])
        return [digest.result() for digest in digests]

    def timed(self):
        """Milliseconds of all steps by phase: of the calls before anything waits for the device, by the wall clock and of the thread
        itself, and with the wait."""
        took = {}
        begin = time.perf_counter()
        for step, wall, cpu in self._steps():
            _synchronize(self.job)
            of = took.setdefault(step.phase, {"host_ms": 0.0, "cpu_ms": 0.0, "whole_ms": 0.0})
            end = time.perf_counter()
            for what, seconds in (("host_ms", wall), ("cpu_ms", cpu), ("whole_ms", end - begin)):
                of[what] += 1e3 * seconds
            begin = end
        return took

    def _steps(self, hashing=None):
        """All steps once, yielding each with the seconds of its calls: by the wall clock, and of this thread."""
        cache, tokens = None, None
        for step, ids in zip(self.steps, self.inputs, strict=True):
            ids = tokens if ids is None else ids
            if step.past == 0:
                cache = None
            _synchronize(self.job)
            wall, cpu = time.perf_counter(), time.thread_time()
            with self.alloc.step(step.key):
                # Made inside of the step: a prefill that nobody continues leaves nothing behind.
                used = self.model.new_cache() if cache is None else cache
                hidden, logits = self.model.forward(ids, used)
                tokens = logits.argmax(-1)
                if hashing:
                    hashing(hidden, logits)
                del hidden, logits
                cache = used if self.job["workload"] == "chat" else None
                del used
            took = time.perf_counter() - wall, time.thread_time() - cpu
            self.forwards += 1
            yield step, *took
        _synchronize(self.job)

    def suggested_budget(self):
        """Bytes in which one more round, where all keys are known, could lie."""
        self.alloc.restart()
        self.round()
        return self.alloc.suggested_budget()


def kinds(job, publish):
    """The peak of one long prefill by kind of layer, with FLA's rule, with ours, and with ours in windows, under PyTorch's allocator."""
    alloc = allocators.opened("default", job["device"])
    model = _model(job)
    step = models.Step("prefill", job["tokens"])
    ids = model.inputs([step])[0]
    rows, outputs = {}, {}
    for name in ("FLA", *OURS):
        with _patched(model, name, job["window"]) as replaced:
            for _ in range(2):  # the first one compiles and loads
                gc.collect()
                alloc.reset()
                rows[name], outputs[name] = _by_kind(job, alloc, model, ids)
            rows[name] |= {"replaced": replaced, "ms": _milliseconds(job, model, ids)}
        publish(rows=rows)
    expected = outputs["FLA"].float()
    differences = {name: (outputs[name].float() - expected).square().mean().sqrt() for name in OURS}
    publish(rows=rows, errors={name: (d / expected.square().mean().sqrt()).item() for name, d in differences.items()})


def _by_kind(job, alloc, model, ids):
    """Bytes beyond what was there before, by kind of layer and of the whole; and what the rule's calls took beyond their inputs."""
    native = job["device"] != "cpu"
    live = torch.cuda.memory_allocated if native else lambda: 0
    peak = torch.cuda.max_memory_allocated if native else lambda: 0
    restart = torch.cuda.reset_peak_memory_stats if native else lambda: None
    peaks, base, handles = {"elsewhere": 0}, live(), []

    def mark(kind):
        """What peaked since the last mark was of that kind."""
        peaks[kind] = max(peaks.get(kind, 0), peak() - base)
        restart()

    def rule(called):
        def counted(*args, **kwargs):
            mark("Gated DeltaNet")
            before = live()
            result = called(*args, **kwargs)
            row["rule"] = max(row["rule"], peak() - before)
            mark("Gated DeltaNet")
            return result

        return counted

    row = {"rule": 0}
    for kind, part in model.parts():
        handles.append(part.register_forward_pre_hook(lambda *_: mark("elsewhere")))
        handles.append(part.register_forward_hook(lambda *_, kind=kind: mark(kind)))
    with _replaced_rule(model, rule):
        hidden, _ = model.forward(ids, model.new_cache())
    mark("elsewhere")
    _synchronize(job)
    for h in handles:
        h.remove()
    row |= {"peaks": peaks, "whole": max(peaks.values()), "reserved": alloc.figures()["peak_reserved"], "base": base}
    return row, hidden[0, -4096:].to("cpu")


def _milliseconds(job, model, ids):
    """Wall clock of one forward from an idle device to an idle device, with nothing that watches: the median of three."""
    took = []
    for _ in range(3):
        _synchronize(job)
        begin = time.perf_counter()
        model.forward(ids, model.new_cache())
        _synchronize(job)
        took.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(took)


def kinds_planned(job, publish):
    """The arena that one long prefill needs, the smallest first: the arena only grows."""
    alloc = allocators.opened("terrace", job["device"], job["budget"])
    model = _model(job)
    ids = model.inputs([models.Step("prefill", job["tokens"])])[0]
    arenas = {}
    for name in (*reversed(OURS), "FLA"):
        with _patched(model, name, job["window"]):
            for _ in range(3):
                with alloc.step(("prefill", job["tokens"], name)):
                    model.forward(ids, model.new_cache())
                _synchronize(job)
        arenas[name] = alloc.figures()["stats"]["arena"]
        publish(arenas=arenas)


def ranks(job, publish):
    """One of two processes on one device: its own reservation and its own plan file, recorded at the first start, loaded at the second."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    job["out"] += f".{rank}"
    dist.init_process_group("gloo")
    plan = f"{job['plan']}.{rank}"
    alloc = allocators.opened("terrace", job["device"], job["budget"], plan if job["load"] else None)
    model = _model(job)
    # Each rank has prompts of its own, so that a plan of the other one would not do.
    job["workload"] = "mixed"
    steps = [models.Step("prefill", n + 64 * rank) for n in job["lengths"]]
    run = Run(job, alloc, model, steps, model.inputs(steps))
    dist.barrier()
    digests = [run.round(hashed=True) for _ in range(job["rounds"])]
    if not job["load"]:
        alloc.save(plan)
    dist.barrier()
    publish(rank=rank, digests=digests, figures=alloc.figures(), plan=os.path.getsize(plan))
    dist.destroy_process_group()


def _model(job):
    return models.Model(job["layers"], job["device"], job["tiny"])


OURS = ("Terrace", "windows")


@contextlib.contextmanager
def _patched(model, name, window):
    """The model with FLA's rule, with ours, or with ours and its layers in windows of so many tokens; yields what was replaced."""
    if name not in OURS:
        yield [_rule(model)]
        return
    from terrace import gdn

    with gdn.patch(model.causal, window=window if name == "windows" else None) as patch:
        yield list(patch.replaced)


def _module(model):
    """The modeling module of the Gated DeltaNet layers, whose names a forward looks up."""
    return sys.modules[type(next(part for kind, part in model.parts() if kind == "Gated DeltaNet")).__module__]


@contextlib.contextmanager
def _replaced_rule(model, around):
    """The prefill's rule, called through `around(rule)`."""
    module = _module(model)
    called = module.torch_chunk_gated_delta_rule
    module.torch_chunk_gated_delta_rule = around(called)
    try:
        yield
    finally:
        module.torch_chunk_gated_delta_rule = called


def _rule(model):
    """Where the rule that a forward calls comes from: transformers falls back to PyTorch without a word where FLA is missing."""
    called = _module(model).torch_chunk_gated_delta_rule
    inner = inspect.getclosurevars(called).nonlocals.get("implementation", called)
    return getattr(inner, "__module__", str(inner))


def _fla_version():
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return {"fla-core": importlib.metadata.version("fla-core")}
    return {}


def _digest(parts):
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _bytes(tensor):
    return tensor.cpu().contiguous().view(torch.uint8).numpy().data


def _synchronize(job):
    if job["device"] != "cpu":
        torch.cuda.synchronize()


JOBS = {"tune": tune, "workload": workload, "turns": turns, "kinds": kinds, "kinds_planned": kinds_planned, "ranks": ranks}

if __name__ == "__main__":
    main()
