"""Measure the limits of this machine, with which benchmarks compare their figures: memory bandwidth and multiply rate, with as many threads
as the measured model uses."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from compiler.driver import Options, compile_module
from compiler.frontend.layers.nn import WeightFormat
from compiler.ir.dtypes import DType
from compiler.ir.text.parser import parse
from compiler.ir.tiles import Array, Operand, TileOp, stated_fields, tile_op
from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.amx import AmxBf16, AmxConfigure, AmxI8ByU8
from compiler.machine.intrinsics.base import Features, Intrinsic
from compiler.machine.intrinsics.product import MatrixUnitOp, ProductOp
from compiler.machine.products import product_tiles
from compiler.machine.target import Target, host
from runtime.device.cpu.memory import host_buffer
from runtime.session import Session

READ_BYTES = 512 << 20  # bytes that one measurement of the bandwidth reads; caches hold only a small share of them
# A measurement of a limit lasts as long as the step that is compared with the limit, within these bounds.
SHORTEST_S, LONGEST_S = 0.02, 1.0
_BLOCK = 1 << 16  # elements per work item

# Add all numbers of `x`. Each work item reads one row of `x`, at `streams` places at a time.
_READ = """
func main(x: f32[n, 65536]) -> f32[n] {{
  y: f32[n] = call_tir @read(x) -> f32[n]
  return y
}}
prim read(x: f32[n, 65536], out y: f32[n]) attrs {{schedule="none"}} {{
  for parallel p in n {{
    alloc local a: f32[{streams}, 16] {{
      for unroll s in {streams} {{ for vector l in 16 {{ a[s, l] = 0.0 }} }}
      for i in {steps} {{
        for unroll s in {streams} {{
          for vector l in 16 {{ a[s, l] = a[s, l] + x[p, {span}*s + 16*i + l] }}
        }}
      }}
      for unroll s in {streams} {{ for vector l in 16 {{ a[0, l] = a[0, l] + a[s, l] }} }}
      y[p] = a[0, 0]
    }}
  }}
}}
"""

# Multiply and add in registers only. Twelve accumulators per core hide the latency of a multiply-add; with more, some machines run out of
# registers.
_SUMS = 12
_PEAK = """
func main(x: f32[{lanes}], steps: shape[n]) -> f32[64] {{
  y: f32[64] = call_tir @peak(x, dim(n)) -> f32[64]
  return y
}}
prim peak(x: f32[{lanes}], n: dim, out y: f32[64]) attrs {{schedule="none"}} {{
  for parallel p in 64 {{
    alloc local a: f32[{sums}, {lanes}] {{
      for unroll s in {sums} {{ for vector l in {lanes} {{ a[s, l] = x[l] }} }}
      for i in n {{
        for unroll s in {sums} {{ for vector l in {lanes} {{ a[s, l] = fma(a[s, l], x[l], x[l]) }} }}
      }}
      for unroll s in {sums} {{ for vector l in {lanes} {{ a[0, l] = a[0, l] + a[s, l] }} }}
      y[p] = a[0, 0]
    }}
  }}
}}
"""


_TIMES = 50  # products of the same operands on a matrix unit, before the accumulators are stored
# Multiply the same two small operands again and again with the tile of a product.
_TILE_PEAK = """
func main(a: {left}[{rows}, 256], b: {right}[256, {columns}], steps: shape[n]) -> {sum}[64] {{
  y: {sum}[64] = call_tir @peak(a, b, dim(n)) -> {sum}[64]
  return y
}}
prim peak(a: {left}[{rows}, 256], b: {right}[256, {columns}], n: dim, out y: {sum}[64]) attrs {{schedule="none"}} {{
  for parallel p in 64 {{
    alloc local c: {sum}[{vectors}, 16] {{
      for unroll s in {vectors} {{ for vector l in 16 {{ c[s, l] = {zero} }} }}
      {configure}
      for i in n {{ {product} }}
      for unroll s in {vectors} {{ for vector l in 16 {{ c[0, l] = c[0, l] + c[s, l] }} }}
      y[p] = c[0, 0]
    }}
  }}
}}
"""


@tile_op
class UnitPeak(Intrinsic):
    """unit_peak(c, a, b) dims(k, stride, times): multiply the same operands `times` times on AMX, and only then store the accumulators.
    The operands are in the first-level cache, so no product is faster."""

    name: ClassVar[str] = "unit_peak"
    needs: ClassVar[Features] = AmxConfigure.needs
    bits: int
    rows: int
    columns: int

    @property
    def unit(self) -> AmxBf16 | AmxI8ByU8:
        return (AmxBf16 if self.bits == 16 else AmxI8ByU8)(self.rows, self.columns, fresh=True, cached_panel=True)

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.unit.operands

    @property
    def dims(self) -> tuple[str, ...]:
        return (*self.unit.dims, "times")

    def problems(self) -> Iterator[str]:
        return self.unit.problems()

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        self.unit.meaning(arrays, dims[:2])
        arrays[0][...] *= dims[2]

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        (c, a, b), (k, stride, times) = pointers, dims
        with self.unit.accumulators(code, c), code.loop("0", str(times)):
            self.unit.steps(code, *self.unit.rows_at(code, a, stride), b, k)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of this machine: no step reads or multiplies faster."""

    bytes_per_s: float  # bandwidth of the memory
    flops: float  # operations per second of the unit that multiplies weights; a multiply-add counts as two

    def seconds(self, num_bytes: float, operations: float) -> float:
        """Return the shortest possible time of a step that reads so many bytes and computes so many operations."""
        return max(num_bytes / self.bytes_per_s, operations / self.flops)

    def share(self, num_bytes: float, operations: float, measured_s: float) -> float:
        """Return the share of the limit that was reached: the shortest possible time over the measured time."""
        return self.seconds(num_bytes, operations) / measured_s


class Gauge:
    """Measures the memory bandwidth and the multiply rate by kernels that only read memory or only multiply, and keeps the best results.
    The kernels run in turns with the steps that are compared with them, since both limits of a shared machine change from second to second.
    `held` is the format of the weights, which determines the unit that multiplies."""

    _read_bytes: float = READ_BYTES
    _operations: float

    def __init__(self, held: str, threads: int | None = None, target: Target | None = None) -> None:
        """Compile the kernels for `target` (None: this machine), and start `threads` threads (None: as many as a model would use), each
        pinned to a core. Do this before any other session starts, while no threads are pinned to these cores."""
        self._data = host_buffer(READ_BYTES).view(np.float32).reshape(-1, _BLOCK)
        self._data[...] = 1.0
        spans = {streams: _BLOCK // streams for streams in (1, 2, 4)}
        self._readers = [_session(_READ.format(streams=n, span=span, steps=span // 16), threads, target) for n, span in spans.items()]
        text, self._steps, self._operations, self._args = multiplying(held, target or host())
        self._multiplier = _session(text, threads, target)
        self.forget()

    def forget(self) -> None:
        """Forget all samples so far."""
        self._read_s = self._multiply_s = math.inf

    def sample(self, span_s: float = SHORTEST_S) -> None:
        """Measure both limits, each as a mean over `span_s`, and keep the results that are better than those of the samples before."""
        self._read_s = min(self._read_s, *(mean_seconds(lambda r=r: r.call("main", self._data), span_s) for r in self._readers))
        self._multiply_s = min(self._multiply_s, mean_seconds(lambda: self._multiplier.call("main", *self._args, (self._steps,)), span_s))

    @property
    def limits(self) -> Limits:
        """The best limits of all samples since `forget` was called."""
        return Limits(self._read_bytes / self._read_s, self._operations / self._multiply_s)

    def beside(self, run: Callable[[], object], *, seconds: float, most: int) -> tuple[float, Limits]:
        """Forget earlier samples. Return the shortest time of several runs, and the best limits measured between them. The number of runs
        is at most `most`, and `seconds` limits it as in `turns`. Each measurement of a limit lasts as long as the run before it, but at
        least SHORTEST_S and at most LONGEST_S. A core's other hyper-thread may run another virtual machine, which pauses for milliseconds
        at a time: a measurement of one millisecond within such a pause would find a peak that no step reaches."""
        self.forget()
        best = math.inf
        for (passed,) in turns([run], seconds, most):
            best = min(best, passed)
            self.sample(min(max(passed, SHORTEST_S), LONGEST_S))
        return best, self.limits


class CardGauge(Gauge):
    """Measures the limits of a GPU by copies and products. The bandwidth counts the bytes that a copy reads and those that it writes."""

    def __init__(self, target: Target, number: int, *, copied_bytes: int = 4 << 30, side: int = 8192) -> None:
        """Compile the product for `target` and open GPU `number`. A copy copies `copied_bytes` bytes. `side` is the number of rows, of
        columns and of elements along k of the product."""
        operands = f"x: bf16[n, {side}], w: bf16[{side}, {side}]"
        text = f'func main({operands}) -> object where n in 0..{side} {{ dataflow {{ y = linear(x, w, out_dtype="f32") }} return y }}'
        self._session = Session(compile_module(parse(text), Options(target)), device_number=number)
        device, ones = self._session.device, np.ones((side, side), DType.BF16.numpy)
        self._one, self._other = (device.empty((copied_bytes // 4,), np.dtype(np.float32)) for _ in range(2))
        self._word = device.empty((1,), np.dtype(np.float32))
        self._factors = [device.upload(ones) for _ in range(2)]
        self._read_bytes, self._operations = 2 * copied_bytes, 2.0 * side**3
        self.forget()

    def sample(self, span_s: float = SHORTEST_S) -> None:
        self._read_s = min(self._read_s, mean_seconds(self._copy, span_s))
        self._multiply_s = min(self._multiply_s, mean_seconds(self._multiply, span_s))

    def _copy(self) -> None:
        self._session.device.copy(self._other, self._one)
        self._wait()

    def _multiply(self) -> None:
        self._session.call("main", *self._factors, views=True)
        self._wait()

    def _wait(self) -> None:
        """Wait until the card has done its work, by a download."""
        self._session.device.download(self._word)


def _session(text: str, threads: int | None, target: Target | None) -> Session:
    return Session(compile_module(parse(text), Options(target or host())), device_threads=threads, pinned=True)


def seconds_of(run: Callable[[], object]) -> float:
    """Run a function and return how long that took."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def turns(runs: Sequence[Callable[[], object]], seconds: float, most: int) -> Iterator[tuple[float, ...]]:
    """In each turn, time one call of each of `runs`, and yield the times in the order of `runs`. There are at most `most` turns. After
    three turns, end once `seconds` have passed. Call each once before the first turn without timing it, because the first call touches
    memory that is not mapped yet. Every second turn calls `runs` in reverse order, because a step takes about one percent less time if it
    comes first in its turn."""
    for run in runs:
        run()
    end = time.perf_counter() + seconds
    for number in range(most):
        step = -1 if number % 2 else 1
        yield tuple([seconds_of(run) for run in runs[::step]][::step])
        if number >= 2 and time.perf_counter() > end:
            return


def mean_seconds(run: Callable[[], object], span_s: float) -> float:
    """Run a function again and again until `span_s` has passed, at least once. Return the mean time of a run."""
    runs, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < span_s:
        run()
        runs += 1
    return passed / runs


def multiplying(held: str, target: Target) -> tuple[str, int, float, tuple[Any, ...]]:
    """Return a program that multiplies on the unit that `target` uses for weights in the format `held`, its number of steps, the number of
    operations in these steps, and its operands. If products with this format have no tile on the target, the program multiplies and adds
    vectors of f32."""
    format, tiles = WeightFormat.parse(held), product_tiles(target)
    if format.bits == 16 and tiles.pairs is not None:
        return _tiles(tiles.pairs.op)
    if tiles.widened is not None and tiles.widened.format.bits == format.bits and tiles.widened.widens(1 << 16, format.group):
        return _tiles(tiles.widened.op)
    tile = next((t for t in tiles.integers if t.format.bits == format.bits and format.group % t.depth == 0), None)
    if tile is not None:
        # If the tile's instruction also accepts 8-bit weights, measure it with these, because 4-bit weights would have to be unpacked.
        fastest = next(t for t in tiles.integers if type(t.op) is type(tile.op))
        planes = 2 if tile.rows is DType.I8 else 1
        return _tiles(fastest.product(planes * fastest.op.rows))
    steps, lanes = 20_000, target.lanes(4)
    return _PEAK.format(sums=_SUMS, lanes=lanes), steps, 2.0 * 64 * steps * _SUMS * lanes, (np.full(lanes, 0.5, np.float32),)


def _tiles(op: ProductOp) -> tuple[str, int, float, tuple[Any, ...]]:
    """Return what `multiplying` returns, for the tile of a product. On a matrix unit, `UnitPeak` takes the place of the tile."""
    left, right, total = op.row_dtype, op.panel_dtype, op.accumulator
    peak, times = (op, ()) if not isinstance(op, MatrixUnitOp) else (UnitPeak(left.num_bytes * 8, op.rows, op.columns), (_TIMES,))
    text = _TILE_PEAK.format(
        product=_text(peak, "c[0, 0], a[0, 0], b[0, 0]", f"dims({', '.join(map(str, (256, 256, *times)))})"),
        configure=_text(op.configuration) if isinstance(op, MatrixUnitOp) else "",
        rows=op.rows,
        columns=op.columns,
        vectors=op.rows * op.columns // 16,
        left=left,
        right=right,
        sum=total,
        zero="0.0" if total is DType.F32 else "0:i32",
    )
    steps, size = 100 // math.prod(times), op.rows * op.columns * 256 * math.prod(times)
    return text, steps, 2.0 * 64 * steps * size, (_ones((op.rows, 256), left), _ones((256, op.columns), right))


def _ones(shape: tuple[int, int], dtype: DType) -> NDArray[Any]:
    """Return ones that begin at a cache line, as the operands of a model do: a load that crosses lines takes twice as long."""
    made = host_buffer(math.prod(shape) * dtype.num_bytes).view(dtype.numpy).reshape(shape)
    made[...] = 1
    return made


def _text(op: TileOp, operands: str = "", dims: str = "") -> str:
    """Return the statement of a program in text form that executes a tile."""
    fields = ", ".join(f"{name}={json.dumps(value)}" for name, value in stated_fields(op).items())
    return f'tile "{op.name}"({operands}) {dims} {{{fields}}}'
