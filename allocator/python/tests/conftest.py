"""Where the tests run, and how a test gets a process of its own: an allocator is put into a process once and for good.

A test's work is a function without arguments, or with plain ones, that ``child`` calls in another Python:

    place "fake"    the real PyTorch for CUDA, with tests/fake preloaded: no GPU, no kernels, everything else for real
    place "gpu"     a real device; skipped where there is none, and that is said. REQUIRE_GPU=1 turns the skip into a failure.

Where PyTorch or a compiler is missing, tests that need them are skipped; REQUIRE_TORCH=1 turns that into a failure.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CHILD = HERE / "child.py"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def skip(why: str, requirement: str) -> None:
    """Skips for a reason that the summary shows; fails where it was promised that there is none."""
    if os.environ.get(requirement) == "1":
        pytest.fail(f"{requirement}=1, but {why}")
    pytest.skip(why)


@functools.cache
def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


@functools.cache
def _has_gpu() -> bool:
    code = "import torch; print(torch.cuda.is_available())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return run.stdout.strip() == "True"


def need_torch() -> None:
    """Skips where there is no PyTorch."""
    if not _has_torch():
        skip("there is no torch in this Python", "REQUIRE_TORCH")


def need_gpu() -> None:
    """Skips where there is no device."""
    need_torch()
    if not _has_gpu():
        skip("there is no CUDA device", "REQUIRE_GPU")


@pytest.fixture
def compiler() -> None:
    """Skips where nothing can build a companion."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        skip("there is no C++ compiler", "REQUIRE_TORCH")


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The imagined CUDA, compiled; see tests/fake/cuda.cc."""
    need_torch()
    gxx = shutil.which("g++")
    if gxx is None:
        skip("there is no g++ to build tests/fake with", "REQUIRE_TORCH")
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in spec.submodule_search_locations] if spec and spec.submodule_search_locations else []
    headers = {
        name: next((found.parents[name.count("/")] for root in roots for found in root.rglob(name)), None)
        for name in ("cuda_runtime_api.h", "crt/host_defines.h")
    }
    for name, folder in headers.items():
        if folder is None:
            skip(f"there is no {name}, of the wheels nvidia-cuda-runtime and nvidia-cuda-crt", "REQUIRE_TORCH")
    library = tmp_path_factory.mktemp("fake") / "libcuda.so.1"
    include = [f"-I{folder}" for folder in headers.values()]
    sources = [str(HERE / "fake" / name) for name in ("cuda.cc", "driver.cc", "blas.cc")]
    subprocess.run(
        [
            str(gxx),
            "-std=c++17",
            "-O1",
            "-Wall",
            "-shared",
            "-fPIC",
            "-Wl,-soname,libcuda.so.1",
            *include,
            *sources,
            "-o",
            str(library),
        ],
        check=True,
    )
    return library


Child = Callable[..., Any]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where companions are kept, so that only the first test builds one."""
    return tmp_path_factory.mktemp("cache")


GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=["fake", GPU])
def child(request: pytest.FixtureRequest, cache: Path) -> Child:
    """Calls a function of a test file in a process of its own, on each place, and returns what it returned."""
    if request.param == "gpu":
        need_gpu()
        return functools.partial(call, "gpu", cache, None)
    return functools.partial(call, "fake", cache, request.getfixturevalue("fake"))


@pytest.fixture
def cuda() -> None:
    """Skips where there is no device, for tests that run in this process."""
    need_gpu()


@pytest.fixture
def faked(fake: Path, cache: Path) -> Child:
    """The same on the imagined CUDA alone."""
    return functools.partial(call, "fake", cache, fake)


@pytest.fixture
def on_gpu(cache: Path) -> Child:
    """The same on a real device alone."""
    need_gpu()
    return functools.partial(call, "gpu", cache, None)


def call(
    place: str,
    cache: Path,
    fake: Path | None,
    function: Callable[..., Any],
    *arguments: Any,
    env: dict[str, str] | None = None,
) -> Any:
    """What the function returned; its process must end well."""
    done = run(place, cache, fake, [sys.executable], function, *arguments, env=env)
    assert done.returncode == 0, f"{function.__name__} on {place}: status {done.returncode}\n{done.stdout}{done.stderr}"
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(answers) == 1, f"{function.__name__} on {place} did not come to its end\n{done.stdout}{done.stderr}"
    return json.loads(answers[0].removeprefix("ANSWER "))


def run(
    place: str,
    cache: Path,
    fake: Path | None,
    python: list[str],
    function: Callable[..., Any],
    *arguments: Any,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """The function's process, however it ended."""
    preload = {"LD_PRELOAD": str(fake)} if fake is not None else {}
    environment = os.environ | preload | {"TERRACE_CACHE": str(cache), "TERRACE_PLACE": place} | (env or {})
    file = sys.modules[function.__module__].__file__ or ""
    command = [*python, str(CHILD), file, function.__name__, json.dumps(arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
