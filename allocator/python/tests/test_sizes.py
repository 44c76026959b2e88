"""Budgets and step keys as people write them."""

import enum

import pytest

from terrace.sizes import bytes_of, key_bytes, spelled


class Phase(enum.Enum):
    PREFILL = 1


@pytest.mark.parametrize(
    ("budget", "expect"),
    [
        (4096, 4096),
        ("20GiB", 20 << 30),
        (" 512 MiB ", 512 << 20),
        ("1.5KiB", 1536),
        ("700", 700),
        ("7B", 7),
        (0.5, 500),
        (1.0, 1000),
    ],
)
def test_a_budget_is_bytes_a_text_or_a_share(budget, expect):
    assert bytes_of(budget, 1000) == expect


@pytest.mark.parametrize("budget", [0, -1, True, 1.5, 0.0, -0.5, float("nan"), "", "20GB", "20gib", "GiB", "-1", "all", None, [1], 1 << 63])
def test_what_is_no_budget_is_refused_with_an_example(budget):
    with pytest.raises(ValueError, match="20GiB"):
        bytes_of(budget, 1000)


def test_a_share_needs_memory_that_has_a_size():
    with pytest.raises(ValueError, match="has no size"):
        bytes_of(0.5, None)


@pytest.mark.parametrize(
    ("key", "expect"),
    [
        ("prefill/4128", b"prefill/4128"),
        (b"decode", b"decode"),
        (("prefill", 4128), b"('prefill', 4128)"),
        ((1,), b"(1,)"),
        ((), b"()"),
        (7, b"7"),
        ((True, None, 0.5, ("a", "b")), b"(True, None, 0.5, ('a', 'b'))"),
        ((Phase.PREFILL, 3), b"(Phase.PREFILL, 3)"),
    ],
)
def test_a_key_reads_the_same_in_each_process(key, expect):
    assert key_bytes(key) == expect


def test_texts_in_tuples_are_told_apart():
    assert key_bytes(("a, b",)) != key_bytes(("a", "b"))
    assert key_bytes(("1",)) != key_bytes((1,))


@pytest.mark.parametrize(
    ("key", "error", "says"),
    [
        (["prefill", 4128], TypeError, "is not hashable, because of its list"),
        (("prefill", {"tokens": 1}), TypeError, "is not hashable, because of its dict"),
        (object(), TypeError, "does not read the same in each process"),
        (lambda: 0, TypeError, "does not read the same in each process"),
        ("", ValueError, "is not printable"),
        ("a\nb", ValueError, "is not printable"),
        ("\0", ValueError, "is not printable"),
        (b"\xff", TypeError, "is not printable"),
    ],
)
def test_a_key_that_cannot_be_hashed_or_printed_says_what_to_use(key, error, says):
    with pytest.raises(error, match=says) as refused:
        key_bytes(key)
    assert "('prefill', 4128)" in str(refused.value)


def test_sizes_are_spelled_with_their_bytes():
    assert spelled(20 << 30) == "20.00 GiB (21474836480 bytes)"
    assert spelled(3 << 10) == "3.00 KiB (3072 bytes)"
    assert spelled(17) == "17 bytes"
