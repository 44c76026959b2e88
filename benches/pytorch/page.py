"""The page of results: one Markdown text from what the jobs left."""

import hashlib
import math
import statistics
import subprocess
import time

import measure

NAMES = {
    "default": "default",
    "expandable": "expandable segments",
    "terrace": "Terrace, recording",
    "terrace, loaded": "Terrace, plans loaded",
}
WHAT = {
    "mixed": "12 prefills of mixed length, each with a fresh cache.",
    "chat": "Five turns on one growing cache, 8 decodes each.",
}
COLUMNS = (
    "Device: what the process takes of the GPU beyond an idle CUDA context. The recording run's reservation is ample on purpose; the loaded "
    "one's is half-way from arena and most bytes outside of it in a settled round to `suggested_budget`, and 64 MiB; or the latter and 64 MiB, "
    "if the run failed in less."
)


def heading(command, commit, args):
    import torch

    day = time.strftime("%Y-%m-%d", time.gmtime())
    if args.tiny:
        what = "Rehearsal: memory without values or times" if args.rehearse else "Dry run: nothing is measured"
        return f"{what}. Command: {command}, {day}, commit {commit}; torch {torch.__version__}"
    name, driver = smi("name"), smi("driver_version")
    return f"Command: {command}, {day}, commit {commit}; {name}, driver {driver}, torch {torch.__version__}"


def smi(what):
    """What nvidia-smi says about the first GPU: asking PyTorch would take memory of it."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader", "-i", "0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def text(title, checks, results, missing, args):
    tuned = _part(results, "tune")
    versions = "".join(f", {n} {v}" for n, v in tuned.get("versions", {}).items())
    parts = [title + versions + ".", checks.line() if checks.rows else "Checks: none yet."]
    parts += [f"{name}: not measured: {why}." for name, why in missing.items()]
    if tuned.get("weights"):
        weights = f"{mib(tuned['weights'])} MiB of random weights in bf16"
        shape = "of a tiny geometry" if args.tiny else "of 27B geometry"
        parts.append(f"{args.layers} layers {shape} with head, {weights}; rule from {tuned.get('rule')}.")
    parts += [_workload(results, name) for name in ("mixed", "chat")]
    parts += [_host(results, name) for name in ("mixed", "chat")]
    parts += [_kinds(results), _planned(results), _ranks(results), _checks(checks), _times(results)]
    return "\n\n".join(p for p in parts if p) + "\n"


def _workload(results, name):
    rows, digests, idle = [], {}, _part(results, "tune").get("idle", 0)
    for suffix, shown in NAMES.items():
        r = _part(results, f"{name} {suffix}")
        if not r.get("last"):
            continue
        last, weights = r["last"], r["weights"]
        reserved = last["peak_reserved"]
        live = last.get("peak_live")
        outputs = of_round(r["digests"][-1])
        digest = digests.setdefault(outputs, len(digests) + 1)
        rows.append([shown, mib(reserved), mib(reserved - weights), mib(r["device_peak"] - idle), mib(live - weights) if live else "",
                     r["forwards"], f"{digest} ({outputs})"])  # fmt: skip
    if not rows:
        return ""
    head = ["allocator", "reserved MiB", "beyond weights", "device MiB", "peak live beyond weights", "forwards", "outputs"]
    text = [f"## {name}\n\n{WHAT[name]} {COLUMNS}", measure.table(head, rows)]
    stats = _part(results, f"{name} terrace").get("stats")
    if stats and stats["lower_bound"]:
        share = stats["arena"] / stats["lower_bound"]
        text.append(
            f"Plans: arena {mib(stats['arena'])} MiB, {share:.4f} of the planned peak live; hits {stats['hits_warm']} of "
            f"{stats['replay_allocs_warm']} for keys seen twice; {stats['steps_on_script']} of {stats['steps']} steps exactly as planned; "
            f"{stats['plans']} plans, {stats['plan_ns'] / 1e6:.0f} ms for all of them; overflow at most {mib(stats['overflow_peak'])} MiB."
        )
    return "\n\n".join(text)


def of_round(steps):
    """Eight digits for what all steps of a round gave."""
    return hashlib.blake2b("".join(steps).encode(), digest_size=4).hexdigest()


def _host(results, name):
    parts = results.get(f"host {name}", {}).get("parts", [])
    if not parts or not all(part.get("rounds") for part in parts):
        return ""
    base = next((part["rounds"] for part in parts if part["job"]["allocator"] == "default"), None)
    phases = list(parts[0]["forwards"])
    rows = []
    for part in parts:
        rounds = part["rounds"]
        each = [statistics.median(r[phase]["host_ms"] for r in rounds) / part["forwards"][phase] for phase in phases]
        whole = [statistics.median(_round(r, what) for r in rounds) for what in ("host_ms", "cpu_ms", "whole_ms")]
        ratios = [f"{of_default(rounds, base, what):.3f}" if base else "" for what in ("host_ms", "whole_ms")]
        rows.append([part["job"]["allocator"], *(f"{ms:.2f}" for ms in each), *(f"{ms:.1f}" for ms in whole), *ratios])
    head = ["allocator", *(f"host ms a {phase}" for phase in phases), "host ms a round", "CPU ms", "with the device, ms", "host / default's",
            "with the device / default's"]  # fmt: skip
    return (
        f"## {name}: host time\n\nMedians of {len(parts[0]['rounds'])} rounds; the processes take turns after each. Host: the wall clock of a "
        f"forward's calls before anything waits for the device; CPU: the thread's own time in it. Ratios: the median over rounds, each beside "
        f"the default allocator's of the same lap.\n\n" + measure.table(head, rows)
    )


RULES = ("FLA", "Terrace", "windows")


def _windows(r):
    return f"Terrace, windows of {r['job']['window']:,}"


def _kinds(results):
    r = _part(results, "kinds")
    rows = r.get("rows", {})
    if "Terrace" not in rows:
        return ""
    tokens = r["job"]["tokens"]
    found = [n for n in RULES if n in rows]
    body = [[kind, *(mib(rows[n]["peaks"].get(kind, 0)) for n in found)] for kind in rows["FLA"]["peaks"]]
    body.append(["in a call of the rule, beyond its inputs", *(mib(rows[n]["rule"]) for n in found)])
    body.append(["**whole forward**", *(mib(rows[n]["whole"]) for n in found)])
    body.append(["reserved, with weights", *(mib(rows[n]["reserved"]) for n in found)])
    if not r["job"]["tiny"]:
        body.append(["ms of a forward, median of 3", *(f"{rows[n]['ms']:.0f}" for n in found)])
    errors = [e for e in r.get("errors", {}).values() if math.isfinite(e)]
    error = f" Outputs differ from FLA's by {' and '.join(f'{e:.1e}' for e in errors)} (RMS of the difference over RMS, last 4096 tokens)."
    return (
        f"## One prefill of {tokens:,} tokens, by kind of layer\n\nMost bytes alive beyond weights while a layer of that kind runs, MiB, "
        f"PyTorch's default allocator.{error if errors else ''}\n\n"
        + measure.table(["while in", *("FLA's rule", "Terrace's rule", _windows(r))[: len(found)]], body)
    )


def _planned(results):
    r = _part(results, "planned")
    arenas = r.get("arenas", {})
    if not arenas.get("FLA"):
        return ""
    shown = {"FLA": "FLA", "Terrace": "Terrace", "windows": _windows(r)}
    body = [[shown[n], mib(arenas[n])] for n in RULES if n in arenas]
    return f"## The arena of that prefill\n\n{measure.table(['rule', 'arena MiB'], body)}"


def _ranks(results):
    rows = []
    for name in ("ranks", "ranks, loaded"):
        for part in results.get(name, {}).get("parts", []):
            stats = part.get("figures", {}).get("stats")
            if stats:
                share = f"{stats['hits']} of {stats['replay_allocs']}"
                plan, digest = part["plan"], of_round(part["digests"][-1])
                rows.append([f"{name}, rank {part['rank']}", mib(stats["arena"]), stats["plans"], share, plan, digest])
    if not rows:
        return ""
    head = ["process", "arena MiB", "plans made", "hits", "plan file, bytes", "outputs"]
    return f"## Two processes on one device (torchrun), each with its own reservation and plan file\n\n{measure.table(head, rows)}"


def _checks(checks):
    if not checks.rows:
        return ""
    rows = [["ok" if r["ok"] else "**FAILED**", r["check"], r["detail"]] for r in checks.rows]
    return "## Checks\n\n" + measure.table(["", "check", "found"], rows)


def _times(results):
    return "Seconds: " + ", ".join(f"{name} {r['seconds']:.0f}" for name, r in results.items()) + "."


def of_default(rounds, base, what):
    """The median over rounds of what they took, as a part of what the other process took in the same lap."""
    return statistics.median(_round(ours, what) / _round(theirs, what) for ours, theirs in zip(rounds, base, strict=True))


def _round(phases, what):
    """Milliseconds of a round."""
    return sum(phase[what] for phase in phases.values())


def mib(n):
    return f"{n / 2**20:,.0f}" if abs(n) >= 100 << 20 else f"{n / 2**20:.1f}"


def _part(results, name):
    parts = results.get(name, {}).get("parts") or [{}]
    return parts[0]
