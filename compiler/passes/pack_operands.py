"""Pack the right operands of products in the order in which their tiles read them.

Before: a product reads `w[n, r]` or `w[r, n]`, where n is the column and r the index along the contracted axis. After: it reads `p[n // C,
r, n % C]`, panels of C columns in which the C numbers of one r are adjacent, and a packing function precedes it in the graph. A product of
pairs of bf16 reads `p[n // C, r // 2, n % C * 2 + r % 2]` instead, or the layout of its tile's format. If a tile reads numbers with scales,
numbers and scales are packed separately. Packing of weights moves to load time; packing of activations is a parallel stage before the
product. The product multiplies the same numbers, and adds the results in the same order. A variable that only the shape of a packed operand
defined becomes a parameter. A product stays as it is if it already has a schedule, if no option below has a tile or panel for it, or if a
right operand is no variable of known shape.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial

from compiler.idioms.product import Product, product_in
from compiler.idioms.scaled import scaled_numbers, stored_number
from compiler.ir.dims import Dim, DimVar, ceil_div
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, ScalarValue, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Binding, Value
from compiler.ir.graph.values import CallTir
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Cast, Contraction, Load, Scalar
from compiler.ir.loops.visit import fresh_prim, loads, map_scalars, replace_loads
from compiler.ir.loops.write import Kernel, cast, guard
from compiler.ir.module import IRModule
from compiler.ir.prove import prove_divisible
from compiler.ir.subsume import unify
from compiler.ir.types import TensorType, Type
from compiler.machine.formats import I32, Elements, IntegerFragments, Ordered
from compiler.machine.products import ProductTile
from compiler.ops.products.quantize import half_byte
from compiler.passes.outline import Outliner
from compiler.passes.rewrite import rewrite_module


@dataclass(frozen=True, slots=True)
class PackOperands:
    columns: int  # number of columns of a panel, unless the panel's format defines this number
    pairs: tuple[ProductTile, ...] = ()  # tiles that multiply bf16, the best first
    scaled: tuple[ProductTile, ...] = ()  # tiles that multiply rows of bf16 by numbers with scales, the best first
    others: bool = True  # also pack the operands of all other products

    def __call__(self, module: IRModule) -> IRModule:
        plans = {name: _plan(prim, self) for name, prim in module.prim_functions.items()}
        outliners: list[Outliner] = []
        known: dict[Hashable, tuple[str, list[CallTir]]] = {}  # the packed product and the packing calls of each distinct call

        def rewritten(builder: Builder, binding: Binding, value: Value) -> Value | None:
            if not isinstance(value, CallTir) or not plans.get(value.func):
                return None
            if not outliners:
                outliners.append(Outliner(builder, module))
            return self._pack(builder, outliners[0], module.prim(value.func), value, plans[value.func], known)

        return rewrite_module(module, rewritten)

    def _pack(
        self,
        builder: Builder,
        outliner: Outliner,
        prim: PrimFunc,
        call: CallTir,
        plan: list[_Packed],
        known: dict[Hashable, tuple[str, list[CallTir]]],
    ) -> CallTir | None:
        """Return the call of the packed product, and emit the packing calls. Return None if an operand to pack is no variable of known
        shape."""
        numbers = [prim.params.index(packed.buffer) for packed in plan]
        sources = [call.args[n] for n in numbers]
        types = [type_of(s) for s in sources]
        if not all(isinstance(s, Var) and isinstance(t, TensorType) and t.shape is not None for s, t in zip(sources, types, strict=True)):
            return None
        key = (call.func, tuple(types))
        if key not in known:
            packings = [self._packing(outliner, p, s, t) for p, s, t in zip(plan, sources, types, strict=True)]
            known[key] = outliner.add(f"{call.func}_packed", self._packed(prim, plan)), packings
        name, packings = known[key]
        args = list(call.args)
        for number, source, packing in zip(numbers, sources, packings, strict=True):
            assert isinstance(source, Var)
            packed = CallTir(packing.func, (source, *packing.args[1:]), packing.out)
            args[number] = builder.emit(packed, f"{source.name}.packed")
        values = unify(tuple(TensorType(p.buffer.shape, p.buffer.dtype) for p in plan), tuple(types))
        args += [ScalarValue(values[v]) for v in self._lost(prim, plan)]
        return CallTir(name, tuple(args), call.out, call.inplace)

    def _packed(self, prim: PrimFunc, plan: list[_Packed]) -> PrimFunc:
        """Return the product that reads the operands of the plan from panels."""
        params, body = list(prim.params), prim.body
        for packed in plan:
            panel = Buffer(packed.buffer.name, self.shape(packed, packed.buffer.shape), packed.buffer.dtype)
            if isinstance(packed.format, IntegerFragments):
                panel = replace(panel, dtype=DType.U8)
                body = map_scalars(body, partial(_integer, packed.buffer, packed.format, panel))
            else:
                body = replace_loads(body, packed.buffer, lambda indices, p=packed, b=panel: self._element(p, b, indices))
            params[params.index(packed.buffer)] = panel
        num_inputs = len(params) - prim.num_outputs
        params[num_inputs:num_inputs] = self._lost(prim, plan)  # outputs come last
        return fresh_prim(PrimFunc(tuple(params), prim.num_outputs, body, prim.attrs))

    def _lost(self, prim: PrimFunc, plan: list[_Packed]) -> list[DimVar]:
        """Return the variables that only the shapes of the operands to pack define, and that the shapes of their panels do not define."""
        packed = {p.buffer: self.shape(p, p.buffer.shape) for p in plan}
        shapes = [packed.get(b, b.shape) for b in prim.buffers]
        defined = {d.var for shape in shapes for d in shape} | {p for p in prim.params if isinstance(p, DimVar)}
        return [v for v in prim.dim_vars if v not in defined]

    def _element(self, packed: _Packed, panel: Buffer, indices: tuple[Dim, ...]) -> Scalar:
        """Return the element of the panels that stands for the operand's element at `indices`."""
        n, r = indices[packed.column], indices[packed.depth]
        batch = tuple(d for i, d in enumerate(indices) if i not in (packed.column, packed.depth))
        if isinstance(packed.format, Elements):
            return packed.format.element((panel,), n, r, batch)
        return Load(panel, (*batch, n // packed.columns, r, n % packed.columns))

    def shape(self, packed: _Packed, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """Return the shape of the panels of an operand of this shape."""
        n, r = shape[packed.column], shape[packed.depth]
        batch = tuple(d for i, d in enumerate(shape) if i not in (packed.column, packed.depth))
        if isinstance(packed.format, IntegerFragments):
            return (*batch, ceil_div(n, packed.columns), r * (8 // packed.format.bits) // packed.group, Dim.of(packed.format.line_bytes))
        return (*batch, ceil_div(n, packed.columns), r // packed.group, Dim.of(packed.columns * packed.group))

    def _packing(self, outliner: Outliner, packed: _Packed, source: Atom, given: Type) -> CallTir:
        """Return the call that packs `source`. Columns beyond the last one are filled with zeros."""
        assert isinstance(given, TensorType) and given.shape is not None and given.dtype is not None
        plain = Buffer("w", given.shape, given.dtype)
        if isinstance(packed.format, IntegerFragments):
            return self._packing_integers(outliner, packed, packed.format, plain, source)
        panels = Buffer("p", self.shape(packed, given.shape), given.dtype)
        extent = given.shape[packed.column]
        exact = prove_divisible(extent, packed.columns)

        kernel = Kernel()
        with kernel.nest(panels.shape) as (*batch, panel, deep, line):
            column, neighbour = (line, Dim.of(0)) if packed.format is None else packed.format.column_and_k(line)
            n, r = panel * packed.columns + column, deep * packed.group + neighbour
            outer = iter(batch)
            at = tuple(n if i == packed.column else r if i == packed.depth else next(outer) for i in range(len(given.shape)))
            element = Load(plain, at)
            kernel.array(panels)[*batch, panel, deep, line] = element if exact else guard(0, n, extent, element, 0)
        return outliner.call("pack", [(plain, source)], (panels,), kernel.body())

    def _packing_integers(self, outliner: Outliner, packed: _Packed, format: IntegerFragments, plain: Buffer, source: Atom) -> CallTir:
        """Return the call that packs stored integers into the bytes of the format. Columns beyond the last one are filled with the offset,
        which stands for 0."""
        panels = Buffer("p", self.shape(packed, plain.shape), DType.U8)
        kernel, num_columns = Kernel(), plain.shape[packed.column]
        with kernel.nest(panels.shape) as (*matrix, panel, deep, line):

            def number(column: Dim, k: Dim) -> Scalar:
                n, r = panel * packed.columns + column, deep * format.depth + k
                stored = cast(Load(plain, (*matrix, n, r)), I32) + format.offset if format.bits == 8 else half_byte(plain, (*matrix, n), r)
                return stored if prove_divisible(num_columns, packed.columns) else guard(0, n, num_columns, stored, format.offset)

            kernel.array(panels)[*matrix, panel, deep, line] = cast(format.byte(line, number), DType.U8)
        return outliner.call("pack", [(plain, source)], (panels,), kernel.body())


def _integer(buffer: Buffer, format: IntegerFragments, panel: Buffer, scalar: Scalar) -> Scalar:
    """Replace an integer that is read from the buffer by the integer packed in `panel`, as an f32. Return any other scalar unchanged."""
    found = stored_number(scalar)
    if found is None or not isinstance(found.place, Load) or found.place.buffer is not buffer:
        return scalar
    *matrix, n, r = found.place.indices
    (k,) = r.vars()
    return Cast(format.element((panel,), n, k.dim, tuple(matrix)), DType.F32)


@dataclass(frozen=True, slots=True)
class _Packed:
    """An operand to pack. Only the column axis indexes its dimension `column`. Its dimension `depth` is indexed by the contracted axis, or
    by a quotient of it if several elements share a number (packed bits, scales of groups). Without a format, elements are stored unchanged,
    and neighbours along the contracted axis do not stay adjacent."""

    buffer: Buffer
    column: int
    depth: int
    format: Elements | IntegerFragments | None
    columns: int  # number of columns of a panel

    @property
    def group(self) -> int:
        """The number of neighbours along the contracted axis that stay adjacent."""
        return 1 if self.format is None else self.format.depth


def _plan(prim: PrimFunc, options: PackOperands) -> list[_Packed]:
    """Return the operands to pack: none if the function has a schedule, is no product, or has no tile or panel among the options. An
    operand is left out if its loads disagree on how to pack it, or one of them is not as `_read_as` requires."""
    if prim.attrs.get("schedule"):
        return []
    product = product_in(prim)
    if product is None:
        return []
    for tile in options.scaled:
        if numbers := _scaled_plan(product, tile):
            return numbers
    pairs = next((t for t in options.pairs if all(t.takes(s, product.row_axis) for s in product.sums)), None)
    format = pairs.format if pairs is not None and isinstance(pairs.format, Elements) else None
    if format is None and not options.others:
        return []
    found: dict[Buffer, _Packed | None] = {}
    for load in loads(prim.body):
        if load.buffer in prim.outputs:
            continue
        packed = _read_as(product, load, format, format.columns if isinstance(format, Ordered) else options.columns)
        if load.buffer in found and found[load.buffer] != packed:
            packed = None
        found[load.buffer] = packed
    return [p for p in found.values() if p is not None]


def _scaled_plan(product: Product[Contraction], tile: ProductTile) -> list[_Packed]:
    """Return the plan to pack the numbers and their scales. It is empty unless every sum of the product is as follows. The tile supports
    the sum, and its numbers are not packed yet. The scales are f32 or bf16. The last two indices of numbers and scales are the column and
    the place along the contracted axis. The indices before them, which select a matrix, depend on neither of these axes."""
    found: dict[Buffer, _Packed] = {}
    for s in product.sums:
        scaled = scaled_numbers(s)
        if scaled is None or not scaled.fits(tile.format) or scaled.group % tile.depth or not tile.takes_rows(s, product.row_axis):
            return []
        column, (axis, _) = product.column_axis.dim, s.axes[0]
        if not isinstance(scaled.number, Load) or scaled.scale.buffer.dtype not in (DType.F32, DType.BF16):
            return []
        k = axis.dim // 2 if scaled.bits == 4 else axis.dim
        matrix = scaled.number.indices[:-2]
        if scaled.number.indices != (*matrix, column, k) or scaled.scale.indices[:-1] != (*matrix, column):
            return []
        if any(var in d.vars() for d in matrix for var in (product.column_axis, axis)):
            return []
        assert isinstance(tile.format, IntegerFragments | Ordered)
        number, scale = scaled.number.buffer, scaled.scale.buffer
        found[number] = _Packed(number, len(matrix), len(matrix) + 1, tile.format, tile.format.columns)
        found[scale] = _Packed(scale, len(matrix), len(matrix) + 1, None, tile.format.columns)
    return list(found.values())


def _read_as(product: Product, load: Load, format: Elements | None, columns: int) -> _Packed | None:
    """Return how to pack the buffer of a load, or None if the load is not part of the right operand of a sum. One index of the load must be
    the column, one index must depend on the contracted axis alone, and no other index may depend on either axis."""
    variables: list[DimVar | None] = [d.var for d in load.indices]
    for s in product.sums:
        axis = s.axes[0][0]
        if not any(other is load for other in loads(s.columns)) or variables.count(product.column_axis) != 1:
            continue
        deep = [i for i, d in enumerate(load.indices) if d.vars() == (axis,)]
        others = [d for i, d in enumerate(load.indices) if i not in deep and variables[i] is not product.column_axis]
        if len(deep) == 1 and not any(axis in d.vars() or product.column_axis in d.vars() for d in others):
            return _Packed(load.buffer, variables.index(product.column_axis), deep[0], format, columns)
    return None
