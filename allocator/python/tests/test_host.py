"""The allocator on memory of this process, without PyTorch: what is true of it wherever the memory is."""

from __future__ import annotations

import os
import threading

import pytest

import terrace
from terrace import allocator as module
from terrace._terrace import Device
from terrace.allocator import Allocator

MIB = 1 << 20


@pytest.fixture
def alloc(monkeypatch):
    """An allocator of 64 MiB; the next test can have another."""
    monkeypatch.setattr(module, "_installed", None)
    return terrace.install("64MiB", backing="host", tag="model-a")


def device(alloc: Allocator) -> Device:
    return alloc._devices[0]


def forward(alloc: Allocator, scale: int = 1) -> list[int]:
    """Three requests, two at once; their addresses."""
    memory = device(alloc)
    first = memory.alloc(MIB * scale, 0, "hidden")
    second = memory.alloc(2 * MIB * scale, 0, "gate")
    memory.free(first)
    third = memory.alloc(MIB * scale, 0, "out")
    memory.free(second)
    memory.free(third)
    return [first, second, third]


def test_the_second_step_of_a_key_is_answered_from_its_plan(alloc):
    addresses = []
    for _ in range(4):
        with alloc.step(("prefill", 4128)):
            addresses.append(forward(alloc))
    assert addresses[1] == addresses[2] == addresses[3]
    stats = alloc.stats()
    assert (stats["steps"], stats["steps_on_script"], stats["plans"], stats["reservations"]) == (4, 3, 1, 1)
    assert alloc.required_bytes() == alloc.arena_bytes() == 3 * MIB
    assert stats["usage"]["peak"]["bytes"] == 3 * MIB and stats["usage"]["now"]["bytes"] == 0
    assert stats["usage"]["served"] == stats["usage"]["freed"] == {"bytes": 16 * MIB, "buffers": 12}


def test_a_step_is_a_decorator_too(alloc):
    decorated = alloc.step("decode")(forward)
    assert decorated(alloc) is not None
    assert decorated(alloc) == decorated(alloc)
    assert alloc.stats()["steps"] == 3


def test_an_exception_ends_the_step_and_the_next_one_is_as_ever(alloc):
    for _ in range(2):
        with alloc.step("prefill"):
            planned = forward(alloc)
    left = []
    with pytest.raises(KeyError), alloc.step("prefill"):
        left.append(device(alloc).alloc(MIB, 0, "hidden"))
        raise KeyError("of the model")
    # What the exception left alive is not handed out again.
    with alloc.step("prefill"):
        again = forward(alloc)
    assert left[0] not in again
    device(alloc).free(left[0])
    for _ in range(2):
        with alloc.step("prefill"):
            last = forward(alloc)
    assert last in (again, planned)
    assert alloc.stats()["steps"] == 6
    assert alloc.stats()["usage"]["now"]["bytes"] == 0
    with pytest.raises(terrace.TerraceError, match="has begun no step"):
        device(alloc).end_step()


def test_a_step_left_open_is_closed_by_the_next(alloc):
    device(alloc).begin_step(b"prefill", 0)
    forward(alloc)
    with alloc.step("prefill"):
        forward(alloc)
    with alloc.step("prefill"):
        forward(alloc)
    assert alloc.stats()["divergences"]["unbalanced"] == 1


def test_a_step_object_is_entered_once_at_a_time(alloc):
    step = alloc.step("prefill")
    with step, pytest.raises(terrace.TerraceError, match="open already"), step:
        pass
    with step:
        forward(alloc)


def test_steps_nest(alloc):
    for _ in range(3):
        with alloc.step("outer"), alloc.step("inner"):
            forward(alloc)
    assert alloc.stats()["steps"] == 3 and alloc.stats()["steps_on_script"] == 2


def test_wrong_keys_leave_no_step_open(alloc):
    for key, error in [(["prefill"], TypeError), ("\n", ValueError), (("a", object()), TypeError)]:
        with pytest.raises(error), alloc.step(key):
            pytest.fail("the step began")
    assert alloc.stats()["steps"] == 0


def test_frees_that_are_wrong_are_said_and_harmless(alloc):
    at = device(alloc).alloc(MIB)
    device(alloc).free(at)
    for address in (at, 0x10, at + 512):
        with pytest.raises(terrace.TerraceError, match="free ignored"):
            device(alloc).free(address)
    device(alloc).free(0)
    assert device(alloc).alloc(64 * MIB) != 0


def test_a_spent_budget_is_a_memory_error_with_a_report(alloc):
    kept = device(alloc).alloc(60 * MIB, 0, "cache")
    with pytest.raises(MemoryError, match="out of memory: logits asked for 8388608 bytes") as spent:
        device(alloc).alloc(8 * MIB, 0, "logits")
    assert "cache" in str(spent.value)
    device(alloc).free(kept)
    assert device(alloc).alloc(64 * MIB) != 0
    assert alloc.stats()["usage"]["exhausted"] == 1


def test_plans_are_saved_and_loaded(alloc, tmp_path, monkeypatch):
    for _ in range(2):
        with alloc.step(("prefill", 1)):
            planned = forward(alloc)
    file = tmp_path / "plans.terrace"
    alloc.save(file)
    monkeypatch.setattr(module, "_installed", None)
    other = terrace.install("64MiB", backing="host", tag="model-a")
    assert other.required_bytes() == 0
    assert other.load(file)[0]["keys"] == 1
    assert other.required_bytes() == alloc.required_bytes() == 3 * MIB
    base = [device(of).reservation()[0] for of in (alloc, other)]
    with other.step(("prefill", 1)):
        assert [at - base[1] for at in forward(other)] == [at - base[0] for at in planned]
    assert other.stats()["replay_allocs"] == other.stats()["hits"] == 3


def test_another_models_plans_are_refused_and_nothing_changes(alloc, tmp_path, monkeypatch):
    with alloc.step("prefill"):
        forward(alloc)
    file = tmp_path / "plans.terrace"
    alloc.save(file)
    monkeypatch.setattr(module, "_installed", None)
    other = terrace.install("64MiB", backing="host", tag="model-b")
    with pytest.raises(terrace.TerraceError, match="it was saved for tag 'model-a', and this is tag 'model-b'"):
        other.load(file)
    with pytest.raises(terrace.TerraceError, match="it was saved for rank 0, and this is rank 1"):
        other.load(file, tag="model-a", rank=1)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(terrace.TerraceError, match="rank 1"):
        other.load(file, tag="model-a")
    file.write_bytes(b"not a plan")
    with pytest.raises(terrace.TerraceError, match="plans.terrace"):
        other.load(file, rank=0)
    with pytest.raises(terrace.TerraceError, match="No such file"):
        other.load(tmp_path / "missing", rank=0)
    assert other.required_bytes() == 0
    with other.step("prefill"):
        forward(other)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names on this system")
def test_what_is_no_plain_file_is_written_to_and_never_replaced(alloc, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []

    def tape(path):
        device(alloc).start_tape()
        forward(alloc)
        return device(alloc).stop_tape(str(path), "run")

    with alloc.step("prefill"):
        forward(alloc)
    for write in (alloc.save, tape):
        reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
        reader.start()
        write(pipe)
        reader.join(timeout=60)
        assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert len(read[0]) > 100 and read[1].startswith(b"terrace-profile 1")


def test_a_tape_is_dropped_without_a_file(alloc):
    device(alloc).start_tape()
    forward(alloc)
    device(alloc).drop_tape()
    assert device(alloc).stop_tape("never written", "run") is None


def test_a_step_is_no_time_to_load(alloc, tmp_path):
    alloc.save(tmp_path / "plans")
    with alloc.step("prefill"), pytest.raises(terrace.TerraceError, match="load is possible between steps only"):
        alloc.load(tmp_path / "plans")


def test_installing_twice_says_what_to_use(alloc):
    with pytest.raises(terrace.InstallError, match=r"installed already.*64.00 MiB.*use terrace.current\(\)"):
        terrace.install("1GiB", backing="host")
    assert terrace.current() is alloc


def test_without_an_allocator_every_function_says_to_install(monkeypatch):
    monkeypatch.setattr(module, "_installed", None)
    for call in (terrace.current, lambda: terrace.wrap(forward)):
        with pytest.raises(terrace.InstallError, match="call terrace.install"):
            call()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"budget": "lots"}, "20GiB"),
        ({"budget": 0}, "20GiB"),
        ({"budget": 100}, "holds not one span"),
        ({"budget": 1 << 60}, "more than the"),
        ({"budget": "1MiB", "devices": ()}, "give CUDA ordinals"),
        ({"budget": "1MiB", "devices": [0, 0]}, "give CUDA ordinals"),
        ({"budget": "1MiB", "devices": [-1]}, "give CUDA ordinals"),
        ({"budget": "1MiB", "devices": ["cuda:0"]}, "give CUDA ordinals"),
        ({"budget": "1MiB", "mode": "half"}, "'global' or 'pool'"),
        ({"budget": "1MiB", "backing": "tpu"}, "'cuda' or 'host'"),
    ],
)
def test_what_cannot_be_installed_is_named_and_nothing_is(monkeypatch, arguments, says):
    monkeypatch.setattr(module, "_installed", None)
    with pytest.raises(ValueError, match=says):
        terrace.install(**({"backing": "host"} | arguments))
    assert module.installed() is None


def test_several_devices_each_have_their_own_figures_and_files(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_installed", None)
    alloc = terrace.install("8MiB", devices=[0, 3], backing="host")
    with alloc.step("both"):
        alloc._devices[3].free(alloc._devices[3].alloc(MIB))
    assert (alloc.stats(0)["steps"], alloc.stats(3)["steps"]) == (1, 1)
    with alloc.step("one", device=3):
        pass
    assert (alloc.stats(0)["steps"], alloc.stats(3)["steps"]) == (1, 2)
    with pytest.raises(ValueError, match=r"device 1 is not one .*\[0, 3\]"):
        alloc.stats(1)
    alloc.save(tmp_path / "plans")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plans.0", "plans.3"]
    assert alloc.report().count("reserved at") == 2
    lines = alloc.prometheus().splitlines()
    at = lines.index("# TYPE terrace_steps_total counter")
    assert lines[at + 1 : at + 3] == ['terrace_steps_total{device="0"} 1', 'terrace_steps_total{device="3"} 2']
    assert len([line for line in lines if line.startswith("#")]) == len({line for line in lines if line.startswith("#")})


def test_a_wrapped_function_is_a_step_of_its_key(alloc):
    stepped = terrace.wrap(forward, key=lambda alloc: ("f", 1))
    stepped(alloc)
    stepped(alloc)
    assert alloc.stats()["steps_on_script"] == 1
    assert stepped.__name__ == "forward"
    with pytest.raises(TypeError, match="cannot be called"):
        terrace.wrap(7)
    assert alloc.plan_html(("f", 1)) is not None


def test_a_plan_is_a_page(alloc):
    assert alloc.plan_html("prefill") is None
    with alloc.step("prefill"):
        forward(alloc)
    assert "<html" in alloc.plan_html("prefill")


def test_a_reservation_is_replaced_when_nothing_lives(alloc):
    at = device(alloc).alloc(MIB)
    with pytest.raises(terrace.TerraceError, match="cannot be resized while 1 buffers"):
        alloc.resize("1MiB")
    device(alloc).free(at)
    alloc.resize("1MiB")
    assert device(alloc).reservation()[1] == MIB
