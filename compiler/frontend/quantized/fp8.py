"""Weights of 8-bit floats with one scale per block of rows and inputs, per row, or per matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from compiler.frontend.errors import DamagedFile
from compiler.frontend.fields import Fields
from compiler.frontend.quantized.held import Form
from compiler.frontend.quantized.method import Array, Floats, Infos, Layout, Method, Parts
from compiler.frontend.weights import DTYPES

FLOATS = (DTYPES["F8_E4M3"], DTYPES["F8_E5M2"])


@dataclass(frozen=True, slots=True)
class Scaled:
    """A matrix of 8-bit floats and its scales. `block` is the shape of a block [rows, inputs] if each block has a scale."""

    scale: str  # name of the tensor that holds the scales
    block: tuple[int, int] | None = None

    @property
    def layout(self) -> Layout:
        return Layout(self.scale, ("weight",), unused=("input_scale",))

    def shape(self, infos: Infos) -> tuple[int, ...]:
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
        if self.block is not None and scale.ndim == 2 and scale.shape not in ((1, 1), (len(weight), 1)):
            scale = np.repeat(np.repeat(scale, self.block[0], 0), self.block[1], 1)[: len(weight), : weight.shape[1]]
        return weight * scale

    def form(self, infos: Infos, read: Callable[[str], Array]) -> Form | None:
        """Return None: a program stores the matrix as floats, since 8-bit floats are not integer multiples of a scale."""
        return None

    def held(self, parts: Parts) -> Parts:
        raise AssertionError(self)


def read_fp8(fields: Fields) -> Method:
    fields.skip("activation_scheme", "modules_to_not_convert", "fmt", "scale_fmt")
    return Scaled("weight_scale_inv", block_of(fields, "weight_block_size"))


def read_fbgemm(fields: Fields) -> Method:
    fields.skip("activation_scale_ub", "modules_to_not_convert")
    return Scaled("weight_scale")


def block_of(fields: Fields, name: str) -> tuple[int, int] | None:
    if name not in fields:
        return None
    match fields.raw(name):
        case [int(rows), int(columns)] if 0 < rows <= 1 << 16 and 0 < columns <= 1 << 16:
            return rows, columns
        case _:
            raise fields.error(name, "two positive integers")
