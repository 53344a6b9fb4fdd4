"""A GPU as a device: see runtime/device/base.py for the methods. A tensor is memory of the card with a shape, and a heap is an array of the
host that regions read at each run. Parameters that take handles have type `Any`: only the device itself makes handles."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.base import Bases, CardUsage, Derive, Device, HeapHandle, Launch, Limits, Words
from runtime.device.cpu.device import CpuCode
from runtime.device.cuda import driver
from runtime.device.cuda.assembled import load_module
from runtime.device.cuda.capability import check_target
from runtime.device.cuda.card import Card
from runtime.device.cuda.clock import Clock
from runtime.device.cuda.inputs import MOST_BYTES, Inputs
from runtime.device.cuda.last_launch import LastLaunch
from runtime.device.cuda.memory import Block, CudaMemory, CudaTensor
from runtime.device.cuda.records import Grid, Rank
from runtime.device.cuda.region import LAUNCH_BYTES, CudaRegion
from runtime.errors import IncompatibleExecutable, OutOfMemory
from runtime.executable import HostCode

Array = NDArray[Any]


class Heap:
    """The integers of a call, in memory of the host."""

    __slots__ = ("address", "words")

    def __init__(self, words: Sequence[int]) -> None:
        self.words = np.array(words, np.int64)
        self.address = self.words.ctypes.data


class CudaCode:
    """The code of an executable on a card: kernels in a module of the driver, and functions of the host. For `beside` see `load_module` in
    assembled.py."""

    def __init__(self, card: Card, ptx: bytes, target: str, host: HostCode | None, beside: Path | None) -> None:
        """Load the code. Raise IncompatibleExecutable if the card cannot run the code, or if `host` is None."""
        check_target(target, card.capability)
        if host is None:
            raise IncompatibleExecutable("the executable has no code for the host; compile the program again")
        self._host = CpuCode(host.object_code, host.target)
        with card:
            self._module = load_module(card, ptx, beside)
        card.free_with(self, partial(_unload, card, self._module))
        self._functions: dict[str, int] = {}

    def derive(self, symbol: str) -> Derive:
        native = self._host.derive(symbol)

        def derive(handle: HeapHandle) -> int:
            assert isinstance(handle, Heap)
            return native(HeapHandle(handle.address))

        return derive

    def function(self, symbol: str, shared_bytes: int) -> int:
        if symbol not in self._functions:
            self._functions[symbol] = driver.function_of(self._module, symbol)
            if shared_bytes:
                driver.allow_shared_bytes(self._functions[symbol], shared_bytes, symbol)
        return self._functions[symbol]

    def grid(self, symbol: str) -> Grid:
        return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(self._host.address(symbol))


def _unload(card: Card, module: int) -> None:
    """Unload the code of a card, after its last kernel has ended."""
    card.wait()  # a kernel of the module may still run
    driver.unload_module(module)


def open_device(*, num_threads: int | None, pinned: bool, stack_bytes: int, number: int, num_ranks: int, assembled: Path | None) -> Device:
    """Open one GPU, or several as ranks: see `open_device` in runtime/device/registry.py. GPUs use neither `num_threads` nor `pinned` nor
    `stack_bytes`."""
    if num_ranks == 1:
        return CudaDevice(number, assembled)
    from runtime.device.cuda.ranks import CudaRanks  # imported here, because ranks.py imports this module

    return CudaRanks([CudaDevice(each, assembled) for each in range(number, number + num_ranks)])


class CudaDevice:
    """One GPU. `number` is its number in the driver."""

    tensor_type: type = CudaTensor
    num_threads = 1  # threads of the host

    def __init__(self, number: int = 0, assembled: Path | None = None) -> None:
        self._card = Card(number)
        self._assembled = assembled
        self._last = LastLaunch(self._card)
        self._card.last_launch = weakref.ref(self._last)  # weak: memory that `_last` owns is freed only when nothing refers to `_last`
        self._inputs = Inputs(self._card)
        self._clock = Clock(self._card)
        self._regions: list[weakref.ref[CudaRegion]] = []

    @property
    def limits(self) -> Limits:
        return Limits(self._card.free_bytes, reads_host_arrays=False, launch_bytes=LAUNCH_BYTES)

    @property
    def busy_s(self) -> float:
        return self._clock.busy_s

    @property
    def card_usage(self) -> CardUsage:
        card, clock = self._card, self._clock
        num_graphs = sum(region.num_graphs for found in self._regions if (region := found()) is not None)
        memory = card.total_bytes, card.free_bytes
        return CardUsage(f"cuda:{card.number}", card.name, *memory, num_graphs, clock.num_runs, card.uploaded_bytes, clock.busy_s)

    # --- ranks ---------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Sequence[CudaDevice]:
        return (self,)

    def of_ranks(self, parts: Sequence[Any]) -> Any:
        (tensor,) = parts
        return tensor

    # --- memory ------------------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, *, sparse: bool = False) -> CudaMemory:
        block = Block(self._card, num_bytes, "memory")
        return CudaMemory(block, block.address, num_bytes)

    def settle(self) -> None:
        """Do nothing: all memory of a card is alike."""

    def part(self, memory: Any, begin: int, end: int) -> CudaMemory:
        return CudaMemory(memory.block, memory.address + begin, end - begin)

    def tensor(self, memory: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> CudaTensor:
        return CudaTensor(memory.block, memory.address + offset, shape, dtype)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> CudaTensor:
        num_bytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if num_bytes >= 2**63:
            raise OutOfMemory("result", required=num_bytes)
        block = Block(self._card, num_bytes, "result")
        return CudaTensor(block, block.address, shape, dtype)

    def kept(self, tensor: Any, memory: Any) -> CudaTensor:
        if not self._inputs.holds(tensor) and (tensor.block is not memory.block or not _overlap(tensor, memory)):
            return tensor
        copy = self.empty(tensor.shape, tensor.dtype)
        self._card.copy(copy.address, tensor.address, tensor.nbytes)
        return copy

    def is_compact(self, tensor: Any) -> bool:
        return True

    def is_writable(self, tensor: Any) -> bool:
        return tensor.writable

    # --- transfers ---------------------------------------------------------------------------------------------------

    def upload(self, array: Array) -> CudaTensor:
        block = Block(self._card, array.nbytes, "upload")
        if array.nbytes:
            self._card.upload(block.address, _bytes_of(array))
        return CudaTensor(block, block.address, array.shape, array.dtype, array.flags.writeable)

    def upload_inputs(self, arrays: Sequence[Array]) -> Sequence[CudaTensor]:
        alone = [array for array in arrays if array.nbytes > MOST_BYTES]
        if not alone:
            return self._inputs.upload(arrays)
        together = iter(self._inputs.upload([array for array in arrays if array.nbytes <= MOST_BYTES]))
        return [self.upload(array) if array.nbytes > MOST_BYTES else next(together) for array in arrays]

    def download(self, tensor: Any) -> Array:
        array = np.empty(tensor.shape, tensor.dtype)
        if array.nbytes:
            self._card.download(_bytes_of(array), tensor.address)
        return array

    def copy(self, target: Any, source: Any) -> None:
        if isinstance(source, CudaTensor) and source.dtype == target.dtype:
            if target.nbytes:
                self._card.copy(target.address, source.address, target.nbytes)
            return
        values = np.empty(target.shape, target.dtype)
        np.copyto(values, self.download(source) if isinstance(source, CudaTensor) else source, casting="same_kind")
        if values.nbytes:
            self._card.upload(target.address, _bytes_of(values))

    def copy_weight(self, target: Any, source: Any) -> None:
        self.copy(target, source)

    def copy_index(self, tensor: Any, axis: int, source: int, target: int) -> None:
        inner = _inner_bytes(tensor, axis)
        for begin in _row_addresses(tensor, axis):
            self._card.copy(begin + target * inner, begin + source * inner, inner)

    def read_index(self, tensor: Any, axis: int, index: int) -> bytes:
        inner = _inner_bytes(tensor, axis)
        data = np.empty(prod(tensor.shape[:axis]) * inner, np.uint8)
        for row, begin in enumerate(_row_addresses(tensor, axis)):
            self._card.download(data[row * inner : (row + 1) * inner], begin + index * inner)
        return data.tobytes()

    def write_index(self, tensor: Any, axis: int, index: int, data: memoryview) -> None:
        inner, values = _inner_bytes(tensor, axis), np.frombuffer(data, np.uint8)
        for row, begin in enumerate(_row_addresses(tensor, axis)):
            self._card.upload(begin + index * inner, values[row * inner : (row + 1) * inner])

    # --- code --------------------------------------------------------------------------------------------------------

    def heap(self, words: Sequence[int]) -> tuple[Words, HeapHandle]:
        heap = Heap(words)
        return heap.words.data, HeapHandle(heap)

    def load(self, object_code: bytes, target: str, host: HostCode | None = None) -> CudaCode:
        return CudaCode(self._card, object_code, target, host, self._assembled)

    def region(self, code: Any, launches: Sequence[Launch], bases: Bases, function: str) -> CudaRegion:
        return self.region_of([self.rank(code)], launches, bases, function, self.tensor_type)

    def rank(self, code: CudaCode) -> Rank:
        """Return this card as one of the ranks that run the code."""
        return Rank(self._card, self._last, code)

    def region_of(self, ranks: Sequence[Rank], launches: Sequence[Launch], bases: Bases, function: str, tensor_type: type) -> CudaRegion:
        """Build a region that the cards of `ranks` run together. This card is the first of them."""
        region = CudaRegion(ranks, self._clock, launches, bases, function, tensor_type)
        self._regions.append(weakref.ref(region))
        return region

    def reach(self, others: Sequence[CudaDevice]) -> None:
        """Let kernels read the memory of other cards."""
        self._card.reach([other._card for other in others])

    # --- threads -----------------------------------------------------------------------------------------------------

    def use_thread(self) -> None:
        """Do nothing: each call makes the card's context current for its thread."""

    def close(self) -> None:
        """Wait for the work of the GPU, which can still be used afterwards. Raise DeviceFault if the work has failed."""
        self._card.wait()


def _overlap(tensor: CudaTensor, memory: CudaMemory) -> bool:
    return tensor.address < memory.address + memory.num_bytes and memory.address < tensor.address + tensor.nbytes


def _inner_bytes(tensor: CudaTensor, axis: int) -> int:
    """Return the number of bytes at one index of `axis`, for one combination of indices of the axes before it. They are contiguous."""
    return prod(tensor.shape[axis + 1 :]) * tensor.dtype.itemsize


def _row_addresses(tensor: CudaTensor, axis: int) -> Iterator[int]:
    """Yield, for each combination of indices of the axes before `axis`, the address of the first of its elements."""
    row_bytes = tensor.shape[axis] * _inner_bytes(tensor, axis)
    yield from (tensor.address + row * row_bytes for row in range(prod(tensor.shape[:axis])))


def _bytes_of(array: Array) -> NDArray[np.uint8]:
    """Return the bytes of an array, copied only if the array is not compact."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
