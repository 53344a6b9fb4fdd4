"""The protocol between a device and the rest of the runtime: memory, code, regions (lists of kernel launches) and heaps (the integers of a
call). Only the device knows addresses; all other parts of the runtime hold handles.

The CPU (`runtime/device/cpu`) implements the protocol with host memory: its tensors are NumPy arrays, so upload and download copy nothing.
With CUDA a tensor is device memory with a shape, and a heap is a host array. A run of a region copies the arguments of its kernels
(records) to the GPU, and launches a graph whose kernels read them. `runtime/device/registry.py` finds the device of an executable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.executable import HostCode

Words = memoryview  # its elements are int64
HeapHandle = NewType("HeapHandle", object)  # identifies a heap to regions and shape functions
Derive = Callable[[HeapHandle], int]  # calls a shape function and returns its result, see runtime/executable.py

TimeTo = Callable[[str, float], None]  # is called with the name of a kernel and the seconds that the kernel took
# Runs a region on the given inputs and arena, and returns the result: a tensor in the arena if the last argument is true, else a copy.
# Returns None, and runs nothing, if an input has another layout than the inputs for which `Region.repeat` made the function.
Repeat = Callable[[Sequence[Any], "Memory", bool], Any]


class Tensor(Protocol):
    """A compact row-major array in memory of the device."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def reshape(self, shape: tuple[int, ...], /) -> Any: ...


class Memory(Protocol):
    """A block of memory that begins at a multiple of 64 bytes."""

    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the memory of a device."""

    free_bytes: int  # device memory that programs may still allocate
    reads_host_arrays: bool  # whether kernels read host arrays as fast as device memory: weights may then stay in a mapped file
    launch_bytes: int = 0  # device memory that a captured launch occupies; 0 if the device does not capture launches


@dataclass(frozen=True, slots=True)
class CardUsage:
    """The memory of a GPU, as its driver reports it for all processes together, and what this process has done on the GPU so far."""

    device: str  # such as "cuda:0"
    name: str
    total_bytes: int
    free_bytes: int
    num_graphs: int = 0  # number of graphs that exist now
    num_graph_launches: int = 0
    uploaded_bytes: int = 0  # bytes copied from the host, such as weights, inputs, pages and the arguments of kernels
    busy_s: float = 0.0  # seconds that the GPU has spent in graphs


@dataclass(frozen=True, slots=True)
class Launch:
    """One phase of a kernel with its operands. A buffer is a pair: the number of its base, and the heap slot of its offset."""

    kernel: str
    body: str  # name of the function that runs the phase; like `grid`, a symbol of the code
    grid: str
    buffers: tuple[tuple[int, int], ...]
    dims: tuple[int, ...]  # heap slots of the kernel's integers
    threads: int = 1  # threads per block on a GPU
    num_counters: int = 0  # number of counters that the blocks of a GPU share
    shared_bytes: int = 0  # bytes of shared memory per block that the launch requests
    ranks: tuple[int, ...] = ()  # for each buffer, the rank in whose memory it is: see `Kernel.ranks` of runtime/executable.py
    overlaps: bool = False  # whether the launch may begin before earlier launches have ended: its kernel then waits for their end itself


@dataclass(frozen=True, slots=True)
class Bases:
    """The tensors in which a region's buffers are. A buffer refers to its tensor by a number, the base."""

    count: int
    registers: tuple[tuple[int, int], ...]  # (base, register) of each base whose tensor is read from a register at every run
    arena: int | None  # the base whose tensor is the arena of the call; None: the region does not use the arena
    sizes: Mapping[int, int]  # number of bytes of each base that is a constant or a weight of known shape


@dataclass(frozen=True, slots=True)
class Placed:
    """The place, shape and element type of an array in the arena. `offset` is in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Code(Protocol):
    """Machine code that the device has loaded."""

    def derive(self, symbol: str) -> Derive:
        """Return the shape function with this name."""
        ...


class Region(Protocol):
    """Launches that run in order. One call of `run` runs all of them."""

    def place(self, base: int, tensor: Tensor) -> None:
        """Set the tensor of a base for all later runs. This is for constants and weights, which do not move."""
        ...

    def prepare(self, heap: HeapHandle) -> None:
        """Prepare for later runs whose integers have the same orders of magnitude (powers of two) as those in `heap`, without running now:
        a GPU captures a graph."""
        ...

    def repeat(self, heap: HeapHandle, inputs: Sequence[Any], result: Placed) -> Repeat | None:
        """Return a function that runs the region with this heap on other inputs that have the types, element types and shapes of `inputs`.
        `inputs` are the values of the first registers. `result` is the place of the result in the arena. Return None if the device has no
        faster way than `run`."""
        ...

    def run(self, heap: HeapHandle, arena: Memory, registers: Sequence[Any], time_to: TimeTo | None = None) -> None:
        """Run the launches. With `time_to`, run them one by one, and call `time_to` with each kernel's name and seconds."""
        ...

    def in_parts(self, heap: HeapHandle, arena: Memory, registers: Sequence[Any]) -> Iterator[None]:
        """Run the launches in parts, and yield between two parts. Other calls, even of this region, may run between two parts. A device on
        which all launches together take milliseconds may run them as one part."""
        ...


class Device(Protocol):
    """A machine that runs executables: the CPU, a GPU, or several GPUs that run programs together."""

    @property
    def tensor_type(self) -> type:
        """The class of this device's tensors."""
        ...

    @property
    def limits(self) -> Limits:
        """The memory limits of the device at this moment."""
        ...

    @property
    def num_threads(self) -> int:
        """The number of threads of the host that the device uses; 1 for a GPU."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds that the device, or its first rank, has spent in kernels so far."""
        ...

    @property
    def card_usage(self) -> CardUsage | None:
        """The usage of the GPU, or of the first one if the device has several ranks; None if the device is no GPU."""
        ...

    # --- ranks: devices that run programs together, each on memory of its own (`Kernel.ranks` of runtime/executable.py) ---

    @property
    def ranks(self) -> Sequence[Device]:
        """The devices of which this device consists. A single device consists of itself."""
        ...

    def of_ranks(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor that consists of one tensor per rank, all of the same shape and element type."""
        ...

    # --- memory ---

    def allocate(self, num_bytes: int, *, sparse: bool = False) -> Memory:
        """Allocate zeroed memory. `sparse`: the caller first writes only some parts of the memory, and most parts later or never. Raise
        OutOfMemory if there is not enough."""
        ...

    def settle(self) -> None:
        """Speed up later calls by work on sparse memory, such as using huge pages, which `allocate` did not do because it would have
        delayed the first calls. Another thread may call this while calls run. Memory that is written afterwards may need another
        `settle`."""
        ...

    def part(self, memory: Memory, begin: int, end: int) -> Memory:
        """Return the bytes `begin` to `end` - 1 of a block of memory, without a copy."""
        ...

    def tensor(self, memory: Memory, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """Return an array at an offset in `memory`."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """Return an array in newly allocated memory. Raise OutOfMemory if there is not enough."""
        ...

    def kept(self, tensor: Tensor, memory: Memory) -> Tensor:
        """Return a copy of a tensor that later calls may overwrite, because it is in `memory` or among the inputs of the present call.
        Return any other tensor itself."""
        ...

    def is_compact(self, tensor: Any) -> bool:
        """Return whether the elements lie one after another in row-major order, as kernels require."""
        ...

    def is_writable(self, tensor: Any) -> bool:
        """Return whether a program may change the tensor in place."""
        ...

    # --- transfers ---

    def upload(self, array: NDArray[Any]) -> Tensor:
        """Return a tensor with the values of an array. It is writable if the array is."""
        ...

    def upload_inputs(self, arrays: Sequence[NDArray[Any]]) -> Sequence[Tensor]:
        """Upload the arrays of one call together. The next `upload_inputs` may overwrite the returned tensors: see `kept`."""
        ...

    def download(self, tensor: Tensor) -> NDArray[Any]:
        """Return the tensor's values as an array of the host. The array may be a view, so read it before the tensor's memory changes."""
        ...

    def copy(self, target: Tensor, source: Tensor | NDArray[Any]) -> None:
        """Copy between tensors of the same shape. Elements are converted under NumPy's casting rule "same_kind"."""
        ...

    def copy_weight(self, target: Tensor, source: Tensor | NDArray[Any]) -> None:
        """Copy into memory that has not been written yet. If the device limits its threads to the cores of several memory nodes, each part
        of the copy is placed near the cores that read it."""
        ...

    def copy_index(self, tensor: Tensor, axis: int, source: int, target: int) -> None:
        """Copy the slice at index `source` of the axis to index `target`."""
        ...

    def read_index(self, tensor: Tensor, axis: int, index: int) -> bytes:
        """Return the bytes of the slice at an index of the axis. With several ranks, the slices of all ranks follow each other."""
        ...

    def write_index(self, tensor: Tensor, axis: int, index: int, data: memoryview) -> None:
        """Set the slice at an index of the axis to bytes that `read_index` has returned for a tensor whose slices have the same shape and
        element type."""
        ...

    # --- code ---

    def heap(self, words: Sequence[int]) -> tuple[Words, HeapHandle]:
        """Make a heap that holds `words`, the integers of a call. Return the words, which the host writes, and the handle by which regions
        and shape functions read them. The handle is valid as long as the returned words exist."""
        ...

    def load(self, object_code: bytes, target: str, host: HostCode | None = None) -> Code:
        """Load code. `target` states the features that the code needs, as in an executable; `host` has the functions that the host calls.
        Raise IncompatibleExecutable if the device cannot run the code, and DamagedCode if the code is damaged."""
        ...

    def region(self, code: Code, launches: Sequence[Launch], bases: Bases, function: str) -> Region:
        """Build a region. `function` is the name of the function that runs the region, for messages."""
        ...

    # --- threads ---

    def use_thread(self) -> None:
        """Prepare the calling thread for running regions."""
        ...

    def close(self) -> None:
        """Wait for the work of the device, and end its helper threads. Only the CPU has helper threads."""
        ...
