"""Streams and CUDA graphs (T10 to T12): bytes that queued work or a graph may still touch go to nobody."""

from __future__ import annotations

import pytest

MIB = 1 << 20


def another_stream_uses_it_last():
    """T10: freed and asked for again while another stream has yet to read it."""
    import torch

    import terrace

    terrace.install("64MiB")
    side = torch.cuda.Stream()
    for turn in range(1, 30):
        a = torch.full((MIB,), turn, dtype=torch.int32, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            seen = a.sum()
        a.record_stream(side)
        del a
        # Without the hook these would be the bytes that the side stream has yet to read.
        b = torch.full((MIB,), -7, dtype=torch.int32, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        assert int(seen) == turn * MIB
        del b, seen


def record_stream_reaches_the_allocator():
    import torch

    import terrace

    alloc = terrace.install("64MiB")
    side = torch.cuda.Stream()
    for _ in range(3):
        with alloc.step("forward"):
            a = torch.empty(MIB, dtype=torch.uint8, device="cuda")
            address = a.data_ptr()
            a.record_stream(side)
            del a
            b = torch.empty(MIB, dtype=torch.uint8, device="cuda")
            del b
    assert address != 0
    # A step whose buffer another stream uses is never simply on script.
    assert alloc.stats()["steps_on_script"] == 0
    alloc._devices[0].drain(True)
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == 0


def steps_on_several_streams():
    import torch

    import terrace

    alloc = terrace.install("64MiB")
    streams = [torch.cuda.Stream() for _ in range(2)]
    for turn in range(12):
        with torch.cuda.stream(streams[turn % 2]), alloc.step("forward"):
            a = torch.full((MIB,), turn, dtype=torch.uint8, device="cuda")
            b = a + 1
            del a, b
    assert alloc.stats()["steps_on_script"] == 11


def a_graph_keeps_its_bytes():
    """T11: a captured graph, many eager steps of other shapes, then its replay."""
    import torch

    import terrace
    from child import REAL

    alloc = terrace.install("256MiB")
    given = torch.zeros(MIB, dtype=torch.float32, device="cuda")
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        (given * 2 + 1).sum()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = given * 2
        out = doubled + 1
        del doubled
    pinned = 8 * MIB
    assert " 1 graph pool" in alloc.report()
    for turn in range(300):
        with alloc.step(("eager", turn % 7)):
            a = torch.full((MIB // 4 * (1 + turn % 7),), 9.0, device="cuda")
            b = a * 3
            assert a.data_ptr() != out.data_ptr() and b.data_ptr() != out.data_ptr()
            del a, b
    given.fill_(5.0)
    graph.replay()
    torch.cuda.synchronize()
    if REAL:
        assert out.min().item() == out.max().item() == 11.0
    required = alloc.required_bytes()
    assert required >= pinned
    del out
    graph.reset()
    del graph
    torch.cuda.synchronize()
    assert alloc.required_bytes() <= required - pinned, (required, alloc.required_bytes(), alloc.report())


def graphs_of_many_sizes_share_a_pool():
    """T12: 51 batch sizes, one pool, captured from the largest."""
    import torch

    import terrace

    alloc = terrace.install("256MiB")
    sizes = [512 - 10 * step for step in range(51)]
    given = torch.zeros(512 * 4096, dtype=torch.float32, device="cuda")
    (given[:4096] * 2 + 1).sum()
    torch.cuda.synchronize()
    graphs, pool = [], None
    for size in sizes:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            a = given[: size * 4096] * 2
            b = a + 1
            del a, b
        graphs.append(graph)
        pool = graph.pool()
    largest = 2 * 512 * 4096 * 4
    required = alloc.required_bytes()
    assert largest <= required <= largest + 4 * MIB, required
    for graph in reversed(graphs):
        graph.replay()
    torch.cuda.synchronize()
    del graph
    while graphs:
        graphs.pop().reset()
    assert alloc.required_bytes() == 0


def a_capture_inside_a_step():
    import torch

    import terrace

    alloc = terrace.install("64MiB")
    given = torch.zeros(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with alloc.step("capture"):
        a = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        with torch.cuda.graph(graph):
            out = given + 1
        del a
    for _ in range(2):
        with alloc.step("replay"):
            b = torch.empty(MIB, dtype=torch.uint8, device="cuda")
            graph.replay()
            assert not out.data_ptr() <= b.data_ptr() < out.data_ptr() + out.nbytes
            del b
    torch.cuda.synchronize()


def what_cannot_work_says_so():
    import torch

    import terrace

    terrace.install("64MiB")
    torch.empty(1, device="cuda")
    with pytest.raises(RuntimeError, match="createOrIncrefPool"):
        torch.cuda.MemPool()
    # And the process goes on.
    assert torch.empty(MIB, device="cuda").data_ptr() != 0


@pytest.mark.gpu
def test_t10_another_stream_uses_it_last(on_gpu):
    on_gpu(another_stream_uses_it_last)


def test_t10_record_stream_reaches_the_allocator(child):
    child(record_stream_reaches_the_allocator)


def test_steps_move_between_streams(child):
    child(steps_on_several_streams)


def test_t11_a_graph_keeps_its_bytes(child):
    child(a_graph_keeps_its_bytes)


def test_t12_graphs_of_many_sizes_share_a_pool(child):
    child(graphs_of_many_sizes_share_a_pool)


def test_a_capture_inside_a_step(child):
    child(a_capture_inside_a_step)


def test_a_mem_pool_of_pytorchs_is_refused_and_the_process_goes_on(child):
    child(what_cannot_work_says_so)
