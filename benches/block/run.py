"""The layer in windows on this machine, as Markdown and JSON into FOLDER. Parts, any number of them, all by default:

    peer      a layer of the 27B beside transformers with FLA: peak, time, error
    curve     its time against the window, with a drawing
    million   a prompt of 1,000,000 tokens through it
    card      48 layers, 92,000 tokens in chunks of 4,128 and decoding, in what a 24 GB card would leave

    python3 benches/block/run.py FOLDER --binary PATH_OF_block_prefill [PART...] [--tokens T] [--minutes M]

Needs torch, transformers and fla-core on PYTHONPATH for `peer` alone. `--device cpu --small` tries it all without a GPU.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

MIB = 1 << 20
WINDOWS = ["64", "128", "256", "512", "640", "1024", "2048", "4096", "8192", "all"]
# SERVING's budget for 92,000 tokens on a card of 24 GB has 0.50 GiB for activations; the states of 48 layers come on top.
CARD = (512 << 20) + 48 * 3268608


def block(args, *options):
    """The report of one run of block_prefill, and its command."""
    command = [args.binary, *options, "--device", args.device, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)}\n{ran.stderr}")
    return json.loads(ran.stdout), "block_prefill " + " ".join(command[1:])


def model(args):
    if not args.small:
        return "qwen3.6-27b"
    from peer import SMALL

    path = args.folder / "config.json"
    path.write_text(json.dumps({"architectures": ["Qwen3_5ForCausalLM"]} | SMALL))
    return str(path)


def peer(args):
    from peer import compare

    rows, about = compare(args.binary, args.tokens, ["1024", "2048"], args.device, args.small)
    lines = [
        f"T = {args.tokens}; transformers' layer ran {about['rule']} in {about['fla_calls']} calls.", "",
        "| what | peak of activations, MiB | above the stream, MiB | reserved, MiB | time, ms | RMS to transformers | of what is added "
        "| same bits as the first window |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    stream = rows[1]["residual"]
    for row in rows:
        line = f"| {row['what']} | {row['peak'] / MIB:.1f} | {(row['peak'] - stream) / MIB:.1f} | {row['reserved'] / MIB:.1f} "
        line += f"| {row['seconds'] * 1e3:.2f} |"
        if "rms" in row:
            bits = "yes" if row["same_bits"] else f"no, RMS {row['rms_windows']:.1e}"
            line += f" {row['rms']:.2e} | {row['rms_added']:.2e} | {bits} |"
        lines.append(line if "rms" in row else line + " | | |")
    return "A layer beside transformers with FLA", lines, [{key: row[key] for key in row if key != "report"} for row in rows]


def curve(args):
    points, command, alone = [], "", None
    for window in WINDOWS:
        report, command = block(args, "--model", model(args), "--tokens", str(args.tokens), "--window", window, "--rounds", "6")
        points.append((window, report))
        alone = report["prefill_seconds"] if window == "all" else alone
    lines = [
        f"`{command}` and so on; the median of five prompts after one that warms up.", "",
        "| window | time, ms | of all at once | peak, MiB | above the stream, MiB | bits |", "|---|---:|---:|---:|---:|---|",
    ]
    for window, r in points:
        bits = "same" if r["hash"] == points[-1][1]["hash"] else "other"
        lines.append(
            f"| {window} | {r['prefill_seconds'] * 1e3:.2f} | {r['prefill_seconds'] / alone:.3f} | {r['measured_peak'] / MIB:.1f} "
            f"| {(r['measured_peak'] - r['residual']) / MIB:.1f} | {bits} |"
        )
    drawing = draw([(window, r["prefill_seconds"] / alone) for window, r in points])
    (args.folder / "curve.svg").write_text(drawing)
    return "Time against window", lines, [report | dict(window=window) for window, report in points]


def draw(points):
    """Times as parts of the unwindowed run's, over the windows, evenly spaced since they double."""
    left, bottom, width, height = 60, 260, 520, 220
    most = max(2.0, max(ratio for _, ratio in points))

    def across(at):
        return left + 20 + at * (width - 40) / (len(points) - 1)

    def up(ratio):
        return bottom - ratio / most * height

    text = '<text x="{:.0f}" y="{:.0f}" text-anchor="{}">{}</text>'
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 320" font-family="sans-serif" font-size="12" fill="#222">',
        '<rect width="600" height="320" fill="#fff"/>',
    ]
    step = 0.5 if most <= 3 else 1.0 if most <= 8 else 2.0
    for at in range(int(most / step) + 1):
        y = up(at * step)
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(text.format(left - 8, y + 4, "end", f"{at * step:g}"))
    line = " ".join(f"{across(at):.1f},{up(ratio):.1f}" for at, (_, ratio) in enumerate(points))
    parts.append(f'<polyline points="{line}" fill="none" stroke="#0b62a4" stroke-width="2"/>')
    for at, (window, ratio) in enumerate(points):
        parts.append(f'<circle cx="{across(at):.1f}" cy="{up(ratio):.1f}" r="3" fill="#0b62a4"/>')
        parts.append(text.format(across(at), bottom + 18, "middle", window))
    parts.append(text.format(left + width / 2, bottom + 40, "middle", "tokens resident at once"))
    parts.append(text.format(left, 24, "start", "time of a layer, as a part of the time with all tokens at once"))
    return "\n".join([*parts, "</svg>", ""])


def million(args):
    tokens = "5000" if args.small else "1000000"
    report, command = block(args, "--model", model(args), "--tokens", tokens, "--window", "1024", "--rounds", "2")
    above = (report["measured_peak"] - report["residual"]) / MIB
    line = (
        f"`{command}`: {report['prefill_seconds']:.3f} s, {report['prefill_tokens_per_second']:.0f} tokens/s; peak "
        f"{report['measured_peak'] / MIB:.1f} MiB, {above:.1f} MiB above the stream."
    )
    return f"{tokens} tokens", [line], report


def card(args):
    layers, tokens = ("3", "300") if args.small else ("48", "92000")
    chunk, decode = ("130", "5") if args.small else ("4128", "256")
    seconds = str(int(args.minutes * 60))
    options = ["--model", model(args), "--layers", layers, "--tokens", tokens, "--prefill-chunk", chunk, "--decode", decode]
    options += ["--window", "auto", "--budget", str(CARD), "--rounds", "2", "--seconds", seconds]
    report, command = block(args, *options)
    per_token = report["decode_seconds_per_token"] * 1e3
    lines = [
        f"`{command}`", "", f"Window {report['window']}: {report['why']}.", "",
        "| steps | on script | prompts | seconds | driver allocations at boot, after | free bytes lost | prefill, tokens/s | decode, ms a token "
        "| predicted peak, B | measured peak, B |",
        "|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|",
        f"| {report['steps']} | {report['steps_on_script']} | {report['rounds']} | {report['seconds']:.0f} | "
        f"{report['driver_allocations'][0]}, {report['driver_allocations'][1]} | {report['free_lost']} | "
        f"{report['prefill_tokens_per_second']:.0f} | {per_token:.3f} | {report['predicted_peak']} | {report['measured_peak']} |",
    ]
    return "Layers of the 27B in what a 24 GB card leaves", lines, report


PARTS = dict(peer=peer, curve=curve, million=million, card=card)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--binary", default="target/release/examples/block_prefill")
    parser.add_argument("--tokens", type=int, default=60000)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; give some of {', '.join(PARTS)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in args.parts or PARTS:
        try:
            title, lines, data = PARTS[name](args)
        except SystemExit as reason:
            title, lines, data, failed = f"{name} failed", ["```", str(reason), "```"], None, 1
        text = "\n".join([f"## {title}", "", *lines, ""])
        (args.folder / f"{name}.md").write_text(text)
        (args.folder / f"{name}.json").write_text(json.dumps(data, indent=1))
        print(text, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
