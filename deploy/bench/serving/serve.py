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
from deploy.bench.measure import Figure, best_s, report
from deploy.bench.serving.drive import Driver, InProcess, OverHttp, Prompt, Stream, percentile, served
from deploy.bench.synthetic import SHAPES
from deploy.model_loading.costs import step_of
from deploy.model_loading.load import load_model
from deploy.model_loading.serving import CompiledModel
from server.engine.step_model import StepLimits
from server.engine.worker import LoadedModel
from server.messages import MAX_GAP_MS, Load
from server.models.state import ModelSpec

CLIENTS = (1, 4, 8, 16, 32, 64)
NUM_PROMPT = NUM_NEW = 128
NUM_SHARED = 1000
NUM_ARRIVING, NUM_DECODING = 2000, 16
HOST_SHARES = {1: 0.05, 32: 0.08}  # goals, by clients
JUDGED_CLIENTS = 32
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
        """For the prompts of all clients and nothing else, and then one token of each per step."""
        return self.prompts_s(num_clients) + self._step_s(num_clients, 1, NUM_PROMPT + NUM_NEW // 2) * (NUM_NEW - 1)

    def prompts_s(self, num_clients: int) -> float:
        """In steps as large as possible."""
        num_together = min(num_clients, self._model.limits.max_tokens // NUM_PROMPT)
        return self._step_s(num_together, NUM_PROMPT, NUM_PROMPT) * num_clients / num_together

    def _step_s(self, num_seqs: int, num_each: int, context: int) -> float:
        shape = num_seqs, num_each, context
        batch = step_of(self._model.limits, num_seqs=num_seqs, num_each=num_each, context=context)
        step_s = best_s(lambda: self._model.run(batch), seconds=1.0, most=20)
        self._best_s[shape] = min(step_s, self._best_s.get(shape, step_s))
        return self._best_s[shape]


def measure(folder: Path, options: argparse.Namespace) -> list[Figure]:
    clients: list[int] = options.clients
    runs = [(f"{n} clients", n) for n in clients]
    if options.burst is not None:
        runs = [(f"{which} burst of {options.burst}", options.burst) for which in ("first", "second")]
    max_batch = max(*(n for _, n in runs), NUM_DECODING + 1)
    loaded = load_model(Load(NAME, str(folder), options.quantize, max_batch=max_batch), lambda _stage, _fraction: None)
    model = loaded.step_model
    assert isinstance(model, CompiledModel)
    figures = engine_figures(loaded, model, runs, options.temperature, mixed=options.burst is None)
    if options.http:
        limits = model.limits
        del loaded, model  # the server loads its own
        with served(ModelSpec(NAME, str(folder), options.quantize, max_batch=max_batch)) as url:
            figures += http_figures(OverHttp(url, NAME, temperature=options.temperature), limits, clients, figures)
    return figures


def engine_figures(
    loaded: LoadedModel, model: CompiledModel, runs: Sequence[tuple[str, int]], temperature: float, *, mixed: bool
) -> list[Figure]:
    """Of runs by name and number of clients."""
    texts, alone = Texts(model.limits.vocab_size), Alone(model)
    for _, n in runs:
        alone.measure(n)
    driver = InProcess(loaded, temperature=temperature)
    figures: list[Figure] = []
    done: list[tuple[float, list[float]]] = []
    for number, (name, n) in enumerate(runs):
        busy_s, began_s = -model.busy_s, time.perf_counter()
        streams = driver.run(texts.several(1000 * number + n, n))
        wall_s, busy_s = time.perf_counter() - began_s, busy_s + model.busy_s
        done.append((wall_s, [stream.ttft_s for stream in streams]))
        figures += stream_figures(name, streams)
        figures.append(Figure(f"{name}: time outside kernels", 1 - busy_s / wall_s, "", HOST_SHARES.get(n)))
    if mixed:
        figures += mixed_figures(driver, texts, model.limits, "")
    driver.close()
    for (name, n), (wall_s, first_s) in zip(runs, done, strict=True):  # for a second time: a machine may be slow before and fast behind
        figures += ideal_figures(name, alone.measure(n), alone.prompts_s(n), wall_s, first_s, is_judged=n == JUDGED_CLIENTS)
    return figures


def ideal_figures(name: str, least_s: float, prompts_s: float, wall_s: float, first_s: Sequence[float], *, is_judged: bool) -> list[Figure]:
    """Beside the ideal: first all prompts, alone, and then all streams together."""
    share, median, worst = (0.95, 0.55, 1.15) if is_judged else (None, None, None)
    note = f"{prompts_s:.2f} s for all prompts alone"
    return [
        Figure(f"{name}: of the model alone", least_s / wall_s, "", share, True, f"{least_s:.2f} s alone"),
        Figure(f"{name}: median first token, of all prompts", statistics.median(first_s) / prompts_s, "", median, note=note),
        Figure(f"{name}: worst first token, of all prompts", max(first_s) / prompts_s, "", worst, note=note),
    ]


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
        (alone,) = driver.run([Prompt(texts.make(6, NUM_ARRIVING), num_new)])
        figures += arrival_figures(others, late, alone, where)
    return figures


def arrival_figures(others: Sequence[Stream], late: Stream, alone: Stream, where: str) -> list[Figure]:
    """How long a long prompt takes beside streams, and what these notice of it: their gaps until its first token."""
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
    return [
        Figure(f"{where}arrival: worst gap of the others", worst * 1e3, "ms", MAX_GAP_MS, note=note),
        Figure(f"{where}arrival: first token of the prompt, of the same alone", late.ttft_s / alone.ttft_s, "", 1.5),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="relaxserve bench serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    synthetic = ", ".join(PREFIX + name for name in SHAPES)
    parser.add_argument("--model", default=JUDGED[0], help=f"{demo.NAME}, a path, {synthetic}")
    parser.add_argument("--quantize", default=JUDGED[1])
    parser.add_argument("--clients", type=_counts, default=list(CLIENTS), help="as 1,4,32")
    parser.add_argument("--burst", type=int, help="only a burst of so many clients: the first after a start, and one more")
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
