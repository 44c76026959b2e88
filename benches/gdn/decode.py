#!/usr/bin/env python3
"""Decode: Terrace beside FLA's fused_recurrent_gated_delta_rule, 1 and 4 tokens for each of 1, 8 and 64 sequences, float32 states.

Terrace updates its pool in place by slot; FLA writes a new state, as its interface has it. States are rotated so that each call finds
its own in device memory and not in the L2, as between the layers of a model. First errors against float64, then times of a replayed
CUDA graph and of single calls. A failed check makes the status 1.

    decode.py [--library libterrace_kernels.so] [--require FLA] [--heads 48,32] [--json FILE] [--markdown FILE] [--budget SECONDS]
"""

import argparse
import importlib
import importlib.metadata
import shlex
import sys

import torch

import measure
import peers
import reference
from terrace_gdn import Terrace

KEY_HEADS = 16
BATCHES = [1, 8, 64]
TOKENS = [1, 4]
ROTATED_BYTES = 256 << 20


def load_fla(required):
    try:
        rule = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
        version = importlib.metadata.version("fla-core")
    except Exception as e:
        print(f"FLA: not run: {peers.reason(e)}", flush=True)
        if required:
            raise SystemExit(f"FLA is required and does not run: {peers.reason(e)}") from e
        return None, {}, {"FLA": peers.reason(e)}

    def prepare(x, tokens):
        """Sequences of equal length as a batch: the cheapest of its entrances."""
        batch = len(x.cu) - 1
        q, k, v, g, beta = (t.view(batch, tokens, *t.shape[1:]) for t in (x.q, x.k, x.v, x.g, x.beta))

        def call():
            o, ht = rule(q, k, v, g, beta=beta, scale=x.scale, initial_state=x.h0, output_final_state=True, state_v_first=True)
            return o.flatten(0, 1), ht

        return call

    return prepare, {"fla-core": version}, {}


def prepare_ours(library, x, shuffled=False):
    """A call that updates a pool in place; `shuffled` puts the states into a larger pool's slots in another order."""
    n = x.h0.shape[0]
    device = x.v.device
    slots = torch.arange(n, dtype=torch.int32, device=device)
    pool = x.h0.clone()
    if shuffled:
        slots = torch.randperm(2 * n, device=device)[:n].to(torch.int32)
        pool = torch.full((2 * n, *x.h0.shape[1:]), float("nan"), device=device)
        pool[slots.long()] = x.h0
    o = torch.empty_like(x.v)
    run = library.decode(x, o, pool, slots)

    def call():
        run()
        return o, pool

    return call, slots.long()


def check(library, fla, heads, checks):
    for batch in BATCHES:
        for tokens in sorted({*TOKENS, 8}):
            for gates in ("mixed", "weak"):
                x = reference.make([tokens] * batch, KEY_HEADS, heads, seed=5, gates=gates)
                want = reference.chunked(x)
                call, slots = prepare_ours(library, x, shuffled=True)
                o, pool = call()
                case = f"batch {batch}, {tokens} tokens, gates {gates}, Hv {heads}"
                beside = torch.ones(pool.shape[0], dtype=torch.bool, device=x.v.device)
                beside[slots] = False
                checks.add(f"other slots untouched: {case}", bool(pool[beside].isnan().all()))
                other = fla(x, tokens)() if fla else (None, None)
                for what, w, got, theirs in zip(("o", "ht"), want, (o, pool[slots]), other):
                    e = reference.error(w, got)
                    f = reference.error(w, theirs) if fla else None
                    # Far below bfloat16's rounding the order of float32 sums decides which is nearer: no gate there.
                    ok = e <= 6e-3 and (f is None or e <= max(1.25 * f, 1e-5))
                    checks.add(f"{what} error {e:.2e}, FLA's {f if f is None else format(f, '.2e')}: {case}", ok)


def time_one(library, fla, heads, batch, tokens, budget_s):
    state_bytes = batch * heads * reference.DIM * reference.DIM * 4
    sets = max(2, -(-ROTATED_BYTES // state_bytes))
    inputs = [reference.make([tokens] * batch, KEY_HEADS, heads, seed=71 + i) for i in range(sets)]
    calls = {"Terrace": [prepare_ours(library, x)[0] for x in inputs]}
    if fla:
        calls["FLA"] = [fla(x, tokens) for x in inputs]
    times = measure.interleaved(calls, budget_s)
    for name, each in calls.items():

        # Every call's states have memory of their own, as a server's have: were FLA's dropped, each call would write where the last
        # did, and a small batch's writes would never leave the cache.
        def fill(each=each):
            return [call() for call in each]

        times[name]["graph_ms"] = measure.graphed(fill, len(each), budget_s / 4)["ms"]
    # What must move: the state in and out once, and the inputs and output.
    moved = 2 * state_bytes + inputs[0].bytes() - state_bytes + inputs[0].v.numel() * 2
    return {"batch": batch, "tokens": tokens, "heads": heads, "input_sets": sets, "bytes": moved, "times": times}


@torch.no_grad()
def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--library", help="libterrace_kernels.so; otherwise TERRACE_KERNELS, then target/release")
    p.add_argument("--require", action="append", default=[], choices=["FLA"])
    p.add_argument("--heads", default="48,32")
    p.add_argument("--budget", type=float, default=2, help="seconds of timing per row")
    p.add_argument("--json")
    p.add_argument("--markdown")
    args = p.parse_args()
    library = Terrace(args.library)
    fla, versions, missing = load_fla("FLA" in args.require)
    checks, rows = measure.Checks(), []
    for heads in map(int, args.heads.split(",")):
        check(library, fla, heads, checks)
        for batch in BATCHES:
            for tokens in TOKENS:
                rows.append(time_one(library, fla, heads, batch, tokens, args.budget))
    names = ["Terrace"] + (["FLA"] if fla else [])
    head = ["batch x tokens, Hv", *(f"{n} graph us" for n in names), "ratio", *(f"{n} event us" for n in names),
            *(f"{n} host included us" for n in names), "bytes / graph time, TB/s"]
    body = []
    for r in rows:
        t = r["times"]
        cells = [[f"{1e3 * t[n][what]:.1f}" for n in names] for what in ("graph_ms", "ms", "call_ms")]
        ratio = f"{t['Terrace']['graph_ms'] / t['FLA']['graph_ms']:.2f}" if fla else "not run"
        rate = f"{r['bytes'] / t['Terrace']['graph_ms'] / 1e9:.2f}"
        body.append([f"{r['batch']} x {r['tokens']}, {r['heads']}", *cells[0], ratio, *cells[1], *cells[2], rate])
    title = measure.heading("benches/gdn/decode.py " + shlex.join(sys.argv[1:]), versions)
    absent = "".join(f"{n}: not run: {why}.\n" for n, why in missing.items())
    page = f"{title}\n{absent}{checks.line()}\n\nMedians; a graph holds one call for each of the rotated states.\n\n{measure.table(head, body)}\n"
    measure.write_json(args.json, {"heading": title, "machine": measure.machine(), "missing": missing, "checks": checks.rows, "times": rows})
    if args.markdown:
        with open(args.markdown, "w") as f:
            f.write(page)
    for r in checks.failed():
        print("FAILED", r["check"], r["detail"])
    print(page)
    sys.exit(1 if checks.failed() else 0)


if __name__ == "__main__":
    main()
