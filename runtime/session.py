"""A running executable: its weights, its arena, its device. Any thread may call its functions; one call runs at a time.

This is the boundary between host and device: arguments are uploaded, results are downloaded. The layers below handle only tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.base import Device, Tensor
from runtime.device.registry import open_device
from runtime.executable import Executable
from runtime.memory import MemoryAccount
from runtime.parts import InParts
from runtime.vm.builtins import BUILTINS
from runtime.vm.machine import Machine
from runtime.vm.profile import Profile


class Session:
    """An executable that is loaded on a device, and the functions that callers may call."""

    def __init__(
        self,
        executable: Executable,
        *,
        device_threads: int | None = None,
        memory: MemoryAccount | None = None,
        pinned: bool = False,
        device_number: int = 0,
        num_ranks: int = 1,
        assembled: Path | None = None,
    ) -> None:
        """Open the device and load the executable. `memory` counts the bytes of the session's memory; None: a new account without a limit.
        For `device_threads`, `pinned`, `device_number`, `num_ranks` and `assembled` see `open_device`."""
        self.memory = memory or MemoryAccount()
        self.device: Device = open_device(
            executable.meta,
            num_threads=device_threads,
            pinned=pinned,
            number=device_number,
            num_ranks=num_ranks,
            assembled=assembled,
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
        """Seconds that the device has spent in kernels so far. A call takes further time on the host."""
        return self.device.busy_s

    def bind(self, function: str, weights: Mapping[str, NDArray[Any] | Tensor]) -> None:
        """Set all weights of a function. Tensors that are already on the device are not copied, and may be bound to several functions."""
        with self._lock:
            self._machine.function(function).bind({name: self._uploaded(weight) for name, weight in weights.items()})

    def call(self, function: str, *args: Any, views: bool = False, keep_last: bool = False) -> Any:
        """Call a function. Arguments are arrays, tensors of the device, integers, floats, shapes (tuples of integers) and tuples. Results
        are arrays, which belong to the caller. With `views`, results are tensors that may be in the arena; they are valid until the next
        call. A call with `keep_last` leaves the results of the last call without it intact. If the function changes a parameter in place,
        the caller's array is changed."""
        with self._lock:
            if self._pinned_thread != threading.get_ident():
                self._use_thread()
            called, given = self._machine.function(function), args
            for arg in args:
                if not isinstance(arg, self._tensor_type):
                    given = self._given(args)
                    break
            result = called.call(given, views=views, keep_last=keep_last)
            if given is not args:
                for i in called.written:
                    if given[i] is not args[i]:
                        np.copyto(args[i], self.device.download(given[i]))
            return result if views or isinstance(result, np.ndarray) else self.download(result)

    def in_parts(self, function: str, *args: Any) -> InParts[Any]:
        """Call a function in parts: yield between two parts, and return arrays, which belong to the caller. Between two parts other calls
        may run, but no second call in parts. Closing the generator ends the call early. The arrays in `args` must not change until the call
        has ended, and an argument that the function changes in place must be a tensor of the device."""
        with self._lock:
            called = self._machine.function(function)
            given = [self._uploaded(arg) for arg in args]
        assert all(given[i] is args[i] for i in called.written), f"{function} changes arrays that are not on the device"
        with closing(called.in_parts(given)) as parts:
            while True:
                with self._lock:
                    if self._pinned_thread != threading.get_ident():
                        self._use_thread()
                    try:
                        next(parts)
                    except StopIteration as end:
                        return self.download(end.value)
                yield

    def _use_thread(self) -> None:
        self.device.use_thread()
        self._pinned_thread = threading.get_ident()

    def _given(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with arrays as tensors of the device."""
        given = [self._uploaded(arg) if isinstance(arg, tuple) else arg for arg in args]
        arrays = [i for i, arg in enumerate(args) if isinstance(arg, np.ndarray) and not isinstance(arg, self._tensor_type)]
        for i, tensor in zip(arrays, self.device.upload_inputs([args[i] for i in arrays]) if arrays else (), strict=True):
            given[i] = tensor
        return tuple(given)

    def download(self, value: Any) -> Any:
        """Copy a result of a call with `views` to the host: an array, or a tuple of arrays. If the device's memory is host memory, the
        arrays are views."""
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
        """Return the bytes of the arena that a call needs if its variables have the values `dims`."""
        return self._machine.function(function).arena_bytes(dims)

    def variables(self, function: str) -> dict[str, int | None]:
        """Return the variables of a function, each with its largest declared value, or None if no constant is declared."""
        return self._machine.function(function).variables

    def prepare(self, function: str, dims: Mapping[str, int]) -> None:
        """On a GPU, capture graphs for calls whose variables have the same orders of magnitude as `dims`, so that such calls need not
        capture graphs later."""
        with self._lock:
            self._machine.function(function).prepare(dims)

    def reserve(self, num_bytes: int) -> None:
        """Grow the arena to this size now, so that no later call needs to."""
        with self._lock:
            self._machine.arena.reserve(num_bytes)

    @contextmanager
    def profile(self) -> Generator[Profile]:
        """Measure the time per kernel of the calls made inside the `with`."""
        profile = Profile()
        self._machine.profile = profile
        try:
            yield profile
        finally:
            self._machine.profile = None

    def close(self) -> None:
        """Wait for the work of the device, and end its helper threads now. Otherwise they end when nothing refers to the session."""
        self.device.close()
