"""Number schemes: to how many bits products with quantised weights round their rows, and which sums are exact.

On CPUs and in browsers, the program alone decides, not the target: targets only choose the instructions that compute the same integers.
A target may use a scheme of its own only if the program tolerates rows of bf16. GPUs use no scheme: round_operands.py says which rows they
round to bf16.

    weights of 8 or 6 bits     rows of 16 bits. Up to 512 products are added exactly: such a sum fits in 32 bits. If a row is stored
                               in two planes, each plane's sum is exact, and the two are combined in f32 with one rounding
    weights of 4 bits          rows of 8 bits, and of 16 bits for outliers (compiler/ops/products/integer_rows.py)
    weights of 4 bits, if the product tolerates rows of i8 (auto-fast)
                               rows of 8 bits
    weights of 8 bits with one scale per channel and without offsets, if the product tolerates rows of i8 (int8-fast)
                               rows of 8 bits, with a scale per 64 elements, if the length of a channel is a multiple of 64

A channel has the weights of one column of the product. A row has one scale per group of a channel. If a whole channel shares a scale and is
too long for an exact sum, it is cut into parts, and a row has one scale per part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Atom, Var
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Value
from compiler.ir.graph.values import Call
from compiler.ir.module import IRModule
from compiler.ir.numbers import TABLES, Kind, num_per_byte
from compiler.ir.prove import prove_divisible
from compiler.ir.types import TensorType
from compiler.machine.formats import FOUR
from compiler.ops.products.blocks import UNPACK_BLOCKS
from compiler.ops.products.experts import EXPERT_LINEAR
from compiler.ops.products.matmul import LINEAR
from compiler.ops.products.quantize import DEQUANTIZE

LONGEST: Final = {8: 1 << 16, 16: 1 << 9}  # maximum number of products that are added exactly, by the number of bits of the rows
# The maximum for weights of 8 or 6 bits and rows of 16 bits on a matrix unit, which multiplies planes of bytes.
LONGEST_ON_UNIT: Final = 1 << 16
COARSE: Final = (8, 64)  # bits, and elements per scale, of rows that int8-fast rounds to i8
CAP: Final = 4.25  # in rows for weights of 4 bits, numbers that exceed this many mean magnitudes of their row are outliers
SHORTEST_PART: Final = 64  # minimum number of elements of a part, because each part costs a conversion and a multiply-add


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a product rounds its rows, and how many products it adds exactly."""

    bits: int  # bits per element of the rows
    group: int  # number of elements of a row that share a scale; their products are added exactly, and the groups are added in order
    cap: float = 0.0  # if it is not 0, only outliers take more than 8 bits: numbers that exceed `cap` mean magnitudes of their row


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """The quantised weight of a product: the operands and attributes of its dequantisation, and what the product states about its rows."""

    q: Atom  # the stored numbers
    scale: Atom
    bits: int
    group: int  # number of elements of a channel that share a scale
    length: int  # number of elements of a channel
    size: int  # number of columns of the product
    out_dtype: str
    offset: Atom | None  # the zero point or the shift of each group; None: the weight has neither
    is_shifted: bool  # whether `offset` is a shift, which is subtracted after the multiplication by the scale
    # If the scales, and the offsets if there are any, are themselves dequantised: their integers and the scales of these integers.
    # Otherwise empty.
    levels: tuple[Atom, ...]
    offset_levels: tuple[Atom, ...]
    blocks: Call | None  # the call that takes the numbers out of the blocks of a file, if they come from blocks
    matrices: tuple[int, ...]  # extents of the leading axes; their indices select a matrix for each row, such as that of an expert
    kind: Kind
    tolerates: DType | None  # the type to which the program lets a target round rows

    @property
    def parts(self) -> tuple[Atom, ...]:
        """The values from which the weight is dequantised."""
        offset = () if self.offset is None else self.offset_levels or (self.offset,)
        return self.q, *(self.levels or (self.scale,)), *offset

    @property
    def is_centred(self) -> bool:
        """Whether 0 is in the middle of the range of the stored numbers. Numbers of 4 bits with an offset are multiplied as stored:
        the smallest of them is 0."""
        return self.bits != 4 or self.offset is None

    @property
    def has_coarse_rows(self) -> bool:
        """Whether the rows have the bits and the group of COARSE, as the head of this file says for int8-fast."""
        if self.tolerates is not DType.I8 or self.bits != 8 or self.group != self.length:
            return False
        return self.length % COARSE[1] == 0 and self.offset is None

    @property
    def row_bits(self) -> int:
        """The number of bits per element of the rows, unless they are coarse."""
        return 8 if self.bits == 4 and self.tolerates is DType.I8 else 16


def scheme_of(weight: QuantisedWeight) -> Scheme | None:
    """Return the scheme of a product. Return None if the product is computed in f32, because its groups are too long for exact sums, or no
    part of the channel is long enough."""
    if weight.has_coarse_rows:
        return Scheme(*COARSE)
    group = _part(weight, LONGEST[weight.row_bits])
    return None if group is None else _scheme(weight, group)


def scheme_on_unit(weight: QuantisedWeight) -> Scheme | None:
    """Return the scheme for a matrix unit, which is fast for long groups only. The rows are never coarse. Return None if the product is
    computed in f32."""
    group = _part(weight, LONGEST[weight.row_bits] if weight.bits == 4 else LONGEST_ON_UNIT)
    return None if group is None else _scheme(weight, group)


def _scheme(weight: QuantisedWeight, group: int) -> Scheme:
    return Scheme(weight.row_bits, group, cap=CAP if weight.bits == 4 and weight.row_bits == 16 else 0.0)


def _part(weight: QuantisedWeight, longest: int) -> int | None:
    """Return how many products are added exactly: as many as a group has, if it has at most `longest`. If a longer group is the whole
    channel, return the length of its longest part that has at most `longest`. Return None if no such part has at least SHORTEST_PART
    elements, and for a longer group that is not the whole channel."""
    if weight.group <= longest:
        return weight.group
    step = FOUR * num_per_byte(weight.bits)
    parts = (p for p in range(longest, SHORTEST_PART - 1, -step) if weight.group % p == 0)
    return next(parts, None) if weight.group == weight.length else None


def quantised_weight(linear: Call, values: Mapping[Var, Value]) -> QuantisedWeight | None:
    """Return the quantised weight of a product, `linear` or `expert_linear`. Return None if the weight is not quantised or is of 8-bit
    floats, if its shape is not constant, if the shape or the element type of the rows is not known, or if its groups do not fill whole
    units of 4 bytes. `values` has the values of all variables."""
    weight, x = linear.args[1], type_of(linear.args[0])
    made = values.get(weight) if isinstance(weight, Var) else None
    if not isinstance(made, Call) or made.op is not DEQUANTIZE:
        return None
    given = type_of(weight)
    if not isinstance(given, TensorType) or given.shape is None or not all(d.is_const for d in given.shape):
        return None
    if not isinstance(x, TensorType) or x.shape is None or x.dtype is None:
        return None
    *matrices, size, length = (d.const for d in given.shape)
    attrs = {**made.op.attributes, **made.attrs}
    if attrs["kind"] == Kind.E4M3:
        return None
    bits, group = attrs["bits"], attrs["group"]
    if not prove_divisible(group or length, FOUR * num_per_byte(bits)):
        return None
    q, scale, *offset = made.args
    zero = offset[0] if offset else None
    levels, offset_levels = _levels(scale, values, bool(group)), ()
    if zero is not None and levels:
        offset_levels = _levels(zero, values, bool(group)) if attrs["shifted"] else ()
        levels = levels if offset_levels else ()
    tolerates = linear.attrs.get("tolerates")
    return QuantisedWeight(
        q,
        scale,
        bits,
        group or length,
        length,
        size,
        str(linear.attrs.get("out_dtype") or x.dtype),
        zero,
        attrs["shifted"],
        levels,
        offset_levels,
        _unpacking(q, values),
        tuple(matrices),
        Kind(attrs["kind"]),
        None if tolerates is None else DType(tolerates),
    )


def _unpacking(q: Atom, values: Mapping[Var, Value]) -> Call | None:
    made = values.get(q) if isinstance(q, Var) else None
    return made if isinstance(made, Call) and made.op is UNPACK_BLOCKS else None


def _levels(scale: Atom, values: Mapping[Var, Value], has_groups: bool) -> tuple[Atom, ...]:
    """Return the 8-bit integers, and their scales, from which a scale was itself dequantised. Return () for other scales, and without
    groups."""
    made = values.get(scale) if isinstance(scale, Var) else None
    if not has_groups or not isinstance(made, Call) or made.op is not DEQUANTIZE or len(made.args) != 2:
        return ()
    return made.args if {**made.op.attributes, **made.attrs}["bits"] == 8 else ()


# --- in words --------------------------------------------------------------------------------------------------------------


def schemes_of(module: IRModule) -> dict[str, int]:
    """Return descriptions of the weights and rows of a program's products, each with the number of such products, the most frequent
    first."""
    counts: Counter[str] = Counter()
    for func in module.graph_functions.values():
        bindings = [b for b in func.body.bindings if isinstance(b.value, Call)]
        values: dict[Var, Value] = {b.var: b.value for b in bindings}
        counts.update(_in_words(b.value, values) for b in bindings if isinstance(b.value, Call) and b.value.op in (LINEAR, EXPERT_LINEAR))
    return dict(counts.most_common())


def _in_words(linear: Call, values: Mapping[Var, Value]) -> str:
    weight = quantised_weight(linear, values)
    scheme = None if weight is None else scheme_of(weight)
    if weight is not None and scheme is not None:
        rows = "8 bits, outliers of 16 bits" if scheme.cap else f"{scheme.bits} bits"
        table = f" (codes of {weight.kind})" if weight.kind in TABLES else ""
        return f"weights of {weight.bits} bits{table} and rows of {rows}, exact in groups of {scheme.group}"
    given = type_of(linear.args[1])
    made = values.get(linear.args[1]) if isinstance(linear.args[1], Var) else None
    is_stored = not (isinstance(made, Call) and made.op is DEQUANTIZE)
    weights = str(given.dtype) if is_stored and isinstance(given, TensorType) else "quantised numbers"
    rows = "f32 or bf16" if linear.attrs.get("tolerates") == str(DType.BF16) else "f32"
    return f"weights of {weights} and rows of {rows}"
