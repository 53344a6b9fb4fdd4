from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.device.cpu.host import ARCH
from runtime.errors import ArgumentMismatch, InvalidProgram, OutOfMemory, TooDeep, UnknownName
from runtime.executable import (
    AnySpec,
    Arg,
    Base,
    Bound,
    Call,
    ConstantRef,
    Executable,
    ExecutableMeta,
    Goto,
    If,
    Imm,
    Instruction,
    Kernel,
    NativeLaunch,
    Operand,
    ParamSpec,
    Phase,
    Reg,
    Region,
    Ret,
    ScalarSpec,
    Slot,
    TensorSpec,
    VMFunction,
)
from runtime.memory import MemoryAccount
from runtime.session import Session

ANY = AnySpec()


def function(name: str, params: dict[str, Any], instructions: list[Instruction], **more: Any) -> VMFunction:
    specs = tuple(ParamSpec(p, spec) for p, spec in params.items())
    more = {"num_registers": 8, "slots": (), "bounds": (), **more}
    return VMFunction(name=name, params=specs, instructions=tuple(instructions), **more)


def session(*functions: VMFunction, constants: list[Any] | None = None, limit: int | None = None, **more: Any) -> Session:
    meta = ExecutableMeta(f"{ARCH}:", {f.name: f for f in functions}, more.get("kernels", ()), more.get("regions", ()))
    executable = Executable(meta, more.get("object_code", b""), constants or [])
    return Session(executable, device_threads=1, memory=MemoryAccount(limit))


def run(instructions: list[Instruction], *args: Any, slots: tuple[str, ...] = (), **more: Any) -> Any:
    params = {f"p{i}": ANY for i in range(len(args))}
    return session(function("main", params, instructions, slots=slots), **more).call("main", *args)


def call(dst: int | None, callee: str, *args: Arg) -> Call:
    return Call(dst, callee, args)


# --- control flow ------------------------------------------------------------------------------------------------------


def test_branches_and_jumps() -> None:
    instructions = [If(Reg(0), 3), call(1, "vm.copy", Imm("then")), Goto(4), call(1, "vm.copy", Imm("else")), Ret(Reg(1))]
    assert [run(instructions, flag) for flag in (True, False)] == ["then", "else"]


def test_a_loop() -> None:
    """A loop in the instructions runs until its condition is false. This program unpacks nested tuples in a loop."""
    instructions = [
        call(1, "vm.tuple_get", Reg(0), Imm(0)),
        If(Reg(1), 4),
        call(0, "vm.tuple_get", Reg(0), Imm(1)),
        Goto(0),
        call(2, "vm.tuple_get", Reg(0), Imm(1)),
        Ret(Reg(2)),
    ]
    assert run(instructions, (True, (True, (False, "end")))) == "end"


def test_calls_and_recursion() -> None:
    down = function(
        "down",
        {"x": ANY},
        [
            call(1, "vm.tuple_get", Reg(0), Imm(0)),
            If(Reg(1), 5),
            call(2, "vm.tuple_get", Reg(0), Imm(1)),
            call(3, "down", Reg(2)),
            Ret(Reg(3)),
            Ret(Reg(0)),
        ],
    )
    assert session(down).call("down", (1, (1, (0, "end")))) == (0, "end")


def test_recursion_without_end_is_an_error_and_the_session_survives() -> None:
    forever = function("forever", {}, [call(0, "forever"), Ret(Reg(0))])
    fine = function("fine", {}, [Ret(Imm(1))])
    s = session(forever, fine)
    with pytest.raises(TooDeep, match="forever: more than 100 nested calls"):
        s.call("forever")
    assert s.call("fine") == 1


def test_a_function_named_by_a_value() -> None:
    one, two = (function(name, {"x": ANY}, [Ret(Imm(name))]) for name in ("one", "two"))
    apply = function("apply", {"f": ANY}, [call(1, "vm.invoke", Reg(0), Imm(0)), Ret(Reg(1))])
    s = session(one, two, apply)
    assert (s.call("apply", "one"), s.call("apply", "two")) == ("one", "two")


def test_a_call_checks_its_arguments() -> None:
    inner = function("inner", {"x": TensorSpec((3,), "f32")}, [Ret(Reg(0))])
    outer = function("outer", {"x": ANY}, [call(1, "inner", Reg(0)), Ret(Reg(1))])
    with pytest.raises(ArgumentMismatch, match="inner: parameter 'x': dimension 0: expected 3, got 4"):
        session(inner, outer).call("outer", np.zeros(4, np.float32))


# --- builtins ----------------------------------------------------------------------------------------------------------


def test_shapes_and_scalars() -> None:
    main = function(
        "main",
        {"x": TensorSpec((Slot(0, defines=True), 4), None), "s": ScalarSpec("f32", Slot(1, defines=True))},
        [
            call(2, "vm.shape_of", Reg(0)),
            call(3, "vm.make_shape", Imm(7), Reg(2), Slot(0)),
            call(4, "vm.make_scalar", Slot(0), Imm("i64")),
            call(5, "vm.make_scalar", Slot(1), Imm("f32")),
            call(6, "vm.tuple", Reg(3), Reg(4), Reg(5), Imm(None)),
            Ret(Reg(6)),
        ],
        slots=("n", "s"),
    )
    assert session(main).call("main", np.zeros((3, 4)), -2.5) == ((7, 3, 4, 3), 3, -2.5, None)


def test_views_share_memory() -> None:
    x = np.arange(6, dtype=np.int32)
    y = run([call(1, "vm.reshape", Reg(0), Imm(2), Imm(3)), Ret(Reg(1))], x)
    assert y.shape == (2, 3) and np.shares_memory(x, y)
    with pytest.raises(ArgumentMismatch, match=r"main: an array of shape \(6,\) cannot be reshaped to \(4, 2\)"):
        run([call(1, "vm.reshape", Reg(0), Imm(4), Imm(2)), Ret(Reg(1))], x)


def test_fresh_arrays() -> None:
    y = run([call(1, "vm.alloc", Imm("bf16"), Reg(0), Imm(2)), Ret(Reg(1))], (3, 4))
    assert y.shape == (3, 4, 2) and y.dtype.name == "bfloat16"
    with pytest.raises(OutOfMemory, match="result needs 4,000 bytes, 100 are free"):
        run([call(0, "vm.alloc", Imm("f32"), Imm(1000)), Ret(Reg(0))], limit=100)
    with pytest.raises(OutOfMemory, match="the system has no more"):
        run([call(0, "vm.alloc", Imm("f32"), Imm(1 << 60)), Ret(Reg(0))])
    with pytest.raises(InvalidProgram, match=r"cannot have the shape \(-1,\)"):
        run([call(0, "vm.alloc", Imm("f32"), Imm(-1)), Ret(Reg(0))])


def test_match_defines_slots_in_the_middle() -> None:
    main = function(
        "main",
        {"x": ANY},
        [
            call(1, "vm.match", Reg(0), Imm("lv"), Imm(TensorSpec((Slot(0, defines=True), Slot(0)), "f32")), Imm(None)),
            call(2, "vm.make_scalar", Slot(0), Imm("i64")),
            Ret(Reg(2)),
        ],
        slots=("k",),
        bounds=(Bound("k", 0, 0, 5),),
    )
    s = session(main)
    assert s.call("main", np.zeros((3, 3), np.float32)) == 3
    with pytest.raises(ArgumentMismatch, match="main: lv: dimension 1: expected k = 3, got 4"):
        s.call("main", np.zeros((3, 4), np.float32))
    with pytest.raises(ArgumentMismatch, match="main: lv: k = 6 is outside its declared range 0 <= k <= 5"):
        s.call("main", np.zeros((6, 6), np.float32))


def test_conditions_are_read_from_scalars_and_arrays() -> None:
    for value in (True, np.array(True), np.bool_(True)):
        assert run([call(1, "vm.read_bool", Reg(0)), Ret(Reg(1))], value) is True


def test_frames_keep_nothing() -> None:
    x = np.zeros(3)
    s = session(function("main", {"x": ANY}, [call(1, "vm.copy", Reg(0)), Ret(Imm(None))]))
    count = sys.getrefcount(x)
    assert s.call("main", x) is None and sys.getrefcount(x) == count


def test_constants() -> None:
    assert run([Ret(ConstantRef(0))], constants=[np.arange(3)]).tolist() == [0, 1, 2]


# --- library routines --------------------------------------------------------------------------------------------------


def test_a_routine_fills_what_it_is_given_and_returns_what_it_made() -> None:
    x, out = np.array([3, 1, 2], np.int32), np.zeros(3, np.int32)
    run([call(None, "lib.sort", Reg(0), Imm(0), Imm(True), Reg(1)), Ret(Imm(None))], x, out)
    assert out.tolist() == [3, 2, 1]
    assert run([call(1, "lib.nonzero", Reg(0)), Ret(Reg(1))], np.array([0, 5, 6])).tolist() == [[1, 2]]
    with pytest.raises(ArgumentMismatch, match=r"lib.sort\(x, axis, descending, values\): the output has shape \(2,\)"):
        run([call(None, "lib.sort", Reg(0), Imm(0), Imm(True), Reg(1)), Ret(Imm(None))], x, out[:2])


# --- programs that are refused when they are loaded --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instructions", "problem"),
    [
        ([], "main: the last instruction must return"),
        ([call(0, "vm.copy", Imm(1))], "main: the last instruction must return"),
        ([Ret(Reg(8))], "main: register 8 does not exist, there are 8"),
        ([Ret(Reg(-1))], "register -1 does not exist"),
        ([Ret(Slot(0))], "slot 0 does not exist, there are 0"),
        ([Ret(ConstantRef(0))], "constant 0 does not exist, there are 0"),
        ([Goto(5)], "there is no instruction 5 to jump to"),
        ([If(Imm(1), -1), Ret(Imm(1))], "there is no instruction -1 to jump to"),
        ([call(9, "vm.copy", Imm(1)), Ret(Imm(1))], "register 9 does not exist"),
        ([call(0, "vm.alloc", Imm("f99")), Ret(Imm(1))], "unknown element type 'f99'"),
        ([call(0, "vm.copy", Imm(1), Imm(2)), Ret(Imm(1))], "takes 1 operands was given 2"),
        ([call(0, "vm.run_region", Imm(0)), Ret(Imm(1))], "region 0 does not exist, there are 0"),
        ([call(0, "vm.match", Reg(0), Imm("x"), Imm(AnySpec()), Imm("f")), Ret(Imm(1))], "refers to 'f', but has no object code"),
        ([call(0, "lib.sort", Imm(1)), Ret(Imm(1))], r"lib.sort\(x, axis, descending, values\) is called with 1 arguments"),
    ],
)
def test_programs_that_refer_to_nothing(instructions: list[Instruction], problem: str) -> None:
    with pytest.raises(InvalidProgram, match=problem):
        session(function("main", {}, instructions))


@pytest.mark.parametrize("callee", ["vm.nothing", "lib.nothing", "nothing"])
def test_unknown_names_list_what_is_known(callee: str) -> None:
    with pytest.raises(UnknownName, match=r"nothing'; known: .*(make_shape|argsort|main)"):
        session(function("main", {}, [call(None, callee), Ret(Imm(1))]))


def test_a_bound_that_nothing_checks() -> None:
    with pytest.raises(InvalidProgram, match="the bound of n is never checked"):
        session(function("main", {}, [Ret(Imm(1))], slots=("n",), bounds=(Bound("n", 0),)))


def test_a_launch_must_fit_its_kernel(object_code: bytes) -> None:
    kernel = Kernel("add_one", (Phase("add_one", "grid"),), 2, 2)
    region = Region((NativeLaunch(0, (Operand(Base.ARENA),), (1,)),))
    main = function("main", {}, [call(None, "vm.run_region", Imm(0)), Ret(Imm(1))])
    with pytest.raises(InvalidProgram, match="kernel add_one takes 2 buffers and 2 integers, the launch has 1 and 1"):
        session(main, kernels=(kernel,), regions=(region,), object_code=object_code)


def test_functions_pass_weights_to_each_other_like_arguments() -> None:
    weight = ParamSpec("w", TensorSpec((2,), "f32"), weight=True)
    inner = VMFunction("inner", (ParamSpec("x", ANY), weight), 3, (), (), (call(2, "vm.tuple", Reg(0), Reg(1)), Ret(Reg(2))))
    outer = function("outer", {"x": ANY, "w": ANY}, [call(2, "inner", Reg(0), Reg(1)), Ret(Reg(2))])
    s = session(inner, outer)
    bound, passed = np.zeros(2, np.float32), np.ones(2, np.float32)
    assert s.call("outer", 5, passed)[1] is passed
    with pytest.raises(ArgumentMismatch, match="inner: bind its weights"):
        s.call("inner", 5)
    s.bind("inner", {"w": bound})
    assert s.call("outer", 5, passed)[1] is passed and s.call("inner", 5)[1] is bound
    with pytest.raises(ArgumentMismatch, match="inner: weight 'w': dimension 0: expected 2, got 3"):
        s.call("outer", 5, np.zeros(3, np.float32))


def test_a_weight_cannot_be_overwritten() -> None:
    """A program that stores into the register of a weight is refused, because calls do not set these registers again."""
    main = function("main", {}, [call(0, "vm.copy", Imm(1)), Ret(Reg(0))])
    weight = ParamSpec("w", TensorSpec((2,), "f32"), weight=True)
    with pytest.raises(InvalidProgram, match="main: register 0 holds a weight and cannot be overwritten"):
        session(msgspec.structs.replace(main, params=(weight,)))


def test_calls_use_the_weights_that_were_bound_last() -> None:
    weight = ParamSpec("w", TensorSpec((2,), "f32"), weight=True)
    s = session(VMFunction("main", (weight,), 1, (), (), (Ret(Reg(0)),)))
    for number in range(3):
        s.bind("main", {"w": np.full(2, number, np.float32)})
        assert all(s.call("main")[0] == number for _ in range(2))
