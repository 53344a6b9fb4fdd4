"""Operators compute on operands that have extents of 0, and machine code agrees with NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from compiler.driver import Options, compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.dims import DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.op import OPS
from compiler.ir.text.parser import parse
from compiler.ir.types import ScalarType, tensor
from compiler.machine.formats import PANELS
from compiler.ops.attention.dense import ATTENTION
from compiler.ops.attention.ragged import RAGGED_ATTENTION
from compiler.ops.products.widened import WIDENED_LINEAR
from compiler.ops.scan import STATE_SCAN
from compiler.ops.states import CONV_TAPS, INPUT_TAILS
from compiler.passes.base import Verify
from runtime.session import Session

F32 = np.float32
ONE_TEXT = np.array([0, 3], np.int32)
LAYER = 0


def zeros(*shape: int, dtype: Any = F32) -> Any:
    return np.zeros(shape, dtype)


CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "keys without elements": ("key_append", (zeros(1, 1, 2, 1, 0), zeros(2, 1, 0), np.array([3, 5]), LAYER), {}),
    "keys and values without elements": (
        "kv_append",
        (zeros(1, 2, 2, 1, 0, dtype=np.int8), zeros(2, 1, 0), zeros(2, 1, 0), np.array([3, 5]), LAYER, zeros(1, 2, 2, 1, 16)),
        {},
    ),
    "mean of rows without elements": ("ragged_mean", (zeros(3, 0), ONE_TEXT), {}),
    "maximum of rows without elements": ("ragged_max", (zeros(3, 0), ONE_TEXT), {}),
    "no groups of rows": ("quantize_rows", (zeros(2, 0),), {"group": 8}),
    "no groups of scales": ("panel_multipliers", (zeros(3, 0),), {"columns": 4}),
    "no rows of 4-bit integers": ("dequantize", (zeros(0, 2, dtype=np.uint8), zeros(0, 1)), {"bits": 4, "group": 4}),
    **{
        f"no rows of {name}": (
            "look_up",
            (zeros(0, dtype=np.int32), zeros(2, lines, 16, dtype=np.uint8), zeros(2, 1, 4)),
            {"size": 5, "length": 48, "bits": bits, "format": name},
        )
        for name, bits, lines in (("panel8", 8, 12), ("panel4", 4, 6), ("panel6", 8, 9))
    },
    "a scan of states without columns": (
        "state_scan",
        (
            zeros(1, 2, 0),
            *(zeros(3, 1, 2) for _ in "qk"),
            zeros(3, 1, 0),
            np.ones((3, 1), F32),
            np.array([1], np.int32),
            ONE_TEXT,
            np.array([2], np.int32),
            np.array([1], np.int32),
            LAYER,
        ),
        {},
    ),
    "a product of empty rows": (
        "integer_linear",
        (
            zeros(2, 1, 0, dtype=np.int8),
            zeros(2, 1),
            zeros(2, 1, 1, dtype=np.int32),
            zeros(2, 0, 16, dtype=np.uint8),
            zeros(2, 1, 4),
        ),
        {"size": 5},
    ),
    "a product of no rows by experts": ("expert_linear", (zeros(0, 4), zeros(2, 5, 4), zeros(0, dtype=np.int32)), {}),
    "a product of no rows": (
        "widened_linear",
        (
            zeros(0, 2, 8, dtype=np.int8),
            zeros(0, 1),
            zeros(0, 1, dtype=np.bool_),
            zeros(2, 1, 16, dtype=np.uint8),
            zeros(2, 1, 4, dtype=np.int8),
            zeros(2, 1, 4),
        ),
        {"size": 5},
    ),
}
for name, format in PANELS.items():
    if format.bits in (4, 8):
        dtype = np.uint8 if format.bits == 4 else np.int8
        for shape in ((3, 0), (2, 3, 0), (0, 3, 32)):
            CALLS[f"{name} of {shape}"] = "panel_integers", (zeros(*shape, dtype=dtype),), {"format": name, "columns": 4}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_is_computed_as_well_as_something(run: Any, call: tuple[str, tuple[Any, ...], dict[str, Any]]) -> None:
    op, values, attrs = call
    run(OPS[op], *values, compiled=True, **attrs)


def test_taps_without_a_middle_are_refused(run: Any, deduced: Any) -> None:
    """Such a weight is refused, because the nest reads element 0 of dimension 1."""
    with pytest.raises(AnnotationError, match="dimension 1 of weight is 0, expected 1"):
        deduced(CONV_TAPS, tensor((3, 0, 2), DType.F32))


def test_a_scan_of_states_without_rows_is_refused(deduced: Any) -> None:
    """Such a scan is refused, because it prefetches the first element of a key."""
    q, v, gate, ids = tensor((3, 1, 0), DType.F32), tensor((3, 1, 4), DType.F32), tensor((3, 1), DType.F32), tensor((1,), DType.I32)
    starts = tensor((2,), DType.I32)
    with pytest.raises(AnnotationError, match="the size of a key is 0, expected at least 1"):
        deduced(STATE_SCAN, tensor((1, 2, 0), DType.F32), q, q, v, gate, ids, starts, ids, ids, ScalarType(DType.I64))


def test_widened_products_of_empty_rows_are_refused(deduced: Any) -> None:
    """They are refused, because the length of a group of multipliers is a divisor."""
    given = ((3, 2, 0), "i8"), ((3, 1), "f32"), ((3, 1), "bool"), ((2, 0, 16), "u8"), ((2, 1, 4), "i8"), ((2, 1, 4), "f32")
    with pytest.raises(AnnotationError, match="dimension 1 of panels is 0, expected a number of at least 1"):
        deduced(WIDENED_LINEAR, *(tensor(shape, DType(dtype)) for shape, dtype in given), size=5)


def test_texts_without_heads_are_refused(deduced: Any) -> None:
    """They are refused, because the number of heads is a divisor."""
    q, v, ids = tensor((3, DimVar("h"), 4), DType.F32), tensor((3, 0, 4), DType.F32), tensor((3,), DType.I32)
    with pytest.raises(AnnotationError, match="the number of heads of v is 0, expected at least 1"):
        deduced(RAGGED_ATTENTION, q, q, v, ids, ids, scale=1.0)


def test_attention_without_heads_is_refused(deduced: Any) -> None:
    q, k = tensor((1, 0, 3, 4), DType.F32), tensor((1, DimVar("h"), 3, 4), DType.F32)
    with pytest.raises(AnnotationError, match="the number of heads of q is 0, expected at least 1"):
        deduced(ATTENTION, q, k, k, scale=1.0)


def test_a_scan_without_heads_is_refused(deduced: Any) -> None:
    q, v, gate, ids = tensor((3, 2, 4), DType.F32), tensor((3, 0, 4), DType.F32), tensor((3, 0), DType.F32), tensor((1,), DType.I32)
    starts = tensor((2,), DType.I32)
    with pytest.raises(AnnotationError, match="the number of heads of v is 0, expected at least 1"):
        deduced(STATE_SCAN, tensor((1, 2, 0), DType.F32), q, q, v, gate, ids, starts, ids, ids, ScalarType(DType.I64))


def test_starts_without_the_number_of_tokens_are_refused(deduced: Any) -> None:
    q, none = tensor((0, 1, 4), DType.F32), tensor((0,), DType.I32)
    with pytest.raises(AnnotationError, match="the length of starts is 0, expected at least 1"):
        deduced(RAGGED_ATTENTION, q, q, q, none, none, scale=1.0)


def test_tails_of_two_element_types(run: Any) -> None:
    x, before = np.ones((2, 1), ml_dtypes.bfloat16), np.full((1, 2, 1), 3, np.float16)
    lists = np.zeros(2, np.int32), np.array([0, 2], np.int32), np.array([0, 1], np.int32)
    found = run(INPUT_TAILS, x, before, *lists, compiled=True)
    assert found.astype(F32).tolist() == [[[3], [1]], [[1], [1]]]
    assert run(INPUT_TAILS, x, before[:, :0], *lists, compiled=True).shape == (2, 0, 1)


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        ("exp(x)", (3, 0)),
        ("permute_dims(x)", (0, 3)),
        ("sum(x, axes=[1])", (3,)),
        ("sum(x, axes=[0])", (0,)),
        ("softmax(x)", (3, 0)),
        ("cumsum(x, axis=0)", (3, 0)),
        ("linear(x, w)", (3, 5)),
        ("linear(w, x)", (5, 3)),
        ("flip(x, axes=[1])", (3, 0)),
    ],
)
def test_a_dimension_may_be_declared_to_be_zero(call: str, shape: tuple[int, ...]) -> None:
    module = parse(f"func main(x: f32[3, n], w: f32[5, n]) -> object where n in 0..0 {{ y = {call} return y }}")
    given = zeros(3, 0), zeros(5, 0)
    session = Session(compile_module(module, Options(instruments=(Verify(),))), device_threads=1)
    found = session.call("main", *given)
    session.close()
    assert found.shape == shape
    np.testing.assert_array_equal(found, Interpreter(module).call("main", *given))
