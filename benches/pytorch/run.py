#!/usr/bin/env python3
"""A Qwen3.5-27B-shaped model in PyTorch on one CUDA machine: memory and host time with PyTorch's allocator, with expandable segments and
with Terrace, and what Terrace's Gated DeltaNet does to the peak. One process for each configuration, since a process has one allocator.

    run.py [--markdown FILE] [--json FILE] [--only SECTION]... [--budget SECONDS] [--work FOLDER] [--layers 8] [--forwards 200]
           [--allocators NAME]... [--earlier FILE] [--expect-hash WORKLOAD=HEX]... [--device cpu | --rehearse LIBCUDA]

Sections, in this order: mixed, kinds, chat, ranks, planned. A page is written after each job: a run that is cut short leaves what it has
measured. A failed check makes the status 1, and so does a job that failed.

Without a GPU, with a tiny model: `--device cpu` computes short prompts, with everything but the CUDA allocators, and measures nothing.
`--rehearse` takes the imagined CUDA of allocator/python/tests/fake, and computes nothing: PyTorch's requests are real, and so are the
figures of memory, for that model; see rehearse.py.

Kernels are tuned once, in the first process, and found on disk by the others: otherwise FLA would choose its tiles anew in each of
them, and outputs would differ for that. FLA_CACHE_MODE and FLA_CONFIG_DIR fix the tile of its l2norm, which it would else tune for
each prompt length; `--work` keeps what was compiled.

Where time is short, `--allocators` takes only some of the allocators of a workload, and `--earlier` the others from an earlier run's
JSON. Its outputs need the tiles of this run: a hash that differs is a failure only where the tiles are the same, and the page says so.
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
import earlier  # noqa: E402
import measure  # noqa: E402
import page  # noqa: E402

SECTIONS = ["mixed", "kinds", "chat", "ranks", "planned"]
WORKLOADS = ("mixed", "chat")
LEAST_S = 25  # no job is begun with less time left
LONG, LONG_SHORT = 60_000, 300
GIB = 1 << 30
# Reservations while plans are recorded: ample, since requests of a step that is recorded are served outside of any plan.
AMPLE = {"mixed": 48 * GIB, "chat": 32 * GIB, "planned": 96 * GIB, "ranks": 20 * GIB}
AMPLE_TINY = GIB
# What a reservation gets beyond the arena and what was seen outside of it: for rounding, and as much again as what comes and goes
# outside, such as caches that grow by being copied, since those leave gaps.
SLACK, SLACK_SHARE = 128 << 20, 1.0
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
        self.args, self.checks, self.results, self.missing = args, measure.Checks(), dict(args.earlier.results), {}
        self.waiting = {name: [] for name in allocators.NAMES}  # (process, its log): imported, and not yet told what to do
        self.end = time.monotonic() + args.budget
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
        left = self.end - time.monotonic()
        if left < LEAST_S:
            self.missing[name] = "out of time"
            self.publish()
            return None
        out = os.path.join(self.work, f"{name}.json")
        small = {"tiny": self.args.tiny, "short": self.args.device == "cpu"}
        common = {"device": self.args.device, "layers": self.args.layers, "out": out, **small}
        path, log = (os.path.join(self.work, f"{name}.{end}") for end in ("job", "log"))
        with open(path, "w") as f:
            json.dump({**common, **job}, f)
        parts = [out] if processes == 1 else [f"{out}.{rank}" for rank in range(processes)]
        for part in parts:  # a kept folder may have one of an earlier run
            if os.path.exists(part):
                os.remove(part)
        begin = time.monotonic()
        print(f"== {name} ({left:.0f} s left)", flush=True)
        status = self._wait(path, log, processes, left, job.get("allocator", "default"))
        found = [_read(part) for part in parts]
        self.results[name] = {"seconds": time.monotonic() - begin, "parts": found}
        if status == 0 and all(part.get("done") for part in found):
            self.missing.pop(name, None)
            self.publish()
            return found[0] if processes == 1 else found
        with open(log, errors="replace") as f:
            tail = f.read().strip().splitlines()[-12:]
        print("\n".join(tail), flush=True)
        self.missing[name] = "cut off by the budget" if status is None else f"ended with status {status}: {tail[-1][:300] if tail else ''}"
        if status is not None and not may_fail:
            self.checks.add(f"{name} ran", False, self.missing[name])
        self.publish()
        return None

    def _wait(self, job, log, processes, seconds, allocator):
        if processes == 1 and self.waiting[allocator]:
            child, early = self.waiting[allocator].pop()
            os.replace(early, log)  # it writes on into the same file
            with contextlib.suppress(BrokenPipeError):  # it ended already: its status and its log say why
                child.stdin.write(job + "\n")
                child.stdin.close()
            return self._end(child, seconds)
        command = [sys.executable, os.path.join(HERE, "rehearse.py" if self.args.rehearse else "worker.py"), job]
        if processes > 1:
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-addr", "127.0.0.1",
                        "--master-port", "29517"]  # fmt: skip
            command[1:1] = launcher
        with open(log, "w") as f:
            child = subprocess.Popen(command, stdout=f, stderr=subprocess.STDOUT, env=self._environment(allocator))
        return self._end(child, seconds)

    def prepare(self):
        """Starts the processes of the jobs to come: they import while kernels are tuned, when nothing is timed."""
        for allocator in [] if self.args.rehearse else expected(self.args):
            log = os.path.join(self.work, f"waiting-{sum(map(len, self.waiting.values()))}.log")
            with open(log, "w") as f:
                child = subprocess.Popen([sys.executable, os.path.join(HERE, "worker.py"), "-"], stdin=subprocess.PIPE, stdout=f,
                                         stderr=subprocess.STDOUT, text=True, env=self._environment(allocator))  # fmt: skip
            self.waiting[allocator].append((child, log))

    def close(self):
        """Lets those go that were not needed."""
        for child, log in [pair for pairs in self.waiting.values() for pair in pairs]:
            child.stdin.close()
            child.wait()
            os.remove(log)

    def _environment(self, allocator):
        environment = {
            **os.environ, **allocators.environment(allocator), "FLA_FLASH_QLA": "0", "FLA_CACHE_MODE": "default",
            "FLA_CONFIG_DIR": os.path.join(self.work, "fla"), "TRITON_CACHE_DIR": os.path.join(self.work, "triton"),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        if self.args.rehearse:
            environment["LD_PRELOAD"] = os.path.abspath(self.args.rehearse)
        return environment

    @staticmethod
    def _end(child, seconds):
        """The status of a process, or None if it had to be stopped."""
        try:
            return child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            child.terminate()
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            return None

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
    """The allocators of the processes that will be started, but for torchrun's: the one that tunes, then those of the chosen sections."""
    yield "default"
    for section in args.only:
        if section in WORKLOADS:
            yield from (name for name in args.allocators for _ in range(2 if name == "terrace" else 1))
        elif section in ("kinds", "planned"):
            yield "default" if section == "kinds" else "terrace"


def tune(bench):
    bench.prepare()
    tokens = 20 if bench.args.device == "cpu" else 4128
    result = bench.run("tune", kind="tune", tokens=tokens, ours=True)
    if result and not bench.args.tiny:
        bench.checks.add("transformers calls FLA's rule", result["rule"].startswith("fla."), result["rule"])


def workload(bench, name):
    """The three allocators over one workload; Terrace twice: plans recorded in an ample reservation, then loaded into one that fits."""
    common = {"kind": "workload", "workload": name, "timed": 3 if bench.args.device != "cpu" else 1}
    chosen = bench.args.allocators
    plan = os.path.join(bench.work, f"{name}.plans")
    once = 1  # of rounds without timing
    if "default" in chosen:
        bench.run(f"{name} default", allocator="default", forwards=once, **common)
    if "expandable" in chosen and not bench.args.rehearse:  # it has no memory to map piecewise
        bench.run(f"{name} expandable", allocator="expandable", forwards=once, **common)
    if "terrace" in chosen:
        terrace(bench, name, plan, once, common)
    if not bench.args.rehearse:  # no kernel ran
        check_outputs(bench, name)


def terrace(bench, name, plan, once, common):
    """Plans recorded and loaded, beside what the default allocator did in this run or an earlier one."""
    first = bench.run(f"{name} terrace", allocator="terrace", forwards=bench.args.forwards, budget=bench.ample(name), save=plan, **common)
    if first is None:
        return
    loaded = {"allocator": "terrace", "forwards": once, "plan": plan, **common}
    # If that is too little, what the recording run took certainly does.
    fits = bench.run(f"{name} terrace, loaded", budget=tight(first), may_fail=True, **loaded)
    if fits is None:
        most = first["stats"]["arena"] + first["stats"]["outside_peak"] + SLACK
        fits = bench.run(f"{name} terrace, loaded", budget=round_up(most), **loaded)
    part = bench.results.get(f"{name} default", {}).get("parts", [{}])[0]
    check_workload(bench, name, part if part.get("done") else None, first, fits)


def tight(first):
    """Bytes of a reservation for the plans that were recorded: the arena, and the most that was seen outside of it."""
    outside, weights = first["outside_peak"], first["weights"]
    needs = first["stats"]["arena"] + outside + SLACK + int(SLACK_SHARE * max(0, outside - weights))
    return round_up(needs)


def round_up(size):
    """To whole pages of the driver."""
    return -(-size // (2 << 20)) * (2 << 20)


def check_outputs(bench, name):
    """Digests of this run among themselves, then beside an earlier run's and the expected one."""
    results = {job: result for job, result in bench.results.items() if job.startswith(f"{name} ")}
    now, before = ({d for j, r in results.items() if ("earlier" in r) == old for p in r["parts"] for d in p.get("digests", [])}
                   for old in (False, True))  # fmt: skip
    if not now:
        return
    ours = [p["digests"] for r in results.values() if "earlier" not in r for p in r["parts"] if p.get("digests")]
    found = f"{len(now)} digest of {sum(map(len, ours))} rounds in {len(ours)} processes"
    bench.checks.add(f"{name}: outputs are bitwise equal in all processes, first and last round", len(now) == 1, found)
    if before:
        moved = bench.args.earlier.moved(bench.results["tune"]["parts"][0].get("tiles", {}))
        if now != before and moved:
            bench.missing[f"{name}: outputs beside the earlier run's"] = f"{len(moved)} kernels were tuned otherwise, such as {moved[0]}"
        else:
            bench.checks.add(f"{name}: outputs are bitwise equal to the earlier run's", now == before, f"{sorted(now)} {sorted(before)}")
    if digest := bench.args.expect_hash.get(name):
        bench.checks.add(f"{name}: outputs are those expected, {digest}", all(d.startswith(digest) for d in now))


def check_workload(bench, name, base, first, fits):
    checks, dry = bench.checks, bench.args.device == "cpu"
    checks.add(f"{name}: {first['forwards']} forwards >= {bench.args.forwards}", first["forwards"] >= bench.args.forwards)
    if dry:
        return
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
    if base and not bench.args.rehearse:
        ratio = page.round_ms(first, "host_ms") / page.round_ms(base, "host_ms")
        checks.add(f"{name}: host time of a round <= 1.05 x default's", ratio <= 1.05, f"{ratio:.3f}")


def kinds(bench):
    tokens = LONG_SHORT if bench.args.device == "cpu" else LONG
    result = bench.run("kinds", kind="kinds", tokens=tokens)
    if not result:
        return
    if not bench.args.rehearse:
        bench.checks.add("kinds: outputs with either rule agree", result["error"] <= 0.05, f"relative RMS {result['error']:.2e}")
    replaced = result["rows"]["Terrace"]["replaced"]
    bench.checks.add("kinds: both functions were replaced", len(replaced) >= 2, ", ".join(replaced[:2]))
    if bench.args.device != "cpu":
        for what, of in (("Gated DeltaNet", lambda row: row["peaks"]["Gated DeltaNet"]), ("a call of the rule", lambda row: row["rule"])):
            fla, ours = (of(result["rows"][n]) for n in ("FLA", "Terrace"))
            bench.checks.add(f"kinds: the peak of {what} is lower with ours", ours < fla, f"{ours} < {fla}")


def ranks(bench):
    job = {"kind": "ranks", "budget": bench.ample("ranks"), "plan": os.path.join(bench.work, "ranks.plans"), "layers": 4,
           "lengths": [20, 70] if bench.args.device == "cpu" else [1000, 4128]}  # fmt: skip
    first = bench.run("ranks", processes=2, allocator="terrace", rounds=4, load=False, **job)
    second = first and bench.run("ranks, loaded", processes=2, allocator="terrace", rounds=2, load=True, **job)
    if not second:
        return
    for rank, (a, b) in enumerate(zip(first, second, strict=True)):
        if not bench.args.rehearse:
            bench.checks.add(f"rank {rank}: outputs equal in all rounds, recorded and loaded", len({*a["digests"], *b["digests"]}) == 1)
        if bench.args.device != "cpu":
            stats = b["figures"]["stats"]
            share = stats["hits"] / max(1, stats["replay_allocs"])
            what = f"rank {rank}: in-plan hits with its own plans loaded >= 98%"
            bench.checks.add(what, share >= 0.98, f"{share:.4f} of {stats['replay_allocs']}")


def planned(bench):
    tokens = LONG_SHORT if bench.args.device == "cpu" else LONG
    result = bench.run("planned", kind="kinds_planned", allocator="terrace", tokens=tokens, budget=bench.ample("planned"))
    if result and bench.args.device != "cpu":
        ours, fla = (result["arenas"][n] for n in ("Terrace", "FLA"))
        bench.checks.add("planned: the arena is smaller with ours", ours < fla, f"{ours} < {fla}")


SECTION = {"tune": tune, "mixed": lambda b: workload(b, "mixed"), "chat": lambda b: workload(b, "chat"), "kinds": kinds, "ranks": ranks,
           "planned": planned}  # fmt: skip


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
    p.add_argument("--earlier", metavar="FILE", help="JSON of an earlier run: what the allocators did that are not chosen now")
    p.add_argument("--expect-hash", action="append", default=[], metavar="WORKLOAD=HEX", help="how a workload's digest begins")
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
    pairs = [text.partition("=") for text in args.expect_hash]
    for name, _, digest in pairs:
        if name not in WORKLOADS or not digest:
            p.error(f"--expect-hash takes WORKLOAD=HEX with one of {', '.join(WORKLOADS)}, not {name}")
    args.expect_hash = {name: digest for name, _, digest in pairs}
    try:
        args.earlier = earlier.read(args)
    except (OSError, ValueError) as e:
        p.error(f"--earlier {args.earlier}: {e}")
    return args


if __name__ == "__main__":
    main()
