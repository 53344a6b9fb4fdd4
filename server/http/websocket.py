"""Parse the WebSocket frames (RFC 6455) of a client, and write those of the server. This module does no input or output."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

PATHS = (b"/v1/realtime",)  # paths that may become a WebSocket
MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
VERSION = "13"
MAX_CONTROL_BYTES = 125


class Opcode(IntEnum):
    """The kind of a frame."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


class CloseCode(IntEnum):
    """Why a connection is closed."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    UNSUPPORTED_DATA = 1003
    POLICY = 1008
    TOO_LARGE = 1009
    INTERNAL = 1011
    TRY_AGAIN = 1013


class WebSocketError(Exception):
    """The connection must be closed with this code, mostly because the client breaks the protocol."""

    def __init__(self, code: CloseCode, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


@dataclass(frozen=True, slots=True)
class Message:
    """A whole message, or a control frame."""

    opcode: Opcode
    data: bytes


def asks_for_socket(method: str, path: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Return whether the head of a request asks to become a WebSocket, on a path that may become one. Such a request is a GET without a
    body."""
    given: dict[bytes, bytes] = {}
    for name, value in headers:
        given[name] = b",".join((given[name], value)) if name in given else value
    tokens = {token.strip().lower() for token in given.get(b"connection", b"").split(b",")}
    has_body = b"transfer-encoding" in given or given.get(b"content-length", b"0") != b"0"
    is_asked = b"upgrade" in tokens and given.get(b"upgrade", b"").strip().lower() == b"websocket"
    return method == "GET" and is_asked and not has_body and any(path.endswith(one) for one in PATHS)


def fault_of(headers: Mapping[str, str]) -> str:
    """Return why the headers are no complete handshake, or an empty text if they are one."""
    if (version := headers.get("sec-websocket-version", "")) != VERSION:
        return f"sec-websocket-version is {version!r:.20}; expected {VERSION}"
    try:
        is_key = len(base64.b64decode(headers.get("sec-websocket-key", ""), validate=True)) == 16
    except ValueError:
        is_key = False
    return "" if is_key else "sec-websocket-key is absent or malformed; expected 16 bytes in base64"


def accept_of(key: str) -> str:
    """Return the server's part of the handshake, the value of Sec-WebSocket-Accept, for the client's Sec-WebSocket-Key."""
    return base64.b64encode(hashlib.sha1(f"{key}{MAGIC}".encode(), usedforsecurity=False).digest()).decode()


def frame(opcode: Opcode, data: bytes = b"") -> bytes:
    """Return a frame of the server: a whole message, or a control frame."""
    size = len(data)
    if size <= MAX_CONTROL_BYTES:
        length = bytes([size])
    elif size < 1 << 16:
        length = b"\x7e" + size.to_bytes(2)
    else:
        length = b"\x7f" + size.to_bytes(8)
    return bytes([0x80 | opcode]) + length + data


def close_frame(code: CloseCode, reason: str = "") -> bytes:
    """Return the frame that closes the connection. A long reason is cut off."""
    text = reason.encode()[: MAX_CONTROL_BYTES - 2].decode(errors="ignore").encode()  # a reason ends at a whole character
    return frame(Opcode.CLOSE, code.to_bytes(2) + text)


class Reader:
    """Parses the bytes that a client sends into messages. A message may have at most `most_bytes` bytes."""

    def __init__(self, most_bytes: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes, self._now_s = most_bytes, now_s
        self.begun_s: float | None = None  # when the incomplete message began; None: there is none
        self._received = bytearray()
        self._parts = bytearray()  # data of an incomplete message that has several frames
        self._kind: Opcode | None = None  # opcode of the incomplete message that has several frames; None: there is none

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes that are held of an incomplete message."""
        return len(self._parts) + len(self._received)

    def feed(self, data: bytes) -> Iterator[Message | None]:
        """For each frame that is complete now, yield the message that the frame completes, or None if its message continues. Raise
        WebSocketError if the client breaks the protocol."""
        self._received += data
        while (found := self._frame()) is not None:
            is_last, opcode, payload = found
            message = Message(opcode, payload) if opcode >= Opcode.CLOSE else self._joined(is_last, opcode, payload)
            if self._kind is None:
                self.begun_s = None
            yield message
        if self.begun_s is None and (self._received or self._kind is not None):
            self.begun_s = self._now_s()

    def _joined(self, is_last: bool, opcode: Opcode, payload: bytes) -> Message | None:
        """Add a data frame to its message. Return the message if the frame is the last one of the message, otherwise None. Raise
        WebSocketError if a continuation has no message to continue, or if another message begins before the last one has ended."""
        if (opcode is Opcode.CONTINUATION) == (self._kind is None):
            expected = "a first frame" if self._kind is None else "a continuation"
            raise WebSocketError(CloseCode.PROTOCOL_ERROR, f"the frame has opcode {opcode}; expected {expected}")
        kind = opcode if self._kind is None else self._kind
        if is_last and not self._parts:
            self._kind = None
            return Message(kind, payload)
        self._parts += payload
        self._kind = None if is_last else kind
        if not is_last:
            return None
        whole = bytes(self._parts)
        self._parts.clear()
        return Message(kind, whole)

    def _frame(self) -> tuple[bool, Opcode, bytes] | None:
        """Take the next frame, or return None if it is not complete. Raise WebSocketError if the frame is not masked, uses extensions or an
        unknown opcode, if a control frame is too long or divided, or if a message becomes too large."""
        received = self._received
        if len(received) < 2:
            return None
        first, second = received[0], received[1]
        if first & 0x70 or first & 0x0F not in tuple(Opcode) or not second & 0x80:
            raise WebSocketError(
                CloseCode.PROTOCOL_ERROR, f"the frame begins with {bytes(received[:2]).hex()}; expected a masked frame without extensions"
            )
        is_last, opcode, size, at = bool(first & 0x80), Opcode(first & 0x0F), second & 0x7F, 2
        if opcode >= Opcode.CLOSE and not (is_last and size <= MAX_CONTROL_BYTES):
            raise WebSocketError(CloseCode.PROTOCOL_ERROR, f"a control frame is cut or has more than {MAX_CONTROL_BYTES} bytes")
        if size > MAX_CONTROL_BYTES:
            num_bytes = 2 if size == 126 else 8
            if len(received) < at + num_bytes:
                return None
            size = int.from_bytes(received[at : at + num_bytes])
            at += num_bytes
        if size + (len(self._parts) if opcode < Opcode.CLOSE else 0) > self._most_bytes:
            raise WebSocketError(CloseCode.TOO_LARGE, f"a message has more than {self._most_bytes} bytes; send smaller ones")
        if len(received) < at + 4 + size:
            return None
        payload = _unmasked(bytes(received[at : at + 4]), received[at + 4 : at + 4 + size])
        del received[: at + 4 + size]
        return is_last, opcode, payload


def _unmasked(mask: bytes, data: bytearray) -> bytes:
    """Return the data of a frame without the mask that clients apply to data."""
    repeated = np.frombuffer(mask * (-(-len(data) // 4)), np.uint8)[: len(data)]
    return (np.frombuffer(data, np.uint8) ^ repeated).tobytes()
