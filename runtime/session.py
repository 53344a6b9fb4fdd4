"""An executable at work: its weights, its arena, its device. Any thread may call; calls take turns.

Here is the edge between host and device: arrays that come in are uploaded, tensors that go out are downloaded. All below see tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.base import Device, Tensor
from runtime.device.registry import open_device
from runtime.executable import Executable
from runtime.memory import MemoryAccount
from runtime.vm.builtins import BUILTINS
from runtime.vm.machine import Machine
from runtime.vm.profile import Profile


class Session:
    def __init__(
        self,
        executable: Executable,
        *,
        device_threads: int | None = None,
        memory: MemoryAccount | None = None,
        pinned: bool = False,
        device_number: int = 0,
        assembled: Path | None = None,
    ) -> None:
        """`device_threads`, `pinned`, `device_number` and `assembled`: see `open_device`."""
        self.memory = memory or MemoryAccount()
        self.device: Device = open_device(
            executable.meta, num_threads=device_threads, pinned=pinned, number=device_number, assembled=assembled
        )
        self._tensor_type = self.device.tensor_type
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

    def bind(self, function: str, weights: Mapping[str, NDArray[Any] | Tensor]) -> None:
        """Set all weights of a function. Tensors of the device are used where they are, and may be bound to several functions."""
        with self._lock:
            self._machine.function(function).bind({name: self._uploaded(weight) for name, weight in weights.items()})

    def call(self, function: str, *args: Any, views: bool = False, keep_last: bool = False) -> Any:
        """Arrays, tensors of the device, integers, floats, shapes (tuples of integers) and tuples go in. Arrays come out, the caller's to
        keep. With `views`, tensors come out that may lie in the arena: valid until the next call without `keep_last`. A
        parameter that is changed in place changes the array that was given."""
        with self._lock:
            if self._pinned_thread != threading.get_ident():
                self.device.use_thread()
                self._pinned_thread = threading.get_ident()
            called, given = self._machine.function(function), list(args)
            arrays: list[int] = []
            for i, arg in enumerate(args):
                if isinstance(arg, self._tensor_type):
                    continue
                if isinstance(arg, np.ndarray):
                    arrays.append(i)
                elif isinstance(arg, tuple):
                    given[i] = self._uploaded(arg)
            if arrays:
                for i, tensor in zip(arrays, self.device.upload_inputs([args[i] for i in arrays]), strict=True):
                    given[i] = tensor
            result = called.call(given, views=views, keep_last=keep_last)
            for i in called.written:
                if given[i] is not args[i]:
                    np.copyto(args[i], self.device.download(given[i]))
            return result if views or isinstance(result, np.ndarray) else self.download(result)

    def download(self, value: Any) -> Any:
        """A result of `views` on the host: an array, or a tuple of arrays. On a device of host memory they are views, too."""
        if isinstance(value, np.ndarray):
            return value
        if isinstance(value, self._tensor_type):
            return self.device.download(value)
        return tuple(map(self.download, value)) if isinstance(value, tuple) else value

    def _uploaded(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and not isinstance(value, self._tensor_type):
            return self.device.upload(value)
        return tuple(map(self._uploaded, value)) if isinstance(value, tuple) else value

    def arena_bytes(self, function: str, dims: Mapping[str, int]) -> int:
        """Bytes of the arena that a call takes, by the values of its variables."""
        return self._machine.function(function).arena_bytes(dims)

    def variables(self, function: str) -> dict[str, int | None]:
        """The variables of a function, with the largest value of each where one is declared."""
        return self._machine.function(function).variables

    def prepare(self, function: str, dims: Mapping[str, int]) -> None:
        """Capture the launches of calls whose variables have values like these, so that no later call has to."""
        with self._lock:
            self._machine.function(function).prepare(dims)

    @property
    def num_graphs(self) -> int:
        """The number of graphs that the device captured."""
        return self.device.num_graphs

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
