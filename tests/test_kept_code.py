"""The tests read machine code that is kept, and only the code of the same LLVM IR."""

from __future__ import annotations

from pathlib import Path

import pytest

import compiler.ops
from compiler.driver import compile_module
from compiler.ir.text.parser import parse
from runtime.executable import Executable
from tests.kept_code import compiled_anew, kept_modules

assert compiler.ops  # importing compiler.ops registers all operators
assert compiled_anew  # a fixture


def compiled(op: str) -> Executable:
    return compile_module(parse(f"func main(x: f32[8]) -> object {{ y = {op}(x) return y }}"))


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


def test_a_test_may_compile_anew(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with kept_modules(tmp_path):
        request.getfixturevalue("compiled_anew")
        compiled("exp")
        assert not list(tmp_path.iterdir())
