"""WebSocket frames are parsed whatever pieces they arrive in, and what breaks the protocol is refused with its code."""

from __future__ import annotations

import random

import pytest

from server.http.websocket import (
    CloseCode,
    Message,
    Opcode,
    Reader,
    WebSocketError,
    accept_of,
    asks_for_socket,
    close_frame,
    fault_of,
    frame,
)

MASK = b"\x01\x80\xff\x10"


def masked(opcode: int, data: bytes, *, is_last: bool = True, first: int | None = None) -> bytes:
    """Return a frame as a client sends it."""
    own = bytearray(frame(Opcode(opcode) if opcode in tuple(Opcode) else Opcode.TEXT, data))
    at = len(own) - len(data)
    own[0] = (0x80 if is_last else 0) | opcode if first is None else first
    own[1] |= 0x80
    return bytes(own[:at]) + MASK + bytes(byte ^ MASK[i % 4] for i, byte in enumerate(data))


def whole(reader: Reader, data: bytes) -> list[Message]:
    return [message for message in reader.feed(data) if message is not None]


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536])
@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_messages_of_every_length_in_any_pieces(size: int, step: int) -> None:
    if step == 1 and size > 1000:
        step = 999
    data = random.Random(size).randbytes(size)
    sent = masked(1, data) + masked(9, b"ping") + masked(1, b"next")
    reader, found = Reader(1 << 17), list[Message]()
    for at in range(0, len(sent), step):
        found += whole(reader, sent[at : at + step])
    assert found == [Message(Opcode.TEXT, data), Message(Opcode.PING, b"ping"), Message(Opcode.TEXT, b"next")]


def test_a_message_in_several_frames_may_have_control_frames_between() -> None:
    sent = masked(1, b"", is_last=False) + masked(0, b"ab", is_last=False) + masked(10, b"") + masked(0, b"c") + masked(2, b"d")
    assert whole(Reader(10), sent) == [Message(Opcode.PONG, b""), Message(Opcode.TEXT, b"abc"), Message(Opcode.BINARY, b"d")]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(Opcode.TEXT, b"not masked"), CloseCode.PROTOCOL_ERROR),
        (masked(1, b"x", first=0xC1), CloseCode.PROTOCOL_ERROR),  # compressed, which was not agreed on
        (masked(3, b"x"), CloseCode.PROTOCOL_ERROR),  # no opcode
        (masked(0, b"x"), CloseCode.PROTOCOL_ERROR),  # continues nothing
        (masked(1, b"", is_last=False) + masked(1, b"x"), CloseCode.PROTOCOL_ERROR),  # begins before the end
        (masked(9, b"", is_last=False), CloseCode.PROTOCOL_ERROR),  # a control frame in parts
        (masked(9, b"x" * 126), CloseCode.PROTOCOL_ERROR),
        (masked(1, b"x" * 201), CloseCode.TOO_LARGE),
        (masked(1, b"x" * 150, is_last=False) + masked(0, b"x" * 51), CloseCode.TOO_LARGE),
        (masked(1, b"x" * 150, is_last=False) + masked(0, b"x" * 51)[:6], CloseCode.TOO_LARGE),  # before its bytes are here
        (b"\x81\xff\x7f" + b"\xff" * 7, CloseCode.TOO_LARGE),  # the length alone is refused
    ],
)
def test_what_breaks_the_protocol_is_refused(sent: bytes, code: CloseCode) -> None:
    with pytest.raises(WebSocketError) as refused:
        [*Reader(200).feed(sent)]
    assert refused.value.code == code


def test_an_incomplete_message_is_counted_and_has_a_time() -> None:
    now_s = 5.0
    reader = Reader(1000, lambda: now_s)
    assert whole(reader, masked(1, b"done")) and (reader.num_bytes, reader.begun_s) == (0, None)
    assert not whole(reader, masked(1, b"x" * 100, is_last=False)) and (reader.num_bytes, reader.begun_s) == (100, 5.0)
    now_s = 6.0
    assert whole(reader, masked(9, b"ping") + masked(0, b"y" * 50)[:30])
    assert (reader.num_bytes, reader.begun_s) == (130, 5.0), "a ping does not make the message younger"
    now_s = 7.0
    assert whole(reader, masked(0, b"y" * 50)[30:] + masked(1, b"next")[:3]) and (reader.num_bytes, reader.begun_s) == (3, 7.0)
    assert whole(reader, masked(1, b"next")[3:]) and (reader.num_bytes, reader.begun_s) == (0, None)


def test_each_frame_is_told_even_if_it_completes_no_message() -> None:
    sent = masked(1, b"", is_last=False) + masked(0, b"", is_last=False) * 99 + masked(0, b"")
    assert [*Reader(10).feed(sent)] == [None] * 100 + [Message(Opcode.TEXT, b"")]


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_end_in_an_error_or_wait_for_more(seed: int) -> None:
    rng = random.Random(seed)
    reader = Reader(1000)
    for _ in range(200):
        try:
            for message in whole(reader, rng.randbytes(rng.randrange(40))):
                assert len(message.data) <= 1000
        except WebSocketError:
            reader = Reader(1000)


def test_close_frames_have_whole_characters() -> None:
    sent = close_frame(CloseCode.POLICY, "é" * 100)
    assert len(sent) <= 127 and sent[2:4] == (1008).to_bytes(2) and sent[4:].decode() == "é" * 61


def test_the_handshake() -> None:
    key = "dGhlIHNhbXBsZSBub25jZQ=="  # the example of RFC 6455
    assert accept_of(key) == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    assert fault_of({"sec-websocket-version": "13", "sec-websocket-key": key}) == ""
    assert fault_of({"sec-websocket-version": "8", "sec-websocket-key": key}).startswith("sec-websocket-version is '8'")
    for wrong in ("", "?", "YQ=="):
        assert fault_of({"sec-websocket-version": "13", "sec-websocket-key": wrong}).startswith("sec-websocket-key is absent")


@pytest.mark.parametrize(
    ("method", "path", "headers", "asks"),
    [
        ("GET", b"/v1/realtime", [(b"connection", b"keep-alive, Upgrade"), (b"upgrade", b"WebSocket")], True),
        ("GET", b"/prefix/v1/realtime", [(b"connection", b"upgrade"), (b"upgrade", b"websocket")], True),
        ("POST", b"/v1/realtime", [(b"connection", b"upgrade"), (b"upgrade", b"websocket")], False),
        ("GET", b"/v1/models", [(b"connection", b"upgrade"), (b"upgrade", b"websocket")], False),
        ("GET", b"/v1/realtime", [(b"connection", b"upgrade"), (b"upgrade", b"h2c")], False),
        ("GET", b"/v1/realtime", [(b"upgrade", b"websocket")], False),
        ("GET", b"/v1/realtime", [(b"connection", b"upgrade"), (b"upgrade", b"websocket"), (b"content-length", b"5")], False),
        ("GET", b"/v1/realtime", [(b"connection", b"upgrade"), (b"upgrade", b"websocket"), (b"transfer-encoding", b"chunked")], False),
    ],
)
def test_which_requests_ask_to_become_a_socket(method: str, path: bytes, headers: list[tuple[bytes, bytes]], asks: bool) -> None:
    assert asks_for_socket(method, path, headers) is asks
