from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import flags
from runtime.device.cpu.host import ARCH
from runtime.device.registry import DEVICES
from runtime.errors import ArgumentMismatch, BoundExceeded, OutOfMemory, RuntimeFault, UnknownName
from runtime.executable import (
    Base,
    Bound,
    Call,
    DimRef,
    Executable,
    ExecutableMeta,
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
    Slot,
    TensorSpec,
    VMFunction,
)
from runtime.memory import MemoryAccount
from runtime.parts import OneAtATime, whole
from runtime.session import Session

HOST = f"{ARCH}:"

# --- a program written by hand, whose sizes `derive` of conftest.py computes --------------------------------------------------------

N, BYTES, TWO_BYTES = Slot(0), Slot(1), Slot(2)
SLOTS = ("n", "bytes", "2*bytes", "s")
VECTOR = TensorSpec((Slot(0, defines=True),), "f32")
X = ParamSpec("x", VECTOR)

ADD_ONE, SCALE, ADD_TWO = 0, 1, 2
KERNELS = (
    Kernel("add_one", (Phase("add_one", "grid"),), 2, 2),
    Kernel("scale", (Phase("scale", "grid"),), 2, 2),
    Kernel("add_two", (Phase("add_one", "grid"), Phase("add_one", "grid")), 2, 2),  # adds 2 only if both buffers are the same
)
CONSTANT = np.array([9, 1, 2, 3], np.float32)


def register(index: int) -> Operand:
    return Operand(Base.REGISTER, index)


FIRST, SECOND = Operand(Base.ARENA, 0, 0), Operand(Base.ARENA, 0, BYTES)  # places of two vectors in the arena


def launch(kernel: int, source: Operand, target: Operand, n: DimRef = N, scale: DimRef = 0) -> NativeLaunch:
    return NativeLaunch(kernel, (source, target), (n, scale))


def vm(dst: int | None, name: str, *args: Any) -> Call:
    return Call(dst, f"vm.{name}", args)


class Program:
    """Builds an executable whose functions have at most one captured region each."""

    def __init__(self) -> None:
        self.functions: dict[str, VMFunction] = {}
        self.regions: list[Region] = []

    def add(self, name: str, params: tuple[ParamSpec, ...], launches: list[NativeLaunch], result: Call, **more: Any) -> None:
        """Add a function that runs `launches` and returns the value of `result`, which is in the first register after the parameters."""
        number = len(params)
        run = [vm(None, "run_region", Imm(len(self.regions)))] if launches else []
        more = {"bounds": (), "derive": "derive", **more}
        self.functions[name] = VMFunction(name, params, number + 1, SLOTS, instructions=(result, *run, Ret(Reg(number))), **more)
        if launches:
            self.regions.append(Region(tuple(launches)))


def program() -> ExecutableMeta:
    p = Program()
    p.add(
        "plus_three",  # the result is a place in the arena
        (X,),
        [launch(ADD_ONE, register(0), FIRST), launch(ADD_ONE, FIRST, SECOND), launch(ADD_ONE, SECOND, FIRST)],
        vm(1, "alloc_arena", Imm(0), Imm("f32"), N),
        bounds=(Bound("n", 0, 1, 1000),),
        arena_bytes=TWO_BYTES,
    )
    p.add(
        "scaled",
        (X, ParamSpec("s", ScalarSpec("f32", Slot(3, defines=True)))),
        [launch(SCALE, register(0), register(2), scale=Slot(3))],
        vm(2, "alloc", Imm("f32"), N),
    )
    weights = (ParamSpec("w", TensorSpec((4,), "f32"), weight=True), ParamSpec("v", TensorSpec((N,), "f32"), weight=True))
    p.add("weighted", (X, *weights), [launch(ADD_ONE, register(1), register(3), n=4)], vm(3, "alloc", Imm("f32"), Imm(4)))
    third_on = Operand(Base.CONSTANT, 0, 4)
    p.add("constant", (X,), [launch(ADD_ONE, third_on, register(1), n=3)], vm(1, "alloc", Imm("f32"), Imm(3)))
    increment = ParamSpec("x", VECTOR, written=True)
    p.add("increment", (increment,), [launch(ADD_TWO, register(0), register(0))], vm(1, "copy", Reg(0)))
    p.functions["twice"] = VMFunction(
        "twice",
        (X,),
        num_registers=4,
        slots=SLOTS,
        bounds=(),
        instructions=(
            Call(1, "plus_three", (Reg(0),)),
            Call(2, "plus_three", (Reg(1),)),
            vm(3, "tuple", Reg(1), Reg(2)),
            Ret(Reg(3)),
        ),
        derive="derive",
    )
    return ExecutableMeta(HOST, p.functions, KERNELS, tuple(p.regions))


@pytest.fixture(scope="module")
def executable(object_code: bytes) -> Executable:
    return Executable(program(), object_code, [CONSTANT])


@pytest.fixture(params=[1, 2, 3, "opaque"])
def session(request: pytest.FixtureRequest, executable: Executable, monkeypatch: pytest.MonkeyPatch):
    """Yield a session on the CPU with the number of threads that the parameter gives, or on the opaque device, whose memory the host cannot
    read."""
    if request.param == "opaque":
        monkeypatch.setitem(DEVICES, ARCH, "tests.runtime.device.opaque")
    session = Session(executable, device_threads=1 if request.param == "opaque" else request.param)
    yield session
    session.close()


def vector(n: int) -> np.ndarray:
    return np.linspace(-1, 1, n, dtype=np.float32)


# --- calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 17, 1000])
def test_one_executable_runs_any_size(session: Session, n: int) -> None:
    assert np.array_equal(session.call("plus_three", vector(n)), vector(n) + 1 + 1 + 1)


def test_a_scalar_reaches_its_kernel(session: Session) -> None:
    assert np.array_equal(session.call("scaled", vector(5), -2.5), vector(5) * np.float32(-2.5))


def test_operands_from_the_constant_table(session: Session) -> None:
    assert session.call("constant", vector(1)).tolist() == [2, 3, 4]


def test_phases_run_one_after_another_and_in_place(session: Session) -> None:
    x = vector(100)
    session.call("increment", x)
    assert np.array_equal(x, vector(100) + 1 + 1)


def test_a_result_is_the_callers_to_keep(session: Session) -> None:
    first = session.call("plus_three", vector(50))
    kept = first.copy()
    session.call("plus_three", vector(50) + 7)
    assert np.array_equal(first, kept)


def test_a_view_lasts_until_the_next_call(session: Session) -> None:
    first = session.call("plus_three", vector(50), views=True)
    session.call("plus_three", vector(50) + 7)
    assert np.array_equal(session.download(first), vector(50) + 7 + 1 + 1 + 1)


def test_results_of_inner_calls_survive_each_other(session: Session) -> None:
    once, twice = session.call("twice", vector(9))
    assert np.array_equal(once, vector(9) + 1 + 1 + 1) and np.array_equal(twice, once + 1 + 1 + 1)


def test_errors_name_function_parameter_and_figures(session: Session) -> None:
    with pytest.raises(BoundExceeded, match="plus_three: n = 1001 is outside its declared range 1 <= n <= 1000"):
        session.call("plus_three", vector(1001))
    with pytest.raises(ArgumentMismatch, match=r"plus_three: expected 1 arguments \(x\), got 2"):
        session.call("plus_three", vector(1), vector(1))
    with pytest.raises(UnknownName, match="unknown function 'minus'; known: constant, increment"):
        session.call("minus")
    assert session.call("plus_three", vector(1)) == [2]


def test_what_is_written_must_be_writable(session: Session) -> None:
    x = vector(3)
    x.flags.writeable = False
    with pytest.raises(ArgumentMismatch, match="increment: parameter 'x' is changed in place, but the array is read-only"):
        session.call("increment", x)


def test_callers_take_turns(session: Session) -> None:
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(100):
            if not np.array_equal(session.call("plus_three", vector(n)), vector(n) + 1 + 1 + 1):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in (3, 500, 64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_stored_executable_runs(executable: Executable, tmp_path: Path) -> None:
    executable.save(tmp_path / "program")
    loaded = Session(Executable.load(tmp_path / "program"), device_threads=1)
    assert loaded.call("constant", vector(1)).tolist() == [2, 3, 4]
    assert np.array_equal(loaded.call("plus_three", vector(9)), vector(9) + 1 + 1 + 1)


@given(st.data())
def test_a_program_that_was_tampered_with_is_refused_or_loads(executable: Executable, data: st.DataObject) -> None:
    """A program that was changed at random is refused or loads, but never crashes, because every number is checked before native code uses
    it."""
    content = bytearray(msgspec.msgpack.encode(executable.meta))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        meta = msgspec.msgpack.decode(content, type=ExecutableMeta)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    with contextlib.suppress(RuntimeFault):
        Session(Executable(meta, executable.object_code, executable.constants), device_threads=1)


# --- calls in parts ----------------------------------------------------------------------------------------------------


def test_other_calls_run_between_the_parts_of_a_call(session: Session) -> None:
    """Also calls of the same function, and of functions that use the same places of the arena."""
    x, num_parts, begun = vector(50), 1, OneAtATime[np.ndarray]()
    while (found := begun.advance("x", lambda: session.in_parts("plus_three", x))) is None:
        num_parts += 1
        assert np.array_equal(session.call("plus_three", x + num_parts), x + num_parts + 1 + 1 + 1)
        assert np.array_equal(session.call("scaled", vector(900), 2.0), vector(900) * 2)
    assert num_parts == 3, "one for each launch"
    assert np.array_equal(found, x + 1 + 1 + 1)
    session.call("plus_three", x + 7)
    assert np.array_equal(found, x + 1 + 1 + 1), "the result is the caller's to keep"


def test_what_a_step_left_in_the_arena_survives_the_parts_of_a_call(session: Session) -> None:
    last = session.call("plus_three", vector(50), views=True)
    whole(session.in_parts("plus_three", vector(1000)))
    assert np.array_equal(session.download(last), vector(50) + 1 + 1 + 1)


def test_a_call_in_parts_may_be_given_up(session: Session) -> None:
    parts = session.in_parts("plus_three", vector(50))
    next(parts)
    parts.close()
    assert np.array_equal(whole(session.in_parts("plus_three", vector(9))), vector(9) + 1 + 1 + 1)


def test_a_call_in_parts_checks_its_arguments(session: Session) -> None:
    with pytest.raises(BoundExceeded, match="n = 1001 is outside"):
        whole(session.in_parts("plus_three", vector(1001)))
    with pytest.raises(ArgumentMismatch, match=r"plus_three: expected 1 arguments \(x\), got 0"):
        whole(session.in_parts("plus_three"))
    with pytest.raises(ArgumentMismatch, match="bind its weights"):
        whole(session.in_parts("weighted", vector(2)))
    with pytest.raises(UnknownName, match="unknown function 'minus'"):
        whole(session.in_parts("minus"))
    assert whole(session.in_parts("plus_three", vector(1))) == [2]


def test_functions_that_call_others_and_read_constants_run_in_parts(session: Session) -> None:
    once, twice = whole(session.in_parts("twice", vector(9)))
    assert np.array_equal(once, vector(9) + 1 + 1 + 1) and np.array_equal(twice, once + 1 + 1 + 1)
    assert whole(session.in_parts("constant", vector(1))).tolist() == [2, 3, 4]


def test_calls_in_parts_have_memory_beside_the_arena(executable: Executable) -> None:
    account = MemoryAccount()
    session = Session(executable, device_threads=1, memory=account)
    session.call("plus_three", vector(100))
    whole(session.in_parts("plus_three", vector(50)))
    assert 0 < account.parts["calls in parts"] < account.parts["arena"]
    account.limit = account.used
    with pytest.raises(OutOfMemory, match="calls in parts"):
        whole(session.in_parts("plus_three", vector(100)))
    assert np.array_equal(whole(session.in_parts("plus_three", vector(3))), vector(3) + 1 + 1 + 1)


# --- weights -----------------------------------------------------------------------------------------------------------


def test_weights_are_bound_once_and_can_be_replaced(session: Session) -> None:
    with pytest.raises(ArgumentMismatch, match="weighted: bind its weights before calling it: w, v"):
        session.call("weighted", vector(3))
    for start in (0, 10):
        w = np.arange(start, start + 4, dtype=np.float32)
        session.bind("weighted", {"w": w, "v": vector(3)})
        assert np.array_equal(session.call("weighted", vector(3)), w + 1)


def test_weights_are_checked_when_bound_and_where_they_depend_on_arguments_when_called(session: Session) -> None:
    good = {"w": vector(4), "v": vector(3)}
    with pytest.raises(ArgumentMismatch, match="weighted: weight 'w': dimension 0: expected 4, got 5"):
        session.bind("weighted", {**good, "w": vector(5)})
    with pytest.raises(ArgumentMismatch, match="weighted: no value for weight v"):
        session.bind("weighted", {"w": vector(4)})
    with pytest.raises(UnknownName, match="unknown weight of function 'weighted': 'u'; known: v, w"):
        session.bind("weighted", {**good, "u": vector(3)})
    session.bind("weighted", good)
    with pytest.raises(ArgumentMismatch, match="weighted: parameter 'v': dimension 0: expected n = 2, got 3"):
        session.call("weighted", vector(2))


# --- memory, threads, time ---------------------------------------------------------------------------------------------


def test_the_arena_is_known_before_it_exists(executable: Executable) -> None:
    account = MemoryAccount(128)
    session = Session(executable, device_threads=1, memory=account)
    assert session.arena_bytes("plus_three", {"n": 16}) == 128
    session.call("plus_three", vector(16))
    assert account.parts == {"arena": 128}
    with pytest.raises(OutOfMemory, match="arena needs 256 bytes, 128 are free of the limit of 128"):
        session.call("plus_three", vector(17))
    with pytest.raises(BoundExceeded):
        session.arena_bytes("plus_three", {"n": 1001})
    with pytest.raises(UnknownName, match="unknown variable of function 'plus_three': 'm'; known: n"):
        session.arena_bytes("plus_three", {"m": 1})
    with pytest.raises(ArgumentMismatch, match="plus_three: no value for variable n"):
        session.arena_bytes("plus_three", {})


def test_functions_share_the_arena(executable: Executable) -> None:
    account = MemoryAccount()
    session = Session(executable, device_threads=1, memory=account)
    session.reserve(1000)
    session.call("plus_three", vector(100))
    session.call("scaled", vector(100), 1.0)
    assert account.parts == {"arena": 1000}


def test_bits_do_not_depend_on_the_number_of_threads(executable: Executable) -> None:
    x = np.random.default_rng(0).standard_normal(999).astype(np.float32)
    results = []
    for threads in (1, 2, 3):
        session = Session(executable, device_threads=threads)
        results.append([session.call("plus_three", x).tobytes(), session.call("scaled", x, 0.1).tobytes()])
        session.close()
    assert results[0] == results[1] == results[2]


def test_the_number_of_threads_can_be_set_from_outside(executable: Executable) -> None:
    with flags.scope(threads=3):
        session = Session(executable)
    assert session.num_threads == 3
    session.close()


def test_a_profile_counts_kernels_and_ends(session: Session) -> None:
    with session.profile() as profile:
        result = session.call("plus_three", vector(30))
        session.call("increment", vector(3))
    session.call("plus_three", vector(30))
    assert np.array_equal(result, vector(30) + 1 + 1 + 1)
    assert profile.count == {"add_one": 3, "add_two": 2} and profile.total_s == pytest.approx(sum(profile.seconds.values()))
    assert "add_one" in str(profile) and "3 x" in str(profile)


def test_a_profile_counts_the_kernels_of_a_call_in_parts(session: Session) -> None:
    with session.profile() as profile:
        assert np.array_equal(whole(session.in_parts("plus_three", vector(30))), vector(30) + 1 + 1 + 1)
    assert sum(profile.count.values()) == 3 and profile.total_s > 0.0
    whole(session.in_parts("plus_three", vector(30)))
    assert sum(profile.count.values()) == 3


def test_an_outgrown_arena_is_given_back(executable: Executable) -> None:
    session = Session(executable, device_threads=1)
    session.call("plus_three", vector(10))
    old = weakref.ref(session._machine.arena._block.data.base)
    session.call("scaled", vector(10), 1.0)
    session.reserve(5000)
    assert old() is None


@pytest.mark.usefixtures("without_collector")  # finalizers of garbage would count as entered functions
def test_a_call_does_little_in_python() -> None:
    """A call enters only a few Python functions: those of the session, the virtual machine, one matcher per argument, and the arena."""
    function = VMFunction("same", (X,), 1, ("n",), (Bound("n", 0, 0),), (Ret(Reg(0)),))
    session = Session(Executable(ExecutableMeta(HOST, {"same": function}, (), ()), b"", []), device_threads=1)
    x = np.zeros(3, np.float32)
    assert session.call("same", x) is x
    entered: list[str] = []

    def note(frame: Any, event: str, arg: object) -> None:
        if event == "call":
            entered.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        session.call("same", x)
    finally:
        sys.setprofile(before)
    assert len(entered) <= 16, entered


def test_nothing_is_kept_alive_between_calls(session: Session) -> None:
    x = np.zeros(3, np.float32)
    gone = weakref.ref(x)
    session.call("plus_three", x)
    del x
    assert gone() is None
