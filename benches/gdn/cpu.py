#!/usr/bin/env python3
"""Prefill on the CPU: Terrace beside PyTorch's own reference of the model family (transformers' `torch_chunk_gated_delta_rule` of
Qwen3-Next), the same inputs in the same process, as many threads each. Errors of both against float64, then tokens per second.

With --oracle, the float64 oracle's rate too (one thread, its own inputs of the same shape). With --gdn-file, the `gdn_file` example gets the
bfloat16 inputs through files: its results must have the bits that the C ABI gave. Needs torch (no GPU) and transformers.

    cpu.py [--library libterrace_kernels.so] [--oracle target/release/examples/gdn_oracle] [--gdn-file target/release/examples/gdn_file]
           [--tokens 1024,2048] [--heads 32] [--threads 2] [--rounds 5] [--json FILE]
"""

import argparse
import importlib.metadata
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
p.add_argument("--library", help="libterrace_kernels.so; otherwise TERRACE_KERNELS, then target/release")
p.add_argument("--oracle", help="the gdn_oracle example")
p.add_argument("--gdn-file", help="the gdn_file example")
p.add_argument("--tokens", default="1024,2048")
p.add_argument("--heads", default="32")
p.add_argument("--threads", type=int, default=os.cpu_count())
p.add_argument("--rounds", type=int, default=5)
p.add_argument("--json")
ARGS = p.parse_args()
# Before anything starts a pool of threads.
os.environ["RAYON_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(ARGS.threads)

import torch  # noqa: E402

import measure  # noqa: E402
import reference  # noqa: E402
from terrace_gdn import Terrace  # noqa: E402

KEY_HEADS = 16


def torch_reference():
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as rule

    def prepare(x):
        h0 = x.h0.transpose(2, 3).contiguous()  # K-first
        q, k, v, g, beta = (t[None] for t in (x.q, x.k, x.v, x.g, x.beta))

        def call():
            o, ht = rule(q, k, v, g=g, beta=beta, chunk_size=64, initial_state=h0, output_final_state=True)
            return o[0], ht.transpose(2, 3)

        return call

    return prepare


def ours(library):
    def prepare(x):
        o, ht = torch.empty_like(x.v), torch.empty_like(x.h0)
        size = library.workspace_bytes(KEY_HEADS, x.v.shape[1], library.default_window)
        run = library.prefill(x, o, ht, library.workspace(size), library.default_window)

        def call():
            run()
            return o, ht

        return call

    return prepare


def through_files(program, x):
    """o and ht of `gdn_file` on these inputs; it reads and writes safetensors with bfloat16 tokens."""
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        given, got = f"{folder}/in.safetensors", f"{folder}/out.safetensors"
        tensors = {"q": x.q, "k": x.k, "v": x.v, "g": x.g, "beta": x.beta, "h0": x.h0, "cu_seqlens": x.bounds.host}
        save_file(tensors, given, metadata={"scale": repr(x.scale), "l2norm": "0"})
        subprocess.run([program, given, got, "--device", "cpu"], check=True)
        out = load_file(got)
        return out["o"], out["ht"]


def oracle_rate(tokens, heads):
    if not ARGS.oracle:
        return None
    # A quarter of the tokens: its time is in proportion, and it is slow.
    command = [ARGS.oracle, str(max(64, tokens // 4)), str(KEY_HEADS), str(heads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def busy_s():
    """Seconds of all cores' work so far, and of this process and its children."""
    with open("/proc/stat") as f:
        fields = [int(n) for n in f.readline().split()[1:]]
    total = sum(fields[:3] + fields[5:8]) / os.sysconf("SC_CLK_TCK")
    return total, sum(os.times()[:4])


def cpu_name():
    with open("/proc/cpuinfo") as f:
        return next((line.split(":")[1].strip() for line in f if line.startswith("model name")), "unknown")


@torch.no_grad()
def main():
    begin, (all_begin, own_begin) = time.perf_counter(), busy_s()
    torch.set_num_threads(ARGS.threads)
    library = Terrace(ARGS.library, device="cpu", threads=ARGS.threads)
    sides = {"Terrace": ours(library), "PyTorch": torch_reference()}
    checks, rows = measure.Checks(), []
    for heads in map(int, ARGS.heads.split(",")):
        for tokens in map(int, ARGS.tokens.split(",")):
            oracle = oracle_rate(tokens, heads)
            for dtype in (torch.float32, torch.bfloat16):
                x = reference.make([tokens], KEY_HEADS, heads, seed=17, dtype=dtype, device="cpu")
                calls = {name: prepare(x) for name, prepare in sides.items()}
                want = reference.chunked(x)
                errors = {n: [reference.error(w, got) for w, got in zip(want, call())] for n, call in calls.items()}
                case = f"T {tokens}, Hv {heads}, {str(dtype).removeprefix('torch.')}"
                if ARGS.gdn_file and dtype == torch.bfloat16:
                    pairs = zip(calls["Terrace"](), through_files(ARGS.gdn_file, x))
                    checks.add(f"gdn_file gives the same bits: {case}", all(torch.equal(a, b) for a, b in pairs))
                times = {n: [] for n in calls}
                for at in range(2 + ARGS.rounds):
                    for side, call in calls.items():
                        start = time.perf_counter()
                        call()
                        if at >= 2:  # the first two warm pools of threads and memory
                            times[side].append(time.perf_counter() - start)
                limit = 1e-5 if dtype == torch.float32 else 6e-3
                for what, e in zip(("o", "ht"), errors["Terrace"]):
                    checks.add(f"{what} error {e:.2e} <= {limit:.0e}: {case}", e <= limit)
                rows.append({"case": case, "tokens": tokens, "errors": errors, "oracle": oracle, "seconds": times})
    head = ["case", *(f"{n}, tokens/s, median (range)" for n in sides), "of PyTorch", "float64 oracle, tokens/s", *(f"{n}, error o / ht" for n in sides)]
    body = []
    for r in rows:
        rates = {n: [r["tokens"] / s for s in (statistics.median(t), max(t), min(t))] for n, t in r["seconds"].items()}
        body.append([r["case"], *("{:,.0f} ({:,.0f} to {:,.0f})".format(*rates[n]) for n in sides),
                     f"{rates['Terrace'][0] / rates['PyTorch'][0]:.2f}",
                     f"{r['oracle']:,.0f}" if r["oracle"] else "not run",
                     *(f"{o:.1e} / {ht:.1e}" for o, ht in r["errors"].values())])
    all_end, own_end = busy_s()
    others = (all_end - all_begin - (own_end - own_begin)) / (time.perf_counter() - begin) / os.cpu_count()
    title = (f"Command: benches/gdn/cpu.py {shlex.join(sys.argv[1:])}, {time.strftime('%Y-%m-%d', time.gmtime())}, commit {measure.commit()}, "
             f"{os.cpu_count()} cores ({cpu_name()}), {ARGS.threads} threads each; other processes took {max(others, 0):.0%} of the machine; "
             f"torch {torch.__version__}, "
             f"transformers {importlib.metadata.version('transformers')}.")
    page = f"{title}\n{checks.line()}\n\n{measure.table(head, body)}\n"
    measure.write_json(ARGS.json, {"heading": title, "checks": checks.rows, "rows": rows})
    print(page)
    sys.exit(1 if checks.failed() else 0)


if __name__ == "__main__":
    main()
