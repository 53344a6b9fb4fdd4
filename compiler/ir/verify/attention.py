"""The rules of attention: its operands, and how their extents and element types must agree."""

from __future__ import annotations

from collections.abc import Iterator

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.fields import Holds, parts
from compiler.ir.loops.attention import Attention, Paged, Ragged
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import dtype_of
from compiler.ir.loops.visit import walk_stmts
from compiler.ir.prove import prove_eq, prove_lt, prove_ne
from compiler.ir.verify.graph import Problem

# The extents of each field. Extents with the same name must not provably differ. Where this table has a number, the extent of the buffer
# must not provably differ from the number.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "queries": ("tokens", "heads", "size"),
    "sequences": ("tokens",),
    "positions": ("tokens",),
    "out": ("tokens", "heads", "size"),
    "sinks": ("heads",),
    "bias": ("heads", "2 * m + 1"),
    "cache": ("layers", "2", "pages", "kv_heads", "PAGE * size"),
    "scales": ("layers", "2", "pages", "kv_heads", "PAGE"),
    "tables": ("sequences", "pages of a sequence"),
    "keys": ("tokens", "kv_heads", "size"),
    "values": ("tokens", "kv_heads", "size"),
    "starts": ("sequences + 1",),
}
WITHOUT_VALUES: dict[str, tuple[str, ...]] = {  # the extents that differ in a cache without values
    "out": ("tokens", "heads", "size of a value"),
    "cache": ("layers", "1", *LAYOUTS["cache"][2:]),
    "scales": ("layers", "1", *LAYOUTS["scales"][2:]),
}
SPANS = {"positions": ("tokens", "2")}  # the extents of positions that have the first and the last position to which each token attends
INTEGERS = frozenset(("sequences", "positions", "tables", "starts"))


def attention_stands_alone(func: PrimFunc) -> Iterator[Problem]:
    for stmt in walk_stmts(func.body):
        if isinstance(stmt, Attention) and stmt is not func.body:
            yield Problem(stmt, "attention is one of several statements, expected the whole body of its function")


def attention_operands_agree(func: PrimFunc) -> Iterator[Problem]:
    """Extents, element types, numbers of heads and parameters must not contradict each other. Only a proved contradiction is a problem."""
    for stmt in walk_stmts(func.body):
        if isinstance(stmt, Attention):
            misfits = (*_layouts(stmt), *_element_types(stmt), *_heads(stmt), *_parameters(stmt))
            yield from (Problem(stmt, text) for text in misfits)


def _operands(node: Attention | Paged | Ragged) -> Iterator[tuple[str, Buffer]]:
    """Yield each buffer of the node, and of the keys inside an Attention, with the name of its field."""
    for part in parts(type(node)):
        held = getattr(node, part.name)
        if part.what is Holds.NODE:
            yield from _operands(held)
        elif isinstance(held, Buffer):
            yield part.name, held


def _layouts(node: Attention) -> Iterator[str]:
    known: dict[str, tuple[Dim, str]] = {}
    changed = {} if not isinstance(node.keys, Paged) or node.keys.has_values else WITHOUT_VALUES
    changed = {**changed, **SPANS} if node.has_spans else changed
    for field, buffer in _operands(node):
        layout = changed.get(field, LAYOUTS[field])
        if len(buffer.shape) != len(layout):
            yield f"{field} {buffer.name} has rank {len(buffer.shape)}, expected {len(layout)}: [{', '.join(layout)}]"
            continue
        for name, extent in zip(layout, buffer.shape, strict=True):
            wanted, where = (Dim.of(int(name)), field) if name.isdigit() else known.setdefault(name, (extent, field))
            if prove_ne(wanted, extent):
                reason = "" if where == field else f", the {name} of {where}"
                yield f"{field} {buffer.name} has {extent} {name}, expected {wanted}{reason}"


def _element_types(node: Attention) -> Iterator[str]:
    for field, buffer in _operands(node):
        dtype = buffer.dtype
        if field in INTEGERS:
            if not dtype.is_int:
                yield f"{field} {buffer.name} holds {dtype}, expected integers"
        elif not (dtype.is_float or (field == "cache" and dtype is DType.I8)):
            yield f"{field} {buffer.name} holds {dtype}, expected floats{' or i8' if field == 'cache' else ''}"
    if isinstance(node.keys, Paged):
        layer, cache, scales = dtype_of(node.keys.layer), node.keys.cache, node.keys.scales
        if not layer.is_int:
            yield f"layer is {layer}, expected an integer"
        if cache.dtype is DType.I8 and scales is None:
            yield f"cache {cache.name} is i8 and has no scales, expected one scale per token and head"
        if cache.dtype is not DType.I8 and scales is not None:
            yield f"cache {cache.name} is {cache.dtype} and has scales {scales.name}; expected scales only if the cache is i8"


def _heads(node: Attention) -> Iterator[str]:
    keys = node.keys.cache if isinstance(node.keys, Paged) else node.keys.keys
    axis = LAYOUTS["cache" if isinstance(node.keys, Paged) else "keys"].index("kv_heads")
    if len(node.queries.shape) == 3 and len(keys.shape) > axis:
        heads, kv_heads = node.queries.shape[1], keys.shape[axis]
        if prove_eq(kv_heads, 0) or prove_ne(heads % kv_heads, 0):
            yield f"queries {node.queries.name} have {heads} heads, expected a multiple of {kv_heads}, the kv heads of {keys.name}"


def _parameters(node: Attention) -> Iterator[str]:
    if node.window < 0:
        yield f"window is {node.window}, expected a number of positions, or 0 for none"
    if not node.softcap >= 0:
        yield f"softcap is {node.softcap}, expected a cap above 0, or 0 for none"
    if isinstance(node.keys, Paged) and len(node.out.shape) == len(node.queries.shape) == 3:
        size, value_size = node.queries.shape[2], node.out.shape[2]
        if not node.keys.has_values and prove_lt(size, value_size):
            yield f"out {node.out.name} has values of {value_size} elements, expected at most {size}, the size of a key"
    if node.positions is None and isinstance(node.keys, Paged):
        yield "positions are missing, and pages do not tell how long a sequence is; expected one position per token"
    if node.has_spans and node.window:
        yield f"window is {node.window} and positions have two columns, expected 0"
    if node.positions is None and node.window:
        yield f"window is {node.window} and positions are missing, expected one position per token"
