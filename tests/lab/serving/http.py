"""`python -m tests.lab http`: the overhead of the HTTP front.

The server runs in this process, with a model that emits the present time as the text of each token. A client process compares this time
with the time at which the operating system received the token (`added`), and with the time at which the client read it (`read`). `read`
includes the client's own delay. All times are from the same clock.

    paced       64 streams with `--rate` tokens per second in total; like an engine, the model emits one token per stream at a time
    bare        the same bytes at the same pace, from a minimal server: the part of `paced` that is due to the machine
    saturated   64 streams at full speed
    idle        memory of 1,000 idle connections
    metrics     time to read `/metrics` after these loads
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import re
import selectors
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from server.app import create_app
from server.http.server import Server
from server.interfaces import ProgressCallback
from server.messages import FinishReason, Submit, TokenEvent
from server.models.registry import Registry
from server.models.state import ModelSpec
from server.settings import ServerSettings
from tests.doubles.worker import ByteTokenizer, NullScript, NullWorker
from tests.process_states import resident_bytes

BARE_HEAD = b"ff\r\n" + b"." * 200 + b'"content":"'  # as long as a chunk of `paced`
BARE_TAIL = b'"},"logprobs":null,"finish_reason":null}]}\n\n\r\n'
EVENT_END, EMITTED = b"\n\n", re.compile(rb'"content":"(\d+)')  # the text of a token is the time at which it was emitted
NUM_IDLE = 1000
SO_TIMESTAMPNS = 35  # Linux socket option: attach the arrival time to received data
BODY = {"model": "clock", "stream": True, "messages": [{"role": "user", "content": "What time is it?"}]}


class ClockTokenizer(ByteTokenizer):
    """A tokenizer in which the text of token n is the number n and a space."""

    def __init__(self) -> None:
        super().__init__()
        self.vocab_size = 1 << 40

    def token_bytes(self, token_id: int) -> bytes:
        return b"%d " % token_id


class ClockWorker(NullWorker):
    """A worker that emits the time in microseconds as a token, to all streams in one step, every `interval_s`. Like the real worker, it has
    a queue per request."""

    def __init__(self, progress: ProgressCallback) -> None:
        super().__init__(NullScript(max_context=1 << 20), progress)
        self.interval_s = 0.0
        self._queues: dict[str, asyncio.Queue[TokenEvent]] = {}
        self._stepper: asyncio.Task[None] | None = None

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenEvent, None]:
        queue = self._queues[submit.request_id] = asyncio.Queue()
        self._stepper = self._stepper or asyncio.create_task(self._step())
        try:
            for left in range(submit.params.max_tokens - 1, -1, -1):
                event = await queue.get()
                if left == 0:
                    event = TokenEvent(event.request_id, 0, event.token_ids, finish_reason=FinishReason.LENGTH)
                yield event
        finally:
            del self._queues[submit.request_id]

    async def _step(self) -> None:
        due_s = time.monotonic()
        while self._queues:
            due_s = max(due_s + self.interval_s, time.monotonic() - 1.0)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            now = time.time_ns() // 1000
            for request_id, queue in self._queues.items():
                if queue.qsize() < 4:  # at full speed, emit a token when fewer than four tokens wait
                    queue.put_nowait(TokenEvent(request_id, 0, (now,)))
        self._stepper = None


@dataclass(frozen=True, slots=True)
class Streams:
    """The tokens that the client received in one run, and the server's processor time."""

    num_streams: int
    num_tokens: int
    wall_s: float
    server_cpu_s: float
    added_ms_p50: float
    added_ms_p99: float
    added_ms_max: float
    read_ms_p99: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def cores(self) -> float:
        return self.server_cpu_s / self.wall_s

    def describe(self) -> dict[str, float]:
        return {
            **{name: round(value, 3) for name, value in asdict(self).items()},
            "tokens_per_s": round(self.tokens_per_s, 1),
            "server_cores": round(self.cores, 3),
            "cpu_us_per_token": round(1e6 * self.server_cpu_s / self.num_tokens, 1),
        }


async def measure(rate: float, num_streams: int, seconds: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        settings = ServerSettings(port=0, model_root=Path(folder), drain_s=1.0)
        workers: list[ClockWorker] = []

        def make_worker(_spec: ModelSpec, progress: ProgressCallback) -> ClockWorker:
            workers.append(ClockWorker(progress))
            return workers[-1]

        registry = Registry(settings, make_worker, lambda _source: ClockTokenizer(), initial=[ModelSpec("clock", "clock")])
        server = Server(create_app(settings, registry), settings, registry)
        serving = asyncio.create_task(server.serve())
        while not (server.started and registry.ready):
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        (worker,) = workers
        await _streams(port, num_streams, 20)  # warm
        worker.interval_s = num_streams / rate
        paced = await _streams(port, num_streams, max(2, round(seconds * rate / num_streams)))
        bare = await _bare(num_streams, rate, max(2, round(seconds * rate / num_streams)))
        worker.interval_s = 0.0
        saturated = await _streams(port, num_streams, max(2, round(seconds * rate * 2 / num_streams)))
        idle_bytes = await _idle(port)
        scrape_s = await _scrape(port)
        server.should_exit = True
        await serving
    return {
        "paced": paced.describe(),
        "bare": bare.describe(),
        "saturated": saturated.describe(),
        "idle": {"connections": NUM_IDLE, "bytes": idle_bytes},
        "metrics": {"scrape_ms": round(1000 * scrape_s, 2)},
    }


async def _bare(num_streams: int, rate: float, num_tokens: int) -> Streams:
    """Measure the lower bound of `paced`: a server that makes one write per token and stream, and nothing else."""
    writers: list[asyncio.StreamWriter] = []
    everyone_asked = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}]")
        writers.append(writer)
        if len(writers) == num_streams:
            everyone_asked.set()

    async def step() -> None:
        await everyone_asked.wait()
        due_s = time.monotonic()
        for _ in range(num_tokens):
            due_s += num_streams / rate
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            now = time.time_ns() // 1000
            for writer in writers:
                writer.write(b"%b%d %b" % (BARE_HEAD, now, BARE_TAIL))
        for writer in writers:
            writer.write(b"data: [DONE]\n\n")

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        stepping = asyncio.create_task(step())
        streams = await _streams(server.sockets[0].getsockname()[1], num_streams, num_tokens)
        await stepping
        for writer in writers:
            writer.close()
    return streams


async def _streams(port: int, num_streams: int, num_tokens: int) -> Streams:
    """Run the client process. The measured processor time is that of this process, the server."""
    command = [sys.executable, "-m", "tests.lab.serving.http", "--client", f"{port},{num_streams},{num_tokens}"]
    pipe = asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 28)  # limit is the longest line in bytes
    assert client.stdout is not None and client.stdin is not None
    await client.stdout.readline()  # the client writes a line once it has imported its modules and connected
    began_cpu_s = time.process_time()
    client.stdin.write(b"go\n")
    seen = json.loads(await client.stdout.readline())
    cpu_s = time.process_time() - began_cpu_s
    await client.wait()
    added, read = sorted(seen["added_us"]), sorted(seen["read_us"])
    return Streams(
        num_streams,
        len(added),
        seen["wall_s"],
        cpu_s,
        added_ms_p50=statistics.median(added) / 1000,
        added_ms_p99=added[int(len(added) * 0.99)] / 1000,
        added_ms_max=added[-1] / 1000,
        read_ms_p99=read[int(len(read) * 0.99)] / 1000,
    )


def client(port: int, num_streams: int, num_tokens: int) -> None:
    """Read the streams in the client process and measure how late each token is."""
    body = json.dumps({**BODY, "max_tokens": num_tokens}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    request = f"{head}\r\n\r\n".encode() + body
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_streams)]
    for stream in sockets:
        stream.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    gc.disable()  # pauses of the garbage collector would be attributed to the server
    print("ready", flush=True)
    sys.stdin.readline()
    began_s = time.monotonic()
    added: list[int] = []
    read: list[int] = []
    begun = dict.fromkeys(sockets, b"")  # per stream: the bytes of an incomplete event
    with selectors.DefaultSelector() as selector:
        for stream in sockets:
            stream.sendall(request)
            selector.register(stream, selectors.EVENT_READ)
        num_open = num_streams
        while num_open:
            for key, _ in selector.select():
                stream = key.fileobj
                assert isinstance(stream, socket.socket)
                data, stamps, _, _ = stream.recvmsg(1 << 16, 256)
                read_us = time.time_ns() // 1000
                assert data, "the server closed the connection"
                arrived_us = _arrival_us(stamps) or read_us
                *whole, begun[stream] = (begun[stream] + data).split(EVENT_END)
                emitted = [int(found[1]) for event in whole if (found := EMITTED.search(event))]
                added += [arrived_us - emitted_us for emitted_us in emitted]
                read += [read_us - emitted_us for emitted_us in emitted]
                if any(b"data: [DONE]" in event for event in whole):
                    selector.unregister(stream)
                    stream.close()
                    num_open -= 1
    wall_s = time.monotonic() - began_s
    assert len(added) == num_streams * num_tokens, f"{len(added)} tokens arrived, expected {num_streams * num_tokens}"
    print(json.dumps({"wall_s": wall_s, "added_us": added, "read_us": read}), flush=True)


def _arrival_us(stamps: Sequence[tuple[int, int, bytes]]) -> int | None:
    """Return when the kernel received the last of the bytes, or None if there is no timestamp: Linux begins to add timestamps some time
    after the option is set."""
    if not stamps:
        return None
    ((_, _, stamp),) = stamps
    seconds, nanoseconds = struct.unpack("@qq", stamp)
    return seconds * 1_000_000 + nanoseconds // 1000


async def _idle(port: int) -> int:
    """Return the memory that the server needs for connections that sent one request and stay open. The clients run in this process, but
    need almost no memory."""
    gc.collect()
    before = resident_bytes()
    writers: list[asyncio.Transport] = []
    loop = asyncio.get_running_loop()
    for _ in range(NUM_IDLE):
        transport, answer = await loop.create_connection(_Idler, "127.0.0.1", port)
        transport.write(b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        await answer.answered
        writers.append(transport)
    gc.collect()
    grown = resident_bytes() - before
    for transport in writers:
        transport.abort()
    return grown


class _Idler(asyncio.Protocol):
    def __init__(self) -> None:
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        if not self.answered.done():
            self.answered.set_result(None)


async def _scrape(port: int) -> float:
    times: list[float] = []
    for _ in range(5):
        began_s = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        await reader.read()
        times.append(time.monotonic() - began_s)
        writer.close()
    return statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lab http", description="Measure the overhead of the HTTP front.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--rate", type=float, default=2000.0, help="tokens per second of all streams together")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.client:
        client(*map(int, options.client.split(",")))
        return
    result = asyncio.run(measure(options.rate, options.streams, options.seconds))
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for part, values in result.items():
        print(f"{part:10}", values)


if __name__ == "__main__":
    main()
