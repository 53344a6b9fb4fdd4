"""`relaxserve bench serve`: what clients of one model get, alone and together, and what of a step is not kernels.

    clients N   N prompts of 128 random tokens at once, 128 tokens out each
    prefix      two prompts, one after the other, that share their first 1,000 tokens
    arrival     a prompt of 2,000 tokens while 16 streams decode

The engine runs in this process, as it does in a worker; `--http` adds the same through a server of its own. Beside the throughput stands
what the model alone needs for the same tokens: prompts in full chunks and nothing else, then steps of all streams at once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from deploy import demo
from deploy.bench.checkpoint import PREFIX, model_folder
from deploy.bench.drive import Driver, InProcess, OverHttp, Prompt, Stream, percentile, served
from deploy.bench.measure import Figure, best_s, report
from deploy.bench.synthetic import SHAPES
from deploy.loading.load import load_model
from deploy.loading.serving import CompiledModel
from runtime.kv_pool import PAGE_SIZE
from server.engine.step_model import StepBatch, StepLimits
from server.engine.worker import LoadedModel
from server.messages import Load
from server.state import ModelSpec

CLIENTS = (1, 4, 8, 16, 32, 64)
NUM_PROMPT = NUM_NEW = 128
NUM_SHARED = 1000
NUM_ARRIVING, NUM_DECODING = 2000, 16
HOST_SHARES = {1: 0.05, 32: 0.08}  # goals, by clients
NAME = "bench"
JUDGED = f"{PREFIX}0.5b", "int8"  # the model that the goals are for


@dataclass(frozen=True, slots=True)
class Texts:
    """Random prompts; the same number gives the same prompt, and no two share a beginning."""

    vocab_size: int

    def make(self, number: int, length: int) -> tuple[int, ...]:
        return tuple(np.random.default_rng(number).integers(3, self.vocab_size, length).tolist())

    def several(self, number: int, count: int, num_new: int = NUM_NEW) -> list[Prompt]:
        return [Prompt(self.make(1000 * number + i, NUM_PROMPT), num_new) for i in range(count)]


class Alone:
    """The model without an engine: how long the steps of a load take at least, in all of its measurements."""

    def __init__(self, model: CompiledModel) -> None:
        self._model = model
        self._best_s: dict[tuple[int, int, int], float] = {}

    def measure(self, num_clients: int) -> float:
        """For the prompts of all clients, in steps as large as possible, and then one token of each per step."""
        num_together = min(num_clients, self._model.limits.max_tokens // NUM_PROMPT)
        prefill_s = self._step_s(num_together, NUM_PROMPT, NUM_PROMPT)
        decode_s = self._step_s(num_clients, 1, NUM_PROMPT + NUM_NEW // 2)
        return prefill_s * num_clients / num_together + decode_s * (NUM_NEW - 1)

    def _step_s(self, num_seqs: int, num_each: int, context: int) -> float:
        shape = num_seqs, num_each, context
        batch = self._batch(*shape)
        step_s = best_s(lambda: self._model.run(batch), seconds=1.0, most=20)
        self._best_s[shape] = min(step_s, self._best_s.get(shape, step_s))
        return self._best_s[shape]

    def _batch(self, num_seqs: int, num_each: int, context: int) -> StepBatch:
        num_pages = -(-context // PAGE_SIZE)
        tables = (1 + np.arange(num_seqs * num_pages) % (self._model.limits.num_pages - 1)).astype(np.int32).reshape(num_seqs, num_pages)
        positions = np.tile(np.arange(context - num_each, context), num_seqs).astype(np.int32)
        owners = np.repeat(np.arange(num_seqs), num_each)
        starts = (np.arange(num_seqs + 1) * num_each).astype(np.int32)
        return StepBatch(
            tokens=np.arange(num_seqs * num_each, dtype=np.int32) % self._model.limits.vocab_size,
            positions=positions,
            slots=tables[owners, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
            query_starts=starts,
            context_lens=np.full(num_seqs, context, np.int32),
            page_tables=tables,
            logit_rows=starts[1:] - 1,
        )


def measure(folder: Path, options: argparse.Namespace) -> list[Figure]:
    clients: list[int] = options.clients
    max_batch = max(*clients, NUM_DECODING + 1)
    loaded = load_model(Load(NAME, str(folder), options.quantize, max_batch=max_batch), lambda _stage, _fraction: None)
    model = loaded.step_model
    assert isinstance(model, CompiledModel)
    figures = engine_figures(loaded, model, clients, options.temperature)
    if options.http:
        limits = model.limits
        del loaded, model  # the server loads its own
        with served(ModelSpec(NAME, str(folder), options.quantize, max_batch=max_batch)) as url:
            figures += http_figures(OverHttp(url, NAME, temperature=options.temperature), limits, clients, figures)
    return figures


def engine_figures(loaded: LoadedModel, model: CompiledModel, clients: Sequence[int], temperature: float) -> list[Figure]:
    texts, alone = Texts(model.limits.vocab_size), Alone(model)
    for n in clients:
        alone.measure(n)
    driver = InProcess(loaded, temperature=temperature)
    driver.run(texts.several(0, 1, num_new=8))  # what only the first step costs
    figures: list[Figure] = []
    walls_s: dict[int, float] = {}
    for n in clients:
        busy_s, began_s = -model.busy_s, time.perf_counter()
        streams = driver.run(texts.several(n, n))
        walls_s[n], busy_s = time.perf_counter() - began_s, busy_s + model.busy_s
        figures += stream_figures(f"{n} clients", streams)
        figures.append(Figure(f"{n} clients: time outside kernels", 1 - busy_s / walls_s[n], "", HOST_SHARES.get(n)))
    figures += mixed_figures(driver, texts, model.limits, "")
    driver.close()
    for n in clients:  # for a second time: a machine may be slow before and fast behind
        least_s = alone.measure(n)
        goal = 0.85 if n == 32 else None
        figures.append(Figure(f"{n} clients: of the model alone", least_s / walls_s[n], "", goal, True, f"{least_s:.2f} s alone"))
    return figures


def http_figures(driver: OverHttp, limits: StepLimits, clients: Sequence[int], inside: list[Figure]) -> list[Figure]:
    texts = Texts(limits.vocab_size)
    driver.run(texts.several(0, 1, num_new=8))
    rates = {figure.name: figure.value for figure in inside}
    figures: list[Figure] = []
    for n in clients:
        streams = driver.run(texts.several(n, n))
        figures += stream_figures(f"http, {n} clients", streams)
        lost = 1 - throughput(streams) / rates[f"{n} clients: throughput"]
        figures.append(Figure(f"http, {n} clients: throughput lost", lost, "", 0.08 if n == 32 else None))
    return figures + mixed_figures(driver, texts, limits, "http, ")


def throughput(streams: Sequence[Stream]) -> float:
    wall_s = max(stream.times_s[-1] for stream in streams) - min(stream.began_s for stream in streams)
    return sum(stream.num_tokens for stream in streams) / wall_s


def stream_figures(name: str, streams: Sequence[Stream]) -> list[Figure]:
    first = [stream.ttft_s * 1e3 for stream in streams]
    gaps = [gap * 1e3 for stream in streams for gap in stream.gaps_s]
    return [
        Figure(f"{name}: throughput", throughput(streams), "tokens/s"),
        *(Figure(f"{name}: first token p{p:g}", percentile(first, p / 100), "ms") for p in (50, 99)),
        *(Figure(f"{name}: between tokens p{p:g}", percentile(gaps, p / 100), "ms") for p in (50, 99)),
    ]


def mixed_figures(driver: Driver, texts: Texts, limits: StepLimits, where: str) -> list[Figure]:
    """The two patterns of unequal prompts, where they fit the model's context."""
    figures: list[Figure] = []
    num_own, num_new = 16, 8
    if limits.max_context >= NUM_SHARED + num_own + num_new:
        shared = texts.make(1, NUM_SHARED)
        first, second = (driver.run([Prompt(shared + texts.make(2 + i, num_own), num_new)])[0].ttft_s for i in range(2))
        note = f"{first * 1e3:.0f} ms, then {second * 1e3:.0f} ms"
        figures.append(Figure(f"{where}prefix: second first token, of the first's", second / first, "", 0.15, note=note))
    if limits.max_context >= NUM_ARRIVING + num_new:
        prompts = texts.several(999, NUM_DECODING, num_new=256)
        *others, late = driver.run(prompts, late=Prompt(texts.make(5, NUM_ARRIVING), num_new))
        figures += arrival_figures(others, late, where)
    return figures


def arrival_figures(others: Sequence[Stream], late: Stream, where: str) -> list[Figure]:
    """What those that decode notice of a long prompt: their gaps until its first token, beside those when nothing else runs."""
    end_s = late.times_s[0]
    worst = max(b - a for s in others for a, b in zip(s.times_s, s.times_s[1:], strict=False) if b > late.began_s and a < end_s)
    quiet_s = max(stream.times_s[0] for stream in others)
    calm = [
        b - a for s in others for a, b in zip(s.times_s, s.times_s[1:], strict=False) if (quiet_s < a and b < late.began_s) or a > end_s
    ]
    median = statistics.median(calm)
    note = (
        f"median {median * 1e3:.0f} ms, worst {worst * 1e3:.0f} ms (without the prompt {max(calm) * 1e3:.0f} ms), "
        f"first token of the prompt {late.ttft_s * 1e3:.0f} ms"
    )
    return [Figure(f"{where}arrival: worst gap of the others, of their median", worst / median, "", 2.5, note=note)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="relaxserve bench serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    synthetic = ", ".join(PREFIX + name for name in SHAPES)
    parser.add_argument("--model", default=JUDGED[0], help=f"{demo.NAME}, a path, {synthetic}")
    parser.add_argument("--quantize", default=JUDGED[1])
    parser.add_argument("--clients", type=_counts, default=list(CLIENTS), help="as 1,4,32")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--http", action="store_true", help="the same through a server as well")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    with model_folder(options.model) as folder:
        figures = measure(folder, options)
    if (options.model, options.quantize) != JUDGED:
        figures = [replace(figure, goal=None) for figure in figures]
    report(figures, as_json=options.json)


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


if __name__ == "__main__":
    main()
