"""Random programs over every operator and element type, for test_random_programs.py.

A program grows by recipes. A recipe picks operands among the values that the program already computes, or makes fitting parameters, weights
and constants, and calls its operator. The interpreter computes each result at once, for every call that the program will get. If the
operator's deduction or the interpreter refuses an attempt, the attempt is dropped, so a recipe need not know the rules of its operator.

A discontinuous operator (comparison, rounding, argmax) takes only `exact` operands. These involve no arithmetic whose order is free;
otherwise the last bit could decide the result.

The recipes are in recipes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from random import Random
from typing import Any

import numpy as np

import compiler.ops
from compiler.interpret.graph import Interpreter, MismatchError, match_value
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.graph.atoms import Atom, Constant, ScalarValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import deduce, type_of
from compiler.ir.graph.function import Binding, Block, BlockKind, Body, Function, Value
from compiler.ir.graph.values import Call, MakeTuple, TupleGet
from compiler.ir.module import IRModule
from compiler.ir.op import OPS
from compiler.ir.prove import prove_eq
from compiler.ir.text.printer import print_module
from compiler.ir.types import ScalarType, ShapeType, TensorType, TupleType, Type, tensor

assert compiler.ops

BOOL, F32, BF16, I8, U8, I32, I64 = DType.BOOL, DType.F32, DType.BF16, DType.I8, DType.U8, DType.I32, DType.I64
FLOATS = [F32, F32, F32, DType.F16, BF16]  # F32 is repeated, so that it is drawn more often
INTEGERS = [d for d in DType if d.is_int]
ANY = [*FLOATS, *DType]
# sizes at and near the boundaries of vectors and tiles
EXTENTS = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256]
# (lower bound, upper bound, divisor) of a dimension variable.
RANGES = [(0, None, 1), (0, None, 1), (1, None, 1), (1, 256, 1), (2, 64, 1), (0, 128, 16)]
MOST_ELEMENTS = 1 << 14  # largest number of elements of a value


Recipe = Callable[["Draft", str], None]
RECIPES: dict[str, Recipe] = {}
EXACT: set[str] = set()


def recipe(names: str, *, exact: bool = False) -> Callable[[Recipe], Recipe]:
    """Register a recipe for the named operators. `exact` says that results are exact if all operands are exact, as when elements are only
    moved or chosen."""

    def add(make: Recipe) -> Recipe:
        RECIPES.update(dict.fromkeys(names.split(), make))
        EXACT.update(names.split() if exact else ())
        return make

    return add


class Unfit(Exception):
    """A recipe found no fitting operands."""


@dataclass(frozen=True, slots=True)
class Program:
    """A random program. `calls` holds, for each call of `main`, its inputs followed by its weights."""

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
    """A random function under construction. For each call that the program will get, it stores the sizes of dimensions and the values of
    all atoms."""

    random: Random
    builder: Builder
    sizes: list[dict[DimVar, int]]
    special: bool = False  # arguments may contain infinities and NaN
    halves: bool = True  # values may be f16, which some targets refuse
    helpers: tuple[str, ...] = ()
    dims: list[DimVar] = field(init=False)  # dimensions of parameters; dimensions that a match_cast names are only in `sizes`
    params: list[Var] = field(default_factory=list[Var])
    weights: list[Var] | None = field(default_factory=list[Var])  # None: neither weights nor parameters may be added, only constants
    held: list[Atom] = field(default_factory=list[Atom])  # tensors that a recipe may pick as operands
    values: dict[Atom, list[Any]] = field(default_factory=dict[Atom, list[Any]])
    parts: dict[Var, list[Var]] = field(default_factory=dict[Var, list[Var]])  # tuple -> its fields
    exact: set[Atom] = field(default_factory=set[Atom])

    def __post_init__(self) -> None:
        self.dims = list(self.sizes[0])

    def grow(self, count: int) -> None:
        """Apply up to `count` random recipes. Each time, draw recipes until one can be applied, at most eight."""
        for _ in range(count):
            for _ in range(8):
                name = self.one_of(list(RECIPES))
                with suppress(Unfit, AnnotationError, MismatchError, ValueError, IndexError):
                    RECIPES[name](self, name)
                    break

    # --- drawing operands, extents and axes ----------------------------------------------------------------------------

    def one_of(self, items: Sequence[Any]) -> Any:
        if not items:
            raise Unfit
        return self.random.choice(items)

    def chance(self, part: float) -> bool:
        return self.random.random() < part

    def dim(self) -> Dim:
        """Draw an extent: mostly a variable or a number, sometimes a sum or a product."""
        a, b = (Dim.of(self.one_of(self.dims)) for _ in range(2))
        number = Dim.of(self.one_of(EXTENTS))
        return self.one_of([a, b, a, b, number, number, Dim.of(1), a + b, 2 * a, a + 1, a * b])

    def place(self) -> Dim:
        """Draw a position on an axis. The position may lie past the end of the axis."""
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
        """Return a tensor that the function already has, or a new one, with at least `least` axes."""

        def fits(atom: Atom) -> bool:
            type_ = self.type(atom)
            return type_.dtype in dtypes and ndim in (None, type_.ndim) and type_.ndim >= least and (not exact or atom in self.exact)

        found = list(filter(fits, self.held))
        if found and self.chance(0.85):
            return self.one_of(found[-3:] if self.chance(0.8) else found)
        return self.new(self.shape(self.one_of(range(least, 4)) if ndim is None else ndim), self.one_of(dtypes))

    def like(self, atom: Atom, *, exact: bool = False) -> Atom:
        """Return an operand that provably broadcasts with `atom`."""
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
        """Draw a scalar: a number, a dimension, or a parameter."""
        if dtype is BOOL:
            return ScalarValue(self.chance(0.5), BOOL)
        if not dtype.is_float:
            return ScalarValue(self.one_of([*map(Dim.of, (0, 1, 2, 3, 7, 100)), self.dim()]))
        if self.weights is not None and self.chance(0.3):
            return self.param(ScalarType(F32), [float(np.float32(self.random.gauss(0, 2))) for _ in self.sizes])
        return ScalarValue(self.one_of([0.0, 1.0, -1.5, 0.3, 2.0, 7.0]), F32)

    # --- new operands --------------------------------------------------------------------------------------------------

    def new(self, shape: Sequence[Dim], dtype: DType, make: Callable[[tuple[int, ...]], Any] | None = None) -> Atom:
        """Return a new parameter. If its shape has no variables, it may be a weight or a constant."""
        self.require_supported([dtype])
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
        self.require_supported(dtypes_of(type_))
        if any(prod(d.evaluate(sizes) for d in shape) > MOST_ELEMENTS for sizes in self.sizes for shape in shapes_of(type_)):
            raise Unfit
        results = [self.computed(value, type_, args, call) for call in range(len(self.sizes))]
        var = self.builder.emit(value)
        self.hold(var, results, exact=exact and all(a in self.exact for a in args if isinstance(self.type(a), TensorType)))
        return var

    def require_supported(self, dtypes: Iterable[DType | None]) -> None:
        if not self.halves and DType.F16 in dtypes:
            raise Unfit

    def require_few_elements(self, helper: str, x: Var) -> None:
        """Raise Unfit if calling the helper with `x` would compute a value with too many elements. When the helper was made, its
        operands had other sizes, with which its values were small enough."""
        func = self.builder.finish().graph_functions[helper]
        for value in self.values[x]:
            sizes: dict[DimVar, int] = {}
            match_value(func.params[0].type, value, sizes, "call")
            for shape in (s for b in func.body.bindings for s in shapes_of(b.var.type)):
                known = all(v in sizes for d in shape for v in d.vars())
                if known and prod(d.evaluate(sizes) for d in shape) > MOST_ELEMENTS:
                    raise Unfit

    def name_sizes(self, var: Var, type_: Type) -> Var:
        """Emit a match_cast that names those extents of a tensor that depend on data."""
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
        """Evaluate a binding with the interpreter for the call with index `call`. The interpreter runs a function whose parameters are the
        operands and the sizes."""
        sizes, given = self.sizes[call], [a for a in dict.fromkeys(args) if isinstance(a, Var)]
        everything = Var("sizes", ShapeType(tuple(map(Dim.of, sizes))))
        result = Var("result", type_)
        func = Function((*given, everything), Body((Block((Binding(result, value),)),), result), type_)
        arguments = [self.values[a][call] for a in given]
        found = Interpreter(self.builder.finish().update({"": func})).call("", *arguments, tuple(sizes.values()))
        match_value(type_, found, dict(sizes), "result")
        return found


def shapes_of(type_: Type) -> Iterator[Sequence[Dim]]:
    """Yield the known shapes of the tensors in a type."""
    match type_:
        case TensorType(shape=shape) if shape is not None:
            yield shape
        case TupleType(fields=fields):
            for inner in fields:
                yield from shapes_of(inner)
        case _:
            return


def dtypes_of(type_: Type) -> Iterator[DType | None]:
    match type_:
        case TensorType(dtype=dtype):
            yield dtype
        case TupleType(fields=fields):
            for inner in fields:
                yield from dtypes_of(inner)
        case _:
            return


def draw(seed: int, recipes: int = 8, *, special: bool = False, calls: int = 3, halves: bool = True) -> Program:
    """Draw the random program with the number `seed`."""
    random = Random(seed)
    builder = Builder()
    helpers = tuple(_helper(random, builder, halves=halves) for _ in range(random.randint(0, 1)))
    dims = [DimVar(name, *random.choice(RANGES)) for name in "nmk"[: random.randint(1, 3)]]
    sizes = [{v: _size(v, random, small=call % 2 == 0) for v in dims} for call in range(calls)]
    draft = Draft(random, builder, sizes, special, halves, helpers)
    with builder.function("main", draft.params):
        for var in dims:
            draft.new([Dim.of(var)], random.choice(ANY if halves else [dtype for dtype in ANY if dtype is not DType.F16]))
        with builder.block(BlockKind.DATAFLOW if seed % 4 else BlockKind.PLAIN):  # only calls in dataflow blocks are fused
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


def _helper(random: Random, builder: Builder, *, halves: bool) -> str:
    """Add a function that `main` may call. Its random body is known to work with operands of one size. If the interpreter refuses a call
    with operands of another size, `main` does not get this call."""
    a, b = DimVar("a"), DimVar("b", 1)
    draft = Draft(random, builder, [{a: 3, b: 5}], halves=halves, weights=None)
    with builder.function("helper", draft.params):
        x = draft.param(tensor((a, b), F32), [draft.array((3, 5), F32)])
        draft.hold(x, draft.values[x], exact=False)
        draft.grow(3)
        builder.returns(draft.held[-1])
    return "helper"


def broadcasts(small: Sequence[Dim], large: Sequence[Dim]) -> bool:
    """Return whether a tensor of shape `small` provably broadcasts to `large`."""
    behind = large[len(large) - len(small) :] if len(small) <= len(large) else ()
    return len(small) == len(behind) and all(prove_eq(s, d) or prove_eq(s, 1) for s, d in zip(small, behind, strict=True))
