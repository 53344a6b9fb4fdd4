"""`relaxserve bench kernels`: for every kernel of a model's step, its time and the time that this machine's limits allow. The kernels of a
step are sorted by the difference of these times, the largest first.

The limit time is the larger of bytes / bandwidth and operations / peak. Both are counted in the loop nests before scheduling: the bytes of
all operands, once each, and two operations per term of a sum, except for sums that only some rows need. A buffer that is read at indices
from memory counts at most as many bytes as the largest other operand. All buffers that a kernel changes in place count together as many
bytes as the largest other operand. Only a share of the weights of experts counts: the share that a step reads on average if tokens choose
experts independently. Attention reads the keys and values of each sequence once per step, and multiplies with the keys and values to which
a token attends. Operands in a cache are read faster than the limit, so a share may exceed one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from math import inf, prod
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from compiler.backends.cpu.pipeline import pipeline
from compiler.frontend.config import ModelConfig
from compiler.frontend.decoder import ENTRY
from compiler.idioms.product import AnyFold, outermost_folds
from compiler.ir.dims import Dim, DimVar
from compiler.ir.graph.atoms import ScalarValue
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.values import CallTir
from compiler.ir.loops.attention import Attention
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import Fn, ReduceFn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Apply, GroupedContraction, Reduce, Scalar
from compiler.ir.loops.statements import For, Let, Stmt
from compiler.ir.loops.visit import loads, map_scalar, scalars_of, subscalars, substatements, walk_stmts
from compiler.ir.types import TensorType, Type
from compiler.machine.target import get
from deploy.bench.compute.model import Model, attention_operations, chosen_share, model_of, model_options, multiplied
from deploy.bench.limits import Gauge

STEPS = ((1, 1, 128), (1, 1, 4096), (32, 32, 128), (512, 1, 512))  # (tokens, sequences, context)
RUNS = 5  # runs of each step; the shortest time of a kernel in these runs counts
Dims = Mapping[DimVar, int]


@dataclass(slots=True)
class Work:
    """The work of all launches of a kernel in one step."""

    num_bytes: float = 0.0
    operations: float = 0.0
    multiplies_weights: bool = False  # whether the peak of the unit that multiplies weights is its limit; otherwise that of f32 is


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one kernel in one step."""

    step: str  # such as "decode 1 x 128"
    kernel: str  # name of the kernel
    launches: int  # how often the step launches it
    seconds: float  # time of all these launches
    num_bytes: float  # bytes of all these launches
    operations: float  # operations of all these launches
    share: float  # limit time divided by measured time

    @property
    def lost_s(self) -> float:
        """The measured time minus the limit time."""
        return self.seconds * (1 - self.share)


def measure(model: Model, products: Gauge, others: Gauge) -> list[Row]:
    """Measure all kernels of the steps of STEPS. Return them in the order of the steps, and the kernels of a step by `lost_s`, the largest
    first. `products` measures the peak of the unit that multiplies weights, `others` the peak of f32."""
    rows: list[Row] = []
    for tokens, sequences, context in STEPS:
        args = model.step(tokens, sequences, context)
        work = work_of(model, args)
        seconds, count = _profiled(model, args, (products, others))
        name = f"decode {sequences} x {context}" if tokens == sequences else f"prefill {tokens}"
        for kernel, took in seconds.items():
            w = work.get(kernel, Work())
            limits = (products if w.multiplies_weights else others).limits
            share = limits.share(w.num_bytes, w.operations, took)
            rows.append(Row(name, kernel, count[kernel], took, w.num_bytes, w.operations, share))
    order = {row.step: number for number, row in enumerate(reversed(rows))}
    return sorted(rows, key=lambda row: (-order[row.step], -row.lost_s))


def _profiled(model: Model, args: Any, gauges: tuple[Gauge, ...]) -> tuple[dict[str, float], dict[str, int]]:
    """Return the shortest time of each kernel in several runs, and how often a run launches it. Each phase of a kernel counts as a launch.
    After each run, the gauges take a sample. A first run is not timed."""
    model.run(args)
    best: dict[str, float] = {}
    count: dict[str, int] = {}
    for _ in range(RUNS):
        with model.session.profile() as profile:
            model.run(args)
        best = {kernel: min(seconds, best.get(kernel, inf)) for kernel, seconds in profile.seconds.items()}
        count = profile.count
        for gauge in gauges:
            gauge.sample()
    return best, count


# --- counting bytes and operations --------------------------------------------------------------------------------------


def work_of(model: Model, args: Any) -> dict[str, Work]:
    """Return the work of each kernel in a step with these arguments, by the kernel's name."""
    module = pipeline(model.options.target).until("lift_weights")(model.module)
    step = module.graph(ENTRY)
    dims: dict[DimVar, int] = {}
    for param, value in zip(step.params, args, strict=False):
        if isinstance(value, np.ndarray) and isinstance(param.type, TensorType) and param.type.shape is not None:
            dims |= {d.var: n for d, n in zip(param.type.shape, value.shape, strict=True) if d.var is not None}
    weights = {p for p in step.params[len(args) :] if isinstance(p.type, TensorType) and p.type.ndim != 1}
    found: dict[str, Work] = {}
    for binding in step.body.bindings:
        call = binding.value
        if not isinstance(call, CallTir):
            continue
        prim, work = module.prim(call.func), found.setdefault(call.func, Work())
        env = _bound(prim, call, dims)
        if node := next((stmt for stmt in walk_stmts(prim.body) if isinstance(stmt, Attention)), None):
            num_bytes, operations = _attention(model, node, args)
        else:
            num_bytes, operations = sum(_bytes(prim, env, model.config, len(args[0]))), _operations(prim.body, env)
        work.num_bytes += num_bytes
        work.operations += operations
        work.multiplies_weights |= operations > 0 and any(a in weights for a in call.args)
    return found


def _attention(model: Model, node: Attention, args: Any) -> tuple[float, float]:
    """Return the bytes and operations of attention in one layer. Each token attends to the positions up to its own; with a window, only to
    the last `window` of these positions."""
    config, positions, seq_ids = model.config, args[1], args[2 + sum(not group.keeps_states for group in model.groups)]
    group = next(group for group in model.groups if not group.keeps_states and (group.window or 0) == node.window)
    seen = np.minimum(positions + 1, node.window or positions.max() + 1)
    read = sum(int((positions[seq_ids == s] + 1).max() - (positions - seen + 1)[seq_ids == s].min()) for s in np.unique(seq_ids))
    return model.kv_bytes(group) / len(group.layers) * read, attention_operations(config) * int(seen.sum())


def _bound(prim: PrimFunc, call: CallTir, dims: Dims) -> dict[DimVar, int]:
    """Return the values of the loop nest's variables in this call."""
    env: dict[DimVar, int] = {}

    def shaped(buffer: Buffer, type_: Type) -> None:
        assert isinstance(type_, TensorType) and type_.shape is not None
        env.update({b.var: d.evaluate(dims) for b, d in zip(buffer.shape, type_.shape, strict=True) if b.var is not None})

    for param, arg in zip(prim.params, call.args, strict=False):
        if isinstance(param, Buffer):
            shaped(param, type_of(arg))
        elif isinstance(param, DimVar) and isinstance(arg, ScalarValue) and isinstance(arg.value, Dim):
            env[param] = arg.value.evaluate(dims)
    for buffer, type_ in zip(prim.outputs, call.out, strict=True):
        shaped(buffer, type_)
    return env


def _bytes(prim: PrimFunc, env: Dims, config: ModelConfig, tokens: int) -> Iterator[float]:
    """Yield the bytes that count for each operand of a kernel. The beginning of this file says how they are counted."""
    sizes = {b: float(b.dtype.num_bytes * prod(d.evaluate(env) for d in b.shape)) for b in prim.buffers}
    changed = {number for pair in prim.attrs.get("inplace", ()) for number in pair}
    plain = [b for number, b in enumerate(prim.buffers) if number not in changed]
    picked, experts = _picked(prim), {b for b in _picked(prim) if _is_per_expert(b, config)}
    for buffer in experts:
        yield sizes[buffer] * chosen_share(config, tokens)
    plain = [b for b in plain if b not in experts]
    most = max((sizes[b] for b in plain if b not in picked), default=0.0)
    for buffer in plain:
        yield min(sizes[buffer], most) if buffer in picked else sizes[buffer]
    if changed:  # count as many bytes as the largest other operand has, since only that much of the pages is written
        yield most


def _is_per_expert(buffer: Buffer, config: ModelConfig) -> bool:
    """Return whether a buffer is a tensor of weights with an axis of experts."""
    return config.mixture is not None and len(buffer.shape) > 2 and buffer.shape[0] == Dim.of(config.mixture.num_experts)


def _picked(prim: PrimFunc) -> set[Buffer]:
    """Return the buffers that are read at indices loaded from memory."""
    read = {stmt.var for stmt in walk_stmts(prim.body) if isinstance(stmt, Let) and any(loads(stmt.value))}
    return {load.buffer for load in loads(prim.body) if any(v in read for index in load.indices for v in index.vars())}


def _operations(stmt: Stmt, env: Dims) -> float:
    """Count the operations in sums. If an extent depends on an outer loop, its value in the first iteration of that loop counts."""
    if isinstance(stmt, For):
        return stmt.extent.evaluate(env) * _operations(stmt.body, {**env, stmt.var: 0})
    if isinstance(stmt, Let):
        env = {**env, stmt.var: 0}
    own = sum(_points(fold, env) for scalar in scalars_of(stmt) for fold in outermost_folds(map_scalar(scalar, _certain)))
    return own + sum(_operations(inner, env) for inner in substatements(stmt))


def _certain(scalar: Scalar) -> Scalar:
    """Replace a select by its second branch. The first branch is work that only some rows need, which is not counted."""
    return scalar.args[2] if isinstance(scalar, Apply) and scalar.fn is Fn.SELECT else scalar


def _points(fold: AnyFold, env: Dims) -> float:
    """Count the operations of a fold and of the folds within it: two for each term of a sum, none for other folds such as maxima. Of a
    product whose second plane only some rows need, only the first dot counts."""
    env = {**env, **{var: 0 for var, _ in fold.axes}}
    points = prod(extent.evaluate(env) for _, extent in fold.axes)
    own = 0.0 if isinstance(fold, Reduce) and fold.fn is not ReduceFn.SUM else 2.0
    certain = fold.dots[:1] if isinstance(fold, GroupedContraction) and fold.two_planes is not None else subscalars(fold)
    return points * (own + sum(_points(inner, env) for scalar in certain for inner in outermost_folds(scalar)))


# --- the command -------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    options = model_options("relaxserve bench kernels", __doc__).parse_args(argv)
    target = get(options.target)
    products, others = (Gauge(held, options.threads, target) for held in (multiplied(options), "f32"))
    rows = measure(model_of(options), products, others)
    limits = {"weights": asdict(products.limits), "others": asdict(others.limits)}
    if options.json:
        print(json.dumps({"limits": limits, "rows": [asdict(row) for row in rows]}, indent=1))
        return
    units = f"{products.limits.flops / 1e9:.0f} GFLOP/s in products with weights, {others.limits.flops / 1e9:.0f} in f32"
    console = Console()
    console.print(f"{options.synthetic} {options.quantize}: {others.limits.bytes_per_s / 1e9:.1f} GB/s, {units}")
    for step, some in groupby(rows, key=lambda row: row.step):
        table = Table("kernel", "launches", "ms", "MB", "GFLOP", "share of the limit", title=step)
        for r in some:
            figures = (f"{r.seconds * 1e3:.2f}", f"{r.num_bytes / 1e6:.2f}", f"{r.operations / 1e9:.2f}", f"{r.share:.2f}")
            table.add_row(r.kernel, str(r.launches), *figures)
        console.print(table)


if __name__ == "__main__":
    main()
