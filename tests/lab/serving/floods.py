"""Floods of connections without a key, for `python -m tests.lab hostile`: 100 connections of one shape send 10 MB/s together.

A shape is a sequence of requests, or of parts of requests. Each connection sends its shape again and again, and opens a new connection when
the server closes it. It reads all answers, as a patient client would.
"""

from __future__ import annotations

import asyncio
import gzip
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event

NUM_CONNECTIONS = 100
RATE = 10_000_000  # bytes per second of all connections together
PIECE_BYTES = 16 << 10
DRIP_S = 0.05
LEAST_PRIORITY = 19  # attackers have machines of their own, so their computation must not take time from the server

Address = tuple[str, int]
Shape = Callable[[], Iterator[bytes]]

HOST = b"host: 127.0.0.1\r\n"
CHUNKED = b"POST / HTTP/1.1\r\n" + HOST + b"transfer-encoding: chunked\r\n\r\n"
UNAUTHORISED = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"content-type: application/json\r\n"


def trailers() -> Iterator[bytes]:
    yield CHUNKED + b"1\r\nx\r\n0\r\n"
    yield from itertools.repeat(b"a:b\r\n" * (PIECE_BYTES // 5))


def long_trailer() -> Iterator[bytes]:
    yield CHUNKED + b"1\r\nx\r\n0\r\na:"
    yield from itertools.repeat(b"b" * PIECE_BYTES)


def chunk_extensions() -> Iterator[bytes]:
    yield CHUNKED
    yield from itertools.repeat((b"1;" + b"e" * 1000 + b"\r\nx\r\n") * 16)


def small_chunks() -> Iterator[bytes]:
    yield CHUNKED
    yield from itertools.repeat(b"5\r\n12345\r\n" * (PIECE_BYTES // 10))


def pipelines(request: bytes) -> Shape:
    return lambda: itertools.repeat(request * (PIECE_BYTES // len(request)))


def drips() -> Iterator[bytes]:
    """Yield a request byte by byte."""
    for byte in itertools.cycle(UNAUTHORISED):
        yield bytes([byte])


def header_floods() -> Iterator[bytes]:
    while True:
        yield b"GET / HTTP/1.1\r\n" + HOST + b"a:b\r\n" * 6000 + b"\r\n"


def long_headers() -> Iterator[bytes]:
    """Yield requests whose headers are as large as the limits allow."""
    while True:
        yield b"GET / HTTP/1.1\r\n" + HOST + b"".join(b"h%d: %b\r\n" % (i, b"v" * 240) for i in range(120)) + b"\r\n"


def bombs(path: bytes) -> Shape:
    body = gzip.compress(b"[" + b"0," * (4 << 20) + b"0]")
    head = b"POST " + path + b" HTTP/1.1\r\n" + HOST + b"content-type: application/json\r\ncontent-encoding: gzip\r\n"
    return lambda: itertools.repeat(head + b"content-length: %d\r\n\r\n" % len(body) + body)


def large_bodies() -> Iterator[bytes]:
    yield UNAUTHORISED + b"content-length: %d\r\n\r\n" % (1 << 40)
    yield from itertools.repeat(b" " * PIECE_BYTES)


SHAPES: Mapping[str, Shape] = {
    "trailers": trailers,
    "a long trailer": long_trailer,
    "chunk extensions": chunk_extensions,
    "small chunks": small_chunks,
    "pipelines of GET /": pipelines(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"),
    "pipelines of GET /nothing": pipelines(b"GET /nothing HTTP/1.1\r\n" + HOST + b"\r\n"),
    "pipelines of probes": pipelines(b"GET /health/live HTTP/1.1\r\n" + HOST + b"\r\n"),
    "pipelines of unauthorised POST": pipelines(UNAUTHORISED + b"content-length: 2\r\n\r\n{}"),
    "slow drips": drips,
    "header floods": header_floods,
    "long headers": long_headers,
    "gzip bombs": bombs(b"/"),
    "unauthorised gzip bombs": bombs(b"/v1/completions"),
    "large bodies": large_bodies,
}


class Budget:
    """The bytes that all connections may send together, as a rate."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_s = 0.0

    async def take(self, num_bytes: int) -> None:
        self._free_s = max(self._free_s, time.monotonic()) + num_bytes / self._rate
        await asyncio.sleep(self._free_s - time.monotonic())


async def attack(address: Address, shape: Shape, budget: Budget) -> None:
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(*address)
            reading = asyncio.create_task(_read_all(reader))
            try:
                for data in shape():
                    if reading.done():
                        break
                    for at in range(0, len(data), PIECE_BYTES):
                        await budget.take(len(data[at : at + PIECE_BYTES]))
                        writer.write(data[at : at + PIECE_BYTES])
                        await asyncio.wait({asyncio.create_task(writer.drain()), reading}, return_when=asyncio.FIRST_COMPLETED)
                    if len(data) == 1:
                        await asyncio.sleep(DRIP_S)
            finally:
                reading.cancel()
                writer.transport.abort()
        await asyncio.sleep(0.01)


async def _read_all(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(1 << 16):
            pass


def _flood(address: Address, name: str, num_connections: int, running: Event, stop: Event) -> None:
    os.nice(LEAST_PRIORITY)
    running.set()

    async def run() -> None:
        budget = Budget(RATE)
        attacks = [asyncio.create_task(attack(address, SHAPES[name], budget)) for _ in range(num_connections)]
        while not stop.is_set():
            await asyncio.sleep(0.1)
        for task in attacks:  # each may wait for the server to read on
            task.cancel()
        await asyncio.wait(attacks)

    asyncio.run(run())


@contextmanager
def flooding(address: Address, name: str, num_connections: int = NUM_CONNECTIONS) -> Generator[None]:
    """Send one shape from another process, until the `with` block ends."""
    context = multiprocessing.get_context("spawn")
    running, stop = context.Event(), context.Event()
    process = context.Process(target=_flood, args=(address, name, num_connections, running, stop))
    process.start()
    try:
        running.wait()
        yield
    finally:
        stop.set()
        process.join()
