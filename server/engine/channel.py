"""The worker's end of the Unix socket to the front, the process that serves HTTP. A message is MessagePack after four little-endian bytes
of length.

The engine's thread never touches the socket: one thread reads into a bounded inbox, one writes from a bounded outbox. While the front does
not read, the outbox fills; the engine then runs no steps, but still accepts aborts.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec

from server.messages import Card, FromFront, FromWorker, Stats

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 256 << 20
INBOX_MESSAGES = 4096
OUTBOX_MESSAGES = 256

encode = msgspec.msgpack.Encoder().encode
decode_from_front = msgspec.msgpack.Decoder(FromFront).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


class ChannelError(Exception):
    """The peer violated the protocol."""


def frame(message: FromFront | FromWorker) -> bytes:
    payload = encode(message)
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def payload_bytes(header: bytes) -> int:
    length = int.from_bytes(header, "little")
    if length > MAX_MESSAGE_BYTES:
        raise ChannelError(f"a message has {length} bytes; expected at most {MAX_MESSAGE_BYTES}")
    return length


class WorkerChannel:
    def __init__(self, connection: socket.socket, *, on_lost: Callable[[], None]) -> None:
        self.inbox: queue.Queue[FromFront] = queue.Queue(INBOX_MESSAGES)
        self._outbox: queue.SimpleQueue[FromWorker | None] = queue.SimpleQueue()  # `has_room` bounds it, so `send` never blocks
        self._socket = connection
        self._on_lost = on_lost
        self._is_closing = False
        self._writer = threading.Thread(target=self._write, name="channel-write", daemon=True)
        threading.Thread(target=self._read, name="channel-read", daemon=True).start()
        self._writer.start()

    @property
    def has_room(self) -> bool:
        return self._outbox.qsize() < OUTBOX_MESSAGES

    def send(self, message: FromWorker) -> None:
        """Queue a message without blocking. Only statistics are dropped when the queue is full: newer ones follow."""
        if self.has_room or not isinstance(message, Stats | Card):
            self._outbox.put(message)

    def close(self) -> None:
        """Send all that is queued, then close the socket."""
        self._outbox.put(None)
        self._writer.join()
        self._is_closing = True  # from now on, losing the connection is no error
        with suppress(OSError):  # the front may have closed it first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as stream:
                while len(header := stream.read(LENGTH_BYTES)) == LENGTH_BYTES:
                    self.inbox.put(decode_from_front(stream.read(payload_bytes(header))))
        except (OSError, ChannelError, msgspec.MsgspecError) as error:
            if not self._is_closing:
                print(f"the front is lost: {error!r}", file=sys.stderr)
        if not self._is_closing:
            self._on_lost()

    def _write(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self._socket.sendall(frame(message))
        except OSError:
            self._on_lost()
