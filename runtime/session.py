"""An executable at work: its weights, its arena, its threads. Any thread may call; calls take turns."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from runtime import flags
from runtime.builtins import BUILTINS
from runtime.device.cpu.cores import available_cores
from runtime.device.cpu.numa import Placement
from runtime.device.cpu.team import Team
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
        cores = available_cores()
        self.memory = memory or MemoryAccount()
        num_threads = device_threads or flags.current().threads or len(cores)
        self.placement = Placement.of(cores[:num_threads]) if pinned and num_threads <= len(cores) else Placement()
        stack_bytes = executable.meta.stack_bytes
        self._team = Team(num_threads, cores=cores, pinned=pinned, nodes=self.placement.nodes, stack_bytes=stack_bytes)
        self._machine = Machine(executable, self._team, self.memory, BUILTINS)
        self._lock = threading.Lock()
        self._pinned_thread: int | None = None

    @property
    def num_threads(self) -> int:
        return self._team.num_threads

    @property
    def busy_s(self) -> float:
        """Seconds in kernels so far; the rest of a call is the host's."""
        return self._team.busy_s

    def bind(self, function: str, weights: Mapping[str, NDArray[Any]]) -> None:
        """Set all weights of a function. The arrays are used where they are, and may be bound to several functions."""
        with self._lock:
            self._machine.function(function).bind(weights)

    def call(self, function: str, *args: Any, views: bool = False, above: bool = False) -> Any:
        """Arrays, integers, floats, shapes (tuples of integers) and tuples go in and come out. The result is the caller's to keep;
        with `views`, arrays of it may lie in the arena: faster, and valid until the next call that is not `above` it."""
        with self._lock:
            if self._pinned_thread != threading.get_ident():
                self._team.pin_caller()
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
        self._team.close()
