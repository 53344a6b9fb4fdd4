"""Several GPUs of this machine as one device. Each GPU is a rank: all run the same launches with the same integers, each on its own memory.

A tensor is one tensor per rank, all of the same shape and type. An array that the host uploads has the same values on all ranks. Weights,
and values that are computed from them, may differ from rank to rank. Kernels may read the memory of other ranks: see `Kernel.ranks` of
`runtime/executable.py`. A result that the host downloads must be the same on all ranks: the host downloads that of rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.base import Bases, CardUsage, Derive, HeapHandle, Launch, Limits, Words
from runtime.device.cuda.device import CudaCode, CudaDevice
from runtime.device.cuda.memory import CudaMemory, CudaTensor
from runtime.device.cuda.region import CudaRegion
from runtime.executable import HostCode

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class RankMemory:
    """A block of memory on each rank, all of the same size."""

    parts: tuple[CudaMemory, ...]  # by rank

    @property
    def num_bytes(self) -> int:
        """Bytes on each rank."""
        return self.parts[0].num_bytes

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(part.address for part in self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class RankTensor:
    """A tensor on each rank, all of the same shape and element type."""

    parts: tuple[CudaTensor, ...]  # by rank

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(part.address for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.parts[0].dtype

    @property
    def size(self) -> int:
        return self.parts[0].size

    @property
    def nbytes(self) -> int:
        return self.parts[0].nbytes

    def reshape(self, shape: tuple[int, ...]) -> RankTensor:
        return RankTensor(tuple(part.reshape(shape) for part in self.parts))


class RankCode:
    """The code of an executable, loaded by each rank."""

    def __init__(self, parts: Sequence[CudaCode]) -> None:
        self.parts = parts

    def derive(self, symbol: str) -> Derive:
        return self.parts[0].derive(symbol)


class CudaRanks:
    """The GPUs that run a program together. They can read the memory of each other."""

    tensor_type: type = RankTensor
    num_threads = 1  # threads of the host

    def __init__(self, ranks: Sequence[CudaDevice]) -> None:
        self._ranks = tuple(ranks)
        for rank in self._ranks:
            rank.reach([other for other in self._ranks if other is not rank])

    @property
    def limits(self) -> Limits:
        found = [rank.limits for rank in self._ranks]
        return replace(found[0], free_bytes=min(limits.free_bytes for limits in found))

    @property
    def busy_s(self) -> float:
        return self._ranks[0].busy_s

    @property
    def card_usage(self) -> CardUsage:
        return self._ranks[0].card_usage

    # --- ranks -------------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Sequence[CudaDevice]:
        return self._ranks

    def of_ranks(self, parts: Sequence[Any]) -> RankTensor:
        return RankTensor(tuple(parts))

    # --- memory ------------------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, *, sparse: bool = False) -> RankMemory:
        return RankMemory(tuple(rank.allocate(num_bytes, sparse=sparse) for rank in self._ranks))

    def settle(self) -> None:
        """Do nothing: all memory of a card is alike."""

    def part(self, memory: Any, begin: int, end: int) -> RankMemory:
        return RankMemory(tuple(rank.part(own, begin, end) for rank, own in zip(self._ranks, memory.parts, strict=True)))

    def tensor(self, memory: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> RankTensor:
        return RankTensor(tuple(rank.tensor(own, offset, shape, dtype) for rank, own in zip(self._ranks, memory.parts, strict=True)))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> RankTensor:
        return RankTensor(tuple(rank.empty(shape, dtype) for rank in self._ranks))

    def kept(self, tensor: Any, memory: Any) -> RankTensor:
        parts = tuple(rank.kept(part, own) for rank, part, own in zip(self._ranks, tensor.parts, memory.parts, strict=True))
        return tensor if parts[0] is tensor.parts[0] else RankTensor(parts)

    def is_compact(self, tensor: Any) -> bool:
        return True

    def is_writable(self, tensor: Any) -> bool:
        return all(part.writable for part in tensor.parts)

    # --- transfers ---------------------------------------------------------------------------------------------------

    def upload(self, array: Array) -> RankTensor:
        return RankTensor(tuple(rank.upload(array) for rank in self._ranks))

    def upload_inputs(self, arrays: Sequence[Array]) -> Sequence[RankTensor]:
        found = [rank.upload_inputs(arrays) for rank in self._ranks]
        return [RankTensor(parts) for parts in zip(*found, strict=True)]

    def download(self, tensor: Any) -> Array:
        """Wait until all ranks have done their work, and return the tensor of rank 0. If a rank has a fault, its error is raised."""
        for rank in self._ranks[1:]:
            rank.close()  # waits for the work of the GPU, which can still be used afterwards
        return self._ranks[0].download(tensor.parts[0])

    def copy(self, target: Any, source: Any) -> None:
        for number, (rank, part) in enumerate(zip(self._ranks, target.parts, strict=True)):
            rank.copy(part, source.parts[number] if isinstance(source, RankTensor) else source)

    def copy_weight(self, target: Any, source: Any) -> None:
        self.copy(target, source)

    def copy_index(self, tensor: Any, axis: int, source: int, target: int) -> None:
        for rank, part in zip(self._ranks, tensor.parts, strict=True):
            rank.copy_index(part, axis, source, target)

    def read_index(self, tensor: Any, axis: int, index: int) -> bytes:
        """Return the bytes of all ranks, one after the other."""
        return b"".join(rank.read_index(part, axis, index) for rank, part in zip(self._ranks, tensor.parts, strict=True))

    def write_index(self, tensor: Any, axis: int, index: int, data: memoryview) -> None:
        size = len(data) // len(self._ranks)
        for number, (rank, part) in enumerate(zip(self._ranks, tensor.parts, strict=True)):
            rank.write_index(part, axis, index, data[number * size : (number + 1) * size])

    # --- code --------------------------------------------------------------------------------------------------------

    def heap(self, words: Sequence[int]) -> tuple[Words, HeapHandle]:
        return self._ranks[0].heap(words)

    def load(self, object_code: bytes, target: str, host: HostCode | None = None) -> RankCode:
        return RankCode([rank.load(object_code, target, host) for rank in self._ranks])

    def region(self, code: Any, launches: Sequence[Launch], bases: Bases, function: str) -> CudaRegion:
        ranks = [rank.rank(own) for rank, own in zip(self._ranks, code.parts, strict=True)]
        return self._ranks[0].region_of(ranks, launches, bases, function, self.tensor_type)

    # --- threads -----------------------------------------------------------------------------------------------------

    def use_thread(self) -> None:
        """Do nothing: each call makes a card's context current for its thread."""

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
