"""Small models whose numbers are known (tests/golden/make_models.py), compiled once and driven like the engine drives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.bind import bind_weights
from compiler.frontend.config import ModelConfig
from compiler.frontend.decoder import ENTRY, StepBounds, build_step
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.registry import load_config
from compiler.frontend.weights import WeightSource, open_safetensors
from compiler.ir.dtypes import DType
from compiler.machine.target import Target, host
from compiler.ops.attention.kv_cache import PAGE
from deploy.bench.synthetic import RandomWeights, llama_config, shapes_of
from runtime.executable import Executable
from runtime.session import Session

GOLDEN = Path(__file__).parents[2] / "golden" / "models"
BOUNDS = StepBounds(max_tokens=512, max_seqs=512, max_context=128)
NUM_PAGES = 200

Rows = NDArray[np.float32]  # of logits, or of hidden states


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

    def session(self, num_threads: int) -> Session:
        if num_threads not in self.sessions:
            session = Session(self.executable, device_threads=num_threads)
            bind_weights(session, self.executable, self.entry, self.source)
            self.sessions[num_threads] = session
        return self.sessions[num_threads]

    def start(self, *, num_threads: int = 1, seed: int = 0) -> Sequences:
        """No sequences yet, an empty cache. Which pages they get depends on the seed."""
        shape = (self.config.num_layers, 2, NUM_PAGES, self.config.num_kv_heads)
        pages = np.random.default_rng(seed).permutation(np.arange(1, NUM_PAGES, dtype=np.int32))
        # What no sequence wrote must not matter, so it is not zero.
        nothing = 127 if self.kv_dtype is DType.I8 else np.nan
        cache = np.full((*shape, PAGE * self.config.head_dim), nothing, self.kv_dtype.numpy)
        scales = [np.full((*shape, PAGE), np.nan, np.float32)] if self.kv_dtype is DType.I8 else []
        return Sequences(self.session(num_threads), self.entry, (cache, *scales), pages)


@dataclass(slots=True)
class Sequences:
    """Sequences in one cache; `feed` runs one step."""

    session: Session
    entry: str
    cache: tuple[NDArray[Any], ...]
    free: NDArray[np.int32]
    tables: dict[str, NDArray[np.int32]] = field(default_factory=dict[str, NDArray[np.int32]])
    lengths: dict[str, int] = field(default_factory=dict[str, int])

    def feed(self, pieces: dict[str, Sequence[int]]) -> dict[str, Rows]:
        """The next tokens of some sequences; the rows of all of them."""
        tokens, positions, slots, seq_ids, tables = [], [], [], [], []
        for number, (name, piece) in enumerate(pieces.items()):
            at = self.lengths.setdefault(name, 0) + np.arange(len(piece))
            self.lengths[name] += len(piece)
            table = self._table(name, self.lengths[name])
            tokens.append(np.asarray(piece))
            positions.append(at)
            slots.append(table[at // PAGE] * PAGE + at % PAGE)
            seq_ids.append(np.full(len(piece), number))
            tables.append(table)
        width = max(map(len, tables))
        table_rows = np.array([np.pad(t, (0, width - len(t))) for t in tables], np.int32)
        flat = [np.concatenate(parts).astype(np.int32) for parts in (tokens, positions, slots, seq_ids)]
        rows = self.session.call(self.entry, *flat, table_rows, np.arange(len(flat[0]), dtype=np.int32), *self.cache)
        ends = np.cumsum([len(piece) for piece in pieces.values()])
        return dict(zip(pieces, np.split(rows, ends[:-1]), strict=True))

    def _table(self, name: str, length: int) -> NDArray[np.int32]:
        table = self.tables.get(name, np.empty(0, np.int32))
        missing = -(-length // PAGE) - len(table)
        self.tables[name], self.free = np.concatenate([table, self.free[:missing]]), self.free[missing:]
        return self.tables[name]


def _golden(folder: Path) -> tuple[ModelConfig, WeightSource, dict[str, NDArray[Any]]]:
    return load_config(folder), open_safetensors(folder), dict(np.load(folder / "golden.npz"))


def _wide() -> tuple[ModelConfig, WeightSource, dict[str, NDArray[Any]]]:
    """Two layers whose products are wide enough for every way of going through them."""
    config = llama_config(hidden=512, layers=2, heads=8, kv_heads=2, size=64, ffn=1408, vocab=1000)
    return config, RandomWeights(shapes_of(config)), {}


@pytest.fixture(scope="session")
def causal(compiled_once: Callable[..., Executable]) -> Callable[..., CausalModel]:
    """`causal(case, format="f32", entry="step", target=host(), kv_dtype=DType.F32)`, compiled on first demand."""
    known: dict[tuple[str, str, str, str, DType], CausalModel] = {}

    def compiled(
        case: str, format: str = "f32", entry: str = ENTRY, target: Target | None = None, kv_dtype: DType = DType.F32
    ) -> CausalModel:
        target = target or host()
        key = case, format, entry, target.name, kv_dtype
        if key not in known:
            config, source, golden = _wide() if case == "wide" else _golden(GOLDEN / case)
            held = WeightFormat.parse(format)
            module = build_step(config, dtypes_of(source), BOUNDS, kv_dtype, held, entry=entry)
            known[key] = CausalModel(config, source, entry, compiled_once(module, target), golden, kv_dtype)
        return known[key]

    return compiled
