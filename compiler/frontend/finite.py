"""Refuse matrices with values that are not finite numbers, since such a value spoils every answer whose computation reads it.

Each load runs a step of one token, and checks that its results are finite. This step reads most weights. It omits most rows of an embedding
table, most experts and, in most loads, the encoders of images and of audio in conversations. Nearly all tensors that it omits are matrices,
so this module checks only matrices. Vectors are not checked, because some have infinite values on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from compiler.frontend.errors import DamagedFile
from compiler.frontend.weights import Derived, Tensor, WeightSource
from compiler.ir.blocks import BLOCKS
from runtime.files import AGAIN

PIECE = 1 << 18  # number of values that are checked at a time; they fit into a CPU's cache
# for each type of floats: the type of integers of the same size, and the bits of the exponent, which all are 1 in infinity and NaN
EXPONENTS: Mapping[np.dtype[Any], tuple[type[np.unsignedinteger[Any]], int]] = {
    np.dtype(np.float32): (np.uint32, 0x7F800000),
    np.dtype(np.float16): (np.uint16, 0x7C00),
    np.dtype(ml_dtypes.bfloat16): (np.uint16, 0x7F80),
}


class Checked(Derived):
    """A source that checks matrices of floats, and blocks of GGUF files, when they are read. `read` raises DamagedFile if a value is not
    finite."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source, source.tensors)

    def read(self, name: str) -> Tensor:
        tensor = self.source.read(name)
        blocks = BLOCKS.get(name.rpartition(".")[2])
        if tensor.ndim > 1 and not (is_finite(tensor) if blocks is None else blocks.is_finite(tensor)):
            raise DamagedFile(f"tensor {name!r} has values that are not finite numbers; its file may be damaged: {AGAIN}")
        return tensor


def is_finite(tensor: NDArray[Any]) -> bool:
    """Return whether all values are finite. Types without infinity and NaN in the usual place, such as 8-bit floats, count as finite."""
    if tensor.dtype not in EXPONENTS:
        return True
    integers, mask = EXPONENTS[tensor.dtype]
    flat = np.ascontiguousarray(tensor).reshape(-1).view(integers)
    pieces = (flat[start : start + PIECE] for start in range(0, flat.size, PIECE))
    return not any(bool(((piece & integers(mask)) == mask).any()) for piece in pieces)
