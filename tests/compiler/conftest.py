"""Programs in text: what a pass makes of them, and what they compute."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from numpy.typing import NDArray

import compiler.ops
from compiler.driver import Options, compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.equal import assert_equal
from compiler.ir.module import IRModule
from compiler.ir.parser import parse
from compiler.ir.types import ObjectType
from compiler.ir.verify import verify
from compiler.passes.base import Pass, Verify
from compiler.target import Target, get, host
from runtime.session import Session

assert compiler.ops  # the tables of operators are filled


@pytest.fixture
def becomes() -> Callable[[Pass, str, str], None]:
    """`becomes(legalize, BEFORE, EXPECTED)`. A result that EXPECTED annotates as `object` may have any annotation."""

    def check(step: Pass, before: str, expected: str) -> None:
        wanted = parse(expected)
        verify(wanted)
        module = parse(before)
        verify(module)
        result = step(module)
        verify(result)
        coarse = [n for n, f in wanted.graph_functions.items() if f.result_type == ObjectType()]
        found = {n: replace(result.graph(n), result_type=ObjectType()) for n in coarse if n in result.functions}
        assert_equal(result.update(found), wanted)

    return check


@pytest.fixture
def stays() -> Callable[[Pass, str], None]:
    """A pass that finds nothing to do gives back the object that it was given."""

    def check(step: Pass, text: str) -> None:
        module = parse(text)
        verify(module)
        assert step(module) is module

    return check


@pytest.fixture
def compute() -> Callable[..., Any]:
    """`compute(program, *arguments)`: what `main` returns, compiled, with 1, 2 and 3 threads bit for bit and as interpreted."""

    def call(program: str | IRModule, *args: Any, rtol: float = 1e-5) -> Any:
        module = parse(program) if isinstance(program, str) else program
        verify(module)
        expected = Interpreter(module).call("main", *map(_copied, args))
        executable = compile_module(module, Options(instruments=(Verify(),)))
        results: list[Any] = []
        for num_threads in (1, 2, 3):
            session = Session(executable, device_threads=num_threads)
            results.append(session.call("main", *map(_copied, args)))
            session.close()
        _close(results[0], expected, rtol)
        for other in results[1:]:
            _close(other, results[0], 0.0)
        return results[0]

    return call


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _close(actual: Any, expected: Any, rtol: float) -> None:
    if isinstance(expected, tuple):
        for a, e in zip(actual, expected, strict=True):
            _close(a, e, rtol)
        return
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol * np.max(np.abs(e), initial=0.0, where=np.isfinite(e)))


# --- matrix units --------------------------------------------------------------------------------------------------------


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
    if cc is None or not host().has(*vectors):
        pytest.skip("no matrix unit here, nor what it is emulated with: a C compiler and AVX-512 with VNNI and BF16")
    library = tmp_path_factory.mktemp("amx") / "amx_unit.so"
    subprocess.run([cc, "-O2", "-shared", "-fPIC", "-mavx512f", "-o", library, Path(__file__).parent / "amx_unit.c"], check=True)
    return MatrixUnit(library)


@pytest.fixture
def amx(matrix_unit: MatrixUnit, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A target whose code runs here as on a machine with the unit."""
    features = {**llvm.get_host_cpu_features(), "amx-tile": True, "amx-bf16": True, "amx-int8": True}
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: features)
    return get("amx")
