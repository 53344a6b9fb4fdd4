"""Send and receive messages with arrays over a socket between two stages.

A frame is eight bytes with two lengths, then the MessagePack encoding of the message and of the types and shapes of its arrays, then the
bytes of the arrays.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from server.lost_machines import notice_loss
from server.stages.messages import Ended, StageMessage

HEADER = struct.Struct("<II")  # number of bytes of the message, and of the arrays
MOST_MESSAGE_BYTES = 1 << 20
MOST_ARRAY_BYTES = 1 << 31
End = Callable[[], tuple[str, bool] | None]  # returns how a process ended, and whether no request can be the cause; None: it is not known
LOST_S = 10.0  # seconds of silence after which a machine counts as lost; the front waits longer before it takes the worker for stalled
DTYPES = {"i": np.dtype("<i4"), "f": np.dtype("<f4")}


class StageLost(Exception):
    """A stage or the connection to it has ended, or the connection has brought something that is no message of a stage."""

    def __init__(self, message: str, *, from_outside: bool = True) -> None:
        super().__init__(message)
        self.from_outside = from_outside  # no request can be the cause, as far as is known


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    """A message, and the forms of the arrays that follow it."""

    message: StageMessage
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()  # type and shape of each


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Frame).decode


class Link:
    """A connection to a stage, or from a stage to the worker. Several threads may send; one thread receives."""

    def __init__(self, connection: socket.socket, place: str, end: End = lambda: None) -> None:
        """`place` names the other end in errors. `end` says how the process at the other end has ended, if this process knows."""
        self.place = place
        self._end = end
        self._socket = connection
        self._sending = threading.Lock()
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            notice_loss(connection, LOST_S)

    def send(self, message: StageMessage, arrays: Sequence[NDArray[Any]] = ()) -> None:
        """Send a message, with arrays of the types in DTYPES. Raise StageLost if the connection has ended."""
        held = [np.ascontiguousarray(array) for array in arrays]
        body = _encode(_Frame(message, tuple((array.dtype.kind, array.shape) for array in held)))
        parts = [HEADER.pack(len(body), sum(array.nbytes for array in held)) + body]
        parts += [array.data.cast("B") for array in held if array.size]
        try:
            with self._sending:
                _send_all(self._socket, parts)
        except OSError as error:
            raise self._lost(f"has failed: {error.strerror or error}") from error

    def receive(self) -> tuple[StageMessage, list[NDArray[Any]]]:
        """Return the next message and its arrays. Raise StageLost if the connection has ended, if it brings something that is no message of
        a stage, or if the message says that the stage's process has ended."""
        try:
            body_bytes, array_bytes = HEADER.unpack(self._read(HEADER.size))
            if body_bytes > MOST_MESSAGE_BYTES or array_bytes > MOST_ARRAY_BYTES:
                raise StageLost(f"{self.place} sent a message of {body_bytes} bytes with {array_bytes} bytes of arrays: no stage does")
            frame = _decode(self._read(body_bytes))
            if (stated := _bytes_of(frame.arrays)) != array_bytes:
                raise ValueError(f"its arrays have {stated} bytes, and {array_bytes} follow")
            found = list(_arrays_of(self._read(array_bytes), frame.arrays))
        except OSError as error:
            raise self._lost(f"has failed: {error.strerror or error}") from error
        except (msgspec.MsgspecError, ValueError, KeyError, RecursionError, MemoryError) as error:
            raise StageLost(f"{self.place} sent something that is no message of a stage: {error}") from error
        if isinstance(frame.message, Ended):
            raise StageLost(f"the process of {self.place} ended: {frame.message.how}", from_outside=frame.message.from_outside)
        return frame.message, found

    def limit_silence(self, silence_s: float | None) -> None:
        """From now on, let `receive` raise StageLost if nothing arrives for this many seconds, and `send` if it can send nothing for so
        long; None: wait without a limit."""
        self._socket.settimeout(silence_s)

    def wait_for_end(self) -> None:
        """Return once one of the ends has ended the connection. Another thread may receive meanwhile."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        poll.poll()

    def lost(self) -> StageLost:
        """Return the error of a connection that has ended."""
        return self._lost("has ended")

    def shut(self) -> None:
        """End the connection, also for a thread that waits for a message."""
        with suppress(OSError):  # the other end may have ended the connection first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. If this process has started the one at the other end, wait a while until that process has ended."""
        self._socket.close()
        self._end()

    def _read(self, num_bytes: int) -> bytearray:
        """Read `num_bytes`. Raise StageLost if the connection ends before, or OSError if it fails."""
        data = bytearray(num_bytes)
        view, at = memoryview(data), 0
        while at < num_bytes:
            count = self._socket.recv_into(view[at:], num_bytes - at, socket.MSG_WAITALL)
            if count == 0:
                raise self.lost()
            at += count
        return data

    def _lost(self, how: str) -> StageLost:
        """Return the error of a connection that has ended or failed. If it is known how the process at the other end has ended, the error
        says that. Otherwise it says what has happened to the connection: `how`, such as "has ended"."""
        if (known := self._end()) is None:
            return StageLost(f"the connection to {self.place} {how}")
        return StageLost(f"the process of {self.place} ended: {known[0]}", from_outside=known[1])


def _send_all(connection: socket.socket, parts: list[Any]) -> None:
    """Send all parts, without copying them. `parts` is empty afterwards."""
    while parts:
        sent = connection.sendmsg(parts)
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if sent:
            parts[0] = memoryview(parts[0])[sent:]


def _bytes_of(forms: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    """Return the bytes of arrays with these types and shapes. Raise ValueError if a size is negative."""
    if any(size < 0 for _, shape in forms for size in shape):
        raise ValueError("an array has a negative size")
    return sum(math.prod(shape) * DTYPES[kind].itemsize for kind, shape in forms)


def _arrays_of(data: bytearray, forms: Sequence[tuple[str, tuple[int, ...]]]) -> list[NDArray[Any]]:
    """Return the arrays in `data`, which have these types and shapes."""
    found: list[NDArray[Any]] = []
    at = 0
    for kind, shape in forms:
        dtype, count = DTYPES[kind], math.prod(shape)
        found.append(np.frombuffer(data, dtype, count, at).reshape(shape) if count else np.empty(shape, dtype))
        at += count * dtype.itemsize
    return found
