"""The ways to serve what a source holds: a decoder that generates, a decoder that embeds, an encoder. Each says which program it runs, what
that takes, and what stands ready once the weights are bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.decoder import BOTH, HIDDEN, StepBounds, build_step
from compiler.frontend.decoder import UNUSED as DECODER_UNUSED
from compiler.frontend.encoder import ENTRY as ENCODE
from compiler.frontend.encoder import UNUSED as ENCODER_UNUSED
from compiler.frontend.encoder import EncodeBounds, build_encode
from compiler.frontend.nn import WeightFormat
from compiler.frontend.sampler import JUDGE_ENTRY, SAMPLE_ENTRY, build_sampler
from compiler.frontend.sentence import Pooling
from compiler.ir.dtypes import DType
from compiler.ir.module import IRModule
from deploy.embed import EncoderModel
from deploy.plan import Pages, Plan
from deploy.source import ModelFiles
from runtime.kv_pool import KVLayout, KVPool
from runtime.memory import MemoryAccount
from runtime.sampling import Judged, SampleBatch, Sampled
from runtime.session import Session
from runtime.step import NO_ROWS, PAGE_SIZE, EmbedLimits, EmbedModel, Logits, StepBatch, StepLimits, StepModel
from server.handle import LoadError
from server.messages import Load

MAX_STEP_TOKENS = 512  # of one step: what the arena is planned for
DEFAULT_CONTEXT = 4096
KV_DTYPES = {"f32": DType.F32, "f16": DType.F16, "bf16": DType.BF16, "int8": DType.I8}


@dataclass(frozen=True, slots=True)
class Served:
    step_model: StepModel | None = None
    embed_model: EmbedModel | None = None

    @property
    def embedding_size(self) -> int:
        model = self.step_model or self.embed_model
        return 0 if model is None else model.limits.embedding_size

    @property
    def generates(self) -> bool:
        return self.step_model is not None and self.step_model.limits.generates

    def answers(self) -> bool:
        """Run one token, which reads every weight: what cannot run or gives no numbers should fail a load, not a request."""
        if self.step_model is not None:
            zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
            rows = (zero, NO_ROWS) if self.step_model.limits.generates else (NO_ROWS, zero)
            padding = StepBatch(zero, zero, zero, np.arange(2, dtype=np.int32), one, zero[None], *rows)  # its page is nobody's
            logits = self.step_model.run(padding)
            return bool(np.isfinite(self.step_model.download(logits)).all() and np.isfinite(self.step_model.hidden()).all())
        return self.embed_model is None or bool(np.isfinite(self.embed_model.run([[0]])).all())


class Kind(Protocol):
    entry: ClassVar[str]
    unused: ClassVar[tuple[str, ...]]
    generates: ClassVar[bool]  # text

    @property
    def max_context(self) -> int: ...

    def module(self) -> IRModule: ...

    def pages(self) -> Pages | None:
        """What it wants of a KV cache; None: it has none."""
        ...

    def serve(self, session: Session, plan: Plan, account: MemoryAccount) -> Served: ...


def kind_of(files: ModelFiles, load: Load) -> Kind:
    limit = files.config.max_context
    if load.max_context is not None and load.max_context > limit:
        text = f"max_context is {load.max_context}; {files.path.name} has positions for {limit} tokens: give at most that, or leave it out"
        raise LoadError("invalid_value", text)
    if not files.config.is_causal:
        return Encoder(files, load)
    return Embedder(files, load) if files.is_embedder else Generator(files, load)


# --- decoders ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Decoder:
    files: ModelFiles
    load: Load

    @property
    def max_context(self) -> int:
        return min(self.files.config.max_context, self.load.max_context or DEFAULT_CONTEXT)

    @property
    def bounds(self) -> StepBounds:
        return StepBounds(max(MAX_STEP_TOKENS, self.load.max_batch), self.load.max_batch, self.max_context)

    @property
    def layout(self) -> KVLayout:
        config = self.files.config
        return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, str(self.kv_dtype))

    @property
    def kv_dtype(self) -> DType:
        asked = self.load.kv_dtype
        if asked == "auto":
            return DType.F32 if WeightFormat.parse(self.load.quantize).bits == 32 else DType.BF16
        if asked not in KV_DTYPES:
            raise LoadError("invalid_value", f"kv_dtype is {asked!r}; expected one of auto, {', '.join(KV_DTYPES)}")
        return KV_DTYPES[asked]

    def _limits(self, plan: Plan, *, generates: bool = True) -> StepLimits:
        config, bounds = self.files.config, self.bounds
        sizes = config.vocab_size, bounds.max_context, bounds.max_tokens, bounds.max_seqs, plan.num_pages
        return StepLimits(*sizes, embedding_size=config.hidden_size, generates=generates)

    def _module(self, entry: str) -> IRModule:
        config, format = self.files.config, WeightFormat.parse(self.load.quantize)
        return build_step(config, self.files.dtypes, self.bounds, self.kv_dtype, format, entry=entry)


@dataclass(frozen=True, slots=True)
class Generator(_Decoder):
    """It embeds, too: one program gives both, over one set of weights."""

    entry: ClassVar[str] = BOTH
    unused: ClassVar[tuple[str, ...]] = DECODER_UNUSED
    generates: ClassVar[bool] = True

    def module(self) -> IRModule:
        return build_sampler(self.files.config.vocab_size, self.bounds.max_seqs, beside=self._module(BOTH))

    def pages(self) -> Pages:
        """At least one sequence of full length, at most all of them; page 0 is padding."""
        each = self.bounds.max_pages
        return Pages(self.layout, 1 + each, 1 + each * self.load.max_batch)

    def serve(self, session: Session, plan: Plan, account: MemoryAccount) -> Served:
        return Served(CompiledModel(session, KVPool(self.layout, plan.num_pages, account), self._limits(plan)))


@dataclass(frozen=True, slots=True)
class Embedder(_Decoder):
    entry: ClassVar[str] = HIDDEN
    unused: ClassVar[tuple[str, ...]] = DECODER_UNUSED
    generates: ClassVar[bool] = False

    def module(self) -> IRModule:
        pooling = self.files.config.embedding.pooling
        if pooling is not Pooling.LAST:
            raise LoadError("load_refused", f"{self.files.path} pools by {pooling}; of a decoder, the last token is what has seen the text")
        return self._module(HIDDEN)

    def pages(self) -> Pages:
        """At least one text of full length, at most those of two steps that end in a page of their own each: nothing is kept longer."""
        each, bounds = self.bounds.max_pages, self.bounds
        return Pages(self.layout, 1 + each, 1 + each + 2 * (bounds.max_tokens // PAGE_SIZE + bounds.max_seqs))

    def serve(self, session: Session, plan: Plan, account: MemoryAccount) -> Served:
        return Served(EmbeddingModel(session, KVPool(self.layout, plan.num_pages, account), self._limits(plan, generates=False)))


class _Stepping:
    """A causal model, ready to step."""

    def __init__(self, session: Session, pool: KVPool, limits: StepLimits) -> None:
        self._session = session
        self._pool = pool
        self._limits = limits
        self._hidden = np.empty((0, limits.embedding_size), np.float32)
        self._no_logits = np.empty((0, limits.vocab_size), np.float32)

    @property
    def limits(self) -> StepLimits:
        return self._limits

    @property
    def busy_s(self) -> float:
        """Seconds in kernels so far."""
        return self._session.busy_s

    def hidden(self) -> NDArray[np.float32]:
        return self._hidden

    def copy_page(self, source: int, target: int) -> None:
        self._pool.copy_page(source, target)

    def _call(self, entry: str, batch: StepBatch, *rows: NDArray[np.int32]) -> Any:
        lengths = np.diff(batch.query_starts)
        seq_ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        step = (batch.tokens, batch.positions, batch.slots, seq_ids, batch.page_tables)
        return self._session.call(entry, *step, *rows, *self._pool.arguments, views=True)

    def sample(self, logits: Logits, batch: SampleBatch) -> Sampled:
        return Sampled.of(self._session.call(SAMPLE_ENTRY, logits, *batch.arrays, above=True))

    def judge(self, logits: Logits, rows: NDArray[np.int32], tokens: NDArray[np.int32], tops: NDArray[np.int32]) -> Judged:
        return Judged(*self._session.call(JUDGE_ENTRY, logits, rows, tokens, tops, above=True))

    def download(self, logits: Logits) -> NDArray[np.float32]:
        return np.array(logits, np.float32)


class CompiledModel(_Stepping):
    def run(self, batch: StepBatch) -> Logits:
        logits, self._hidden = self._call(BOTH, batch, batch.logit_rows, batch.hidden_rows)
        return Logits(logits)


class EmbeddingModel(_Stepping):
    """Without a head."""

    def run(self, batch: StepBatch) -> Logits:
        self._hidden = self._call(HIDDEN, batch, batch.hidden_rows)
        return Logits(self._no_logits)


# --- encoders ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Encoder:
    entry: ClassVar[str] = ENCODE
    unused: ClassVar[tuple[str, ...]] = ENCODER_UNUSED
    generates: ClassVar[bool] = False
    files: ModelFiles
    load: Load

    @property
    def max_context(self) -> int:
        """What the model was trained on, unless more is asked for; its table of positions ends somewhere."""
        config = self.files.config
        return min(config.max_context, self.load.max_context or config.embedding.max_tokens or DEFAULT_CONTEXT)

    @property
    def bounds(self) -> EncodeBounds:
        return EncodeBounds(max(MAX_STEP_TOKENS, self.max_context), self.load.max_batch)

    def module(self) -> IRModule:
        config = self.files.config
        return build_encode(config, self.files.dtypes, self.bounds, WeightFormat.parse(self.load.quantize))

    def pages(self) -> None:
        return None

    def serve(self, session: Session, plan: Plan, account: MemoryAccount) -> Served:
        bounds = self.bounds
        limits = EmbedLimits(self.files.config.hidden_size, self.max_context, bounds.max_tokens, bounds.max_texts)
        return Served(embed_model=EncoderModel(session, limits))
