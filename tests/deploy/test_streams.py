"""The client of streams reads what servers and proxies send, however they cut it into chunks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from deploy.streams import LATE_AFTER, OverHttp, Prompt, Stream, post_stream

EVENTS = b'data: {"at":1}\n\n: still working\n\ndata: {"at":2}\n\ndata: [DONE]\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\n\r\n"


def chunked(data: bytes, size: int) -> bytes:
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[int]:
    """Yield the port of a server that gives this answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def read(answer: bytes) -> list[object]:
    async with answering(answer) as port:
        return [event async for event in post_stream("127.0.0.1", port, {"model": "m"})]


@pytest.mark.parametrize("size", [1, 7, 16, 1000])
def test_events_may_be_cut_anywhere(size: int) -> None:
    assert asyncio.run(read(chunked(EVENTS, size))) == [{"at": 1}, {"at": 2}]


def test_a_body_may_have_no_chunks() -> None:
    assert asyncio.run(read(PLAIN + EVENTS)) == [{"at": 1}, {"at": 2}]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (chunked(EVENTS, 16)[:90], "closed the connection within a stream"),
        (chunked(EVENTS[:20], 16), "closed the connection within a stream"),
        (PLAIN + EVENTS[:20], "closed the connection within a stream"),
        (chunked(b'data: {"error":{"message":"the worker died"}}\n\ndata: [DONE]\n\n', 16), "reports within a stream: the worker died"),
        (b"HTTP/1.1 429 Too Many Requests\r\n\r\nlater", "the server answered HTTP/1.1 429"),
    ],
)
def test_an_answer_that_is_no_whole_stream_is_an_error(answer: bytes, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        asyncio.run(read(answer))


@pytest.mark.parametrize(("in_each_event", "num_at_first"), [(True, 3), (False, 1)])
def test_tokens_before_the_first_text_are_counted_if_the_server_tells(in_each_event: bool, num_at_first: int) -> None:
    """The first two tokens complete no character, so they have no text. If a server tells the number of tokens only at the end, the client
    takes the first text for that of the first token."""
    texts = ["", "", "a", "b", "c"]
    events = [
        {"choices": [{"text": text, "finish_reason": "length" if at == 5 else None}], "usage": {"completion_tokens": at}}
        for at, text in enumerate(texts, 1)
    ]
    if not in_each_event:
        events = [{**event, "usage": None} for event in events]
    events.append({"choices": [], "usage": {"completion_tokens": 5}})
    answer = PLAIN + b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"

    async def go() -> Stream:
        async with answering(answer) as port:
            (stream,) = await OverHttp(f"http://127.0.0.1:{port}", "m", temperature=0.0)._run([Prompt((1,), 5)], None)
            return stream

    stream = asyncio.run(go())
    assert (stream.num_at_first, stream.num_tokens, len(stream.times_s)) == (num_at_first, 5, 3)


def test_a_speed_counts_the_tokens_between_the_times_it_divides_by() -> None:
    assert Stream(0.0, 9, [1.0, 2.0, 4.0], num_at_first=3).decoding_rate == pytest.approx(2.0)


def test_other_servers_get_no_salt() -> None:
    bodies = [OverHttp("http://127.0.0.1:1", "m", temperature=0.0, cache_salt=salt)._body for salt in ("", "s")]
    assert [body.get("cache_salt") for body in bodies] == [None, "s"]


def texts(num: int, *, last: str = "stop") -> bytes:
    """Return a stream of so many texts; the tokens after them have none."""
    events = [{"choices": [{"text": "a", "finish_reason": None}]}] * num + [{"choices": [{"text": "", "finish_reason": last}]}]
    return PLAIN + b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"


async def driven(*answers: bytes) -> list[Stream]:
    """Send a prompt for each answer but the last, and a late one, to a server that gives the answers in turn."""
    coming = iter(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(next(coming))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, asyncio.timeout(20):
        driver = OverHttp(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m", temperature=0.0)
        return await driver._run([Prompt((1,), 4)] * (len(answers) - 1), Prompt((1,), 4))


def test_a_late_prompt_waits_for_no_stream_that_has_ended() -> None:
    """A model may write tokens without text, such as those that would end an answer."""
    *others, late = asyncio.run(driven(texts(LATE_AFTER), texts(3), texts(1)))
    assert {len(stream.times_s) for stream in others} == {LATE_AFTER + 1, 4} and len(late.times_s) == 2


def test_a_late_prompt_does_not_wait_for_streams_that_fail() -> None:
    with pytest.raises(RuntimeError, match="the server answered HTTP"):
        asyncio.run(driven(texts(3), b"HTTP/1.1 429 Too Many Requests\r\n\r\nlater", texts(1)))
