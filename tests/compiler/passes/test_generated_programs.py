"""Randomly generated programs keep their results after each pass, and their machine code gives the same results with any number of threads.

A program is generated in steps, here called moves. Each move applies one construct to values that the program already computes: an
operator, a loop nest from text, a view, a branch, a match_cast, a tuple, a function call, an in-place call or a host routine. Dimensions
are symbolic, with and without declared ranges. Values stay small, and discontinuous operators get no operands with rounding errors, so that
equivalent programs give nearly equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import compiler.ops
from compiler.bind import bind_values
from compiler.driver import Options, compile_module
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, FuncRef, ScalarValue, ShapeValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.function import Body
from compiler.ir.graph.values import CallFunc, CallLibrary, CallTir, MakeTuple, TupleGet
from compiler.ir.module import IRModule
from compiler.ir.op import OPS
from compiler.ir.prove import prove_eq, prove_le
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import print_module
from compiler.ir.types import TensorType, Type, tensor
from compiler.ir.verify.module import verify
from runtime.executable import Executable
from runtime.session import Session
from tests.compiler.meaning import MeaningCheck, interpret

assert compiler.ops

# Loop nests with features that nests of operators lack: a gather, a guard, an integer read from memory, scalar and dimension parameters,
# bit operations, two outputs, two stages, a write in place, a reduction whose extent depends on the row.
CUSTOM = parse("""
prim roll(A: f32[a, b], shift: dim, out B: f32[a, b]) where b in 1.., shift in 0.. {
  for i in a, j in b { B[i, j] = A[i, (j + shift) % b] }
}
prim shifted(A: f32[a, b], out B: f32[a, b]) {
  for i in a, j in b { B[i, j] = guard(1 <= j < b ? A[i, j - 1] : -0.5) }
}
prim pick(A: f32[a, b], I: i32[c], out B: f32[c, b]) where a in 1.. {
  for i in c, j in b { let p within 0..a - 1 = cast(i64, I[i]) % dim(a) { B[i, j] = A[p, j] } }
}
prim affine(A: f32[a, b], scale: scalar f32, n: dim, out B: f32[a, b]) where n in 0.. {
  for i in a, j in b { B[i, j] = A[i, j] * scale + cast(f32, dim(n % 7)) * 0.125 }
}
prim nibbles(A: i32[a, b], out B: f32[a, 2*b]) {
  for i in a, j in 2*b { B[i, j] = cast(f32, ((A[i, j // 2] >> cast(i32, dim(j % 2 * 4))) & 15:i32) - 8:i32) * 0.125 }
}
prim extremes(A: f32[a, b], out B: f32[a], out C: f32[a]) where b in 1.. {
  for i in a { B[i] = max(j in b) A[i, j] }
  for i in a { C[i] = min(j in b) A[i, j] }
}
prim mean_free(A: f32[a, b], out B: f32[a, b]) where b in 1.. {
  alloc global m: f32[a] {
    for i in a { m[i] = (sum(j in b) A[i, j]) / cast(f32, dim(b)) }
    for i in a, j in b { B[i, j] = A[i, j] - m[i] }
  }
}
prim accumulate(A: f32[a, b], D: f32[a, b], out B: f32[a, b]) {
  for i in a, j in b { B[i, j] = A[i, j] + D[i, j] * 0.5 }
}
prim prefix(A: f32[a, b], out B: f32[a, b]) {
  for i in a, j in b { B[i, j] = (sum(r in j + 1) A[i, r]) * 0.125 }
}
""")

UNARY = ["tanh", "sigmoid", "silu", "gelu", "gelu_tanh", "sin", "cos", "abs", "negative", "relu", "erf"]
BINARY = ["add", "subtract", "multiply", "minimum", "maximum"]
LARGEST = 64.0  # bound on the absolute values of every tensor in `at_hand`
EXAMPLES = settings().max_examples // 4  # A quarter of the profile's number, because each example is compiled.
# Allowed error, relative to the largest element. A program has a few moves, each with a few roundings.
TOLERANCE = {DType.F32: 2e-4, DType.F16: 4e-2, DType.BF16: 2e-1, DType.E4M3: 2.0}


@dataclass(frozen=True, slots=True)
class Program:
    module: IRModule
    inputs: tuple[Any, ...]
    weights: dict[str, Any]

    def __str__(self) -> str:
        given = [f"{a.dtype}{list(a.shape)}" for a in (*self.inputs, *self.weights.values())]
        return f"{print_module(self.module)}\n# with {', '.join(given)}"


@dataclass(slots=True)
class _Generator:
    """Draws the body of a function. `at_hand` maps each tensor that the next move may use to a bound on its absolute values."""

    draw: Callable[[Any], Any]
    builder: Builder
    sizes: dict[DimVar, int]
    at_hand: dict[Var, float] = field(default_factory=dict[Var, float])
    # tensors without rounding errors (parameters and integers), which comparisons may read
    exact: set[Var] = field(default_factory=set[Var])
    helpers: list[str] = field(default_factory=list[str])
    depth: int = 0
    impure: bool = False  # whether the function may call functions that overwrite their arguments

    def choice(self, items: list[Any]) -> Any:
        return self.draw(st.sampled_from(items))

    # --- choosing operands ---------------------------------------------------------------------------------------------

    def pick(self, wanted: Callable[[TensorType], bool], most: float = LARGEST) -> Var | None:
        found = [v for v, bound in self.at_hand.items() if isinstance(v.type, TensorType) and wanted(v.type) and bound <= most]
        return self.choice(found) if found else None

    def floats(self, ndim: int | None = None, *, f32: bool = False, most: float = LARGEST, filled: bool = False) -> Var | None:
        """Choose a tensor of floats. With `filled`, its last axis is never empty. Return None if no tensor fits."""

        def wanted(t: TensorType) -> bool:
            kind = t.dtype is DType.F32 if f32 else t.dtype is not None and t.dtype.is_float
            rank = t.ndim == ndim if ndim is not None else True
            return kind and rank and t.shape is not None and (not filled or (len(t.shape) > 0 and prove_le(1, t.shape[-1])))

        return self.pick(wanted, most)

    def keep(self, var: Var, bound: float, *, exact: bool = False) -> None:
        self.at_hand[var] = bound
        if exact:
            self.exact.add(var)

    def size(self, dim: Dim) -> int:
        return dim.evaluate(self.sizes)

    def tir(self, name: str, args: tuple[Atom, ...], *out: Type, inplace: tuple[int | None, ...] = ()) -> Var:
        self.builder.add(name, CUSTOM.prim(name))
        return self.builder.emit(CallTir(name, args, out, inplace))

    def call(self, op: str, *args: Atom, **attrs: Any) -> Var:
        return self.builder.call(OPS[op], *args, **attrs)

    # --- moves: each adds a value, or does nothing if no operand fits ----------------------------------------------------

    def unary(self) -> None:
        if (x := self.floats()) is not None:
            op = self.choice(UNARY)
            self.keep(self.call(op, x), self.at_hand[x] if op in ("silu", "gelu", "gelu_tanh", "abs", "negative", "relu") else 1.0)

    def exponential(self) -> None:
        if (x := self.floats(most=4.0)) is not None:
            self.keep(self.call("exp", x), 55.0)

    def binary(self) -> None:
        x = self.floats()
        if x is None:
            return
        y = self.pick(lambda t: t.dtype == x.type.dtype and t.shape is not None and _fits(t, x.type))
        other: Atom = ScalarValue(self.choice([-1.5, 0.0, 0.3, 2.0]), "f32") if y is None or self.draw(st.booleans()) else y
        size = self.at_hand[other] if isinstance(other, Var) else 2.0
        op = self.choice(BINARY)
        bound = {"multiply": self.at_hand[x] * size, "add": self.at_hand[x] + size, "subtract": self.at_hand[x] + size}
        if bound.get(op, 0.0) <= LARGEST:
            self.keep(self.call(op, x, other), bound.get(op, max(size, self.at_hand[x])))

    def unproved(self) -> None:
        """Call an operator whose operands have equal extents, but only a check at run time can show that the extents are equal."""
        x = self.floats(ndim=1, f32=True)
        if x is None or not _never_one(x.type):
            return
        extent = self.size(x.type.shape[0])
        y = self.pick(lambda t: t.dtype is DType.F32 and t.ndim == 1 and t.shape is not None and _agree(self.size(t.shape[0]), extent, t))
        if y is not None:
            self.keep(self.call("maximum", x, y), max(self.at_hand[x], self.at_hand[y]))

    def integers(self) -> None:
        x = self.pick(lambda t: t.dtype is DType.I32)
        if x is not None:
            op, other = self.choice([("floor_divide", 3), ("modulo", 5), ("add", 7), ("logical_and", 6), ("maximum", 2)])
            self.keep(self.call(op, x, ScalarValue(Dim.of(other))), self.at_hand[x] + 8, exact=True)

    def where(self) -> None:
        a = self.floats(f32=True)
        if a is None:
            return
        exact = [v for v in self.exact if v in self.at_hand and v.type.dtype is DType.F32 and _fits(v.type, a.type)]
        if not exact:
            return
        cond = self.call(self.choice(["less", "greater_equal"]), self.choice(exact), ScalarValue(self.choice([0.0, 1.0]), "f32"))
        self.keep(self.call("where", cond, a, ScalarValue(0.25, "f32")), max(self.at_hand[a], 0.25))

    def cast(self) -> None:
        x = self.floats()
        if x is not None:
            self.keep(self.call("cast", x, dtype=self.choice([DType.F32, DType.F16, DType.BF16])), self.at_hand[x] * 1.01)

    def from_integers(self) -> None:
        x = self.pick(lambda t: t.dtype is DType.I32)
        if x is not None:
            self.keep(self.call("cast", x, dtype=DType.F32), self.at_hand[x], exact=True)

    def normalise(self) -> None:
        x = self.floats(f32=True, filled=True)
        if x is not None:
            self.keep(self.call("softmax", x), 1.0)

    def norm(self) -> None:
        x = self.floats(f32=True, filled=True)
        if x is None:
            return
        w = self.pick(
            lambda t: t.dtype is DType.F32 and t.ndim == 1 and t.shape is not None and prove_eq(t.shape[0], x.type.shape[-1]), 4.0
        )
        if w is not None:
            self.keep(self.call("rms_norm", x, w, eps=1e-2), 8.0 * self.at_hand[w])

    def linear(self) -> None:
        x = self.floats(f32=True, most=4.0)
        if x is None or x.type.ndim == 0:
            return
        w = self.pick(
            lambda t: t.dtype is DType.F32 and t.ndim == 2 and t.shape is not None and prove_eq(t.shape[1], x.type.shape[-1]), 4.0
        )
        if w is not None:
            depth = self.size(x.type.shape[-1])
            made = self.call("linear", x, w)
            self.bounded(made, self.at_hand[x] * self.at_hand[w] * depth)

    def bounded(self, var: Var, bound: float) -> None:
        if bound > LARGEST:
            var, bound = self.call("tanh", self.call("multiply", var, ScalarValue(4.0 / bound, "f32"))), 1.0
        self.keep(var, bound)

    def permute(self) -> None:
        if (x := self.floats()) is not None and x.type.ndim:
            self.keep(self.call("permute_dims", x, axes=self.draw(st.permutations(range(x.type.ndim)))), self.at_hand[x])

    def flatten(self) -> None:
        if (x := self.floats(ndim=2)) is not None:
            a, b = x.type.shape
            self.keep(self.call("reshape", x, ShapeValue((a * b,))), self.at_hand[x])

    def regroup(self) -> None:
        """Reshape a tensor [..., 4*b] to [..., b, 4]."""
        x = self.floats()
        if x is None or not x.type.ndim or not prove_eq(x.type.shape[-1] % 4, 0):
            return
        *front, last = x.type.shape
        self.keep(self.call("reshape", x, ShapeValue((*front, last // 4, Dim.of(4)))), self.at_hand[x])

    def expand(self) -> None:
        if (x := self.floats()) is not None and x.type.ndim < 3:
            self.keep(self.call("expand_dims", x, axes=[self.draw(st.integers(0, x.type.ndim))]), self.at_hand[x])

    def slice(self) -> None:
        x = self.floats(filled=True)
        if x is not None:
            first = 1 if prove_le(2, x.type.shape[-1]) else 0
            self.keep(self.call("slice", x, axis=-1, begin=first), self.at_hand[x])

    def flip(self) -> None:
        if (x := self.floats()) is not None and x.type.ndim:
            self.keep(self.call("flip", x, axes=[self.draw(st.integers(0, x.type.ndim - 1))]), self.at_hand[x])

    def concat(self) -> None:
        x = self.floats()
        if x is None or not x.type.ndim:
            return
        y = self.pick(lambda t: t.dtype == x.type.dtype and t.ndim == x.type.ndim and t.shape is not None and _same_behind(t, x.type))
        if y is not None:
            self.keep(self.call("concat", x, y, axis=0), max(self.at_hand[x], self.at_hand[y]))

    def split(self) -> None:
        x = self.floats(filled=True)
        if x is not None:
            last = x.type.shape[-1]
            parts = self.call("split", x, axis=-1, sizes=[Dim.of(1), last - 1])
            for i in (0, 1):
                self.keep(self.builder.emit(TupleGet(parts, i)), self.at_hand[x])

    def fold(self) -> None:
        x = self.floats(f32=True, filled=True)
        if x is not None:
            op = self.choice(["max", "min", "mean", "sum"])
            made = self.call(op, x, axes=[-1], keepdims=self.draw(st.booleans()))
            self.bounded(made, self.at_hand[x] * (self.size(x.type.shape[-1]) if op == "sum" else 1))

    def nest(self) -> None:
        """Call one of the loop nests in CUSTOM."""
        name = self.choice(["roll", "shifted", "affine", "mean_free", "extremes", "prefix"])
        x = self.floats(ndim=2, f32=True, filled=name != "shifted", most=8.0)
        if x is None:
            return
        shape = x.type.shape
        match name:
            case "roll":
                args: tuple[Atom, ...] = (x, ScalarValue(self.choice([Dim.of(1), shape[1] - 1])))
            case "affine":
                args = (x, ScalarValue(0.75, "f32"), ScalarValue(self.choice([shape[0] + 3, shape[0] * shape[1]])))
            case _:
                args = (x,)
        if name == "extremes":
            both = self.tir(name, args, *[tensor([shape[0]], DType.F32)] * 2)
            for i in (0, 1):
                self.keep(self.builder.emit(TupleGet(both, i)), self.at_hand[x])
            return
        bound = {"affine": self.at_hand[x] + 1.0, "mean_free": 2 * self.at_hand[x], "shifted": max(0.5, self.at_hand[x])}
        made = self.tir(name, args, x.type)
        self.bounded(made, bound.get(name, self.at_hand[x] * (self.size(shape[1]) if name == "prefix" else 1)))

    def pick_rows(self) -> None:
        x = self.floats(ndim=2, f32=True)
        i = self.pick(lambda t: t.dtype is DType.I32 and t.ndim == 1)
        if x is not None and i is not None and prove_le(1, x.type.shape[0]):
            self.keep(self.tir("pick", (x, i), tensor([i.type.shape[0], x.type.shape[1]], DType.F32)), self.at_hand[x])

    def unpack(self) -> None:
        x = self.pick(lambda t: t.dtype is DType.I32 and t.ndim == 2)
        if x is not None:
            a, b = x.type.shape
            self.keep(self.tir("nibbles", (x,), tensor([a, 2 * b], DType.F32)), 1.0)

    def in_place(self) -> None:
        """Add to an operand in place. Code after the call must still read the operand's old value."""
        x = self.floats(ndim=2, f32=True)
        if x is None:
            return
        y = self.pick(lambda t: t == x.type)
        assert y is not None
        self.bounded(self.tir("accumulate", (x, y), x.type, inplace=(0,)), self.at_hand[x] + self.at_hand[y])

    def overwrite(self) -> None:
        """Overwrite a tensor in place. No later code reads the tensor, not even through a view. Earlier code must have read the old
        value."""
        x = self.floats(ndim=2, f32=True)
        if x is None:
            return
        shape = ShapeValue(x.type.shape)
        names = [
            x,
            self.call("reshape", x, shape),
            self.call("reshape", self.call("reshape", x, ShapeValue((shape.dims[0] * shape.dims[1],))), shape),
        ]
        before = self.call(self.choice(UNARY), self.choice(names))
        turned = (
            self.call("flip", self.choice(names), axes=[self.draw(st.integers(0, 1))]) if self.draw(st.booleans()) else self.choice(names)
        )
        bound = self.at_hand.pop(x)
        self.exact.discard(x)
        self.bounded(self.tir("accumulate", (self.choice(names), turned), x.type, inplace=(0,)), 2 * bound)
        self.keep(self.call("negative", before), max(1.0, bound))

    def unique(self) -> None:
        """Call an operator whose result has a length that depends on data."""
        exact = [v for v in self.exact if v in self.at_hand and v.type.dtype is DType.F32 and v.type.ndim == 1]
        if not exact or self.depth:
            return
        x = self.choice(exact)
        found = self.builder.emit(CallLibrary("unique", (x,), (TensorType(None, DType.F32, 1),)))
        k = DimVar("k")
        self.keep(self.builder.match_cast(found, tensor([k], DType.F32)), self.at_hand[x])
        self.sizes[k] = -1  # the size is known only at run time

    def match_cast(self) -> None:
        x = self.floats()
        if x is None or not x.type.ndim or self.depth:
            return
        first, *rest = x.type.shape
        k = DimVar("k")
        if all(v in self.sizes and self.sizes[v] >= 0 for v in first.vars()):
            self.sizes[k] = self.size(first)
            self.keep(self.builder.match_cast(x, TensorType((Dim.of(k), *rest), x.type.dtype)), self.at_hand[x])

    def tuples(self) -> None:
        x, y = self.floats(), self.floats()
        if x is not None and y is not None:
            pair = self.builder.emit(MakeTuple((x, self.builder.emit(MakeTuple((y, x))))))
            inner = self.builder.emit(TupleGet(pair, 1))
            self.keep(self.builder.emit(TupleGet(inner, self.draw(st.integers(0, 1)))), max(self.at_hand[x], self.at_hand[y]))

    def function(self) -> None:
        x = self.floats(ndim=2, f32=True, filled=True, most=4.0)
        if x is not None and self.helpers:
            made = self.builder.emit(CallFunc(FuncRef(self.choice(self.helpers)), (x,)))
            assert isinstance(made.type, TensorType)
            if made.type.shape is not None:
                self.keep(made, LARGEST)

    def give_away(self) -> None:
        """Pass a tensor to a function that overwrites it. Code after the call must still read the old value."""
        x = self.floats(ndim=2, f32=True, most=4.0)
        if x is not None and self.impure and not self.depth:
            made = self.builder.emit(CallFunc(FuncRef("taker"), (x,)))
            self.keep(self.builder.match_cast(made, x.type), 1.5 * self.at_hand[x])

    def branch(self) -> None:
        cond = self.pick(lambda t: t.dtype is DType.BOOL and t.ndim == 0)
        x = self.floats(f32=True)
        if cond is None or x is None or self.depth > 1:
            return
        sides: list[Body] = []
        bounds: list[float] = []
        for _ in range(2):
            inner = _Generator(self.draw, self.builder, self.sizes, dict(self.at_hand), set(self.exact), self.helpers, self.depth + 1)
            with self.builder.branch(sides):
                inner.moves(self.draw(st.integers(0, 3)))
                same = inner.pick(lambda t: t == x.type)
                assert same is not None
                bounds.append(inner.at_hand[same])
                self.builder.returns(same)
        self.keep(self.builder.branches(cond, *sides), max(bounds))

    def moves(self, count: int) -> None:
        for _ in range(count):
            self.choice(MOVES)(self)


MOVES = [
    *(_Generator.unary, _Generator.exponential, _Generator.binary, _Generator.binary, _Generator.unproved, _Generator.integers),
    *(_Generator.where, _Generator.cast, _Generator.from_integers, _Generator.normalise, _Generator.norm, _Generator.linear),
    *(_Generator.linear, _Generator.permute, _Generator.flatten, _Generator.regroup, _Generator.expand, _Generator.slice),
    *(_Generator.flip, _Generator.concat, _Generator.split, _Generator.fold, _Generator.nest, _Generator.nest, _Generator.pick_rows),
    *(
        _Generator.unpack,
        _Generator.in_place,
        _Generator.overwrite,
        _Generator.unique,
        _Generator.match_cast,
        _Generator.tuples,
        _Generator.function,
    ),
    *(_Generator.branch, _Generator.branch),
]


def _fits(small: Type, large: Type) -> bool:
    """Return whether a tensor of type `small` provably broadcasts to type `large`."""
    assert isinstance(small, TensorType) and isinstance(large, TensorType)
    if small.shape is None or large.shape is None or len(small.shape) > len(large.shape):
        return False
    behind = large.shape[len(large.shape) - len(small.shape) :]
    return all(prove_eq(s, b) or prove_eq(s, 1) for s, b in zip(small.shape, behind, strict=True))


def _same_behind(a: TensorType, b: Type) -> bool:
    assert isinstance(b, TensorType) and a.shape is not None and b.shape is not None
    return all(prove_eq(x, y) for x, y in zip(a.shape[1:], b.shape[1:], strict=True))


def _never_one(type_: Type) -> bool:
    return isinstance(type_, TensorType) and type_.shape is not None and prove_le(2, type_.shape[0])


def _agree(size: int, extent: int, type_: TensorType) -> bool:
    return size == extent and _never_one(type_)


@st.composite
def programs(draw: Callable[[Any], Any]) -> Program:
    n, m = DimVar("n", 1, 24), DimVar("m")
    q = DimVar("q", 4, 64, 4)
    s = DimVar("s", 2)
    sizes = {
        n: draw(st.integers(1, 24)),
        m: draw(st.integers(0, 19)),
        q: draw(st.sampled_from([4, 8, 12, 36, 64])),
        s: draw(st.sampled_from([2, 3, 17])),
    }
    builder = Builder()
    helpers = [_helper(draw, builder, number) for number in range(draw(st.integers(0, 1)))]
    dims: list[Any] = [n, m, q, s, 1, 4, 17]
    f32 = DType.F32
    params = [
        Var("x0", tensor([n, q], f32)),
        Var("x1", tensor([draw(st.sampled_from(dims)), draw(st.sampled_from(dims))], f32)),
        Var("x2", tensor([m], f32)),
        Var("x3", tensor([s], f32)),
        Var("i0", tensor([m], DType.I32)),
        Var("i1", tensor([n, 4], DType.I32)),
        Var("c", tensor([], DType.BOOL)),
    ]
    weights = [
        Var("w0", tensor([draw(st.sampled_from([1, 7, 16, 40])), q], f32)),
        Var("w1", tensor([draw(st.sampled_from([1, 4, 33])), 4], f32)),
        Var("w2", tensor([q], f32)),
    ]
    made = _Generator(draw, builder, dict(sizes), helpers=helpers, impure=draw(st.booleans()))
    if made.impure:
        _taker(builder)
    with builder.function("main", [*params, *weights], num_inputs=len(params), pure=not made.impure):
        for var in (*params, *weights):
            made.keep(var, 100.0 if var.name.startswith("i") else 2.0, exact=True)
        if draw(st.booleans()):
            with builder.dataflow():
                made.depth = 2  # at this depth no branches and no new variables are drawn, because a dataflow block may not contain them
                made.moves(draw(st.integers(1, 6)))
                made.depth = 0
        made.moves(draw(st.integers(1, 8)))
        results = [v for v in made.at_hand if v not in params and v not in weights][-3:] or params[:1]
        builder.returns(results[0] if len(results) == 1 else builder.emit(MakeTuple(tuple(results))))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    arrays = {v.name: _array(v.type, sizes, random) for v in (*params, *weights)}
    return Program(builder.finish(), tuple(arrays[p.name] for p in params), {w.name: arrays[w.name] for w in weights})


def _helper(draw: Callable[[Any], Any], builder: Builder, number: int) -> str:
    a, b = DimVar("a"), DimVar("b", 1)
    x = Var("x", tensor([a, b], DType.F32))
    name = f"helper{number}"
    inner = _Generator(draw, builder, {a: 3, b: 3}, {x: 4.0}, set(), depth=2)  # the sizes are arbitrary, because they affect only bounds
    with builder.function(name, [x]):
        inner.moves(draw(st.integers(1, 4)))
        builder.returns(builder.call(OPS["tanh"], [v for v in inner.at_hand if v.type.dtype.is_float][-1]))
    return name


def _taker(builder: Builder) -> None:
    x = Var("x", tensor([DimVar("a"), DimVar("b")], DType.F32))
    builder.add("accumulate", CUSTOM.prim("accumulate"))
    with builder.function("taker", [x], pure=False):
        builder.returns(builder.emit(CallTir("accumulate", (x, x), (x.type,), (0,))))


def _array(type_: Type, sizes: dict[DimVar, int], random: np.random.Generator) -> Any:
    assert isinstance(type_, TensorType) and type_.shape is not None
    shape = [d.evaluate(sizes) for d in type_.shape]
    match type_.dtype:
        case DType.F32:
            return np.clip(random.normal(size=shape), -2, 2).astype(np.float32)
        case DType.I32:
            return random.integers(-100, 100, shape, dtype=np.int32)
        case _:
            return np.asarray(random.integers(0, 2, shape), np.bool_)


# --- the properties that are tested ----------------------------------------------------------------------------------------------------


def meaning(module: IRModule, program: Program) -> Any:
    return interpret(module, [np.array(a) for a in program.inputs], dict(program.weights))


def close(actual: Any, expected: Any, place: str = "result") -> None:
    if isinstance(expected, tuple):
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            close(a, e, f"{place}.{i}")
        return
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), place
    dtype = DType.from_numpy(expected.dtype)
    if not dtype.is_float:
        np.testing.assert_array_equal(actual, expected, place)
        return
    tolerance = TOLERANCE[dtype]
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance * max(1.0, np.max(np.abs(e), initial=0.0)), err_msg=place)


@given(programs())
@settings(max_examples=EXAMPLES, report_multiple_bugs=False, suppress_health_check=list(HealthCheck))
def test_every_pass_keeps_the_meaning_and_what_is_compiled_computes_it(program: Program) -> None:
    note(str(program))
    verify(program.module)
    expected = meaning(program.module, program)
    check = MeaningCheck(lambda module, _: close(meaning(module, program), expected))
    executable = compile_module(program.module, Options(instruments=(check,)))
    results = [_run(executable, program, num_threads) for num_threads in (1, 2, 3)]
    close(results[0], expected)
    for other in results[1:]:
        assert _bits(other) == _bits(results[0])


def _run(executable: Executable, program: Program, num_threads: int) -> Any:
    session = Session(executable, device_threads=num_threads)
    try:
        bind_values(session, executable, "main", dict(program.weights))
        first, second = (session.call("main", *map(np.array, program.inputs)) for _ in range(2))
        assert _bits(second) == _bits(first), "the second call differs from the first"
        return first
    finally:
        session.close()


def _bits(value: Any) -> Any:
    return tuple(map(_bits, value)) if isinstance(value, tuple) else np.asarray(value).tobytes()
