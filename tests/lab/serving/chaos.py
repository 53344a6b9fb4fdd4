"""`python -m tests.lab chaos`: kill and stop the worker at random instants while clients stream over HTTP, and check that no client
notices.

Every stream first runs undisturbed. Then all streams run again, repeatedly, until all kills (SIGKILL) and stops (SIGSTOP) are done. Each
text must be the same, no client may receive an error, and at the end no page of the KV cache may be in use. Each kill or stop happens at
most `--within` seconds after the last worker was ready, so that some of them interrupt prefill and some interrupt decoding. The front must
detect a stopped worker by its silence.

With `--storm SECONDS`, the worker is killed at random instants within this time, even while it loads (a storm). Again no request may be
lost, and the model must be ready soon after the last kill.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy import demo
from deploy.bench.checkpoint import model_folder
from deploy.bench.measure import Figure, report
from deploy.serve import WORKER, load_of, load_tokenizer
from deploy.streams import post_stream
from server.app import create_app
from server.http.server import Server
from server.interfaces import ProgressCallback
from server.models.registry import Registry
from server.models.state import ModelSpec
from server.settings import ServerSettings
from server.workers.care import Care
from server.workers.supervisor import Supervisor

NAME = "chaos"
PATIENCE_S = 120.0  # longest wait for a worker's restart, in seconds
READY_AFTER_S = 10.0  # longest time until a worker is ready after the last kill of a storm


@dataclass(frozen=True, slots=True)
class Blows:
    num_kills: int
    num_stops: int
    within_s: float
    stall_s: float  # seconds of silence after which a worker is replaced

    def signals(self, rng: random.Random) -> list[signal.Signals]:
        blows = [signal.SIGKILL] * self.num_kills + [signal.SIGSTOP] * self.num_stops
        rng.shuffle(blows)
        return blows


@dataclass(frozen=True, slots=True)
class Storm:
    """A series of kills. Every third kill hits the worker that was just started to replace the previously killed worker."""

    num_kills: int
    lasts_s: float

    def instants_s(self, rng: random.Random) -> list[float]:
        instants = sorted(rng.uniform(0, self.lasts_s) for _ in range(self.num_kills))
        return [instants[i - 1] if i % 3 == 2 else instant for i, instant in enumerate(instants)]


@dataclass(slots=True)
class Damage:
    """The results of a storm."""

    num_loading: int = 0  # kills while a worker was loading
    lasted_s: float = 0.0
    ready_after_s: float = 0.0  # seconds from the last kill until the model was ready


@dataclass(slots=True)
class Answer:
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    longest_pause_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    expected: list[Answer]
    rounds: list[list[Answer]] = field(default_factory=list[list[Answer]])
    num_restarts: int = 0
    num_resubmitted: int = 0
    num_pages_held: int = 0
    damage: Damage | None = None  # None if there was no storm

    @property
    def errors(self) -> list[str]:
        return [a.error for answers in (self.expected, *self.rounds) for a in answers if a.error is not None]

    @property
    def num_different(self) -> int:
        pairs = [pair for answers in self.rounds for pair in zip(answers, self.expected, strict=True)]
        return sum((a.text, a.finish_reason) != (e.text, e.finish_reason) for a, e in pairs)

    @property
    def pauses_s(self) -> list[float]:
        return [a.longest_pause_s for answers in self.rounds for a in answers]


def bodies(num_streams: int, num_new: int, vocab_size: int) -> list[dict[str, Any]]:
    """Make bodies of requests: greedy, sampled, with top_p and top_k, with min_p and penalties, with logprobs, and constrained by a
    regular expression."""
    rng = random.Random(7)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
        {"temperature": 1.2, "min_p": 0.05, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"temperature": 0.9, "logprobs": 2},
        {"temperature": 1.0, "guided_regex": "([a-z ]{3,40}[.!] ){40,200}"},
    ]
    return [
        {
            "prompt": [rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, 120))],
            "max_tokens": rng.randrange(num_new // 2, num_new + 1),
            "seed": i,
            "ignore_eos": True,
            **kinds[i % len(kinds)],
        }
        for i in range(num_streams)
    ]


async def run(folder: Path, quantize: str, *, num_streams: int, num_new: int, blows: Blows | Storm, seed: int) -> Outcome:
    rng = random.Random(seed)
    care = Care(stall_s=blows.stall_s) if isinstance(blows, Blows) else Care()
    async with _serving(ModelSpec(NAME, str(folder), quantize), care) as (port, supervisor):
        requests = bodies(num_streams, num_new, load_tokenizer(str(folder)).vocab_size)
        outcome = Outcome(await _round(port, requests))
        hits = _strike(supervisor, blows, rng) if isinstance(blows, Blows) else _storm(supervisor, blows, rng)
        striking = asyncio.create_task(hits)
        while not striking.done():
            outcome.rounds.append(await _round(port, requests))
        outcome.damage = await striking
        outcome.num_restarts, outcome.num_resubmitted = supervisor.restarts, supervisor.resubmitted
        outcome.num_pages_held = await _pages_held(supervisor)
        return outcome


@asynccontextmanager
async def _serving(spec: ModelSpec, care: Care) -> AsyncGenerator[tuple[int, Supervisor]]:
    """Start a server in this process. Yield its port and the supervisor of its only worker."""
    supervisors: list[Supervisor] = []

    def make_worker(spec: ModelSpec, progress: ProgressCallback) -> Supervisor:
        supervisors.append(Supervisor(WORKER, load_of(spec), progress=progress, care=care))
        return supervisors[-1]

    settings = ServerSettings(port=0, drain_s=1.0)
    registry = Registry(settings, make_worker, load_tokenizer, initial=[spec])
    server = Server(create_app(settings, registry), settings, registry)
    serving = asyncio.create_task(server.serve())
    try:
        while not (server.started and registry.ready):
            await asyncio.sleep(0.01)
            for operation in registry.operations.all():
                if operation.error is not None:
                    raise operation.error
        yield server.servers[0].sockets[0].getsockname()[1], supervisors[0]
    finally:
        server.should_exit = True
        await serving


async def _round(port: int, requests: Sequence[dict[str, Any]]) -> list[Answer]:
    return await asyncio.gather(*(_ask(port, body) for body in requests))


async def _ask(port: int, body: dict[str, Any]) -> Answer:
    answer = Answer()
    last_s = time.monotonic()
    try:
        async for event in post_stream("127.0.0.1", port, {"model": NAME, **body}):
            now_s = time.monotonic()
            answer.longest_pause_s = max(answer.longest_pause_s, now_s - last_s)
            last_s = now_s
            (choice,) = event["choices"]
            answer.text += choice["text"]
            answer.finish_reason = choice["finish_reason"] or answer.finish_reason
    except (OSError, RuntimeError) as error:
        answer.error = str(error)
    if answer.error is None and answer.finish_reason is None:
        answer.error = "the stream ended without a reason"
    return answer


async def _strike(supervisor: Supervisor, blows: Blows, rng: random.Random) -> Damage | None:
    for number, blow in enumerate(blows.signals(rng), 1):
        await asyncio.sleep(rng.uniform(0, blows.within_s))
        assert supervisor.pid is not None
        os.kill(supervisor.pid, blow)
        async with asyncio.timeout(PATIENCE_S):
            while supervisor.restarts < number:
                await asyncio.sleep(0.005)


async def _storm(supervisor: Supervisor, storm: Storm, rng: random.Random) -> Damage:
    """Run a storm. If there is no worker at the instant of a kill, the kill waits for the next worker."""
    damage, began_s, killed = Damage(), time.monotonic(), None
    async with asyncio.timeout(storm.lasts_s + PATIENCE_S):
        for instant_s in storm.instants_s(rng):
            await asyncio.sleep(max(0.0, began_s + instant_s - time.monotonic()))
            while (pid := supervisor.pid) is None or pid == killed:
                await asyncio.sleep(0.002)
            damage.num_loading += supervisor.outage is not None
            os.kill(pid, signal.SIGKILL)
            killed = pid
        last_s = time.monotonic()
        while supervisor.outage is not None or supervisor.pid == killed:
            await asyncio.sleep(0.002)
    damage.lasted_s, damage.ready_after_s = last_s - began_s, time.monotonic() - last_s
    return damage


async def _pages_held(supervisor: Supervisor) -> int:
    """Return the number of pages in use once the engine is idle."""
    async with asyncio.timeout(PATIENCE_S):
        while supervisor.stats is None or supervisor.stats.num_running or supervisor.stats.num_waiting:
            await asyncio.sleep(0.05)
    return supervisor.stats.num_pages_used


def figures(outcome: Outcome, blows: Blows | Storm) -> list[Figure]:
    num_streams = sum(map(len, outcome.rounds))
    num_chars = sum(len(answer.text) for answer in outcome.expected)
    if isinstance(blows, Blows):
        num_blows, note = blows.num_kills + blows.num_stops, f"{blows.num_kills} killed, {blows.num_stops} stopped"
        found = [
            Figure("kills and stops", num_blows, "", note=note),
            Figure("restarts", outcome.num_restarts, "", num_blows, at_least=True),
        ]
    else:
        assert outcome.damage is not None
        note = f"within {outcome.damage.lasted_s:.1f} s, {outcome.damage.num_loading} while a worker was loading"
        found = [
            Figure("kills", blows.num_kills, "", note=note),
            Figure("time from the last kill until the model is ready", outcome.damage.ready_after_s, "s", READY_AFTER_S),
            Figure("restarts", outcome.num_restarts, ""),
        ]
    return [
        *found,
        Figure("streams", num_streams, "", note=f"{len(outcome.rounds)} rounds of {num_chars} characters"),
        Figure("resubmitted requests", outcome.num_resubmitted, ""),
        Figure("clients that saw an error", len(outcome.errors), "", 0, note="; ".join(sorted(set(outcome.errors)))[:200]),
        Figure("streams with a different text", outcome.num_different, "", 0),
        Figure("pages in use at the end", outcome.num_pages_held, "", 0),
        Figure("longest pause of a stream, median", statistics.median(outcome.pauses_s), "s"),
        Figure("longest pause of a stream, maximum", max(outcome.pauses_s), "s"),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=demo.NAME, help=f"{demo.NAME}, a path, or a synthetic model as in bench serve")
    parser.add_argument("--quantize", default="bf16")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=800, help="maximum number of tokens per stream")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=2)
    parser.add_argument("--storm", type=float, default=0.0, help="number of seconds in which all kills happen, even while a worker loads")
    parser.add_argument(
        "--within", type=float, default=1.0, help="maximum number of seconds from a worker's start to the next kill or stop"
    )
    parser.add_argument("--stall", type=float, default=3.0, help="seconds of silence after which a worker is replaced")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    blows: Blows | Storm = Blows(options.kills, options.stops, options.within, options.stall)
    if options.storm > 0:
        blows = Storm(options.kills, options.storm)
    logging.getLogger("server").setLevel(logging.ERROR)  # a log message for each kill would hide the results
    with model_folder(options.model) as folder:
        outcome = asyncio.run(
            run(folder, options.quantize, num_streams=options.streams, num_new=options.tokens, blows=blows, seed=options.seed)
        )
    found = figures(outcome, blows)
    report(found, as_json=options.json)
    if any(figure.reached is False for figure in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
