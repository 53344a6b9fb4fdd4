"""Choose the mode in which opened files are served: a decoder that generates, embeds or transcribes, or an encoder. A mode defines the
program, the bounds of a step, and how many pages of the KV cache the program needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from compiler.frontend.cache_groups import groups_of
from compiler.frontend.config import ModelConfig
from compiler.frontend.decoder import BOTH, HIDDEN, PART, StepBounds, build_step
from compiler.frontend.decoder import UNUSED as DECODER_UNUSED
from compiler.frontend.encoder import ENTRY as ENCODE
from compiler.frontend.encoder import UNUSED as ENCODER_UNUSED
from compiler.frontend.encoder import EncodeBounds, build_encode
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.numerics import Numerics
from compiler.frontend.quantized.held import forms_of
from compiler.frontend.ranks import RankWeights, of_rank, require_divisible, shapes_of
from compiler.frontend.sampler import build_sampler
from compiler.frontend.sentence import Pooling
from compiler.frontend.splitting import require_splittable
from compiler.frontend.weights import WeightSource
from compiler.ir.dtypes import DType
from compiler.ir.module import IRModule
from deploy.model_loading.files import ModelFiles, dtypes_of
from runtime.cache_groups import PAGE_SIZE, CacheGroup
from runtime.device.registry import CPU
from server.engine.step_model import GroupLimits
from server.interfaces import LoadError
from server.messages import ErrorCode, Load

# Largest number of tokens in a step, unless `max_batch`, an image or an encoder's text needs more. The arena is planned for the resulting
# number.
MAX_STEP_TOKENS = 512
# Most tokens of a sequence if the load names no context. Page tables, and a GPU's work space, are planned for this number.
MOST_CONTEXT = 1 << 18
SHORT_CONTEXT = 4096  # tokens for which there must be memory if the load names no context
# Most tokens of an encoder's text if neither the load nor the files name a length. An encoder computes whole texts in one step, so its
# arena grows with this number.
ENCODER_CONTEXT = 4096
KV_DTYPES = {"f32": DType.F32, "f16": DType.F16, "bf16": DType.BF16, "int8": DType.I8}


@dataclass(frozen=True, slots=True)
class Pages:
    """The numbers of pages of a cache group that are useful in a mode: floor <= least <= most."""

    group: CacheGroup
    floor: int  # with fewer pages, the load is refused
    least: int  # enough for one sequence of full length
    most: int


@dataclass(frozen=True, slots=True)
class _Mode:
    """The methods and fields that all modes have. A mode also has `entry`, the name of the function that computes a step; `generates`,
    whether it writes text; `unused`, patterns of the names of weights that its program does not read; `module`, which builds its program;
    and `pages`, the useful numbers of pages of each cache group."""

    files: ModelFiles
    format: WeightFormat
    numerics: Numerics

    @property
    def weights(self) -> WeightSource:
        return self.files.source(self.format)

    def part(self) -> IRModule | None:
        """Return the program of the part that this process computes, or that each rank computes. Return None if this part is the whole
        model."""
        return None

    def rank_weights(self, part: IRModule | None) -> list[WeightSource]:
        """Return the weights of each rank. `part` is the program of a rank, or None if there is only one."""
        return [self.weights]


# --- decoders ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Decoder(_Mode):
    """A decoder: its steps read and write the pages of its cache groups."""

    bounds: StepBounds
    kv_dtype: DType
    groups: tuple[CacheGroup, ...]
    least_context: int  # tokens of a sequence for which there must be memory: all, if the load names a context
    layers: range | None = None  # layers that this process computes; None: all
    ranks: int = 1  # GPUs over which the model is divided

    @classmethod
    def of(cls, files: ModelFiles, load: Load) -> Self:
        """Make the mode from the settings of a load. Raise LoadError or ModelError if a setting is wrong or does not go with the model."""
        format = WeightFormat.parse(format_named(files.config, load))
        max_context = load.max_context or min(files.config.max_context, MOST_CONTEXT)
        vision = files.config.vision
        # a step must have room for all tokens of an image, if they attend to each other, beside one token of each sequence
        whole = vision.num_rows * vision.most_squares if vision is not None and vision.both_ways else 0
        bounds = StepBounds(max(MAX_STEP_TOKENS, load.max_batch + whole), load.max_batch, max_context)
        kv_dtype = _kv_dtype(load.kv_dtype, format)
        least_context = load.max_context or min(max_context, load.least_context or SHORT_CONTEXT)
        layers = None if load.layers is None else range(*load.layers)
        ranks = load.tensor_parallel
        groups = groups_of(of_rank(files.config, ranks), kv_dtype, max_context, layers, coarse=format.coarse_rows)
        return cls(files, format, _numerics(load), bounds, kv_dtype, groups, least_context, layers, ranks)

    @property
    def max_context(self) -> int:
        return self.bounds.max_context

    def rank_weights(self, part: IRModule | None) -> list[WeightSource]:
        if self.ranks == 1 or part is None:
            return [self.weights]
        shapes = shapes_of(part)
        return [RankWeights(self.weights, shapes, rank, self.ranks) for rank in range(self.ranks)]

    def _most_pages(self, group: CacheGroup, max_tokens: int) -> int:
        """Return the maximum number of pages that a sequence needs at a time if at most `max_tokens` of its tokens are in one step."""
        whole = -(-self.max_context // group.page_size)
        most = GroupLimits(0, group.window, page_size=group.page_size).most_pages(max_tokens)
        return whole if most is None else min(most, whole)

    def _pages(self, group: CacheGroup, num_further: int) -> Pages:
        """Return the useful numbers of pages. `num_further`: number of useful pages beyond those of one sequence of full length. Page 0 is
        padding. Groups whose pages do not grow with the sequence get the pages of a full sequence in any case, because with fewer pages no
        long sequence could run."""
        least = 1 + self._most_pages(group, self.bounds.max_tokens)
        floor = least if group.window is not None else 1 + -(-self.least_context // group.page_size)
        return Pages(group, floor, least, least + num_further)

    def _module(self, entry: str, layers: range | None = None, ranks: int = 1) -> IRModule:
        """Build the program with the function `entry`: for all layers or `layers`, on one GPU or as one of `ranks`."""
        weights = self.weights
        found = dtypes_of(weights), self.bounds, self.kv_dtype, self.format
        forms = forms_of(weights.tensors)
        return build_step(self.files.config, *found, entry=entry, forms=forms, numerics=self.numerics, layers=layers, ranks=ranks)


def _numerics(load: Load) -> Numerics:
    """Return the numerics that the load asks for. On a GPU, the numerics are FAST, because tensor cores round in their own way. Raise
    LoadError for an unknown name, or if a load on a GPU names PORTABLE."""
    if load.numerics not in tuple(Numerics):
        raise LoadError(ErrorCode.INVALID_VALUE, f"numerics is {load.numerics!r}; expected one of {', '.join(Numerics)}")
    found = Numerics(load.numerics)
    if load.device == CPU:
        return found
    if found is Numerics.PORTABLE:
        text = (
            f"numerics is {found} and device is {load.device!r}; a GPU computes numbers of its own: choose numerics auto, or device {CPU}"
        )
        raise LoadError(ErrorCode.INVALID_VALUE, text)
    return Numerics.FAST


def format_named(config: ModelConfig, load: Load) -> str:
    """Return the name of the format of weights. On a CPU, `auto` becomes the family's `auto_format`: the format of the files, unless the
    family is as good and faster in another one."""
    return config.auto_format if load.quantize == "auto" and load.device == CPU else load.quantize


def _kv_dtype(asked: str, format: WeightFormat) -> DType:
    """Return the type of the keys and values in the cache. `auto` is f32 for weights of 32 bits, otherwise bf16. Raise LoadError for an
    unknown name."""
    if asked == "auto":
        return DType.F32 if format.bits == 32 else DType.BF16
    if asked not in KV_DTYPES:
        raise LoadError(ErrorCode.INVALID_VALUE, f"kv_dtype is {asked!r}; expected one of auto, {', '.join(KV_DTYPES)}")
    return KV_DTYPES[asked]


@dataclass(frozen=True, slots=True)
class _Writer(_Decoder):
    """A decoder that writes text, with a sampler beside the step."""

    entry: ClassVar[str] = BOTH
    generates: ClassVar[bool] = True

    def module(self) -> IRModule:
        return build_sampler(self.files.config.vocab_size, self.bounds.max_seqs, beside=self._module(BOTH))

    def part(self) -> IRModule | None:
        if self.layers is None and self.ranks == 1:
            return None
        return build_sampler(self.files.config.vocab_size, self.bounds.max_seqs, beside=self._module(BOTH, self.layers, self.ranks))

    def pages(self) -> tuple[Pages, ...]:
        """Return the useful numbers of pages of each group. The largest numbers suffice for a full batch of sequences of full length: one
        of them computes many tokens in a step, and each other one a single token."""
        return tuple(self._pages(group, self._most_pages(group, 1) * (self.bounds.max_seqs - 1)) for group in self.groups)


@dataclass(frozen=True, slots=True)
class Generator(_Writer):
    """A decoder that continues texts. The same program also returns hidden states for embeddings, so that generation and embedding share
    the weights. In a model that is computed in stages, a Generator is the last stage."""

    unused: ClassVar[tuple[str, ...]] = DECODER_UNUSED


@dataclass(frozen=True, slots=True)
class EarlyStage(Generator):
    """The first layers, or middle layers, of a decoder that generates text in stages."""

    entry: ClassVar[str] = PART

    def part(self) -> IRModule:
        assert self.layers is not None, "a stage has some layers"
        return self._module(PART, self.layers)


@dataclass(frozen=True, slots=True)
class Transcriber(_Writer):
    """A decoder that transcribes the audio that its encoder has encoded. The module also has the program of the encoder."""

    unused: ClassVar[tuple[str, ...]] = (*DECODER_UNUSED, "proj_out.weight")


@dataclass(frozen=True, slots=True)
class Embedder(_Decoder):
    """A decoder that embeds or classifies texts: the result is computed from the hidden state of a text's last token."""

    entry: ClassVar[str] = HIDDEN
    unused: ClassVar[tuple[str, ...]] = DECODER_UNUSED
    generates: ClassVar[bool] = False

    def module(self) -> IRModule:
        """Build the program. Raise LoadError if the model does not pool by the last token, or has a projection after the pooling."""
        pooling = self.files.config.embedding.pooling
        if pooling is not Pooling.LAST:
            raise LoadError(
                ErrorCode.LOAD_REFUSED, f"{self.files.path} pools by {pooling}; in a decoder, only the last token attends to all others"
            )
        if dense := self.files.config.embedding.dense:
            text = f"{self.files.path} has the module {dense[0].folder}; a projection after the pooling is supported for encoders only"
            raise LoadError(ErrorCode.LOAD_REFUSED, text)
        return self._module(HIDDEN)

    def pages(self) -> tuple[Pages, ...]:
        """Return the useful numbers of pages of each group; at most enough for one text of full length and the texts of two steps, whose
        last pages are partial. Pages are released after a text's step."""
        of_steps = 2 * (self.bounds.max_tokens // PAGE_SIZE + self.bounds.max_seqs)
        return tuple(self._pages(group, of_steps) for group in self.groups)


# --- encoders ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Encoder(_Mode):
    """An encoder, which computes whole texts in one step and has no KV cache."""

    entry: ClassVar[str] = ENCODE
    unused: ClassVar[tuple[str, ...]] = ENCODER_UNUSED
    generates: ClassVar[bool] = False
    # All positions if texts are padded. Otherwise the context of the load, or the longest text that the model's files state, or
    # ENCODER_CONTEXT, but at most the model's number of positions.
    max_context: int
    bounds: EncodeBounds

    @classmethod
    def of(cls, files: ModelFiles, load: Load) -> Self:
        """Make the mode from the settings of a load. Raise LoadError or ModelError if a setting is wrong or does not go with the model."""
        config = files.config
        if config.encoder is not None and config.encoder.is_padded:
            max_context = config.max_context
            if load.max_context not in (None, max_context):
                text = (
                    f"max_context is {load.max_context}; {files.path.name} pads every text to {max_context} tokens: leave max_context out"
                )
                raise LoadError(ErrorCode.INVALID_VALUE, text)
        else:
            max_context = min(config.max_context, load.max_context or config.embedding.max_tokens or ENCODER_CONTEXT)
        bounds = EncodeBounds(max(MAX_STEP_TOKENS, max_context), load.max_batch)
        return cls(files, WeightFormat.parse(format_named(files.config, load)), _numerics(load), max_context, bounds)

    def module(self) -> IRModule:
        weights = self.weights
        found = dtypes_of(weights), self.bounds, self.format
        return build_encode(self.files.config, *found, forms=forms_of(weights.tensors), numerics=self.numerics)

    def pages(self) -> tuple[Pages, ...]:
        return ()


# --- choosing the mode ----------------------------------------------------------------------------------------------------

Mode = Generator | Transcriber | Embedder | Encoder


def mode_of(files: ModelFiles, load: Load) -> Mode:
    """Return the mode for these files. Raise LoadError or ModelError if a setting of the load does not go with the files."""
    limit = files.config.max_context
    if load.max_context is not None and load.max_context > limit:
        text = f"max_context is {load.max_context}; {files.path.name} has positions for {limit} tokens: lower max_context, or leave it out"
        raise LoadError(ErrorCode.INVALID_VALUE, text)
    if load.tensor_parallel > 1:
        require_divisible(files.config, load.tensor_parallel)
        if files.is_embedder:
            raise LoadError(ErrorCode.LOAD_REFUSED, f"{files.path.name} is an embedding model: leave tensor_parallel out")
        if forms_of(files.source(WeightFormat.parse(load.quantize)).tensors):
            text = f"{files.path.name} has quantised weights, which tensor_parallel does not divide yet"
            raise LoadError(ErrorCode.LOAD_REFUSED, f"{text}: set quantize to bf16 or int8, or leave tensor_parallel out")
    if load.layers is not None:
        require_splittable(files.config, 1)
        return EarlyStage.of(files, load) if load.is_early else Generator.of(files, load)
    if not files.config.is_causal:
        return Encoder.of(files, load)
    if files.config.hearing is not None:
        return Transcriber.of(files, load)
    return Embedder.of(files, load) if files.is_embedder else Generator.of(files, load)
