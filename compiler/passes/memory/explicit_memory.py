"""Make memory explicit: every call in destination-passing style becomes a launch, after allocations for its outputs.

Before: calls of loop nests and library routines have values. After: `Alloc` and `Launch` replace them, except for library routines whose
result has an unknown shape or element type, because only the routine knows the size. An in-place output uses the memory of its operand.
"""

from __future__ import annotations

from compiler.ir.graph.atoms import Atom, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.function import Binding, BlockKind, Value
from compiler.ir.graph.values import Alloc, CallLibrary, CallTir, Copy, Launch, MakeTuple, TupleGet
from compiler.ir.module import IRModule
from compiler.ir.types import TensorType, Type
from compiler.passes.rewrite import rewrite_module


def explicit_memory(module: IRModule) -> IRModule:
    fields: dict[Var, tuple[Atom, ...]] = {}  # fields of the tuples made here

    def replace(builder: Builder, binding: Binding, value: Value) -> Value | None:
        match value:
            case CallTir(func=func, args=args, out=out, inplace=inplace):
                outs = _outputs(builder, binding.var.name, out, args, inplace)
                builder.emit(Launch(func, (*args, *outs)))
            case CallLibrary(name=name, args=args, out=out, attrs=attrs) if all(map(_sized, out)):
                outs = _outputs(builder, binding.var.name, out, args, ())
                builder.emit(Launch(name, (*args, *outs), library=True, attrs=attrs))
            case TupleGet(value=Var() as var, index=index) if var in fields:
                return Copy(fields[var][index])
            case _:
                return None
        if len(outs) == 1:
            return Copy(outs[0])
        made = builder.emit(MakeTuple(outs), binding.var.name)
        fields[made] = outs
        return Copy(made)

    return rewrite_module(module, replace, kind=BlockKind.PLAIN)  # launches write memory, so no block is pure any more


def _outputs(
    builder: Builder, name: str, out: tuple[Type, ...], args: tuple[Atom, ...], inplace: tuple[int | None, ...]
) -> tuple[Atom, ...]:
    """Return the memory of each output: a new allocation, or the operand that it overwrites."""
    outs: list[Atom] = []
    for i, type_ in enumerate(out):
        reused = inplace[i] if inplace else None
        label = name if len(out) == 1 else f"{name}.{i}"
        outs.append(builder.emit(Alloc(type_), label) if reused is None else args[reused])
    return tuple(outs)


def _sized(type_: Type) -> bool:
    """Whether the shape and the element type of a tensor are known."""
    return isinstance(type_, TensorType) and type_.shape is not None and type_.dtype is not None
