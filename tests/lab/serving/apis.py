"""`python -m tests.lab apis`: the streaming speed of each chat API, relative to `/v1/chat/completions`.

A separate server process serves the model. `--streams` concurrent clients send the same questions with the same seeds to one API after
another, so that all APIs send the same tokens and differ only in the format of events. The first figure is the tokens per second of
`/v1/chat/completions`; each other figure is an API's tokens per second relative to it. Both are medians over the rounds, each of which
measures every API once. The note gives the CPU time per token of the front, the process that answers HTTP requests; other load on the
machine does not increase it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deploy import demo
from deploy.bench.checkpoint import model_folder
from deploy.bench.measure import Figure, report
from deploy.served import served
from server.models.state import ModelSpec
from tests.lab.timing import by_turns

GOAL = 0.97
QUESTION = [{"role": "user", "content": "Tell me a story about a fox."}]
MAX_TOKENS = 200
CHAT = "/v1/chat/completions"
Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Api:
    body: Body
    count: re.Pattern[bytes]  # pattern for the number of tokens in an answer; the last match counts
    goal: float | None = None

    def request(self, path: str, model: str, seed: int) -> bytes:
        options: dict[str, Any] = {"model": model, "stream": True}
        if "options" in self.body:
            options["options"] = {**self.body["options"], "seed": seed, "temperature": 1.0}
        else:
            options |= {"seed": seed, "temperature": 1.0}
        content = json.dumps({**self.body, **options}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json"
        return f"{head}\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


OUTPUT_TOKENS = re.compile(rb'"output_tokens":(\d+)')
COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
APIS = {
    CHAT: Api({"messages": QUESTION, "max_tokens": MAX_TOKENS, "stream_options": {"include_usage": True}}, COMPLETION_TOKENS),
    "/v1/responses": Api({"input": QUESTION, "max_output_tokens": MAX_TOKENS}, OUTPUT_TOKENS, GOAL),
    "/v1/messages": Api({"messages": QUESTION, "max_tokens": MAX_TOKENS}, OUTPUT_TOKENS, GOAL),
    "/api/chat": Api({"messages": QUESTION, "options": {"num_predict": MAX_TOKENS}}, re.compile(rb'"eval_count":(\d+)')),
}


class Clients:
    """Concurrent clients, one per stream. They read bytes without parsing events, so their CPU time is the same for every API."""

    def __init__(self, url: str, model: str, num_streams: int, num_requests: int) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None, url
        self._address = parts.hostname, parts.port
        self._model = model
        self._seeds = [range(stream * num_requests, (stream + 1) * num_requests) for stream in range(num_streams)]

    def ask(self, path: str) -> int:
        """Run all clients and return the total number of tokens in their answers."""
        return asyncio.run(self._ask(path))

    async def _ask(self, path: str) -> int:
        return sum(await asyncio.gather(*(self._follow(path, seeds) for seeds in self._seeds)))

    async def _follow(self, path: str, seeds: range) -> int:
        """Send one request after another, one per seed. Return the total number of tokens."""
        num_tokens, api = 0, APIS[path]
        for seed in seeds:
            reader, writer = await asyncio.open_connection(*self._address)
            writer.write(api.request(path, self._model, seed))
            answer = await reader.read()
            writer.close()
            counts = api.count.findall(answer)
            if not counts or not answer.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"{path} answered {answer[:2000].decode(errors='replace')}")
            num_tokens += int(counts[-1])
        return num_tokens


def measure(clients: Clients, front_pid: int, *, rounds: int) -> list[Figure]:
    told = {path: clients.ask(path) for path in APIS}
    if len(set(told.values())) > 1:
        raise RuntimeError(f"the APIs report different numbers of tokens: {told}")
    cpu_s: dict[str, list[float]] = {path: [] for path in APIS}

    def ask(path: str) -> None:
        before_s = process_cpu_s(front_pid)
        clients.ask(path)
        cpu_s[path].append(process_cpu_s(front_pid) - before_s)

    times = by_turns({path: partial(ask, path) for path in APIS}, rounds=rounds)
    figures: list[Figure] = []
    for path, api in APIS.items():
        note = f"front: {1e6 * statistics.median(cpu_s[path]) / told[path]:.1f} µs of CPU time per token"
        if path == CHAT:
            figures.append(Figure(path, told[path] / statistics.median(times[path]), "tokens/s", note=note))
        else:
            shares = [chat_s / own_s for chat_s, own_s in zip(times[CHAT], times[path], strict=True)]
            figures.append(Figure(f"{path} relative to chat", statistics.median(shares), "", api.goal, at_least=True, note=note))
    return figures


def process_cpu_s(pid: int) -> float:
    """Return the processor time of all threads of a process, measured to the nanosecond."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab apis", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=demo.NAME, help=f"{demo.NAME}, or a path to a model that chats")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--requests", type=int, default=4, help="number of requests of each stream, one after another")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    with model_folder(options.model) as folder, served(ModelSpec("bench", str(folder))) as url:
        (front,) = multiprocessing.active_children()
        assert front.pid is not None
        figures = measure(Clients(url, "bench", options.streams, options.requests), front.pid, rounds=options.rounds)
    report(figures, as_json=options.json)


if __name__ == "__main__":
    main()
