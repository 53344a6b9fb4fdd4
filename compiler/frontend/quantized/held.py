"""Matrices of a quantised checkpoint in the form that programs read: numbers with a scale per group, in the layout of `dequantize`.

A matrix `m.weight` becomes `m.weight.q`, `m.weight.scale` and, if it has an offset, `m.weight.zero` or `m.weight.shift`. `m.weight.q` holds
integers of 4 or 8 bits. Numbers of other kinds are in a tensor of another name: integers of 6 bits in `m.weight.q6`, floats of 4 bits in
`m.weight.e2m1`, floats of 8 bits in `m.weight.e4m3`, codes of GGUF's IQ formats in `m.weight.iq4`, `m.weight.iq2` and so on, GGUF's ternary
numbers in `m.weight.ternary`, and codes of bitsandbytes in `m.weight.nf4` or `m.weight.fp4`. The scales of floats of 4 bits multiply the
double of a float, which is an integer. No numbers are rounded, except the floats of NF4. Except for bitsandbytes (bitsandbytes.py),
`dequantize` gives, bit for bit, the values that the library of the quantisation method computes from the checkpoint.

Scales and shifts may be integers themselves, in units of a float that several groups share: then `m.weight.scale_unit` and
`m.weight.shift_unit` hold these floats.

A GGUF file stores numbers and scales of a matrix in blocks (compiler/ir/blocks.py). Then one tensor holds the blocks, as in the file:
`m.weight.q4_k` has the bytes of each row. The program unpacks the blocks. Blocks that only NumPy unpacks (compiler/ir/coded_blocks.py)
become parts like those of any other checkpoint.

If the inputs of a group are not consecutive in the checkpoint, the columns of `q` are sorted by group, and `m.weight.order` has the input
of each column. A program then reorders the inputs of the product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.weights import Tensor, TensorInfo, WeightSource
from compiler.ir.blocks import BLOCKS, Blocks
from compiler.ir.coded_blocks import CodedBlocks
from compiler.ir.dtypes import DType
from compiler.ir.numbers import Kind, num_per_byte, stored_as

Array = NDArray[Any]
Q, Q6, SCALE, ORDER = "q", "q6", "scale", "order"
NUMBERS: Mapping[Kind, str] = {kind: Q if kind is Kind.INT else str(kind) for kind in Kind}  # the part that holds the numbers
# Largest number of matrices whose unread parts are kept: a program may read the codes of queries, keys and values before their scales.
MOST_UNREAD = 4
UNIT = "_unit"  # ending of the part that holds the units of another part


class Offset(StrEnum):
    """The offset of the numbers in a group. Only integers have offsets; codes and floats have none."""

    NONE = "none"  # no offset: numbers of 8 and of 6 bits are symmetric around 0, those of 4 bits around 8
    ZERO = "zero"  # a zero point per group is subtracted before scaling
    SHIFT = "shift"  # a shift per group is subtracted after scaling


@dataclass(frozen=True, slots=True)
class Form:
    """How the numbers of a matrix are stored, with which scales, and with which offset."""

    bits: int  # 4, 6 or 8; numbers of 6 bits are stored in bytes
    group: int  # number of inputs that share a scale
    scale: DType  # type of scales, or of their units
    offset: Offset = Offset.NONE
    ordered: bool = False  # whether columns are sorted by group; the part `order` then has the input of each column
    per_unit: int = 0  # number of groups that share a unit; 0: scales and shifts are floats
    kind: Kind = Kind.INT
    blocks: str = ""  # format of the blocks in which the checkpoint stores the parts; "": each part is a tensor

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the parts that `dequantize` reads."""
        both = Q6 if self.bits == 6 else NUMBERS[self.kind], SCALE
        return both if self.offset is Offset.NONE else (*both, str(self.offset))

    @property
    def units(self) -> tuple[str, ...]:
        """The names of the parts that hold the units of scales and shifts."""
        return tuple(f"{part}{UNIT}" for part in self.numbers[1:]) if self.per_unit else ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the tensors that hold the matrix: a single name if the matrix consists of blocks."""
        if self.blocks:
            return (self.blocks,)
        return (*self.numbers, *self.units, *([ORDER] if self.ordered else []))

    @property
    def offset_dtype(self) -> DType:
        if self.offset is Offset.SHIFT:
            return DType.I8 if self.per_unit else self.scale
        return DType.U8 if self.bits == 4 else DType.I16

    def infos(self, shape: tuple[int, ...]) -> dict[str, TensorInfo]:
        """Return the descriptions of the tensors of a matrix of this shape."""
        if not self.blocks:
            return self.unpacked_infos(shape)
        *rows, length = shape
        blocks = BLOCKS[self.blocks]
        return {self.blocks: _info((*rows, length // blocks.num_values * blocks.num_bytes), np.dtype(np.uint8))}

    def unpacked_infos(self, shape: tuple[int, ...]) -> dict[str, TensorInfo]:
        """Return the descriptions of the parts of a matrix of this shape, as the program stores them."""
        *rows, length = shape
        groups, units = (*rows, length // self.group), (*rows, length // self.group // (self.per_unit or 1))
        q, per_byte = self.numbers[0], num_per_byte(self.bits)
        shapes = {q: (*rows, length // per_byte), SCALE: groups, str(self.offset): groups, ORDER: (*rows[:-1], length)}
        scale = DType.I8 if self.per_unit else self.scale
        kinds = {q: stored_as(self.bits, self.kind), SCALE: scale, str(self.offset): self.offset_dtype, ORDER: DType.I32}
        shapes |= dict.fromkeys(self.units, units)
        kinds |= dict.fromkeys(self.units, self.scale)
        parts = (*self.numbers, *self.units, *([ORDER] if self.ordered else []))
        return {part: _info(shapes[part], kinds[part].numpy) for part in parts}


NO_FORMS: Mapping[str, Form] = {}
MOST_PER_UNIT = 128  # largest number of groups that share a unit, in forms into which relaxserve quantises


class Width(NamedTuple):
    """A choice among the forms into which relaxserve quantises: bits per number, numbers per group, and kind of numbers."""

    bits: int
    group: int
    kind: Kind = Kind.INT


def two_level_form(width: Width, length: int) -> Form:
    """Return the form into which relaxserve quantises a matrix whose rows have this length. Integers of 4 bits have shifts."""
    groups = length // width.group
    per_unit = next(count for count in range(min(groups, MOST_PER_UNIT), 0, -1) if groups % count == 0)
    offset = Offset.SHIFT if width.bits == 4 and width.kind is Kind.INT else Offset.NONE
    return Form(width.bits, width.group, DType.F32, offset, per_unit=per_unit, kind=width.kind)


def _info(shape: tuple[int, ...], dtype: np.dtype[Any]) -> TensorInfo:
    return TensorInfo(shape, dtype, int(np.prod(shape)) * dtype.itemsize)


def halves(numbers: Array) -> NDArray[np.uint8]:
    """Pack numbers from 0 to 15 into bytes: the number with the even index is in the lower four bits."""
    small: NDArray[np.uint8] = numbers.astype(np.uint8)
    return small[..., 0::2] | small[..., 1::2] << np.uint8(4)


class Holding(Protocol):
    """A source that can return the numbers that encode some of its matrices. `parts` returns the numbers of a matrix that is in `forms`."""

    @property
    def forms(self) -> Mapping[str, Form]: ...

    def parts(self, name: str) -> Mapping[str, Array]: ...


class HoldingSource(WeightSource, Holding, Protocol): ...


class HeldWeights:
    """A WeightSource in which the parts that encode a matrix replace the matrix. Tensors without a form keep their values."""

    def __init__(self, source: HoldingSource) -> None:
        self._source = source
        self._unread: dict[str, dict[str, Array]] = {}  # matrix -> its parts that were made, but not read yet
        values = {name: info for name, info in source.tensors.items() if name not in source.forms}
        infos = {name: form.infos(source.tensors[name].shape) for name, form in source.forms.items()}
        integers = {f"{name}.{part}": info for name, parts in infos.items() for part, info in parts.items()}
        self.tensors: Mapping[str, TensorInfo] = {**values, **integers}

    def read(self, name: str) -> Tensor:
        """Return a part of a matrix, or a tensor without a form. All parts of a matrix are made together; parts that were not read yet are
        kept for the latest MOST_UNREAD matrices."""
        matrix, _, part = name.rpartition(".")
        if matrix not in self._source.forms:
            return self._source.read(name)
        if part not in self._unread.get(matrix, {}):
            self._unread.pop(matrix, None)
            while len(self._unread) >= MOST_UNREAD:
                del self._unread[next(iter(self._unread))]
            self._unread[matrix] = dict(self._source.parts(matrix))
        return self._unread[matrix].pop(part).astype(self.tensors[name].dtype, copy=False)

    def release(self, name: str) -> None:
        matrix = name.rpartition(".")[0]
        self._source.release(matrix if matrix in self._source.forms else name)

    def digest(self) -> str:
        return self._source.digest()


def forms_of(tensors: Mapping[str, TensorInfo]) -> dict[str, Form]:
    """Return the forms of the matrices that a source provides as numbers with scales. Forms are recognised by the names, shapes and types
    of the parts, so it does not matter whether another source renamed or joined the tensors."""
    found: dict[str, Form] = {}
    for name, info in tensors.items():
        matrix, _, part = name.rpartition(".")
        if part in BLOCKS:
            found[matrix] = form_of_blocks(BLOCKS[part])
            continue
        scale = tensors.get(f"{matrix}.{SCALE}")
        kind = Kind.INT if part == Q6 else next((kind for kind, numbers in NUMBERS.items() if numbers == part), None)
        if kind is not None and matrix.endswith(".weight") and scale is not None:
            bits = 6 if part == Q6 else 4 if info.dtype == np.uint8 else 8
            offset = next((kind for kind in (Offset.ZERO, Offset.SHIFT) if f"{matrix}.{kind}" in tensors), Offset.NONE)
            group = info.shape[-1] * num_per_byte(bits) // scale.shape[-1]
            unit = tensors.get(f"{matrix}.{SCALE}{UNIT}")
            per_unit = scale.shape[-1] // unit.shape[-1] if unit is not None else 0
            floats = DType.from_numpy((unit or scale).dtype)
            found[matrix] = Form(bits, group, floats, offset, f"{matrix}.{ORDER}" in tensors, per_unit, kind)
    return found


def form_of_blocks(blocks: Blocks | CodedBlocks) -> Form:
    """Return the form in which a program stores the values of blocks without rounding."""
    if isinstance(blocks, CodedBlocks):
        return Form(
            4, blocks.group, blocks.scale_dtype, per_unit=blocks.num_values // blocks.group if blocks.has_units else 0, kind=blocks.kind
        )
    scale = DType.F32 if blocks.has_units else blocks.dtype("scale")
    per_unit = blocks.num_values // blocks.group if blocks.has_units else 0
    offset = Offset.NONE if blocks.shift is None else Offset.SHIFT
    return Form(blocks.bits, blocks.group, scale, offset, per_unit=per_unit, kind=blocks.kind, blocks=blocks.name)


def is_held(name: str) -> bool:
    """Return whether, by its name, programs can read the tensor in a `Form`: as a matrix in products, or as a table whose rows are looked
    up."""
    return name.endswith(".weight")


def is_matrix(name: str) -> bool:
    """Return whether, by its name, programs use the tensor only as a matrix in products. Embeddings are excluded, since their rows are also
    looked up."""
    return is_held(name) and "embed" not in name
