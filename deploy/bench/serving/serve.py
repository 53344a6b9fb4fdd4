"""`relaxserve bench serve`: throughput and latency for one client and for several clients of a model, and the time of a step outside
kernels.

    clients N   N clients at once, each with a prompt of 128 random tokens and 128 new tokens; `--length` replaces both numbers
    prefix      two prompts, one after the other, that share their first 1,000 tokens
    arrival     a prompt of 2,000 tokens that arrives while 16 streams decode
    burst N     N clients at once, as the first requests after a start; a second burst; then 2 N clients that arrive at random, at
                0.7 of the rate that the model can serve; then `arrival`

The engine runs in this process, as in a worker. `--http` also measures the loads before `burst` through a separate server process. The
throughput is compared with the ideal: the model, without the engine, runs all prompts in full chunks, and then steps of all streams
together. The engine and the ideal run in turns, step by step, so that changes of the machine's speed affect both.
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
from deploy.bench.arguments import at_least, clients, device_name, temperature
from deploy.bench.checkpoint import PREFIX, model_folder
from deploy.bench.measure import Figure, report
from deploy.bench.serving.drive import Driver, InProcess, percentile
from deploy.bench.serving.ideal import LENGTH, Ideal, Took
from deploy.bench.synthetic import SHAPES
from deploy.model_loading.load import load_model
from deploy.model_loading.serving import CompiledModel
from deploy.served import served
from deploy.streams import OverHttp, Prompt, Stream
from runtime.device.registry import CPU
from server.engine.step_model import StepLimits
from server.load_settings import MAX_GAP_MS, MOST_SEQUENCES
from server.messages import Load
from server.models.state import ModelSpec
from server.settings import SettingsError

CLIENTS = (1, 4, 8, 16, 32, 64)  # the numbers of clients that are measured by default
ARRIVAL_SHARE = 0.7  # rate of arrivals / rate that the model can serve
NUM_SHARED = 1000  # tokens that the two prompts of `prefix` share
NUM_ARRIVING, NUM_LATE, NUM_DECODING = 2000, 8, 16  # tokens of the late prompt; new tokens after it; streams that decode beside it
# Numbers of loads, from which their random prompts are made. A load of N clients has the number N; if it runs a second time, N + AGAIN.
AGAIN = 2 * MOST_SEQUENCES
ARRIVALS, DECODING = MOST_SEQUENCES + 1, MOST_SEQUENCES + 2
HOST_SHARES = {1: 0.05, 32: 0.08}  # number of clients -> goal for the share of a step outside kernels
JUDGED_CLIENTS = 32  # number of clients for which the throughput and the first tokens have goals
NAME = "bench"  # name of the model
JUDGED_MODEL, JUDGED_FORMATS = f"{PREFIX}0.5b", ("int8", "int4-32")  # the goals apply to this model in these formats


@dataclass(frozen=True, slots=True)
class Texts:
    """Random prompts. The same number of a load, client and length always give the same prompt, and prompts of different loads or clients
    share no prefix."""

    vocab_size: int
    length: int = LENGTH  # tokens of a client's prompt, and new tokens

    def make(self, number: int, length: int, client: int = 0) -> tuple[int, ...]:
        """Return the token ids of a prompt. `number` is the number of the load, and `client` that of the client, from 1 on; 0: the load has
        only this prompt."""
        return tuple(np.random.default_rng((number, client)).integers(3, self.vocab_size, length).tolist())

    def several(self, number: int, count: int, num_new: int | None = None) -> list[Prompt]:
        """Return prompts of `count` clients, each for `num_new` new tokens (None: as many as the prompt has). `number` is the number of the
        load."""
        return [Prompt(self.make(number, self.length, client), num_new or self.length) for client in range(1, count + 1)]


@dataclass(frozen=True, slots=True)
class Run:
    """The times of one run of clients, without the time that the ideal took between the steps of the run."""

    name: str  # name of the load
    wall_s: float  # seconds from the beginning of the run to the end of the last stream
    processor_s: float  # processor time of all threads
    first_s: Sequence[float]  # for each client, seconds until its first token


def measure(folder: Path, options: argparse.Namespace) -> list[Figure]:
    """Load the model in this process, measure the loads that the options name, and then, with `--http`, measure them with a server. Raise
    SettingsError if the model cannot run prompts of `--length`."""
    numbers: list[int] = options.clients
    spec = spec_of(folder, options)
    load = Load(NAME, str(folder), options.quantize, max_batch=spec.max_batch, device=spec.device)
    loaded = load_model(load, lambda _stage, _fraction: None)
    model = loaded.step_model
    assert isinstance(model, CompiledModel)
    limits = model.limits
    if options.length > (most := min(limits.max_tokens, limits.max_context // 2)):
        raise SettingsError(
            f"--length is {options.length}; expected at most {most}: a step of the model takes a prompt, and its context both"
        )
    driver = InProcess(loaded, temperature=options.temperature)
    texts = Texts(limits.vocab_size, options.length)
    if options.burst is None:
        figures = [figure for n in numbers for figure in run_figures(driver, model, [f"{n} clients"], n, texts)]
        figures += prefix_figures(driver, texts, limits, "") + arrival_figures(driver, model, texts)
    else:
        figures = burst_figures(driver, model, options.burst, texts) + arrival_figures(driver, model, texts)
    driver.close()
    del loaded, model, driver  # servers load the model again
    if options.http:
        with served(spec) as url:
            figures += http_figures(OverHttp(url, NAME, temperature=options.temperature), limits, numbers, figures, texts)
    return figures


def spec_of(folder: Path, options: argparse.Namespace) -> ModelSpec:
    """Return how a server loads the model: for as many sequences as the largest load has clients, and at least for those of
    `arrival`."""
    most = max(options.burst or max(options.clients), NUM_DECODING + 1)
    return ModelSpec(NAME, str(folder), options.quantize, max_batch=most, device=options.device)


def burst_figures(driver: InProcess, model: CompiledModel, num_clients: int, texts: Texts) -> list[Figure]:
    """Measure the two bursts of clients, and then the clients that arrive at random."""
    names = [f"{which} burst of {num_clients}" for which in ("first", "second")]
    figures = run_figures(driver, model, names, num_clients, texts)
    return figures + arrivals_figures(driver, model, num_clients, texts)


def run_figures(driver: InProcess, model: CompiledModel, names: Sequence[str], num_clients: int, texts: Texts) -> list[Figure]:
    """Run the same number of clients once per name, in turns with the ideal, with new prompts each time. Return the figures of all runs,
    followed by the comparisons of the runs with the ideal."""
    figures: list[Figure] = []
    compared: list[Figure] = []
    for number, name in enumerate(names):
        ideal = Ideal.of_clients(model, num_clients, texts.length)
        busy_s, processor_s, began_s = -model.busy_s, -time.process_time(), time.perf_counter()
        streams = driver.run(texts.several(number * AGAIN + num_clients, num_clients), beside=ideal)
        wall_s, busy_s, processor_s = time.perf_counter() - began_s, busy_s + model.busy_s, processor_s + time.process_time()
        took = ideal.took
        run = Run(name, wall_s - took.wall_s, processor_s - took.processor_s, [stream.ttft_s for stream in streams])
        outside = 1 - (busy_s - took.busy_s) / run.wall_s
        figures += stream_figures(name, streams)
        figures.append(Figure(f"{name}: share of time outside kernels", outside, "", HOST_SHARES.get(num_clients)))
        compared += ideal_figures(run, ideal.run(), is_judged=num_clients == JUDGED_CLIENTS)
    return [*figures, *compared]


def ideal_figures(run: Run, least: Took, *, is_judged: bool) -> list[Figure]:
    """Compare a run with the ideal `least`, in which the model runs all prompts first and then all streams together. The figures have goals
    only if `is_judged` is set."""
    share, median, worst = (0.95, 0.55, 1.15) if is_judged else (None, None, None)
    name, note = run.name, f"all prompts without the engine: {least.prompts_s:.2f} s"
    by_clock = f"{run.wall_s:.2f} s; ideal {least.wall_s:.2f} s"
    by_processor = f"{run.processor_s:.2f} s; ideal {least.processor_s:.2f} s"
    return [
        Figure(f"{name}: throughput / ideal", least.wall_s / run.wall_s, "", share, True, by_clock),
        Figure(f"{name}: throughput / ideal, by CPU time", least.processor_s / run.processor_s, "", share, True, by_processor),
        Figure(
            f"{name}: median time to first token / time of all prompts",
            statistics.median(run.first_s) / least.prompts_s,
            "",
            median,
            note=note,
        ),
        Figure(f"{name}: longest time to first token / time of all prompts", max(run.first_s) / least.prompts_s, "", worst, note=note),
    ]


def arrivals_figures(driver: InProcess, model: CompiledModel, num_clients: int, texts: Texts) -> list[Figure]:
    """Let 2 * num_clients clients arrive at random. The ideal assumes that only the average number of simultaneous clients is unfinished
    when the last client arrives, and adds the time that the model needs for these."""
    random = np.random.default_rng(0)
    capacity = num_clients / Ideal.of_clients(model, num_clients, texts.length).run().wall_s
    gaps_s = random.exponential(1 / (ARRIVAL_SHARE * capacity), 2 * num_clients - 1)
    at_s = [0.0, *np.cumsum(gaps_s).tolist()]
    prompts = texts.several(ARRIVALS, len(at_s))
    streams = driver.run([replace(prompt, at_s=at) for prompt, at in zip(prompts, at_s, strict=True)])
    wall_s = max(stream.times_s[-1] for stream in streams) - streams[0].began_s
    at_once = sum(stream.times_s[-1] - stream.began_s for stream in streams) / wall_s
    drain_s = Ideal.of_clients(model, max(1, min(num_clients, round(at_once))), texts.length).run().wall_s
    name = f"arrivals at {ARRIVAL_SHARE} of capacity"
    note = f"{wall_s:.1f} s; last arrival after {at_s[-1]:.1f} s; on average {at_once:.1f} at once, ideal {drain_s:.1f} s for them"
    goal = 0.95 if num_clients == JUDGED_CLIENTS else None
    return [*stream_figures(name, streams), Figure(f"{name}: throughput / ideal", (at_s[-1] + drain_s) / wall_s, "", goal, True, note)]


def http_figures(driver: OverHttp, limits: StepLimits, numbers: Sequence[int], inside: list[Figure], texts: Texts) -> list[Figure]:
    """Measure `clients`, `prefix` and `arrival` with a server. `inside` has the figures of the same numbers of clients without a server,
    with which the throughput is compared. A short request, which is not measured, is sent first."""
    driver.run(texts.several(0, 1, num_new=8))
    rates = {figure.name: figure.value for figure in inside}
    figures: list[Figure] = []
    for n in numbers:
        streams = driver.run(texts.several(n, n))
        figures += stream_figures(f"{n} clients over HTTP", streams)
        lost = 1 - throughput(streams) / rates[f"{n} clients: throughput"]
        figures.append(Figure(f"{n} clients over HTTP: share of throughput lost", lost, "", 0.08 if n == 32 else None))
    where = "over HTTP, "
    return figures + prefix_figures(driver, texts, limits, where) + arrival_over_http_figures(driver, texts, limits, where)


def throughput(streams: Sequence[Stream]) -> float:
    """Return the tokens per second of all streams together, from the first request to the last token."""
    wall_s = max(stream.times_s[-1] for stream in streams) - min(stream.began_s for stream in streams)
    return sum(stream.num_tokens for stream in streams) / wall_s


def stream_figures(name: str, streams: Sequence[Stream]) -> list[Figure]:
    """Return what clients see: the throughput, the times to the first token, and the gaps between tokens if there are any."""
    first = [stream.ttft_s * 1e3 for stream in streams]
    gaps = [gap * 1e3 for stream in streams for gap in stream.gaps_s]
    return [
        Figure(f"{name}: throughput", throughput(streams), "tokens/s"),
        *(Figure(f"{name}: time to first token, p{p:g}", percentile(first, p / 100), "ms") for p in (50, 99)),
        *(Figure(f"{name}: time between tokens, p{p:g}", percentile(gaps, p / 100), "ms") for p in (50, 99) if gaps),
    ]


def prefix_figures(driver: Driver, texts: Texts, limits: StepLimits, where: str) -> list[Figure]:
    """Compare the times to the first token of two prompts with a common beginning. `where` is the beginning of the name of the figure.
    Return [] if the model's context is too short."""
    num_own, num_new = 16, 8
    if limits.max_context < NUM_SHARED + num_own + num_new:
        return []
    shared = texts.make(1, NUM_SHARED)
    first, second = (driver.run([Prompt(shared + texts.make(2 + i, num_own), num_new)])[0].ttft_s for i in range(2))
    note = f"{first * 1e3:.0f} ms, then {second * 1e3:.0f} ms"
    return [Figure(f"{where}prefix: time to first token, second prompt / first", second / first, "", 0.15, note=note)]


def arrival_figures(driver: InProcess, model: CompiledModel, texts: Texts) -> list[Figure]:
    """Measure a long prompt that arrives while other streams run. The model computes the same prompt alone in turns with the engine. Return
    [] if the model's context is too short."""
    if not fits_late_prompt(model.limits):
        return []
    alone = Ideal.of_prompt(model, NUM_ARRIVING, driver.engine.scheduler.pace.prefill_budget(0))
    *others, late = driver.run(decoding_prompts(texts), late=late_prompt(texts, 5), beside=alone)
    return late_figures(others, late, alone.run().prompts_s, "")


def arrival_over_http_figures(driver: Driver, texts: Texts, limits: StepLimits, where: str) -> list[Figure]:
    """Measure a long prompt that arrives while other streams run, and another one alone, afterwards. Return [] if the model's context is
    too short."""
    if not fits_late_prompt(limits):
        return []
    *others, late = driver.run(decoding_prompts(texts), late=late_prompt(texts, 5))
    (alone,) = driver.run([late_prompt(texts, 6)])
    return late_figures(others, late, alone.ttft_s, where)


def fits_late_prompt(limits: StepLimits) -> bool:
    """Return whether the context of the model holds the late prompt and its answer."""
    return limits.max_context >= NUM_ARRIVING + NUM_LATE


def late_prompt(texts: Texts, number: int) -> Prompt:
    return Prompt(texts.make(number, NUM_ARRIVING), NUM_LATE)


def decoding_prompts(texts: Texts) -> list[Prompt]:
    return texts.several(DECODING, NUM_DECODING, num_new=256)


def late_figures(others: Sequence[Stream], late: Stream, alone_s: float, where: str) -> list[Figure]:
    """Measure how much longer a long prompt takes while other streams run, and the gaps between the tokens of these streams until the
    prompt's first token. `alone_s` is the time to the first token of the prompt alone. Return [] if the other streams have no gap during
    this time, or none outside it once all of them have begun."""
    end_s = late.times_s[0]
    beside = [b - a for s in others for a, b in zip(s.times_s, s.times_s[1:], strict=False) if b > late.began_s and a < end_s]
    quiet_s = max(stream.times_s[0] for stream in others)
    calm = [
        b - a for s in others for a, b in zip(s.times_s, s.times_s[1:], strict=False) if (quiet_s < a and b < late.began_s) or a > end_s
    ]
    if not beside or not calm:
        return []
    median, worst = statistics.median(calm), max(beside)
    note = (
        f"median {median * 1e3:.0f} ms, longest {worst * 1e3:.0f} ms (without the prompt {max(calm) * 1e3:.0f} ms), "
        f"first token of the prompt {late.ttft_s * 1e3:.0f} ms, alone {alone_s * 1e3:.0f} ms"
    )
    return [
        Figure(f"{where}arrival: longest gap of the other streams", worst * 1e3, "ms", MAX_GAP_MS, note=note),
        Figure(f"{where}arrival: time to first token / same prompt alone", late.ttft_s / alone_s, "", 1.5),
    ]


def options_of(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    synthetic = ", ".join(PREFIX + name for name in SHAPES)
    parser.add_argument("--model", default=JUDGED_MODEL, help=f"{demo.NAME}, a path, {synthetic}")
    parser.add_argument("--quantize", default=JUDGED_FORMATS[0])
    parser.add_argument("--device", type=device_name, default=CPU, help="cpu, cuda, or one of several GPUs as cuda:1")
    parser.add_argument("--clients", type=_numbers_of_clients, default=list(CLIENTS), help="as 1,4,32")
    parser.add_argument("--length", type=at_least(2), default=LENGTH, help="tokens of each client's prompt, and new tokens of each client")
    parser.add_argument("--burst", type=clients, help="measure only this number of clients at once, twice, and arrivals at random")
    parser.add_argument("--temperature", type=temperature, default=0.0)
    parser.add_argument("--http", action="store_true", help="also measure a server over HTTP")
    parser.add_argument("--json", action="store_true")
    return parser


def _numbers_of_clients(text: str) -> list[int]:
    return [clients(number) for number in text.split(",")]


def parsed(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parse the arguments. End the program with a message if options contradict each other."""
    options = parser.parse_args(argv)
    if options.http and options.burst is not None:
        parser.error("--http measures --clients: leave out --burst")
    if options.clients is not parser.get_default("clients") and options.burst is not None:
        parser.error("--burst measures only its own number of clients: leave out --clients or --burst")
    return options


def judged(figures: list[Figure], options: argparse.Namespace) -> list[Figure]:
    """Return the figures, without their goals unless these apply to the model, the format and the length of prompts."""
    if options.model == JUDGED_MODEL and options.length == LENGTH and options.quantize in JUDGED_FORMATS:
        return figures
    return [replace(figure, goal=None) for figure in figures]


def main(argv: list[str] | None = None) -> None:
    options = parsed(options_of("relaxserve bench serve", __doc__), argv)
    with model_folder(options.model) as folder:
        figures = measure(folder, options)
    report(judged(figures, options), as_json=options.json)


if __name__ == "__main__":
    main()
