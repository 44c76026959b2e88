"""Putting the allocator into PyTorch: what is refused, by which sentence, and that the process goes on."""

from __future__ import annotations

import pytest


def refused(call, kind, *says):
    """The sentence; nothing is installed afterwards."""
    import terrace
    from terrace.allocator import installed

    with pytest.raises(kind) as found:
        call()
    text = str(found.value)
    for part in says:
        assert part in text, text
    assert "\n" not in text
    assert isinstance(found.value, (terrace.TerraceError, ValueError, MemoryError))
    if "already" not in text:
        assert installed() is None
    return text


def after_cuda_started():
    import torch

    import terrace

    kept = torch.arange(4, device="cuda")
    refused(
        lambda: terrace.install("64MiB"),
        terrace.InstallError,
        "CUDA has started",
        "call terrace.install before",
        "mode='pool'",
    )
    # The process goes on, with PyTorch's own allocator.
    assert torch.cuda.memory_allocated() == 512
    del kept
    assert torch.cuda.memory_allocated() == 0


def twice():
    import torch

    import terrace

    alloc = terrace.install("64MiB")
    refused(lambda: terrace.install("1MiB"), terrace.InstallError, "installed already", "64.00 MiB", "terrace.current()")
    assert terrace.current() is alloc
    assert torch.empty(1, device="cuda").data_ptr() >= alloc._devices[0].reservation()[0]


def too_large():
    import torch

    import terrace

    total = terrace._terrace.Device.memory_of("cuda", 0)[0]
    refused(lambda: terrace.install(total + 1), ValueError, "more than the", "of device 0", "give less")
    refused(lambda: terrace.install("900TiB"), ValueError, "more than the")
    refused(lambda: terrace.install("10GiB", devices=[50]), terrace.TerraceError, "there is no CUDA device 50")
    alloc = terrace.install(0.01)
    assert abs(alloc._devices[0].reservation()[1] - total // 100) <= 512
    assert torch.ones(3, device="cuda").data_ptr() != 0


def more_than_is_free():
    import torch

    import terrace

    other = terrace._terrace.Device("cuda", 7 << 30)
    text = refused(lambda: terrace.install("6GiB"), MemoryError, "6.00 GiB", "free")
    del other
    terrace.install("6GiB")
    torch.empty(5 << 30, dtype=torch.uint8, device="cuda")
    return text


def unsupported(version):
    import torch

    import terrace

    torch.__version__ = version
    refused(
        lambda: terrace.install("64MiB"),
        terrace.InstallError,
        f"torch {version} is not supported",
        "install 2.10 or newer",
    )
    torch.__version__ = "2.11.0"
    torch.version.cuda, cuda = None, torch.version.cuda
    refused(lambda: terrace.install("64MiB"), terrace.InstallError, "built without CUDA", "backing='host'")
    torch.version.cuda = cuda
    del torch.cuda.memory.CUDAPluggableAllocator
    with pytest.raises(AttributeError):
        terrace.install("64MiB")
    assert torch.zeros(2).sum() == 0


def without_a_driver():
    import terrace

    return refused(lambda: terrace.install("64MiB"), terrace.TerraceError, "there is no CUDA driver")


def without_torch():
    import sys

    sys.modules["torch"] = None
    import terrace

    refused(
        lambda: terrace.install("64MiB"),
        terrace.InstallError,
        "PyTorch cannot be imported",
        "install torch 2.10 or newer",
    )
    refused(terrace.snapshot, terrace.InstallError, "PyTorch cannot be imported")


def a_device_that_was_not_named():
    import torch

    import terrace

    alloc = terrace.install("64MiB", devices=[0])
    torch.empty(1, device="cuda:0")
    with pytest.raises(RuntimeError, match=r"device 1 has no budget.*name it in terrace.install"):
        torch.empty(1, device="cuda:1")
    assert torch.cuda.memory_allocated(1) == 0 and torch.cuda.memory_stats(1)["reserved_bytes.all.current"] == 0
    assert alloc.stats()["usage"]["served"]["buffers"] == 1


def two_devices():
    import torch

    import terrace

    alloc = terrace.install("64MiB", devices=[0, 1])
    for _ in range(3):
        with alloc.step("both"):
            for ordinal in (0, 1):
                torch.empty(1000 * (ordinal + 1), device=f"cuda:{ordinal}")
    assert [alloc.stats(ordinal)["steps_on_script"] for ordinal in (0, 1)] == [2, 2]
    assert [torch.cuda.max_memory_allocated(ordinal) for ordinal in (0, 1)] == [4096, 8192]


def test_after_cuda_started_it_is_too_late(child):
    child(after_cuda_started)


def test_twice_is_refused(child):
    child(twice)


def test_a_budget_larger_than_the_card_is_refused(child):
    child(too_large)


def test_a_budget_larger_than_what_is_free_is_refused(faked):
    faked(more_than_is_free)


@pytest.mark.parametrize("version", ["1.13.1", "2.4.0", "2.9.1+cu128"])
def test_an_unsupported_torch_is_refused(faked, version):
    faked(unsupported, version)


def test_without_a_driver_it_says_so(faked):
    faked(without_a_driver, env={"LD_PRELOAD": ""})


def test_without_torch_it_says_so(faked):
    faked(without_torch)


def test_a_device_that_was_not_named_has_nothing_to_give(faked):
    faked(a_device_that_was_not_named)


def test_two_devices_run_one_step(faked):
    faked(two_devices)
