"""Weights of 8-bit floats with one scale per block of rows and inputs, per row, or per matrix."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from compiler.frontend.errors import DamagedFile
from compiler.frontend.fields import Fields
from compiler.frontend.quantized.held import NUMBERS, SCALE, Form
from compiler.frontend.quantized.method import ACTIVATION_PARTS, Array, Floats, Infos, Layout, Method, Parts, Read
from compiler.frontend.weights import DTYPES
from compiler.ir.dtypes import DType
from compiler.ir.numbers import Kind

E4M3 = DTYPES["F8_E4M3"]
FLOATS = (E4M3, DTYPES["F8_E5M2"])
NAN = 0x7F  # the bits, without the sign, of a NaN in e4m3


@dataclass(frozen=True, slots=True)
class Scaled:
    """Matrices of 8-bit floats and their scales. `block` is the shape [rows, inputs] of the blocks of which each has a scale; None: there
    are no blocks. Even if `block` is given, a matrix may have a scale per row or a single scale instead."""

    scale: str  # name of the tensor that holds the scales
    block: tuple[int, int] | None = None

    @property
    def layout(self) -> Layout:
        return Layout(self.scale, ("weight",), unused=(*ACTIVATION_PARTS, "activation_scale"))

    def shape(self, infos: Infos, read: Read) -> tuple[int, ...]:
        weight, scale = infos["weight"], infos[self.scale]
        if weight.dtype not in FLOATS or len(weight.shape) != 2:
            raise DamagedFile(f"its weight is {weight.dtype.name} {list(weight.shape)}, expected a matrix of 8-bit floats")
        rows, columns = weight.shape
        allowed = [(), (1,), (1, 1), (rows,), (rows, 1)]
        if self.block is not None:
            allowed.append((-(-rows // self.block[0]), -(-columns // self.block[1])))
        if scale.shape not in allowed:
            raise DamagedFile(f"its {self.scale} is {list(scale.shape)}, expected one of {', '.join(str(list(s)) for s in allowed)}")
        return weight.shape

    def values(self, parts: Parts) -> Floats:
        weight, scale = parts["weight"].astype(np.float32), parts[self.scale].astype(np.float32)
        if scale.ndim == 1:
            scale = scale[:, None]
        if self.block is not None and not self._is_of_rows(scale.shape, len(weight)):
            scale = np.repeat(np.repeat(scale, self.block[0], 0), self.block[1], 1)[: len(weight), : weight.shape[1]]
        return weight * scale

    def form(self, infos: Infos, read: Read) -> Form | None:
        """Return None for e5m2 and for empty matrices: programs read these as floats."""
        rows, columns = self.shape(infos, read)
        if infos["weight"].dtype != E4M3 or rows * columns == 0:
            return None
        scale = DType.BF16 if infos[self.scale].dtype == DType.BF16.numpy else DType.F32
        return Form(8, self._group(infos[self.scale].shape, rows, columns), scale, kind=Kind.E4M3)

    def held(self, parts: Parts) -> Parts:
        """Return the numbers, and the scales, which are repeated for all rows of a block. If the last block of a row is shorter than other
        blocks, a block becomes several groups. Raise DamagedFile if a number is NaN."""
        weight, scale = parts["weight"], parts[self.scale]
        rows, columns = weight.shape
        if self._is_of_rows(scale.shape, rows):
            return {NUMBERS[Kind.E4M3]: self._numbers(weight), SCALE: np.broadcast_to(scale.reshape(-1, 1), (rows, 1))}
        assert self.block is not None
        group = self._group(scale.shape, rows, columns)
        of_rows, of_groups = np.arange(rows) // self.block[0], np.arange(0, columns, group) // self.block[1]
        return {NUMBERS[Kind.E4M3]: self._numbers(weight), SCALE: scale[of_rows[:, None], of_groups]}

    def _group(self, scales: tuple[int, ...], rows: int, columns: int) -> int:
        """Return the number of inputs of a row that share a scale. `scales` is the shape of the scales."""
        if self.block is None or self._is_of_rows(scales, rows) or scales[1] == 1:
            return columns
        return gcd(columns, self.block[1])

    def _is_of_rows(self, scales: tuple[int, ...], rows: int) -> bool:
        """Return whether scales of this shape give each row a single scale: its own, or that of the whole matrix."""
        return len(scales) < 2 or scales in ((1, 1), (rows, 1))

    def _numbers(self, weight: Array) -> Array:
        if (weight.view(np.uint8) & NAN == NAN).any():
            raise DamagedFile("its weight holds NaN, expected numbers")
        return weight


def read_fp8(fields: Fields) -> tuple[Method, ...]:
    """Return the method with the stated shape of blocks. Raise ConfigError if experts are stored in another format than FP8."""
    fields.skip("activation_scheme", "modules_to_not_convert", "modules_to_convert", "fmt", "scale_fmt")
    fields.require(expert_dtype="fp8")
    return (Scaled("weight_scale_inv", block_of(fields, "weight_block_size")),)


def read_fbgemm(fields: Fields) -> tuple[Method, ...]:
    fields.skip("activation_scale_ub", "modules_to_not_convert")
    return (Scaled("weight_scale"),)


def block_of(fields: Fields, name: str) -> tuple[int, int] | None:
    """Return the shape of blocks, [rows, inputs], or None if the field is absent. Raise ConfigError if the field is malformed."""
    if name not in fields:
        return None
    match fields.raw(name):
        case [int(rows), int(columns)] if 0 < rows <= 1 << 16 and 0 < columns <= 1 << 16:
            return rows, columns
        case _:
            raise fields.error(name, "two positive integers")
