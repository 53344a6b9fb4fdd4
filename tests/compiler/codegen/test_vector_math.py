"""The errors of vector functions stay within their documented bounds on dense samples of all finite f32 numbers. One lane gives the same
bits as 16."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import Fn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Apply, DimScalar, Load
from compiler.ir.loops.statements import For, LoopKind, Seq, Stmt, Store, When

Array = NDArray[Any]
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1e-45, -1e-45, 88.72284, 88.7229, -87.34, -103.9, -104.1]
WORST = {Fn.EXP: 0.9, Fn.EXP2: 1.3, Fn.LOG: 0.8, Fn.SIN: 1.6, Fn.COS: 1.6, Fn.TANH: 1.3, Fn.ERF: 1.2}
REFERENCE = {
    Fn.EXP: np.exp,
    Fn.EXP2: np.exp2,
    Fn.LOG: np.log,
    Fn.SIN: np.sin,
    Fn.COS: np.cos,
    Fn.TANH: np.tanh,
    Fn.ERF: np.vectorize(math.erf, otypes=[np.float64]),
}


def both_ways(fn: Fn, num_args: int) -> PrimFunc:
    """Return a kernel that applies the function in vectors of 16 lanes, and once more to one element at a time."""
    n = DimVar("n", lower=1)
    inputs = [Buffer(f"x{i}", (n.dim,), DType.F32) for i in range(num_args)]
    outputs = [Buffer(name, (n.dim,), DType.F32) for name in ("wide", "narrow")]

    def phase(out: Buffer, lanes: int) -> Stmt:
        i, v = DimVar("i"), DimVar("v", upper=lanes - 1)
        at = i * lanes + v
        store = Store(out, (at,), Apply(fn, tuple(Load(b, (at,)) for b in inputs)))
        guarded = When(Apply(Fn.LT, (DimScalar(at), DimScalar(n.dim))), store)
        return For(i, (n + lanes - 1) // lanes, For(v, Dim.of(lanes), guarded, LoopKind.VECTOR))

    return PrimFunc((*inputs, *outputs), 2, Seq((phase(outputs[0], 16), phase(outputs[1], 1))))


def evaluate(run_native: Any, fn: Fn, *inputs: Array) -> Array:
    wide, narrow = np.zeros_like(inputs[0]), np.zeros_like(inputs[0])
    run_native(both_ways(fn, len(inputs)), [*inputs, wide, narrow])
    assert wide.tobytes() == narrow.tobytes()
    return wide


def errors_in_ulps(found: Array, exact: Array) -> Array:
    with np.errstate(all="ignore"):
        rounded = exact.astype(np.float32)
        ulp = np.spacing(np.abs(np.where(np.isfinite(rounded), rounded, np.float32(3e38)))).astype(np.float64)
        error = np.abs(found.astype(np.float64) - exact) / ulp
    agree = (np.isnan(found) & np.isnan(exact)) | (found == rounded)
    return np.where(agree & ~np.isfinite(rounded), 0, np.nan_to_num(error, nan=np.inf))


@pytest.mark.parametrize("fn", sorted(WORST), ids=str)
def test_error_is_as_stated(run_native: Any, fn: Fn) -> None:
    everywhere = np.arange(0, 2**32, 49_999, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([np.array(SPECIAL, np.float32), everywhere, np.linspace(-20, 20, 100_003).astype(np.float32)])
    found = evaluate(run_native, fn, x)
    with np.errstate(all="ignore"):
        error = errors_in_ulps(found, REFERENCE[fn](x.astype(np.float64)))
    worst = int(np.argmax(error))
    assert error[worst] <= WORST[fn], f"{fn}({x[worst]!r}) = {found[worst]!r}, {error[worst]:.2f} ulp off"


@pytest.mark.parametrize("fn", [Fn.SIN, Fn.TANH, Fn.ERF], ids=str)
def test_odd_functions_keep_the_sign_of_zero(run_native: Any, fn: Fn) -> None:
    assert np.signbit(evaluate(run_native, fn, np.array([-0.0, 0.0], np.float32))).tolist() == [True, False]


def test_pow_is_rounded_once(run_native: Any) -> None:
    rng = np.random.default_rng(0)
    special = np.array([*SPECIAL, 2, -2, 3, -3, 0.5, -0.5, 2.5, 1e38, -1e38, 4e6 + 1], np.float32)
    a, b = (m.ravel() for m in np.meshgrid(special, special))
    x = np.concatenate([a, np.exp(rng.uniform(-80, 80, 50_000)), rng.uniform(0.5, 2, 50_000)]).astype(np.float32)
    y = np.concatenate([b, rng.uniform(-3, 3, 50_000), rng.uniform(-150, 150, 50_000)]).astype(np.float32)
    with np.errstate(all="ignore"):
        exact = np.power(x.astype(np.float64), y.astype(np.float64))
    error = errors_in_ulps(evaluate(run_native, Fn.POW, x, y), exact)
    worst = int(np.argmax(error))
    assert error[worst] <= 0.51, f"pow({x[worst]!r}, {y[worst]!r}) is {error[worst]:.2f} ulp off"
