"""The tests read machine code that is kept, and only the code of the same kernel or of the same LLVM IR."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import compiler.ops
from compiler.backends.cpu.schedule import rules
from compiler.driver import Options, compile_module
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.text.parser import parse
from compiler.passes.base import Verify
from runtime.executable import Executable
from tests.kept_code import compiled_anew, kept_modules

assert compiler.ops  # importing compiler.ops registers all operators
assert compiled_anew  # a fixture


def compiled(op: str, options: Options | None = None) -> Executable:
    return compile_module(parse(f"func main(x: f32[8]) -> object {{ y = {op}(x) return y }}"), options)


@pytest.fixture
def scheduled() -> Iterator[list[PrimFunc]]:
    """Yield the loop nests that have been scheduled. The fixture does not use `monkeypatch`, with which no kernel would be kept."""
    found: list[PrimFunc] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "schedule_ragged", lambda prim, **_: found.append(prim))  # the first rule, which does not apply
        yield found


@pytest.fixture
def without_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    def emitted(text: str, _: object) -> bytes:
        raise AssertionError(f"LLVM compiles {text}")

    monkeypatch.setattr("compiler.codegen.kept.emitted", emitted)


def test_llvm_compiles_a_module_once(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with kept_modules(tmp_path):
        first = compiled("exp")
    request.getfixturevalue("without_llvm")
    with kept_modules(tmp_path):
        assert compiled("exp").object_code == first.object_code
        with pytest.raises(AssertionError, match="LLVM compiles"):
            compiled("tanh")


def test_a_kernel_is_scheduled_once(tmp_path: Path, scheduled: list[PrimFunc]) -> None:
    with kept_modules(tmp_path):
        first = compiled("exp")
        assert len(scheduled) == 1
        assert compiled("exp").object_code == first.object_code and len(scheduled) == 1
        compiled("tanh")
        assert len(scheduled) == 2


def test_a_compilation_that_is_watched_schedules_all_kernels(tmp_path: Path, scheduled: list[PrimFunc]) -> None:
    with kept_modules(tmp_path):
        for _ in range(2):
            compiled("exp", Options(instruments=(Verify(),)))
    assert len(scheduled) == 2


def test_a_test_that_may_change_the_compiler_schedules_all_kernels(
    tmp_path: Path, scheduled: list[PrimFunc], monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept_modules(tmp_path):
        for _ in range(2):
            compiled("exp")
    assert len(scheduled) == 2


def test_a_test_may_compile_anew(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with kept_modules(tmp_path):
        request.getfixturevalue("compiled_anew")
        compiled("exp")
        assert not list(tmp_path.iterdir())
