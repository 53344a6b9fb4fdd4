"""The tests read machine code that is kept, and only the code of the same kernel or of the same LLVM IR."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

import compiler.ops
from compiler.backends.cpu.schedule import rules
from compiler.driver import Options, compile_module
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.text.parser import parse
from compiler.passes.base import Verify
from runtime.executable import Executable
from tests.kept_code import compiled_anew, kept_modules
from tests.sources import Sources

assert compiler.ops  # importing compiler.ops registers all operators
assert compiled_anew  # a fixture
PATH = rules.__name__


def compiled(op: str, options: Options | None = None) -> Executable:
    return compile_module(parse(f"func main(x: f32[8]) -> object {{ y = {op}(x) return y }}"), options)


@pytest.fixture
def scheduled() -> Iterator[list[PrimFunc]]:
    """Yield the loop nests that have been scheduled. The fixture does not use a MonkeyPatch, with which no kernel would be kept."""
    found: list[PrimFunc] = []
    with patch.object(rules, "schedule_ragged", lambda prim, **_: found.append(prim)):  # the first rule, which does not apply
        yield found


def refused(text: str, _: object) -> bytes:
    raise AssertionError(f"LLVM compiles {text}")


def test_llvm_compiles_a_module_once(tmp_path: Path) -> None:
    """With instruments, no kernel is found by its loop nest, so the code is found by its LLVM IR."""
    watched = Options(instruments=(Verify(),))
    with kept_modules(tmp_path):
        first = compiled("exp", watched)
    with kept_modules(tmp_path), patch("compiler.codegen.kept.emitted", refused):
        assert compiled("exp", watched).object_code == first.object_code
        with pytest.raises(AssertionError, match="LLVM compiles"):
            compiled("tanh", watched)


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


@pytest.mark.parametrize("target", [PATH, rules, PrimFunc], ids=["path", "module", "class"])
def test_a_patch_of_the_compiler_is_noticed_until_it_is_undone(tmp_path: Path, scheduled: list[PrimFunc], target: object) -> None:
    name = "__doc__"
    with kept_modules(tmp_path):
        compiled("exp")
        with pytest.MonkeyPatch.context() as changes:
            changes.setenv("RELAXSERVE_OF_A_TEST", "1")
            compiled("exp")
            assert len(scheduled) == 1, "the compiler is as it was"
            if isinstance(target, str):
                changes.setattr(f"{target}.{name}", "")
            else:
                changes.setattr(target, name, "")
            compiled("exp")
            assert len(scheduled) == 2
        compiled("exp")
        assert len(scheduled) == 2


def test_a_fixture_that_a_test_asks_for_while_it_runs_is_noticed(
    tmp_path: Path, scheduled: list[PrimFunc], request: pytest.FixtureRequest
) -> None:
    with kept_modules(tmp_path):
        compiled("exp")
        request.getfixturevalue("monkeypatch").delattr(f"{PATH}.__doc__")
        compiled("exp")
        assert len(scheduled) == 2


def test_a_change_of_the_sources_ends_the_keeping_of_code(tmp_path: Path, scheduled: list[PrimFunc]) -> None:
    """If the sources change while tests run, it is unknown from which version the code of this process was compiled, so all of it is
    removed. Code of earlier runs stays."""
    source, kept = tmp_path / "a.py", tmp_path / "kept"
    source.write_text("1")
    sources = Sources(tmp_path, source.read_text)
    with kept_modules(kept, sources):
        compiled("tanh")
    known = set(kept.iterdir())
    with pytest.raises(KeyboardInterrupt), kept_modules(kept, sources):
        compiled("exp")
        before = set(kept.iterdir())
        assert before > known
        source.write_text("2")
        os.utime(source, (1, 1))
        compiled("sin")
        assert set(kept.iterdir()) == before
        raise KeyboardInterrupt  # as from someone who ends the run
    assert set(kept.iterdir()) == known
    with kept_modules(kept):
        compiled("tanh")
    assert len(scheduled) == 3, "the first kernel is still kept"


def test_sources_change_with_their_contents(tmp_path: Path) -> None:
    file, other = tmp_path / "a.py", tmp_path / "b.py"
    file.write_text("1")
    other.write_text("1")
    sources = Sources(tmp_path, lambda: file.read_text() + other.read_text())
    assert not sources.have_changed()
    os.utime(file, (1, 1))
    assert not sources.have_changed()
    file.write_text("2")
    os.utime(file, (2, 2))
    assert sources.have_changed() and sources.have_other_digest()
    file.write_text("1")
    other.unlink()
    assert sources.have_changed() and sources.have_other_digest()


def test_a_test_may_compile_anew(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with kept_modules(tmp_path):
        request.getfixturevalue("compiled_anew")
        compiled("exp")
        assert not list(tmp_path.iterdir())
