"""Where the tests run, and how a test gets a process of its own: an allocator is put into a process once and for good.

A test's work is a function without arguments, or with plain ones, that ``child`` calls in another Python. That is a fork of a server which
has imported PyTorch and done nothing else, so that a test costs no import:

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
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from terrace._terrace import Device, TerraceError

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
    try:
        return Device.memory_of("cuda", 0) is not None
    except TerraceError:
        return False


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
    place: str, cache: Path, fake: Path | None, function: Callable[..., Any], *arguments: Any, env: dict[str, str] | None = None
) -> Any:
    """What the function returned; its process must end well."""
    if any(name.startswith(("PYTORCH_", "LD_")) for name in env or {}):
        # These are read when PyTorch is loaded.
        done = run(place, cache, fake, [sys.executable], function, *arguments, env=env)
        status, out, err = done.returncode, done.stdout, done.stderr
    else:
        status, out, err = _server(place, cache, fake).call(function, arguments, env or {})
    assert status == 0, f"{function.__name__} on {place}: status {status}\n{out}{err}"
    answers = [line for line in out.splitlines() if line.startswith("ANSWER ")]
    assert len(answers) == 1, f"{function.__name__} on {place} did not come to its end\n{out}{err}"
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
    """The function in a process that is no fork, however it ended."""
    command = [*python, str(CHILD), _file_of(function), function.__name__, json.dumps(arguments)]
    environment = _environment(place, cache, fake) | (env or {})
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=MOST_S, check=False)


def _file_of(function: Callable[..., Any]) -> str:
    return sys.modules[function.__module__].__file__ or ""


def _environment(place: str, cache: Path, fake: Path | None) -> dict[str, str]:
    preload = {"LD_PRELOAD": str(fake)} if fake is not None else {}
    return os.environ | preload | {"TERRACE_CACHE": str(cache), "TERRACE_PLACE": place}


MOST_S = 600
"""No test takes as long."""


class Server:
    """The process that has imported PyTorch and forks for each test."""

    def __init__(self, environment: dict[str, str]) -> None:
        command = [sys.executable, str(CHILD), "--serve"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], env: dict[str, str]) -> tuple[int, str, str]:
        """Status, output and errors of the function's process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"file": _file_of(function), "function": function.__name__, "arguments": arguments, "env": env}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        stuck = threading.Timer(MOST_S, self._process.kill)
        stuck.start()
        answer = self._process.stdout.readline()
        stuck.cancel()
        assert answer, f"{function.__name__} took more than {MOST_S} s, or its server died"
        told = json.loads(answer)
        return told["status"], told["out"], told["err"]

    def stop(self) -> None:
        """Lets it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


_servers: dict[str, Server] = {}


def _server(place: str, cache: Path, fake: Path | None) -> Server:
    if place not in _servers:
        _servers[place] = Server(_environment(place, cache, fake))
    return _servers[place]


def pytest_sessionfinish() -> None:
    while _servers:
        _servers.popitem()[1].stop()
