"""`python -m tests.lab real`: real models, served by relaxserve and by llama.cpp (package xllamacpp).

Both servers have room for the keys and values of the same number of tokens, read the same file and run the same requests in turns, with
the same number of threads. llama.cpp also gets one slot per client, and one pool of keys and values for all slots. All other settings are
the defaults. The figures are medians of the quotients of the rounds. The speed that `relaxserve inspect --quality` states is compared with
what a client of our server gets. The quality of both is measured against the exact weights of the file on the text of the quality label.
Each model comes from the catalogue: `relaxserve pull NAME` downloads it.
`--peer-python`, or the variable PEER_PYTHON, is an interpreter that has xllamacpp.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from compiler.frontend.cache_groups import groups_of
from compiler.frontend.config import ModelConfig
from compiler.ir.dtypes import DType
from deploy.bench.limits import Gauge
from deploy.bench.measure import Figure, report
from deploy.bench.serving.serve import Texts, throughput
from deploy.model_loading.files import ModelFiles, open_files
from deploy.model_loading.origins import here
from deploy.model_loading.tokenizer import TokenizerSource
from deploy.quality.label import TEXT
from deploy.quality.measure import WINDOW, Exact, divergences, exact_of, label_of
from deploy.quality.observe import windows_of
from deploy.quality.speed import ROUNDS, quality_of
from deploy.quality.text import tokens_of
from deploy.streams import OverHttp, Prompt
from runtime.cache_groups import PAGE_SIZE
from runtime.device.cpu.cores import available_cores
from server.messages import Load
from server.settings import SettingsError
from tests.conftest import descendants_of
from tests.lab.serving.peer_servers import free_port
from tests.lab.serving.start import RELAXSERVE

MODELS = ("smollm2", "gemma-3-270m", "qwen2.5-coder-1.5b")
PROMPT, ANSWER = 128, 64  # tokens of a client
DECODES = 5  # turns of a single client for each turn of the other measurements
LONG = 1024  # tokens of the prompt whose prefill is measured
NUM_TOKENS = 32_000  # tokens of prompts are drawn from the first ones, which every vocabulary here has
CLIENTS = {8: 2.5, 32: 2.5}  # number of clients -> goal of the quotient of throughputs
KEPT = max(max(CLIENTS) * (PROMPT + ANSWER), LONG) + WINDOW  # tokens for whose keys and values each server has memory
NUM_PROBABLE = 512  # most probable tokens whose probabilities the peer returns; it takes 0.1 s to write 1,024
STRIDE = 4  # the peer predicts every fourth token of the text
START_S = 600.0
WARM_UP = 1_000  # the prompts that warm a server have the numbers from 1000 * WARM_UP on, beyond those of `speeds`
PEER = "xllamacpp"
PEER_SERVER = """
import sys, xllamacpp
path, port, threads, clients, context = sys.argv[1], *map(int, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_parallel, params.n_ctx, params.kv_unified = path, port, clients, context, True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.n_gpu_layers, params.verbosity = 0, 0
server = xllamacpp.Server(params)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A server that answers."""

    url: str
    pid: int
    start_s: float  # from the start of the process to the first answer

    @property
    def resident_bytes(self) -> int:
        """The memory of the server's processes. Pages that several processes share count once."""
        return sum(_pss(pid) for pid in (self.pid, *descendants_of(self.pid)))


def measure(model: str, peer_python: str, rounds: int) -> list[Figure]:
    path = here(model)
    if path is None:
        raise SettingsError(f"{model} is not on this machine; `relaxserve pull {model}` downloads it")
    files = open_files(path)
    figures = starts(model, path, peer_python)
    kept = ["--kv-cache-bytes", str(kept_bytes(files.config))]
    with ours(model, options=kept) as own, llama(path, peer_python) as other:
        figures += speeds(model, files, own, other, rounds)
        figures.append(prediction(model, path, own))
        quotient = own.resident_bytes / other.resident_bytes
        sizes = f"{own.resident_bytes / 1e6:.0f} and {other.resident_bytes / 1e6:.0f} MB; the file has {path.stat().st_size / 1e6:.0f} MB"
        figures.append(Figure(f"{model}: memory / llama.cpp's", quotient, "", 1.0, note=sizes))
        figures += qualities(model, path, files, other)
    return figures


# --- starts ----------------------------------------------------------------------------------------------------------------


def starts(model: str, path: Path, peer_python: str) -> list[Figure]:
    """Measure starts with an empty cache and with a full one, beside those of the peer."""
    with tempfile.TemporaryDirectory(prefix="relaxserve-real-") as folder:
        (downloads := Path(folder) / "models").mkdir()
        for file in path.parent.glob("[!.]*"):
            (downloads / file.name).symlink_to(file.resolve())
        environment = {"RELAXSERVE_CACHE": folder}
        found: dict[str, list[float]] = {"first": [], "second": [], "peer": []}
        for name in ("first", "second", "second", "second"):
            with ours(model, environment) as own:
                found[name].append(own.start_s)
            with llama(path, peer_python) as other:
                found["peer"].append(other.start_s)
    beside = f"llama.cpp {min(found['peer']):.1f} s"
    return [
        Figure(f"{model}: first start", found["first"][0], "s", 5.0, note=beside),
        Figure(f"{model}: second start", min(found["second"]), "s", 1.0, note=f"least of {len(found['second'])}, {beside}"),
    ]


@contextmanager
def ours(model: str, environment: dict[str, str] | None = None, options: Sequence[str] = ()) -> Generator[Place]:
    port = free_port()
    command = [*RELAXSERVE, "serve", model, "--port", str(port), "--log-level", "error", *options]
    with _serving(command, port, model, {**os.environ, **(environment or {})}) as place:
        yield place


@contextmanager
def llama(path: Path, peer_python: str) -> Generator[Place]:
    sizes = (len(available_cores()), max(CLIENTS), KEPT)
    port = free_port()
    with _serving([peer_python, "-c", PEER_SERVER, str(path), str(port), *map(str, sizes)], port, PEER, {**os.environ}) as place:
        yield place


@contextmanager
def _serving(command: Sequence[str], port: int, name: str, environment: dict[str, str]) -> Generator[Place]:
    """Start a server, and ask it for one token until it answers."""
    began_s = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)
        try:
            while not _answers(port, name):
                if process.poll() is not None or time.monotonic() > began_s + START_S:
                    log.seek(0)
                    raise SettingsError(f"{' '.join(command[:4])} does not serve: {log.read()[-2000:].decode(errors='replace')}")
                time.sleep(0.01)
            yield Place(f"http://127.0.0.1:{port}", process.pid, time.monotonic() - began_s)
        finally:
            process.terminate()
            process.wait()


def _answers(port: int, name: str) -> bool:
    body = {"model": name, "prompt": "The", "max_tokens": 1, "temperature": 0}
    try:
        return asked(f"http://127.0.0.1:{port}", "/v1/completions", body) is not None
    except OSError:
        return False


def asked(url: str, path: str, body: dict[str, Any]) -> Any:
    """Return the JSON of the answer to a request, or None if its status is not 200, as while a server loads its model."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=START_S)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        return json.loads(content) if answer.status == 200 else None
    finally:
        connection.close()


# --- speeds ----------------------------------------------------------------------------------------------------------------


def speeds(model: str, files: ModelFiles, own: Place, other: Place, rounds: int) -> list[Figure]:
    """Run the same requests on both servers in turns."""
    drivers = [OverHttp(place.url, name, temperature=0.0) for place, name in ((own, model), (other, PEER))]
    texts = Texts(NUM_TOKENS, PROMPT)

    def decode(driver: OverHttp, number: int) -> float:
        (stream,) = driver.run([Prompt(texts.make(number, PROMPT), ANSWER)])
        return stream.decoding_rate

    def prefill(driver: OverHttp, number: int) -> float:
        (stream,) = driver.run([Prompt(texts.make(number, LONG), 2)])
        return LONG / stream.ttft_s

    def clients(count: int) -> Callable[[OverHttp, int], float]:
        return lambda driver, number: throughput(driver.run([Prompt(texts.make(number + i, PROMPT), ANSWER) for i in range(count)]))

    cells = [(f"prefill of {LONG}", 2.0, prefill), *((f"{count} clients", goal, clients(count)) for count, goal in CLIENTS.items())]
    for driver in drivers:
        driver.run(texts.several(WARM_UP, max(CLIENTS), 2))  # touches memory for the first time
    figures = decodes(model, files.path.stat().st_size, [partial(decode, driver) for driver in drivers], DECODES * rounds)
    for at, (cell, goal, run) in enumerate(cells, 1):
        rates = [[run(driver, 100_000 * at + 1_000 * number) for driver in drivers] for number in range(rounds)]
        quotient = median(mine / theirs for mine, theirs in rates)
        mine, theirs = (median(some) for some in zip(*rates, strict=True))
        figures.append(Figure(f"{model}: {cell} / llama.cpp's", quotient, "", goal, True, f"{mine:.0f} and {theirs:.0f} tokens/s"))
    return figures


def decodes(model: str, file_bytes: int, runs: Sequence[Callable[[int], float]], rounds: int) -> list[Figure]:
    """Run single clients in turns, with a measurement of the memory's bandwidth before each turn: a decoding step reads the whole file, and
    on a machine that shares its memory with others the bandwidth changes within seconds. While it is low, both servers read as fast as
    memory allows, and neither can be ahead."""
    found: list[tuple[float, float, float]] = []
    with ThreadPoolExecutor(1) as thread:  # a gauge pins the thread that uses it, and servers that start later would inherit its one core
        gauge = thread.submit(Gauge, "bf16").result()
        for number in range(rounds):
            gauge.forget()
            thread.submit(gauge.sample).result()
            mine, theirs = (run(1_000 * number) for run in runs)
            found.append((gauge.limits.bytes_per_s, mine, theirs))
    limits, *rates = zip(*found, strict=True)
    mine, theirs = map(median, rates)
    reads = [median(file_bytes * rate / limit for limit, rate in zip(limits, some, strict=True)) for some in rates]
    bandwidth = f"memory bandwidth {min(limits) / 1e9:.0f} to {max(limits) / 1e9:.0f} GB/s"
    memory = f"{bandwidth}; reading the file once per token uses {reads[0]:.2f} and {reads[1]:.2f} of it"
    note = f"{mine:.0f} and {theirs:.0f} tokens/s; {memory}"
    quotients = [mine / theirs for _, mine, theirs in found]
    fast = sorted(range(rounds), key=lambda at: limits[at])[rounds // 2 :]
    return [
        Figure(f"{model}: decode of 1 / llama.cpp's", median(quotients), "", 1.15, True, note),
        Figure(f"{model}: the same in the half of the turns with the fastest memory", median(quotients[at] for at in fast), ""),
    ]


def prediction(model: str, path: Path, own: Place) -> Figure:
    """Compare the tokens per second that `relaxserve inspect --quality` states with those that a client of a running server gets, both by
    the median of as many requests: a single one may be a third slower than the next."""
    stated = quality_of(Load(model, str(path))).speed
    driver, prompts = OverHttp(own.url, model, temperature=0.0), Texts(NUM_TOKENS, PROMPT).several(WARM_UP + 1, ROUNDS, stated.num_decoded)
    measured = median(driver.run([prompt])[0].decoding_rate for prompt in prompts)
    note = f"stated {stated.tokens_per_s:.0f}, measured {measured:.0f} tokens/s"
    return Figure(f"{model}: error of the stated decode of 1", abs(stated.tokens_per_s / measured - 1), "", 0.15, note=note)


# --- quality ---------------------------------------------------------------------------------------------------------------


def qualities(model: str, path: Path, files: ModelFiles, other: Place) -> list[Figure]:
    load = Load(model, str(path))
    label, exact = label_of(load), exact_of(load)
    theirs, equal = peer_quality(files, exact, other)
    return [
        Figure(f"{model}: KL", label.kl_divergence, "", 5e-4, note=f"llama.cpp {theirs:.2g}"),
        Figure(f"{model}: KL / llama.cpp's", label.kl_divergence / theirs, "", 0.25),
        Figure(f"{model}: equal most probable tokens", label.top1_agreement, "", 0.985, True, f"llama.cpp {equal:.3f}"),
    ]


def peer_quality(files: ModelFiles, exact: Exact, other: Place) -> tuple[float, float]:
    """Return the mean divergence of the peer's predictions, and how often its most probable token is that of the exact weights."""
    total, equal, count, before = 0.0, 0, 0, 0
    for window in windows_of(tokens_of(TokenizerSource(files.path, files.gguf), TEXT), min(WINDOW, files.config.max_context)):
        for stop in range(STRIDE, len(window) + 1, STRIDE):
            found, row = predicted(other, window[:stop]), before + stop - 1
            total += divergence(exact.rows(row, row + 1), found)
            equal += int(max(found, key=found.__getitem__) == exact.ids[row, 0])
            count += 1
        before += len(window)
    return total / count, equal / count


def divergence(expected: Exact, found: Mapping[int, float]) -> float:
    """Return the KL divergence of one prediction. `expected` and `found` have the probabilities of some tokens. All tokens that only one of
    them has count as one token together, so the result is at most the divergence over all tokens."""
    (named,) = np.nonzero(np.isin(expected.ids[0], np.fromiter(found, np.int32)))
    common = Exact(expected.ids[:, named], expected.logprobs[:, named], expected.losses)
    dense = np.zeros((1, max(found) + 1), np.float32)
    for token, logprob in found.items():
        dense[0, token] = logprob
    return float(divergences(common, dense)[0])


def predicted(place: Place, tokens: Sequence[int]) -> Mapping[int, float]:
    """Return the log-probabilities of the NUM_PROBABLE most probable next tokens of a peer, by token id."""
    body = {"prompt": [int(token) for token in tokens], "n_predict": 1, "n_probs": NUM_PROBABLE, "temperature": 0, "cache_prompt": True}
    answer = asked(place.url, "/completion", body)
    return {one["id"]: one["logprob"] for one in answer["completion_probabilities"][0]["top_logprobs"]}


# --- memory ----------------------------------------------------------------------------------------------------------------


def kept_bytes(config: ModelConfig) -> int:
    """Return the bytes of keys and values of `KEPT` tokens in all layers. Without this limit, a server keeps those of all earlier prompts
    as long as memory is free."""
    return -(-KEPT // PAGE_SIZE) * sum(group.bytes_per_page for group in groups_of(config, DType.BF16, KEPT))


def _pss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab real", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=MODELS, help="name in the catalogue; repeatable (all)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each measurement")
    parser.add_argument(
        "--peer-python", default=os.environ.get("PEER_PYTHON", sys.executable), help="interpreter that has xllamacpp (PEER_PYTHON)"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    figures = [figure for model in options.model or MODELS for figure in measure(model, options.peer_python, options.rounds)]
    report(figures, as_json=options.json)


if __name__ == "__main__":
    main()
