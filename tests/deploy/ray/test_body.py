"""The ingress receives a body as the client sends it, and decodes what it reads of it."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator

import pytest

from deploy.ray import body
from deploy.ray.body import Body, receive
from server.errors import ApiError

FORM = {"content-type": "multipart/form-data; boundary=b"}


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def received(*parts: bytes, **headers: str) -> Body:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    found = asyncio.run(receive(pieces(*parts), given))
    assert found.content == b"".join(parts)
    return found


def test_the_fields_of_an_object_are_decoded() -> None:
    assert received(b'{"a', b'":1}').fields == {"a": 1}


@pytest.mark.parametrize("wrong", [b"", b"{", b"[1]", b'"text"', b"\xff", b"null", b"[" * 50])
def test_what_is_no_object_has_no_fields(wrong: bytes) -> None:
    assert received(wrong) == Body(wrong)


@pytest.mark.parametrize("slow", [b'{"tools":[' + b"{}," * 30_000 + b"{}]}", b"[" * 100_000])
def test_what_takes_long_to_decode_is_not_read(slow: bytes) -> None:
    found = received(slow)
    assert (found.fields, found.is_decoded) == ({}, False)


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)])
def test_a_compressed_body_is_read(encoding: str, pack: object) -> None:
    """The ingress decompresses a body to read the model's name, which decides which pool gets the request."""
    packed = pack(b'{"model":"a"}')  # type: ignore[operator]
    assert received(packed[:5], packed[5:], content_encoding=encoding).fields == {"model": "a"}


@pytest.mark.parametrize(
    ("content", "encoding"),
    [(b"{}", "gzip"), (gzip.compress(b"{}", mtime=0)[:-4], "gzip"), (b"{}", "br")],  # processes of a run must name the same tests
)
def test_a_body_that_is_compressed_wrongly_is_not_read(content: bytes, encoding: str) -> None:
    assert not received(content, content_encoding=encoding).is_decoded


def test_a_body_that_grows_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MOST_BODY_BYTES", 1000)
    assert not received(gzip.compress(b'{"a":"' + b"x" * 2000 + b'"}'), content_encoding="gzip").is_decoded


def form(*parts: tuple[str, bytes]) -> bytes:
    return b"".join(b"--b\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n" % (how.encode(), value) for how, value in parts) + b"--b--"


def test_the_short_fields_of_a_form_are_read() -> None:
    """A form with a recording also names the model, which decides which pool gets the request."""
    whole = form(('name="file"; filename="a.wav"', b"\xff{[" * 100_000), ('name="model"', b"hears"))
    assert received(whole[:70], whole[70:], **{"content-type": FORM["content-type"]}).fields == {"model": "hears"}


def test_a_long_prompt_does_not_hide_the_model_behind_it() -> None:
    whole = form(('name="prompt"', b"x" * (64 << 10)), ('name="model"', b"hears"))
    assert received(whole, **{"content-type": FORM["content-type"]}).fields["model"] == "hears"


@pytest.mark.parametrize("wrong", [b"", b"--c\r\n", form(('name="model"', b"a"))[:-9], form(("", b""))])
def test_a_form_that_cannot_be_read_is_passed_on(wrong: bytes) -> None:
    assert received(wrong, **{"content-type": FORM["content-type"]}).fields == {}
    assert received(wrong, **{"content-type": "multipart/form-data"}).fields == {}


def test_a_body_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MOST_BODY_BYTES", 10)
    with pytest.raises(ApiError, match="the body is larger than 10 bytes"):
        received(b"12345", b"67890", b"1")


async def late(first: bytes, last: asyncio.Event) -> AsyncIterator[bytes]:
    yield first
    await last.wait()
    yield b"last"


def test_a_body_that_stalls_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_S", 0.01)
    with pytest.raises(ApiError, match=r"after 4 bytes, the body is late; .*: send it faster"):
        asyncio.run(receive(late(b"1234", asyncio.Event()), {}))


def test_a_body_that_has_sent_much_gets_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_S", 0.01)
    monkeypatch.setattr(body, "SLOWEST", 1e-3)

    async def arrived() -> bytes:
        last = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, last.set)
        return (await receive(late(b"1234", last), {})).content

    assert asyncio.run(arrived()) == b"1234last"
