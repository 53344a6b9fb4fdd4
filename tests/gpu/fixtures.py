"""Fixtures for tests on the software GPU: a `libcuda.so.1` in software that pycuda and ctypes load in place of NVIDIA's.

A test that uses the fixture `software_gpu` may import pycuda or load `libcuda.so.1` through ctypes; both load the software library. A child
process loads it, too, if its environment contains `software_gpu.environment(...)`, which also describes the card (see
tests/gpu/driver/card.py). The conftest.py of a folder imports the fixture: `from tests.gpu.fixtures import software_gpu as software_gpu`.

`pytest -m gpu` runs the tests that are marked `gpu` on a real card, without the software library.

A kernel that fails makes its context unusable, as on a real card, so a test of faults runs in a child process or calls `reset` at its end.
`faults` describes what kernels did wrong. A child process prints these descriptions on standard error, in lines that begin with `software
GPU:`.
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


ON_A_CARD = "gpu"  # tests run on a real card if the value of pytest's option -m begins with this word
NO_DEVICE = 100


def missing_card() -> str:
    """Return why no real card can be used, or an empty string if one can."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no driver"
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or (0 if count.value else NO_DEVICE)
    return f"the driver answers with status {status}" if status else ""


@dataclass(frozen=True)
class SoftwareGpu:
    """Access to the software GPU. Under `pytest -m gpu`, tests use a real card: then `library` is None, and neither faults nor counts are
    available."""

    library: Path | None

    def environment(self, **settings: object) -> dict[str, str]:
        """Return the environment variables that give a child process a software GPU: `environment(arch="8.0", cards=2, memory=1 << 28,
        driver=12080, seed=1, ...)`. card.py describes the settings."""
        if self.library is None:
            return {}
        found = [str(self.library.parent), *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))]
        return {"LD_LIBRARY_PATH": ":".join(found)} | {f"SOFTWARE_GPU_{name.upper()}": str(value) for name, value in settings.items()}

    def has_cards(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give this process several software GPUs until the test ends. Skip the test if it runs on real cards and there are fewer."""
        if self.library is None:
            from runtime.device.cuda.card import found_cards

            if len(found_cards()) < count:
                pytest.skip(f"needs {count} GPUs")
            return
        from tests.gpu.driver.card import machine

        monkeypatch.setattr(machine, "cards", count)

    @property
    def faults(self) -> list[str]:
        """Return, for each kernel of this process that failed or could not be loaded, what is wrong with it."""
        from tests.gpu.driver.card import machine

        return machine.faults

    @property
    def launches(self) -> int:
        """Return how many kernels have run in this process."""
        from tests.gpu.driver.card import machine

        return machine.launches

    @property
    def assembled(self) -> int:
        """Return how many PTX texts the driver has assembled in this process."""
        from tests.gpu.driver.card import machine

        return machine.assembled

    @property
    def num_objects(self) -> dict[str, int]:
        """Return how many modules, graphs, executable graphs, events and blocks of memory this process has on its cards."""
        from tests.gpu.driver.card import machine
        from tests.gpu.driver.graphs import Executable, Graph
        from tests.gpu.driver.streams import Event
        from tests.gpu.ptx.launch import LoadedModule

        kinds = (LoadedModule, Graph, Executable, Event)
        counted = {kind.__name__: sum(isinstance(thing, kind) for thing in machine.objects.values()) for kind in kinds}
        return {**counted, "blocks": len(machine.owners), "pinned": len(machine.pinned)}

    def reset(self) -> None:
        """Forget the faults of this process, and the work that waits behind them, so that its contexts work again."""
        if self.library is None:
            return
        from tests.gpu.driver.calls import Result
        from tests.gpu.driver.card import machine
        from tests.gpu.driver.streams import drop_work

        machine.faults.clear()
        drop_work()
        for context in machine.contexts.values():
            context.fault = Result.SUCCESS


@pytest.fixture(scope="session")
def _library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    if request.config.option.markexpr.split()[:1] == [ON_A_CARD]:
        if missing := missing_card():
            pytest.skip(f"-m {ON_A_CARD} runs on a card: {missing}")
        return None
    if compiler() is None:
        pytest.skip("the software GPU's driver needs a C compiler; none is installed")
    library = build(tmp_path_factory.mktemp("software_gpu"))
    ctypes.CDLL(str(library))  # this library has the soname libcuda.so.1, so later loads of that name get it
    return library


@pytest.fixture
def software_gpu(_library: Path | None) -> Iterator[SoftwareGpu]:
    """Give this process a software GPU. The fixture does not use `monkeypatch`, with which no kernel would be kept (tests/kept_code.py)."""
    gpu = SoftwareGpu(_library)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in gpu.environment().items():
            patch.setenv(name, value)
        yield gpu
    gpu.reset()
