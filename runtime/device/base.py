"""What a device is to the rest of the runtime: memory, code, regions that replay, and a clock. Everything is a handle: only the device
that made one knows an address.

The CPU (`runtime/device/cpu`) implements it with host memory: its tensors are NumPy arrays, so upload and download copy nothing. With
CUDA a tensor is device memory with a shape, `upload` is one copy out of pinned memory, a heap is pinned words with a device's address,
and a region is a graph whose nodes read the heap. `runtime/device/registry.py` finds the device of an executable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.executable import HostCode

Words = memoryview  # of int64
HeapHandle = NewType("HeapHandle", object)  # where kernels and shape functions find the words of a heap
Derive = Callable[[HeapHandle], int]  # returns what a shape function does, see runtime/executable.py

TimeTo = Callable[[str, float], None]


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
    """A block of bytes that begins at a multiple of 64."""

    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Limits:
    free_bytes: int  # that programs may still take of the device's memory
    reads_host_arrays: bool  # kernels read arrays of the host as fast as memory of the device: weights in a mapped file can stay there
    launch_bytes: int = 0  # of the device's memory that a captured launch takes; 0 where launches are not captured


@dataclass(frozen=True, slots=True)
class Launch:
    """One phase of a kernel. A buffer is the number of its base and the heap slot of its offset."""

    kernel: str
    body: str  # symbols of the code
    grid: str
    buffers: tuple[tuple[int, int], ...]
    dims: tuple[int, ...]  # heap slots
    threads: int = 1  # of a block on a GPU
    num_counters: int = 0  # that the blocks share


@dataclass(frozen=True, slots=True)
class Bases:
    """The tensors in which a region's buffers lie, by the numbers of the bases."""

    count: int
    registers: tuple[tuple[int, int], ...]  # (base, register) of those looked up at each run
    arena: int | None  # the base that is the arena of the call


class Code(Protocol):
    """A loaded object."""

    def derive(self, symbol: str) -> Derive:
        """The shape function with this name."""
        ...


class Region(Protocol):
    """Launches that run in order, as often as asked, with one call each time."""

    def place(self, base: int, tensor: Tensor) -> None:
        """Set a base for all runs that follow: constants and weights stay in place."""
        ...

    def prepare(self, heap: HeapHandle) -> None:
        """Prepare for later runs whose integers have the magnitudes of these. Nothing runs now."""
        ...

    def run(self, heap: HeapHandle, arena: Memory, registers: Sequence[Any], time_to: TimeTo | None = None) -> None:
        """Run the launches. With `time_to`, run them one by one, and call it with each kernel's name and seconds."""
        ...


class Device(Protocol):
    @property
    def tensor_type(self) -> type:
        """The class of this device's tensors."""
        ...

    @property
    def limits(self) -> Limits:
        """The present limits of the device."""
        ...

    @property
    def num_threads(self) -> int: ...

    @property
    def busy_s(self) -> float:
        """Seconds in kernels so far."""
        ...

    @property
    def num_graphs(self) -> int:
        """The number of graphs that its regions captured; 0 on a device that captures none."""
        ...

    # --- memory ---

    def allocate(self, num_bytes: int) -> Memory:
        """Allocate zeroed memory. Raises OutOfMemory."""
        ...

    def part(self, memory: Memory, begin: int, end: int) -> Memory: ...

    def tensor(self, memory: Memory, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """An array at an offset in `memory`."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
        """An array in newly allocated memory. Raises OutOfMemory."""
        ...

    def kept(self, tensor: Tensor, memory: Memory) -> Tensor:
        """The tensor, or a copy if it lies in this memory or among inputs of a call, which are about to be reused."""
        ...

    def is_compact(self, tensor: Any) -> bool: ...

    def is_writable(self, tensor: Any) -> bool: ...

    # --- transfers ---

    def upload(self, array: NDArray[Any]) -> Tensor:
        """A tensor with the values of an array. It is writable if the array is."""
        ...

    def upload_inputs(self, arrays: Sequence[NDArray[Any]]) -> Sequence[Tensor]:
        """Upload the arrays of one call together. The next `upload_inputs` may write over their memory: see `kept`."""
        ...

    def download(self, tensor: Tensor) -> NDArray[Any]:
        """The values as an array of the host. Read it before the tensor's memory changes."""
        ...

    def copy(self, target: Tensor, source: Tensor | NDArray[Any]) -> None:
        """Copy between tensors of one shape. Elements convert as NumPy's "same_kind" allows."""
        ...

    def copy_weight(self, target: Tensor, source: Tensor | NDArray[Any]) -> None:
        """Copy into memory that nobody has written yet. Where the device has several memory nodes, each part of the copy lies near the
        cores that read it."""
        ...

    def copy_index(self, tensor: Tensor, axis: int, source: int, target: int) -> None:
        """Copy the slice at one index of the axis to another index."""
        ...

    # --- code ---

    def heap(self, words: Sequence[int]) -> tuple[Words, HeapHandle]:
        """A heap over `words`: integers of a call, which the host writes and kernels read. It is valid as long as `words` lives."""
        ...

    def load(self, object_code: bytes, target: str, host: HostCode | None = None) -> Code:
        """Load code. `target` states the features that it needs, as in an executable; `host` holds the functions that the host calls.
        Raises IncompatibleExecutable or DamagedCode."""
        ...

    def region(self, code: Code, launches: Sequence[Launch], bases: Bases, function: str) -> Region:
        """Build a region. Messages name it by `function`."""
        ...

    # --- threads ---

    def use_thread(self) -> None:
        """Let the calling thread run regions from now on."""
        ...

    def close(self) -> None: ...
