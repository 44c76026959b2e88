"""What the doctor finds, in processes that are in one way or another ill."""

from __future__ import annotations

import json

import pytest


def examined(settings):
    """The findings that are not well, by name, after doing what the settings say."""
    import sys

    import torch

    import terrace
    from terrace import doctor

    for setting in settings:
        if setting == "started":
            torch.empty(1, device="cuda")
        elif setting == "installed":
            terrace.install("64MiB")
        elif setting == "benchmark":
            torch.backends.cudnn.benchmark = True
        elif setting == "old":
            torch.__version__ = "2.7.1"
        elif setting == "newer":
            torch.__version__ = "2.12.0"
        elif setting == "cudagraphs":
            import torch._inductor.config

            torch._inductor.config.triton.cudagraphs = True
        else:
            sys.modules[setting] = torch
    return {finding.name: (finding.verdict, finding.found, finding.todo) for finding in doctor.examine()}


def printed(*arguments):
    import contextlib
    import io

    from terrace.__main__ import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(["doctor", *arguments])
        except SystemExit as ended:
            status = ended.code
    return status, out.getvalue(), err.getvalue()


def test_a_healthy_process_has_nothing_to_do(child, compiler):
    status, text, _ = child(printed)
    assert status == 0, text
    assert "problem " not in text and "raises torch.OutOfMemoryError" in text


def test_the_same_as_json(child):
    status, text, _ = child(printed, "--json")
    told = json.loads(text)
    assert (status, told["problems"]) == (0, 0)
    names = [finding["name"] for finding in told["findings"]]
    assert names == [
        "terrace",
        "torch",
        "hooks",
        "CUDA",
        "out of memory",
        "cudnn.benchmark",
        "torch.compile",
        "MemPool",
        "device",
        "settings",
        "IPC",
    ]


@pytest.mark.parametrize(
    ("settings", "env", "name", "verdict", "says"),
    [
        (["started"], {}, "CUDA", "problem", "call terrace.install earlier"),
        (["benchmark"], {}, "cudnn.benchmark", "problem", "benchmark = False"),
        (["cudagraphs"], {}, "torch.compile", "problem", "cudagraphs = False"),
        ([], {}, "torch.compile", "note", "reduce-overhead"),
        ([], {}, "IPC", "note", "by copying"),
        (["old"], {}, "torch", "problem", "2.7.1 is not supported"),
        (["newer"], {}, "torch", "note", "the tests ran on 2.11"),
        (["torch_memory_saver"], {}, "MemPool", "problem", "use mode='pool'"),
        ([], {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}, "MemPool", "problem", "use mode='pool'"),
        ([], {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "settings", "note", "mode='pool' refuses it"),
        (
            [],
            {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
            "settings",
            "problem",
            "unset PYTORCH_CUDA_ALLOC_CONF",
        ),
        (
            [],
            {"TERRACE_CACHE": "/nowhere/at/all", "PATH": "/nowhere", "CXX": ""},
            "out of memory",
            "note",
            "install g++",
        ),
        ([], {"LD_PRELOAD": ""}, "device", "problem", "nvidia-smi"),
    ],
)
def test_each_illness_has_its_cure(faked, settings, env, name, verdict, says):
    found = faked(examined, settings, env=env)[name]
    assert found[0] == verdict, found
    assert says in found[1] + found[2], found


def test_a_budget_that_is_not_free_is_a_problem(faked):
    status, text, _ = faked(printed, "--budget", "9GiB")
    assert status == 1 and "is more than is free" in text
    assert faked(printed, "--budget", "0.5")[0] == 0
    status, _, err = faked(printed, "--budget", "lots")
    assert status == 2 and "20GiB" in err and "Traceback" not in err


def test_wrong_use_is_status_two(faked):
    assert faked(printed, "--nonsense")[0] == 2
