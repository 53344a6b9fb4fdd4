"""Forms with files, as clients write them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from server.errors import ApiError
from server.http.multipart import Form

PARTS = (
    b'--b:1\r\nContent-Disposition: form-data; name="plain"\r\n\r\none\r\n'
    b"--b:1\r\ncontent-disposition:form-data;NAME=bare\r\n\r\ntwo\r\n"
    b'--b:1\r\nContent-Type: text/plain\r\nContent-Disposition: form-data; x; name = "a \\"quoted\\"; name"\r\n\r\nthree\r\n'
)


async def read(kind: str, body: bytes, step: int) -> tuple[Form, bytes]:
    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), step):
            yield body[at : at + step]

    data = bytearray()
    form = Form(kind, data.extend)
    await form.read(pieces(), "file")
    return form, bytes(data)


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("filename", "found"),
    [
        (b'filename="a;b.wav"', "a;b.wav"),
        (b'filename="a \\"b\\".wav"', 'a "b".wav'),
        (b'filename="\xc3\xa4.wav"', "\u00e4.wav"),
        (b"filename=a.wav", "a.wav"),
        (b"filename=\"?.wav\"; filename*=UTF-8''%C3%A4.wav", "\u00e4.wav"),
        (b"filename*=nonsense", "nonsense"),
        (b'filename=""', "file"),
        (b"size=3", "file"),
    ],
)
def test_fields_and_the_file(filename: bytes, found: str, step: int) -> None:
    file = b'--b:1\r\nContent-Disposition: form-data; name="file"; ' + filename + b"\r\n\r\n\0\r\n--b\xff\r\n"
    form, data = asyncio.run(read('multipart/form-data; charset=x; boundary="b:1"', PARTS + file + b"--b:1--\r\n", step))
    assert form.fields == {"plain": "one", "bare": "two", 'a "quoted"; name': "three"}
    assert (form.filename, data) == (found, b"\0\r\n--b\xff")


@pytest.mark.parametrize("kind", ["multipart/mixed; boundary=b", "multipart/form-data; xboundary=b", 'multipart/form-data; boundary="b'])
def test_other_types_are_refused(kind: str) -> None:
    with pytest.raises(ApiError, match="expected multipart/form-data with a boundary"):
        Form(kind, lambda _data: None)
