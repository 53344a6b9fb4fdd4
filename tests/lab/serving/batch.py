"""`python -m tests.lab batch`: a batch beside live streams, and a batch whose server is killed.

A separate server serves the model. Live clients stream one answer after another, with pauses: in turns alone and beside a batch. Figures
compare the medians of their latencies. The throughput of the batch beside live clients is compared with what they leave: the rate of the
batch alone, times the share of time in which no live request runs while the live clients are alone.

Then the server is killed (SIGKILL) at random instants and started again with the same folder, until the whole batch is answered. Each line
must have one answer, and the answers of some lines must equal those of the same requests that are sent live.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from deploy.bench.measure import Figure, report
from deploy.streams import post_stream
from tests.lab.serving.start import LOGGED_ADDRESS, RELAXSERVE

NUM_LIVE_NEW = 48  # tokens of a live answer
NUM_COMPARED = 40  # lines whose answers are compared with live answers
PAUSE_S = (0.2, 1.0)  # shortest and longest pause of a live client between answers
LOOK_S = 0.25  # longest time between two requests for the progress of a batch
TURNS = 4  # alone and beside a batch, in turns, because the speed of machines drifts
MOST_LINES = 20_000  # more than a batch answers while it is compared with live clients


@dataclass(frozen=True, slots=True)
class Place:
    """The model that is served, and the folder in which the server keeps batches and its log."""

    model: str
    folder: Path

    @contextmanager
    def served(self) -> Generator[tuple[httpx.Client, str, subprocess.Popen[bytes]]]:
        """Serve the model in a process group of its own. Yield a client, the model's name and the server's process."""
        log = self.folder / "server.log"
        command = (*RELAXSERVE, "serve", self.model, "--port", "0", "--log-format", "json", "--batch-dir", str(self.folder / "batches"))
        with log.open("w") as lines, subprocess.Popen(command, stderr=lines, start_new_session=True) as process:
            try:
                while (found := LOGGED_ADDRESS.search(log.read_text())) is None:
                    if process.poll() is not None:
                        raise RuntimeError(f"the server ended before it printed its address: {log.read_text()}")
                    time.sleep(0.1)
                with httpx.Client(base_url=found[1], timeout=600.0) as client:
                    while client.get("/health/ready").status_code != 200:
                        time.sleep(0.1)
                    yield client, client.get("/v1/models").json()["data"][0]["id"], process
            finally:
                process.send_signal(signal.SIGTERM)


@dataclass(slots=True)
class Live:
    """The latencies that live clients measured."""

    first_s: list[float] = field(default_factory=list[float])
    whole_s: list[float] = field(default_factory=list[float])
    spans_s: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])  # when each request ran

    def add(self, other: Live) -> None:
        self.first_s += other.first_s
        self.whole_s += other.whole_s
        self.spans_s += other.spans_s

    @property
    def busy_s(self) -> float:
        """The time during which at least one request ran."""
        total = reached_s = 0.0
        for began_s, ended_s in sorted(self.spans_s):
            total += max(0.0, ended_s - max(began_s, reached_s))
            reached_s = max(reached_s, ended_s)
        return total


def live(url: str, model: str, num_clients: int, lasts_s: float) -> Live:
    """Let clients stream answers, with pauses, for a time."""
    found, parts = Live(), urlsplit(url)
    assert parts.hostname is not None and parts.port is not None, url
    host, port, end_s = parts.hostname, parts.port, time.monotonic() + lasts_s

    async def one(client: int) -> None:
        chance = random.Random(client)
        while time.monotonic() < end_s:
            await asyncio.sleep(chance.uniform(*PAUSE_S))
            body = {"model": model, "prompt": f"Question {chance.random()} of client {client}: what is the sea?", "ignore_eos": True}
            began_s, times_s = time.perf_counter(), list[float]()
            async for _ in post_stream(host, port, {**body, "max_tokens": NUM_LIVE_NEW}):
                times_s.append(time.perf_counter())
            found.first_s.append(times_s[0] - began_s)
            found.whole_s.append(times_s[-1] - began_s)
            found.spans_s.append((began_s, times_s[-1]))

    async def everyone() -> None:
        await asyncio.gather(*(one(client) for client in range(num_clients)))

    asyncio.run(everyone())
    return found


def line(model: str, number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Say the number {number}."}]
    body = {"model": model, "messages": messages, "max_tokens": 8, "seed": number}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}


def begin(client: httpx.Client, model: str, numbers: Sequence[int]) -> str:
    text = "".join(json.dumps(line(model, number)) + "\n" for number in numbers)
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", text)}).raise_for_status().json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return client.post("/v1/batches", json=asked).raise_for_status().json()["id"]


def batch(client: httpx.Client, batch_id: str) -> dict[str, Any]:
    return client.get(f"/v1/batches/{batch_id}").raise_for_status().json()


def num_answered(client: httpx.Client, batch_id: str) -> int:
    counts = batch(client, batch_id)["request_counts"]
    return counts["completed"] + counts["failed"]


def rate(client: httpx.Client, batch_id: str, lasts_s: float) -> float:
    """Return how many lines of a batch are answered per second during the next `lasts_s` seconds."""
    before, began_s = num_answered(client, batch_id), time.perf_counter()
    time.sleep(lasts_s)
    return (num_answered(client, batch_id) - before) / (time.perf_counter() - began_s)


def beside(place: Place, num_clients: int, lasts_s: float) -> list[Figure]:
    """Compare live clients and a batch with each other, in turns."""
    alone, both, undisturbed, shared = Live(), Live(), list[float](), list[float]()
    with place.served() as (client, model, _), ThreadPoolExecutor(1) as pool:
        url, turn_s = str(client.base_url), lasts_s / TURNS
        live(url, model, num_clients, 5.0)
        for _ in range(TURNS):
            alone.add(live(url, model, num_clients, turn_s))
            batch_id = begin(client, model, range(MOST_LINES))
            time.sleep(2.0)
            rated = pool.submit(rate, client, batch_id, turn_s)
            both.add(live(url, model, num_clients, turn_s))
            shared.append(rated.result())
            undisturbed.append(rate(client, batch_id, turn_s / 2))
            client.post(f"/v1/batches/{batch_id}/cancel").raise_for_status()
            time.sleep(2.0)
    left, alone_rate, shared_rate = 1 - alone.busy_s / lasts_s, statistics.mean(undisturbed), statistics.mean(shared)
    note = f"{alone_rate:.1f} lines/s alone, {shared_rate:.1f} beside; alone, live requests run for {1 - left:.2f} of the time"
    return [
        _slower("live answers", alone.whole_s, both.whole_s),
        _slower("first tokens of live answers", alone.first_s, both.first_s),
        Figure("batch: share of what is left", shared_rate / (alone_rate * left), "", 0.9, at_least=True, note=note),
    ]


def _slower(name: str, alone_s: Sequence[float], beside_s: Sequence[float]) -> Figure:
    a, b = statistics.median(alone_s), statistics.median(beside_s)
    note = f"medians {1000 * a:.0f} ms of {len(alone_s)} alone, {1000 * b:.0f} ms of {len(beside_s)} beside a batch"
    return Figure(f"{name}: slower beside a batch", b / a - 1, "", 0.05, note=note)


def killed(place: Place, num_lines: int, num_kills: int, num_clients: int, seed: int) -> list[Figure]:
    """Kill the server `num_kills` times while live clients and a batch run. Let the batch end, and count its missing, repeated and
    different answers."""
    chance, batch_id, num_done = random.Random(seed), "", list[int]()
    for mark in sorted(chance.uniform(0, 0.95) * num_lines for _ in range(num_kills)):
        with place.served() as (client, model, process), ThreadPoolExecutor(1) as pool:
            batch_id = batch_id or begin(client, model, range(num_lines))
            cut = pool.submit(_until_cut, str(client.base_url), model, num_clients)
            while num_answered(client, batch_id) < mark:
                time.sleep(chance.uniform(0, LOOK_S))
            num_done.append(num_answered(client, batch_id))
            os.killpg(process.pid, signal.SIGKILL)
            cut.result()
    with place.served() as (client, model, _):
        batch_id = batch_id or begin(client, model, range(num_lines))
        while (found := batch(client, batch_id))["status"] not in ("completed", "failed", "expired", "cancelled"):
            time.sleep(1.0)
        answers = client.get(f"/v1/files/{found['output_file_id']}/content").raise_for_status().text.splitlines()
        by_id = {answer["custom_id"]: answer for answer in map(json.loads, answers)}
        compared, num_different = chance.sample(range(num_lines), min(NUM_COMPARED, num_lines)), 0
        for number in compared:
            now = client.post("/v1/chat/completions", json=line(model, number)["body"]).raise_for_status().json()
            num_different += by_id[str(number)]["response"]["body"]["choices"] != now["choices"]
    return [
        Figure("lines without an answer", num_lines - len(by_id), "", 0, note=f"{num_lines} lines, {how_killed(num_done)}"),
        Figure("lines with two answers", len(answers) - len(by_id), "", 0),
        Figure("answers that differ from live ones", num_different, "", 0, note=f"of {len(compared)}"),
    ]


def how_killed(num_done: Sequence[int]) -> str:
    """Say when the server was killed. `num_done`: for each kill, the lines that were answered before it."""
    return f"killed at {', '.join(map(str, num_done))}" if num_done else "not killed"


def _until_cut(url: str, model: str, num_clients: int) -> None:
    """Stream until the server dies."""
    while True:
        try:
            live(url, model, num_clients, 600.0)
        except (OSError, RuntimeError):
            return


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab batch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a path, or a name of `relaxserve ls --available`")
    parser.add_argument("--seconds", type=float, default=60.0, help="time of each comparison; 0: only kill")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="relaxserve-batch-") as folder:
        place = Place(options.model, Path(folder))
        if options.seconds:
            figures += beside(place, options.clients, options.seconds)
        figures += killed(place, options.lines, options.kills, options.clients, options.seed)
    report(figures, as_json=options.json)


if __name__ == "__main__":
    main()
