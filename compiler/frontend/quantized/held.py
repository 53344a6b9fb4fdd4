"""Matrices of a quantised checkpoint as a program holds them: integers with a scale per group, in the layout of `dequantize`.

A matrix `m.weight` becomes `m.weight.q`, `m.weight.scale` and, where it has them, `m.weight.zero` or `m.weight.shift`. No value is rounded:
what `dequantize` makes of them equals, bit for bit, what the method's own library makes of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.weights import Tensor, TensorInfo, WeightSource
from compiler.ir.dtypes import DType

Array = NDArray[Any]
Q, SCALE = "q", "scale"


class Offset(StrEnum):
    """What takes the numbers of a group to where they belong."""

    NONE = "none"  # numbers of 8 bits lie around 0, of 4 bits around 8
    ZERO = "zero"  # a number per group is subtracted before the scale
    SHIFT = "shift"  # a value per group is subtracted behind the scale


@dataclass(frozen=True, slots=True)
class Form:
    bits: int  # 4 or 8
    group: int  # inputs that share a scale
    scale: DType
    offset: Offset = Offset.NONE

    @property
    def parts(self) -> tuple[str, ...]:
        return (Q, SCALE) if self.offset is Offset.NONE else (Q, SCALE, str(self.offset))

    @property
    def offset_dtype(self) -> DType:
        return self.scale if self.offset is Offset.SHIFT else DType.U8 if self.bits == 4 else DType.I16

    def infos(self, shape: tuple[int, ...]) -> dict[str, TensorInfo]:
        """Of the parts of a matrix of this shape."""
        *rows, length = shape
        groups = (*rows, length // self.group)
        shapes = {Q: (*rows, length * self.bits // 8), SCALE: groups, str(self.offset): groups}
        kinds = {Q: DType.U8 if self.bits == 4 else DType.I8, SCALE: self.scale, str(self.offset): self.offset_dtype}
        return {part: _info(shapes[part], kinds[part].numpy) for part in self.parts}


NO_FORMS: Mapping[str, Form] = {}


def _info(shape: tuple[int, ...], dtype: np.dtype[Any]) -> TensorInfo:
    return TensorInfo(shape, dtype, int(np.prod(shape)) * dtype.itemsize)


def halves(numbers: Array) -> NDArray[np.uint8]:
    """Numbers from 0 to 15, two in a byte, the even one in the lower half."""
    small: NDArray[np.uint8] = numbers.astype(np.uint8)
    return small[..., 0::2] | small[..., 1::2] << np.uint8(4)


class Holding(Protocol):
    """A source that knows the integers behind some of its values."""

    @property
    def forms(self) -> Mapping[str, Form]: ...

    def parts(self, name: str) -> Mapping[str, Array]: ...


class HoldingSource(WeightSource, Holding, Protocol): ...


class HeldWeights:
    """A WeightSource of the integers of another; what has no form keeps its values."""

    def __init__(self, source: HoldingSource) -> None:
        self._source = source
        self._last: tuple[str, Mapping[str, Array]] = ("", {})
        values = {name: info for name, info in source.tensors.items() if name not in source.forms}
        infos = {name: form.infos(source.tensors[name].shape) for name, form in source.forms.items()}
        integers = {f"{name}.{part}": info for name, parts in infos.items() for part, info in parts.items()}
        self.tensors: Mapping[str, TensorInfo] = {**values, **integers}

    def read(self, name: str) -> Tensor:
        matrix, _, part = name.rpartition(".")
        if matrix not in self._source.forms:
            return self._source.read(name)
        if self._last[0] != matrix:
            self._last = matrix, self._source.parts(matrix)
        return self._last[1][part].astype(self.tensors[name].dtype, copy=False)

    def release(self, name: str) -> None:
        matrix = name.rpartition(".")[0]
        self._source.release(matrix if matrix in self._source.forms else name)

    def digest(self) -> str:
        return self._source.digest()


def forms_of(tensors: Mapping[str, TensorInfo]) -> dict[str, Form]:
    """The forms of the matrices that a source holds as integers, whoever renamed or joined its tensors in between."""
    found: dict[str, Form] = {}
    for name, info in tensors.items():
        matrix, _, part = name.rpartition(".")
        scale = tensors.get(f"{matrix}.{SCALE}")
        if part == Q and matrix.endswith(".weight") and scale is not None:
            bits = 4 if info.dtype == np.uint8 else 8
            offset = next((kind for kind in (Offset.ZERO, Offset.SHIFT) if f"{matrix}.{kind}" in tensors), Offset.NONE)
            found[matrix] = Form(bits, info.shape[-1] * 8 // bits // scale.shape[-1], DType.from_numpy(scale.dtype), offset)
    return found


def is_held(name: str) -> bool:
    """Whether a program multiplies by the matrix alone: rows of embeddings are read one by one."""
    return name.endswith(".weight") and "embed" not in name
