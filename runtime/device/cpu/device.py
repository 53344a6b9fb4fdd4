"""The CPU as a device: see runtime/device/base.py for the methods. A tensor is a NumPy array, memory is a `HostMemory`, and the handle of a
heap is its address. Parameters that take handles have type `Any`: only the device itself makes handles."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy import empty, ndarray
from numpy.typing import NDArray

from runtime.device.base import Bases, Derive, HeapHandle, Launch, Limits, Placed, Repeat, TimeTo, Words
from runtime.device.cpu.code import ObjectCode
from runtime.device.cpu.cores import available_cores, num_cores_of_affinity
from runtime.device.cpu.host import check_target
from runtime.device.cpu.layouts import Plan
from runtime.device.cpu.memory import address_of, host_buffer, sparse_buffer, use_huge_pages
from runtime.device.cpu.numa import Placement
from runtime.device.cpu.system_memory import system_memory
from runtime.device.cpu.team import LaunchList, Record, Team
from runtime.errors import BoundExceeded, InvalidProgram, OutOfMemory
from runtime.executable import HostCode

Array = NDArray[Any]


class HostMemory:
    """A block of memory of the host, as an array of bytes with its address."""

    __slots__ = ("address", "data", "num_bytes")

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data = data
        self.num_bytes = data.nbytes
        self.address = address_of(data)


class CpuCode:
    """Loaded machine code. `address` returns the address of a symbol."""

    def __init__(self, object_code: bytes, target: str) -> None:
        check_target(target)
        self._object = ObjectCode(object_code)
        self.address = self._object.address

    def derive(self, symbol: str) -> Derive:
        return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(self.address(symbol))


class CpuRegion:
    """A launch list of the thread team. `place` writes the addresses of constants and weights, and each run those of all other bases."""

    def __init__(self, team: Team, code: CpuCode, launches: Sequence[Launch], bases: Bases, function: str) -> None:
        records = [Record(code.address(x.body), code.address(x.grid), x.buffers, x.dims) for x in launches]
        self._launches = LaunchList(records, bases.count + 1, bases.sizes, team.num_readers)
        self._words = self._launches.bases
        self._kernels = [launch.kernel for launch in launches]
        self._registers = bases.registers
        self._arena = bases.arena
        self._function = function
        self._team, self._run = team, team.run

    def place(self, base: int, tensor: Any) -> None:
        self._launches.place(base, address_of(tensor))

    def prepare(self, heap: Any) -> None:
        """Do nothing: one launch list serves calls of all sizes."""

    def repeat(self, heap: Any, inputs: Sequence[Any], result: Placed) -> Repeat | None:
        bases = {register: base for base, register in self._registers}
        if self._arena is None or set(bases) - set(range(len(inputs))) or any(type(tensor) is not ndarray for tensor in inputs):
            return None
        spare = len(self._words) - 1  # the base of inputs that no launch reads
        plan = Plan(inputs, [bases.get(i, spare) for i in range(len(inputs))], result, self._arena)
        words, arena_base, heap_field, give = self._words, self._arena, self._launches.heap, plan.give
        repeat, shape, dtype, offset = self._team.repeat(self._launches, plan), result.shape, result.dtype, result.offset

        def again(tensors: Sequence[Any], arena: Any, in_arena: bool) -> Any:
            made = ndarray(shape, dtype, arena.data, offset) if in_arena else empty(shape, dtype)
            give(0 if in_arena else id(made), *map(id, tensors))
            words[arena_base] = arena.address
            heap_field[0] = heap
            return made if repeat() else None

        return again

    def run(
        self, heap: Any, arena: Any, registers: Sequence[Any], time_to: TimeTo | None = None, launches: LaunchList | None = None
    ) -> None:
        """Run all launches, or `launches`, a part of them."""
        words = self._words
        for base, register in self._registers:
            tensor = registers[register]
            if not isinstance(tensor, ndarray):
                kind = type(tensor).__name__
                raise InvalidProgram(f"{self._function}: register {register} of a launch holds a {kind}, not an array")
            words[base] = address_of(tensor)
        if self._arena is not None:
            words[self._arena] = arena.address
        launches = launches or self._launches
        launches.heap[0] = heap
        if time_to is None:
            self._run(launches)
            return
        for number, kernel in enumerate(self._kernels):
            single = self._launches.single(number)
            single.heap[0] = heap
            start = time.perf_counter()
            self._run(single)
            time_to(kernel, time.perf_counter() - start)

    def in_parts(self, heap: Any, arena: Any, registers: Sequence[Any]) -> Iterator[None]:
        """Run the launches one at a time, and yield between two of them."""
        for number in range(len(self._kernels)):
            if number:
                yield
            self.run(heap, arena, registers, launches=self._launches.single(number))


def open_device(
    *, num_threads: int | None, pinned: bool, stack_bytes: int, number: int, num_ranks: int, assembled: Path | None
) -> CpuDevice:
    """Open the CPU: see `open_device` in runtime/device/registry.py. `stack_bytes` is the stack that kernels need in each thread. The CPU
    uses neither `number` nor `assembled`."""
    assert num_ranks == 1, "a load on the CPU has no ranks"
    return CpuDevice(num_threads, pinned=pinned, stack_bytes=stack_bytes)


def _too_large(shape: tuple[int, ...]) -> str:
    return f"an array of shape {shape} has no elements, but its other extents are too large together; declare the ranges of its extents"


class CpuDevice:
    """The cores of this process, as a team of threads."""

    tensor_type: type = np.ndarray

    def __init__(self, num_threads: int | None = None, *, pinned: bool = False, stack_bytes: int = 0) -> None:
        """Start the team. `num_threads` defaults to the number of usable cores. With `pinned`, each thread is pinned to a
        separate core, unless there are more threads than usable cores."""
        cores = available_cores()
        self.num_threads = num_threads or len(cores)
        # Without `pinned`, a team that leaves cores unused is not placed: other servers with teams of its size would choose the same cores.
        has_all = self.num_threads == len(cores) == num_cores_of_affinity()
        is_placed = self.num_threads <= len(cores) if pinned else has_all
        self._placement = Placement.of(cores[: self.num_threads]) if is_placed else Placement()
        limits, nodes = self._placement.limits(pinned=pinned), self._placement.nodes
        self._team = Team(self.num_threads, num_cores=len(cores), limits=limits, nodes=nodes, stack_bytes=stack_bytes)
        self._sparse: list[weakref.ref[Array]] = []
        # Without `pinned`, the caller is not limited to cores, because the threads and processes that it starts would inherit the limit.
        self.use_thread = self._team.limit_caller if pinned else lambda: None
        self.close = self._team.close

    @property
    def limits(self) -> Limits:
        return Limits(system_memory().available_bytes, reads_host_arrays=not self._placement.has_several_nodes)

    @property
    def busy_s(self) -> float:
        return self._team.busy_s

    @property
    def card_usage(self) -> None:
        return None

    # --- ranks -------------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Sequence[CpuDevice]:
        return (self,)

    def of_ranks(self, parts: Sequence[Any]) -> Any:
        (tensor,) = parts
        return tensor

    # --- memory ------------------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, *, sparse: bool = False) -> HostMemory:
        if not sparse:
            return HostMemory(host_buffer(num_bytes))
        buffer = sparse_buffer(num_bytes)
        assert buffer.base is not None, "an array within a larger block"
        self._sparse.append(weakref.ref(buffer.base))  # the base lives as long as any array in this memory
        return HostMemory(buffer)

    def settle(self) -> None:
        for found in self._sparse:
            if (whole := found()) is not None:
                use_huge_pages(whole)

    def part(self, memory: Any, begin: int, end: int) -> HostMemory:
        return HostMemory(memory.data[begin:end])

    def tensor(self, memory: Any, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        try:
            return np.ndarray(shape, dtype, memory.data, offset)
        except ValueError as error:
            raise BoundExceeded(_too_large(shape)) from error

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        try:
            return np.empty(shape, dtype)
        except (MemoryError, ValueError) as error:
            if 0 in shape:
                raise BoundExceeded(_too_large(shape)) from error
            raise OutOfMemory("result", required=int(np.prod(shape, dtype=object)) * dtype.itemsize) from error

    def kept(self, tensor: Any, memory: Any) -> Array:
        if not memory.num_bytes:
            return tensor
        # The first comparison is enough for tensors in the arena, and it is fast.
        inside = tensor.base is memory.data.base or np.may_share_memory(tensor, memory.data)
        return tensor.copy() if inside else tensor

    def is_compact(self, tensor: Any) -> bool:
        flags = tensor.flags
        return flags.c_contiguous and flags.aligned

    def is_writable(self, tensor: Any) -> bool:
        return tensor.flags.writeable

    # --- transfers: uploads and downloads copy nothing ---------------------------------------------------------------

    def upload(self, array: Array) -> Array:
        return array

    def upload_inputs(self, arrays: Sequence[Array]) -> Sequence[Array]:
        return arrays

    def download(self, tensor: Any) -> Array:
        return tensor

    def copy(self, target: Any, source: Any) -> None:
        np.copyto(target, source, casting="same_kind")

    def copy_weight(self, target: Any, source: Any) -> None:
        if self._placement.has_several_nodes:
            self._placement.copy(target, source)
        else:
            self.copy(target, source)

    def copy_index(self, tensor: Any, axis: int, source: int, target: int) -> None:
        before = (slice(None),) * axis
        tensor[(*before, target)] = tensor[(*before, source)]

    def read_index(self, tensor: Any, axis: int, index: int) -> bytes:
        return tensor[(*(slice(None),) * axis, index)].tobytes()

    def write_index(self, tensor: Any, axis: int, index: int, data: memoryview) -> None:
        part = tensor[(*(slice(None),) * axis, index)]
        part[...] = np.frombuffer(data, tensor.dtype).reshape(part.shape)

    # --- code --------------------------------------------------------------------------------------------------------

    def heap(self, words: Sequence[int]) -> tuple[Words, HeapHandle]:
        heap = np.array(words, np.int64)
        return heap.data, HeapHandle(address_of(heap))

    def load(self, object_code: bytes, target: str, host: HostCode | None = None) -> CpuCode:
        return CpuCode(object_code, target)

    def region(self, code: Any, launches: Sequence[Launch], bases: Bases, function: str) -> CpuRegion:
        return CpuRegion(self._team, code, launches, bases, function)
