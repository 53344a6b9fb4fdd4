"""`python -m tests.lab start`: the time from the command to the first answer, with an empty cache and with a full cache; then the speed of
one stream.

The time is what a user waits: from the start of the process `relaxserve serve` to the first token of the answer to a question that is sent
immediately.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from deploy import demo
from deploy.bench.checkpoint import model_folder
from deploy.bench.measure import Figure, report
from deploy.streams import post_stream
from server.load_settings import MAX_GAP_MS

NAME = "started"
RELAXSERVE = (sys.executable, "-P", "-m", "relaxserve")  # the command, of this checkout
LOGGED_ADDRESS = re.compile(r'"url": "(http://[^"]+)"')
ADDRESS = re.compile(r"relaxserve at http://([\w.]+):(\d+):")
PROMPT = "<|im_start|>user\nTell me a story about a fox.<|im_end|>\n<|im_start|>assistant\n"
GOALS = {"empty cache": 5.0, "full cache": 1.5}  # goals in seconds, with the demo model
RATE = 300.0  # goal in tokens per second, with the demo model
NUM_STREAMED = 256


@contextmanager
def server(folder: Path, quantize: str, cache: Path, max_gap_ms: int = MAX_GAP_MS, key: str = "") -> Generator[tuple[tuple[str, int], int]]:
    """Start `relaxserve serve` with `key` as its only API key, or without keys if it is empty. Once the server has printed its address,
    yield the address and the id of the process that answers HTTP requests (the front)."""
    config = cache / "models.yaml"
    config.write_text(
        f"models:\n- {{name: {NAME}, source: {folder.resolve()}, quantize: {quantize}, max_gap_ms: {max_gap_ms}, embeddings: true}}\n"
    )
    command = (*RELAXSERVE, "serve", "--port", "0", "--config", str(config))
    environment = {**os.environ, "RELAXSERVE_CACHE": str(cache), "RELAXSERVE_API_KEYS": key}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        try:
            while (found := ADDRESS.search(said)) is None:
                line = process.stderr.readline()
                if not line:
                    raise RuntimeError(f"the server ended before it printed its address: {said}")
                said += line
            yield (found[1], int(found[2])), process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()


@contextmanager
def serving(model: str, log: Path) -> Generator[str]:
    """Serve the model with default settings. Yield the server's URL; the access lines go to `log` as JSON."""
    command = (*RELAXSERVE, "serve", model, "--port", "0", "--log-format", "json")
    with log.open("w") as lines, subprocess.Popen(command, stderr=lines) as process:
        try:
            while (found := LOGGED_ADDRESS.search(log.read_text())) is None:
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended before it printed its address: {log.read_text()}")
                time.sleep(0.2)
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)


async def first_token(address: tuple[str, int]) -> None:
    async for _event in post_stream(*address, {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 8}):
        return


async def rate(address: tuple[str, int]) -> float:
    """Return the tokens per second of one stream, not counting its first token."""
    times: list[float] = []
    async for _event in post_stream(
        *address, {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": NUM_STREAMED, "ignore_eos": True}
    ):
        times.append(time.perf_counter())
    return (NUM_STREAMED - 1) / (times[-1] - times[0])


def measure(folder: Path, quantize: str) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="relaxserve-bench-") as cache:
        figures = [
            Figure(f"time to first token, {name}", start_s(folder, quantize, Path(cache)), "s", goal_s) for name, goal_s in GOALS.items()
        ]
        with server(folder, quantize, Path(cache)) as (address, _):
            streamed = asyncio.run(rate(address))
    return [*figures, Figure("speed of one stream", streamed, "tokens/s", RATE, at_least=True)]


def start_s(folder: Path, quantize: str, cache: Path) -> float:
    began_s = time.perf_counter()
    with server(folder, quantize, cache) as (address, _):
        asyncio.run(first_token(address))
        return time.perf_counter() - began_s


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab start", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=demo.NAME, help=f"{demo.NAME}, a path, or a synthetic model as in bench serve; goals are the demo's"
    )
    parser.add_argument("--quantize", default="bf16")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    with model_folder(options.model) as folder:
        report(measure(folder, options.quantize), as_json=options.json)


if __name__ == "__main__":
    main()
