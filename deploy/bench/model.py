"""`relaxserve bench model`: prefill and decode of one model, each beside the time that this machine's limits allow.

Limit time is the larger of bytes / bandwidth and operations / peak. Bytes are the weights a step reads and the keys and values it attends
to; operations are two per weight and token, and four per key, head and element.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from compiler.bind import bind_weights
from compiler.driver import Options, compile_module
from compiler.frontend.config import ModelConfig
from compiler.frontend.decoder import ENTRY, StepBounds, build_step
from compiler.frontend.models.registry import CAUSAL
from compiler.frontend.nn import WeightFormat
from compiler.ir.dtypes import DType
from compiler.target import NAMED, Target, get, host
from deploy.bench.limits import Gauge
from deploy.bench.synthetic import RandomWeights, dtypes_of, shapes_of, synthetic_config
from runtime.kv_pool import KV_DTYPES, KVLayout, KVPool
from runtime.memory import MemoryAccount
from runtime.session import Session
from runtime.step import PAGE_SIZE

PREFILLS = (128, 512, 2048)
BATCHES = (1, 4, 8, 16, 32)
CONTEXTS = (128, 4096)


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    tokens_per_s: float
    num_bytes: float
    operations: float
    share: float  # of the limit


class Model:
    """A synthetic model, prepared."""

    def __init__(
        self, config: ModelConfig, quantize: str, threads: int | None, *, kv_dtype: DType = DType.F32, target: Target | None = None
    ) -> None:
        self.config = config
        bounds = StepBounds(max(PREFILLS), max(BATCHES), max(CONTEXTS) + PAGE_SIZE)
        self.module = build_step(config, CAUSAL[config.family], dtypes_of(config), bounds, kv_dtype, WeightFormat.parse(quantize))
        self.options = Options(target or host())
        self.executable = compile_module(self.module, self.options)
        self.session = Session(self.executable, device_threads=threads, pinned=True)
        self.weights = bind_weights(self.session, self.executable, ENTRY, RandomWeights(shapes_of(config)))
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, str(kv_dtype))
        pages = 1 + max(BATCHES) * (max(CONTEXTS) // PAGE_SIZE + 1)
        self.kv_bytes = layout.bytes_per_page / PAGE_SIZE
        self.pages = min(pages, 1 + (4 << 30) // layout.bytes_per_page)
        self.pool = KVPool(layout, self.pages, MemoryAccount())

    @property
    def product_bytes(self) -> int:
        """Weights that every step reads whole."""
        return sum(a.nbytes for n, a in self.weights.items() if a.ndim > 1 and "embed_tokens" not in n)

    @property
    def product_elements(self) -> int:
        c = self.config
        attention = c.hidden_size * (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size) + c.hidden_size * c.vocab_size

    def step(self, tokens: int, sequences: int, context: int) -> Any:
        """Arguments of a step in which each sequence has so many new tokens and so much context at the end."""
        each = tokens // sequences
        num_pages = -(-context // PAGE_SIZE)
        tables = (np.arange(sequences * num_pages) % (self.pages - 1) + 1).astype(np.int32).reshape(sequences, num_pages)
        positions = np.tile(np.arange(context - each, context), sequences).astype(np.int32)
        seq_ids = np.repeat(np.arange(sequences), each).astype(np.int32)
        slots = tables[seq_ids, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        rows = (np.arange(sequences) * each + each - 1).astype(np.int32)
        ids = np.arange(tokens, dtype=np.int32) % self.config.vocab_size
        return ids, positions, slots, seq_ids, tables, rows, *self.pool.arguments

    def run(self, args: Any) -> Any:
        return self.session.call(ENTRY, *args, views=True)


def measure(model: Model, gauge: Gauge) -> list[Row]:
    rows: list[Row] = []
    c = model.config
    head_flops = 4 * c.num_heads * c.head_dim * c.num_layers
    for length in PREFILLS:
        args = model.step(length, 1, length)
        seconds, limits = gauge.beside(lambda a=args: model.run(a), seconds=2.0, most=5)
        operations = 2.0 * model.product_elements * length + head_flops * length * length / 2
        num_bytes = model.product_bytes + model.kv_bytes * length
        rows.append(Row(f"prefill {length}", length / seconds, num_bytes, operations, limits.seconds(num_bytes, operations) / seconds))
    for context in CONTEXTS:
        for batch in BATCHES:
            if batch * context // PAGE_SIZE >= model.pages:
                continue
            args = model.step(batch, batch, context)
            seconds, limits = gauge.beside(lambda a=args: model.run(a), seconds=1.5, most=20)
            operations = 2.0 * model.product_elements * batch + head_flops * batch * context
            num_bytes = model.product_bytes + model.kv_bytes * batch * context
            share = limits.seconds(num_bytes, operations) / seconds
            rows.append(Row(f"decode {batch} x {context}", batch / seconds, num_bytes, operations, share))
    return rows


def model_options(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--synthetic", default="0.5b", help="shape of the model")
    parser.add_argument("--quantize", default="bf16", help="how weights are held")
    parser.add_argument("--kv-dtype", default="f32", choices=KV_DTYPES, help="type of the pages of keys and values")
    parser.add_argument("--target", default="host", help=f"instructions to use: host, {', '.join(NAMED)}")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    return parser


def model_of(options: argparse.Namespace) -> Model:
    config = synthetic_config(options.synthetic)
    return Model(config, options.quantize, options.threads, kv_dtype=DType(options.kv_dtype), target=get(options.target))


def main(argv: list[str] | None = None) -> None:
    options = model_options(__doc__).parse_args(argv)
    gauge = Gauge(options.quantize, options.threads, get(options.target))
    model = model_of(options)
    rows, limits = measure(model, gauge), gauge.limits
    if options.json:
        print(json.dumps({"limits": asdict(limits), "rows": [asdict(r) for r in rows]}, indent=1))
        return
    title = f"{options.synthetic} {options.quantize}: {limits.bytes_per_s / 1e9:.1f} GB/s, {limits.flops / 1e9:.0f} GFLOP/s"
    table = Table("", "tokens/s", "MB read", "GFLOP", "share of the limit", title=title)
    for r in rows:
        table.add_row(r.name, f"{r.tokens_per_s:.1f}", f"{r.num_bytes / 1e6:.0f}", f"{r.operations / 1e9:.1f}", f"{r.share:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
