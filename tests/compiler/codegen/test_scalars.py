"""Every scalar function and cast, compiled with 1 lane and with 16 lanes, gives NumPy's result for every element type. Functions that are
inexact in f32 may differ by up to two units in the last place."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.interpret.scalars import MEANING
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import CompileError
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import COMPARISONS, Fn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Apply, Cast, Const, Load, Scalar, dtype_of
from compiler.ir.loops.statements import For, LoopKind, Store
from compiler.ops.elementwise import numpy_cast

Array = NDArray[Any]
FLOATS = [DType.F32, DType.F16, DType.BF16, DType.E4M3]
INTS = [DType.I8, DType.I16, DType.I32, DType.I64, DType.U8, DType.U32]
INEXACT = {Fn.EXP, Fn.EXP2, Fn.LOG, Fn.TANH, Fn.ERF, Fn.SIN, Fn.COS, Fn.POW}
FLOAT_FNS = INEXACT | {Fn.ADD, Fn.SUB, Fn.MUL, Fn.DIV, Fn.MIN, Fn.MAX, Fn.NEG, Fn.ABS, Fn.SQRT, Fn.RSQRT, Fn.FLOOR, Fn.ROUND}
INT_FNS = {
    *(Fn.ADD, Fn.SUB, Fn.MUL, Fn.FLOORDIV, Fn.MOD, Fn.MIN, Fn.MAX, Fn.NEG, Fn.ABS),
    *(Fn.AND, Fn.OR, Fn.XOR, Fn.NOT, Fn.SHL, Fn.SHR),
}
UNARY = {
    Fn.NEG,
    Fn.ABS,
    Fn.EXP,
    Fn.EXP2,
    Fn.LOG,
    Fn.SQRT,
    Fn.RSQRT,
    Fn.TANH,
    Fn.ERF,
    Fn.SIN,
    Fn.COS,
    Fn.FLOOR,
    Fn.ROUND,
    Fn.NOT,
    Fn.BITS,
    Fn.OF_BITS,
}
NUM = 512
CASES = [
    *itertools.product(sorted(FLOAT_FNS | COMPARISONS), FLOATS),
    *itertools.product(sorted(INT_FNS | COMPARISONS), INTS),
    *itertools.product([Fn.AND, Fn.OR, Fn.XOR, Fn.NOT, Fn.MIN, Fn.MAX, *sorted(COMPARISONS)], [DType.BOOL]),
    (Fn.BITS, DType.F32),
    (Fn.OF_BITS, DType.I32),
]


def elementwise(scalar_of: Any, inputs: list[DType], result: DType, lanes: int) -> PrimFunc:
    buffers = [Buffer(f"x{i}", (Dim.of(NUM),), dtype) for i, dtype in enumerate(inputs)]
    out = Buffer("out", (Dim.of(NUM),), result)
    i, v = DimVar("i", upper=NUM // lanes - 1), DimVar("v", upper=lanes - 1)
    at = (i * lanes + v,)
    body = Store(out, at, scalar_of(*(Load(b, at) for b in buffers)))
    return PrimFunc((*buffers, out), 1, For(i, Dim.of(NUM // lanes), For(v, Dim.of(lanes), body, LoopKind.VECTOR)))


def samples(dtype: DType, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    if dtype is DType.BOOL:
        return rng.integers(0, 2, NUM).astype(np.bool_)
    if dtype.is_int:
        info = np.iinfo(dtype.numpy)
        special = np.array([info.min, info.max, 0, 1, info.max - 1, info.min + 1, 2, 3], dtype.numpy)
        special = np.concatenate([special, (special - special.dtype.type(4)).astype(dtype.numpy)])
        small = rng.integers(max(-9, info.min), 10, 128).astype(dtype.numpy)
        wide = rng.integers(info.min, info.max, NUM, dtype=dtype.numpy, endpoint=True)
        return rng.permutation(np.concatenate([np.repeat(special, 8), small, wide])[:NUM])
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 1e-7, 6e4, -3.0, 1e-40])
    values = np.concatenate([np.repeat(special, 8), rng.normal(0, 3, NUM)])[:NUM]
    with np.errstate(over="ignore"):
        return rng.permutation(values).astype(dtype.numpy)


@pytest.mark.parametrize(("fn", "dtype"), CASES, ids=lambda x: str(x))
def test_function_has_its_numpy_meaning(run_native: Any, fn: Fn, dtype: DType) -> None:
    inputs = [samples(dtype, seed) for seed in range(1 if fn in UNARY else 2)]
    if fn in (Fn.SHL, Fn.SHR):
        inputs[1] = (inputs[1] % (dtype.num_bytes * 8 + 3)).astype(dtype.numpy)
    with np.errstate(all="ignore"):
        wanted = MEANING[fn](*inputs)
    result = dtype_of(Apply(fn, (Const(0, dtype),) * len(inputs)))
    found = np.zeros(NUM, result.numpy)
    run_native(elementwise(lambda *xs: Apply(fn, xs), [dtype] * len(inputs), result, 16), [*inputs, found])
    one_lane = np.zeros(NUM, result.numpy)
    run_native(elementwise(lambda *xs: Apply(fn, xs), [dtype] * len(inputs), result, 1), [*inputs, one_lane])
    assert found.tobytes() == one_lane.tobytes(), "the bits depend on the number of lanes"
    # NumPy rounds rsqrt twice: it rounds the square root to the small type before it divides.
    assert_close(found, wanted, ulps=2 if fn in INEXACT else 1 if fn is Fn.RSQRT and dtype is not DType.F32 else 0)


@pytest.mark.parametrize(("source", "dtype"), list(itertools.product(DType, DType)), ids=lambda x: str(x))
def test_cast_has_its_numpy_meaning(run_native: Any, source: DType, dtype: DType) -> None:
    values = samples(source, 7)
    with np.errstate(all="ignore"):
        wanted = numpy_cast(values, dtype)
    found, one_lane = np.zeros(NUM, dtype.numpy), np.zeros(NUM, dtype.numpy)
    run_native(elementwise(lambda x: Cast(x, dtype), [source], dtype, 16), [values, found])
    run_native(elementwise(lambda x: Cast(x, dtype), [source], dtype, 1), [values, one_lane])
    assert found.tobytes() == one_lane.tobytes()
    assert_close(found, wanted, ulps=0)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS, DType.BOOL], ids=lambda x: str(x))
def test_select(run_native: Any, dtype: DType) -> None:
    cond, a, b = samples(DType.BOOL, 0), samples(dtype, 1), samples(dtype, 2)
    found = np.zeros(NUM, dtype.numpy)
    prim = elementwise(lambda *xs: Apply(Fn.SELECT, xs), [DType.BOOL, dtype, dtype], dtype, 16)
    run_native(prim, [cond, a, b, found])
    assert found.tobytes() == np.where(cond, a, b).tobytes()


def test_fma_rounds_once(run_native: Any) -> None:
    a = np.full(NUM, 1 + 2.0**-12, np.float32)
    c = np.full(NUM, -(1 + 2.0**-11), np.float32)
    fused, separate = np.zeros(NUM, np.float32), np.zeros(NUM, np.float32)
    run_native(elementwise(lambda *xs: Apply(Fn.FMA, xs), [DType.F32] * 3, DType.F32, 16), [a, a, c, fused])

    def two_roundings(x: Scalar, y: Scalar, z: Scalar) -> Scalar:
        return Apply(Fn.ADD, (Apply(Fn.MUL, (x, y)), z))

    run_native(elementwise(two_roundings, [DType.F32] * 3, DType.F32, 16), [a, a, c, separate])
    assert (fused == np.float32(2.0**-24)).all()
    assert (separate == 0).all()


@pytest.mark.parametrize(("fn", "dtype"), [(Fn.DIV, DType.I32), (Fn.MOD, DType.F32), (Fn.EXP, DType.I8), (Fn.ADD, DType.BOOL)])
def test_function_without_meaning_for_a_type_is_refused(run_native: Any, fn: Fn, dtype: DType) -> None:
    count = 1 if fn in UNARY else 2
    prim = elementwise(lambda *xs: Apply(fn, xs), [dtype] * count, dtype, 1)
    with pytest.raises(CompileError, match=f"in kernel 'kernel': no machine code for {fn} of {dtype}"):
        run_native(prim, [samples(dtype, 0)] * (count + 1))


def assert_close(found: Array, wanted: Array, *, ulps: int) -> None:
    assert found.dtype == wanted.dtype
    if found.dtype.kind in "iub":
        np.testing.assert_array_equal(found, wanted)
        return
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(invalid="ignore"):
        step = np.abs(np.nextafter(wanted, wanted.dtype.type(DType.from_numpy(wanted.dtype).ends[1])).astype(np.float64) - b)
        bad = ~((a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= ulps * step))
    assert not bad.any(), (found[bad], wanted[bad])
