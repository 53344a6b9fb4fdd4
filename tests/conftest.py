"""Fixtures and hooks for all tests: golden files, Hypothesis profiles, the order of test files, and a server with the demo model."""

from __future__ import annotations

from tests.sources import COMPILER  # first: it reads the compiler's files, which may change while the tests are collected

# isort: split
import ctypes
import gc
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

from compiler.machine.target import Target, get, host
from runtime.device.cpu.host import features
from tests.chromium import chromium, page
from tests.covering import mark_uncovered
from tests.forked import ForkServer, commands
from tests.kept_code import kept_modules, pytest_runtest_setup
from tests.kept_programs import kept_programs
from tests.screens import pytest_runtest_protocol, pytest_terminal_summary

assert COMPILER  # tests/kept_code.py compares with it
__all__ = [
    "chromium",
    "page",
    "pytest_runtest_protocol",
    "pytest_runtest_setup",
    "pytest_terminal_summary",
]  # fixtures that tests in several folders use, and hooks

ROOT = Path(__file__).parent.parent
BIN = commands()
GOLDEN = Path(__file__).parent / "golden"
AMX_UNIT = Path(__file__).parent / "compiler" / "backends" / "cpu" / "codegen" / "amx_unit.c"

# A plain run always uses the same Hypothesis examples, so only a change of the code can make it fail. `make test-slow` uses the profile
# `full` and draws new examples. No profile has a deadline, because drawing an example may take seconds on a busy machine.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("quick", UNTIMED, derandomize=True, max_examples=40)
settings.register_profile("full", UNTIMED, max_examples=1000)
settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="overwrite golden files with computed results instead of comparing them")
    parser.addoption("--strict-needs", action="store_true", help="fail instead of skipping tests whose dependencies are not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    why = str(call.excinfo.value) if report.skipped and call.excinfo is not None else ""
    if why.startswith("needs ") and item.config.getoption("--strict-needs"):
        report.outcome, report.longrepr = "failed", why
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Apply --strict-needs to whole test files: fail a file that would be skipped because an import is missing."""
    report = yield
    why = report.longrepr[2].removeprefix("Skipped: ") if report.skipped and isinstance(report.longrepr, tuple) else ""
    if why.startswith("needs ") and collector.config.getoption("--strict-needs"):
        report.outcome, report.longrepr = "failed", why
    return report


# The slowest groups and files of tests, slowest first. They start first, so that none of them still runs when all other tests are done.
LONGEST = (
    "demo server",
    "GPU server",
    "console",
    "bits of images",
    "bits of the demo",
    "bits of cache groups",
    "web",
    "families on a GPU",
    "machine code",
    "server/workers/test_supervisor.py",
    "compiler/frontend/test_digests.py",
    "compiler/backends/cpu/schedule/test_attention.py",
    "compiler/backends/cpu/schedule/test_integer.py",
    "inspection",
    "server/test_rubbish.py",
    "server/test_delays.py",
    "deploy/model_loading/test_load.py",
    "server/test_with_workers.py",
    "compiler/test_random_programs.py",
    "server/test_constrained.py",
    "server/constraints/test_hostile.py",
    "e2e/test_second_device.py",
    "e2e/test_chaos.py",
    "server/test_shutdown.py",
    "deploy/bench/compute/test_quality.py",
    "lab/serving/test_start.py",
    "lab/serving/test_hostile.py",
    "deploy/bench/serving/test_serve.py",
)


def _group_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    return str(item.path.relative_to(ROOT / "tests")) if marker is None else marker.args[0]


@pytest.hookimpl(tryfirst=True)  # run before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all tests of a file in one process, because they share servers, workers and compiled programs. Start the slowest groups first."""
    mark_uncovered(items)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_group_of(item)))
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(_group_of(item), len(LONGEST)))


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Turn garbage collection off: modules and collected tests live until the end of the run, and scanning them again and again would take
    half of the time in which they are imported and collected."""
    gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    """Exempt modules and collected tests from garbage collection, which begins here, and collect less often than Python does by default.
    Keep the machine code of test files, which are all imported by now."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    with kept_modules():
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def exempt_what_is_left() -> None:
    """Exempt what earlier test files have left, such as cached programs, from garbage collection. Otherwise each test that collects garbage
    would scan all of it, and so would a collection while a test measures time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Disable the garbage collector for a test that measures time. A collection would scan the compiled models of all earlier tests, which
    can take most of a second."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _own_cores() -> Generator[None]:
    """Let the test's thread run on all cores again. A compiled model pins the thread that runs it, and all processes and threads that later
    tests start would inherit the single core."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function that compares a text with a golden file: `golden("paper/x.ir", text)`."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing; pytest --update-golden writes it"
        assert text == path.read_text(), f"{path} differs from the computed text; pytest --update-golden overwrites it"

    return check


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give this test run a cache folder with the programs of earlier runs and nothing else. All processes of the run share it, so that each
    program is compiled only once."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"
    with kept_programs(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAXSERVE_CACHE", str(folder))
        yield folder


# --- one server with the demo model for all tests ---------------------------------------------------------------------------


SECRETS = {"HF_TOKEN": "secret-of-the-hub", "RELAXSERVE_KEY": "secret-of-a-client"}


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """Runs commands as users do."""

    environment: dict[str, str]  # with these variables, commands find `relaxserve` on PATH, and the cache folder of this test run
    forks: ForkServer

    def run(self, *command: str | Path, status: int = 0, **variables: str) -> str:
        """Run a command and check its exit status. Return its standard output, or its standard error if `status` is not 0."""
        program, *arguments = map(str, command)
        environment = {**self.environment, **variables}
        # LD_LIBRARY_PATH has an effect only when a program starts, so a fork cannot change it
        if Path(program).name == "relaxserve" and "LD_LIBRARY_PATH" not in variables:
            result = self.forks.run(arguments, environment, timeout_s=120)
        else:
            result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert result.returncode == status, f"{result.stdout}\n{result.stderr}"
        return result.stderr if status else result.stdout


@dataclass(frozen=True, kw_only=True)
class DemoServer(CommandLine):
    """A server with the demo model. `environment` lets commands use this server."""

    url: str
    banner: str  # what `relaxserve serve` printed until it was ready
    pid: int


@pytest.fixture(scope="session")
def command_line(cache_folder: Path) -> Iterator[CommandLine]:
    """Run commands for which no server runs."""
    with closing(ForkServer(BIN / "relaxserve")) as forks:
        yield CommandLine(environment=_environment(cache_folder), forks=forks)


def _environment(cache_folder: Path) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("RELAXSERVE_") or name == "RELAXSERVE_TARGET"}
    return {**own, "PATH": f"{BIN}:{os.environ['PATH']}", "RELAXSERVE_CACHE": str(cache_folder)}


GREETING_S = 900.0
READY = re.compile(r"^relaxserve at (http://[\w.:]+): ", re.MULTILINE)


def greeting(server: subprocess.Popen[str], timeout_s: float = GREETING_S) -> tuple[str, str]:
    """Wait until a starting server is ready, and kill it if that takes too long. Return its address and everything that it has printed."""
    assert server.stderr is not None
    banner = ""
    limit = threading.Timer(timeout_s, server.kill)
    limit.start()
    try:
        while (found := READY.search(banner)) is None:
            line = server.stderr.readline()
            assert line, f"the server ended, or was not ready within {timeout_s:g} s: {banner}"
            banner += line
    finally:
        limit.cancel()
    return found[1], banner


def children_of(pid: int) -> list[int]:
    """Return the ids of a process's children, which the kernel lists per thread."""
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def descendants_of(pid: int) -> list[int]:
    return [below for child in children_of(pid) for below in (child, *descendants_of(child))]


def workers_of(pid: int) -> list[int]:
    """Return the process ids of a server's workers. Other processes of the server render templates, for instance."""
    return [child for child in children_of(pid) if b"deploy.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]


@contextmanager
def serving_demo(cache_folder: Path, *options: str, **variables: str) -> Iterator[DemoServer]:
    environment = _environment(cache_folder)
    with (
        TemporaryDirectory() as batches,
        subprocess.Popen(
            [BIN / "relaxserve", "serve", "--port", "0", "--batch-dir", batches, *options],
            cwd=ROOT,
            env={**environment, **variables},
            stderr=subprocess.PIPE,
            text=True,
        ) as server,
        closing(ForkServer(BIN / "relaxserve")) as forks,
    ):
        try:
            url, banner = greeting(server)
            yield DemoServer(environment={**environment, "RELAXSERVE_URL": url}, forks=forks, url=url, banner=banner, pid=server.pid)
        finally:
            server.terminate()
            server.communicate(timeout=60)


@pytest.fixture(scope="session")
def demo_server(cache_folder: Path) -> Iterator[DemoServer]:
    """Yield a server with the demo model. Tests that use this fixture belong to the xdist group "demo server": they run in one process, so
    only one server starts."""
    with serving_demo(cache_folder, **SECRETS) as server:
        yield server


# --- matrix units ---------------------------------------------------------------------------------------------------------


class MatrixUnit:
    """The AMX unit of this machine, or its emulation by amx_unit.c. `counts` are the numbers of executed tile configurations, loads, stores
    and products."""

    def __init__(self, library: Path | None) -> None:
        self.library = library
        self._loaded = None if library is None else ctypes.CDLL(str(library))
        if self._loaded is not None:
            assert self._loaded.amx_install() == 0

    @property
    def counts(self) -> NDArray[np.uint64]:
        """Return the emulation's counts. A real AMX unit does not count, so it gives zeros."""
        counted = (ctypes.c_uint64 * 4)() if self._loaded is None else (ctypes.c_uint64 * 4).in_dll(self._loaded, "amx_counts")
        return np.array(counted)


@pytest.fixture(scope="session")
def matrix_unit(tmp_path_factory: pytest.TempPathFactory) -> MatrixUnit:
    amx = get("amx")
    if amx.can_run_here:
        return MatrixUnit(None)
    cc, vectors = shutil.which("cc"), {f for f in amx.features if not f.startswith("amx")}
    if cc is None or not vectors <= host().features:
        pytest.skip("this machine has no AMX, and its emulation needs a C compiler and AVX-512 with VNNI and BF16")
    library = tmp_path_factory.mktemp("amx") / "amx_unit.so"
    subprocess.run([cc, "-O2", "-shared", "-fPIC", "-mavx512f", "-o", library, AMX_UNIT], check=True)
    return MatrixUnit(library)


@pytest.fixture
def amx(matrix_unit: MatrixUnit) -> Iterator[Target]:
    """Yield a target with AMX. If this machine has no AMX, the emulation runs the code. The fixture does not use `monkeypatch`, with which
    no kernel would be kept (tests/kept_code.py)."""
    allowed = features() | {"amx-tile", "amx-bf16", "amx-int8"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.device.cpu.host.features", lambda: allowed)
        yield get("amx")
