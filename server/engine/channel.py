"""The worker's end of the Unix socket to the front, the process that serves HTTP. Each message is sent as its length in four little-endian
bytes, then its MessagePack encoding. The excerpts of a request are sent before the request, one message each, so that no message keeps the
front's event loop busy for long. A message that is too large or cannot be encoded is not sent. If it belongs to a request (see `refused`),
only this request fails; otherwise the channel counts as lost, and the worker ends.

The engine's thread never touches the socket: one thread reads into a bounded inbox, one writes from an outbox. While the front does not
read, the outbox fills up; the engine then runs no steps, but still takes in messages, such as aborts.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import msgspec

from server.messages import (
    Card,
    Embed,
    Embedding,
    ErrorCode,
    Failed,
    FromFront,
    FromWorker,
    GivePages,
    PagesGiven,
    Part,
    Stats,
    Submit,
)

LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 256 << 20
INBOX_MESSAGES = 4096
OUTBOX_MESSAGES = 256

encode_into = msgspec.msgpack.Encoder().encode_into
decode_from_front = msgspec.msgpack.Decoder(FromFront | Part).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


class ChannelError(Exception):
    """A message is too large or cannot be encoded, or the length in front of a received message is too large."""


def frames(message: FromFront) -> Iterator[bytearray]:
    """Yield the frames of a message: one for each excerpt of a request, then one for the message without its excerpts. Raise ChannelError
    if a frame is too large or cannot be encoded."""
    if isinstance(message, Submit) and message.excerpts:
        for excerpt in message.excerpts:
            yield frame(Part(message.request_id, excerpt))
        message = msgspec.structs.replace(message, excerpts=())
    yield frame(message)


def frame(message: FromFront | Part | FromWorker) -> bytearray:
    """Return an encoded message with its length before it. Raise ChannelError if the message is too large, or has an integer of more than
    64 bits or a text that is not valid Unicode."""
    found = bytearray(LENGTH_BYTES)
    try:
        encode_into(message, found, LENGTH_BYTES)
    except (OverflowError, UnicodeError) as error:
        raise ChannelError(f"a message has a value that MessagePack cannot write: {error}") from error
    found[:LENGTH_BYTES] = _allowed(len(found) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    return found


def payload_bytes(header: bytes) -> int:
    """Return the length of a message in bytes, from the LENGTH_BYTES bytes before it. Raise ChannelError if it is too large."""
    return _allowed(int.from_bytes(header, "little"))


def refused(message: FromFront | FromWorker, error: ChannelError) -> Failed | None:
    """Return a Failed message that ends a request because `message` cannot be sent. The request is `message` itself (Submit, Embed,
    GivePages), or the one that `message` answers (Embedding, PagesGiven). Return None for every other message. `error` says why `message`
    cannot be sent."""
    if not isinstance(message, Submit | Embed | GivePages | Embedding | PagesGiven):
        return None
    text = f"the request or its answer cannot pass between processes: {error}"
    return Failed(message.request_id, ErrorCode.INVALID_VALUE, text)


def _allowed(length: int) -> int:
    """Return `length`, the length of a message in bytes. Raise ChannelError if it exceeds MAX_MESSAGE_BYTES."""
    if length > MAX_MESSAGE_BYTES:
        raise ChannelError(f"a message has {length} bytes; expected at most {MAX_MESSAGE_BYTES}; ask for less in one request")
    return length


class WorkerChannel:
    """The worker's end of the socket: `inbox` has the messages of the front, `send` queues a message for the front."""

    def __init__(self, connection: socket.socket, *, on_lost: Callable[[], None]) -> None:
        """`on_lost` is called on the channel's threads when the front is gone, or when messages can no longer be exchanged with it."""
        self.inbox: queue.Queue[FromFront] = queue.Queue(INBOX_MESSAGES)
        # Unbounded, so that `send` never blocks; instead, the engine runs no steps while `has_room` is False. None ends the writing thread.
        self._outbox: queue.SimpleQueue[FromWorker | None] = queue.SimpleQueue()
        self._socket = connection
        self._on_lost = on_lost
        self._is_closing = False
        self._writer = threading.Thread(target=self._write, name="channel-write", daemon=True)
        threading.Thread(target=self._read, name="channel-read", daemon=True).start()
        self._writer.start()

    @property
    def has_room(self) -> bool:
        """Whether the outbox has room. While it has none, the engine should run no steps."""
        return self._outbox.qsize() < OUTBOX_MESSAGES

    def send(self, message: FromWorker) -> None:
        """Queue a message without blocking. If the outbox is full, drop statistics and reports about the GPU, because newer ones follow.
        All other messages are queued even then."""
        if self.has_room or not isinstance(message, Stats | Card):
            self._outbox.put(message)

    def close(self) -> None:
        """Send all that is queued, unless the front is gone, then close the socket."""
        self._outbox.put(None)
        self._writer.join()
        self._is_closing = True  # from now on, losing the connection is no error
        with suppress(OSError):  # the front may have closed it first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> None:
        """Read messages into the inbox until the front is gone, or sends bytes that are no message. Then call `on_lost`, unless the channel
        is being closed. This runs on a thread of its own."""
        parts: list[Part] = []
        try:
            with self._socket.makefile("rb") as stream:
                while len(header := stream.read(LENGTH_BYTES)) == LENGTH_BYTES:
                    self._take(decode_from_front(stream.read(payload_bytes(header))), parts)
        except (OSError, ChannelError, msgspec.MsgspecError) as error:
            if not self._is_closing:
                print(f"the front is lost: {error!r}", file=sys.stderr)
        if not self._is_closing:
            self._on_lost()

    def _take(self, message: FromFront | Part, parts: list[Part]) -> None:
        """Append a part of a request to `parts`. Put any other message into the inbox, a request together with its parts, and clear
        `parts`."""
        if isinstance(message, Part):
            parts.append(message)
            return
        self.inbox.put(_whole(message, parts))
        parts.clear()

    def _write(self) -> None:
        """Send what is queued until the channel is closed. Call `on_lost` if the front is gone. Call it also if a message cannot be sent
        and belongs to no request that could fail instead. This runs on a thread of its own."""
        try:
            while (message := self._outbox.get()) is not None:
                self._socket.sendall(_framed(message))
        except OSError:
            self._on_lost()
        except ChannelError as error:
            print(f"the front cannot be told: {error!r}", file=sys.stderr)
            self._on_lost()


def _framed(message: FromWorker) -> bytearray:
    """Return the frame of a message. If the message cannot be sent, return the frame of a Failed message for its request. Raise
    ChannelError if the message cannot be sent and belongs to no request (see `refused`)."""
    try:
        return frame(message)
    except ChannelError as error:
        if (failed := refused(message, error)) is None:
            raise
        return frame(failed)


def _whole(message: FromFront, parts: Sequence[Part]) -> FromFront:
    """Return a message with its excerpts, which came before it. Excerpts of other requests are dropped, because the messages of those
    requests were not sent."""
    if not (isinstance(message, Submit) and parts):
        return message
    return msgspec.structs.replace(message, excerpts=tuple(part.excerpt for part in parts if part.request_id == message.request_id))
