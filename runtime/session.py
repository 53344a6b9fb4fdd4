"""An executable at work: its weights, its arena, its threads. Any thread may call; calls take turns."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from runtime import flags
from runtime.builtins import BUILTINS
from runtime.device.base import Device
from runtime.device.cpu.device import CpuDevice
from runtime.executable import Executable
from runtime.memory import MemoryAccount
from runtime.profile import Profile
from runtime.vm import Machine


class Session:
    def __init__(
        self,
        executable: Executable,
        *,
        device_threads: int | None = None,
        memory: MemoryAccount | None = None,
        pinned: bool = False,
    ) -> None:
        """`device_threads`: by default RELAXSERVE_THREADS, or as many as there are cores to use. `pinned`: each thread stays on a core
        of its own, the one that calls too: for a thread whose only work is calling."""
        self.memory = memory or MemoryAccount()
        cpu = CpuDevice(device_threads or flags.current().threads, pinned=pinned, stack_bytes=executable.meta.stack_bytes)
        self.placement = cpu.placement
        self.device: Device = cpu
        self._machine = Machine(executable, self.device, self.memory, BUILTINS)
        self._lock = threading.Lock()
        self._pinned_thread: int | None = None

    @property
    def num_threads(self) -> int:
        return self.device.num_threads

    @property
    def busy_s(self) -> float:
        """Seconds in kernels so far; the rest of a call is the host's."""
        return self.device.busy_s

    def bind(self, function: str, weights: Mapping[str, NDArray[Any]]) -> None:
        """Set all weights of a function. The arrays are used where they are, and may be bound to several functions."""
        with self._lock:
            self._machine.function(function).bind(weights)

    def call(self, function: str, *args: Any, views: bool = False, above: bool = False) -> Any:
        """Arrays, integers, floats, shapes (tuples of integers) and tuples go in and come out. The result is the caller's to keep;
        with `views`, arrays of it may lie in the arena: faster, and valid until the next call that is not `above` it."""
        with self._lock:
            if self._pinned_thread != threading.get_ident():
                self.device.use_thread()
                self._pinned_thread = threading.get_ident()
            return self._machine.function(function).call(args, views=views, above=above)

    def arena_bytes(self, function: str, dims: Mapping[str, int]) -> int:
        """Bytes of the arena that a call takes, by the values of its variables."""
        return self._machine.function(function).arena_bytes(dims)

    def reserve(self, num_bytes: int) -> None:
        """Make the arena this large now, so that no later call has to."""
        with self._lock:
            self._machine.arena.reserve(num_bytes)

    @contextmanager
    def profile(self) -> Generator[Profile]:
        """Time per kernel of the calls made inside."""
        profile = Profile()
        self._machine.profile = profile
        try:
            yield profile
        finally:
            self._machine.profile = None

    def close(self) -> None:
        """End the helper threads now rather than when nobody refers to the session any more."""
        self.device.close()
