"""Two ranks on one device, each with an allocator and a plan file of its own; the rendezvous is on the CPU."""

from __future__ import annotations

import functools
import sys

import pytest

import conftest

MIB = 1 << 20


def a_rank(folder):
    import os

    import torch
    import torch.distributed as dist

    import terrace

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    alloc = terrace.install("128MiB", tag="two ranks")
    file = f"{folder}/rank-{rank}.plans"

    def forward():
        with alloc.step(("prefill", 128)):
            a = torch.full((MIB * (1 + rank),), float(rank), device="cuda")
            b = a + 1
            del a, b

    if os.path.exists(file):
        assert alloc.load(file)[0]["keys"] == 1
        assert alloc.required_bytes() == 8 * MIB * (1 + rank)
    for _ in range(3):
        forward()
    alloc.save(file)
    dist.barrier()
    # The other rank's file is not this one's.
    try:
        alloc.load(f"{folder}/rank-{1 - rank}.plans")
    except terrace.TerraceError as refused:
        assert f"saved for rank {1 - rank}, and this is rank {rank}" in str(refused)
    else:
        raise AssertionError("the other rank's plans were loaded")
    told = torch.tensor([alloc.required_bytes(), alloc.stats()["replay_allocs"], alloc.stats()["hits"]])
    both = [torch.zeros_like(told) for _ in range(2)]
    dist.all_gather(both, told)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 1:
        # One answer for both; the parent reads one line.
        os.environ.pop("TERRACE_PLACE")
        os.dup2(2, 1)
    return [figures.tolist() for figures in both]


@pytest.mark.parametrize("place", ["fake", conftest.GPU])
def test_two_ranks_have_their_own_allocators_and_plans(request, place, cache, tmp_path):
    if place == "gpu":
        conftest.need_gpu()
    fake = request.getfixturevalue("fake") if place == "fake" else None
    # Free ports are the launcher's business.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = functools.partial(conftest.run, place, cache, fake, torchrun, a_rank, str(tmp_path), env={"OMP_NUM_THREADS": "1"})
    for restart in (False, True):
        done = run()
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        (answer,) = [line for line in done.stdout.splitlines() if "ANSWER" in line]
        # The first run records once; after a restart every step is in plan.
        expect = [
            [8 * MIB, 6 if restart else 4, 6 if restart else 4],
            [16 * MIB, 6 if restart else 4, 6 if restart else 4],
        ]
        assert answer.endswith(f"ANSWER {expect}"), answer
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.plans", "rank-1.plans"]
