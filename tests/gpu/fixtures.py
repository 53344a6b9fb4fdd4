"""The software GPU for tests: a `libcuda.so.1` that pycuda and ctypes find.

A test that takes `software_gpu` may import pycuda, or load `libcuda.so.1` through ctypes: in this process both get the library in
software. A child process gets it with `software_gpu.environment(...)`, which also says what card it has (see tests/gpu/driver/card.py).
The tests of a folder get the fixture by an import in their conftest.py: `from tests.gpu.fixtures import software_gpu as software_gpu`.

`pytest -m gpu` runs the tests that are marked so on a card, without the library.

A kernel that fails ends a context for good, as on a card, so a test of faults runs in a child process, or calls `reset` at its end.
What a kernel did wrong is in `faults` (in a child process: on standard error, in lines that begin with `software GPU:`).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gpu.driver.library import build, compiler

needs_pycuda = pytest.mark.skipif(
    importlib.util.find_spec("pycuda") is None, reason="pycuda is not installed: `make .venv/pycuda` builds it"
)


ON_A_CARD = "gpu"  # the expression of `pytest -m` with which tests run on a card
NO_DEVICE = 100


def missing_card() -> str:
    """Why there is no card; empty where there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no driver"
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or (0 if count.value else NO_DEVICE)
    return f"the driver answers with status {status}" if status else ""


@dataclass(frozen=True)
class SoftwareGpu:
    """By `pytest -m gpu`, a card in its place: then there is no library, and nothing to look into."""

    library: Path | None

    def environment(self, **settings: object) -> dict[str, str]:
        """Variables for a child process: `environment(arch="8.0", cards=2, memory=1 << 28, driver=12080, seed=1, ...)`, see card.py."""
        if self.library is None:
            return {}
        found = [str(self.library.parent), *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))]
        return {"LD_LIBRARY_PATH": ":".join(found)} | {f"SOFTWARE_GPU_{name.upper()}": str(value) for name, value in settings.items()}

    @property
    def faults(self) -> list[str]:
        """What kernels of this process did wrong."""
        from tests.gpu.driver.card import machine

        return machine.faults

    @property
    def launches(self) -> int:
        """Kernels that ran in this process."""
        from tests.gpu.driver.card import machine

        return machine.launches

    @property
    def assembled(self) -> int:
        """Texts of PTX that the driver of this process assembled."""
        from tests.gpu.driver.card import machine

        return machine.assembled

    def reset(self) -> None:
        """Forget the faults of this process."""
        if self.library is None:
            return
        from tests.gpu.driver.calls import Result
        from tests.gpu.driver.card import machine

        machine.faults.clear()
        for context in machine.contexts.values():
            context.fault = Result.SUCCESS


@pytest.fixture(scope="session")
def _library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    if request.config.option.markexpr == ON_A_CARD:
        if missing := missing_card():
            pytest.skip(f"-m {ON_A_CARD} runs on a card: {missing}")
        return None
    if compiler() is None:
        pytest.skip("the software GPU's driver needs a C compiler; none is installed")
    library = build(tmp_path_factory.mktemp("software_gpu"))
    ctypes.CDLL(str(library))  # by its soname, what asks for libcuda.so.1 from now on gets this one
    return library


@pytest.fixture
def software_gpu(_library: Path | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[SoftwareGpu]:
    gpu = SoftwareGpu(_library)
    for name, value in gpu.environment().items():
        monkeypatch.setenv(name, value)
    yield gpu
    gpu.reset()
