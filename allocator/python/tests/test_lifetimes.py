"""Tensors that are freed late, elsewhere, twice, or never: nothing that lives is handed out, and the process ends as it should."""

from __future__ import annotations

import sys

import pytest

MIB = 1 << 20


def a_cycle_that_the_collector_frees_late():
    """T07: the planned reuse of bytes whose tensor Python has not freed yet."""
    import gc

    import torch

    import terrace

    gc.disable()
    alloc = terrace.install("64MiB")

    def forward(leak, value):
        a = torch.full((MIB,), value, dtype=torch.uint8, device="cuda")
        kept = [a]
        if leak:
            kept.append(kept)
        address = a.data_ptr()
        del a, kept
        # The plan has these bytes free here.
        b = torch.full((MIB,), value + 1, dtype=torch.uint8, device="cuda")
        return address, b.data_ptr()

    with alloc.step("forward"):
        forward(False, 1)
    with alloc.step("forward"):
        first, second = forward(False, 3)
    assert first == second, "the plan reuses them"
    for _ in range(50):
        with alloc.step("forward"):
            first, second = forward(True, 5)
        assert first != second, "a live tensor's bytes were handed out"
    assert torch.cuda.memory_allocated() == 50 * MIB
    gc.collect()
    assert torch.cuda.memory_allocated() == 0
    divergences = alloc.stats()["divergences"]
    assert divergences["late_free"] + divergences["outlived"] + divergences["blocked"] > 0
    assert divergences["freed_twice"] == divergences["unknown_free"] == 0


def a_collection_in_the_middle_of_a_step():
    import gc

    import torch

    import terrace

    alloc = terrace.install("64MiB")
    gc.disable()
    for turn in range(6):
        garbage = [torch.empty(MIB, dtype=torch.uint8, device="cuda")]
        garbage.append(garbage)
        del garbage
        with alloc.step("forward"):
            a = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
            if turn % 2:
                gc.collect()
            b = torch.empty(MIB, dtype=torch.uint8, device="cuda")
            assert a.data_ptr() + 2 * MIB <= b.data_ptr() or b.data_ptr() + MIB <= a.data_ptr()
            del a, b
    gc.collect()
    assert torch.cuda.memory_allocated() == 0


def outputs_outlive_their_steps():
    import torch

    import terrace
    from child import REAL

    alloc = terrace.install("64MiB")
    kept = []
    for turn in range(20):
        with alloc.step("forward"):
            hidden = torch.full((MIB,), turn, dtype=torch.uint8, device="cuda")
            out = hidden.clone()
            del hidden
        kept.append(out)
        kept = kept[-5:]
        del out
    assert len({tensor.data_ptr() for tensor in kept}) == 5
    if REAL:
        assert [int(tensor.min()) for tensor in kept] == [int(tensor.max()) for tensor in kept] == list(range(15, 20))
    stats = alloc.stats()
    assert stats["hit_rate"] == 1.0, stats
    assert stats["outside"] == 5 * MIB


def an_exception_in_a_step():
    import torch

    import terrace

    alloc = terrace.install("64MiB")

    def forward(fail):
        a = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
        if fail:
            raise ValueError("of the model")
        return a + 1

    for turn in range(9):
        try:
            with alloc.step("forward"):
                forward(turn % 3 == 1)
        except ValueError as error:
            # A traceback keeps the frame, and its tensors, alive.
            kept = error
    assert torch.cuda.memory_allocated() == 2 * MIB, "of the last traceback"
    del kept
    assert torch.cuda.memory_allocated() == 0
    assert alloc.stats()["divergences"]["unbalanced"] == 0


def frees_from_everywhere():
    """T09, by way of PyTorch: frees from other threads, of what is unknown, and twice."""
    import ctypes
    import threading

    import torch

    import terrace

    alloc = terrace.install("64MiB")
    tensors = [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(32)]

    def drop(share):
        with alloc.step("of a thread"):
            share.clear()

    shares = [tensors[i::8] for i in range(8)]
    del tensors
    threads = [threading.Thread(target=drop, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.cuda.memory_allocated() == 0
    free = ctypes.CDLL(terrace._terrace.__file__).terrace_torch_free
    free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    base = alloc._devices[0].reservation()[0]
    for at in (None, 0x1234, base, base + 512, base + 63 * MIB):
        free(at, 1, 0, None)
        free(at, 1, 7, None)
    divergences = alloc.stats()["divergences"]
    assert divergences["unknown_free"] + divergences["freed_twice"] == 7, divergences
    whole = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    del whole


def leaves_tensors_to_the_end_of_the_interpreter():
    import atexit
    import builtins

    import torch

    import terrace

    alloc = terrace.install("64MiB")
    builtins.kept_for_ever = torch.ones(MIB, dtype=torch.uint8, device="cuda")
    cycle = [torch.ones(MIB, dtype=torch.uint8, device="cuda")]
    cycle.append(cycle)
    sys.modules["kept"] = cycle
    step = alloc.step("never ended")
    step.__enter__()
    torch.ones(MIB, dtype=torch.uint8, device="cuda")
    atexit.register(lambda: print("freed at exit", torch.cuda.memory_allocated() >= 2 * MIB))


def forks():
    import os

    import torch

    import terrace

    alloc = terrace.install("64MiB")
    kept = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    child = os.fork()
    if child == 0:
        try:
            alloc.stats()
        except terrace.TerraceError as refused:
            # Freeing what the parent owns is nothing, and the end of the child is quiet.
            del kept
            os._exit(0 if "is a fork" in str(refused) else 3)
        os._exit(4)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.cuda.memory_allocated() == MIB
    del kept
    assert torch.cuda.memory_allocated() == 0


def test_a_tensor_that_the_collector_frees_late_is_never_overwritten(child):
    child(a_cycle_that_the_collector_frees_late)


def test_a_collection_in_the_middle_of_a_step_is_served_safely(child):
    child(a_collection_in_the_middle_of_a_step)


def test_outputs_outlive_their_steps(child):
    child(outputs_outlive_their_steps)


def test_an_exception_in_a_step_leaves_what_it_leaves(child):
    child(an_exception_in_a_step)


def test_frees_come_from_everywhere(child):
    child(frees_from_everywhere)


def test_the_interpreter_ends_with_tensors_and_a_step_open(child):
    # Its process must end with status 0, which the frees of the last tensors could prevent.
    child(leaves_tensors_to_the_end_of_the_interpreter)


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="there is no fork on this system")
def test_a_forked_child_touches_nothing_of_its_parent(child):
    child(forks)
