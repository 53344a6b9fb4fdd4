"""The LLVM code of CPU kernels computes what the interpreter computes, for scheduled and for unscheduled loop nests."""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.backends.cpu.codegen.llvm import emit_kernel
from compiler.codegen.link import link
from compiler.interpret.loops import run_prim
from compiler.ir.dims import Dim, DimLike, DimVar, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.errors import CompileError
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.functions import Fn, ReduceFn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Apply, Cast, Const, Contraction, DimScalar, Guard, Load, Reduce, Scalar, ScalarParam
from compiler.ir.loops.statements import Allocate, For, Let, LoopKind, Seq, Stmt, Store, When
from compiler.llvm.ssa import num_bytes
from compiler.machine.target import NAMED, Target, host

Array = NDArray[Any]
F32 = DType.F32


def buffer(name: str, shape: list[DimLike], dtype: DType = F32, scope: Scope = Scope.GLOBAL) -> Buffer:
    return Buffer(name, tuple(Dim.of(d) for d in shape), dtype, scope)


def load(b: Buffer, *indices: DimLike) -> Load:
    return Load(b, tuple(Dim.of(i) for i in indices))


def store(b: Buffer, indices: list[DimLike], value: Scalar) -> Store:
    return Store(b, tuple(Dim.of(i) for i in indices), value)


def loop(var: DimVar, extent: DimLike, body: Stmt, kind: LoopKind = LoopKind.SERIAL) -> For:
    return For(var, Dim.of(extent), body, kind)


def less(a: DimLike, b: DimLike) -> Scalar:
    return Apply(Fn.LT, (DimScalar(Dim.of(a)), DimScalar(Dim.of(b))))


def add(a: Scalar, b: Scalar) -> Scalar:
    return Apply(Fn.ADD, (a, b))


def mul(a: Scalar, b: Scalar) -> Scalar:
    return Apply(Fn.MUL, (a, b))


ROOM = 64  # elements allocated after each output, which the kernel must leave unchanged


def lanes_of(n: DimLike, width: int, body: Any, inner: LoopKind = LoopKind.VECTOR) -> For:
    """Return a loop over j in 0 .. n - 1 that runs `body` in vectors of `width` lanes. The last vector is masked."""
    j, v = DimVar("j"), DimVar("v", upper=width - 1)
    at = j * width + v
    return loop(j, ceil_div(n, width), loop(v, width, When(less(at, n), body(at)), inner))


def check(run_native: Any, prim: PrimFunc, inputs: list[Array], shapes: list[tuple[int, ...]], *, ulps: int = 0, **given: Any) -> None:
    """Require that the compiled kernel computes what the interpreter computes, and that it leaves the memory after its outputs
    unchanged."""
    rooms = [np.full(prod(s) + ROOM, 77, b.dtype.numpy) for b, s in zip(prim.outputs, shapes, strict=True)]
    outputs = [room[: prod(s)].reshape(s) for room, s in zip(rooms, shapes, strict=True)]
    wanted = [o.copy() for o in outputs]
    scalars = given.get("scalars", {})
    dims = given.get("dims", {})
    arrays = iter([*inputs, *wanted])
    args = [next(arrays) if isinstance(p, Buffer) else scalars[p] if isinstance(p, ScalarParam) else dims[p] for p in prim.params]
    run_prim(prim, args)
    run_native(prim, [*inputs, *outputs], **given)
    for found, expected in zip(outputs, wanted, strict=True):
        if ulps:
            np.testing.assert_array_max_ulp(found, expected, ulps)
        else:
            np.testing.assert_array_equal(found, expected)
    for room in rooms:
        np.testing.assert_array_equal(room[-ROOM:], np.full(ROOM, 77, room.dtype))


def randn(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def integers(*shape: int, high: int = 9) -> Array:
    """Return small integers as floats, so that sums are exact in any order."""
    return np.random.default_rng(1).integers(-high, high, shape).astype(np.float32)


# --- loops and phases --------------------------------------------------------------------------------------------------

N, M, K = DimVar("n", lower=1), DimVar("m", lower=1), DimVar("k", lower=1)


def matmul(kind: LoopKind) -> PrimFunc:
    a, b, c = buffer("a", [N, K]), buffer("b", [K, M]), buffer("c", [N, M])
    i, j, r = DimVar("i", upper=N - 1), DimVar("j", upper=M - 1), DimVar("r", upper=K - 1)
    total = Contraction(((r, K.dim),), load(a, i, r), load(b, r, j))
    return PrimFunc((a, b, c), 1, loop(i, N, loop(j, M, store(c, [i, j], total), kind), kind))


@pytest.mark.parametrize("kind", [LoopKind.SERIAL, LoopKind.PARALLEL])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 9), (3, 33, 2)])
def test_unscheduled_nest(run_native: Any, kind: LoopKind, shape: tuple[int, int, int]) -> None:
    n, m, k = shape
    check(run_native, matmul(kind), [integers(n, k), integers(k, m)], [(n, m)])


def test_nested_parallel_loops_make_one_grid() -> None:
    assert emit_kernel("k", matmul(LoopKind.PARALLEL), host()).text.count("urem i64") == 1


def test_phases_follow_the_top_level_sequence(run_native: Any) -> None:
    x, t, y = buffer("x", [N]), buffer("t", [N]), buffer("y", [1])
    i, j = DimVar("i", upper=N - 1), DimVar("j", upper=N - 1)
    body = Seq(
        (
            loop(i, N, store(t, [i], mul(load(x, i), load(x, i))), LoopKind.PARALLEL),
            store(y, [0], Reduce(((j, N.dim),), ReduceFn.SUM, load(t, j))),
        )
    )
    prim = PrimFunc((x, t, y), 2, body)
    assert [p.body for p in emit_kernel("k", prim, host()).phases] == ["k.p0", "k.p1"]
    check(run_native, prim, [integers(13)], [(13,), (1,)])


def test_no_iterations(run_native: Any) -> None:
    n = DimVar("n")
    x, y = buffer("x", [n]), buffer("y", [n])
    i = DimVar("i")
    prim = PrimFunc((x, y), 1, loop(i, n, store(y, [i], load(x, i)), LoopKind.PARALLEL))
    check(run_native, prim, [randn(0)], [(0,)])


def test_scalar_parameters_follow_the_dimensions(run_native: Any) -> None:
    x, y = buffer("x", [N]), buffer("y", [N])
    params = [ScalarParam("a", F32), ScalarParam("b", DType.BF16), ScalarParam("c", DType.I32), ScalarParam("d", DType.BOOL)]
    a, b, c, d = params
    offset = DimVar("offset")
    i = DimVar("i", upper=N - 1)
    value = add(mul(load(x, i), a), add(Cast(b, F32), add(Cast(c, F32), Cast(DimScalar(offset.dim), F32))))
    prim = PrimFunc((x, *params, offset, y), 1, loop(i, N, store(y, [i], Apply(Fn.SELECT, (d, value, a)))))
    given: dict[str, Any] = {"scalars": {a: 2.5, b: -1.5, c: -7, d: True}, "dims": {offset: 100}}
    check(run_native, prim, [integers(9)], [(9,)], **given)


@pytest.mark.parametrize("dtype", [F32, DType.F16, DType.BF16, DType.E4M3])
def test_a_scalar_is_rounded_to_its_type(run_native: Any, dtype: DType) -> None:
    """A float is passed as an f64, which has more bits than its type."""
    x, y, scale, i = buffer("x", [N]), buffer("y", [N]), ScalarParam("scale", dtype), DimVar("i", upper=N - 1)
    prim = PrimFunc((x, scale, y), 1, loop(i, N, store(y, [i], mul(load(x, i), Cast(scale, F32)))))
    check(run_native, prim, [integers(9)], [(9,)], scalars={scale: 0.3})


# --- vectors and masks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [4, 8, 16, 32])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 33, 64])
def test_tail_is_masked(run_native: Any, n: int, width: int) -> None:
    x, b, y = buffer("x", [2, N]), buffer("b", [2]), buffer("y", [2, N])
    i = DimVar("i", upper=1)
    body = loop(i, 2, lanes_of(N, width, lambda j: store(y, [i, j], add(load(x, i, j), load(b, i)))), LoopKind.PARALLEL)
    check(run_native, PrimFunc((x, b, y), 1, body), [randn(2, n), randn(2)], [(2, n)])


@pytest.mark.parametrize("dtype", list(DType))
def test_masked_memory_of_every_type(run_native: Any, dtype: DType) -> None:
    x, y = buffer("x", [N], dtype), buffer("y", [N], dtype)
    prim = PrimFunc((x, y), 1, lanes_of(N, 16, lambda j: store(y, [j], load(x, N - 1 - j))))
    check(run_native, prim, [(integers(37) > 0).astype(dtype.numpy)], [(37,)])


@pytest.mark.parametrize("target", [t for t in NAMED.values() if t.can_run_here], ids=lambda t: t.name)
@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize("n", [1, 17])
def test_a_single_lane_is_stored_as_wide_as_its_element(run_native: Any, n: int, width: int, target: Target) -> None:
    """A masked store of elements that are narrower than the type in which lanes are computed does not write past the end of the row."""
    i = DimVar("i", upper=1)
    for wide, narrow in [(F32, DType.BF16), (F32, DType.F16), (F32, DType.I8), (DType.I32, DType.U8), (DType.I64, DType.I16)]:
        x, y = buffer("x", [2, n], wide), buffer("y", [2, n], narrow)
        row = lanes_of(n, width, lambda j, x=x, y=y, narrow=narrow: store(y, [i, j], Cast(load(x, i, j), narrow)))
        check(run_native, PrimFunc((x, y), 1, loop(i, 2, row)), [integers(2, n).astype(wide.numpy)], [(2, n)], target=target)


def test_a_row_has_the_bits_of_any_other_position(run_native: Any) -> None:
    x, y = buffer("x", [N]), buffer("y", [N])

    def gelu(j: Dim) -> Stmt:
        return store(y, [j], mul(load(x, j), add(Apply(Fn.ERF, (load(x, j),)), Apply(Fn.EXP, (load(x, j),)))))

    prim = PrimFunc((x, y), 1, lanes_of(N, 16, gelu))
    values, longest = randn(50), np.zeros(50, np.float32)
    run_native(prim, [values, longest])
    for n in (1, 3, 15, 16, 31, 49):
        short = np.zeros(n, np.float32)
        run_native(prim, [values[50 - n :].copy(), short])
        assert short.tobytes() == longest[50 - n :].tobytes()


ACCESSES: dict[str, Any] = {
    "contiguous": lambda j: j,
    "shifted": lambda j: j + 3,
    "one for all": lambda j: Dim.of(5),
    "two by two": lambda j: j // 2,
    "modulo": lambda j: j % 8,
    "strided": lambda j: 2 * j,
    "backwards": lambda j: 63 - j,
    "by a variable": lambda j: j * M,
    "clipped": lambda j: dim_min(dim_max(j, 7), M + 9),
    "odd division": lambda j: (j * 7 + 3) // 5,
    "floor of negative": lambda j: (j - 40) // 3 + 20,
    "rest of negative": lambda j: (j - 40) % 7,
    "divided by a variable": lambda j: (j - 40) // M + 40,
}


@pytest.mark.parametrize("access", list(ACCESSES))
@pytest.mark.parametrize("kind", [LoopKind.VECTOR, LoopKind.UNROLL, LoopKind.SERIAL])
@pytest.mark.parametrize("n", [32, 37])
def test_index_expressions(run_native: Any, access: str, kind: LoopKind, n: int) -> None:
    x, y = buffer("x", [160], DType.I32), buffer("y", [N], DType.I32)
    prim = PrimFunc((x, M, y), 1, lanes_of(N, 8, lambda j: store(y, [j], load(x, ACCESSES[access](j))), kind))
    check(run_native, prim, [np.arange(160, dtype=np.int32)], [(n,)], dims={M: 3})


@pytest.mark.parametrize(("dtype", "run"), [(DType.I16, 2), (DType.U8, 4)])
@pytest.mark.parametrize("width", [8, 7])
def test_lanes_that_read_runs_of_elements(run_native: Any, dtype: DType, run: int, width: int) -> None:
    """Runs are loaded as words, unless the last lanes read only a part of a run."""
    x, y, v = buffer("x", [80], dtype), buffer("y", [width], dtype), DimVar("v", upper=width - 1)
    body = loop(v, width, store(y, [v], load(x, v // run * (5 * run) + v % run)), LoopKind.VECTOR)
    check(run_native, PrimFunc((x, y), 1, body), [np.arange(80).astype(dtype.numpy)], [(width,)])


def test_scatter_to_strided_places(run_native: Any) -> None:
    x, y = buffer("x", [N, M]), buffer("y", [M, N])
    i = DimVar("i", upper=N - 1)
    prim = PrimFunc((x, y), 1, loop(i, N, lanes_of(M, 8, lambda j: store(y, [j, i], load(x, i, j)))))
    check(run_native, prim, [randn(5, 21)], [(21, 5)])


def test_let_makes_an_index_of_what_was_loaded(run_native: Any) -> None:
    table, ids, y = buffer("table", [K, M]), buffer("ids", [N], DType.I32), buffer("y", [N, M])
    i, row = DimVar("i", upper=N - 1), DimVar("row")
    one_row = loop(i, N, Let(row, load(ids, i), lanes_of(M, 8, lambda j: store(y, [i, j], load(table, row, j)))))
    inputs = [randn(6, 11), np.array([5, 0, 3, 3], np.int32)]
    check(run_native, PrimFunc((table, ids, y), 1, one_row), inputs, [(4, 11)])
    column = DimVar("column")
    per_lane = loop(i, N, lanes_of(M, 8, lambda j: Let(column, load(ids, j % N), store(y, [i, j], load(table, i, column)))))
    check(run_native, PrimFunc((table, ids, y), 1, per_lane), inputs, [(4, 11)])


def test_guard_does_not_read_outside(run_native: Any) -> None:
    x, y = buffer("x", [N]), buffer("y", [M])

    def padded(j: Dim) -> Stmt:
        inside = Guard(((Dim.of(0), j - 5, N.dim),), load(x, j - 5), Const(-1.0, F32))
        return store(y, [j], inside)

    for kind in (LoopKind.VECTOR, LoopKind.SERIAL):
        prim = PrimFunc((x, y), 1, lanes_of(M, 16, padded, kind))
        check(run_native, prim, [randn(9)], [(40,)])
        check(run_native, prim, [randn(90)], [(40,)])


def test_when_has_two_sides(run_native: Any) -> None:
    x, y = buffer("x", [N]), buffer("y", [N])

    def sides(j: Dim) -> Stmt:
        negative = Apply(Fn.LT, (load(x, j), Const(0.0, F32)))
        return When(negative, store(y, [j], Const(-9.0, F32)), store(y, [j], load(x, j)))

    for kind in (LoopKind.VECTOR, LoopKind.SERIAL):
        check(run_native, PrimFunc((x, y), 1, lanes_of(N, 16, sides, kind)), [randn(40)], [(40,)])


# --- reductions --------------------------------------------------------------------------------------------------------

REDUCTIONS = [
    *itertools.product([ReduceFn.SUM, ReduceFn.PROD, ReduceFn.MAX, ReduceFn.MIN, ReduceFn.ARGMAX, ReduceFn.ARGMIN], [F32, DType.I32]),
    *itertools.product([ReduceFn.ANY, ReduceFn.ALL], [DType.BOOL]),
]


@pytest.mark.parametrize(("fn", "dtype"), REDUCTIONS, ids=str)
@pytest.mark.parametrize("kind", [LoopKind.VECTOR, LoopKind.SERIAL])
def test_reductions_in_lanes(run_native: Any, fn: ReduceFn, dtype: DType, kind: LoopKind) -> None:
    result = DType.I64 if fn in (ReduceFn.ARGMAX, ReduceFn.ARGMIN) else dtype
    x, y = buffer("x", [N, K, 3], dtype), buffer("y", [N], result)
    r, s = DimVar("r", upper=K - 1), DimVar("s", upper=2)
    prim = PrimFunc((x, y), 1, lanes_of(N, 8, lambda i: store(y, [i], Reduce(((r, K.dim), (s, Dim.of(3))), fn, load(x, i, r, s))), kind))
    values = integers(21, 5, 3, high=3)
    values = (values > -1) if dtype is DType.BOOL else values
    values[3] = values[3, 0, 0]
    values = values.astype(dtype.numpy)
    if result is DType.I64:
        found = np.zeros(21, np.int64)
        run_native(prim, [values, found])
        pick = np.argmax if fn is ReduceFn.ARGMAX else np.argmin
        np.testing.assert_array_equal(found, pick(values.reshape(21, 15), axis=1))
    else:
        check(run_native, prim, [values], [(21,)])


@pytest.mark.parametrize("fn", [ReduceFn.MAX, ReduceFn.MIN, ReduceFn.ARGMAX, ReduceFn.ARGMIN], ids=str)
def test_reductions_meet_nan_and_infinities(run_native: Any, fn: ReduceFn) -> None:
    x, y = buffer("x", [N, K]), buffer("y", [N], DType.I64 if fn in (ReduceFn.ARGMAX, ReduceFn.ARGMIN) else F32)
    r = DimVar("r", upper=K - 1)
    prim = PrimFunc((x, y), 1, lanes_of(N, 8, lambda i: store(y, [i], Reduce(((r, K.dim),), fn, load(x, i, r)))))
    rows = list(itertools.product([np.nan, np.inf, -np.inf, 1.0], repeat=3))
    check(run_native, prim, [np.array(rows, np.float32)], [(len(rows),)])


@pytest.mark.parametrize("kind", [LoopKind.VECTOR, LoopKind.SERIAL])
def test_ragged_reduction(run_native: Any, kind: LoopKind) -> None:
    """The extent of a reduction differs from element to element, as in causal attention."""
    x, y = buffer("x", [N, N]), buffer("y", [N])
    r = DimVar("r")
    prim = PrimFunc((x, y), 1, lanes_of(N, 8, lambda i: store(y, [i], Reduce(((r, i + 1),), ReduceFn.SUM, load(x, i, r))), kind))
    check(run_native, prim, [integers(19, 19)], [(19,)])


def test_empty_reduction_is_the_identity(run_native: Any) -> None:
    k = DimVar("k")
    x, y = buffer("x", [N, k]), buffer("y", [N])
    r = DimVar("r")
    prim = PrimFunc((x, y), 1, lanes_of(N, 8, lambda i: store(y, [i], Reduce(((r, k.dim),), ReduceFn.MAX, load(x, i, r)))))
    check(run_native, prim, [randn(5, 0)], [(5,)])


# --- local buffers -----------------------------------------------------------------------------------------------------


def row_sum(width: int) -> PrimFunc:
    """Return a kernel that sums each row into `width` lanes and then adds the lanes as a tree, in a fixed order."""
    x, y = buffer("x", [N, K]), buffer("y", [N])
    acc = buffer("acc", [width], scope=Scope.LOCAL)
    i, r, v = DimVar("i", upper=N - 1), DimVar("r"), DimVar("v", upper=width - 1)
    steps: list[Stmt] = [loop(v, width, store(acc, [v], Const(0.0, F32)), LoopKind.VECTOR)]
    at = r * width + v
    inside = When(less(at, K), store(acc, [v], add(load(acc, v), load(x, i, at))))
    steps.append(loop(r, ceil_div(K, width), loop(v, width, inside, LoopKind.VECTOR)))
    half = width // 2
    while half:
        w = DimVar("w", upper=half - 1)
        steps.append(loop(w, half, store(acc, [w], add(load(acc, w), load(acc, w + half))), LoopKind.VECTOR))
        half //= 2
    steps.append(store(y, [i], load(acc, 0)))
    return PrimFunc((x, y), 1, loop(i, N, Allocate(acc, Seq(tuple(steps))), LoopKind.PARALLEL))


def test_tree_reduction_stays_in_registers(run_native: Any) -> None:
    check(run_native, row_sum(16), [integers(7, 100)], [(7,)])
    code = link([emit_kernel("k", row_sum(16), host())], host())
    assert "alloca" not in code.optimised()


def test_local_buffers_are_counted_as_stack() -> None:
    """A kernel reports as its stack size the bytes of its largest phase. Each local buffer of a phase is padded to whole cache lines."""
    y, one = buffer("y", [N]), Const(1.0, F32)
    i = DimVar("i", upper=N - 1)

    def phase(*extents: int) -> Stmt:
        body: Stmt = store(y, [i], one)
        for extent in extents:
            body = Allocate(buffer("t", [extent, 3], DType.BF16, scope=Scope.LOCAL), body)
        return loop(i, N, body, LoopKind.PARALLEL)

    def stack_bytes(*phases: Stmt) -> int:
        return emit_kernel("k", PrimFunc((y,), 1, Seq(phases)), host()).stack_bytes

    assert stack_bytes(phase()) == 0
    assert stack_bytes(phase(1)) == 64
    assert stack_bytes(phase(100)) == 640
    assert stack_bytes(phase(1), phase(100, 1), phase(11)) == 704


@pytest.mark.parametrize(
    ("text", "size"),
    [("float", 4), ("i1", 1), ("i64", 8), ("ptr", 8), ("<16 x float>", 64), ("[200 x <8 x half>]", 3200), ("[3 x i16]", 6)],
)
def test_types_of_llvm_have_sizes(text: str, size: int) -> None:
    assert num_bytes(text) == size


def test_what_a_short_loop_goes_over_lies_in_registers(run_native: Any) -> None:
    """A local buffer whose indices are variables of short loops stays in registers, even if the schedule did not unroll these loops."""
    x, y, acc = buffer("x", [N, K]), buffer("y", [N]), buffer("acc", [4], scope=Scope.LOCAL)
    i, r, p = DimVar("i", upper=N - 1), DimVar("r", upper=K - 1), [DimVar(name, upper=3) for name in "abc"]
    clear = loop(p[0], 4, store(acc, [p[0]], Const(0.0, F32)))
    inside = store(acc, [p[1]], add(load(acc, p[1]), load(x, i, r)))
    steps = (clear, loop(r, K, loop(p[1], 4, inside)), store(y, [i], load(acc, 3)))
    prim = PrimFunc((x, y), 1, loop(i, N, Allocate(acc, Seq(steps)), LoopKind.PARALLEL))
    check(run_native, prim, [integers(7, 100)], [(7,)])
    assert "alloca" not in link([emit_kernel("k", prim, host())], host()).optimised()


def test_register_tile(run_native: Any) -> None:
    """A matrix product that is computed as a sum of outer products keeps its accumulators in registers."""
    rows, columns, width = 4, 32, 16
    a, b, c = buffer("a", [N, K]), buffer("b", [M // columns, K, columns]), buffer("c", [N, M])
    acc = buffer("acc", [rows, columns], scope=Scope.LOCAL)
    m = DimVar("mm", lower=1)
    b, c = buffer("b", [m, K, columns]), buffer("c", [N, m * columns])
    i, j, r = DimVar("i"), DimVar("j", upper=m - 1), DimVar("r", upper=K - 1)
    p, q, v = DimVar("p", upper=rows - 1), DimVar("q", upper=1), DimVar("v", upper=width - 1)

    def tile(body: Stmt) -> Stmt:
        return loop(p, rows, loop(q, 2, loop(v, width, body, LoopKind.VECTOR), LoopKind.UNROLL), LoopKind.UNROLL)

    at = q * width + v
    product = Apply(Fn.FMA, (load(a, i * rows + p, r), load(b, j, r, at), load(acc, p, at)))
    body = Seq(
        (
            tile(store(acc, [p, at], Const(0.0, F32))),
            loop(r, K, tile(store(acc, [p, at], product))),
            tile(store(c, [i * rows + p, j * columns + at], load(acc, p, at))),
        )
    )
    prim = PrimFunc((a, b, c), 1, loop(i, N // rows, loop(j, m, Allocate(acc, body), LoopKind.PARALLEL), LoopKind.PARALLEL))
    check(run_native, prim, [integers(8, 40), integers(3, 40, 32)], [(8, 96)])


def test_private_buffer_of_each_lane(run_native: Any) -> None:
    x, y = buffer("x", [N]), buffer("y", [N])
    t = buffer("t", [3], scope=Scope.LOCAL)

    def powers(j: Dim) -> Stmt:
        s = DimVar("s", upper=1)
        step = loop(s, 2, store(t, [s + 1], mul(load(t, s), load(x, j))))
        return Allocate(t, Seq((store(t, [0], load(x, j)), step, store(y, [j], load(t, 2)))))

    values, found = integers(21), np.zeros(21, np.float32)
    run_native(PrimFunc((x, y), 1, lanes_of(N, 8, powers)), [values, found])
    np.testing.assert_array_equal(found, values**3)


# --- buffers that may share memory -------------------------------------------------------------------------------------


def shift_down(attrs: dict[str, Any]) -> PrimFunc:
    x, y = buffer("x", [N]), buffer("y", [N])
    i = DimVar("i", upper=N - 2)
    return PrimFunc((x, y), 1, loop(i, N - 1, store(y, [i + 1], load(x, i))), attrs)


def test_inplace_buffers_may_be_the_same_memory(run_native: Any) -> None:
    shared = np.arange(40, dtype=np.float32)
    run_native(shift_down({"inplace": ((0, 1),)}), [shared, shared])
    assert (shared == 0).all()


def test_other_buffers_are_promised_apart() -> None:
    assert emit_kernel("k", shift_down({}), host()).text.count("noalias") == 2
    assert "noalias" not in emit_kernel("k", shift_down({"inplace": ((0, 1),)}), host()).text


# --- loop nests that are refused ---------------------------------------------------------------------------------------


def refused(stmt: Stmt, params: tuple[Buffer, ...]) -> str:
    with pytest.raises(CompileError) as error:
        emit_kernel("k", PrimFunc(params, 1, stmt), host())
    return str(error.value)


def test_refusals_name_what_is_wrong() -> None:
    x, y = buffer("x", [N]), buffer("y", [N])
    i, v = DimVar("i"), DimVar("v", upper=7)
    one = Const(1.0, F32)
    vector = LoopKind.VECTOR
    assert refused(loop(v, 8, store(y, [0], load(x, v)), vector), (x, y)) == (
        "in kernel 'k': store to y[0] inside vector loop v: lanes write the same element; expected one element per lane"
    )
    nested = loop(v, 8, loop(i, 4, store(y, [i], one), vector), vector)
    assert "vector loop i is inside vector loop v" in refused(nested, (y,))
    assert "unroll loop i has extent n; expected a constant" in refused(loop(i, N, store(y, [i], one), LoopKind.UNROLL), (y,))
    assert "bound to a GPU's thread" in refused(loop(i, N, store(y, [i], one), LoopKind.THREAD), (y,))
    assert "buffer t is allocated in global memory" in refused(Allocate(buffer("t", [4]), store(y, [0], one)), (y,))
    local = buffer("t", [N], scope=Scope.LOCAL)
    assert "local buffer t has extent n; expected a constant" in refused(Allocate(local, store(y, [0], one)), (y,))
    ragged = loop(v, 8, loop(i, v, store(y, [v], one)), vector)
    assert "has extent v, which differs between the lanes" in refused(ragged, (y,))
    inside = Let(i, Const(0, DType.I64), loop(v, 8, store(y, [v], one), LoopKind.PARALLEL))
    assert refused(inside, (y,)).endswith("parallel loop v is inside another statement, so one thread would run it; expected it outermost")
