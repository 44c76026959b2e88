#!/usr/bin/env python3
"""A Qwen3.5-27B-shaped model in PyTorch on one CUDA machine: memory and host time with PyTorch's allocator, with expandable segments and
with Terrace, and what Terrace's Gated DeltaNet does to the peak. One process for each configuration, since a process has one allocator.

    run.py [--markdown FILE] [--json FILE] [--only SECTION]... [--budget SECONDS] [--work FOLDER] [--layers 8] [--forwards 200]
           [--allocators NAME]... [--device cpu | --rehearse LIBCUDA]

Sections, in this order: mixed, kinds, chat, ranks, planned, host. A page is written after each job: a run that is cut short leaves what it has
measured. A failed check makes the status 1, and so does a job that failed.

Without a GPU, with a tiny model: `--device cpu` computes short prompts, with everything but the CUDA allocators, and measures nothing.
`--rehearse` takes the imagined CUDA of allocator/python/tests/fake, and computes nothing: PyTorch's requests are real, and so are the
figures of memory, for that model; see rehearse.py.

Kernels are tuned once, in the first process, and found on disk by the others: otherwise FLA would choose its tiles anew in each of
them, and outputs would differ for that. FLA_CACHE_MODE and FLA_CONFIG_DIR fix the tile of its l2norm, which it would else tune for
each prompt length; `--work` keeps what was compiled.

Host time is that of processes that take turns, round by round, one for each allocator: a machine's speed changes by more than what is
compared while a process runs.
"""

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "gdn"))

import allocators  # noqa: E402
import measure  # noqa: E402
import page  # noqa: E402

SECTIONS = ["mixed", "kinds", "chat", "ranks", "planned", "host"]
WORKLOADS = ("mixed", "chat")
FIRST_PORT = 29516  # those after it are torchrun's
LEAST_S = 25  # no job is begun with less time left
LONG, LONG_SHORT = 60_000, 300
ROUNDS = {"mixed": 7, "chat": 7}  # that are timed of each process of the section "host"
WINDOW, WINDOW_SHORT = 4096, 64  # tokens of the long prefill's windows, in the column with windows
GIB = 1 << 30
# Reservations while plans are recorded: ample, since requests of a step that is recorded are served outside of any plan.
AMPLE = {"mixed": 48 * GIB, "chat": 32 * GIB, "planned": 96 * GIB, "ranks": 20 * GIB}
AMPLE_TINY = GIB
# What a reservation gets beyond what a settled round had: caches that grow by being copied leave other gaps each time.
SLACK = 64 << 20
L2NORM = {"default_config": {"kwargs": {"BT": 32}, "num_warps": 8, "num_stages": 3, "num_ctas": 1}}


def main():
    args = arguments()
    bench = Bench(args)
    try:
        for section in ["tune", *(s for s in SECTIONS if s in args.only)]:
            SECTION[section](bench)
    finally:
        bench.close()
    text = bench.publish()
    for r in bench.checks.failed():
        print("FAILED", r["check"], r["detail"])
    print(text)
    sys.exit(1 if bench.checks.failed() else 0)


class Bench:
    """The jobs that were run, by name, the checks, and the page that shows both."""

    def __init__(self, args):
        self.args, self.checks, self.results, self.missing = args, measure.Checks(), {}, {}
        self.waiting = {}  # by allocator and number of processes: (process, the stem of its files), imported and without a job yet
        self.end, self.port = time.monotonic() + args.budget, FIRST_PORT
        self.work = args.work or tempfile.mkdtemp(prefix="terrace-pytorch-")
        os.makedirs(os.path.join(self.work, "fla"), exist_ok=True)
        with open(os.path.join(self.work, "fla", "l2norm_fwd_kernel.json"), "w") as f:
            json.dump(L2NORM, f)
        self.heading = page.heading("benches/pytorch/run.py " + shlex.join(sys.argv[1:]), measure.commit(), args)

    def ample(self, section):
        """Bytes of a reservation to record in."""
        return AMPLE_TINY if self.args.tiny else AMPLE[section]

    def run(self, name, processes=1, may_fail=False, **job):
        """What a job measured, or None if it did not end; why is on the page. Partial results stay in `results`."""
        found = self._measure(name, [job], processes, may_fail)
        return found and (found[0] if processes == 1 else found)

    def in_turns(self, name, jobs):
        """What jobs measured that run at the same time, or None if one of them did not end. Each does a round when its turn comes."""
        rings = [os.path.join(self.work, f"turn.{at}") for at in range(len(jobs))]
        held = [_fifo(path) for path in rings]  # kept open here, so that nobody waits to open one, and nothing written is lost
        turns = [{"mine": path, "next": rings[(at + 1) % len(rings)]} for at, path in enumerate(rings)]
        os.write(held[0], b".")
        try:
            return self._measure(name, [{**job, "turn": turn} for job, turn in zip(jobs, turns, strict=True)])
        finally:
            for end in held:
                os.close(end)

    def _measure(self, name, jobs, processes=1, may_fail=False):
        """What each of the processes measured, all started at once: one for each job, or `processes` of torchrun's for the only one."""
        left = self.end - time.monotonic()
        if left < LEAST_S:
            self.missing[name] = "out of time"
            self.publish()
            return None
        begin = time.monotonic()
        print(f"== {name} ({left:.0f} s left)", flush=True)
        children, logs, outs = [], [], []
        for at, job in enumerate(jobs):
            stem = os.path.join(self.work, name if len(jobs) == 1 else f"{name} {at}")
            out = f"{stem}.json"
            outs += [out] if processes == 1 else [f"{out}.{rank}" for rank in range(processes)]
            logs.append(f"{stem}.log")
            children.append(self._begin(stem, processes, {**job, "out": out}))
        status = _end(children, left)
        found = [_read(out) for out in outs]
        self.results[name] = {"seconds": time.monotonic() - begin, "parts": found}
        if status == 0 and all(part.get("done") for part in found):
            self.missing.pop(name, None)
            self.publish()
            return found
        tails = [_tail(log) for log in logs]
        print("\n".join(line for tail in tails for line in tail), flush=True)
        ends = "; ".join(tail[-1][:300] for tail in tails if tail)
        self.missing[name] = "cut off by the budget" if status is None else f"ended with status {status}: {ends}"
        if status is not None and not may_fail:
            self.checks.add(f"{name} ran", False, self.missing[name])
        self.publish()
        return None

    def _begin(self, stem, processes, job):
        """The process of a job, or torchrun's for several: one that waits for it, or a new one."""
        for part in [job["out"], *(f"{job['out']}.{rank}" for rank in range(processes))]:  # a kept folder may have one of an earlier run
            if os.path.exists(part):
                os.remove(part)
        allocator = job.get("allocator", "default")
        waiting = self.waiting.get((allocator, processes))
        child, early = waiting.pop() if waiting else (self._start(stem, allocator, processes), stem)
        small = {"tiny": self.args.tiny, "short": self.args.device == "cpu"}
        measure.write_json(f"{early}.job.new", {"device": self.args.device, "layers": self.args.layers, **small, **job})
        os.replace(f"{early}.log", f"{stem}.log")  # the process writes on into the same file
        os.replace(f"{early}.job.new", f"{early}.job")
        return child

    def _start(self, stem, allocator, processes):
        """A process that imports, and does the job that it finds at `stem` with the ending .job."""
        with contextlib.suppress(FileNotFoundError):  # of an earlier run
            os.remove(f"{stem}.job")
        worker = os.path.join(HERE, "rehearse.py" if self.args.rehearse else "worker.py")
        launcher = []
        if processes > 1:
            self.port += 1  # those that wait have theirs already
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-addr", "127.0.0.1",
                        "--master-port", str(self.port)]  # fmt: skip
        command = [sys.executable, *launcher, worker, f"{stem}.job", str(os.getpid())]
        with open(f"{stem}.log", "w") as f:
            return subprocess.Popen(command, stdout=f, stderr=subprocess.STDOUT, env=self._environment(allocator))

    def prepare(self):
        """Starts the processes of the jobs to come: they import while kernels are tuned, when nothing is timed."""
        for at, (allocator, processes) in enumerate([] if self.args.rehearse else expected(self.args)):
            stem = os.path.join(self.work, f"waiting-{at}")
            self.waiting.setdefault((allocator, processes), []).append((self._start(stem, allocator, processes), stem))

    def close(self):
        """Ends those that were not needed."""
        for child, stem in [pair for pairs in self.waiting.values() for pair in pairs]:
            _stop(child)
            os.remove(f"{stem}.log")

    def _environment(self, allocator):
        environment = {
            **os.environ, **allocators.environment(allocator), "FLA_FLASH_QLA": "0", "FLA_CACHE_MODE": "default",
            "FLA_CONFIG_DIR": os.path.join(self.work, "fla"), "TRITON_CACHE_DIR": os.path.join(self.work, "triton"),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        if self.args.rehearse:
            environment["LD_PRELOAD"] = os.path.abspath(self.args.rehearse)
        return environment

    def publish(self):
        """Writes the page and the figures as they are now."""
        text = page.text(self.heading, self.checks, self.results, self.missing, self.args)
        if self.args.markdown:
            with open(self.args.markdown, "w") as f:
                f.write(text)
        figures = {"heading": self.heading, "checks": self.checks.rows, "results": self.results, "missing": self.missing}
        measure.write_json(self.args.json, figures)
        return text


def expected(args):
    """Allocator and number of processes of each job that will be started: the one that tunes, then those of the chosen sections."""
    yield "default", 1
    for section in args.only:
        if section in WORKLOADS:
            yield from ((name, 1) for name in args.allocators for _ in range(2 if name == "terrace" else 1))
        elif section == "ranks":
            yield from [("terrace", 2)] * 2
        elif section == "host":
            yield from ((name, 1) for name in args.allocators for _ in WORKLOADS)
        else:
            yield "terrace" if section == "planned" else "default", 1


def tune(bench):
    bench.prepare()
    tokens = 20 if bench.args.device == "cpu" else 4128
    result = bench.run("tune", kind="tune", tokens=tokens, ours=True)
    if result and not bench.args.tiny:
        bench.checks.add("transformers calls FLA's rule", result["rule"].startswith("fla."), result["rule"])


def workload(bench, name):
    """The three allocators over one workload; Terrace twice: plans recorded in an ample reservation, then loaded into one that fits."""
    common = {"kind": "workload", "workload": name}
    chosen = bench.args.allocators
    few = 0  # forwards: as many as the rounds that every process does
    if "default" in chosen:
        bench.run(f"{name} default", allocator="default", forwards=few, **common)
    if "expandable" in chosen and not bench.args.rehearse:  # it has no memory to map piecewise
        bench.run(f"{name} expandable", allocator="expandable", forwards=few, **common)
    if "terrace" in chosen:
        terrace(bench, name, few, common)
    if not bench.args.rehearse:  # no kernel ran
        check_outputs(bench, name)


def terrace(bench, name, few, common):
    """Plans recorded and loaded."""
    plan = os.path.join(bench.work, f"{name}.plans")
    first = bench.run(f"{name} terrace", allocator="terrace", forwards=bench.args.forwards, budget=bench.ample(name), save=plan, **common)
    if first is None:
        return
    loaded = {"allocator": "terrace", "forwards": few, "plan": plan, **common}
    # Between what a settled round had at least and where it lay: in less room many of the gaps are used. Where that is too little, the latter.
    least, lay = first["stats"]["arena"] + first["stats"]["outside_peak"], first["suggested_budget"]
    fits = bench.run(f"{name} terrace, loaded", budget=round_up((least + lay) // 2 + SLACK), may_fail=True, **loaded)
    if fits is None:
        fits = bench.run(f"{name} terrace, loaded", budget=round_up(lay + SLACK), **loaded)
    if bench.args.device != "cpu":
        check_plans(bench, name, first, fits)


def round_up(size):
    """To whole pages of the driver."""
    return -(-size // (2 << 20)) * (2 << 20)


def check_outputs(bench, name):
    """Every hashed round with Terrace gives what a round of PyTorch's own allocators gave, in all steps. Those may be of more than one kind:
    attention's decode step on an H200 is not the same to the bit each time (results of 2026-12-03)."""
    rounds = {(job, at): digests for job, r in bench.results.items() if job.startswith(f"{name} ")
              for part in r["parts"] for at, digests in zip(("first", "last"), part.get("digests", []), strict=False)}  # fmt: skip
    if not rounds:
        return
    first = next(iter(rounds.values()))
    own = [digests for (job, _), digests in rounds.items() if "terrace" not in job] or [first]
    others = [f"{job}, {at} round: {differing(own[0], digests)}" for (job, at), digests in rounds.items() if digests not in own]
    text = "; ".join(others) or f"{len(first)} steps of {len(rounds)} rounds"
    strays = [digests for digests in own if digests != own[0]]
    if strays:
        text += f"; of PyTorch's own {len(own)} rounds {len(strays)} differ from the first: {differing(own[0], strays[0])}"
    bench.checks.add(f"{name}: outputs are bitwise those of PyTorch's own allocators, first and last round", not others, text)


def differing(expected, digests):
    """Where a round gave something else."""
    steps = [at for at, (a, b) in enumerate(zip(expected, digests, strict=True)) if a != b]
    return f"{len(steps)} of {len(expected)} steps, the first is {steps[0]}"


def check_plans(bench, name, first, fits):
    checks = bench.checks
    checks.add(f"{name}: {first['forwards']} forwards >= {bench.args.forwards}", first["forwards"] >= bench.args.forwards)
    stats, settled, last = first["stats"], first["settled"], first["last"]
    checks.add(f"{name}: arena <= 1.02 x planned peak live", stats["arena"] <= 1.02 * stats["lower_bound"],
               f"{stats['arena']} / {stats['lower_bound']} = {stats['arena'] / max(1, stats['lower_bound']):.4f}")  # fmt: skip
    for which, result in (("recorded", first), ("loaded", fits)):
        if result:
            s = result["stats"]
            share = s["hits_warm"] / max(1, s["replay_allocs_warm"])
            what = f"{name}, {which}: in-plan hits of keys seen twice >= 98%"
            checks.add(what, share >= 0.98, f"{share:.4f} of {s['replay_allocs_warm']}")
    grown = {w: last["stats"][w] - settled["stats"][w] for w in ("arena", "outside_peak", "reservation")}
    grown["device"] = last["device_used"] - settled["device_used"]
    checks.add(f"{name}: no growth from settled to forward {first['forwards']}", all(v <= 0 for v in grown.values()), str(grown))


def long(bench):
    """What the two jobs with the long prefill are told."""
    dry = bench.args.device == "cpu"
    return {"tokens": LONG_SHORT if dry else LONG, "window": WINDOW_SHORT if dry else WINDOW}


def kinds(bench):
    result = bench.run("kinds", kind="kinds", **long(bench))
    if not result:
        return
    fla, ours, windows = (result["rows"][n] for n in ("FLA", "Terrace", "windows"))
    if not bench.args.rehearse:
        worst = max(result["errors"].values())
        bench.checks.add("kinds: outputs with either rule, and in windows, agree", worst <= 0.05, f"relative RMS {worst:.2e}")
    replaced = ours["replaced"]
    bench.checks.add("kinds: both functions were replaced", len(replaced) >= 2, ", ".join(replaced[:2]))
    layers = sum(name.endswith(".linear_attn.forward") for name in windows["replaced"])
    bench.checks.add("kinds: all Gated DeltaNet layers have windows", layers == bench.args.layers - bench.args.layers // 4, str(layers))
    if bench.args.device == "cpu":
        return
    for what, of in (("Gated DeltaNet", lambda row: row["peaks"]["Gated DeltaNet"]), ("a call of the rule", lambda row: row["rule"])):
        bench.checks.add(f"kinds: the peak of {what} is lower with ours", of(ours) < of(fla), f"{of(ours)} < {of(fla)}")
    for kind in ("Gated DeltaNet", "MLP", "elsewhere"):
        less, more = (row["peaks"][kind] for row in (windows, ours))
        bench.checks.add(f"kinds: the peak of {kind} is lower in windows", less < more, f"{less} < {more}")


def ranks(bench):
    job = {"kind": "ranks", "budget": bench.ample("ranks"), "plan": os.path.join(bench.work, "ranks.plans"), "layers": 4,
           "lengths": [20, 70] if bench.args.device == "cpu" else [1000, 4128]}  # fmt: skip
    first = bench.run("ranks", processes=2, allocator="terrace", rounds=4, load=False, **job)
    second = first and bench.run("ranks, loaded", processes=2, allocator="terrace", rounds=2, load=True, **job)
    if not second:
        return
    for rank, (a, b) in enumerate(zip(first, second, strict=True)):
        if not bench.args.rehearse:
            bench.checks.add(f"rank {rank}: outputs equal in all rounds, recorded and loaded", len({*map(tuple, (*a["digests"], *b["digests"]))}) == 1)
        if bench.args.device != "cpu":
            stats = b["figures"]["stats"]
            share = stats["hits"] / max(1, stats["replay_allocs"])
            what = f"rank {rank}: in-plan hits with its own plans loaded >= 98%"
            bench.checks.add(what, share >= 0.98, f"{share:.4f} of {stats['replay_allocs']}")


def planned(bench):
    result = bench.run("planned", kind="kinds_planned", allocator="terrace", budget=bench.ample("planned"), **long(bench))
    if result and bench.args.device != "cpu":
        windows, ours, fla = (result["arenas"][n] for n in ("windows", "Terrace", "FLA"))
        bench.checks.add("planned: the arena is smaller with ours", ours < fla, f"{ours} < {fla}")
        bench.checks.add("planned: the arena is smaller in windows", windows < ours, f"{windows} < {ours}")


def host(bench):
    """Time of the calls of each workload, with all allocators in turns."""
    names = [name for name in bench.args.allocators if name != "expandable" or not bench.args.rehearse]
    for name in WORKLOADS:
        rounds = ROUNDS[name] if bench.args.device != "cpu" else 2
        common = {"kind": "turns", "workload": name, "rounds": rounds}
        jobs = [{"allocator": each, **common, **({"budget": bench.ample(name)} if each == "terrace" else {})} for each in names]
        found = bench.in_turns(f"host {name}", jobs)
        if found and {"default", "terrace"} <= {*names} and bench.args.device != "cpu" and not bench.args.rehearse:
            ours, base = (found[names.index(each)]["rounds"] for each in ("terrace", "default"))
            ratio = page.of_default(ours, base, "host_ms")
            bench.checks.add(f"host {name}: host time of a round <= 1.05 x default's", ratio <= 1.05, f"{ratio:.3f}")


SECTION = {"tune": tune, "mixed": lambda b: workload(b, "mixed"), "chat": lambda b: workload(b, "chat"), "kinds": kinds, "ranks": ranks,
           "planned": planned, "host": host}  # fmt: skip


def _fifo(path):
    """A new pipe in the file system, opened for both ends."""
    if os.path.exists(path):
        os.remove(path)
    os.mkfifo(path)
    return os.open(path, os.O_RDWR)


def _end(children, seconds):
    """0, or the first status that is another, or None if time was up. No process is left running."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            ended = [child.poll() for child in children]
            if any(ended) or None not in ended:
                return next(filter(None, ended), 0)
            time.sleep(0.05)
        return None
    finally:
        for child in children:
            _stop(child)


def _stop(child):
    child.terminate()
    try:
        child.wait(timeout=10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _tail(log):
    with open(log, errors="replace") as f:
        return f.read().strip().splitlines()[-12:]


def _read(path):
    try:
        with open(path) as f:
            return json.load(f)
    except (OSError, ValueError):
        return {}


def arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument("--rehearse", metavar="LIBCUDA", help="the imagined CUDA: memory without values")
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--forwards", type=int, default=200, help="of each workload with Terrace")
    p.add_argument("--only", action="append", choices=SECTIONS, help="may be given more than once; kernels are tuned always")
    p.add_argument("--allocators", action="append", choices=allocators.NAMES, help="of the workloads; may be given more than once")
    p.add_argument("--budget", type=float, default=3600, help="seconds for all of it")
    p.add_argument("--work", help="folder for compiled kernels, plans and logs; a new one otherwise")
    p.add_argument("--markdown")
    p.add_argument("--json")
    args = p.parse_args()
    args.only = args.only or SECTIONS
    args.tiny = args.device == "cpu" or args.rehearse is not None
    if args.rehearse and args.device == "cpu":
        p.error("--rehearse imagines a CUDA device; leave --device out")
    args.allocators = args.allocators or list(allocators.NAMES)
    return args


if __name__ == "__main__":
    main()
