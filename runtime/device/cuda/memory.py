"""Memory of a card, and tensors in it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from runtime.device.cuda.card import Card


class Block:
    """The memory of one allocation. The card frees it when nothing refers to it any more."""

    __slots__ = ("__weakref__", "address", "num_bytes")

    def __init__(self, card: Card, num_bytes: int, part: str) -> None:
        """Allocate zeroed memory. `part` names the purpose of the memory in messages."""
        self.num_bytes = num_bytes
        self.address = card.allocate(self, num_bytes, part)


@dataclass(frozen=True, slots=True, eq=False)
class CudaMemory:
    """A part of a block."""

    block: Block
    address: int
    num_bytes: int

    @property
    def addresses(self) -> tuple[int, ...]:
        return (self.address,)


@dataclass(frozen=True, slots=True, eq=False)
class CudaTensor:
    """A tensor in a block, at an address of the card."""

    block: Block
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    writable: bool = True

    @property
    def addresses(self) -> tuple[int, ...]:
        return (self.address,)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def reshape(self, shape: tuple[int, ...]) -> CudaTensor:
        return CudaTensor(self.block, self.address, shape, self.dtype, self.writable)
