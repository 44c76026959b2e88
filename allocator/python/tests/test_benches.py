"""benches/pytorch on the imagined CUDA: PyTorch's own requests, allocator and memory, without kernels.

The script checks itself: the arena against the planned peak live, hits, growth, and a reservation that just fits the loaded plans.
"""

import importlib
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
RUN = Path(__file__).parents[3] / "benches" / "pytorch" / "run.py"


def test_a_conversation_and_a_long_prompt_are_planned_as_promised(fake, tmp_path):
    page = tmp_path / "page.md"
    command = [sys.executable, RUN, "--rehearse", fake, "--layers", "4", "--forwards", "100", "--only", "chat", "--only", "kinds"]
    command += ["--only", "planned", "--work", tmp_path, "--markdown", page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text()
    passed = re.search(r"Checks: (\d+) passed, 0 failed", text)
    assert passed and int(passed[1]) >= 14, text
    for row in ("| Terrace, plans loaded |", "| Gated DeltaNet |", "| Terrace, windows of 4,096 |"):
        assert row in text


def test_host_time_is_that_of_processes_in_turns(tmp_path):
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    command = [sys.executable, RUN, "--device", "cpu", "--layers", "4", "--only", "host", "--work", tmp_path, "--markdown", page]
    done = subprocess.run([*command, "--json", figures], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(figures.read_text())["results"]
    for name, phases in (("mixed", {"prefill"}), ("chat", {"prefill", "decode"})):
        parts = results[f"host {name}"]["parts"]
        assert [part["job"]["allocator"] for part in parts] == ["default", "expandable", "terrace"]
        assert all(len(part["rounds"]) == 2 and {*part["rounds"][0]} == phases for part in parts)
        spans = sorted(tuple(span) for part in parts for span in part["spans"])
        assert len(spans) == 6 and all(end <= begin for (_, end), (begin, _) in pairwise(spans)), "one after another"
        assert f"## {name}: host time" in page.read_text()


def test_rounds_are_compared_lap_by_lap(benches):
    def rounds(*ms):
        return [{"prefill": {"host_ms": a}, "decode": {"host_ms": b}} for a, b in ms]

    # The machine is twice as slow in the second lap and ten times in the third.
    base = rounds((1, 1), (2, 2), (10, 10))
    assert benches.page.of_default(rounds((1, 2), (3, 3), (15, 15)), base, "host_ms") == 1.5
    assert benches.page.of_default(base, base, "host_ms") == 1.0


@pytest.mark.parametrize(
    ("default", "ours", "passes", "says"),
    [
        (["ab", "ab"], ["ab", "ab"], True, "2 steps of 4 rounds"),
        (["ab", "ax"], ["ax", "ab"], True, "of PyTorch's own 2 rounds 1 differ from the first: 1 of 2 steps, the first is 1"),
        (["ab", "ab"], ["ab", "xb"], False, "chat terrace, last round: 1 of 2 steps, the first is 0"),
        (["ab", "ax"], ["ab", "yx"], False, "chat terrace, last round: 2 of 2 steps, the first is 0"),
        ([], ["ab", "ac"], False, "chat terrace, last round: 1 of 2 steps, the first is 1"),
    ],
)
def test_outputs_are_held_against_those_of_pytorchs_own_allocators(benches, default, ours, passes, says):
    bench = SimpleNamespace(results={}, checks=benches.measure.Checks())
    for job, rounds in (("default", default), ("terrace", ours)):
        bench.results[f"chat {job}"] = {"parts": [{"digests": [list(steps) for steps in rounds]}]}
    bench.results["mixed terrace"] = {"parts": [{"digests": [["other"]]}]}
    benches.check_outputs(bench, "chat")
    (row,) = bench.checks.rows
    assert row["ok"] == passes and says in row["detail"]


@pytest.mark.parametrize(("status", "seconds", "expected"), [(0, 60, 0), (3, 60, 3), (0, 0.2, None)])
def test_nobody_waits_for_a_process_that_failed(benches, status, seconds, expected):
    # The other one waits for a token that never comes, unless all is well.
    others = "pass" if expected == 0 else "import time; time.sleep(600)"
    children = [subprocess.Popen([sys.executable, "-c", code]) for code in (f"raise SystemExit({status})", others)]
    assert benches._end(children, seconds) == expected
    assert all(child.poll() is not None for child in children)


@pytest.fixture
def benches(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(RUN.parent))
    return importlib.import_module("run")
