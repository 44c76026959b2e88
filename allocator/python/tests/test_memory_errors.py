"""A spent budget, as those who catch it know it."""

from __future__ import annotations

MIB = 1 << 20


def is_pytorchs_own_error():
    import pytest
    import torch

    import terrace

    alloc = terrace.install("64MiB")
    assert alloc.companion == "torch.OutOfMemoryError"
    kept = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    for _ in range(20):
        with pytest.raises(torch.OutOfMemoryError) as spent:
            torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    text = str(spent.value)
    assert text.startswith("CUDA out of memory: torch asked for 31457280 bytes, but of the reservation's 67108864 bytes 25165824 are free")
    assert "41943040" in text and "raise the budget" in text
    assert torch.cuda.memory_stats()["num_ooms"] == 20
    # What callers do about it.
    del kept, spent
    torch.empty(60 * MIB, dtype=torch.uint8, device="cuda")


def inside_a_step():
    import pytest
    import torch

    import terrace

    alloc = terrace.install("64MiB")

    def forward(tokens):
        with alloc.step(("prefill", tokens)):
            a = torch.empty(tokens * MIB // 4, dtype=torch.uint8, device="cuda")
            b = torch.empty(tokens * MIB // 2, dtype=torch.uint8, device="cuda")
            del a, b

    for tokens in (10, 100, 10, 10):
        raised = False
        try:
            forward(tokens)
        except torch.OutOfMemoryError:
            raised = True
        assert raised == (tokens == 100)
    assert alloc.stats()["steps_on_script"] == 2 and torch.cuda.memory_allocated() == 0
    with pytest.raises(torch.OutOfMemoryError), alloc.step("too much"):
        torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")


def without_a_compiler():
    import pytest
    import torch

    import terrace

    alloc = terrace.install("64MiB")
    with pytest.raises(RuntimeError, match="^CUDA out of memory: ") as spent:
        torch.empty(65 * MIB, dtype=torch.uint8, device="cuda")
    assert not isinstance(spent.value, torch.OutOfMemoryError)
    torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    return alloc.companion


def the_library(_path):
    import torch

    from terrace import companion

    assert companion.load(torch) == companion.RAISES
    return [file.name for file in companion.folder().iterdir()]


def test_it_is_pytorchs_own_error_with_a_report(child, compiler):
    child(is_pytorchs_own_error)


def test_it_leaves_steps_as_they_were(child, compiler):
    child(inside_a_step)


def test_without_a_compiler_it_begins_as_callers_match_it(child, tmp_path):
    came = child(without_a_compiler, env={"TERRACE_CACHE": str(tmp_path / "none"), "PATH": "/nowhere", "CXX": ""})
    assert "no C++ compiler" in came
    came = child(without_a_compiler, env={"TERRACE_CACHE": str(tmp_path / "false"), "CXX": "/bin/false"})
    assert "/bin/false refused" in came
    file = tmp_path / "file"
    file.touch()
    assert "a RuntimeError" in child(without_a_compiler, env={"TERRACE_CACHE": str(file)})


def test_the_companion_is_built_once(faked, compiler, tmp_path):
    env = {"TERRACE_CACHE": str(tmp_path)}
    built = faked(the_library, "", env=env)
    # There is no compiler now, and it is there all the same.
    assert faked(the_library, "", env=env | {"PATH": "/nowhere", "CXX": ""}) == built
    assert len(built) == 1 and built[0].startswith("companion-")
