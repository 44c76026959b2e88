"""What users ran into (T01 to T08 of the collected threads), replayed through PyTorch. Sizes are the threads', divided by 4."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30


def a_giant_returns_after_small_ones_were_split_from_its_segment():
    """T01, pytorch#35901: 11.6 GB, then many small ones of which some live on, then 11.6 GB again."""
    import torch

    import terrace

    giant, smalls = 11_643_387_904 // 4, [size // 4 for size in (16_515_072, 11_400_192, 18_191_360)]
    alloc = terrace.install("3GiB")

    def ask(size):
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    kept = []
    for turn in range(3):
        with alloc.step("giant"):
            a = ask(giant)
            del a
        with alloc.step("smalls"):
            for index in range(28):
                group = [ask(size) for size in smalls]
                if turn == 0 and index % 7 == 0:
                    kept.append(group[0])
                del group
    assert alloc.stats()["reservations"] == 1
    assert alloc.arena_bytes() == giant
    assert torch.cuda.max_memory_allocated() <= giant + sum(tensor.nbytes for tensor in kept) + 512 * len(kept)


def a_pending_free_is_waited_for():
    """T02, pytorch#189504: 90% of the budget, freed while another stream may use it, then asked for again."""
    import torch

    import terrace

    alloc = terrace.install("1GiB")
    size = int(0.9 * GIB)
    other = torch.cuda.Stream()
    for _ in range(3):
        a = torch.empty(size, dtype=torch.uint8, device="cuda")
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            a.fill_(7)
        a.record_stream(other)
        del a
        b = torch.empty(size, dtype=torch.uint8, device="cuda")
        del b
    assert torch.cuda.memory_stats()["num_ooms"] == 0
    assert alloc.stats()["reservations"] == 1


def what_is_required_is_known_before_the_cache_is_sized():
    """T03, genesis-vllm-patches#22: weights, then the largest step, then a cache of all the rest."""
    import torch

    import terrace

    alloc = terrace.install("4GiB")

    def ask(size):
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    def prefill(tokens):
        with alloc.step(("prefill", tokens)):
            hidden = ask(tokens * 10 * 1024)
            for _ in range(4):
                gate, up = ask(tokens * 34 * 1024), ask(tokens * 34 * 1024)
                del gate
                out = ask(tokens * 10 * 1024)
                del up, out
            del hidden

    weights = ask(int(17.7 * GIB / 8))
    prefill(15_000)
    required = alloc.required_bytes()
    assert required == 15_000 * 78 * 1024
    cache = ask(4 * GIB - weights.nbytes - required - MIB)
    for tokens in (15_000, 1_000, 15_000, 1_000, 15_000):
        prefill(tokens)
    stats = alloc.stats()
    assert stats["overflow_peak"] == 0 and stats["hit_rate"] == 1.0, stats
    del cache


def a_larger_key_than_was_profiled_is_reported():
    """T04, vllm#52872: profiled at 64 tokens, then run with what a Gated DeltaNet layer asks for at 2k to 24k."""
    import pytest
    import torch

    import terrace

    alloc = terrace.install("256MiB")

    def prefill(tokens):
        heads, width = 12, 128
        with alloc.step(("prefill", tokens)):
            for _ in range(12):
                row = heads * width * 2
                w, u = (torch.empty(tokens * row, dtype=torch.uint8, device="cuda") for _ in range(2))
                h = torch.empty(-(-tokens // 64) * heads * width * width * 2, dtype=torch.uint8, device="cuda")
                v_new = torch.empty(tokens * row, dtype=torch.uint8, device="cuda")
                del w, u, h, v_new

    peaks = {}
    prefill(64)
    assert alloc.required_bytes() < MIB
    for tokens in (2048, 6144, 2048, 6144):
        torch.cuda.reset_peak_memory_stats()
        prefill(tokens)
        peak = torch.cuda.max_memory_allocated()
        assert peaks.setdefault(tokens, peak) == peak
    assert alloc.required_bytes() == peaks[6144] > peaks[2048] > 64 * MIB // 4
    # Or a plain RuntimeError, where there is no compiler for the companion.
    with pytest.raises(RuntimeError, match=r"(?s)^CUDA out of memory.*\('prefill', 6144\)"):
        prefill(24_576)
    # As before, and as planned.
    before = alloc.stats()["steps_on_script"]
    prefill(6144)
    assert alloc.stats()["steps_on_script"] == before + 1


def many_short_sequences_ask_for_more():
    """T05, vllm#54775: the same tokens in 1, 1024 and 4096 sequences."""
    import torch

    import terrace

    alloc = terrace.install("4GiB")
    peaks = []
    for lengths in ([65_536], [64] * 1024, [16] * 4096):
        chunks = sum(-(-length // 64) for length in lengths)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            with alloc.step(("prefill", sum(lengths), len(lengths))):
                h = torch.empty(chunks * 3 * MIB // 8, dtype=torch.uint8, device="cuda")
                del h
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[0] == peaks[1] == 384 * MIB and peaks[2] == 4 * peaks[0]
    assert alloc.required_bytes() == peaks[2]
    assert alloc.stats()["steps_on_script"] == 6


def room_that_was_freed_serves_something_larger():
    """T08, pytorch#159674: 60 freed, then 70, of 80."""
    import torch

    import terrace

    alloc = terrace.install(80 * 16 * MIB)
    for size in (60, 70, 80, 60):
        torch.empty(size * 16 * MIB, dtype=torch.uint8, device="cuda")
    assert alloc.stats()["reservations"] == 1 and torch.cuda.memory_stats()["num_ooms"] == 0


def any_length_comes_and_memory_stays_bounded():
    """T15, onnxruntime#11118: lengths of 1 to 8192."""
    import random

    import torch

    import terrace

    alloc = terrace.install("1GiB", most_keys=16)
    chance = random.Random(7)
    for _ in range(400):
        tokens = chance.randint(1, 8192)
        with alloc.step(("prefill", -(-tokens // 512) * 512)):
            a = torch.empty(tokens * 4096, dtype=torch.uint8, device="cuda")
            b = torch.empty(tokens * 8192, dtype=torch.uint8, device="cuda")
            del a, b
    stats = alloc.stats()
    assert stats["arena"] <= 8192 * 12288 and stats["outside"] == 0
    assert stats["usage"]["peak"]["bytes"] <= 8192 * 12288
    assert stats["reservations"] == 1


def test_t01_a_giant_returns(child):
    child(a_giant_returns_after_small_ones_were_split_from_its_segment)


def test_t02_a_pending_free_is_waited_for(child):
    child(a_pending_free_is_waited_for)


def test_t03_what_is_required_is_known_before_the_cache_is_sized(child):
    child(what_is_required_is_known_before_the_cache_is_sized)


def test_t04_a_larger_key_than_was_profiled_is_reported(child):
    child(a_larger_key_than_was_profiled_is_reported)


def test_t05_many_short_sequences_ask_for_more(child):
    child(many_short_sequences_ask_for_more)


def test_t08_room_that_was_freed_serves_something_larger(child):
    child(room_that_was_freed_serves_something_larger)


def test_t15_any_length_comes_and_memory_stays_bounded(child):
    child(any_length_comes_and_memory_stays_bounded)
