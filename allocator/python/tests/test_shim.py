"""PyTorch's own memory functions under the allocator: they work, and say what is true."""

from __future__ import annotations

MIB = 1 << 20


def names_of_the_caching_allocator():
    import torch

    torch.empty(1, device="cuda")
    told = torch.cuda.memory_stats_as_nested_dict()
    return {name: sorted(value) if isinstance(value, dict) else "number" for name, value in told.items()}, sorted(torch.cuda.memory_stats())


def names_of_ours():

    import terrace

    terrace.install("64MiB")
    return names_of_the_caching_allocator()


def figures_follow_what_lives():
    import torch

    # Imported before, as others do.
    from torch.cuda import max_memory_allocated, memory_allocated, memory_reserved, reset_peak_memory_stats

    import terrace

    terrace.install("64MiB")
    torch.cuda.init()
    assert (memory_allocated(), memory_reserved()) == (0, 64 * MIB)
    a = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    b = torch.empty(1000, dtype=torch.uint8, device="cuda")
    assert memory_allocated() == torch.cuda.memory_allocated("cuda:0") == torch.accelerator.memory_allocated() == 3 * MIB + 1024
    del a
    assert (memory_allocated(), max_memory_allocated(), torch.accelerator.max_memory_allocated()) == (
        1024,
        3 * MIB + 1024,
        3 * MIB + 1024,
    )
    reset_peak_memory_stats()
    assert max_memory_allocated() == 1024
    c = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == MIB + 1024
    stats = torch.cuda.memory_stats()
    assert stats["allocation.all.current"] == 2 and stats["allocated_bytes.all.freed"] == 3 * MIB and stats["num_ooms"] == 0
    assert stats["allocated_bytes.small_pool.current"] == 0 and stats["allocated_bytes.large_pool.current"] == MIB + 1024
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocated_bytes.all.freed"] == 0
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == MIB + 1024
    assert torch.accelerator.memory_reserved() == torch.accelerator.max_memory_reserved() == 64 * MIB
    del b, c
    assert memory_allocated() == 0


def peaks_of_steps_that_run_as_planned():
    import torch

    import terrace

    alloc = terrace.install("64MiB")
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        with alloc.step("forward"):
            a = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
            assert torch.cuda.memory_allocated() == 2 * MIB
            b = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
            del a
            c = torch.empty(MIB, dtype=torch.uint8, device="cuda")
            assert torch.cuda.memory_allocated() == 6 * MIB
            del b, c
        assert torch.cuda.max_memory_allocated() == 7 * MIB
    assert alloc.stats()["steps_on_script"] == 3


def everything_else_works():
    import pytest
    import torch

    import terrace

    alloc = terrace.install("64MiB")
    kept = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total - 64 * MIB and torch.accelerator.get_memory_info()[1] == total
    torch.cuda.empty_cache()
    torch.accelerator.empty_cache()
    assert "Allocated memory" in torch.cuda.memory_summary() and "65536 KiB" in torch.cuda.memory_summary(abbreviated=True)
    (segment,) = torch.cuda.memory_snapshot()
    assert segment["total_size"] == 64 * MIB and segment["address"] == alloc._devices[0].reservation()[0]
    live = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
    assert [(block["address"], block["size"]) for block in live] == [(kept.data_ptr(), 5 * MIB)]
    assert torch.cuda.memory._snapshot()["segments"] == terrace.snapshot()["segments"]
    with pytest.raises(RuntimeError, match="use `with terrace.record"):
        torch.cuda.memory._record_memory_history()
    torch.cuda.memory._record_memory_history(enabled=None)
    assert 0 < torch.cuda.memory.get_per_process_memory_fraction() < 1
    torch.cuda.set_per_process_memory_fraction(0.9)
    with pytest.raises(RuntimeError, match="fraction"):
        torch.cuda.set_per_process_memory_fraction(1e-6)
    at = torch.cuda.caching_allocator_alloc(1000)
    torch.cuda.caching_allocator_delete(at)
    assert torch.cuda.memory_allocated() == 5 * MIB


def empty_tensors_have_no_memory():
    import torch

    import terrace

    terrace.install("64MiB")
    assert torch.empty(0, device="cuda").data_ptr() == 0
    assert torch.cuda.memory_allocated() == 0


def test_every_figure_of_the_caching_allocator_is_there(child):
    nested, flat = child(names_of_the_caching_allocator)
    ours, ours_flat = child(names_of_ours)
    assert (ours, ours_flat) == (nested, flat)


def test_figures_follow_what_lives(child):
    child(figures_follow_what_lives)


def test_peaks_are_those_of_steps_that_run_as_planned(child):
    child(peaks_of_steps_that_run_as_planned)


def test_everything_else_works_or_says_what_to_use(child):
    child(everything_else_works)


def test_empty_tensors_have_no_memory(child):
    child(empty_tensors_have_no_memory)
