"""`relaxserve bench model`: for prefill and decode of one model, the measured time and the time that this machine's limits allow.

The limit time is the larger of bytes / bandwidth and operations / peak. Bytes are the weights that a step reads and the keys and values to
which it attends. Operations are two per weight and token, and, for each token and each token to which it attends, two per head and element
of a key or of a value. In a mixture, only the weights of the chosen experts count: as many experts as tokens that choose independently
choose on average. A hybrid also reads and writes a state per sequence, with eight operations per token and element of the state. The
language head multiplies one token per sequence. For a model with windows, the command also prints how many pages of each cache group a
growing sequence holds. For a hybrid, it also prints how much longer decoding takes after a long context than after a short one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from compiler.bind import bind_weights
from compiler.driver import Options, compile_module
from compiler.frontend.cache_groups import groups_of
from compiler.frontend.config import ModelConfig
from compiler.frontend.decoder import ENTRY, StepBounds, build_step
from compiler.frontend.gguf.model import GgufModel
from compiler.frontend.layers.nn import AS_STORED, WeightFormat
from compiler.frontend.numerics import Numerics
from compiler.frontend.quantized.held import HeldWeights, forms_of
from compiler.frontend.weights import WeightSource
from compiler.ir.dtypes import DType
from compiler.machine.target import NAMED, Target, get, host, of_gpu
from deploy.bench.arguments import device_name, whole
from deploy.bench.checkpoint import FOLDER
from deploy.bench.compute.case import Case, Run, Steps, Work
from deploy.bench.gguf_file import Q4_K_M, write_gguf
from deploy.bench.limits import CardGauge, Gauge, Limits, seconds_of
from deploy.bench.synthetic import (
    ATTENTION_EVERY,
    FP8,
    HEAD_SIZES,
    RandomWeights,
    fp8_model,
    gates_attention,
    shapes_of,
    synthetic_config,
)
from deploy.model_loading.costs import step_of
from deploy.model_loading.files import dtypes_of
from deploy.model_loading.modes import KV_DTYPES
from deploy.model_loading.serving import arguments_of
from runtime.cache_groups import PAGE_SIZE, CacheGroup
from runtime.device.base import Device
from runtime.device.cpu.system_memory import system_memory
from runtime.device.cuda.card import capability_of
from runtime.device.registry import CPU, number_of
from runtime.kv_pool import KVPool
from runtime.memory import MemoryAccount
from runtime.own_folder import OwnFolder
from runtime.session import Session
from server.engine.scheduling.cache_pool import CachePool, Held
from server.engine.scheduling.page_pool import Chain, PageList, PagePool
from server.engine.step_model import GroupLimits, StepLimits
from server.settings import SettingsError

PREFILLS = (128, 512, 2048)
BATCHES = (1, 4, 8, 16, 32)
CONTEXTS = (128, 4096)
TURNS = 60  # steps of each kind whose times are compared
LONG = 32768  # a hybrid also decodes one token after a context of this length


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one step."""

    name: str  # such as "prefill 512" or "decode 4 x 128"
    tokens_per_s: float  # new tokens of the step over its shortest time
    num_bytes: float  # least bytes that the step reads
    operations: float  # least operations that it computes
    share: float  # limit time divided by measured time


@dataclass(frozen=True, slots=True)
class Growth:
    """The largest number of pages of a cache group that a growing sequence holds at a time."""

    window: int | None  # window of the group in tokens; None: its layers attend to the whole context
    pages: list[int]  # largest numbers until the sequence has the length of one, two, three and four longest windows


@dataclass(frozen=True, slots=True)
class Measured:
    """All figures of one model."""

    limits: Limits
    rows: list[Row]
    growth: list[Growth]  # empty for models without windows
    lengthening: float | None  # time of a step after a long context over that after a short one: see the function `lengthening`


class Model:
    """A synthetic model, compiled and bound, whose cache pages are filled. If `quantize` is q4_k_m, the weights are those of a GGUF file of
    this mixture of formats; if `quantize` is fp8, those of an fp8 checkpoint."""

    def __init__(
        self,
        config: ModelConfig,
        quantize: str,
        threads: int | None,
        *,
        kv_dtype: DType = DType.BF16,
        target: Target | None = None,
        device: str = CPU,
        bounds: StepBounds | None = None,
    ) -> None:
        """`threads`: None: as many as a server's model uses on this machine. `target`: None: this machine's CPU. `bounds`: the bounds of
        the steps that will run; by default, those of the steps that `works` lists."""
        self.config = config
        self.contexts = CONTEXTS if config.recurrence is None else (*CONTEXTS, LONG)
        longest = max(CONTEXTS) + PAGE_SIZE if bounds is None else bounds.max_context
        bounds = bounds or StepBounds(max(PREFILLS), max(BATCHES), max(self.contexts) + PAGE_SIZE)
        pages = 1 + bounds.max_seqs * (longest // PAGE_SIZE)
        if quantize == FP8:
            self._build(fp8_model(config), AS_STORED, threads, kv_dtype, target, device, bounds, pages)
            return
        if quantize != Q4_K_M.lower():
            source = RandomWeights(shapes_of(config))
            self._build(source, WeightFormat.parse(quantize), threads, kv_dtype, target, device, bounds, pages)
            return
        with OwnFolder(Path(tempfile.gettempdir()), FOLDER) as made:
            write_gguf(path := made.path / "model.gguf", config, RandomWeights(shapes_of(config)), Q4_K_M)
            self._build(HeldWeights(GgufModel(path)), AS_STORED, threads, kv_dtype, target, device, bounds, pages)

    def _build(
        self,
        source: WeightSource,
        format: WeightFormat,
        threads: int | None,
        kv_dtype: DType,
        target: Target | None,
        device: str,
        bounds: StepBounds,
        pages: int,
    ) -> None:
        """Compile the step for these weights and bind them on the device, and fill at most `pages` pages of each cache group."""
        config = self.config
        self.options = Options(target or host())
        forms, numerics = forms_of(source.tensors), Numerics.on(self.options.target)
        self.module = build_step(config, dtypes_of(source), bounds, kv_dtype, format, forms=forms, numerics=numerics)
        self.executable = compile_module(self.module, self.options)
        self.session = Session(self.executable, device_threads=threads, pinned=True, device_number=number_of(device))
        self.weights = bind_weights(self.session, self.executable, ENTRY, source)
        self.groups = groups_of(config, kv_dtype, bounds.max_context)
        self.pages = min(pages, 1 + (4 << 30) // sum(group.bytes_per_page for group in self.groups if not group.keeps_states))
        counts = [1 + bounds.max_seqs if group.keeps_states else self.pages for group in self.groups]
        counted = zip(counts, self.groups, strict=True)
        limits = tuple(GroupLimits(count, group.window, group.keeps_states, group.page_size) for count, group in counted)
        self.limits = StepLimits(config.vocab_size, bounds.max_context, bounds.max_tokens, bounds.max_seqs, limits)
        self.pool = KVPool(self.groups, counts, MemoryAccount(), self.session.device)
        fill(self.pool, self.session.device)
        self.session.device.settle()  # so that steps are as fast as in a server whose cache is full

    def product_bytes(self, tokens: int) -> float:
        """Return the bytes of weights that a step with this many tokens reads: all matrices, the head included, without the table of
        embeddings; of the experts, the share that the tokens choose on average."""
        read = [a for n, a in self.weights.items() if len(a.shape) > 1 and "embed_tokens" not in n]
        # Panels of experts have an extra first axis. The panels of heads in multi-head latent attention have one, too.
        count = 0 if self.config.mixture is None else self.config.mixture.num_experts
        experts = sum(a.nbytes for a in read if len(a.shape) == 4 and a.shape[0] == count)
        return sum(a.nbytes for a in read) - experts + experts * chosen_share(self.config, tokens)

    @property
    def product_elements(self) -> int:
        """The number of weights with which each token is multiplied, without the head."""
        c = self.config
        attention = c.hidden_size * ((3 if gates_attention(c) else 2) * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        if (m := c.latent) is not None:
            of_heads = c.num_heads * (m.plain_size + m.value_size)
            attention = c.hidden_size * (of_heads + c.num_heads * m.rotated_size + m.kept_size) + of_heads * m.rank
        gates = 2 if gates_attention(c) else 1
        recurrent = 0 if (r := c.recurrence) is None else c.hidden_size * (r.channels + 2 * r.values + gates * r.num_heads)
        feed = 3 * c.intermediate_size
        if (x := c.mixture) is not None:
            feed = 3 * (x.size * x.num_chosen + x.shared_size) + x.num_experts
        mixing = len(c.stateful) * recurrent + (c.num_layers - len(c.stateful)) * attention
        return mixing + c.num_layers * c.hidden_size * feed

    @property
    def head_elements(self) -> int:
        """The number of weights of the language head."""
        return self.config.hidden_size * self.config.vocab_size

    def step(self, tokens: int, sequences: int, context: int) -> Any:
        """Return the arguments of a step with `tokens` new tokens, split among the sequences. After the step, each sequence has `context`
        tokens."""
        batch = step_of(self.limits, num_seqs=sequences, num_each=tokens // sequences, context=context)
        return *arguments_of(batch, self.groups), batch.logit_rows, *self.pool.arguments

    def run(self, args: Any) -> Any:
        """Run the step with arguments that `step` returned, and return its logits as views. On a GPU, the step may still run when this
        function returns."""
        return self.session.call(ENTRY, *args, views=True)

    def prepared(self, tokens: int, sequences: int, context: int) -> Run:
        """Return a function that runs the step to its end and returns its logits."""
        args, device = self.step(tokens, sequences, context), self.session.device
        if device.limits.reads_host_arrays:
            return lambda: self.run(args)
        word = device.empty((1,), np.dtype(np.float32))

        def run() -> Any:
            logits = self.run(args)
            device.download(word)  # blocks until the step has ended
            return logits

        return run

    @property
    def works(self) -> dict[Case, Work]:
        """The work of each step to measure: prefills, decoding for each number of sequences and each context whose keys and values fit into
        the pages, and for a hybrid one token after a long context."""
        decodes = [Case(batch, batch, context) for context in CONTEXTS for batch in BATCHES if batch * context // PAGE_SIZE < self.pages]
        decodes += [Case(1, 1, context) for context in self.contexts if context not in CONTEXTS]
        return {case: self.work(case) for case in (*(Case(length, 1, length) for length in PREFILLS), *decodes)}

    def work(self, case: Case) -> Work:
        """Return the bytes and operations of a step. The beginning of this file says what counts."""
        c = self.config
        num_bytes = self.product_bytes(case.tokens)
        operations = 2.0 * (self.product_elements * case.tokens + self.head_elements * case.sequences)
        for group in self.groups:
            if group.keeps_states:
                r = c.recurrence
                assert r is not None, c
                num_bytes += 2 * group.bytes_per_page * case.sequences  # each state is read and written
                operations += 8.0 * r.values * r.key_size * len(group.layers) * case.tokens
                continue
            seen = min(case.context, group.window or case.context)
            pairs = seen * (case.context - seen / 2) if case.is_prefill else case.sequences * seen
            num_bytes += self.kv_bytes(group) * case.sequences * (case.context if case.is_prefill else seen)
            operations += attention_operations(c) * len(group.layers) * pairs
        return Work(num_bytes, operations)

    @staticmethod
    def kv_bytes(group: CacheGroup) -> float:
        """Return the bytes of a token's keys and values in all layers of a cache group."""
        return group.bytes_per_page / PAGE_SIZE


def attention_operations(config: ModelConfig) -> float:
    """Return the operations with which all heads of a layer let one token attend to one earlier token."""
    value_size = config.head_dim if config.latent is None else config.latent.rank
    return 2.0 * config.num_heads * (config.head_dim + value_size)


def chosen_share(config: ModelConfig, tokens: int) -> float:
    """Return the average share of the experts that at least one of the tokens chooses, if choices are independent. Return 0 for a model
    without experts."""
    return 0.0 if config.mixture is None else 1 - (1 - config.mixture.num_chosen / config.mixture.num_experts) ** tokens


def fill(pool: KVPool, device: Device) -> None:
    """Fill the pages with data. Pages that were never written all map to one page of zeros, which would be read from the processor's
    cache."""
    for data, *scales in filter(None, pool.tensors):
        rows = np.random.default_rng(0).standard_normal(data.shape[3:], np.float32)
        device.copy(data, np.broadcast_to(rows.astype(data.dtype), data.shape))
        for tensor in scales:
            device.copy(tensor, np.ones(tensor.shape, np.float32))


def measure(steps: Steps, works: Mapping[Case, Work], gauge: Gauge) -> list[Row]:
    """Run each step of `works` several times, in turns with a measurement of the limits. `steps` returns the function that runs a step.
    Return the figures in the order of `works`."""
    rows: list[Row] = []
    for case, work in works.items():
        run = steps(*case)
        seconds, limits = gauge.beside(run, seconds=2.0 if case.is_prefill else 1.5, most=5 if case.is_prefill else 20)
        share = limits.share(*work, seconds)
        rows.append(Row(str(case), case.tokens / seconds, work.num_bytes, work.operations, share))
    return rows


def lengthening(model: Model) -> float | None:
    """Return how many times as long decoding one token takes after the longest context as after the shortest; the two steps run in turns.
    Return None for models without a recurrent state."""
    if model.config.recurrence is None:
        return None
    runs = [model.prepared(1, 1, context) for context in (CONTEXTS[0], LONG)]
    return float(np.median([long / short for short, long in (tuple(map(seconds_of, runs)) for _ in range(TURNS))]))


def growth(model: Model) -> list[Growth]:
    """Measure how many pages of the engine's cache pool a sequence holds in each group, while it grows token by token to four times the
    longest window. Return [] for models without windows, and for hybrids."""
    windows = [group.window for group in model.limits.groups if group.window is not None and not group.keeps_states]
    if not windows or any(group.keeps_states for group in model.groups):
        return []
    token_ids = list(range(num_tokens := 4 * max(windows)))
    limits = [replace(group, num_pages=2 + num_tokens // PAGE_SIZE) for group in model.limits.groups]
    pool = CachePool(tuple(PagePool(group, 1) for group in limits))
    held = Held(Chain(b""), tuple(PageList(page_size=group.page_size) for group in limits))
    found, most = [Growth(group.window, []) for group in limits], [0] * len(limits)
    for position in range(num_tokens):
        assert pool.make_writable(held, position, position + 1) is not None, "the pool has room for all tokens"
        pool.publish(held, token_ids, position + 1)
        most = [max(before, pages.num_used) for before, pages in zip(most, pool.pools, strict=True)]
        if (position + 1) % max(windows) == 0:
            for group, count in zip(found, most, strict=True):
                group.pages.append(count)
    return found


def model_options(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that describe a model and how it runs. `prog` and `description`: the name and the description of the
    program, which its help shows."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--synthetic", default="0.5b", help="shape of the model")
    parser.add_argument("--head-size", type=int, choices=HEAD_SIZES, help="size of a head; by default the shape's")
    parser.add_argument("--kv-heads", type=whole, help="number of heads of keys and values, a divisor of the heads; by default the shape's")
    parser.add_argument("--layers", type=whole, help="number of layers; by default the shape's, for a mixture as many as memory holds")
    parser.add_argument("--quantize", default="bf16", help=f"format of the weights in memory; {FP8}, {Q4_K_M.lower()}: as in such files")
    parser.add_argument("--kv-dtype", default="bf16", choices=KV_DTYPES, help="type of the pages of keys and values")
    parser.add_argument("--target", default="host", help=f"instructions to use: host, {', '.join(NAMED)}")
    parser.add_argument("--threads", type=whole)
    parser.add_argument("--json", action="store_true")
    return parser


def config_of(options: argparse.Namespace) -> ModelConfig:
    """Return the configuration that the options describe. A mixture has as many layers as this machine's memory holds, unless an option
    gives the number of layers. Raise SettingsError if the options do not fit the shape, or leave a hybrid without attention."""

    def shape(layers: int | None) -> ModelConfig:
        return synthetic_config(options.synthetic, head_size=options.head_size, kv_heads=options.kv_heads, layers=layers)

    config = shape(options.layers)
    if len(config.stateful) == config.num_layers:
        text = f"expected at least {ATTENTION_EVERY}: every {ATTENTION_EVERY}th layer of {options.synthetic} is an attention layer"
        raise SettingsError(f"--layers is {options.layers}; {text}")
    if config.mixture is None or options.layers is not None:
        return config
    return shape(most_layers(config, WeightFormat.parse(options.quantize), system_memory().available_bytes))


def most_layers(config: ModelConfig, format: WeightFormat, memory_bytes: int) -> int:
    """Return how many layers of the model have weights that fit into half of the memory, but at least one. The other half is for keys,
    values and the preparation of weights."""
    own = {name: prod(shape) for name, shape in shapes_of(config).items()}
    layer = sum(count for name, count in own.items() if name.startswith("model.layers.0."))
    others = 2 * sum(count for name, count in own.items() if not name.startswith("model.layers."))
    bits = format.bits + (16 / format.group if format.group else 0)
    return max(1, min(config.num_layers, int((memory_bytes / 2 - others) / (layer * bits / 8))))


def model_of(options: argparse.Namespace, device: str = CPU) -> Model:
    """Compile the model that the options describe, and bind its weights on the device."""
    config, kv_dtype, target = config_of(options), KV_DTYPES[options.kv_dtype], target_of(options, device)
    return Model(config, options.quantize, options.threads, kv_dtype=kv_dtype, target=target, device=device)


def target_of(options: argparse.Namespace, device: str) -> Target:
    """Return the target for which to compile. For a GPU, the option `target` only says which instructions the host's part of a program
    may use."""
    return get(options.target) if device == CPU else of_gpu(options.target, capability_of(number_of(device)))


def gauge_of(options: argparse.Namespace, device: str) -> Gauge:
    """Return a gauge for the limits of the device."""
    target = target_of(options, device)
    return Gauge(multiplied(options), options.threads, target) if device == CPU else CardGauge(target, number_of(device))


def multiplied(options: argparse.Namespace) -> str:
    """Return the format of weights whose multiply rate is the limit of the products of the requested format."""
    held: str = options.quantize
    return {Q4_K_M.lower(): "int4-32", FP8: "bf16"}.get(held, held)


def measured(model: Model, gauge: Gauge) -> Measured:
    """Measure all figures of a model, and in turns with its steps the limits of its device."""
    rows = measure(model.prepared, model.works, gauge)
    return Measured(gauge.limits, rows, growth(model), lengthening(model))


def options_with_device(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of `model_options` with an option for the device."""
    parser = model_options(prog, description)
    parser.add_argument("--device", type=device_name, default=CPU, help="cpu, cuda, or one of several GPUs as cuda:1")
    return parser


def main(argv: list[str] | None = None) -> None:
    options = options_with_device("relaxserve bench model", __doc__).parse_args(argv)
    gauge = gauge_of(options, options.device)
    found = measured(model_of(options, options.device), gauge)
    if options.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        show(found, f"{options.synthetic} {options.quantize}")


def show(found: Measured, title: str) -> None:
    """Print the figures of a model for people."""
    title = f"{title}: {found.limits.bytes_per_s / 1e9:.1f} GB/s, {found.limits.flops / 1e9:.0f} GFLOP/s"
    table = Table("", "tokens/s", "MB read", "GFLOP", "share of the limit", title=title)
    for r in found.rows:
        table.add_row(r.name, f"{r.tokens_per_s:.1f}", f"{r.num_bytes / 1e6:.0f}", f"{r.operations / 1e9:.1f}", f"{r.share:.2f}")
    Console().print(table)
    for group in found.growth:
        print(f"a sequence of one, two, three and four windows holds {group.pages} pages of the group with window {group.window}")
    if found.lengthening is not None:
        print(f"decoding after {LONG} tokens takes {found.lengthening:.2f} times as long as after {CONTEXTS[0]}")


if __name__ == "__main__":
    main()
