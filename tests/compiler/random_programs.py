"""Programs that nobody wrote, over every operator and element type: what test_random_programs.py gives to the compiler.

A program grows by recipes. Each picks operands among what is held, or makes parameters, weights and constants that fit, and calls its
operator. What comes of it is computed at once, by the interpreter and for every call that the program will get; whatever deduction or
computation refuses is left out. So a recipe may try anything: it need not know the rules of its operator.

An operator that jumps (a comparison, a rounding, a place of an extreme) takes `exact` operands only: nothing that was rounded by arithmetic
whose order is free, since a last bit would decide.

A new operator: one function here, under `@recipe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from random import Random
from typing import Any

import numpy as np

import compiler.ops
from compiler.interpret.graph import Interpreter, MismatchError, match_value
from compiler.ir.builder import Builder
from compiler.ir.deduce import deduce, type_of
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.graph import (
    Atom,
    Binding,
    Block,
    Body,
    Call,
    CallFunc,
    Constant,
    FuncRef,
    Function,
    MakeTuple,
    ScalarValue,
    ShapeValue,
    TupleGet,
    Value,
    Var,
)
from compiler.ir.module import IRModule
from compiler.ir.op import OPS
from compiler.ir.printer import print_module
from compiler.ir.prove import prove_eq
from compiler.ir.types import ScalarType, ShapeType, TensorType, TupleType, Type, tensor
from compiler.ops.operands import num_elements

assert compiler.ops

BOOL, F32, BF16, I8, U8, I32, I64 = DType.BOOL, DType.F32, DType.BF16, DType.I8, DType.U8, DType.I32, DType.I64
FLOATS = [F32, F32, F32, DType.F16, BF16]  # as often as they shall be drawn
INTEGERS = [d for d in DType if d.is_int]
ANY = [*FLOATS, *DType]
EXTENTS = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256]  # on and beside the edges of vectors and tiles
RANGES = [(0, None, 1), (0, None, 1), (1, None, 1), (1, 256, 1), (2, 64, 1), (0, 128, 16)]  # of variables: least, most, a multiple
MOST_ELEMENTS = 1 << 14  # of one value


class Unfit(Exception):
    """Nothing at hand suits a recipe."""


@dataclass(frozen=True, slots=True)
class Program:
    """`calls`: the arguments of each, weights among them, as `main` of `module` takes them."""

    module: IRModule
    calls: tuple[tuple[Any, ...], ...]

    def inputs(self, call: int) -> tuple[Any, ...]:
        main = self.module.graph("main")
        return self.calls[call][: main.num_inputs]

    @property
    def weights(self) -> dict[str, Any]:
        main = self.module.graph("main")
        return dict(zip([w.name for w in main.weights], self.calls[0][main.num_inputs :], strict=True))

    def __str__(self) -> str:
        sizes = [", ".join(f"{a.dtype}{list(a.shape)}" if isinstance(a, np.ndarray) else str(a) for a in call) for call in self.calls]
        return print_module(self.module) + "".join(f"\n# called with {s}" for s in sizes)


@dataclass(slots=True)
class Draft:
    """A function under way. Of each of the calls that its program will get, it has the sizes and the value of everything."""

    random: Random
    builder: Builder
    sizes: list[dict[DimVar, int]]
    special: bool = False  # infinities and NaN among the arguments
    helpers: tuple[str, ...] = ()
    dims: list[DimVar] = field(init=False)  # of parameters; what a match_cast names comes to `sizes` alone
    params: list[Var] = field(default_factory=list[Var])
    weights: list[Var] | None = field(default_factory=list[Var])  # None: no new parameters
    held: list[Atom] = field(default_factory=list[Atom])  # tensors that a recipe may pick
    values: dict[Atom, list[Any]] = field(default_factory=dict[Atom, list[Any]])
    parts: dict[Var, list[Var]] = field(default_factory=dict[Var, list[Var]])  # of tuples
    exact: set[Atom] = field(default_factory=set[Atom])

    def __post_init__(self) -> None:
        self.dims = list(self.sizes[0])

    def grow(self, count: int) -> None:
        """By so many recipes."""
        for _ in range(count):
            for _ in range(8):
                name = self.one_of(list(RECIPES))
                with suppress(Unfit, AnnotationError, MismatchError, ValueError, IndexError):
                    RECIPES[name](self, name)
                    break

    # --- picking -------------------------------------------------------------------------------------------------------

    def one_of(self, items: Sequence[Any]) -> Any:
        if not items:
            raise Unfit
        return self.random.choice(items)

    def chance(self, part: float) -> bool:
        return self.random.random() < part

    def dim(self) -> Dim:
        """An extent: mostly a variable or a number, sometimes a sum or a product."""
        a, b = (Dim.of(self.one_of(self.dims)) for _ in range(2))
        number = Dim.of(self.one_of(EXTENTS))
        return self.one_of([a, b, a, b, number, number, Dim.of(1), a + b, 2 * a, a + 1, a * b])

    def place(self) -> Dim:
        """Somewhere along an axis, or beyond it."""
        return self.one_of([*map(Dim.of, (0, 1, 2, 5, 16)), self.dim()])

    def shape(self, ndim: int) -> list[Dim]:
        return [self.dim() for _ in range(ndim)]

    def type(self, atom: Atom) -> Any:
        return type_of(atom)

    def axis(self, atom: Atom) -> int:
        ndim = self.type(atom).ndim
        return self.one_of(range(-ndim, ndim))

    def axes(self, atom: Atom) -> list[int]:
        ndim = self.type(atom).ndim
        return [a - self.one_of([0, ndim]) for a in self.random.sample(range(ndim), self.random.randint(0, ndim))]

    def tensor(self, dtypes: Sequence[DType] = ANY, *, ndim: int | None = None, least: int = 0, exact: bool = False) -> Atom:
        """Something held, or else something new, of at least so many axes."""

        def fits(atom: Atom) -> bool:
            type_ = self.type(atom)
            return type_.dtype in dtypes and ndim in (None, type_.ndim) and type_.ndim >= least and (not exact or atom in self.exact)

        found = list(filter(fits, self.held))
        if found and self.chance(0.85):
            return self.one_of(found[-3:] if self.chance(0.8) else found)
        return self.new(self.shape(self.one_of(range(least, 4)) if ndim is None else ndim), self.one_of(dtypes))

    def like(self, atom: Atom, *, exact: bool = False) -> Atom:
        """Something to put beside it: it broadcasts, whatever the sizes are."""
        type_ = self.type(atom)
        if self.chance(0.25):
            return self.scalar(type_.dtype)

        def fits(other: Atom) -> bool:
            given = self.type(other)
            alike = given.dtype is type_.dtype and (not exact or other in self.exact)
            return alike and (broadcasts(given.shape, type_.shape) or broadcasts(type_.shape, given.shape))

        found = list(filter(fits, self.held))
        if found and self.chance(0.7):
            return self.one_of(found)
        inner = type_.shape[self.random.randint(0, len(type_.shape)) :]
        return self.new([d if self.chance(0.8) else Dim.of(1) for d in inner], type_.dtype)

    def scalar(self, dtype: DType) -> Atom:
        """A number, a dimension, or a parameter."""
        if dtype is BOOL:
            return ScalarValue(self.chance(0.5), BOOL)
        if not dtype.is_float:
            return ScalarValue(self.one_of([*map(Dim.of, (0, 1, 2, 3, 7, 100)), self.dim()]))
        if self.weights is not None and self.chance(0.3):
            return self.param(ScalarType(F32), [float(np.float32(self.random.gauss(0, 2))) for _ in self.sizes])
        return ScalarValue(self.one_of([0.0, 1.0, -1.5, 0.3, 2.0, 7.0]), F32)

    # --- new operands --------------------------------------------------------------------------------------------------

    def new(self, shape: Sequence[Dim], dtype: DType, make: Callable[[tuple[int, ...]], Any] | None = None) -> Atom:
        """A parameter; where the shape is of numbers, maybe a weight or a constant."""
        extents = [tuple(d.evaluate(sizes) for d in shape) for sizes in self.sizes]
        if max(map(prod, extents)) > MOST_ELEMENTS or any(v not in self.dims for d in shape for v in d.vars()):
            raise Unfit
        arrays = [np.asarray(make(e) if make else self.array(e, dtype)).astype(dtype.numpy) for e in extents]
        type_, fixed = tensor(tuple(shape), dtype), all(d.is_const for d in shape)
        if fixed and self.chance(0.2):
            atom: Atom = Constant(arrays[0])
        elif self.weights is None:
            raise Unfit
        elif fixed and self.chance(0.5):
            atom = Var(f"w{len(self.weights)}", type_)
            self.weights.append(atom)
        else:
            atom = self.param(type_, arrays)
        self.hold(atom, arrays if atom in self.params else arrays[:1] * len(arrays), exact=True)
        return atom

    def param(self, type_: Type, values: list[Any]) -> Var:
        var = Var(f"x{len(self.params)}", type_)
        self.params.append(var)
        self.values[var] = values
        return var

    def array(self, shape: tuple[int, ...], dtype: DType) -> Any:
        numbers = np.random.default_rng(self.random.getrandbits(32))
        if not dtype.is_float:
            low, high = dtype.ends if dtype is BOOL or self.chance(0.3) else (0 if dtype.is_unsigned else -5, 5)
            return numbers.integers(low, high, shape, np.int64, endpoint=True)
        found = numbers.normal(size=shape) * self.one_of([1, 1, 1, 0.01, 30])
        if self.special:
            odd = numbers.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40], shape)
            found = np.where(numbers.random(shape) < self.one_of([0, 0.02, 0.3]), odd, found)
        with np.errstate(over="ignore"):
            return found.astype(dtype.numpy)

    # --- bindings ------------------------------------------------------------------------------------------------------

    def call(self, op: str, *args: Atom, **attrs: Any) -> Var:
        return self.emit(Call(OPS[op], args, attrs), args, exact=op in EXACT)

    def emit(self, value: Value, args: Sequence[Atom], *, exact: bool = False) -> Var:
        type_ = deduce(value, self.builder.signature, set(self.sizes[0]))
        if any(prod(d.evaluate(sizes) for d in shape) > MOST_ELEMENTS for sizes in self.sizes for shape in shapes_of(type_)):
            raise Unfit
        results = [self.computed(value, type_, args, call) for call in range(len(self.sizes))]
        var = self.builder.emit(value)
        self.hold(var, results, exact=exact and all(a in self.exact for a in args if isinstance(self.type(a), TensorType)))
        return var

    def name_sizes(self, var: Var, type_: Type) -> Var:
        """What only the data knew gets names."""
        results = self.values[var]
        for sizes, result in zip(self.sizes, results, strict=True):
            match_value(type_, result, sizes, "match_cast")
        cast = self.builder.match_cast(var, type_)
        self.hold(cast, results, exact=var in self.exact)
        return cast

    def hold(self, atom: Atom, results: list[Any], *, exact: bool) -> None:
        type_ = self.type(atom)
        self.values[atom] = results
        if isinstance(type_, TupleType):
            self.parts[atom] = [self.builder.emit(TupleGet(atom, i)) for i in range(len(type_.fields))]
            for i, part in enumerate(self.parts[atom]):
                self.hold(part, [r[i] for r in results], exact=exact)
        if isinstance(type_, TensorType) and type_.shape is not None:
            self.held.append(atom)
        if exact or (isinstance(type_, TensorType) and type_.dtype is not None and not type_.dtype.is_float):
            self.exact.add(atom)

    def computed(self, value: Value, type_: Type, args: Sequence[Atom], call: int) -> Any:
        """By a function of its own, whose parameters are the operands and the variables."""
        sizes, given = self.sizes[call], [a for a in dict.fromkeys(args) if isinstance(a, Var)]
        everything = Var("sizes", ShapeType(tuple(map(Dim.of, sizes))))
        result = Var("result", type_)
        func = Function((*given, everything), Body((Block((Binding(result, value),)),), result), type_)
        arguments = [self.values[a][call] for a in given]
        found = Interpreter(self.builder.finish().update({"": func})).call("", *arguments, tuple(sizes.values()))
        match_value(type_, found, dict(sizes), "result")
        return found


def shapes_of(type_: Type) -> Iterator[Sequence[Dim]]:
    """Those that are known of the tensors in it."""
    match type_:
        case TensorType(shape=shape) if shape is not None:
            yield shape
        case TupleType(fields=fields):
            for inner in fields:
                yield from shapes_of(inner)
        case _:
            return


def draw(seed: int, recipes: int = 8, *, special: bool = False, calls: int = 3) -> Program:
    """The program of this number."""
    random = Random(seed)
    builder = Builder()
    helpers = tuple(_helper(random, builder) for _ in range(random.randint(0, 1)))
    dims = [DimVar(name, *random.choice(RANGES)) for name in "nmk"[: random.randint(1, 3)]]
    sizes = [{v: _size(v, random, small=call % 2 == 0) for v in dims} for call in range(calls)]
    draft = Draft(random, builder, sizes, special, helpers)
    with builder.function("main", draft.params):
        for var in dims:
            draft.new([Dim.of(var)], random.choice(ANY))
        draft.grow(recipes)
        results = [a for a in draft.held if isinstance(a, Var)]
        chosen = [*results[-3:], *random.sample(results, min(2, len(results)))]
        builder.returns(builder.emit(MakeTuple(tuple(chosen))))
    module = builder.finish()
    main = replace(module.graph("main"), params=(*draft.params, *draft.weights), num_inputs=len(draft.params))
    arguments = tuple(tuple(draft.values[p][call] for p in main.params) for call in range(calls))
    return Program(module.update({"main": main}), arguments)


def _size(var: DimVar, random: Random, *, small: bool) -> int:
    most = min(5 if small else 256, var.upper if isinstance(var.upper, int) else 256)
    fit = [n for n in EXTENTS if var.lower <= n <= max(most, var.multiple_of) and n % var.multiple_of == 0]
    return random.choice(fit)


def _helper(random: Random, builder: Builder) -> str:
    """A function to be called; it is tried with one size, and where another does not fit it will not be called."""
    a, b = DimVar("a"), DimVar("b", 1)
    draft = Draft(random, builder, [{a: 3, b: 5}], weights=None)
    with builder.function("helper", draft.params):
        x = draft.param(tensor((a, b), F32), [draft.array((3, 5), F32)])
        draft.hold(x, draft.values[x], exact=False)
        draft.grow(3)
        builder.returns(draft.held[-1])
    return "helper"


def broadcasts(small: Sequence[Dim], large: Sequence[Dim]) -> bool:
    """Whether the one provably stretches to the other."""
    behind = large[len(large) - len(small) :] if len(small) <= len(large) else ()
    return len(small) == len(behind) and all(prove_eq(s, d) or prove_eq(s, 1) for s, d in zip(small, behind, strict=True))


# --- recipes: one per operator, or one for several of a kind -------------------------------------------------------------

Recipe = Callable[[Draft, str], Any]
RECIPES: dict[str, Recipe] = {}
EXACT: set[str] = set()


def recipe(names: str, *, exact: bool = False) -> Callable[[Recipe], Recipe]:
    """`exact`: of exact operands comes one right result, as when elements are moved or chosen."""

    def add(make: Recipe) -> Recipe:
        RECIPES.update(dict.fromkeys(names.split(), make))
        EXACT.update(names.split() if exact else ())
        return make

    return add


@recipe("exp log sqrt rsqrt tanh erf sin cos sigmoid silu gelu gelu_tanh softmax log_softmax")
def _of_floats(draft: Draft, op: str) -> None:
    draft.call(op, draft.tensor(FLOATS))


@recipe("floor round", exact=True)
def _to_whole(draft: Draft, op: str) -> None:
    draft.call(op, draft.tensor(FLOATS, exact=True))


@recipe("negative abs relu", exact=True)
def _of_numbers(draft: Draft, op: str) -> None:
    draft.call(op, draft.tensor([*FLOATS, *INTEGERS]))


@recipe("logical_not")
def _inverted(draft: Draft, op: str) -> None:
    draft.call(op, draft.tensor([BOOL, *INTEGERS]))


def _pair(draft: Draft, op: str, dtypes: Sequence[DType], *, exact: bool = False) -> None:
    a = draft.tensor(dtypes, exact=exact)
    pair = [a, draft.like(a, exact=exact)]
    draft.random.shuffle(pair)
    draft.call(op, *pair)


@recipe("minimum maximum", exact=True)
@recipe("add subtract multiply")
def _arithmetic(draft: Draft, op: str) -> None:
    _pair(draft, op, [*FLOATS, *FLOATS, *INTEGERS])


@recipe("divide power")
def _quotient(draft: Draft, op: str) -> None:
    _pair(draft, op, FLOATS)


@recipe("floor_divide modulo")
def _whole_quotient(draft: Draft, op: str) -> None:
    _pair(draft, op, INTEGERS)


@recipe("logical_and logical_or logical_xor")
def _bits(draft: Draft, op: str) -> None:
    _pair(draft, op, [BOOL, BOOL, BOOL, *INTEGERS])


@recipe("less less_equal greater greater_equal")
def _order(draft: Draft, op: str) -> None:
    _pair(draft, op, [*FLOATS, *INTEGERS], exact=True)


@recipe("equal not_equal")
def _equality(draft: Draft, op: str) -> None:
    _pair(draft, op, list(DType), exact=True)


@recipe("clip", exact=True)
def _clip(draft: Draft, op: str) -> None:
    x = draft.tensor([*FLOATS, *INTEGERS])
    draft.call(op, x, draft.like(x), draft.like(x))


@recipe("where", exact=True)
def _where(draft: Draft, op: str) -> None:
    a = draft.tensor()
    shape = draft.type(a).shape
    conditions = [c for c in draft.held if draft.type(c).dtype is BOOL and broadcasts(draft.type(c).shape, shape)]
    draft.call(op, draft.one_of(conditions) if conditions else draft.new(shape, BOOL), a, draft.like(a))


@recipe("cast", exact=True)
def _cast(draft: Draft, op: str) -> None:
    dtype = draft.one_of([*FLOATS, *DType])
    draft.call(op, draft.tensor(exact=not dtype.is_float), dtype=str(dtype))


@recipe("max min", exact=True)
@recipe("sum prod mean")
def _fold(draft: Draft, op: str) -> None:
    x = draft.tensor(FLOATS if op == "mean" else [*FLOATS, *INTEGERS])
    draft.call(op, x, axes=draft.one_of([None, [-1], draft.axes(x)]), keepdims=draft.chance(0.4))


@recipe("any all")
def _fold_bools(draft: Draft, op: str) -> None:
    x = draft.tensor([BOOL])
    draft.call(op, x, axes=draft.one_of([None, draft.axes(x)]), keepdims=draft.chance(0.4))


@recipe("argmax argmin")
def _place(draft: Draft, op: str) -> None:
    x = draft.tensor([*FLOATS, *INTEGERS], least=1, exact=True)
    draft.call(op, x, axis=draft.axis(x), keepdims=draft.chance(0.4))


@recipe("cumsum")
def _cumsum(draft: Draft, op: str) -> None:
    x = draft.tensor([*FLOATS, *INTEGERS], least=1)
    draft.call(op, x, axis=draft.axis(x))


@recipe("sort argsort", exact=True)
def _sort(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1, exact=True)
    draft.call(op, x, axis=draft.axis(x), descending=draft.chance(0.5))


@recipe("top_k", exact=True)
def _top_k(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1, exact=True)
    axis = draft.axis(x)
    k = draft.one_of([0, 1, 3, draft.type(x).shape[axis]])
    draft.call(op, x, k=k, axis=axis, largest=draft.chance(0.5))


@recipe("reshape", exact=True)
def _reshape(draft: Draft, op: str) -> None:
    x = draft.tensor()
    shape = list(draft.type(x).shape)
    whole = num_elements(shape)
    choices = [[whole], [*shape[:-2], num_elements(shape[-2:])], [Dim.of(1), *shape], [whole, Dim.of(1)]]
    if shape:
        choices.append([*shape[:-1], shape[-1] // 2, Dim.of(2)])
    draft.call(op, x, ShapeValue(tuple(draft.one_of(choices))))


@recipe("expand_dims", exact=True)
def _expand_dims(draft: Draft, op: str) -> None:
    x = draft.tensor()
    draft.call(op, x, axes=[draft.random.randint(0, draft.type(x).ndim)])


@recipe("squeeze", exact=True)
def _squeeze(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1)
    draft.call(op, x, axes=[i for i, d in enumerate(draft.type(x).shape) if prove_eq(d, 1)])


@recipe("broadcast_to", exact=True)
def _broadcast_to(draft: Draft, op: str) -> None:
    x = draft.tensor()
    shape = [draft.dim() if prove_eq(d, 1) else d for d in draft.type(x).shape]
    draft.call(op, x, ShapeValue((*draft.shape(draft.one_of([0, 0, 1])), *shape)))


@recipe("permute_dims", exact=True)
def _permute_dims(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1)
    draft.call(op, x, axes=draft.one_of([None, draft.random.sample(range(draft.type(x).ndim), draft.type(x).ndim)]))


@recipe("flip", exact=True)
def _flip(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1)
    draft.call(op, x, axes=draft.axes(x))


@recipe("slice", exact=True)
def _slice(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1)
    draft.call(op, x, axis=draft.axis(x), begin=draft.place(), end=draft.one_of([None, draft.place()]), stride=draft.one_of([1, 1, 2, 3]))


@recipe("split", exact=True)
def _split(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1)
    axis = draft.axis(x)
    whole, part = draft.type(x).shape[axis], draft.place()
    draft.call(op, x, axis=axis, sizes=draft.one_of([[part, whole - part], [whole], [whole // 2, whole - whole // 2], [0, 1, whole - 1]]))


@recipe("concat stack", exact=True)
def _join(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1)
    others = [a for a in draft.held if draft.type(a).dtype is draft.type(x).dtype and draft.type(a).ndim == draft.type(x).ndim]
    parts = [x, *(draft.one_of(others) for _ in range(draft.random.randint(0, 2)))]
    draft.random.shuffle(parts)
    draft.call(op, *parts, axis=draft.axis(x))


@recipe("full", exact=True)
def _full(draft: Draft, op: str) -> None:
    dtype = draft.one_of(list(DType))
    draft.call(op, ShapeValue(tuple(draft.shape(draft.one_of(range(4))))), draft.scalar(dtype), dtype=str(dtype))


@recipe("arange", exact=True)
def _arange(draft: Draft, op: str) -> None:
    dtype = draft.one_of([I64, I64, I32, F32, I8, BF16])
    draft.call(op, start=draft.one_of([0, 3, -5]), stop=draft.dim(), step=draft.one_of([1, 1, 2, 5]), dtype=str(dtype))


@recipe("uniform", exact=True)
def _uniform(draft: Draft, op: str) -> None:
    draft.call(op, ShapeValue(tuple(draft.shape(draft.one_of(range(4))))), draft.scalar(I64))


@recipe("shape_of shape_to_tensor")
def _shape_to_tensor(draft: Draft, op: str) -> None:
    draft.call(
        "shape_to_tensor",
        draft.call("shape_of", draft.tensor()) if op == "shape_of" else ShapeValue(tuple(draft.shape(draft.one_of(range(4))))),
    )


@recipe("pad", exact=True)
def _pad(draft: Draft, op: str) -> None:
    x = draft.tensor()
    before, after = ([draft.one_of([0, 0, 1, 3, draft.place()]) for _ in draft.type(x).shape] for _ in range(2))
    draft.call(op, x, before=before, after=after, value=draft.one_of([0, 1]))


@recipe("tril triu", exact=True)
def _triangle(draft: Draft, op: str) -> None:
    draft.call(op, draft.tensor(least=2), k=draft.one_of([0, 1, -1, 20, draft.place()]))


@recipe("take", exact=True)
def _take(draft: Draft, op: str) -> None:
    x, indices = draft.tensor(least=1), draft.tensor([I32, I64, I8, U8], exact=True)
    draft.call(op, x, indices, axis=draft.axis(x))


@recipe("gather scatter", exact=True)
def _gather(draft: Draft, op: str) -> None:
    x = draft.tensor(least=1)
    axis = draft.axis(x)
    shape = list(draft.type(x).shape)
    shape[axis] = draft.dim()
    indices = draft.new(shape, draft.one_of([I32, I64]))
    draft.call(op, x, indices, *([] if op == "gather" else [draft.new(shape, draft.type(x).dtype)]), axis=axis)


@recipe("embedding", exact=True)
def _embedding(draft: Draft, op: str) -> None:
    draft.call(op, draft.tensor(ndim=2), draft.tensor([I32, I64, U8], exact=True))


@recipe("linear")
def _linear(draft: Draft, op: str) -> None:
    x = draft.tensor(FLOATS, least=1)
    size = draft.one_of([Dim.of(draft.one_of(EXTENTS)), draft.dim()])
    w = draft.new((size, draft.type(x).shape[-1]), draft.one_of([draft.type(x).dtype, *FLOATS]))
    bias = [draft.new((size,), draft.one_of([F32, draft.type(x).dtype]))] if draft.chance(0.3) else []
    out = draft.one_of([None, None, "f32", "bf16"])
    draft.call(op, x, w, *bias, out_dtype=out, tolerates=draft.one_of([None, "bf16"]))


@recipe("matmul")
def _matmul(draft: Draft, op: str) -> None:
    a = draft.tensor([*FLOATS, *FLOATS, I8, I32], least=2)
    *batch, m, k = draft.type(a).shape
    flips = draft.chance(0.3), draft.chance(0.3)
    matrix = [m if flips[0] else k, draft.dim()]
    b = draft.new([*batch, *(reversed(matrix) if flips[1] else matrix)], draft.type(a).dtype)
    draft.call(op, a, b, transpose_a=flips[0], transpose_b=flips[1])


@recipe("rms_norm")
def _rms_norm(draft: Draft, op: str) -> None:
    x = draft.tensor(FLOATS, least=1)
    draft.call(op, x, draft.new(draft.type(x).shape[-1:], draft.one_of(FLOATS)), eps=1e-5, weight_offset=draft.one_of([0.0, 1.0]))


@recipe("layer_norm")
def _layer_norm(draft: Draft, op: str) -> None:
    x = draft.tensor(FLOATS, least=1)
    draft.call(op, x, *(draft.new(draft.type(x).shape[-1:], draft.one_of(FLOATS)) for _ in range(draft.random.randint(1, 2))), eps=1e-5)


@recipe("quantize")
def _quantize(draft: Draft, op: str) -> None:
    x = draft.tensor(FLOATS, least=1, exact=True)
    attrs = {"bits": draft.one_of([8, 4]), "group": draft.one_of([0, 0, 2, 16, 32])}
    made = draft.call(op, x, symmetric=draft.chance(0.6), dtype=str(draft.one_of(FLOATS)), **attrs)
    draft.call("dequantize", *draft.parts[made], dtype=str(draft.one_of(FLOATS)), **attrs)


@recipe("dequantize")
def _product_of_integers(draft: Draft, op: str) -> None:
    """What machines that multiply bytes compute in their own way, of finite numbers."""
    if draft.special:
        raise Unfit
    x = draft.tensor([F32, F32, BF16], least=1)
    length, size = Dim.of(draft.one_of([4, 32, 64, 96, 512])), Dim.of(draft.one_of([1, 15, 16, 33, 64]))
    if not prove_eq(draft.type(x).shape[-1], length):
        x = draft.new([*draft.shape(draft.one_of([0, 1, 1, 2])), length], draft.one_of([F32, F32, BF16]))
    bits, group = draft.one_of([8, 4]), draft.one_of([0, 0, 32, 64, 16])
    q = draft.new((size, length * bits // 8), I8 if bits == 8 else U8)
    scales = (size, length // group if group else Dim.of(1))
    scale = draft.new(scales, draft.one_of([F32, DType.F16]), lambda extents: 0.01 + np.abs(draft.array(extents, F32)) * 0.01)
    zero = [draft.new(scales, draft.type(q).dtype)] if draft.chance(0.2) else []
    w = draft.call(op, q, scale, *zero, bits=bits, group=group, dtype=str(draft.one_of([F32, BF16])))
    draft.call("linear", x, w, out_dtype=draft.one_of([None, "f32"]))


@recipe("attention")
def _attention(draft: Draft, op: str) -> None:
    batch, queries, keys = draft.one_of([Dim.of(1), Dim.of(2)]), draft.dim(), draft.dim()
    heads, each, size, dtype = draft.one_of([1, 2]), draft.one_of([1, 2, 4]), draft.one_of([1, 8, 16, 20]), draft.one_of(FLOATS)
    q = draft.new((batch, Dim.of(heads * each), queries, Dim.of(size)), dtype)
    k, v = (draft.new((batch, Dim.of(heads), keys, Dim.of(size)), dtype) for _ in range(2))
    mask = [draft.new((queries, keys), draft.one_of([BOOL, F32]))] if draft.chance(0.4) else []
    attrs = {"causal": draft.chance(0.5), "window": draft.one_of([0, 0, 3]), "softcap": draft.one_of([0.0, 0.0, 5.0])}
    draft.call(op, q, k, v, *mask, scale=0.3, **attrs)


@recipe("rope_angles rope")
def _rope(draft: Draft, op: str) -> None:
    tokens, pairs = draft.dim(), draft.one_of([1, 4, 8])
    x = draft.new((tokens, Dim.of(draft.one_of([1, 3])), Dim.of(2 * pairs + draft.one_of([0, 0, 3]))), draft.one_of(FLOATS))
    positions = draft.new((tokens,), draft.one_of([I32, I64]), lambda extents: np.abs(draft.array(extents, I8)))
    angles = draft.call("rope_angles", positions, draft.new((Dim.of(pairs),), F32), scale=draft.one_of([1.0, 0.7]))
    draft.call("rope", x, *draft.parts[angles], interleaved=draft.chance(0.5))


@recipe("unique nonzero", exact=True)
def _counted_by_data(draft: Draft, op: str) -> None:
    x = draft.tensor(exact=True, least=1)
    count = DimVar(f"c{len(draft.sizes[0])}")
    shape = [count] if op == "unique" else [Dim.of(draft.type(x).ndim), count]
    found = draft.call(op, x)
    draft.name_sizes(found, tensor(shape, found.type.dtype))


@recipe("tensor_to_shape")
def _sized_by_data(draft: Draft, op: str) -> None:
    x = draft.new((Dim.of(2),), I64, lambda _: [draft.random.randint(0, 40), draft.random.randint(0, 40)])
    shape = tuple(Dim.of(DimVar(f"{name}{len(draft.sizes[0])}")) for name in "ab")
    draft.name_sizes(draft.call(op, x), ShapeType(shape))
    draft.call("full", ShapeValue(shape), draft.scalar(F32), dtype="f32")


@recipe("@tuple")
def _tuple(draft: Draft, _: str) -> None:
    parts = [draft.tensor(), draft.tensor()]
    draft.emit(MakeTuple(tuple(parts)), parts, exact=True)


@recipe("@call")
def _call(draft: Draft, _: str) -> None:
    x = draft.tensor([F32], ndim=2)
    draft.emit(CallFunc(FuncRef(draft.one_of(draft.helpers)), (x,)), [x])
