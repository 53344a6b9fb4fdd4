"""A GPU of this machine: its context, its memory, its only stream. No other file imports pycuda."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from runtime.device.cuda import driver
from runtime.device.cuda.capability import Capability
from runtime.errors import DeviceFault, NoDevice, OutOfMemory
from runtime.extras import installing
from runtime.units import in_units

LEAST_DRIVER = 12040  # CUDA 12.4, the first version that reads PTX 8.4
INSTALL = f"after CUDA's headers and NVIDIA's driver 550 or newer, {installing('cuda')}"


def pycuda() -> Any:
    """Return the initialised module `pycuda.driver`. Raise NoDevice if pycuda or NVIDIA's driver is missing, or if the driver is too old or
    finds no GPU that can be used."""
    try:
        found = import_module("pycuda.driver")
    except ModuleNotFoundError as error:
        raise NoDevice(f"GPUs need pycuda, which is not installed: {INSTALL}") from error
    except ImportError as error:
        raise NoDevice(f"NVIDIA's driver is not installed, or too old for pycuda ({error}): {INSTALL}") from error
    try:
        found.init()
    except found.Error as error:
        raise NoDevice(f"the driver finds no GPU that can be used ({error})") from error
    version = found.get_driver_version()
    if version < LEAST_DRIVER:
        raise NoDevice(f"the driver is for CUDA {_version(version)}; expected {_version(LEAST_DRIVER)} or newer: update it")
    return found


def _version(number: int) -> str:
    """Format a version of CUDA, which the driver states as 1000 * major + 10 * minor."""
    return f"{number // 1000}.{number % 1000 // 10}"


@dataclass(slots=True, weakref_slot=True, eq=False)
class Owned:
    """A stream or an event, which must be destroyed before the context."""

    thing: Any


@dataclass(frozen=True, slots=True)
class Found:
    """A GPU of this machine, as the driver describes it."""

    name: str
    capability: Capability
    total_bytes: int
    bytes_per_s: int  # rated bandwidth of its memory
    driver: str  # newest version of CUDA that the driver supports

    def __str__(self) -> str:
        memory, (major, minor) = f"{in_units(self.total_bytes)} at {self.bytes_per_s / 1e9:,.0f} GB/s", self.capability
        return f"{self.name}, {memory}, compute capability {major}.{minor}, driver for CUDA {self.driver}"


def found_cards() -> tuple[Found, ...]:
    """Return the GPUs of this machine, in the order of their numbers. Raises NoDevice if there is no driver that can be used."""
    cuda = pycuda()
    driver, known = _version(cuda.get_driver_version()), cuda.device_attribute

    def described(device: Any) -> Found:
        clock, bits = (device.get_attribute(a) for a in (known.MEMORY_CLOCK_RATE, known.GLOBAL_MEMORY_BUS_WIDTH))  # kHz; bits
        bytes_per_s = 2 * clock * 1000 * bits // 8  # memory transfers data at both edges of its clock
        return Found(str(device.name()), device.compute_capability(), device.total_memory(), bytes_per_s, driver)

    return tuple(described(cuda.Device(number)) for number in range(cuda.Device.count()))


def capability_of(number: int) -> Capability:
    """Return the compute capability of the GPU with this number. Raise NoDevice if there is no such GPU, or no driver that can be used."""
    return device_of(number).compute_capability()


def device_of(number: int) -> Any:
    """Return the driver's device with this number. Raise NoDevice if there is no such GPU, or no driver that can be used."""
    cuda = pycuda()
    count = cuda.Device.count()
    if not 0 <= number < count:
        raise NoDevice(f"there is no GPU {number}; this machine has {count}, numbered from 0")
    return cuda.Device(number)


def require_reachable(numbers: Sequence[int]) -> None:
    """Raise NoDevice unless these GPUs exist, are of one kind, and can read each other's memory."""
    cuda = pycuda()
    if (count := cuda.Device.count()) <= numbers[-1]:
        text = (
            f"tensor_parallel is {len(numbers)}, which needs GPUs {numbers[0]} to {numbers[-1]}; this machine has {count}, numbered from 0"
        )
        raise NoDevice(f"{text}: lower tensor_parallel, or choose another device")
    devices = {number: cuda.Device(number) for number in numbers}
    kinds = {number: (device.compute_capability(), device.multiprocessor_count) for number, device in devices.items()}
    if other := next((number for number in numbers if kinds[number] != kinds[numbers[0]]), 0):
        text = f"GPU {numbers[0]} ({devices[numbers[0]].name()}) and GPU {other} ({devices[other].name()}) are of different kinds"
        raise NoDevice(f"{text}; tensor_parallel needs equal ones")
    for number, device in devices.items():
        for peer, its in devices.items():
            if peer != number and not device.can_access_peer(its):
                text = f"GPU {number} cannot read the memory of GPU {peer}, which tensor_parallel needs"
                raise NoDevice(f"{text}: choose GPUs that NVLink or one PCIe switch connects, or leave tensor_parallel out")


class _Entered(threading.local):
    """The cards that this thread has entered by `with` and not left, the current one last."""

    def __init__(self) -> None:
        self.cards: list[Card] = []


_entered = _Entered()


class Card:
    """A GPU that is in use. Any thread may enter `with card:`, which makes the card's context current for that thread."""

    def __init__(self, number: int) -> None:
        """Retain the primary context of the GPU with this number, and make its stream. Raise NoDevice if the GPU cannot be used."""
        self._cuda = pycuda()
        device = device_of(number)
        self.number, self.name = number, str(device.name())
        self.capability: Capability = device.compute_capability()
        self.driver_version: int = self._cuda.get_driver_version()
        self.num_units: int = device.multiprocessor_count  # number of multiprocessors, each of which runs separate blocks
        self.total_bytes: int = device.total_memory()
        self.uploaded_bytes = 0  # bytes copied from the host so far
        self._context = device.retain_primary_context()
        # returns an object whose text describes the last launch, for messages about faults, or None if there is no such object
        self.last_launch: Callable[[], object | None] = lambda: None
        self._dropped: deque[Callable[[], None]] = deque()  # `free` functions of owners that are gone; a capture delays them
        self._capturing = False
        self._owned: weakref.WeakSet[Owned] = weakref.WeakSet()
        # Also runs when the process exits, because the driver may be gone before the objects are destroyed.
        weakref.finalize(self, _release, self._context, self._owned)
        self._stream = self.own(self._cuda.Stream)

    def __enter__(self) -> Card:
        if not _entered.cards or _entered.cards[-1] is not self:
            self._context.push()
        _entered.cards.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _entered.cards.pop()
        if not _entered.cards or _entered.cards[-1] is not self:
            self._context.pop()

    def reach(self, others: Sequence[Card]) -> None:
        """Let this card's kernels read the memory of other cards: see `require_reachable`."""
        for other in others:
            with other:
                context = driver.current_context()
            with self:
                driver.enable_peer_access(context)

    def own(self, make: Callable[[], Any]) -> Owned:
        """Make a stream or an event in the context of the card. It is destroyed before the context."""
        with self:
            owned = Owned(make())
        self._owned.add(owned)
        return owned

    @property
    def stream(self) -> Any:
        return self._stream.thing

    # --- memory ------------------------------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        with self, self._faults("its free memory"):
            return self._cuda.mem_get_info()[0]

    def allocate(self, owner: object, num_bytes: int, part: str) -> int:
        """Allocate zeroed memory that is freed with its owner, and return its address; for 0 bytes, return address 0. Raise OutOfMemory if
        the card has too little memory."""
        if num_bytes == 0:
            return 0
        with self, self._faults(part):
            try:
                block = self._cuda.mem_alloc(num_bytes)
            except self._cuda.MemoryError as error:
                raise OutOfMemory(f"{part} on GPU {self.number}", required=num_bytes, free=self.free_bytes) from error
            self._cuda.memset_d8(int(block), 0, num_bytes)
        self.free_with(owner, block.free)
        return int(block)

    def pinned(self, owner: object, num_words: int) -> NDArray[np.int64]:
        """Allocate pinned memory of the host, which the card can read and write. It is freed with its owner."""
        flags = self._cuda.host_alloc_flags.DEVICEMAP
        with self, self._faults("pinned memory"):
            words = self._cuda.pagelocked_zeros(max(1, num_words), np.int64, mem_flags=flags)
        base: Any = words.base
        self.free_with(owner, base.free)
        return words

    def address_of(self, pinned: NDArray[np.int64]) -> int:
        """Return the address by which the card reaches pinned words."""
        with self:
            base: Any = pinned.base
            return int(base.get_device_pointer())

    def free_with(self, owner: object, free: Callable[[], None]) -> None:
        """Call `free`, which frees something on the card, when nothing refers to `owner` any more, or when the process exits."""
        weakref.finalize(owner, self._free, free)

    def _free(self, free: Callable[[], None]) -> None:
        self._dropped.append(free)
        self._free_dropped()

    def _free_dropped(self) -> None:
        with suppress(IndexError):  # another thread may have emptied the list
            while self._dropped and not self._capturing:
                free = self._dropped.popleft()
                with suppress(self._cuda.Error, DeviceFault), self:  # after a fault, the context and all that it had are destroyed already
                    free()

    @contextmanager
    def capturing(self) -> Generator[None]:
        """Free nothing inside the `with`, because the driver ends a capture whose thread frees memory. Collect no garbage either, because
        garbage may own memory of other sessions. At the end, free the memory whose owners have gone meanwhile."""
        self._capturing, was_collecting = True, gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            self._capturing = False
            if was_collecting:
                gc.enable()
            self._free_dropped()

    # --- transfers: each begins after the end of all earlier launches --------------------------------------------------

    def upload(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy bytes of the host to an address of the card, and wait until the card has them."""
        with self, self._faults("upload"):
            self._cuda.memcpy_htod_async(address, data, self.stream)
            self.stream.synchronize()
        self.uploaded_bytes += data.nbytes

    def download(self, data: NDArray[np.uint8], address: int) -> None:
        """Copy bytes from an address of the card to `data`, and wait until they are there."""
        with self, self._faults("download"):
            self._cuda.memcpy_dtoh_async(data, address, self.stream)
            self.stream.synchronize()

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy bytes within the card. The host does not wait."""
        with self, self._faults("copy"):
            self._cuda.memcpy_dtod_async(target, source, num_bytes, self.stream)

    def copy_pinned(self, address: int, words: NDArray[np.int64]) -> None:
        """Copy pinned words to the card asynchronously. Do not write to them before the copy has ended: use `await_event` for an event that
        is recorded after the copy, or `wait`."""
        with self, self._faults("copy"):
            self._cuda.memcpy_htod_async(address, words, self.stream)
        self.uploaded_bytes += words.nbytes

    # --- waiting and events --------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until the stream has done all its work."""
        with self, self._faults("step"):
            self.stream.synchronize()

    def event(self, owner: object) -> Owned:
        """Make an event. It is destroyed with its owner, on any thread."""
        event = self.own(self._cuda.Event)
        weakref.finalize(owner, self._drop, event)
        return event

    def record(self, event: Owned) -> None:
        """Record an event after all work that was launched on the stream so far."""
        with self, self._faults("step"):
            event.thing.record(self.stream)

    def follow(self, event: Owned) -> None:
        """Let all work that is launched on the stream from now on wait for an event of this card or of another one."""
        with self, self._faults("step"):
            self.stream.wait_for_event(event.thing)

    def await_event(self, event: Owned) -> None:
        """Wait until the card has reached the event."""
        with self, self._faults("step"):
            event.thing.synchronize()

    def elapsed_s(self, begin: Owned, end: Owned) -> float | None:
        """Return the time between two recorded events, or None if the card has not reached the second event yet."""
        with self, self._faults("step"):
            return end.thing.time_since(begin.thing) / 1000 if end.thing.query() else None

    def _drop(self, owned: Owned) -> None:
        with suppress(self._cuda.Error), self:
            owned.thing = None

    @contextmanager
    def _faults(self, what: str) -> Generator[None]:
        """Raise errors of pycuda inside the `with` as a DeviceFault, whose message names the operation `what` and the last launch."""
        try:
            yield
        except self._cuda.Error as error:
            self._fault(what, error)

    def _fault(self, what: str, error: Exception) -> NoReturn:
        """Raise a DeviceFault for an error of pycuda: see `_faults`."""
        last = self.last_launch()
        where = what if last is None else f"{last}: {what}"
        raise DeviceFault(f"GPU {self.number} ({self.name}), {where}: {error}") from error


def _release(context: Any, owned: weakref.WeakSet[Owned]) -> None:
    """Enter a context, destroy its streams and events, and pop the context again."""
    context.push()
    for each in list(owned):
        each.thing = None
    context.pop()
