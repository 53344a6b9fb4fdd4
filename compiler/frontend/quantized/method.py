"""The interface of a quantisation method: the tensors that hold a matrix, its shape, its values, and the form in which programs store
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
Read = Callable[[str], Array]  # returns a part of a matrix

# Parts for quantising activations, which compressed-tensors and Model Optimizer store.
ACTIVATION_PARTS = tuple(f"{side}_{part}" for side in ("input", "output") for part in ("scale", "zero_point", "global_scale"))
OTHER_FILE = "Take the model in another format, or without quantisation and with --quantize"


@dataclass(frozen=True, slots=True)
class Layout:
    """The names of the tensors ("parts") that hold one matrix. The full name of a part is the matrix's name without `ending`, followed by a
    dot and one of these names, or by the name alone if it begins with an underscore."""

    marker: str  # part by which a quantised matrix is recognised
    needed: tuple[str, ...]  # other required parts
    optional: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()  # parts for quantising activations; they are ignored
    ending: str = ".weight"  # suffix that the matrix's name has in the model

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.marker, *self.needed, *self.optional)


class Method(Protocol):
    """A quantisation method. `infos` describes the parts of a matrix by name, and `parts` has their values."""

    @property
    def layout(self) -> Layout: ...

    def shape(self, infos: Infos, read: Read) -> tuple[int, ...]:
        """Return the shape of the matrix. Raise DamagedFile if the parts do not fit together."""
        ...

    def values(self, parts: Parts) -> Floats:
        """Return the matrix [out, in] as f32, or the stacked matrices [experts, out, in]. Raise DamagedFile if values of the parts
        contradict each other."""
        ...

    def form(self, infos: Infos, read: Read) -> Form | None:
        """Return the form in which a program stores the matrix as numbers with scales, or None if it stores the matrix as plain floats. The
        parts were checked by `shape`. Only the forms of bitsandbytes change values, by rounding (bitsandbytes.py)."""
        ...

    def held(self, parts: Parts) -> Parts:
        """Return the parts of the form that `form` returned."""
        ...


def unpack(words: Array, bits: int, axis: int) -> NDArray[np.int32]:
    """Unpack unsigned numbers of `bits` bits from words of 32 bits, lowest bits first. The extent of the axis grows by a factor of 32 /
    bits."""
    axis %= words.ndim
    shifts = np.arange(0, 32, bits, dtype=np.uint32).reshape([-1 if i == axis + 1 else 1 for i in range(words.ndim + 1)])
    numbers = np.expand_dims(words.view(np.uint32), axis + 1) >> shifts & np.uint32((1 << bits) - 1)
    shape = [n * 32 // bits if i == axis else n for i, n in enumerate(words.shape)]
    return numbers.reshape(shape).astype(np.int32)


def expect(infos: Infos, part: str, shape: tuple[int, ...], kinds: str) -> None:
    """Raise DamagedFile unless the part has this shape and element type. `kinds` has the letters of the allowed NumPy kinds, and "w" for
    words of 32 bits."""
    info = infos[part]
    letter = "f" if info.dtype.kind == "V" else info.dtype.kind  # bf16 and fp8 have kind V in NumPy
    fits = letter in kinds or ("w" in kinds and info.dtype.kind in "iu" and info.dtype.itemsize == 4)
    if info.shape != shape or not fits:
        raise DamagedFile(f"its {part} is {info.dtype.name} {list(info.shape)}, expected {list(shape)}")


def per_group(scales: Array, length: int) -> Array:
    """Repeat scales [out, groups] along the second axis, so that each input has a scale."""
    return np.repeat(scales, length // scales.shape[1], axis=1)


def order_of(groups: Array, num_groups: int, part: str) -> Array | None:
    """Return the indices of inputs sorted by group, or None if inputs are sorted already. `part` is the name of the tensor that holds the
    group of each input. Raise DamagedFile if a number of a group is out of range."""
    if groups.size and not 0 <= groups.min() <= groups.max() < num_groups:
        raise DamagedFile(f"its {part} names groups {groups.min()} to {groups.max()}, expected 0 to {num_groups - 1}")
    return None if (np.diff(groups) >= 0).all() else np.argsort(groups, kind="stable").astype(np.int32)


def are_even(groups: Array, num_groups: int) -> bool:
    """Return whether integer products support these groups, given as the group of each input: see `is_even`."""
    return is_even(groups.size, num_groups) and (np.bincount(groups, minlength=num_groups) == groups.size // num_groups).all().item()


def scale_type(infos: Infos, part: str) -> DType:
    return DType.from_numpy(infos[part].dtype)


def is_even(length: int, groups: int) -> bool:
    """Return whether integer products support these groups: they must have equal lengths, which are multiples of 8."""
    return length % groups == 0 and length // groups % 8 == 0
