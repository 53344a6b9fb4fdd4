"""Small models with known logits (from tests/golden/make_models.py). Each model is interpreted, or compiled once, and its steps are called
as the engine calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.bind import bind_weights
from compiler.frontend.cache_groups import groups_of
from compiler.frontend.config import ModelConfig
from compiler.frontend.decoder import ENTRY, PART, StepBounds, build_step
from compiler.frontend.layers.nn import AS_STORED, WeightFormat
from compiler.frontend.numerics import Numerics
from compiler.frontend.quantized.held import forms_of
from compiler.frontend.registry import load_config, weights_of
from compiler.frontend.weights import WeightSource, open_safetensors
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.module import IRModule
from compiler.machine.target import Target, host
from compiler.passes.round_operands import RoundOperands
from deploy.bench.synthetic import FP8, RandomWeights, fp8_weights, llama_config, shapes_of
from runtime.cache_groups import CacheGroup
from runtime.executable import Executable
from runtime.session import Session
from runtime.step_arguments import step_arguments
from tests.gpu.fixtures import _library as _library
from tests.gpu.fixtures import software_gpu as software_gpu

GOLDEN = Path(__file__).parents[2] / "golden" / "models"
BOUNDS = StepBounds(max_tokens=512, max_seqs=512, max_context=128)
NUM_PAGES = 200
FP8_BLOCK = 32  # number of rows, and of inputs, of a block of weights that share a scale

Rows = NDArray[np.float32]  # [rows, values]; the values are logits or hidden states


def dtypes_of(source: WeightSource) -> dict[str, DType]:
    return {name: DType.from_numpy(np.dtype(info.dtype)) for name, info in source.tensors.items()}


@dataclass(slots=True)
class CausalModel:
    config: ModelConfig
    source: WeightSource
    entry: str
    executable: Executable
    golden: dict[str, NDArray[Any]]
    kv_dtype: DType = DType.F32
    sessions: dict[int, Session] = field(default_factory=dict[int, Session])
    layers: range | None = None  # those that the program computes; None: all

    def session(self, num_threads: int) -> Session:
        if num_threads not in self.sessions:
            session = Session(self.executable, device_threads=num_threads)
            bind_weights(session, self.executable, self.entry, self.source)
            self.sessions[num_threads] = session
        return self.sessions[num_threads]

    def start(self, *, num_threads: int = 1, seed: int = 0) -> Sequences:
        """Return a batch with no sequences yet and an empty cache. The seed determines which pages sequences get."""
        return Sequences(self.session(num_threads), self.entry, _empty_caches(self.config, self.kv_dtype, seed, self.layers))


@dataclass(frozen=True, slots=True)
class InterpretedModel:
    """A model whose steps the NumPy interpreter runs. One interpreted step takes a hundredth of the time that compiling the step would
    take."""

    config: ModelConfig
    source: WeightSource
    module: IRModule
    golden: dict[str, NDArray[Any]]
    entry: str = ENTRY

    def start(self) -> Sequences:
        return Sequences(self, self.entry, _empty_caches(self.config, DType.F32, seed=0))

    def call(self, entry: str, *args: Any) -> Rows:
        weights = (self.source.read(param.name) for param in self.module.graph(entry).weights)
        return Interpreter(self.module).call(entry, *args, *weights)


def _empty_caches(config: ModelConfig, kv_dtype: DType, seed: int, layers: range | None = None) -> list[GroupCache]:
    pages = np.random.default_rng(seed).permutation(np.arange(1, NUM_PAGES, dtype=np.int32))
    return [GroupCache(group, pages) for group in groups_of(config, kv_dtype, BOUNDS.max_context, layers)]


class GroupCache:
    """The pages of one cache group, and the page table of each sequence. Unused pages contain NaN or 127, so that tests notice if these
    pages are read."""

    def __init__(self, group: CacheGroup, free: NDArray[np.int32]) -> None:
        self.group = group
        self.arrays = [np.full(shape, 127 if dtype == "i8" else np.nan, DType(dtype).numpy) for shape, dtype in group.arrays(NUM_PAGES)]
        self._free = free
        self._tables: dict[str, NDArray[np.int32]] = {}

    def table(self, name: str, start: int, stop: int) -> NDArray[np.int32]:
        """Return a sequence's page table for the tokens before `stop`. Entries of pages that precede the window of token `start` are
        overwritten with garbage."""
        table = self._tables.get(name, np.empty(0, np.int32))
        size = self.group.page_size
        missing = -(-stop // size) - len(table)
        table, self._free = np.concatenate([table, self._free[:missing]]), self._free[missing:]
        past = table[: 0 if self.group.window is None else max(0, start - self.group.window + 1) // size]
        for array in self.arrays:
            array[(slice(None),) * self.group.page_axis + (past,)] = 127 if array.dtype == np.int8 else np.nan
        past[:] = 0
        self._tables[name] = table
        return table


@dataclass(slots=True)
class Sequences:
    """Sequences that share one cache. `feed` runs one step of the model."""

    session: Session | InterpretedModel
    entry: str
    caches: list[GroupCache]
    lengths: dict[str, int] = field(default_factory=dict[str, int])

    def feed(self, pieces: dict[str, Sequence[int]], stream: Rows | None = None) -> dict[str, Rows]:
        """Append tokens to each named sequence in one step of the model. Return for each sequence the rows (logits, hidden states or the
        residual stream) of these tokens. If the model has only the later layers, `stream` is the residual stream of the layers before
        them."""
        ends = np.cumsum([len(piece) for piece in pieces.values()])
        starts = [self.lengths.setdefault(name, 0) for name in pieces]
        stops = [start + len(piece) for start, piece in zip(starts, pieces.values(), strict=True)]
        self.lengths.update(zip(pieces, stops, strict=True))
        tokens = np.concatenate([np.asarray(piece) for piece in pieces.values()]).astype(np.int32)
        positions = np.concatenate([np.arange(*ends) for ends in zip(starts, stops, strict=True)]).astype(np.int32)
        seq_ids = np.repeat(np.arange(len(pieces), dtype=np.int32), [len(piece) for piece in pieces.values()])
        slots, tables = [], []
        for cache in self.caches:
            own = [cache.table(name, start, stop) for name, start, stop in zip(pieces, starts, stops, strict=True)]
            tables.append(np.array([np.pad(table, (0, max(map(len, own)) - len(table))) for table in own], np.int32))
            size = cache.group.page_size
            slots.append(tables[-1][seq_ids, positions // size] * size + positions % size)
        arrays = (array for cache in self.caches if cache.group.layers for array in cache.arrays)
        rows_wanted = () if self.entry == PART else (np.arange(len(tokens), dtype=np.int32),)
        query_starts = np.append(0, ends).astype(np.int32)
        first = tokens if stream is None else stream
        step = step_arguments([cache.group for cache in self.caches], first, positions, query_starts, seq_ids, slots, tables)
        rows = self.session.call(self.entry, *step, *rows_wanted, *arrays)
        return dict(zip(pieces, np.split(rows, ends[:-1]), strict=True))


def _golden(folder: Path) -> tuple[ModelConfig, WeightSource, dict[str, NDArray[Any]]]:
    config = load_config(folder)
    return config, weights_of(config, open_safetensors(folder)), dict(np.load(folder / "golden.npz"))


def _wide() -> tuple[ModelConfig, WeightSource, dict[str, NDArray[Any]]]:
    """Return a model of two layers whose products have several panels and several blocks of k."""
    config = llama_config(hidden=512, layers=2, heads=8, kv_heads=2, size=64, ffn=1408, vocab=1000)
    return config, RandomWeights(shapes_of(config)), {}


@pytest.fixture(scope="session")
def causal(compiled_once: Callable[..., Executable]) -> Callable[..., CausalModel]:
    """`causal(case, format="f32", entry="step", target=host(), kv_dtype=DType.F32, numerics=AUTO)` returns the model of a case. The model
    is compiled on first use. With the format fp8, its matrices are those of an fp8 checkpoint."""
    known: dict[tuple[str, str, str, str, DType, Numerics, range | None], CausalModel] = {}

    def compiled(
        case: str,
        format: str = "f32",
        entry: str = ENTRY,
        target: Target | None = None,
        kv_dtype: DType = DType.F32,
        numerics: Numerics = Numerics.AUTO,
        layers: range | None = None,
    ) -> CausalModel:
        target = target or host()
        key = case, format, entry, target.name, kv_dtype, numerics, layers
        if key not in known:
            config, source, golden = _wide() if case == "wide" else _golden(GOLDEN / case)
            source = fp8_weights(source, FP8_BLOCK) if format == FP8 else source
            held, forms = AS_STORED if format == FP8 else WeightFormat.parse(format), forms_of(source.tensors)
            of_program = {"entry": entry, "forms": forms, "numerics": numerics, "layers": layers}
            module = build_step(config, dtypes_of(source), BOUNDS, kv_dtype, held, **of_program)
            known[key] = CausalModel(config, source, entry, compiled_once(module, target), golden, kv_dtype, layers=layers)
        return known[key]

    return compiled


@pytest.fixture(scope="session")
def interpreted() -> Callable[..., InterpretedModel]:
    """`interpreted(case, format="f32", entry="step")` returns the model of a case, which is interpreted and not compiled. With bf16 weights
    the model rounds the same rows to bf16 as a machine with fast bf16 products."""

    @lru_cache
    def built(case: str, format: str = "f32", entry: str = ENTRY) -> InterpretedModel:
        config, source, golden = _golden(GOLDEN / case)
        module = build_step(config, dtypes_of(source), BOUNDS, DType.F32, WeightFormat.parse(format), entry=entry)
        return InterpretedModel(config, source, RoundOperands()(module), golden, entry)

    return built


@pytest.fixture(scope="session")
def interpreted_from() -> Callable[[ModelConfig, WeightSource], Sequences]:
    """`interpreted_from(config, source)` returns a batch with no sequences yet of a model in f32, which is interpreted."""

    def built(config: ModelConfig, source: WeightSource) -> Sequences:
        module = build_step(config, dtypes_of(source), BOUNDS, DType.F32, WeightFormat.parse("f32"), forms=forms_of(source.tensors))
        return InterpretedModel(config, source, module, {}).start()

    return built
