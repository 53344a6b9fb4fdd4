"""The decoder of request bodies: what it accepts, drops and refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import ApiError
from server.http.body_framing import MAX_LINE_BYTES, ChunkedBody, MeasuredBody, body_of

MAX_FRAMING_BYTES = 1000


def decode(data: bytes, cuts: int = 1 << 20) -> tuple[bytes, bytes, bool]:
    """Return the decoded data, the bytes that are left, and whether the body is complete."""
    body, received, decoded = ChunkedBody(MAX_FRAMING_BYTES), bytearray(), b""
    for at in range(0, len(data), cuts):
        received += data[at : at + cuts]
        while part := body.take(received):
            decoded += part
    return decoded, bytes(received), body.is_complete


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), st.integers(1, 30), st.binary(max_size=5))
def test_cuts_change_nothing(chunks, cuts, rest):
    encoded = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\na: b\r\n\r\n" + rest
    assert decode(encoded, cuts) == (b"".join(chunks), rest, True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x\r\n", "chunk size b'x' is malformed"),
        (b"-1\r\n", "is malformed"),
        (b"0x1\r\n", "is malformed"),
        (b" 1\r\n", "is malformed"),
        (b"1 \r\n", "is malformed"),
        (b"1\nx\r\n", "is malformed"),
        (b"\r\n", "is malformed"),
        (b"1" * 13 + b"\r\n", "is malformed"),
        (b"1;a\nb\r\nx\r\n", "is malformed"),
        (b"1\r\nxy\r\n", "longer than its size"),
        (b"0\r\nno colon\r\n\r\n", "trailer b'no colon' is malformed"),
        (b"0\r\na: b\nc: d\r\n\r\n", "is malformed"),
        (b"1;" + b"e" * MAX_LINE_BYTES, "shorten it"),
        (b"0\r\n" + b"a:" + b"b" * MAX_LINE_BYTES, "shorten it"),
        (b"0\r\n" + b"a:b\r\n" * 250, "no trailers"),
        (b"1;eeee\r\nx\r\n" * 200, "send larger chunks"),
    ],
)
def test_what_is_refused(data, message):
    """Malformed framing, and more framing than the limit allows, is refused by name."""
    with pytest.raises(ApiError, match=message):
        decode(data)


def test_framing_may_grow_with_the_data():
    encoded = b"100\r\n" + b"x" * 256 + b"\r\n"
    assert decode(encoded * 500 + b"0\r\n\r\n") == (b"x" * 128_000, b"", True)


def test_a_declared_length():
    body = body_of([(b"content-length", b"3")], "1.1", MAX_FRAMING_BYTES)
    received = bytearray(b"abcd")
    assert isinstance(body, MeasuredBody)
    assert not body.is_complete and body.take(received) == b"abc" and body.is_complete and received == b"d"
    assert body_of([], "1.1", MAX_FRAMING_BYTES).is_complete


@pytest.mark.parametrize(
    ("codings", "version"), [([b"gzip, chunked"], "1.1"), ([b"gzip", b"chunked"], "1.1"), ([b"identity"], "1.1"), ([b"chunked"], "1.0")]
)
def test_other_codings_are_refused(codings, version):
    """A body whose coding is not decoded must not reach the application as if it were decoded."""
    with pytest.raises(ApiError, match="transfer-encoding"):
        body_of([(b"transfer-encoding", coding) for coding in codings], version, MAX_FRAMING_BYTES)
    assert not body_of([(b"transfer-encoding", b"Chunked")], "1.1", MAX_FRAMING_BYTES).is_complete
