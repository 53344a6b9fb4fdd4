"""A seeded attacker at socket level: random sequences of requests on random connections, and a judge of the answers.

Every request has an id of its own, which its answer repeats. So the judge sees whether answers are well formed, complete, in order, and
belong to their requests.
"""

from __future__ import annotations

import gzip
import json
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

KEY = "the-key-of-others"
TIMEOUT_S = 60.0
BODY = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
HOST = "host: 127.0.0.1\r\n"
JSON = "content-type: application/json\r\n"
PERMISSION = f"authorization: Bearer {KEY}\r\n"


class Defect(AssertionError):
    """Raised by the judge. It names the seed, the requests and the fault."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request and the status that it must get."""

    data: bytes
    status: int
    ends: bool = False  # whether the server closes the connection after the answer
    kind: str = ""
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def _post(extra: str, body: bytes, *, version: str = "1.1", host: str = HOST) -> bytes:
    return f"POST /v1/completions HTTP/{version}\r\n{host}{JSON}{extra}\r\n".encode() + body


def _measured(extra: str, body: bytes = BODY, **options: str) -> bytes:
    return _post(f"content-length: {len(body)}\r\n{extra}", body, **options)


def _chunked(extra: str, draw: random.Random, trailers: str = "", extension: str = "") -> bytes:
    at, encoded = 0, b""
    while at < len(BODY):
        size = draw.randint(1, len(BODY))
        part = BODY[at : at + size]
        encoded += f"{len(part):x}{extension}\r\n".encode() + part + b"\r\n"
        at += size
    return _post(f"transfer-encoding: chunked\r\n{extra}", encoded + f"0\r\n{trailers}\r\n".encode())


GZIP = "content-encoding: gzip\r\n" + PERMISSION
KINDS: dict[str, Callable[[random.Random], Ask]] = {
    "probe": lambda _: Ask(f"GET /health/live HTTP/1.1\r\n{HOST}\r\n".encode(), 200),
    "page": lambda _: Ask(f"GET / HTTP/1.1\r\n{HOST}\r\n".encode(), 200),
    "no path": lambda _: Ask(f"GET /nothing HTTP/1.1\r\n{HOST}{PERMISSION}\r\n".encode(), 404),
    "with a key": lambda _: Ask(_measured(PERMISSION), 200),
    "without a key": lambda _: Ask(_measured(""), 401),
    "chunked": lambda draw: Ask(_chunked(PERMISSION, draw, "a: b\r\n", ";ext=1"), 200),
    "key in a trailer": lambda draw: Ask(_chunked("", draw, PERMISSION), 401, ends=True),
    "upgrade": lambda _: Ask(_measured(f"connection: upgrade\r\nupgrade: h2c\r\n{PERMISSION}"), 200),
    "gzip": lambda _: Ask(_measured(GZIP, gzip.compress(BODY)), 200),
    "gzip without checksum": lambda _: Ask(_measured(GZIP, gzip.compress(BODY)[:-8]), 400),
    "gzip with a false checksum": lambda _: Ask(_measured(GZIP, gzip.compress(BODY)[:-8] + b"x" * 8), 400),
    "gzip with more": lambda _: Ask(_measured(GZIP, gzip.compress(BODY) + b"x"), 400),
    "two hosts": lambda _: Ask(_measured(PERMISSION, host=HOST + HOST), 400, ends=True),
    "no host": lambda _: Ask(_measured(PERMISSION, host=""), 400, ends=True),
    "coding in HTTP/1.0": lambda _: Ask(_post(f"transfer-encoding: chunked\r\n{PERMISSION}", b"0\r\n\r\n", version="1.0"), 400, ends=True),
    "two codings": lambda _: Ask(_post(f"transfer-encoding: gzip, chunked\r\n{PERMISSION}", b"0\r\n\r\n"), 400, ends=True),
    "malformed chunk": lambda _: Ask(_post(f"transfer-encoding: chunked\r\n{PERMISSION}", b"zz\r\n"), 400, ends=True),
    "many trailers": lambda _: Ask(
        _post(f"transfer-encoding: chunked\r\n{PERMISSION}", b"0\r\n" + b"a:b\r\n" * 40_000 + b"\r\n"), 400, ends=True
    ),
    "many headers": lambda _: Ask(f"GET / HTTP/1.1\r\n{HOST}".encode() + b"a:b\r\n" * 1000 + b"\r\n", 431, ends=True),
    "large body": lambda _: Ask(_post("content-length: 4000000\r\n", b" " * 4_000_000), 401, ends=True),
    "not HTTP": lambda _: Ask(b"\x16\x03\x01\x02\x00\r\n", 400, ends=True),
}


class Attacker:
    def __init__(self, port: int, seed: int, kinds: tuple[str, ...] = tuple(KINDS)) -> None:
        self._port = port
        self._draw = random.Random(seed)
        self._seed = seed
        self._kinds = kinds
        self._num_sent = 0
        self.num_answers = 0

    def attack(self) -> None:
        """Open a connection, send a random sequence of requests in a random way, and judge the answers."""
        asks = self._asks()
        data = b"".join(ask.data for ask in asks)
        is_cut = self._draw.random() < 0.15
        if is_cut:
            data = data[: self._draw.randrange(len(data) + 1)]
        received = b""
        with socket.create_connection(("127.0.0.1", self._port), timeout=TIMEOUT_S) as sock:
            try:
                for piece in self._pieces(data):
                    sock.sendall(piece)
                if is_cut and self._draw.random() < 0.5:
                    return  # closes both halves; the server may answer or not
                sock.shutdown(socket.SHUT_WR)
                while part := sock.recv(1 << 16):
                    received += part
            except (ConnectionResetError, BrokenPipeError) as error:
                raise self._defect(asks, f"the connection was reset after {len(received)} bytes of answers") from error
        self._judge(asks, received, is_cut=is_cut)

    def pipeline(self, num_connections: int, num_requests: int) -> None:
        """Send one request many times on each connection, read the beginning of the first answers, and leave."""
        data = KINDS[self._draw.choice(("page", "no path", "without a key"))](self._draw).data * num_requests
        with ExitStack() as stack:
            opened = [stack.enter_context(socket.create_connection(("127.0.0.1", self._port))) for _ in range(num_connections)]
            for sock in opened:
                sock.setblocking(False)
                with suppress(BlockingIOError):  # the server reads no more than it can answer
                    rest = memoryview(data)
                    while rest:
                        rest = rest[sock.send(rest) :]
            for sock in opened:
                sock.settimeout(TIMEOUT_S)
                sock.recv(1)

    def _asks(self) -> list[Ask]:
        asks: list[Ask] = []
        for _ in range(self._draw.choice((1, 1, 2, 3, 8))):
            kind = self._draw.choice(self._kinds)
            self._num_sent += 1
            request_id = f"attack-{self._seed}-{self._num_sent}"
            ask = KINDS[kind](self._draw)
            data = ask.data.replace(b"HTTP/1.1\r\n", f"HTTP/1.1\r\nx-request-id: {request_id}\r\n".encode(), 1)
            asks.append(replace(ask, kind=kind, data=data, request_id=request_id))
        return asks

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield the data whole, in a few pieces, or byte by byte at the beginning."""
        match self._draw.randrange(3):
            case 0:
                yield data
            case 1:
                cuts = sorted(self._draw.randrange(len(data) + 1) for _ in range(self._draw.randint(1, 6)))
                for begin, end in zip((0, *cuts), (*cuts, len(data)), strict=True):
                    yield data[begin:end]
            case _:
                num = min(len(data), self._draw.randint(1, 200))
                yield from (data[at : at + 1] for at in range(num))
                yield data[num:]

    def _judge(self, asks: list[Ask], received: bytes, *, is_cut: bool) -> None:
        try:
            answers = list(read_answers(received))
        except ValueError as error:
            raise self._defect(asks, f"an answer is malformed: {error}") from error
        self.num_answers += len(answers)
        for ask, answer in zip(asks, answers, strict=False):
            given = answer.headers.get("x-request-id", ask.request_id)  # errors of HTTP itself have no id
            if given != ask.request_id:
                raise self._defect(asks, f"{ask.kind}: the answer belongs to {given}, not to {ask.request_id}")
            if answer.status != ask.status and not is_cut:
                raise self._defect(asks, f"{ask.kind}: status {answer.status}, expected {ask.status}: {answer.body!r:.200}")
            if answer.status < 400 and ask.status >= 400:
                raise self._defect(asks, f"{ask.kind}: passed with status {answer.status}")
            if answer.headers.get("connection") == "close":
                if len(answers) > answers.index(answer) + 1:
                    raise self._defect(asks, f"{ask.kind}: an answer follows the one that closes the connection")
                return
        ended = next((number + 1 for number, ask in enumerate(asks) if ask.ends), len(asks))
        if len(answers) > len(asks) or (len(answers) < ended and not is_cut):
            raise self._defect(asks, f"{len(answers)} answers, expected {ended}")

    def _defect(self, asks: list[Ask], fault: str) -> Defect:
        return Defect(f"seed {self._seed}, requests {[ask.kind for ask in asks]}: {fault}")


def read_answers(data: bytes) -> Iterator[Answer]:
    """Yield the answers in what a server sent on one connection, without interim ones. Raise ValueError if anything else is there."""
    while data:
        head, end, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        parts = first.split(" ")
        if not end or not first.startswith("HTTP/1.1 ") or not parts[1].isdigit():
            raise ValueError(f"head {head!r:.100}")
        if parts[1] == "100":
            continue
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            body, data = _read_chunks(data)
        else:
            num_bytes = int(headers["content-length"])
            body, data = data[:num_bytes], data[num_bytes:]
            if len(body) != num_bytes:
                raise ValueError(f"a body of {len(body)} bytes, declared as {num_bytes}")
        yield Answer(int(parts[1]), headers, body)


def _read_chunks(data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        num_bytes = int(size, 16)
        part, end, data = data[:num_bytes], data[num_bytes : num_bytes + 2], data[num_bytes + 2 :]
        if len(part) != num_bytes or end != b"\r\n":
            raise ValueError("a chunk is incomplete")
        if not num_bytes:
            return body, data
        body += part
