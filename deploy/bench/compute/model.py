"""`relaxserve bench model`: for prefill and decode of one model, the measured time and the time that this machine's limits allow.

The limit time is the larger of bytes / bandwidth and operations / peak. Bytes are the weights that a step reads and the keys and values to
which it attends. Operations are two per weight and token, and two per head and element of a key or of a value. In a mixture, only the
weights of the chosen experts count, as many as independent choices give on average. A hybrid also reads and writes a state per sequence,
with eight operations per token and element of the state. The head multiplies one token per sequence. For a model with windows, the command
also states how many pages a sequence holds in each cache group while it grows. With --beside, the steps of a second shape run in turns with
those of the first, and the command divides the shares of the first by those of the second.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from compiler.bind import bind_weights
from compiler.driver import Options, compile_module
from compiler.frontend.cache_groups import groups_of
from compiler.frontend.config import ModelConfig
from compiler.frontend.decoder import ENTRY, StepBounds, build_step
from compiler.frontend.gguf.model import GgufModel
from compiler.frontend.layers.nn import AS_STORED, WeightFormat
from compiler.frontend.quantized.held import HeldWeights, forms_of
from compiler.frontend.weights import WeightSource
from compiler.ir.dtypes import DType
from compiler.machine.target import NAMED, Target, get, host, of_gpu
from deploy.bench import card_peer
from deploy.bench.card_peer import CARD_PEERS
from deploy.bench.checkpoint import write_checkpoint
from deploy.bench.compute import beside
from deploy.bench.compute.beside import Quotients, quotients
from deploy.bench.compute.case import Case, Work
from deploy.bench.gguf_file import Q4_K_M, write_gguf
from deploy.bench.limits import CardGauge, Gauge, Limits, seconds_of
from deploy.bench.peer import PEERS, Run, Steps, Subject, at_work, check, version_of
from deploy.bench.synthetic import FP8, HEAD_SIZES, RandomWeights, check_shape, fp8_model, gates_attention, shapes_of, synthetic_config
from deploy.model_loading.costs import step_of
from deploy.model_loading.files import dtypes_of
from deploy.model_loading.serving import arguments_of
from runtime.cache_groups import KV_DTYPES, PAGE_SIZE, CacheGroup
from runtime.device.base import Device
from runtime.device.cpu.system_memory import system_memory
from runtime.device.cuda.card import capability_of
from runtime.device.registry import CPU, number_of
from runtime.kv_pool import KVPool
from runtime.memory import MemoryAccount
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
# Largest permitted difference of a peer's logits from ours, relative to the norm of ours. If both round random 4-bit weights in their own
# way, the logits differ by 0.8 after 24 layers; with unrelated weights they differ by 1.4.
MOST_DIFFERENCE = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    tokens_per_s: float
    num_bytes: float
    operations: float
    share: float  # limit time divided by measured time


@dataclass(frozen=True, slots=True)
class Growth:
    """The largest number of pages of a cache group that a growing sequence holds at a time."""

    window: int | None
    pages: list[int]  # until the sequence is one, two, three and four times as long as the longest window


@dataclass(frozen=True, slots=True)
class Compared:
    """The results of a peer: the difference of its logits from ours, relative to the norm of ours, and its measured rows."""

    difference: float
    rows: list[Row]
    version: str = ""  # version of the peer's package


class Model:
    """A synthetic model, compiled and bound, whose cache pages are filled. Its weights are those of a GGUF file if `quantize` is the name
    of a mixture of GGUF formats, and those of an fp8 checkpoint if it is `fp8`."""

    def __init__(
        self,
        config: ModelConfig,
        quantize: str,
        threads: int | None,
        *,
        kv_dtype: DType = DType.BF16,
        target: Target | None = None,
        device: str = CPU,
    ) -> None:
        if quantize == FP8:
            self._build(config, fp8_model(config), AS_STORED, threads, kv_dtype, target, device)
            return
        if quantize != Q4_K_M.lower():
            self._build(config, RandomWeights(shapes_of(config)), WeightFormat.parse(quantize), threads, kv_dtype, target, device)
            return
        with tempfile.TemporaryDirectory(prefix="relaxserve-bench-") as folder:
            write_gguf(path := Path(folder) / "model.gguf", config, RandomWeights(shapes_of(config)), Q4_K_M)
            self._build(config, HeldWeights(GgufModel(path)), AS_STORED, threads, kv_dtype, target, device)

    def _build(
        self,
        config: ModelConfig,
        source: WeightSource,
        format: WeightFormat,
        threads: int | None,
        kv_dtype: DType,
        target: Target | None,
        device: str,
    ) -> None:
        self.config = config
        self.contexts = CONTEXTS if config.recurrence is None else (*CONTEXTS, LONG)
        bounds = StepBounds(max(PREFILLS), max(BATCHES), max(self.contexts) + PAGE_SIZE)
        self.module = build_step(config, dtypes_of(source), bounds, kv_dtype, format, forms=forms_of(source.tensors))
        self.options = Options(target or host())
        self.executable = compile_module(self.module, self.options)
        self.session = Session(self.executable, device_threads=threads, pinned=True, device_number=number_of(device))
        self.weights = bind_weights(self.session, self.executable, ENTRY, source)
        self.groups = groups_of(config, kv_dtype, bounds.max_context)
        pages = 1 + max(BATCHES) * (max(CONTEXTS) // PAGE_SIZE + 1)
        self.pages = min(pages, 1 + (4 << 30) // sum(group.bytes_per_page for group in self.groups if not group.keeps_states))
        counts = [1 + max(BATCHES) if group.keeps_states else self.pages for group in self.groups]
        counted = zip(counts, self.groups, strict=True)
        limits = tuple(GroupLimits(count, group.window, group.keeps_states, group.page_size) for count, group in counted)
        self.limits = StepLimits(config.vocab_size, bounds.max_context, bounds.max_tokens, bounds.max_seqs, limits)
        self.pool = KVPool(self.groups, counts, MemoryAccount(), self.session.device)
        fill(self.pool, self.session.device)

    def product_bytes(self, tokens: int) -> float:
        """Return the bytes of weights that a step with this many tokens reads."""
        read = [a for n, a in self.weights.items() if len(a.shape) > 1 and "embed_tokens" not in n]
        # Panels of experts have an extra first axis. So have those of heads in multi-head latent attention.
        count = 0 if self.config.mixture is None else self.config.mixture.num_experts
        experts = sum(a.nbytes for a in read if len(a.shape) == 4 and a.shape[0] == count)
        return sum(a.nbytes for a in read) - experts + experts * chosen_share(self.config, tokens)

    @property
    def product_elements(self) -> int:
        """Return the number of weights with which each token is multiplied, without the head."""
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
        return self.config.hidden_size * self.config.vocab_size

    def step(self, tokens: int, sequences: int, context: int) -> Any:
        """Return the arguments of a step with `tokens` new tokens, split among the sequences. After the step, each sequence has `context`
        tokens."""
        batch = step_of(self.limits, num_seqs=sequences, num_each=tokens // sequences, context=context)
        return *arguments_of(batch, self.groups), batch.logit_rows, *self.pool.arguments

    def run(self, args: Any) -> Any:
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
        """Return the work of all steps whose keys and values fit into the pages."""
        decodes = [Case(batch, batch, context) for context in CONTEXTS for batch in BATCHES if batch * context // PAGE_SIZE < self.pages]
        decodes += [Case(1, 1, context) for context in self.contexts if context not in CONTEXTS]
        return {case: self.work(case) for case in (*(Case(length, 1, length) for length in PREFILLS), *decodes)}

    def work(self, case: Case) -> Work:
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
        """Return the bytes of a token's keys and values."""
        return group.bytes_per_page / PAGE_SIZE


def attention_operations(config: ModelConfig) -> float:
    """Return the operations with which a layer's heads attend to a key."""
    value_size = config.head_dim if config.latent is None else config.latent.rank
    return 2.0 * config.num_heads * (config.head_dim + value_size)


def chosen_share(config: ModelConfig, tokens: int) -> float:
    """Return the average share of the experts that at least one of the tokens chooses, if choices are independent."""
    return 0.0 if config.mixture is None else 1 - (1 - config.mixture.num_chosen / config.mixture.num_experts) ** tokens


def fill(pool: KVPool, device: Device) -> None:
    """Fill the pages with data. Pages that were never written all map to one page of zeros, which would be read from the processor's
    cache."""
    for data, *scales in pool.tensors:
        rows = np.random.default_rng(0).standard_normal(data.shape[3:], np.float32)
        device.copy(data, np.broadcast_to(rows.astype(data.dtype), data.shape))
        for tensor in scales:
            device.copy(tensor, np.ones(tensor.shape, np.float32))


def measure(steps: Steps, works: Mapping[Case, Work], gauge: Gauge) -> list[Row]:
    rows: list[Row] = []
    for case, work in works.items():
        run = steps(*case)
        seconds, limits = gauge.beside(run, seconds=2.0 if case.is_prefill else 1.5, most=5 if case.is_prefill else 20)
        share = limits.share(*work, seconds)
        rows.append(Row(str(case), case.tokens / seconds, work.num_bytes, work.operations, share))
    return rows


def measure_beside(shape: str, options: argparse.Namespace, model: Model, gauge: Gauge) -> list[Quotients]:
    """Measure the steps of a model in turns with those of another shape, to which options that replace a part of a shape do not apply."""
    whole = {"synthetic": shape, "head_size": None, "kv_heads": None, "layers": None}
    other = model_of(argparse.Namespace(**{**vars(options), **whole}), options.device)
    of_other = other.works
    works = {case: (work, of_other[case]) for case, work in model.works.items() if case in of_other}
    found = quotients((model.prepared, other.prepared), works, gauge)
    other.session.close()
    return found


def lengthening(model: Model) -> float | None:
    """Return the time of decoding one token after the longest context over the time after the shortest, of steps that run in turn. Return
    None for models whose state grows with the context."""
    if model.config.recurrence is None:
        return None
    runs = [model.prepared(1, 1, context) for context in (CONTEXTS[0], LONG)]
    return float(np.median([long / short for short, long in (tuple(map(seconds_of, runs)) for _ in range(TURNS))]))


def growth(model: Model) -> list[Growth]:
    """Measure how many pages of the engine's cache pool a sequence holds in each group, while it grows token by token to four times the
    longest window. Return [] for models without windows."""
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


def measure_peer(name: str, subject: Subject, works: Mapping[Case, Work], gauge: Gauge, logits: NDArray[Any]) -> Compared:
    """Measure a peer. Shares are relative to the limit times computed from our own bytes and operations. `logits` are ours for the first
    case; raise SettingsError if the peer's logits differ too much."""
    first = next(iter(works))
    with at_work(name, subject) as steps:
        differs = _checked(name, float(np.linalg.norm(steps(*first)() - logits) / np.linalg.norm(logits)))
        return Compared(differs, measure(steps, works, gauge), version_of(name))


@dataclass(frozen=True, slots=True)
class CardSubject:
    """The model and the steps that all peers on a GPU run, and our results."""

    config: ModelConfig
    works: Mapping[Case, Work]
    logits: NDArray[Any]  # ours for the first case
    limits: Limits
    device: str
    python: str  # the interpreter that has the peers


def measure_on_card(names: Sequence[str], subject: CardSubject) -> Generator[tuple[str, Compared | SettingsError]]:
    """Measure peers on a GPU, each in all ways in which it is measured. Yield the result of each way, or the reason why there is none.
    Shares are relative to limits that were measured before. See `measure_peer`."""
    versions: dict[str, str] = {}
    for name in names:
        try:
            versions[name] = card_peer.check(name, card_peer.FORMAT, subject.config, subject.python)
        except SettingsError as error:
            yield name, error
    if not versions:
        return
    with tempfile.TemporaryDirectory(prefix="relaxserve-bench-") as folder:
        write_checkpoint(subject.config, Path(folder))
        for name, version in versions.items():
            for kind in CARD_PEERS[name].kinds:
                try:
                    yield kind, _measure_kind(kind, version, Path(folder), subject)
                except SettingsError as error:
                    yield kind, error


def _measure_kind(kind: str, version: str, folder: Path, subject: CardSubject) -> Compared:
    cases, limits = list(subject.works), subject.limits
    with card_peer.at_work(kind, folder, cases, subject.device, subject.python) as peer:
        differs = _checked(kind, peer.difference(cases[0], subject.logits))
        seconds = {case: peer.seconds(case) for case in cases}
    shares = {case: limits.share(*work, seconds[case]) for case, work in subject.works.items()}
    rows = [Row(str(case), case.tokens / seconds[case], *work, shares[case]) for case, work in subject.works.items()]
    return Compared(differs, rows, version)


def _found(compared: Compared | SettingsError) -> Compared:
    if isinstance(compared, SettingsError):
        raise compared
    return compared


def _checked(name: str, difference: float) -> float:
    if not difference < MOST_DIFFERENCE:
        raise SettingsError(f"the logits of {name} differ from ours by {difference:.0%}: it does not run the same model")
    return difference


def model_options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--synthetic", default="0.5b", help="shape of the model")
    parser.add_argument("--head-size", type=int, choices=HEAD_SIZES, help="in the place of the shape's own")
    parser.add_argument("--kv-heads", type=int, help="in the place of the shape's own: a divisor of its heads")
    parser.add_argument("--layers", type=int, help="in the place of the shape's own; of a mixture, otherwise as many as memory holds")
    parser.add_argument("--quantize", default="bf16", help=f"how weights are held; {FP8}, {Q4_K_M.lower()}: as in such files")
    parser.add_argument("--kv-dtype", default="bf16", choices=KV_DTYPES, help="type of the pages of keys and values")
    parser.add_argument("--target", default="host", help=f"instructions to use: host, {', '.join(NAMED)}")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    return parser


def config_of(options: argparse.Namespace) -> ModelConfig:
    def shape(layers: int | None) -> ModelConfig:
        return synthetic_config(options.synthetic, head_size=options.head_size, kv_heads=options.kv_heads, layers=layers)

    config = shape(options.layers)
    if config.mixture is None or options.layers is not None:
        return config
    return shape(most_layers(config, WeightFormat.parse(options.quantize), system_memory().available_bytes))


def most_layers(config: ModelConfig, format: WeightFormat, memory_bytes: int) -> int:
    """Return the number of layers whose weights fill half of the memory. The other half is for keys, values and the preparation of
    weights."""
    own = {name: prod(shape) for name, shape in shapes_of(config).items()}
    layer = sum(count for name, count in own.items() if name.startswith("model.layers.0."))
    others = 2 * sum(count for name, count in own.items() if not name.startswith("model.layers."))
    bits = format.bits + (16 / format.group if format.group else 0)
    return max(1, min(config.num_layers, int((memory_bytes / 2 - others) / (layer * bits / 8))))


def model_of(options: argparse.Namespace, device: str = CPU) -> Model:
    config, kv_dtype, target = config_of(options), DType(options.kv_dtype), target_of(options, device)
    return Model(config, options.quantize, options.threads, kv_dtype=kv_dtype, target=target, device=device)


def target_of(options: argparse.Namespace, device: str) -> Target:
    return get(options.target) if device == CPU else of_gpu(options.target, capability_of(number_of(device)))


def gauge_of(options: argparse.Namespace, device: str) -> Gauge:
    target = target_of(options, device)
    return Gauge(multiplied(options), options.threads, target) if device == CPU else CardGauge(target, number_of(device))


def multiplied(options: argparse.Namespace) -> str:
    """Return the format of weights whose products have the same peak."""
    held: str = options.quantize
    return {Q4_K_M.lower(): "int4", FP8: "bf16"}.get(held, held)


def main(argv: list[str] | None = None) -> None:
    parser = model_options(__doc__)
    names = list(dict.fromkeys((*PEERS, *CARD_PEERS)))
    parser.add_argument("--peer", action="append", default=[], choices=names, help="another engine beside it, where installed; repeatable")
    parser.add_argument(
        "--beside", metavar="SHAPE", help="also divide each share by that of another shape, whose steps run in turns with it"
    )
    parser.add_argument("--device", default=CPU, help="cpu, cuda, or one of several GPUs as cuda:1")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has the peers on a GPU; default: this one")
    options = parser.parse_args(argv)
    shape: str | None = options.beside
    if shape is not None:
        check_shape(shape, "--beside")
    for name in options.peer:
        if options.device == CPU:
            check(name, options.quantize)
        else:
            card_peer.check(name, options.quantize, config_of(options), options.peer_python)
    gauge = gauge_of(options, options.device)
    model = model_of(options, options.device)
    works = model.works
    rows, limits, longer = measure(model.prepared, works, gauge), gauge.limits, lengthening(model)
    grown = growth(model)
    divided = [] if shape is None else measure_beside(shape, options, model, gauge)
    logits = np.array(model.session.download(model.prepared(*next(iter(works)))()))
    subject = Subject(model.config, RandomWeights(shapes_of(model.config)), options.quantize, model.session.num_threads)
    model.session.close()
    del model  # free our model's memory before peers load their weights
    if options.device == CPU:
        peers = {name: measure_peer(name, subject, works, gauge, logits) for name in options.peer}
    else:
        on_card = CardSubject(subject.config, works, logits, limits, options.device, options.peer_python)
        peers = {kind: _found(compared) for kind, compared in measure_on_card(options.peer, on_card)}
    if options.json:
        compared = {name: asdict(peer) for name, peer in peers.items()}
        found = {"limits": asdict(limits), "rows": [asdict(r) for r in rows], "peers": compared}
        found |= {"growth": [asdict(group) for group in grown]} if grown else {}
        found |= {"beside": {"shape": shape, "rows": [asdict(row) for row in divided]}} if shape is not None else {}
        print(json.dumps(found if longer is None else {**found, "lengthening": longer}, indent=1))
        return
    title = f"{options.synthetic} {options.quantize}: {limits.bytes_per_s / 1e9:.1f} GB/s, {limits.flops / 1e9:.0f} GFLOP/s"
    Console().print(table_of(title, rows, peers))
    if shape is not None:
        Console().print(beside.table_of(f"{options.synthetic} in turns with {shape}", shape, divided))
    for group in grown:
        print(f"a sequence of one, two, three and four windows holds {group.pages} pages of the group with window {group.window}")
    if longer is not None:
        print(f"decoding after {LONG} tokens takes {longer:.2f} times as long as after {CONTEXTS[0]}")


def table_of(title: str, rows: list[Row], peers: Mapping[str, Compared]) -> Table:
    """Make a table with a column per peer: the peer's tokens per second, and in brackets its share of the limit, which was measured in the
    same seconds."""
    apart = ", ".join(f"{name} differ by {peer.difference:.1%}" for name, peer in peers.items())
    table = Table(
        "", "tokens/s", "MB read", "GFLOP", "share of the limit", *peers, title=title, caption=f"Logits of {apart}" if apart else None
    )
    for number, r in enumerate(rows):
        beside = [f"{(p := peer.rows[number]).tokens_per_s:.1f} ({p.share:.2f})" for peer in peers.values()]
        table.add_row(r.name, f"{r.tokens_per_s:.1f}", f"{r.num_bytes / 1e6:.0f}", f"{r.operations / 1e9:.1f}", f"{r.share:.2f}", *beside)
    return table


if __name__ == "__main__":
    main()
