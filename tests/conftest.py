"""What all tests share: golden files, how much of the generated programs a run covers, and the server as people start it."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

from compiler.machine.target import Target, get, host
from runtime.device.cpu.host import features
from tests.browser.chromium import chromium, page
from tests.forked import ForkServer

__all__ = ["chromium", "page"]  # fixtures of all tests

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
GOLDEN = Path(__file__).parent / "golden"
AMX_UNIT = Path(__file__).parent / "compiler" / "backends" / "cpu" / "codegen" / "amx_unit.c"

# A plain run repeats the same examples, so that it fails for a reason in the tree. `make test-slow` explores, with the profile `full`.
# No profile measures time: on a busy machine drawing an example may take seconds.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("quick", UNTIMED, derandomize=True)
settings.register_profile("full", UNTIMED, max_examples=1000)
settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what is computed to the golden files instead of comparing")
    parser.addoption("--strict-needs", action="store_true", help="fail where a test would skip because it needs what is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    why = str(call.excinfo.value) if report.skipped and call.excinfo is not None else ""
    if why.startswith("needs ") and item.config.getoption("--strict-needs"):
        report.outcome, report.longrepr = "failed", why
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Files skip as a whole where they import what they need."""
    report = yield
    why = report.longrepr[2].removeprefix("Skipped: ") if report.skipped and isinstance(report.longrepr, tuple) else ""
    if why.startswith("needs ") and collector.config.getoption("--strict-needs"):
        report.outcome, report.longrepr = "failed", why
    return report


# What takes longest, the longest first: it begins first, so that short files fill both processes to the end. Names of groups, and files.
LONGEST = (
    "demo server",
    "console",
    "bits of the demo",
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
    "server/test_shutdown.py",
    "deploy/bench/compute/test_quality.py",
    "deploy/bench/serving/test_start.py",
    "deploy/bench/serving/test_hostile.py",
    "deploy/bench/serving/test_serve.py",
)


def _group_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    return str(item.path.relative_to(ROOT / "tests")) if marker is None else marker.args[0]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file stay in one process, which then makes once what they share: servers, workers, compiled programs."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_group_of(item)))
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(_group_of(item), len(LONGEST)))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the collector need not walk them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def without_collector() -> Iterator[None]:
    """For what measures its own time: the collector may walk the compiled models of all tests before, for most of a second."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("paper/x.ir", text)`: the text is what the file below tests/golden holds."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing; pytest --update-golden writes it"
        assert text == path.read_text(), f"{path} differs; pytest --update-golden accepts what is computed"

    return check


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of this run, shared by its processes: what one has compiled is there for the others, and nothing was there before."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELAXSERVE_CACHE", str(folder))
        yield folder


# --- the server with the demo model, one for all tests that need it ---------------------------------------------------------


SECRETS = {"HF_TOKEN": "secret-of-the-hub", "RELAXSERVE_KEY": "secret-of-a-client"}


@dataclass(frozen=True)
class DemoServer:
    url: str
    banner: str  # what `relaxserve serve` said when it was ready
    pid: int
    environment: dict[str, str]  # in which `relaxserve` is found and talks to this server
    forks: ForkServer

    def run(self, *command: str | Path, status: int = 0, **variables: str) -> str:
        """What a command writes; standard error where it is to fail."""
        program, *arguments = map(str, command)
        environment = {**self.environment, **variables}
        if Path(program).name == "relaxserve" and "LD_LIBRARY_PATH" not in variables:  # read when a process starts
            result = self.forks.run(arguments, environment, timeout_s=120)
        else:
            result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert result.returncode == status, f"{result.stdout}\n{result.stderr}"
        return result.stderr if status else result.stdout


def greeting(server: subprocess.Popen[str]) -> tuple[str, str]:
    """The address of a server that was just started, and all that it said until it was ready."""
    assert server.stderr is not None
    banner = ""
    while "-d '" not in banner:
        line = server.stderr.readline()
        assert line, f"the server ended: {banner}"
        banner += line
    found = re.search(r"relaxserve at (http://[\w.:]+):", banner)
    assert found is not None, banner
    return found[1], banner


@contextmanager
def serving_demo(cache_folder: Path, *options: str, **variables: str) -> Iterator[DemoServer]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("RELAXSERVE_") or name == "RELAXSERVE_TARGET"}
    environment = {**own, "PATH": f"{BIN}:{os.environ['PATH']}", "RELAXSERVE_CACHE": str(cache_folder)}
    command = [BIN / "relaxserve", "serve", "--port", "0", *options]
    with (
        subprocess.Popen(command, cwd=ROOT, env={**environment, **variables}, stderr=subprocess.PIPE, text=True) as server,
        closing(ForkServer()) as forks,
    ):
        try:
            url, banner = greeting(server)
            yield DemoServer(url, banner, server.pid, {**environment, "RELAXSERVE_URL": url}, forks)
        finally:
            server.terminate()
            server.communicate(timeout=60)


@pytest.fixture(scope="session")
def demo_server(cache_folder: Path) -> Iterator[DemoServer]:
    """Tests that use it are in the xdist group "demo server", so that there is one."""
    with serving_demo(cache_folder, **SECRETS) as server:
        yield server


# --- matrix units ---------------------------------------------------------------------------------------------------------


class MatrixUnit:
    """The unit of this machine, or amx_unit.c in its place. `counts`: configurations, loads, stores and products that were carried out."""

    def __init__(self, library: Path | None) -> None:
        self.library = library
        self._loaded = None if library is None else ctypes.CDLL(str(library))
        if self._loaded is not None:
            assert self._loaded.amx_install() == 0

    @property
    def counts(self) -> NDArray[np.uint64]:
        """Nothing counts on the unit itself."""
        counted = (ctypes.c_uint64 * 4)() if self._loaded is None else (ctypes.c_uint64 * 4).in_dll(self._loaded, "amx_counts")
        return np.array(counted)


@pytest.fixture(scope="session")
def matrix_unit(tmp_path_factory: pytest.TempPathFactory) -> MatrixUnit:
    amx = get("amx")
    if amx.can_run_here:
        return MatrixUnit(None)
    cc, vectors = shutil.which("cc"), {f for f in amx.features if not f.startswith("amx")}
    if cc is None or not vectors <= host().features:
        pytest.skip("no matrix unit here, nor what it is emulated with: a C compiler and AVX-512 with VNNI and BF16")
    library = tmp_path_factory.mktemp("amx") / "amx_unit.so"
    subprocess.run([cc, "-O2", "-shared", "-fPIC", "-mavx512f", "-o", library, AMX_UNIT], check=True)
    return MatrixUnit(library)


@pytest.fixture
def amx(matrix_unit: MatrixUnit, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A target whose code runs here as on a machine with the unit."""
    allowed = features() | {"amx-tile", "amx-bf16", "amx-int8"}
    monkeypatch.setattr("runtime.device.cpu.host.features", lambda: allowed)
    return get("amx")
