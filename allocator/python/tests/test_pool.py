"""The mode for processes that cannot change their allocator: a MemPool whose segments come from the reservation."""

from __future__ import annotations

MIB = 1 << 20


def beside_pytorchs_own():
    import torch

    import terrace

    # CUDA may have started.
    own = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    alloc = terrace.install("64MiB", mode="pool")
    base, size = alloc._devices[0].reservation()
    with alloc.use_mem_pool():
        inside = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    outside = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    assert base <= inside.data_ptr() < base + size
    assert not base <= outside.data_ptr() < base + size
    assert not base <= own.data_ptr() < base + size
    # PyTorch's own figures go on.
    assert torch.cuda.memory_allocated() == 11 * MIB
    # A segment, not a tensor.
    assert alloc.stats()["usage"]["now"] == {"bytes": 20 * MIB, "buffers": 1}
    with alloc.use_mem_pool():
        again = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    assert alloc.stats()["usage"]["now"]["buffers"] == 1
    del inside, again


def spent():
    import pytest
    import torch

    import terrace

    alloc = terrace.install("64MiB", mode="pool")
    with alloc.use_mem_pool():
        a = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        del a
        # PyTorch keeps the segment for the pool, and splits it for what fits.
        b = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(50 * MIB, dtype=torch.uint8, device="cuda")
        del b
    torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")


def steps():
    import torch

    import terrace

    alloc = terrace.install("256MiB", mode="pool")
    for _ in range(3):
        with alloc.use_mem_pool(), alloc.step("forward"):
            a = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
            del a
    assert alloc.stats()["steps"] == 3


def refused():
    import pytest

    import terrace

    with pytest.raises(terrace.InstallError, match="expandable_segments does not work"):
        terrace.install("64MiB", mode="pool")


def not_in_global():
    import pytest

    import terrace

    alloc = terrace.install("64MiB")
    with pytest.raises(terrace.TerraceError, match=r"needs terrace.install\(mode='pool'\)"), alloc.use_mem_pool():
        pass


def test_it_serves_segments_beside_pytorchs_own_allocator(child):
    child(beside_pytorchs_own)


def test_a_spent_budget_is_pytorchs_own_error_and_the_process_goes_on(child):
    child(spent)


def test_steps_are_allowed_there(child):
    child(steps)


def test_it_does_not_go_with_expandable_segments(child):
    child(refused, env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_a_pool_belongs_to_its_mode(child):
    child(not_in_global)
