"""What a method of quantisation is: the tensors that hold a matrix, its shape, and its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.errors import DamagedFile
from compiler.frontend.quantized.held import Form
from compiler.frontend.weights import TensorInfo
from compiler.ir.dtypes import DType

Array = NDArray[Any]
Floats = NDArray[np.float32]
Infos = Mapping[str, TensorInfo]
Parts = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Layout:
    """The names of the tensors that hold one matrix. A name is that of the matrix, without `ending`, and one of the parts behind it."""

    marker: str  # the part by which a quantised matrix is known
    needed: tuple[str, ...]  # further parts that each matrix has
    optional: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()  # parts that say how rows are quantised: rows are not
    ending: str = ".weight"  # of the name that the model has for the matrix

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.marker, *self.needed, *self.optional)


class Method(Protocol):
    @property
    def layout(self) -> Layout: ...

    def shape(self, infos: Infos) -> tuple[int, ...]:
        """The shape of the matrix. Raises DamagedFile where the parts do not fit together."""
        ...

    def values(self, parts: Parts) -> Floats:
        """The matrix [out, in]; each value is rounded once at most, to f32."""
        ...

    def form(self, infos: Infos) -> Form | None:
        """How a program holds the matrix without rounding it; None: as values. `shape` has seen the parts."""
        ...

    def held(self, parts: Parts) -> Parts:
        """The parts of that form."""
        ...


def unpack(words: Array, bits: int, axis: int) -> NDArray[np.int32]:
    """Unsigned numbers of `bits` bits, the lowest first, of words of 32 bits: the axis grows by 32 / bits."""
    axis %= words.ndim
    shifts = np.arange(0, 32, bits, dtype=np.uint32).reshape([-1 if i == axis + 1 else 1 for i in range(words.ndim + 1)])
    numbers = np.expand_dims(words.view(np.uint32), axis + 1) >> shifts & np.uint32((1 << bits) - 1)
    shape = [n * 32 // bits if i == axis else n for i, n in enumerate(words.shape)]
    return numbers.reshape(shape).astype(np.int32)


def expect(infos: Infos, part: str, shape: tuple[int, ...], kinds: str) -> None:
    """`kinds`: what the element type may be, by the letters of NumPy and "w" for words of 32 bits."""
    info = infos[part]
    letter = "f" if info.dtype.kind == "V" else info.dtype.kind  # NumPy knows bf16 and fp8 as void
    fits = letter in kinds or ("w" in kinds and info.dtype.kind in "iu" and info.dtype.itemsize == 4)
    if info.shape != shape or not fits:
        raise DamagedFile(f"its {part} is {info.dtype.name} {list(info.shape)}, expected {list(shape)}")


def per_group(scales: Array, length: int) -> Array:
    """Scales [out, groups], once for each of `length` inputs."""
    return np.repeat(scales, length // scales.shape[1], axis=1)


def scale_type(infos: Infos, part: str) -> DType:
    return DType.from_numpy(infos[part].dtype)


def is_even(length: int, groups: int) -> bool:
    """Whether groups are such that integer products take them."""
    return length % groups == 0 and length // groups % 8 == 0
