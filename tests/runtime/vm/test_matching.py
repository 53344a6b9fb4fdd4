from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.device.cpu.device import CpuDevice
from runtime.errors import ArgumentMismatch, BoundExceeded, InvalidProgram
from runtime.executable import DTYPES, AnySpec, Bound, ScalarSpec, ShapeSpec, Slot, Spec, TensorSpec, TupleSpec
from runtime.vm.matching import Item, Match, scalar_word, word_scalar

DEVICE = CpuDevice(1)
SLOTS = ("n", "m", "2*n")
N, M, SAME_N, TWICE = Slot(0, defines=True), Slot(1, defines=True), Slot(0), Slot(2)


def run(specs: dict[str, Spec], values: list[object], *bounds: Bound) -> list[int]:
    """Match the arguments of a call against their declarations. Return the shape heap. The shape function stores 2 * n in the heap's
    derived slot."""
    heap = np.zeros(len(SLOTS), np.int64)

    def derive(address: int) -> int:
        heap[2] = 2 * heap[0]
        return 0

    items = [Item(i, f"parameter {name!r}", spec) for i, (name, spec) in enumerate(specs.items())]
    Match("main", SLOTS, bounds, items, derive, DEVICE)(values, heap.data, heap.ctypes.data)
    return heap.tolist()


def f32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def test_slots_are_filled_from_every_kind_of_value() -> None:
    assert run({"x": TensorSpec((N, 4), "f32")}, [f32(3, 4)]) == [3, 0, 6]
    assert run({"s": ShapeSpec((N, M))}, [(5, 6)]) == [5, 6, 10]
    assert run({"k": ScalarSpec("i64", N)}, [7]) == [7, 0, 14]
    assert run({"t": TupleSpec((TensorSpec((N,), None), ScalarSpec(None, M)))}, [(f32(2), np.int32(9))]) == [2, 9, 4]


def test_a_later_definition_serves_an_earlier_mention() -> None:
    specs: dict[str, Spec] = {"x": TensorSpec((TWICE,), "f32"), "s": ShapeSpec((N,))}
    assert run(specs, [f32(8), (4,)]) == [4, 0, 8]
    with pytest.raises(ArgumentMismatch, match=r"main: parameter 'x': dimension 0: expected 2\*n = 8, got 9"):
        run(specs, [f32(9), (4,)])


X = TensorSpec((N, 4), "f32")
SHAPE = "expected a shape (a tuple of 64-bit integers)"


@pytest.mark.parametrize(
    ("spec", "value", "problem"),
    [
        (X, 3, "expected an array f32[n, 4], got a int"),
        (X, f32(3, 5), "dimension 1: expected 4, got 5"),
        (X, f32(3, 4, 1), "expected rank 2, got rank 3 (shape (3, 4, 1))"),
        (X, f32(4, 3).astype(np.float64), "expected element type float32 (f32[n, 4]), got float64"),
        (X, f32(4, 3).T, "expected a compact row-major array; pass numpy.ascontiguousarray of it"),
        (X, np.frombuffer(bytes(49), np.uint8)[1:].view(np.float32).reshape(3, 4), "expected a compact row-major array"),
        (TensorSpec(None, None, 1), f32(1, 1), "expected rank 1, got rank 2"),
        (ShapeSpec((N, 4)), (3, 5), "dimension 1: expected 4, got 5"),
        (ShapeSpec((N,)), [3], f"{SHAPE}, got a list"),
        (ShapeSpec((N,)), (2**63,), f"{SHAPE}, but entry 0 is a int {2**63}"),
        (ShapeSpec(None), (1, "2"), f"{SHAPE}, but entry 1 is a str"),
        pytest.param(ShapeSpec((N,)), (10**5000,), f"{SHAPE}, but entry 0 is a int of 16610 bits", id="entry of many digits"),
        pytest.param(ScalarSpec("i64"), -(10**5000), "expected a scalar of type i64, got a int of 16610 bits", id="many digits"),
        (ScalarSpec("i64"), np.float32(2.5), "expected a scalar of type i64, got a float32 "),
        (ShapeSpec(None, 2), (3,), "expected rank 2, got rank 1"),
        (ScalarSpec("i64", N), 2.5, "expected a scalar of type i64, got a float 2.5"),
        (ScalarSpec("i8"), 128, "expected a scalar of type i8, got a int 128"),
        (ScalarSpec("bool"), 1, "expected a scalar of type bool, got a int 1"),
        (ScalarSpec("f32"), True, "expected a scalar of type f32, got a bool True"),
        pytest.param(ScalarSpec("f32"), 10**400, "expected a scalar of type f32, got a int 1000", id="beyond floats"),
        (ScalarSpec("i64", 5), 6, "expected 5, got 6"),
        (TupleSpec((X, AnySpec())), (f32(3, 4),), "expected a tuple of 2 values, got a tuple"),
    ],
)
def test_messages(spec: Spec, value: object, problem: str) -> None:
    with pytest.raises(ArgumentMismatch) as error:
        run({"x": spec}, [value])
    assert str(error.value).startswith(f"main: parameter 'x': {problem}")


def test_fields_of_tuples_are_named_by_their_path() -> None:
    spec = TupleSpec((AnySpec(), TupleSpec((TensorSpec((3,), "f32"), ScalarSpec("i64", TWICE)))))
    with pytest.raises(ArgumentMismatch, match=r"main: parameter 't'\[1\]\[0\]: dimension 0: expected 3, got 4"):
        run({"t": spec}, [(None, (f32(4), 0))])
    with pytest.raises(ArgumentMismatch, match=r"main: parameter 't'\[1\]\[1\]: expected 2\*n = 0, got 1"):
        run({"t": spec}, [(None, (f32(3), 1))])


def test_bounds() -> None:
    specs: dict[str, Spec] = {"s": ShapeSpec((N, M))}
    plain, multiple, symbolic = Bound("n", 0, 1, 8), Bound("n", 0, 0, None, 4), Bound("m", 1, 0, TWICE)
    assert run(specs, [(8, 16)], plain, multiple, symbolic) == [8, 16, 16]
    with pytest.raises(BoundExceeded, match="main: n = 9 is outside its declared range 1 <= n <= 8"):
        run(specs, [(9, 0)], plain)
    with pytest.raises(BoundExceeded, match="main: n = 0 is outside its declared range 1 <= n"):
        run(specs, [(0, 0)], plain)
    with pytest.raises(BoundExceeded, match="main: n = 6 is not a multiple of 4, as declared"):
        run(specs, [(6, 0)], multiple)
    with pytest.raises(BoundExceeded, match=r"main: n = -4 is outside its declared range 0 <= n$"):
        run(specs, [(-4, 0)], multiple)
    with pytest.raises(BoundExceeded, match="main: m = 17 is outside its declared range 0 <= m <= 16"):
        run(specs, [(8, 17)], symbolic)


def test_a_bound_holds_before_anything_is_derived_from_the_variable() -> None:
    def derive(address: int) -> int:
        pytest.fail("derived from a variable outside its range")

    match = Match("f", ("n",), (Bound("n", 0, 1),), [Item(0, "x", ShapeSpec((N,)))], derive, DEVICE)
    heap = np.zeros(1, np.int64)
    with pytest.raises(BoundExceeded):
        match([(0,)], heap.data, heap.ctypes.data)


@pytest.mark.parametrize(("status", "problem"), [(3, "does not fit 64 bits"), (-3, "divides by zero")])
def test_a_slot_without_a_value_is_refused_by_name(status: int, problem: str) -> None:
    """If the shape function cannot compute a slot, its status says which slot, and the error names this slot."""
    heap = np.zeros(len(SLOTS), np.int64)
    match = Match("f", SLOTS, (), [Item(0, "x", ShapeSpec((N, M)))], lambda _: status, DEVICE)
    with pytest.raises(BoundExceeded, match=rf"f: 2\*n {problem} where n = 7, m = 8; declare the ranges"):
        match([(7, 8)], heap.data, heap.ctypes.data)


def test_unknown_slots_and_types_are_refused_when_loaded() -> None:
    with pytest.raises(InvalidProgram, match="slot 3 does not exist, the function has 3"):
        run({"x": TensorSpec((Slot(3),), "f32")}, [f32(1)])
    with pytest.raises(InvalidProgram, match="unknown element type 'f64'; known: f32"):
        run({"x": TensorSpec(None, "f64")}, [f32(1)])


@given(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans())
def test_scalars_survive_as_words(integer: int, number: float, truth: bool) -> None:
    for dtype, value in (("i64", integer), ("f32", number), ("bf16", number), ("bool", truth)):
        word = scalar_word(value, DTYPES[dtype])
        assert word is not None and word_scalar(word, DTYPES[dtype]) == value
