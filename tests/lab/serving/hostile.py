"""`python -m tests.lab hostile`: check that neither requests within the limits nor floods of connections delay a stream, or a request to
`/health/live`.

A separate server process serves the model. A client process reads a stream, and requests `/health/live` again and again (the probe).
Another process sends requests, one after another: for each field of each endpoint in `/openapi.json`, one request per kind of large value.
A figure is the longest pause between two tokens of the stream, or the longest wait of the probe, while requests with large values of one
field are sent. The figure `without requests` is measured in the same way while no such request is sent: delays of that length are due to
the machine. The machine delays requests at random, whereas a harmful request causes a delay every time. So fields beyond the goal are sent
again, in up to five rounds, and the smallest figure of all rounds counts.

A step that computes prompts or texts delays streams by up to `max_gap_ms`, which has its default unless `--max-gap-ms` sets it.

Then 100 connections without a key send each shape of `tests/lab/serving/floods.py`, to a server with a key. A figure is the longest
pause of a stream with the key, the longest wait of the probe, or the growth of the front's memory. `/health/live` has a goal of 50 ms, the
stream one of 100 ms, and the memory one of 100 MB. Shapes beyond a goal are sent again, as fields are. The connections have the least
priority of the machine, because attackers have processors of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from deploy import demo
from deploy.bench.checkpoint import model_folder
from deploy.bench.measure import Figure, report
from deploy.streams import post_stream
from server.http.json_scan import MAX_DEPTH, MAX_ESCAPES, MAX_NUMBERS, MAX_PARTS
from server.load_settings import MAX_GAP_MS
from server.settings import ServerSettings
from tests.lab.serving.floods import SHAPES, flooding
from tests.lab.serving.start import NAME, server

GOAL_MS = 50.0
FLOOD_STREAM_GOAL_MS, FLOOD_GROWTH_GOAL_MB = 100.0, 100.0
FLOOD_S = 60.0  # time for which each shape of connections is sent
KEY = "the-key-of-the-stream"
MOST_BYTES = ServerSettings().max_body_bytes
NOTHING, NO_FLOOD, OWN_LIMIT = "without requests", "no connections", "largest allowed value"
QUIET_S, EVERY = 0.5, 8  # length of a pause without requests, and the number of fields between two such pauses
MOST_ROUNDS = 5
TIMEOUT_S = 120.0

Address = tuple[str, int]
Schema = Mapping[str, Any]

# Other fields of an endpoint that are sent together with the field under test, if the endpoint has them.
NEEDED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
    "query": "hi",
    "documents": ["hi"],
    "text_1": "hi",
    "text_2": "hi",
    "tokens": [5],
    "n_predict": 4,
    "source": "no-such-model",
    "max_tokens": 4,
    "max_output_tokens": 4,
}
# Combinations of fields that together produce the largest answers.
TOGETHER: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": 64, "stream": stream, "return_token_ids": True}
        for stream in (False, True)
    ],
    "/v1/completions": [
        {"prompt": [5] * 1000, "n": 128, "echo": True, "logprobs": 20, "max_tokens": 8, "stream": stream} for stream in (False, True)
    ]
    + [{"prompt": ["a b c " * 100] * 128, "max_tokens": 8, "bad_words": [f"word {i}" for i in range(1000)]}],
    "/v1/embeddings": [
        {"input": ["a b c"] * 2048, "encoding_format": "float"},
        {"input": ["a b c " * 600] * 2048, "truncate_prompt_tokens": 8},
    ],
    "/tokenize": [{"prompt": "a\n" * 60_000, "return_token_strs": True}, {"prompt": "a b" * 40_000}],
}


def shapes() -> Iterator[tuple[str, bytes]]:
    """Yield JSON values that reach a limit of the whole body, each with its name. They are sent in every field, whatever its type."""
    most = MOST_BYTES - 4096
    yield "long text", b'"' + b"a b " * (most // 4) + b'"'
    yield "text of escapes", b'"' + b"\\n" * (MAX_ESCAPES - 100) + b'"'
    yield "list of numbers", b"[" + b",".join([b"1000"] * (MAX_NUMBERS - 100)) + b"]"
    yield "list of texts", b"[" + b",".join([b'"a"'] * (MAX_PARTS - 100)) + b"]"
    yield "list of objects", b"[" + b",".join([b"{}"] * (MAX_PARTS - 100)) + b"]"
    yield "object with many names", b"{" + b",".join(b'"%d":0' % i for i in range(MAX_PARTS - 100)) + b"}"
    yield "deeply nested list", b"[" * (MAX_DEPTH - 2) + b"]" * (MAX_DEPTH - 2)


def at_limit(schema: Schema, document: Schema, depth: int = 0) -> Any:
    """Return the largest value that the field's schema allows within the limits of the whole body."""
    if "$ref" in schema:
        return at_limit(_resolve(schema, document), document, depth)
    options = [option for option in schema.get("anyOf", schema.get("oneOf", ())) if option.get("type") != "null"]
    if options:
        return at_limit(options[-1], document, depth)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[-1])
    match schema.get("type"):
        case "string":
            num = min(schema.get("maxLength", 1 << 20), 1 << (20 if depth == 0 else 6))
            return "a" * num
        case "array":
            num = min(schema.get("maxItems", 1 << 16), 1 << (15 if depth == 0 else 4))
            item = at_limit(schema.get("items", {}), document, depth + 1)
            # the server refuses a larger body without reading it
            fitting = (MOST_BYTES - 4096) // (len(json.dumps(item)) + 2) if depth == 0 else num
            return [item] * min(num, fitting)
        case "object":
            properties = {name: at_limit(inner, document, depth + 1) for name, inner in schema.get("properties", {}).items() if depth < 3}
            if properties:
                return properties
            inner = schema.get("additionalProperties", True)
            value = at_limit(inner, document, depth + 1) if isinstance(inner, dict) else 0
            return {str(i): value for i in range(min(schema.get("maxProperties", 1 << 14), 1 << (14 if depth == 0 else 3)))}
        case "integer" | "number":
            return int(schema.get("maximum", schema.get("exclusiveMaximum", 2) - 1))
        case "boolean":
            return True
        case _:
            return [0] * (1 << 14)


@dataclass(frozen=True, slots=True)
class Trial:
    """One request with a field under test."""

    name: str  # endpoint and field under test
    shape: str
    method: str
    path: str
    others: bytes  # all fields except the field under test, as the beginning of the JSON object
    value: bytes

    @property
    def body(self) -> bytes:
        return self.others + self.value + b"}"


def trials(document: Schema, only: str) -> Iterator[Trial]:
    common = list(shapes())
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content is None:
                continue
            schema = _resolve(content["schema"], document)
            fields = schema.get("properties", {})
            known = {name: value for name, value in NEEDED.items() if name in fields}
            url = path.replace("{", "").replace("}", "")
            for name, described in [*fields.items(), ("unknown", {"type": "object"})]:
                title = f"{method.upper()} {path} {name}"
                if only not in title:
                    continue
                needed = _without_alternatives(known, name)
                head = json.dumps({key: value for key, value in needed.items() if key != name})[:-1]
                joint = ", " if len(head) > 1 else ""
                for shape, value in [(OWN_LIMIT, json.dumps(at_limit(described, document)).encode()), *common]:
                    yield Trial(title, shape, method.upper(), url, f'{head}{joint}"{name}": '.encode(), value)
            needed = _without_alternatives(known, "")
            if only in (title := f"{method.upper()} {path} several fields"):
                for number, further in enumerate(TOGETHER.get(path, ()), 1):
                    yield Trial(title, f"request {number}", method.upper(), url, json.dumps({**needed, **further})[:-1].encode(), b"")


def _without_alternatives(needed: Mapping[str, Any], tried: str) -> dict[str, Any]:
    """Remove all prompt fields except one, because a request may have only one. Keep the field under test if it is a prompt field,
    otherwise the first prompt field."""
    given = [name for name in ("prompt", "input", "messages") if name in needed]
    chosen = tried if tried in given else next(iter(given), "")
    return {name: value for name, value in needed.items() if name == chosen or name not in given}


@dataclass(slots=True)
class Watched:
    """Pauses of the stream and waits of the probe (requests to `/health/live`), each as (begin, end) in seconds of the monotonic clock."""

    stream: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    probe: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def worst_ms(self, begin_s: float, end_s: float) -> tuple[float, float]:
        """Return the longest pause of the stream and the longest wait of the probe that overlap the span, in milliseconds."""
        stream, probe = (
            max((end - begin for begin, end in spans if end > begin_s and begin < end_s), default=0.0)
            for spans in (self.stream, self.probe)
        )
        return 1000 * stream, 1000 * probe


def _watch(address: Address, key: str, pipe: Connection, running: Event, stop: Event) -> None:
    pipe.send(asyncio.run(_watching(address, key, running, stop)))


async def _watching(address: Address, key: str, running: Event, stop: Event) -> Watched:
    """Read streams and send probes until `stop` is set. Set `running` once both a stream and a probe have been answered."""
    watched = Watched()

    async def read_streams() -> None:
        while not stop.is_set():
            body = {"model": NAME, "prompt": "Once", "max_tokens": 900, "temperature": 1.0, "ignore_eos": True}
            last_s = 0.0
            async for _event in post_stream(*address, body, key):
                now_s = time.monotonic()
                if last_s:
                    watched.stream.append((last_s, now_s))
                last_s = now_s
                if stop.is_set():
                    return

    async def probe() -> None:
        reader, writer = await asyncio.open_connection(*address)
        while not stop.is_set():
            began_s = time.monotonic()
            writer.write(b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
            watched.probe.append((began_s, time.monotonic()))
            if watched.stream and not running.is_set():
                running.set()
            await asyncio.sleep(0.005)
        writer.close()

    await asyncio.gather(read_streams(), probe())
    return watched


@contextmanager
def watching(address: Address, key: str = "") -> Generator[list[Watched]]:
    """Watch the server from another process. After the `with` block, the yielded list contains the result."""
    # a separate process, because preparing requests in this process would delay the measurement
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    running, stop = context.Event(), context.Event()
    process = context.Process(target=_watch, args=(address, key, sending, running, stop))
    process.start()
    seen: list[Watched] = []
    try:
        if not running.wait(TIMEOUT_S):
            raise RuntimeError(f"within {TIMEOUT_S:g} s the server answered no stream and no probe")
        yield seen
    finally:
        stop.set()
        if receiving.poll(TIMEOUT_S):
            seen.append(receiving.recv())
        process.join()


def send(address: Address, trial: Trial) -> int:
    """Send a request. Return the status, or 0 if the server closed the connection before it had read the body."""
    connection = http.client.HTTPConnection(*address, timeout=TIMEOUT_S)
    try:
        connection.request(trial.method, trial.path, trial.body, {"content-type": "application/json"})
        answer = connection.getresponse()
        while answer.read(1 << 20):
            pass
        return answer.status
    except (BrokenPipeError, ConnectionResetError):
        return 0
    finally:
        connection.close()


@dataclass(slots=True)
class Tried:
    spans: list[tuple[float, float, str]] = field(default_factory=list[tuple[float, float, str]])  # begin, end, shape
    statuses: set[int] = field(default_factory=set[int])


@dataclass(frozen=True, slots=True)
class Delay:
    """The longest pause of the stream, and the longest wait of the probe, while large values of one field were sent in one round."""

    stream_ms: float
    probe_ms: float
    shape: str
    num_requests: int
    statuses: frozenset[int]
    num_rounds: int = 1

    @property
    def worst_ms(self) -> float:
        return max(self.stream_ms, self.probe_ms)


def measure(address: Address, document: Schema, only: str, most_rounds: int = MOST_ROUNDS) -> dict[str, Delay]:
    found = _round(address, trials(document, only))
    for num_rounds in range(2, most_rounds + 1):
        slow = {name for name, delay in found.items() if delay.worst_ms > GOAL_MS and name != NOTHING}
        if not slow:
            break
        for name, again in _round(address, (trial for trial in trials(document, only) if trial.name in slow)).items():
            choose = max if name == NOTHING else min
            found[name] = replace(choose(found[name], again, key=lambda delay: delay.worst_ms), num_rounds=num_rounds)
    return found


def _round(address: Address, wanted: Iterable[Trial]) -> dict[str, Delay]:
    tried = {NOTHING: Tried()}

    def be_quiet() -> None:
        began_s = time.monotonic()
        time.sleep(QUIET_S)
        tried[NOTHING].spans.append((began_s, time.monotonic(), NOTHING))

    with watching(address) as seen:
        be_quiet()
        for trial in wanted:
            if trial.name not in tried and len(tried) % EVERY == 0:
                be_quiet()
            found = tried.setdefault(trial.name, Tried())
            began_s = time.monotonic()
            found.statuses.add(send(address, trial))
            found.spans.append((began_s, time.monotonic(), trial.shape))
        be_quiet()
    return {name: _delay(one, seen[0]) for name, one in tried.items()}


def _delay(tried: Tried, watched: Watched) -> Delay:
    delays = [(watched.worst_ms(begin_s, end_s), shape) for begin_s, end_s, shape in tried.spans]
    (stream, probe), shape = max(delays, key=lambda delay: max(delay[0]))
    return Delay(stream, probe, shape, len(tried.spans), frozenset(tried.statuses))


def figures(found: Mapping[str, Delay]) -> list[Figure]:
    described: list[Figure] = []
    for name, delay in found.items():
        note = f"stream paused {delay.stream_ms:.1f} ms, probe waited {delay.probe_ms:.1f} ms"
        if name == NOTHING:
            described.append(Figure(name, delay.worst_ms, "ms", note=note))
            continue
        statuses = ", ".join(map(str, sorted(delay.statuses)))
        note += f" for: {delay.shape}; {delay.num_requests} requests, status {statuses}; rounds: {delay.num_rounds}"
        described.append(Figure(name, delay.worst_ms, "ms", GOAL_MS, note=note))
    worst = max((delay.worst_ms for name, delay in found.items() if name != NOTHING), default=0.0)
    return [*described, Figure("worst of all fields", worst, "ms", GOAL_MS)]


@dataclass(frozen=True, slots=True)
class Flooded:
    """The longest pause of the stream, the longest wait of the probe, and the growth of the front, while connections sent one shape."""

    stream_ms: float
    probe_ms: float
    growth_mb: float
    num_rounds: int = 1

    @property
    def excess(self) -> float:
        """The largest part of its goal that a figure reaches."""
        return max(self.stream_ms / FLOOD_STREAM_GOAL_MS, self.probe_ms / GOAL_MS, self.growth_mb / FLOOD_GROWTH_GOAL_MB)


def measure_floods(address: Address, front_id: int, seconds: float, only: str, most_rounds: int = MOST_ROUNDS) -> dict[str, Flooded]:
    """Return the figures of each shape, and those of as long a time without a flood."""
    found = _flood_round(address, front_id, seconds, [NO_FLOOD, *(name for name in SHAPES if only in name)])
    for num_rounds in range(2, most_rounds + 1):
        slow = [name for name, flooded in found.items() if flooded.excess > 1 and name != NO_FLOOD]
        if not slow:
            break
        for name, again in _flood_round(address, front_id, seconds, [NO_FLOOD, *slow]).items():
            choose = max if name == NO_FLOOD else min
            found[name] = replace(choose(found[name], again, key=lambda flooded: flooded.excess), num_rounds=num_rounds)
    return found


def _flood_round(address: Address, front_id: int, seconds: float, names: Sequence[str]) -> dict[str, Flooded]:
    spans: dict[str, tuple[float, float, float]] = {}
    with watching(address, KEY) as seen:
        for name in names:
            before_mb = _memory_mb(front_id)
            with flooding(address, name) if name in SHAPES else nullcontext():
                began_s, growth_mb = time.monotonic(), 0.0
                while time.monotonic() < began_s + seconds:
                    time.sleep(0.1)
                    growth_mb = max(growth_mb, _memory_mb(front_id) - before_mb)
                spans[name] = began_s, time.monotonic(), growth_mb
    return {name: Flooded(*seen[0].worst_ms(began_s, ended_s), growth_mb) for name, (began_s, ended_s, growth_mb) in spans.items()}


def flood_figures(found: Mapping[str, Flooded]) -> list[Figure]:
    described: list[Figure] = []
    for name, flooded in found.items():
        stream, probe, growth = (FLOOD_STREAM_GOAL_MS, GOAL_MS, FLOOD_GROWTH_GOAL_MB) if name in SHAPES else (None, None, None)
        note = f"rounds: {flooded.num_rounds}"
        described += [
            Figure(f"{name}: stream", flooded.stream_ms, "ms", stream, note=note),
            Figure(f"{name}: probe", flooded.probe_ms, "ms", probe, note=note),
            Figure(f"{name}: growth of the front", flooded.growth_mb, "MB", growth, note=note),
        ]
    return described


def _memory_mb(process_id: int) -> float:
    return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def fetch_document(address: Address) -> Schema:
    connection = http.client.HTTPConnection(*address, timeout=TIMEOUT_S)
    connection.request("GET", "/openapi.json")
    document = json.loads(connection.getresponse().read())
    connection.close()
    return document


def _resolve(schema: Schema, document: Schema) -> Schema:
    while "$ref" in schema or (len(schema.get("anyOf", ())) == 2 and {"type": "null"} in schema["anyOf"]):
        if "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        else:
            schema = next(option for option in schema["anyOf"] if option != {"type": "null"})
    return schema


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab hostile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=demo.NAME, help=f"{demo.NAME}, a path, or a synthetic model as in bench serve")
    parser.add_argument("--quantize", default="bf16")
    parser.add_argument("--kind", choices=("all", "fields", "connections"), default="all")
    parser.add_argument("--only", default="", help="only fields whose `METHOD PATH FIELD`, and shapes whose name, contains this text")
    parser.add_argument("--seconds", type=float, default=FLOOD_S, help="time for which each shape of connections is sent")
    parser.add_argument("--max-gap-ms", type=int, default=MAX_GAP_MS, help="value of `max_gap_ms` with which the model is loaded")
    parser.add_argument(
        "--rounds", type=int, default=MOST_ROUNDS, help="maximum number of rounds in which fields and shapes beyond the goal are sent"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    found: list[Figure] = []
    with model_folder(options.model) as folder, tempfile.TemporaryDirectory(prefix="relaxserve-bench-") as cache:
        if options.kind != "connections":
            with server(folder, options.quantize, Path(cache), options.max_gap_ms) as (address, _):
                found += figures(measure(address, fetch_document(address), options.only, options.rounds))
        if options.kind != "fields":
            with server(folder, options.quantize, Path(cache), options.max_gap_ms, KEY) as (address, front_id):
                found += flood_figures(measure_floods(address, front_id, options.seconds, options.only, options.rounds))
    report(found, as_json=options.json)


if __name__ == "__main__":
    main()
