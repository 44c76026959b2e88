#!/usr/bin/env python3
"""Prefill: Terrace beside FLA, FlashQLA and FlashInfer on one CUDA machine, in one process, on the same inputs.

First what must hold: errors against float64, equal bits for every window, rerun, batch and 64-aligned split, with a poisoned
workspace and canaries around the output. Then time and workspace. The tables come last; a failed check makes the status 1.

    prefill.py [--library libterrace_kernels.so] [--peers FLA,FlashQLA,FlashInfer] [--require FLA] [--json FILE] [--markdown FILE]
               [--only checks|time|sweep|million] [--heads 48,32] [--lengths 4128,...] [--budget SECONDS] [--million-fla]
"""

import argparse
import gc
import shlex
import sys

import torch

import measure
import peers
import reference
from terrace_gdn import Terrace

KEY_HEADS = 16
WINDOWS = [64, 128, 256, 512, 640, 768, 1024, 4096]
SWEEP = [64, 128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048, 4096]
# Tokens of each sequence; the shapes of the table.
SHAPES = [[4128], [1000, 1, 1999, 1128], [16384], [1024] * 16, [60000], [131072]]
SMALL_L2_MULTIPLE = 512 << 20  # input sets are rotated until together they pass this many bytes

LIMIT_O, LIMIT_HT, LIMIT_HT_CORRELATED, LIMIT_OF_FLA = 6e-3, 6e-3, 1.5e-2, 1.25


def named(lengths):
    if len(lengths) == 1:
        return f"{lengths[0]} (1)"
    if len(set(lengths)) == 1:
        return f"{sum(lengths)} ({len(lengths)} x {lengths[0]})"
    return f"{sum(lengths)} ({len(lengths)}: {', '.join(map(str, lengths))})"


class Ours:
    """Terrace with one workspace for everything; `prepare` is what the peers have too."""

    def __init__(self, library, window=None, design="fused"):
        self.library, self.design = library, design
        self.window = library.default_window if window is None else window

    def workspace(self, value_heads, poison=None):
        size = self.library.workspace_bytes(KEY_HEADS, value_heads, self.window, self.design)
        w = self.library.workspace(size)
        return w if poison is None else w.fill_(poison)

    def prepare(self, x, poison=None, workspace=None):
        """A call that writes o and ht, made anew here; `poison` fills workspace and results before every call."""
        w = workspace if workspace is not None else self.workspace(x.v.shape[1], poison)
        o, ht = torch.empty_like(x.v), torch.empty_like(x.h0)
        run = self.library.prefill(x, o, ht, w, self.window, self.design)
        fill = [w.view(torch.uint8), o.view(torch.uint8), ht.view(torch.uint8)] if poison is not None else []

        def call():
            for t in fill:
                t.fill_(poison)
            run()
            return o, ht

        return call


def same(a, b):
    """Equal bits, NaN and signed zeros included."""
    return all(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in zip(a, b))


def check_errors(ours, others, heads, checks):
    """Every implementation against float64 on the same rounded inputs; ours held to the limits, the others only shown."""
    cases = [([4128], "mixed", "random"), ([4128], "weak", "random"), ([4128], "none", "random"), ([4128], "weak", "correlated"),
             ([1000, 1, 1999, 1128], "mixed", "random"), ([1000, 1, 1999, 1128], "weak", "random"), ([1024] * 16, "weak", "random"),
             ([16384], "mixed", "random"), ([60000], "weak", "random")]
    rows = []
    for lengths, gates, keys in cases:
        x = reference.make(lengths, KEY_HEADS, heads, seed=11, gates=gates, keys=keys)
        want = reference.chunked(x)
        found = {}
        for name, prepare in {**ours, **others}.items():
            try:
                found[name] = [reference.error(w, got) for w, got in zip(want, prepare(x)())]
            except Exception as e:
                if name in ours:
                    raise
                print(f"{name}: not run on {named(lengths)}: {peers.reason(e)}", flush=True)
        case = f"{named(lengths)}, gates {gates}, keys {keys}, Hv {heads}"
        for name in ours:
            for what, at, limit in (("o", 0, LIMIT_O), ("ht", 1, LIMIT_HT_CORRELATED if keys == "correlated" else LIMIT_HT)):
                e = found[name][at]
                checks.add(f"{name} {what} error {e:.2e} <= {limit:.1e}: {case}", e <= limit)
                if "FLA" in found:
                    fla = found["FLA"][at]
                    checks.add(f"{name} {what} error {e:.2e} <= {LIMIT_OF_FLA} x FLA's {fla:.2e}: {case}", e <= LIMIT_OF_FLA * fla)
        for name, (o, ht) in found.items():
            rows.append({"case": case, "name": name, "o": o, "ht": ht})
        del x, want
        _release()
    return rows


def check_bits(library, heads, design, checks):
    """Windows, reruns, poison, batch composition, 64-aligned splits and canaries; all compared as bytes."""
    default = Ours(library, design=design)
    for lengths in ([4128], [1000, 1, 1999, 1128], [0, 64, 0, 1, 65, 700, 0]):
        x = reference.make(lengths, KEY_HEADS, heads, seed=23, gates="weak")
        case = f"{named(lengths)}, Hv {heads}, {design}"
        base = [t.clone() for t in default.prepare(x, poison=0)()]
        for window in WINDOWS:
            got = Ours(library, window, design).prepare(x, poison=0xFF)()
            checks.add(f"same bits, window {window}, workspace and results poisoned: {case}", same(base, got))
        again = default.prepare(x)
        checks.add(f"same bits, 20 reruns: {case}", all(same(base, again()) for _ in range(20)))
        for n in range(len(lengths)):
            if lengths[n]:
                o, ht = default.prepare(x.sequence(n))()
                rows = slice(x.cu[n], x.cu[n + 1])
                checks.add(f"same bits, sequence {n} alone: {case}", same([base[0][rows], base[1][n : n + 1]], [o, ht]))
            else:
                checks.add(f"empty sequence {n} keeps its state: {case}", same([base[1][n]], [x.h0[n]]))
    x = reference.make([4128], KEY_HEADS, heads, seed=29, gates="weak")
    base = [t.clone() for t in default.prepare(x)()]
    for split in (64, 2048, 4096):
        first, middle = default.prepare(x.rows(slice(0, split), x.h0))()
        second, last = default.prepare(x.rows(slice(split, None), middle.clone()))()
        checks.add(f"same bits, two calls split at {split}, Hv {heads}, {design}", same(base, [torch.cat([first, second]), last]))
    margin = 32
    wide = torch.full((4128 + 2 * margin, heads, reference.DIM), -1.5, dtype=x.v.dtype, device=x.v.device)
    inside = wide[margin:-margin]
    ht = torch.empty_like(x.h0)
    library.prefill(x, inside, ht, default.workspace(heads), default.window, design)()
    outside = torch.cat([wide[:margin], wide[-margin:]])
    checks.add(f"nothing written outside of o, Hv {heads}, {design}", bool((outside == -1.5).all()) and same(base, [inside, ht]))


def time_shapes(ours, others, heads, shapes, checks, budget_s):
    """Yields a row for each shape: median times, interleaved; the workspace of each. Implementations that fail on a shape show why."""
    for lengths in shapes:
        x = reference.make(lengths, KEY_HEADS, heads, seed=41)
        sets = max(2, min(8, -(-SMALL_L2_MULTIPLE // x.bytes())))
        inputs = [x] + [reference.make(lengths, KEY_HEADS, heads, seed=41 + i) for i in range(1, sets)]
        for other in inputs[1:]:
            other.bounds = x.bounds
        space = {name: Ours.workspace(o, heads) for name, o in ours.items()}
        calls, bytes_, failed = {}, {}, {}
        for name, prepare in {**{n: o.prepare for n, o in ours.items()}, **others}.items():
            try:
                extra = {"workspace": space[name]} if name in ours else {}
                calls[name] = [prepare(i, **extra) for i in inputs]
                bytes_[name] = measure.left_taken(calls[name][0]) if name in ours else measure.workspace(calls[name][0])
            except Exception as e:
                if name in ours:
                    raise
                failed[name] = peers.reason(e)
                calls.pop(name, None)
                print(f"{name}: not run on {named(lengths)}: {failed[name]}", flush=True)
        for name in ours:
            what = f"{name} keeps no device memory beside its workspace: {named(lengths)}, Hv {heads}"
            checks.add(what, bytes_[name] == 0, f"{bytes_[name]} bytes")
            bytes_[name] = space[name].numel()
        times = measure.interleaved(calls, budget_s)
        print(f"{named(lengths)}, Hv {heads}: " + ", ".join(f"{n} {t['ms']:.3f} ms" for n, t in times.items()), flush=True)
        yield {"shape": named(lengths), "tokens": sum(lengths), "sequences": len(lengths), "heads": heads, "input_sets": sets,
               "times": times, "workspace": bytes_, "failed": failed}
        del x, inputs, calls, space
        _release()


def sweep(library, heads, tokens, designs, budget_s):
    """Time and workspace of every window at one length, interleaved in one run."""
    x = reference.make([tokens], KEY_HEADS, heads, seed=53)
    o, ht = torch.empty_like(x.v), torch.empty_like(x.h0)
    calls, sizes = {}, {}
    for design in designs:
        for window in SWEEP:
            one = Ours(library, window, design)
            space = one.workspace(heads)
            calls[design, window] = [library.prefill(x, o, ht, space, window, design)]
            sizes[design, window] = space.numel()
    times = measure.interleaved(calls, 3 * budget_s)
    return [{"design": d, "window": w, "heads": heads, "tokens": tokens, "workspace": sizes[d, w]} | t for (d, w), t in times.items()]


def million(library, heads, fla, checks, budget_s):
    """1,000,000 tokens: the same workspace, 64-bit offsets (the last tokens equal those of a call that starts from the state before
    them), time; with `fla` also FLA, which needs about 72 GiB beside inputs and output."""
    x = reference.make([1_000_000], KEY_HEADS, heads, seed=61, gates="weak")
    _release()
    ours = Ours(library)
    space = ours.workspace(heads)
    call = ours.prepare(x, workspace=space)
    o, ht = call()
    tail = 4096 + 1_000_000 % 64
    head_o = torch.empty_like(x.v[:-tail])
    middle = torch.empty_like(x.h0)
    library.prefill(x.rows(slice(0, -tail), x.h0), head_o, middle, space, ours.window, ours.design)()
    checks.add("1,000,000 tokens: all but the last have the same bits alone", same([head_o], [o[:-tail]]))
    del head_o
    end = ours.prepare(x.rows(slice(-tail, None), middle), workspace=space)()
    checks.add("1,000,000 tokens: the last have the same bits from the state before them", same([o[-tail:], ht], end))
    checks.add("1,000,000 tokens: workspace equals that of 4128", space.numel() == ours.workspace(heads).numel(), f"{space.numel()} bytes")
    calls = {"Terrace": [call]}
    row = {"shape": "1000000 (1)", "heads": heads, "tokens": 1_000_000, "sequences": 1, "input_sets": 1, "failed": {}}
    row["workspace"] = {"Terrace": space.numel()}
    if fla:
        calls["FLA"] = [fla(x)]
        row["workspace"]["FLA"] = measure.workspace(calls["FLA"][0])
    row["times"] = measure.interleaved(calls, budget_s)
    return [row]


def lengths_of(shape):
    """Tokens of each sequence: 60000, 16x1024 or 1000+1+1999."""
    if "x" in shape:
        count, tokens = map(int, shape.split("x"))
        return [tokens] * count
    return [int(t) for t in shape.split("+")]


def mib(n):
    return f"{n / 2**20:.1f}" if n < 100 << 20 else f"{n / 2**20:,.0f}"


def time_table(rows, names):
    head = ["T (sequences), Hv"] + [f"{n} ms / MiB" for n in names] + [f"{names[0]} / {n}" for n in names[1:]] + ["host included, ms"]
    body = []
    for r in rows:
        t = r["times"]
        cells = [f"{t[n]['ms']:.3f} / {mib(r['workspace'][n])}" if n in t else "not run" for n in names]
        ratios = [f"{t[names[0]]['ms'] / t[n]['ms']:.2f}" if n in t else "" for n in names[1:]]
        host = ", ".join(f"{n} {t[n]['call_ms']:.2f}" for n in names if n in t)
        body.append([f"{r['shape']}, {r['heads']}", *cells, *ratios, host])
    return measure.table(head, body)


def _release():
    gc.collect()
    torch.cuda.empty_cache()


def arguments():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--library", help="libterrace_kernels.so; otherwise TERRACE_KERNELS, then target/release")
    p.add_argument("--peers", default=",".join(peers.PREFILL))
    p.add_argument("--require", action="append", default=[], metavar="NAME", help="fail where this peer does not run")
    p.add_argument("--designs", default="fused", help="comma-separated: fused, staged")
    p.add_argument("--heads", default="48,32")
    p.add_argument("--lengths", help="only these shapes, comma-separated: 60000, 16x1024 or 1000+1+1999")
    p.add_argument("--only", action="append", choices=["checks", "time", "sweep", "million"], help="may be given more than once")
    p.add_argument("--budget", type=float, default=4, help="seconds of timing per shape")
    p.add_argument("--million-fla", action="store_true", help="FLA at 1,000,000 tokens too: 72 GiB of workspace")
    p.add_argument("--json")
    p.add_argument("--markdown")
    args = p.parse_args()
    unknown = set(args.peers.split(",")) | set(args.require)
    unknown -= set(peers.PREFILL) | {""}
    if unknown:
        p.error(f"unknown peer {', '.join(sorted(unknown))}; known are {', '.join(peers.PREFILL)}")
    return args


@torch.no_grad()
def main():
    args = arguments()
    parts = args.only or ["checks", "time", "sweep", "million"]
    heads = [int(h) for h in args.heads.split(",")]
    shapes = [lengths_of(t) for t in args.lengths.split(",")] if args.lengths else SHAPES
    library = Terrace(args.library)
    designs = args.designs.split(",")
    ours = {("Terrace" if d == designs[0] else f"Terrace {d}"): Ours(library, design=d) for d in designs}
    others, versions, missing = peers.load(args.peers.split(","), args.require, KEY_HEADS, heads[0])
    checks, errors, times, swept = measure.Checks(), [], [], []
    names = [*ours, *others]
    title = measure.heading("benches/gdn/prefill.py " + shlex.join(sys.argv[1:]), versions)

    def publish():
        """The page so far, also to the files: a run that is cut short leaves what it has measured."""
        absent = "".join(f"{n}: not run: {why}.\n" for n, why in missing.items())
        parts = [title, absent + (checks.line() if checks.rows else "Checks: not run.")]
        if errors:
            table = measure.table(["case"] + [f"{n} o / ht" for n in names], _error_rows(errors, names))
            parts.append(f"\nError ratio against float64 on the same inputs (RMS of the difference over RMS).\n\n{table}")
        if times:
            parts.append(
                f"\nMedian of interleaved runs, inputs rotated, cold L2; workspace beyond inputs, output and final state (ours: the caller's "
                f"workspace, window {library.default_window}). Hk = {KEY_HEADS}, bfloat16, q and k normalised before, float32 states in and "
                f"out.\n\n{time_table(times, names)}")
        if swept:
            table = measure.table(["window", *(f"{d} ms / MiB" for d in designs)],
                                  [[w, *(f"{r['ms']:.3f} / {mib(r['workspace'])}" for r in swept if r["window"] == w)] for w in SWEEP])
            parts.append(f"\nWindows at T = 60000, Hv = {heads[0]}.\n\n{table}")
        page = "\n".join(parts) + "\n"
        measure.write_json(args.json, {"heading": title, "machine": measure.machine(), "versions": versions, "missing": missing,
                                       "checks": checks.rows, "errors": errors, "times": times, "sweep": swept})
        if args.markdown:
            with open(args.markdown, "w") as f:
                f.write(page)
        return page

    if "checks" in parts:
        reference.self_check("cuda")
        for h in heads:
            errors += check_errors({n: o.prepare for n, o in ours.items()}, others, h, checks)
            for d in designs:
                check_bits(library, h, d, checks)
        publish()
    if "time" in parts:
        for h in heads:
            for row in time_shapes(ours, others, h, shapes, checks, args.budget):
                times.append(row)
                publish()
    if "million" in parts:
        times += million(library, heads[0], others.get("FLA") if args.million_fla else None, checks, args.budget)
        publish()
    if "sweep" in parts:
        swept = sweep(library, heads[0], 60000, designs, args.budget)
    page = publish()
    for r in checks.failed():
        print("FAILED", r["check"], r["detail"])
    print(page)
    sys.exit(1 if checks.failed() else 0)


def _error_rows(errors, names):
    cases = list(dict.fromkeys(e["case"] for e in errors))
    by = {(e["case"], e["name"]): f"{e['o']:.2e} / {e['ht']:.2e}" for e in errors}
    return [[c, *(by.get((c, n), "not run") for n in names)] for c in cases]


if __name__ == "__main__":
    main()
