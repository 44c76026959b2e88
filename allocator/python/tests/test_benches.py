"""benches/pytorch on the imagined CUDA: PyTorch's own requests, allocator and memory, without kernels.

The script checks itself: the arena against the planned peak live, hits, growth, and a reservation that just fits the loaded plans.
"""

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
