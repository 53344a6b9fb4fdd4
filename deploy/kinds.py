"""The ways to serve what a source holds: a decoder that generates, a decoder that embeds, an encoder. Each says which program it runs, what
that takes, and what stands ready once the weights are bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.decoder import BOTH, HIDDEN, StepBounds, build_step
from compiler.frontend.decoder import UNUSED as DECODER_UNUSED
from compiler.frontend.encoder import ENTRY as ENCODE
from compiler.frontend.encoder import UNUSED as ENCODER_UNUSED
from compiler.frontend.encoder import EncodeBounds, build_encode
from compiler.frontend.models.registry import CAUSAL, ENCODERS
from compiler.frontend.nn import WeightFormat
from compiler.frontend.sentence import Pooling
from compiler.ir.dtypes import DType
from compiler.ir.module import IRModule
from deploy.embed import DecoderModel, EncoderModel
from deploy.plan import Pages, Plan
from deploy.source import ModelFiles
from runtime.kv_pool import KVLayout, KVPool
from runtime.memory import MemoryAccount
from runtime.session import Session
from runtime.step import PAGE_SIZE, EmbedLimits, EmbedModel, StepBatch, StepLimits, StepModel
from server.handle import LoadError
from server.messages import Load

MAX_STEP_TOKENS = 512  # of one step: what the arena is planned for
DEFAULT_CONTEXT = 4096
MAX_EMBED_BATCH = 16  # texts that a generating model embeds in one step
NO_ROWS = np.empty(0, np.int32)
KV_DTYPES = {"f32": DType.F32, "f16": DType.F16, "bf16": DType.BF16, "int8": DType.I8}


@dataclass(frozen=True, slots=True)
class Served:
    step_model: StepModel | None = None
    embed_model: EmbedModel | None = None

    def answers(self) -> bool:
        """Run one token, which reads every weight: what cannot run or gives no numbers should fail a load, not a request."""
        if self.step_model is not None:
            zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
            padding = StepBatch(zero, zero, zero, np.arange(2, dtype=np.int32), one, zero[None], zero)  # its page is nobody's
            return bool(np.isfinite(self.step_model.run(padding)).all())
        return self.embed_model is None or bool(np.isfinite(self.embed_model.run([[0]])).all())


class Kind(Protocol):
    entry: ClassVar[str]
    unused: ClassVar[tuple[str, ...]]

    @property
    def max_context(self) -> int: ...

    def module(self) -> IRModule: ...

    def pages(self) -> Pages | None:
        """What it wants of a KV cache; None: it has none."""
        ...

    def serve(self, session: Session, plan: Plan, account: MemoryAccount) -> Served: ...


def kind_of(files: ModelFiles, load: Load) -> Kind:
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
        if self.load.kv_dtype not in KV_DTYPES:
            raise LoadError("invalid_value", f"kv_dtype is {self.load.kv_dtype!r}; expected one of {', '.join(KV_DTYPES)}")
        return KV_DTYPES[self.load.kv_dtype]

    def _module(self, entry: str) -> IRModule:
        config, format = self.files.config, WeightFormat.parse(self.load.quantize)
        return build_step(config, CAUSAL[config.family], self.files.dtypes, self.bounds, self.kv_dtype, format, entry=entry)


@dataclass(frozen=True, slots=True)
class Generator(_Decoder):
    """It embeds, too, if asked: one program gives both, over one set of weights. Texts to embed lie in the last pages of the cache, up to a
    quarter of them."""

    entry: ClassVar[str] = BOTH
    unused: ClassVar[tuple[str, ...]] = DECODER_UNUSED

    def module(self) -> IRModule:
        return self._module(BOTH)

    def pages(self) -> Pages:
        """At least one sequence of full length, at most all of them, and those for embedding; page 0 is padding."""
        least, most = 1 + self.bounds.max_pages, 1 + self.bounds.max_pages * self.load.max_batch
        return Pages(self.layout, -(-least * 4 // 3), most + self._most_embed_pages)

    def serve(self, session: Session, plan: Plan, account: MemoryAccount) -> Served:
        pool, bounds = KVPool(self.layout, plan.num_pages, account), self.bounds
        embed_pages = self._embed_pages(plan.num_pages)
        num_pages = plan.num_pages - embed_pages
        limits = StepLimits(self.files.config.vocab_size, bounds.max_context, bounds.max_tokens, bounds.max_seqs, num_pages)
        model = CompiledModel(session, pool, limits)
        if not embed_pages:
            return Served(model)
        embed_limits = self._embed_limits(embed_pages)
        return Served(model, DecoderModel(model.hidden, embed_limits, step_tokens=bounds.max_tokens, first_page=num_pages))

    @property
    def _most_embed_pages(self) -> int:
        """A text of full length, or several that end in a page of their own each."""
        return self.bounds.max_pages + min(MAX_EMBED_BATCH, self.load.max_batch)

    def _embed_pages(self, num_pages: int) -> int:
        """Of so many; none where they would not hold a text."""
        found = min(self._most_embed_pages, num_pages // 4)
        return found if found >= 2 else 0

    def _embed_limits(self, num_pages: int) -> EmbedLimits:
        texts = min(MAX_EMBED_BATCH, self.load.max_batch, num_pages // 2)
        tokens = (num_pages - texts) * PAGE_SIZE
        return EmbedLimits(self.files.config.hidden_size, min(self.max_context, tokens), tokens, texts)


class CompiledModel:
    """A causal model, ready to step."""

    def __init__(self, session: Session, pool: KVPool, limits: StepLimits) -> None:
        self._session = session
        self._pool = pool
        self._limits = limits

    @property
    def limits(self) -> StepLimits:
        return self._limits

    @property
    def busy_s(self) -> float:
        """Seconds in kernels so far."""
        return self._session.busy_s

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        lengths = np.diff(batch.query_starts)
        seq_ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        step = (batch.tokens, batch.positions, batch.slots, seq_ids, batch.page_tables)
        return self._session.call(BOTH, *step, batch.logit_rows, NO_ROWS, *self._pool.arguments)[0]

    def hidden(self, *step_and_rows: NDArray[np.int32]) -> NDArray[np.float32]:
        """What the last norm gives, of the rows that are asked for."""
        *step, rows = step_and_rows
        return self._session.call(BOTH, *step, NO_ROWS, rows, *self._pool.arguments)[1]

    def copy_page(self, source: int, target: int) -> None:
        self._pool.copy_page(source, target)


@dataclass(frozen=True, slots=True)
class Embedder(_Decoder):
    entry: ClassVar[str] = HIDDEN
    unused: ClassVar[tuple[str, ...]] = DECODER_UNUSED

    @property
    def limits(self) -> EmbedLimits:
        tokens = max(self.max_context, MAX_STEP_TOKENS)
        return EmbedLimits(self.files.config.hidden_size, self.max_context, tokens, self.load.max_batch)

    def module(self) -> IRModule:
        pooling = self.files.config.embedding.pooling
        if pooling is not Pooling.LAST:
            raise LoadError(
                "unsupported_model", f"{self.files.path} pools by {pooling}; of a decoder, the last token is what has seen the text"
            )
        return self._module(HIDDEN)

    def pages(self) -> Pages:
        """Every text ends in a page of its own; page 0 is padding."""
        most = 1 + self.limits.max_tokens // PAGE_SIZE + self.limits.max_seqs
        return Pages(self.layout, most, most)

    def serve(self, session: Session, plan: Plan, account: MemoryAccount) -> Served:
        pool = KVPool(self.layout, plan.num_pages, account)

        def hidden(*step_and_rows: NDArray[np.int32]) -> NDArray[np.float32]:
            return session.call(HIDDEN, *step_and_rows, *pool.arguments)

        return Served(embed_model=DecoderModel(hidden, self.limits, step_tokens=self.bounds.max_tokens))


# --- encoders ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Encoder:
    entry: ClassVar[str] = ENCODE
    unused: ClassVar[tuple[str, ...]] = ENCODER_UNUSED
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
        return build_encode(config, ENCODERS[config.family], self.files.dtypes, self.bounds, WeightFormat.parse(self.load.quantize))

    def pages(self) -> None:
        return None

    def serve(self, session: Session, plan: Plan, account: MemoryAccount) -> Served:
        bounds = self.bounds
        limits = EmbedLimits(self.files.config.hidden_size, self.max_context, bounds.max_tokens, bounds.max_texts)
        return Served(embed_model=EncoderModel(session, limits))
