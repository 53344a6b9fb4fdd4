"""Split the blocks of GGUF into parts. compiler/ir/blocks.py says where a block stores its parts.

unpack_blocks(blocks, part)     numbers, scales or shifts, in the form that `dequantize` reads
panel_blocks(blocks)            panel_integers(unpack_blocks(blocks, numbers)), in one pass over memory
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, Final

from compiler.ir.blocks import BLOCKS, NUMBERS, PARTS, SIGN, Blocks, Half, Integers, Power, unpacked
from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, bits_of, cast, const, guard, index, of_bits, select
from compiler.ir.op import REQUIRED
from compiler.ir.prove import prove_divisible
from compiler.ir.types import TensorType, Type
from compiler.machine.formats import FOUR, PANELS
from compiler.ops.broadcast import output
from compiler.ops.operands import tensor_operand
from compiler.ops.products.integer import PANEL_INTEGERS
from compiler.ops.tables import INTERPRET, Nest, Operands, define

Byte = Callable[[Dim], Scalar]  # a function from the index of a byte in a block to the value of this byte

F32, I32, U8 = DType.F32, DType.I32, DType.U8
BYTE_BITS, SIGN_OF_BYTE = 8, 128
RUN = 16  # elements of the innermost loop; in most formats, they are in consecutive bytes and have the same shift
HALF_BIAS: Final = 2.0**112  # the factor by which an f16 is too small once its exponent and mantissa are at the place of an f32's
INFINITE = 31 << 23  # the exponent of an f16 that is infinite or NaN, moved to the place of an f32's exponent


def _format(attrs: Mapping[str, Any]) -> Blocks:
    name, part = attrs["format"], attrs["part"]
    if not isinstance(name, str) or name not in BLOCKS:
        raise AnnotationError(f"attribute format is {name!r}, expected one of {', '.join(BLOCKS)}")
    known = [p for p in PARTS if BLOCKS[name].part(p) is not None]
    if part not in known:
        raise AnnotationError(f"attribute part is {part!r}, expected one of {', '.join(known)}")
    return BLOCKS[name]


def _unpack_type(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    format, part = _format(attrs), attrs["part"]
    blocks = tensor_operand(args, 0, "blocks")
    if blocks.dtype not in (None, U8):
        raise AnnotationError(f"blocks holds {blocks.dtype}, expected {U8}")
    if blocks.ndim == 0:
        raise AnnotationError("blocks has rank 0, expected at least 1: [..., bytes of a row]")
    if blocks.shape is None:
        return TensorType(None, format.dtype(part), blocks.ndim)
    *rows, length = blocks.shape
    if not prove_divisible(length, format.num_bytes):
        raise AnnotationError(
            f"the last dimension of blocks is {length}, expected a multiple of {format.num_bytes}, a block of {format.name}"
        )
    return TensorType((*rows, length // format.num_bytes * format.extent(part)), format.dtype(part))


def _unpack_nest(operands: Operands) -> Nest:
    format, part, kernel = _format(operands.attrs), operands.attrs["part"], Kernel()
    out, blocks = kernel.arrays(output(operands), operands.buffer(0))
    stored, extent = format.part(part), format.extent(part)
    length = min(RUN, extent)
    with kernel.nest((*out.shape[:-1], blocks.shape[-1] // format.num_bytes, extent // length, length)) as (*row, block, run, i):
        byte, at = _bytes_of(format, blocks, row, block), run * length + i
        if part == NUMBERS:
            value = _stored_numbers(format, byte, at)
        elif isinstance(stored, Integers):
            value = _integer(stored, byte, at)
        else:
            assert stored is not None, part
            value = _power(byte(Dim.of(stored.byte))) if isinstance(stored, Power) else _half(stored, byte)
        out[*row, block * extent + at] = cast(value, out.dtype)
    return Nest((out.buffer,), kernel.body())


def _bytes_of(format: Blocks, blocks: Array, row: Sequence[Dim], block: Dim) -> Byte:
    return lambda place: cast(blocks[*row, block * format.num_bytes + place], I32)


def _stored_numbers(format: Blocks, byte: Byte, at: Dim) -> Scalar:
    """Return element `at` of the numbers as they are stored: a byte with two numbers of 4 bits, or one number of more bits."""
    if format.bits != 4:
        return _integer(format.numbers, byte, at)
    low, high = (_integer(format.numbers, byte, at * 2 + odd, format.middle) for odd in (0, 1))
    return low | high << 4


def _integer(of: Integers, byte: Byte, at: Dim, middle: int = 0) -> Scalar:
    """Return the integer at position `at` of its block, with the constant that the format adds, plus `middle`."""
    found: list[Scalar] = []
    for part in of.parts:
        whole, shift = byte(Dim.of(part.byte(at))), Dim.of(part.shift(at))
        bits = whole if shift == Dim.of(0) else whole >> cast(index(shift), I32)
        bits = bits if part.count == BYTE_BITS else bits & (1 << part.count) - 1
        found.append(bits << part.at if part.at else bits)
    whole = reduce(or_, found)
    if of.is_signed:
        whole = (whole ^ SIGN_OF_BYTE) - SIGN_OF_BYTE
    add = of.add + middle
    return whole + add if add else whole


def _half(of: Half, byte: Byte) -> Scalar:
    """Return an f16 as an f32, negated if the format says so: move its bits to those of an f32, and multiply by the power of two that is
    missing in the exponent."""
    bits = byte(Dim.of(of.byte)) | byte(Dim.of(of.byte + 1)) << BYTE_BITS
    bits = bits ^ SIGN if of.is_negated else bits
    magnitude = (bits & SIGN - 1) << 13
    finite = bits_of(of_bits(magnitude) * HALF_BIAS)
    return of_bits(select(magnitude < INFINITE, finite, magnitude | 255 << 23) | (bits & SIGN) << 16)


def _power(exponent: Scalar) -> Scalar:
    """Return 2 ** (exponent - 128). The two smallest powers are denormal."""
    return of_bits(select(exponent < 2, const(1 << 21, I32) << exponent, exponent - 1 << 23))


def _unpack_numpy(blocks: Any, *, format: str, part: str) -> Any:
    of = BLOCKS[format]
    *rows, length = blocks.shape
    found = unpacked(blocks.reshape(-1, of.num_bytes), of, part)
    return found.reshape(*rows, length // of.num_bytes * of.extent(part))


UNPACK_BLOCKS = define("unpack_blocks", "blocks", _unpack_type, _unpack_numpy, _unpack_nest, {"format": REQUIRED, "part": REQUIRED})


# --- panel_blocks ------------------------------------------------------------------------------------------------------


def _panels_type(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
    numbers = _unpack_type(args, {"format": attrs["of"], "part": NUMBERS})
    return PANEL_INTEGERS.deduce((numbers,), {"format": attrs["format"], "columns": attrs["columns"]})


def _panels_nest(operands: Operands) -> Nest:
    """Pack the numbers of the blocks into panels. The last panel is padded with columns of weights 0."""
    kernel, format, panel = Kernel(), BLOCKS[operands.attrs["of"]], PANELS[operands.attrs["format"]]
    out, blocks = kernel.arrays(output(operands), operands.buffer(0))
    columns, num_columns = operands.attrs["columns"], blocks.shape[-2]
    lines = panel.lines(Dim.of(format.num_values))
    with kernel.nest((*out.shape[:-2], blocks.shape[-1] // format.num_bytes, lines, out.shape[-1])) as (*matrix, number, block, line, j):
        n = number * columns + j // FOUR
        byte = _bytes_of(format, blocks, (*matrix, n), block)
        stored = panel.byte(line, j, lambda k: _integer(format.numbers, byte, k, format.middle))
        if not prove_divisible(num_columns, columns):
            stored = guard(0, n, num_columns, stored, panel.padding_of(line))
        out[*matrix, number, block * lines + line, j] = cast(stored, U8)
    return Nest((out.buffer,), kernel.body())


def _panels_numpy(blocks: Any, *, of: str, format: str, columns: int) -> Any:
    numbers = _unpack_numpy(blocks, format=of, part=NUMBERS)
    return INTERPRET["panel_integers"](numbers, format=format, columns=columns)


PANEL_BLOCKS = define(
    "panel_blocks", "blocks", _panels_type, _panels_numpy, _panels_nest, {"of": REQUIRED, "format": REQUIRED, "columns": REQUIRED}
)
