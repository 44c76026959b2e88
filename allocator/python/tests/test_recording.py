"""Records of runs: of PyTorch's own allocator, and of the installed one. The file is read back by its own rules."""

from __future__ import annotations

from pathlib import Path

MIB = 1 << 20


def read(path: Path) -> list[tuple[str, ...]]:
    """The events of a profile as text."""
    lines = path.read_text().splitlines()
    assert lines[0] == "terrace-profile 1"
    return [tuple(line.split()) for line in lines if line[:2] in ("a ", "f ", "s ", "e") or line == "e"]


def forward():
    import torch

    a = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    b = torch.empty(1000, dtype=torch.uint8, device="cuda")
    del a
    c = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    del b, c


def of_pytorchs_own_allocator(folder):
    import time

    import pytest
    import torch

    import terrace

    torch.cuda.init()
    kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    with terrace.record(f"{folder}/run.profile") as recording:
        for turn in range(2):
            time.sleep(0.01)
            with recording.step(("prefill", turn)):
                time.sleep(0.01)
                forward()
                time.sleep(0.01)
    assert recording.events >= 16, recording.events
    del kept
    # Nothing goes on being recorded, and what cannot be written is refused.
    assert torch.cuda.memory._snapshot()["device_traces"][0] == []
    with pytest.raises(terrace.TerraceError, match="was asked for nothing"), terrace.record(f"{folder}/none.profile"):
        pass
    with (
        pytest.raises(terrace.TerraceError, match="raise max_events"),
        terrace.record(f"{folder}/none.profile", max_events=3),
    ):
        forward()
    with pytest.raises(KeyError), terrace.record(f"{folder}/none.profile"):
        forward()
        raise KeyError("of the model")
    with pytest.raises(OSError, match="nowhere"), terrace.record(f"{folder}/nowhere/run.profile"):
        forward()
    assert "segments" in terrace.snapshot()


def of_the_installed_one(folder):
    import pytest

    import terrace

    alloc = terrace.install("64MiB")
    with terrace.record(f"{folder}/run.profile") as recording:
        for _ in range(2):
            with alloc.step(("prefill", 1)):
                forward()
    assert recording.events == 16
    with terrace.record(f"{folder}/run.bin") as recording:
        forward()
    assert recording.events == 6
    with pytest.raises(KeyError), terrace.record(f"{folder}/none.profile"):
        raise KeyError("of the model")
    assert [block["state"] for segment in terrace.snapshot()["segments"] for block in segment["blocks"]].count("active_allocated") == 0


def test_a_run_of_pytorchs_own_allocator_is_recorded(child, tmp_path):
    child(of_pytorchs_own_allocator, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["run.profile"]
    events = read(tmp_path / "run.profile")
    kinds = "".join(event[0] for event in events)
    assert kinds == "s" + "aafaff" + "e" + "s" + "aafaff" + "e", events
    assert [int(event[2]) for event in events if event[0] == "a"] == 2 * [3 * MIB, 1000, 5 * MIB]


def test_a_run_of_the_installed_allocator_is_recorded(child, tmp_path):
    child(of_the_installed_one, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.bin", "run.profile"]
    events = read(tmp_path / "run.profile")
    assert "".join(event[0] for event in events) == 2 * ("s" + "aafaff" + "e")
    assert [int(event[2]) for event in events if event[0] == "a"] == 2 * [3 * MIB, 1000, 5 * MIB]
    assert (tmp_path / "run.bin").read_bytes()[:4] != b"terr"
