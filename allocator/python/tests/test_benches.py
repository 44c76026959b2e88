"""benches/pytorch on the imagined CUDA: PyTorch's own requests, allocator and memory, without kernels.

The script checks itself: the arena against the planned peak live, hits, growth, and a reservation that just fits the loaded plans.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
RUN = Path(__file__).parents[3] / "benches" / "pytorch" / "run.py"


def test_a_conversation_and_a_long_prompt_are_planned_as_promised(fake, tmp_path):
    page = tmp_path / "page.md"
    command = [sys.executable, RUN, "--rehearse", fake, "--layers", "4", "--forwards", "100", "--only", "chat", "--only", "kinds"]
    done = subprocess.run([*command, "--work", tmp_path, "--markdown", page], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text()
    passed = re.search(r"Checks: (\d+) passed, 0 failed", text)
    assert passed and int(passed[1]) >= 8, text
    for row in ("| Terrace, plans loaded |", "| Gated DeltaNet |"):
        assert row in text


def test_one_allocator_is_compared_with_an_earlier_run(tmp_path):
    def run(*more, layers="4"):
        command = [sys.executable, RUN, "--device", "cpu", "--layers", layers, "--forwards", "36", "--only", "mixed", "--work", tmp_path]
        return subprocess.run([*command, *more], capture_output=True, text=True, timeout=900)

    earlier, page = tmp_path / "earlier.json", tmp_path / "page.md"
    done = run("--allocators", "default", "--json", earlier)
    assert done.returncode == 0, done.stdout + done.stderr
    digest = json.loads(earlier.read_text())["results"]["mixed default"]["parts"][0]["digests"][0]

    terrace = ("--allocators", "terrace", "--earlier", earlier)
    done = run(*terrace, "--expect-hash", f"mixed={digest[:8]}", "--markdown", page)
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text()
    for row in ("| default (earlier) |", "| Terrace, plans loaded |", "equal to the earlier run's", f"those expected, {digest[:8]}"):
        assert row in text, text

    done = run(*terrace, layers="3")
    assert done.returncode == 2
    assert "its job 'mixed default' had layers = 4, this run has 3" in done.stderr

    changed = json.loads(earlier.read_text())
    changed["results"]["mixed default"]["parts"][0]["digests"] = ["0" * 32]
    earlier.write_text(json.dumps(changed))
    done = run(*terrace)
    assert done.returncode == 1
    assert "FAILED mixed: outputs are bitwise equal to the earlier run's" in done.stdout

    # Tiles that moved explain outputs that differ: then nothing is said about the allocators.
    changed["results"]["tune"]["parts"][0]["tiles"] = {"kernel [64]": "a tile"}
    earlier.write_text(json.dumps(changed))
    done = run(*terrace)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "outputs beside the earlier run's: not measured: 1 kernels were tuned otherwise, such as kernel [64]" in done.stdout
