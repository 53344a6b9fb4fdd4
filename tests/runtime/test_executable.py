from __future__ import annotations

import contextlib
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compiler.ir.dtypes import DType
from runtime import sealed, sections
from runtime.errors import DamagedFile, IncompatibleExecutable, RuntimeFault
from runtime.executable import (
    DTYPES,
    FORMAT_VERSION,
    AnySpec,
    Base,
    Bound,
    Call,
    ConstantRef,
    Executable,
    ExecutableMeta,
    Goto,
    If,
    Imm,
    Kernel,
    NativeLaunch,
    Operand,
    ParamSpec,
    Phase,
    Reg,
    Region,
    Ret,
    ScalarSpec,
    ShapeSpec,
    Slot,
    TensorSpec,
    TupleSpec,
    VMFunction,
)

SPECS = [
    TensorSpec((Slot(0, defines=True), 4), "f32"),
    TensorSpec(None, None, 2),
    ShapeSpec((Slot(0), 3)),
    ScalarSpec("i64", Slot(1)),
    TupleSpec((AnySpec(), TupleSpec((ScalarSpec("f32"),)))),
]


def program() -> Executable:
    function = VMFunction(
        name="main",
        params=tuple(ParamSpec(f"p{i}", spec) for i, spec in enumerate(SPECS)),
        num_registers=9,
        slots=("n", "n + 1"),
        bounds=(Bound("n", 0, 1, Slot(1), 2),),
        instructions=(
            Call(6, "vm.match", (Reg(0), Imm("x"), Imm(SPECS[0]), Imm(None))),
            If(Reg(6), 4),
            Call(None, "vm.run_region", (Imm(0),)),
            Goto(4),
            Call(7, "vm.make_scalar", (Imm(2.5), Imm("f32"))),
            Ret(ConstantRef(0)),
        ),
        derive="derive",
        arena_bytes=Slot(1),
    )
    kernel = Kernel("add", (Phase("add", "grid"),), 2, 1)
    launch = NativeLaunch(0, (Operand(Base.ARENA, 0, 64), Operand(Base.CONSTANT, 1, Slot(1))), (Slot(0),))
    meta = ExecutableMeta("x86-64", {"main": function}, (kernel,), (Region((launch,)),))
    constants = [np.arange(6, dtype=np.float32).reshape(2, 3).T, np.array(True), np.ones((3, 0), ml_dtypes.bfloat16)]
    return Executable(meta, b"object code", constants, {"main.ir": "f(x) → y", "a": ""})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "program"
    program().save(path)
    return path


def test_round_trip(path: Path) -> None:
    before, after = program(), Executable.load(path)
    assert after.meta == before.meta and after.object_code == before.object_code and after.texts == before.texts
    for old, new in zip(before.constants, after.constants, strict=True):
        assert new.dtype == old.dtype and np.array_equal(new, old)


def test_constants_are_aligned_read_only_views(path: Path) -> None:
    constant = Executable.load(path).constants[0]
    assert constant.ctypes.data % 64 == 0 and not constant.flags.owndata and not constant.flags.writeable


def test_equal_programs_give_equal_bytes(path: Path, tmp_path: Path) -> None:
    again = program()
    again.texts["main.ir"] = again.texts.pop("main.ir")  # equal content with another order of entries
    again.save(tmp_path / "again")
    assert sealed.load(tmp_path / "again") == sealed.load(path)


def test_element_types_are_those_of_the_compiler() -> None:
    assert {d.value: d.numpy for d in DType} == DTYPES


def test_an_array_of_another_type_cannot_be_stored(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="complex128 cannot be stored; known: f32"):
        Executable(program().meta, b"", [np.zeros(1, np.complex128)]).save(tmp_path / "x")


@pytest.mark.parametrize("name", ["program", "object", "constant/0", "text/main.ir"])
def test_a_damaged_section_is_named(path: Path, name: str) -> None:
    file = sections.SectionFile(path)
    content = bytearray(path.read_bytes())
    at = file._sections[name].offset
    content[at] ^= 255
    sealed.store(path, bytes(content[: -sealed.SEAL_BYTES]))
    with pytest.raises(DamagedFile) as error:
        Executable.load(path)
    assert error.value.section == name and str(path) in str(error.value)


def test_nothing_is_parsed_before_the_seal_is_verified(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With valid checksums but another key, not even the table of sections is read."""
    (path.parent / sealed.KEY_FILE).unlink()
    monkeypatch.setattr(sections, "SectionFile", None)
    with pytest.raises(DamagedFile, match="seal"):
        Executable.load(path)


def replace_section(path: Path, name: str, content: bytes) -> None:
    """Replace a section of a file, with a valid checksum and seal for the new content."""
    file = sections.SectionFile(path)
    old = {n: bytes(file.read(n)) for n in file.names}
    sealed.store(path, sections.packed({**old, name: content}))


def test_another_format_is_not_read(path: Path) -> None:
    replace_section(path, "version", msgspec.msgpack.encode({"format_version": FORMAT_VERSION + 1}))
    with pytest.raises(IncompatibleExecutable, match=f"format {FORMAT_VERSION + 1}, this runtime reads {FORMAT_VERSION}"):
        Executable.load(path)


def test_a_constant_of_another_size_is_damaged(path: Path) -> None:
    replace_section(path, "constant/0", b"short")
    with pytest.raises(DamagedFile, match="its size is 5 bytes, expected a f32 array of shape \\(3, 2\\)"):
        Executable.load(path)


def test_nesting_without_end_is_damage(path: Path) -> None:
    deep = b"\x92\xa9TupleSpec" * 5000
    replace_section(path, "program", deep)
    with pytest.raises(DamagedFile):
        Executable.load(path)


@given(st.sampled_from(["version", "program", "text/a", "constant/1"]), st.binary(max_size=100))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_section_gives_a_typed_error_or_loads(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / "fuzzed"
    program().save(path)
    replace_section(path, name, content)
    with contextlib.suppress(RuntimeFault):
        Executable.load(path)


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_program_with_flipped_bytes_gives_a_typed_error_or_loads(path: Path, tmp_path: Path, data: st.DataObject) -> None:
    file = sections.SectionFile(path)
    content = bytearray(file.read("program"))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    fuzzed = tmp_path / "fuzzed"
    sealed.store(fuzzed, sections.packed({n: bytes(content) if n == "program" else bytes(file.read(n)) for n in file.names}))
    with contextlib.suppress(RuntimeFault):
        Executable.load(fuzzed)
