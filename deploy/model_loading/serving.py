"""Wrap the bound program of a mode as a model that the engine runs: tokens in, logits or vectors out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.config import ModelConfig
from compiler.frontend.decoder import BOTH, HIDDEN
from compiler.frontend.encoder import ENTRY as ENCODE
from compiler.frontend.hearing import ENTRY as HEAR
from compiler.frontend.sampler import LOGPROBS_ENTRY, SAMPLE_ENTRY
from compiler.frontend.vision import Vision
from deploy.model_loading.excerpts import BothEncoders, ExcerptEncoder
from deploy.model_loading.graphs import prepare
from deploy.model_loading.known import carried
from deploy.model_loading.listening import Listener, listening_limits
from deploy.model_loading.modes import Embedder, Encoder, Generator, Mode, Transcriber
from deploy.model_loading.seeing import Seer, encoded_in_parts, seeing_limits
from deploy.model_loading.weights import Bound
from runtime.cache_groups import PAGE_SIZE, CacheGroup, HeardGroup
from runtime.kv_pool import KVPool
from runtime.memory import MemoryAccount
from runtime.parts import InParts, OneAtATime, whole
from runtime.sampling import Logprobs, SampleBatch, Sampled
from runtime.session import Session
from runtime.spectrogram import AROUND, HOP
from runtime.step_arguments import step_arguments
from server.engine.axes import along_positions
from server.engine.step_model import (
    NO_ROWS,
    EmbedLimits,
    ExcerptLimits,
    Excerpts,
    ExcerptTokens,
    GroupLimits,
    Heard,
    Logits,
    Places,
    StepBatch,
    StepLimits,
)
from server.interfaces import LoadError
from server.messages import Clip, Crop, ErrorCode
from server.stages.relay import Relay

Texts = Sequence[Sequence[int]]
Vectors = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Served(Bound):
    """The state of a load once the model can take steps."""

    model: Model

    @property
    def step_model(self) -> CompiledModel | HearingModel | EmbeddingModel | None:
        return None if isinstance(self.model, EncoderModel) else self.model

    @property
    def embed_model(self) -> EncoderModel | None:
        return self.model if isinstance(self.model, EncoderModel) else None

    @property
    def max_context(self) -> int:
        """The longest context of one sequence. A small KV cache may limit it."""
        limits = self.model.limits
        return limits.capacity if isinstance(limits, StepLimits) else limits.max_context


def serve(known: Bound) -> Served:
    """Make the model, capture the graphs of a GPU, and run a step of one token. Raise LoadError if a result is not finite. The step reads
    all weights except most rows of an embedding table and most experts, so damaged weights usually fail the load, not the first request.
    Encoding an image or a recording can take many seconds, so only a start that finds no file of step times (costs.py) encodes an example
    of each medium."""
    model = model_of(known.mode, known.session, [group.num_pages for group in known.plan.groups], known.session.memory, known.relay)
    known.progress("warm-up", 0.0)
    prepare(known.session, known.program.executable)
    costs = known.costs_file
    if not _is_finite(model, looks=costs is None or not costs.exists()):
        text = f"the results of {known.load.source} are not finite; its weights may be damaged: download them again"
        raise LoadError(ErrorCode.LOAD_REFUSED, text)
    known.progress("warm-up", 0.5)
    return Served(**carried(known, Bound), model=model)


def model_of(mode: Mode, session: Session, num_pages: Sequence[int], account: MemoryAccount, relay: Relay | None = None) -> Model:
    """Make the model of a program. `num_pages` has one entry per cache group; `account` counts the pages' bytes. `relay` is given if the
    program is the last stage of the model."""
    match mode:
        case Generator():
            pool, limits = KVPool(mode.groups, num_pages, account, session.device), limits_of(mode, num_pages)
            if relay is not None or mode.ranks > 1:  # pages cannot be read: other processes or GPUs have parts of each
                limits = replace(limits, groups=tuple(replace(group, page_bytes=0) for group in limits.groups))
            if relay is not None:
                return StagedModel(session, pool, limits, relay)
            encoder = _excerpt_encoder(mode.files.config, session)
            return CompiledModel(session, pool, limits) if encoder is None else MultimodalModel(session, pool, limits, encoder)
        case Transcriber():
            return HearingModel(session, KVPool(mode.groups, num_pages, account, session.device), limits_of(mode, num_pages))
        case Embedder():
            return EmbeddingModel(session, KVPool(mode.groups, num_pages, account, session.device), limits_of(mode, num_pages))
        case Encoder():
            bounds, config = mode.bounds, mode.files.config
            seeing = None if config.vision is None else seeing_limits(config.vision, config)
            limits = EmbedLimits(config.vocab_size, _vector_size(config), mode.max_context, bounds.max_tokens, bounds.max_texts, seeing)
            return EncoderModel(session, limits, config.vision, tells_pairs_apart=config.tells_pairs_apart)
        case _:
            assert_never(mode)


def _excerpt_encoder(config: ModelConfig, session: Session) -> ExcerptEncoder | None:
    """Return what encodes images and recordings for the steps of a model, or None if the model reads neither."""
    row_size = config.hidden_size * (1 if config.vision is None else config.vision.num_depths)
    seer = None if config.vision is None else Seer(session, config.vision, row_size)
    listener = None if config.listening is None else Listener(session, config.listening, row_size)
    if seer is None or listener is None:
        return seer or listener
    return BothEncoders(row_size, {Crop: seer, Clip: listener})


def _is_finite(model: Model, *, looks: bool) -> bool:
    """Run a step of one token or, if `looks` is true, one such step with each medium that the model reads. A model that transcribes hears
    silence first. Return whether all results are finite."""
    if isinstance(model, EncoderModel):
        seeing = model.limits.seeing
        seen = whole(model.see([seeing.example])) if looks and seeing is not None else 0.0
        return bool(np.isfinite(model.run([[0]], [None])).all() and np.isfinite(seen).all())
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    rows = (zero, NO_ROWS) if model.limits.generates else (NO_ROWS, zero)
    places = tuple(Places(zero, zero[None]) for _ in model.limits.groups)  # page 0, which no sequence owns
    silence = Heard(np.zeros(HOP * model.limits.num_hops + AROUND, np.float32), 0.0, 0)
    while model.limits.num_hops and not model.encode(silence):
        pass
    batch = StepBatch(zero, zero, np.arange(2, dtype=np.int32), zero, one, places, *rows)
    examples = [limits.example for limits in model.limits.excerpts] if looks else []
    batches = [replace(batch, seen=(ExcerptTokens(example, example.digest, 0, 0, 1),)) for example in examples] or [batch]
    return all(np.isfinite(model.download(model.run(one))).all() and np.isfinite(model.hidden()).all() for one in batches)


def limits_of(mode: Generator | Transcriber | Embedder, num_pages: Sequence[int]) -> StepLimits:
    """Return the limits of a step. `num_pages` has one entry per cache group."""
    config, bounds = mode.files.config, mode.bounds
    counted = zip(mode.groups, num_pages, strict=True)
    groups = tuple(GroupLimits(count, group.window, group.keeps_states, group.page_size, group.bytes_per_page) for group, count in counted)
    sizes = config.vocab_size, bounds.max_context, bounds.max_tokens, bounds.max_seqs
    if (hearing := config.hearing) is not None:
        cost = -(-hearing.num_frames * hearing.num_layers // config.num_layers)
        return StepLimits(
            *sizes, groups, embedding_size=len(hearing.aligned) * hearing.num_frames, num_hops=hearing.num_hops, hearing_cost=cost
        )
    excerpts = _excerpt_limits(config) if mode.generates else ()
    return StepLimits(*sizes, groups, embedding_size=_vector_size(config), generates=mode.generates, excerpts=excerpts)


def _excerpt_limits(config: ModelConfig) -> tuple[ExcerptLimits, ...]:
    seeing = () if config.vision is None else (seeing_limits(config.vision, config),)
    return seeing if config.listening is None else (*seeing, listening_limits(config.listening, config))


def _vector_size(config: ModelConfig) -> int:
    return config.embedding.size_of(config.hidden_size) if config.classes is None else len(config.classes.names)


def arguments_of(batch: StepBatch, groups: Sequence[CacheGroup], stream: Vectors | None = None) -> tuple[Any, ...]:
    """Return the arguments of a compiled step up to `logit_rows` or `hidden_rows`, which the caller adds. In a step that begins at a later
    layer, `stream`, the residual stream of the tokens, takes the place of the token ids."""
    slots, tables = [places.slots for places in batch.places], [places.page_tables for places in batch.places]
    tokens = batch.tokens if stream is None else stream
    return step_arguments(groups, tokens, batch.positions, batch.query_starts, batch.seq_ids, slots, tables)


class _Stepping:
    """The base class of the step models of all decoders, with a KV pool, a sampler, and defaults for models that read no excerpts.
    Subclasses add `run`, which computes one step."""

    def __init__(self, session: Session, pool: KVPool, limits: StepLimits) -> None:
        self._session = session
        self._pool = pool
        self._limits = limits
        self._hidden: Any = np.empty((0, limits.embedding_size), np.float32)  # hidden states that the last step left on the device
        self._no_logits = np.empty((0, limits.vocab_size), np.float32)

    @property
    def limits(self) -> StepLimits:
        return self._limits

    @property
    def busy_s(self) -> float:
        """Return the seconds spent in kernels so far."""
        return self._session.busy_s

    def hidden(self) -> NDArray[np.float32]:
        """Download the hidden states that the last step computed."""
        return self._session.download(self._hidden)

    def copy_page(self, group: int, source: int, target: int) -> None:
        self._pool.copy_page(group, source, target)

    def read_page(self, group: int, page: int) -> bytes:
        return self._pool.read_page(group, page)

    def write_page(self, group: int, page: int, data: bytes | memoryview) -> None:
        self._pool.write_page(group, page, data)

    def _call(self, entry: str, batch: StepBatch, *rows: NDArray[Any], stream: Vectors | None = None) -> Any:
        return self._session.call(entry, *arguments_of(batch, self._pool.groups, stream), *rows, *self._pool.arguments, views=True)

    def is_encoded(self, key: bytes) -> bool:
        return True  # a model that reads no excerpts

    def spare(self, keys: Collection[bytes]) -> None:
        pass

    def encode(self, work: Excerpts | Heard) -> bool:
        return True

    def sample(self, logits: Logits, batch: SampleBatch) -> Sampled:
        return Sampled.of(self._session.call(SAMPLE_ENTRY, logits, *batch.arrays, keep_last=True))

    def logprobs(self, logits: Logits, rows: NDArray[np.int32], tokens: NDArray[np.int32], tops: NDArray[np.int32]) -> Logprobs:
        return Logprobs(*self._session.call(LOGPROBS_ENTRY, logits, rows, tokens, tops, keep_last=True))

    def download(self, logits: Logits) -> NDArray[np.float32]:
        return np.array(self._session.download(logits), np.float32)


class CompiledModel(_Stepping):
    """A decoder that returns logits, and hidden states for embeddings."""

    def run(self, batch: StepBatch) -> Logits:
        logits, self._hidden = self._call(BOTH, batch, batch.logit_rows, batch.hidden_rows)
        return Logits(logits)


class HearingModel(CompiledModel):
    """A decoder that attends to audio, which it hears in parts. Its hidden states are the attention of tokens to the frames of their audio,
    [aligned heads * frames]."""

    def __init__(self, session: Session, pool: KVPool, limits: StepLimits) -> None:
        super().__init__(session, pool, limits)
        self._begun = OneAtATime[bool]()

    def encode(self, work: Excerpts | Heard) -> bool:
        assert isinstance(work, Heard), "a model that reads no excerpts"
        return self._begun.advance(work, lambda: self._hear(work)) is not None

    def _hear(self, heard: Heard) -> InParts[bool]:
        """Encode the audio in parts, padded with silence to a whole window, and write its keys and values to the sequence's page. Return
        True."""
        group, tensors = self._pool.groups[-1], self._pool.tensors[-1]
        assert isinstance(group, HeardGroup), group
        num_hops, size = self._limits.num_hops, len(heard.samples)
        samples = np.zeros(HOP * num_hops + AROUND, np.float32)
        samples[:size] = heard.samples
        sounding = (np.arange(num_hops) < (size - AROUND) // HOP).astype(np.float32)[:, None]
        loudest = np.array([[heard.loudest]], np.float32)
        slots = np.arange(group.num_frames, dtype=np.int32) + heard.page * group.num_parts * PAGE_SIZE
        yield from self._session.in_parts(HEAR, samples, loudest, sounding, slots, *tensors)
        return True


class MultimodalModel(CompiledModel):
    """A decoder that reads images or audio in conversations. Before a step, it encodes the excerpts that have tokens in that step, unless
    they are encoded already."""

    def __init__(self, session: Session, pool: KVPool, limits: StepLimits, encoder: ExcerptEncoder) -> None:
        super().__init__(session, pool, limits)
        self._encoder = encoder
        self._has_axes = limits.three_axes

    def run(self, batch: StepBatch) -> Logits:
        axes = (along_positions(batch.positions) if batch.axes is None else batch.axes,) if self._has_axes else ()
        logits, self._hidden = self._call(BOTH, batch, batch.logit_rows, batch.hidden_rows, *self._encoder.look(batch.seen), *axes)
        return Logits(logits)

    def is_encoded(self, key: bytes) -> bool:
        return self._encoder.is_encoded(key)

    def spare(self, keys: Collection[bytes]) -> None:
        self._encoder.spare(keys)

    def encode(self, work: Excerpts | Heard) -> bool:
        assert not isinstance(work, Heard), "a model that hears no windows of audio"
        return self._encoder.encode(work)


class StagedModel(CompiledModel):
    """The last stage of a decoder whose other layers other processes compute. A step that is cut into parts leaves its results on the
    host, because the results of a part last only until the next part."""

    def __init__(self, session: Session, pool: KVPool, limits: StepLimits, relay: Relay) -> None:
        super().__init__(session, pool, limits)
        self.relay = relay

    def run(self, batch: StepBatch) -> Logits:
        parts = self.relay.begin(batch)
        if len(parts) == 1:
            logits, self._hidden = self._last(batch)
            return Logits(logits)
        found = [tuple(map(np.array, self._session.download(self._last(part)))) for part in parts]
        logits, self._hidden = (np.concatenate(rows) for rows in zip(*found, strict=True))
        return Logits(logits)

    def copy_page(self, group: int, source: int, target: int) -> None:
        self.relay.copy_page(group, source, target)
        super().copy_page(group, source, target)

    def _last(self, part: StepBatch) -> Any:
        return self._call(BOTH, part, part.logit_rows, part.hidden_rows, stream=self.relay.receive())


class EmbeddingModel(_Stepping):
    """A decoder that embeds or classifies texts: its program returns vectors or numbers of classes instead of logits."""

    def run(self, batch: StepBatch) -> Logits:
        self._hidden = self._call(HIDDEN, batch, batch.hidden_rows)
        return Logits(self._no_logits)


class EncoderModel:
    """A model that encodes all texts in one step, and maybe images too. `tells_pairs_apart`: the program also gets, for each token, the
    text of a pair to which it belongs."""

    def __init__(self, session: Session, limits: EmbedLimits, vision: Vision | None = None, *, tells_pairs_apart: bool) -> None:
        self._session = session
        self.limits = limits
        self._vision = vision
        self._tells_pairs_apart = tells_pairs_apart

    def run(self, token_lists: Texts, seconds: Sequence[int | None]) -> Vectors:
        """Return the vectors of texts. `seconds` has, for each text, where the second text of a pair begins, or None for a single text."""
        lengths = [len(tokens) for tokens in token_lists]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        text_ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        positions = np.arange(starts[-1], dtype=np.int32) - starts[text_ids]
        tokens = np.fromiter((token for tokens in token_lists for token in tokens), np.int32, int(starts[-1]))
        segments = list[NDArray[np.int32]]()
        if self._tells_pairs_apart:
            begins = [length if second is None else second for length, second in zip(lengths, seconds, strict=True)]
            segments.append((positions >= np.array(begins, np.int32)[text_ids]).astype(np.int32))
        return self._session.call(ENCODE, tokens, positions, text_ids, starts, *segments)

    def see(self, crops: Sequence[Crop]) -> InParts[Vectors]:
        """Encode crops of images in parts, and return their vectors. Yield between two parts."""
        assert self._vision is not None, "a model that embeds only texts"
        return np.concatenate((yield from encoded_in_parts(self._session, self._vision, crops)))


Model = CompiledModel | HearingModel | EmbeddingModel | EncoderModel
