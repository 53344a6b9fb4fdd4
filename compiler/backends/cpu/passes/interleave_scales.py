"""Store the scales of 4-bit weights behind the weights of their group.

Before: a product reads panels of integers from one buffer, and a bf16 scale per group and column from another. After: the product reads
both from one buffer in the format `ScaledPanels`, which a packing function fills before the product. The pass `lift_weights` later moves
the packing of weights to load time. Numbers stay the same; only their layout changes. Machines without a prefetch instruction gain: a
separate stream of scales has few bytes, and the hardware would not prefetch it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compiler.idioms.product import GroupedSum, grouped_product_in
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.function import Binding, Value
from compiler.ir.graph.values import CallTir
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Cast, Element, Load, Scalar
from compiler.ir.loops.visit import fresh_prim, loads, map_scalars
from compiler.ir.loops.write import Kernel, bits_of, cast, guard
from compiler.ir.module import IRModule
from compiler.machine.formats import FOUR, WORD_BITS, ScaledPanels
from compiler.passes.outline import Outliner
from compiler.passes.rewrite import rewrite_module

F32, I16, I32 = DType.F32, DType.I16, DType.I32


@dataclass(frozen=True, slots=True)
class InterleaveScales:
    """The pass, for products whose weights the format can hold."""

    format: ScaledPanels

    def __call__(self, module: IRModule) -> IRModule:
        """Return the module in which products read blocks of weights and scales. A product whose weights the format cannot hold stays as it
        is."""
        plans = {name: _plan(prim, self.format) for name, prim in module.prim_functions.items()}
        outliners: list[Outliner] = []

        def rewritten(builder: Builder, binding: Binding, value: Value) -> Value | None:
            if not isinstance(value, CallTir) or not (plan := plans.get(value.func)):
                return None
            if not outliners:
                outliners.append(Outliner(builder, module))
            return self._call(builder, outliners[0], module.prim(value.func), value, plan)

        return rewrite_module(module, rewritten)

    def _call(self, builder: Builder, outliner: Outliner, prim: PrimFunc, call: CallTir, plan: list[_Operand]) -> CallTir:
        """Return the call of the product that reads blocks instead of panels and scales. Before this call, emit the calls that pack the
        blocks."""
        args = dict(zip(prim.params, call.args, strict=False))  # the parameters of outputs come last, and have no arguments
        for operand in plan:
            args[operand.panels] = builder.emit(self._packing(outliner, operand, args[operand.panels], args[operand.scales]), "scaled")
        removed = {operand.scales for operand in plan}
        kept = [i for i, p in enumerate(prim.params) if p not in removed]
        inplace = tuple(None if i is None else kept.index(i) for i in call.inplace)
        name = outliner.add(f"{call.func}_scaled", self._scaled(prim, plan))
        return CallTir(name, tuple(args[prim.params[i]] for i in kept if prim.params[i] in args), call.out, inplace)

    def _packing(self, outliner: Outliner, operand: _Operand, panels: Atom, scales: Atom) -> CallTir:
        """Return the call that writes the panels and the scales of one operand into one buffer in the format."""
        kernel, format = Kernel(), self.format
        of, by, out = (kernel.array(b) for b in (operand.panels, operand.scales, self._block(operand)))
        lines, line_words = format.depth // format.panels.depth, format.columns * FOUR // 2
        (*others, _), size = out.shape, format.groups_of_run(out.buffer)
        with kernel.nest((*others, size, format.words)) as (*matrix, stream, panel, run, i, j):
            group = (run * out.shape[-format.num_indices] + stream) * size + i

            def byte(i: int) -> Scalar:
                return cast(of[*matrix, panel, group * lines + j // line_words, j % line_words * 2 + i], I32)

            word = (byte(0) | byte(1) << 8) << WORD_BITS
            scale = bits_of(cast(by[*matrix, panel, group, j - format.scales_at], F32))
            high = guard(0, j, format.scales_at, word, guard(format.scales_at, j, format.words, scale, 0))
            out[*matrix, stream, panel, run, i * format.words + j] = cast(high >> WORD_BITS, I16)
        return outliner.call("interleave", [(operand.panels, panels), (operand.scales, scales)], (out.buffer,), kernel.body())

    def _block(self, operand: _Operand) -> Buffer:
        """Return a buffer in the format, for the integers and the scales of an operand."""
        *matrices, num_panels, num_groups, _ = operand.scales.shape
        return Buffer(operand.panels.name, (*matrices, *self.format.shape(num_panels, num_groups)), I16)

    def _scaled(self, prim: PrimFunc, plan: list[_Operand]) -> PrimFunc:
        """Return the product that reads blocks in the place of panels and scales."""
        blocks = {operand.panels: self._block(operand) for operand in plan}
        places = {operand.scales: blocks[operand.panels] for operand in plan}

        def read(scalar: Scalar) -> Scalar:
            """Replace a load of an integer or of a scale by a load from the block. Return any other scalar as it is."""
            match scalar:
                case Element(format=self.format.panels, k=k, stored=(Load(buffer=buffer, indices=(*matrix, _, _, _)),)) if buffer in blocks:
                    (operand,) = (o for o in plan if o.panels is buffer)
                    return self.format.element((blocks[buffer],), Dim.of(operand.column), k, tuple(matrix))
                case Cast(value=Load(buffer=buffer, indices=(*matrix, _, group, _))) if buffer in places:
                    (operand,) = (o for o in plan if o.scales is buffer)
                    return self.format.scale(places[buffer], tuple(matrix), Dim.of(operand.column), group)
                case _:
                    return scalar

        params = tuple(blocks.get(p, p) if isinstance(p, Buffer) else p for p in prim.params if p not in places)
        return fresh_prim(PrimFunc(params, prim.num_outputs, map_scalars(prim.body, read), _attrs(prim, places)))


@dataclass(frozen=True, slots=True)
class _Operand:
    """The weights of one sum of a product: the buffers of their integers and of their scales, and the loop variable of the columns."""

    panels: Buffer
    scales: Buffer
    column: DimVar


def _plan(prim: PrimFunc, format: ScaledPanels) -> list[_Operand]:
    """Return the weights of all sums. Return an empty list if the function is no product of integers, if the weights of one sum cannot be
    stored in the format, or if two sums have the same weights."""
    product = grouped_product_in(prim)
    if product is None:
        return []
    found = [_operand(prim, s, format, product.column_axis) for s in product.sums]
    return [] if None in found or len(set(found)) < len(found) else [operand for operand in found if operand is not None]


def _operand(prim: PrimFunc, s: GroupedSum, format: ScaledPanels, column: DimVar) -> _Operand | None:
    """Return the weights of a sum. Return None if the format cannot hold them. The panels must have the format's integers and groups. The
    scales must be one bf16 number per group and column, in a buffer that the kernel reads at no other place."""
    if s.format is not format.panels or s.group != format.depth or s.panels.shape[-1] != Dim.of(format.columns * FOUR):
        return None
    place = (*s.matrix, Dim.of(column) // format.columns, Dim.of(s.axis), Dim.of(column) % format.columns)
    scales = {load.buffer for load in loads(s.node.factor) if load.indices == place and load.buffer.dtype is DType.BF16}
    if len(scales) != 1:
        return None
    (buffer,) = scales
    others = [load for load in loads(prim.body) if load.buffer is buffer and load.indices != place]
    return None if others else _Operand(s.panels, buffer, column)


def _attrs(prim: PrimFunc, removed: dict[Buffer, Buffer]) -> dict[str, Any]:
    """Return the attributes of a function after buffers are removed from its parameters. Renumber the buffers in the pairs of `inplace`."""
    if "inplace" not in prim.attrs:
        return dict(prim.attrs)
    number = {i: n for n, i in enumerate(i for i, b in enumerate(prim.buffers) if b not in removed)}
    return {**prim.attrs, "inplace": [[number[i], number[o]] for i, o in prim.attrs["inplace"]]}
