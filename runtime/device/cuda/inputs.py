"""Upload the arrays of a call with one copy from pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.cuda.card import Card
from runtime.device.cuda.memory import Block, CudaTensor

ALIGNMENT = 256  # alignment of each array in bytes: enough for vectors of any width, and no two arrays share a cache line
MOST_BYTES = 16 << 20  # largest array that is copied together with others, in bytes; larger arrays are copied separately


class Inputs:
    """Pinned memory of the host, and memory of the card of the same size. Both grow to the size of the largest call. Each call overwrites
    the inputs of the previous call."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._copied = card.event(self)  # event after which the pinned memory may be rewritten
        self._grow(0)

    def holds(self, tensor: CudaTensor) -> bool:
        """Return whether the tensor is among the inputs of the last call."""
        return tensor.block is self._block

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[CudaTensor]:
        """Copy the arrays to the card, and return them as tensors. The next call overwrites the tensors."""
        places, num_bytes = [0], 0
        for array in arrays:
            num_bytes += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
            places.append(num_bytes)
        if num_bytes > self._block.num_bytes:
            self._grow(num_bytes)
        with self._card:
            self._card.await_event(self._copied)
            for array, place in zip(arrays, places, strict=False):
                np.copyto(np.ndarray(array.shape, array.dtype, self._bytes, place), array)
            if num_bytes:
                self._card.copy_pinned(self._block.address, self._words[: num_bytes // 8])
            self._card.record(self._copied)
        block = self._block
        return [CudaTensor(block, block.address + p, a.shape, a.dtype, a.flags.writeable) for a, p in zip(arrays, places, strict=False)]

    def _grow(self, num_bytes: int) -> None:
        self._block = Block(self._card, num_bytes, "inputs of calls")
        self._words = self._card.pinned(self._block, num_bytes // 8)
        self._bytes = self._words.view(np.uint8)
