"""A fake second device: it runs the CPU's kernels on memory that the host cannot use directly.

The device's memory holds every bit inverted. A region copies the memory that it uses to a staging area, runs kernels there, copies the
result back and overwrites the staging area. Code that treats a device tensor as an array, keeps an address, or expects kernels to read
integers where the host stored them computes nonsense.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.base import Bases, Derive, Device, HeapHandle, Launch, Limits, Placed, TimeTo, Words
from runtime.device.cpu.device import CpuCode, CpuDevice, CpuRegion, HostMemory
from runtime.device.cpu.memory import address_of, host_buffer
from runtime.executable import HostCode
from runtime.sections import align

Array = NDArray[Any]
SPOILED = 0xA5
DONE = object()


class Block:
    """A block of device memory. `hidden` holds its content, inverted; kernels run on the copy in `staged`."""

    def __init__(self, num_bytes: int) -> None:
        self.hidden = np.full(num_bytes, 0xFF, np.uint8)
        self.staged = host_buffer(num_bytes)
        self.staged[:] = SPOILED

    @contextmanager
    def at_work(self) -> Iterator[None]:
        np.invert(self.hidden, self.staged)
        yield
        np.invert(self.staged, self.hidden)
        self.staged[:] = SPOILED


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueMemory:
    block: Block
    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueTensor:
    block: Block
    begin: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    writable: bool = True

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def reshape(self, shape: tuple[int, ...]) -> OpaqueTensor:
        assert np.prod(shape, dtype=np.int64) == self.size, (shape, self.shape)
        return OpaqueTensor(self.block, self.begin, shape, self.dtype, self.writable)

    def of(self, memory: NDArray[np.uint8]) -> Array:
        """Return the tensor's elements in `memory`, which is the `hidden` or the `staged` memory of its block."""
        return np.ndarray(self.shape, self.dtype, memory, self.begin)


@dataclass(frozen=True, slots=True, eq=False)
class Heap:
    words: NDArray[np.int64]  # the host's copy
    block: Block  # the copy that kernels and shape functions read

    @contextmanager
    def at_work(self) -> Iterator[int]:
        """Copy the host's integers to the staging area and yield the address of this area. Afterwards copy back what kernels stored
        there."""
        staged = self.block.staged.view(np.int64)
        staged[: len(self.words)] = self.words
        yield address_of(staged)
        self.words[:] = staged[: len(self.words)]
        staged[:] = -1


class OpaqueCode:
    def __init__(self, code: CpuCode) -> None:
        self.code = code

    def derive(self, symbol: str) -> Derive:
        native = self.code.derive(symbol)

        def derive(handle: HeapHandle) -> int:
            assert isinstance(handle, Heap)
            with handle.at_work() as address:
                return native(HeapHandle(address))

        return derive


class OpaqueRegion:
    def __init__(self, region: CpuRegion, bases: Bases) -> None:
        self._region = region
        self._registers = [register for _, register in bases.registers]
        self._placed: dict[int, OpaqueTensor] = {}

    def place(self, base: int, tensor: Any) -> None:
        assert isinstance(tensor, OpaqueTensor)
        self._placed[base] = tensor

    def prepare(self, heap: Any) -> None:
        with heap.at_work() as address:
            self._region.prepare(address)

    def repeat(self, heap: Any, inputs: Sequence[Any], result: Placed) -> None:
        return None

    def run(self, heap: Any, arena: Any, registers: Sequence[Any], time_to: TimeTo | None = None) -> None:
        with self._at_work(heap, arena, registers) as (address, memory, staged):
            self._region.run(address, memory, staged, time_to)

    def in_parts(self, heap: Any, arena: Any, registers: Sequence[Any]) -> Iterator[None]:
        parts: Iterator[None] | None = None
        is_done = False
        while not is_done:
            if parts is not None:
                yield
            with self._at_work(heap, arena, registers) as (address, memory, staged):
                parts = parts or self._region.in_parts(address, memory, staged)
                is_done = next(parts, DONE) is DONE

    @contextmanager
    def _at_work(self, heap: Any, arena: Any, registers: Sequence[Any]) -> Iterator[tuple[Any, HostMemory, list[Any]]]:
        """Yield what the CPU's region gets in the places of the heap, the arena and the registers, while their content is staged."""
        tensors = {register: registers[register] for register in self._registers}
        assert all(isinstance(tensor, OpaqueTensor) for tensor in tensors.values()), tensors
        blocks = {x.block for x in (*tensors.values(), *self._placed.values())} | {arena.block}
        staged: list[Any] = list(registers)
        for register, tensor in tensors.items():
            staged[register] = tensor.of(tensor.block.staged)
        for base, tensor in self._placed.items():
            self._region.place(base, tensor.of(tensor.block.staged))
        memory = HostMemory(arena.block.staged[arena.begin : arena.begin + arena.num_bytes])
        with _all_at_work(list(blocks)), heap.at_work() as address:
            yield address, memory, staged


@contextmanager
def _all_at_work(blocks: list[Block]) -> Iterator[None]:
    if not blocks:
        yield
        return
    with blocks[0].at_work(), _all_at_work(blocks[1:]):
        yield


class OpaqueDevice:
    tensor_type: type = OpaqueTensor

    def __init__(self, num_threads: int | None = None, *, stack_bytes: int = 0) -> None:
        self._cpu = CpuDevice(num_threads, stack_bytes=stack_bytes)
        self.num_threads = self._cpu.num_threads
        self.use_thread, self.close = self._cpu.use_thread, self._cpu.close

    @property
    def limits(self) -> Limits:
        return Limits(self._cpu.limits.free_bytes, reads_host_arrays=False)

    @property
    def busy_s(self) -> float:
        return self._cpu.busy_s

    @property
    def card_usage(self) -> None:
        return None

    # --- ranks -------------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Sequence[OpaqueDevice]:
        return (self,)

    def of_ranks(self, parts: Sequence[Any]) -> Any:
        (tensor,) = parts
        return tensor

    # --- memory ------------------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, *, sparse: bool = False) -> OpaqueMemory:
        return OpaqueMemory(Block(num_bytes), 0, num_bytes)

    def settle(self) -> None:
        """Do nothing, because no memory of this device is sparse."""

    def part(self, memory: Any, begin: int, end: int) -> OpaqueMemory:
        assert 0 <= begin <= end <= memory.num_bytes
        return OpaqueMemory(memory.block, memory.begin + begin, end - begin)

    def tensor(self, memory: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> OpaqueTensor:
        tensor = OpaqueTensor(memory.block, memory.begin + offset, shape, dtype)
        assert offset + tensor.nbytes <= memory.num_bytes, (offset, shape, memory.num_bytes)
        return tensor

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> OpaqueTensor:
        self._cpu.empty(shape, dtype)  # raises OutOfMemory if the host lacks the memory
        return OpaqueTensor(Block(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize), 0, shape, dtype)

    def kept(self, tensor: Any, memory: Any) -> OpaqueTensor:
        apart = tensor.begin >= memory.begin + memory.num_bytes or tensor.begin + tensor.nbytes <= memory.begin
        if tensor.block is not memory.block or apart:
            return tensor
        copy = self.empty(tensor.shape, tensor.dtype)
        self.copy(copy, tensor)
        return copy

    def is_compact(self, tensor: Any) -> bool:
        return True

    def is_writable(self, tensor: Any) -> bool:
        return tensor.writable

    # --- transfers ---------------------------------------------------------------------------------------------------

    def upload(self, array: Array) -> OpaqueTensor:
        tensor = OpaqueTensor(Block(align(array.nbytes)), 0, array.shape, array.dtype, array.flags.writeable)
        self.copy(tensor, array)
        return tensor

    def upload_inputs(self, arrays: Sequence[Array]) -> Sequence[OpaqueTensor]:
        return [self.upload(array) for array in arrays]

    def download(self, tensor: Any) -> Array:
        assert isinstance(tensor, OpaqueTensor), tensor
        inverted = np.ascontiguousarray(tensor.of(tensor.block.hidden)).reshape(-1).view(np.uint8)
        return np.invert(inverted).view(tensor.dtype).reshape(tensor.shape)

    def copy(self, target: Any, source: Any) -> None:
        values = np.empty(target.shape, target.dtype)
        np.copyto(values, self.download(source) if isinstance(source, OpaqueTensor) else source, casting="same_kind")
        stored = target.block.hidden[target.begin : target.begin + target.nbytes]
        np.invert(values.reshape(-1).view(np.uint8), stored)

    def copy_weight(self, target: Any, source: Any) -> None:
        self.copy(target, source)

    def copy_index(self, tensor: Any, axis: int, source: int, target: int) -> None:
        before = (slice(None),) * axis
        hidden = tensor.of(tensor.block.hidden)
        hidden[(*before, target)] = hidden[(*before, source)]

    def read_index(self, tensor: Any, axis: int, index: int) -> bytes:
        return self.download(tensor)[(*(slice(None),) * axis, index)].tobytes()

    def write_index(self, tensor: Any, axis: int, index: int, data: memoryview) -> None:
        whole = self.download(tensor).copy()
        part = whole[(*(slice(None),) * axis, index)]
        part[...] = np.frombuffer(data, whole.dtype).reshape(part.shape)
        self.copy(tensor, whole)

    # --- code --------------------------------------------------------------------------------------------------------

    def heap(self, words: Sequence[int]) -> tuple[Words, HeapHandle]:
        heap = Heap(np.array(words, np.int64), Block(8 * max(1, len(words))))
        return heap.words.data, HeapHandle(heap)

    def load(self, object_code: bytes, target: str, host: HostCode | None = None) -> OpaqueCode:
        return OpaqueCode(self._cpu.load(object_code, target))

    def region(self, code: Any, launches: Sequence[Launch], bases: Bases, function: str) -> OpaqueRegion:
        return OpaqueRegion(self._cpu.region(code.code, launches, bases, function), bases)


def open_device(*, num_threads: int | None, pinned: bool, stack_bytes: int, number: int, num_ranks: int, assembled: Path | None) -> Device:
    return OpaqueDevice(num_threads, stack_bytes=stack_bytes)
