"""The step of a causal decoder, composed of the layers of its family. A module has one of these programs:

    step(tokens[t], positions[t], slots[t]*, seq_ids[t], page_tables[s, p]*, logit_rows[r], (cache, scales?)*) -> logits[r, vocabulary]
    hidden(...) -> hidden[r, size]
    both(..., logit_rows[r], hidden_rows[h], ...) -> (logits[r, vocabulary], hidden[h, size])
    part(..., (cache, scales?)*) -> x[t, size]
    observed(...) -> (logits[r, vocabulary], squares[in]*)

A step has `t` tokens of `s` sequences, prefill and decode mixed. Three dots stand for the other arguments of `step`. Arguments with a star
repeat for each KV cache group, and `squares` for each input of matrices. Only caches of 8 bits have `scales`. Models with states, and
speech models, have further arguments before `logit_rows`: see `runtime/step_arguments.py`. A program without the first layer has the
residual stream x[t, size] before its layers in place of `tokens`.

`hidden` is for models that only embed: it returns the output of the last norm, without the head. For classifiers and rerankers, it returns
the outputs of the classes instead, numbers[r, classes]. `both` also returns the hidden states of the tokens `hidden_rows`. For a speech
model, it returns attention[h, heads * frames] instead, the attention of the aligned heads to the audio. `part` computes a stage that is not
the last one: it has no `logit_rows`, and returns the residual stream after its layers. `observed` measures what the matrices read: see
`Net.squares`.

If the model sees or listens, further arguments of `both` follow `hidden_rows`: `seen_at[v]`, the indices of the tokens of images and audio;
and `seen_rows[v, depths * size]`, whose first `size` elements replace the embedding of such a token, and whose other vectors are added to
the token's residual stream after the first layers. If the tokens of an image attend to all tokens of the image, `seen_lasts[v]` follows,
the last position of each such token's image. If tokens of an image have three coordinates, `axes[t, 3]` follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compiler.frontend.cache_groups import groups_of
from compiler.frontend.config import ModelConfig
from compiler.frontend.family import DecoderFamily
from compiler.frontend.hearing import add_hearing, heard_tensors
from compiler.frontend.layers.decoder import (
    Batch,
    HeardCache,
    KVCache,
    Layer,
    SeenRows,
    StateCache,
    Step,
    classified,
    deepened,
    embed,
    logits,
    own_head,
    stream_norm,
)
from compiler.frontend.layers.nn import DEFAULT_FORMAT, Net, WeightFormat, prefix_of
from compiler.frontend.listening import add_listening
from compiler.frontend.numerics import Numerics
from compiler.frontend.quantized.held import NO_FORMS, Form
from compiler.frontend.ranks import of_rank
from compiler.frontend.registry import decoder_family
from compiler.frontend.seeing import add_seeing
from compiler.ir.dims import DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Var
from compiler.ir.graph.values import MakeTuple
from compiler.ir.module import IRModule
from compiler.ir.types import tensor
from compiler.ops.attention.kv_cache import PAGE
from compiler.ops.embedding import EMBEDDING
from compiler.ops.manipulate import CONCAT
from runtime.cache_groups import HeardGroup, KVGroup, StateGroup

ENTRY, HIDDEN, BOTH, OBSERVED, PART = "step", "hidden", "both", "observed", "part"
PREFIX = "model."
UNUSED = (
    # Tables that the program recomputes, and heads of models with tied embeddings.
    *("*rotary_emb.inv_freq", "lm_head.weight", "language_model.lm_head.weight"),
    "mtp.*",  # multi-token prediction
    *("vision_tower.*", "multi_modal_projector.*", "model.vision_tower.*", "model.multi_modal_projector.*", "visual.*", "model.visual.*"),
    *("model.vision_model.*", "model.connector.*"),
    *("vision_model.*", "audio_tower.*", "model.audio_tower.*", "hearing.*", "model.embed_vision.*", "model.embed_audio.*"),
)


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Upper bounds of the step's symbolic variables, for which memory is planned."""

    max_tokens: int
    max_seqs: int
    max_context: int

    @property
    def max_pages(self) -> int:
        return -(-self.max_context // PAGE)


def build_step(
    config: ModelConfig,
    dtypes: Mapping[str, DType],
    bounds: StepBounds,
    cache_dtype: DType,
    format: WeightFormat = DEFAULT_FORMAT,
    *,
    entry: str = ENTRY,
    forms: Mapping[str, Form] = NO_FORMS,
    numerics: Numerics = Numerics.AUTO,
    layers: range | None = None,
    ranks: int = 1,
) -> IRModule:
    """Build a module with the program `entry` of a step. For a speech model, the module also has the program `hear`. With the entry `both`,
    it has the program `see` if the model sees, and `listen` if it listens. `dtypes` has the type of each tensor of the checkpoint, and
    `forms` the forms of the matrices that the checkpoint stores as encoded numbers. With `layers`, the program computes only these layers,
    and embeds the tokens only if the first layer is among them. Only the entry `part` has no head, so use it for layers before the last.
    If `ranks` is more than 1, each of these ranks runs the program. Raise CannotDivide if the model cannot be divided over that many
    ranks."""
    net = Net(dtypes, format, forms=forms, numerics=numerics, ranks=ranks)
    return _module(net, of_rank(config, ranks), bounds, cache_dtype, entry, layers)


def build_observed(
    config: ModelConfig, dtypes: Mapping[str, DType], bounds: StepBounds, cache_dtype: DType, format: WeightFormat
) -> tuple[IRModule, tuple[tuple[str, ...], ...]]:
    """Build the program `observed`, with arguments as for `build_step`. Also return, for each of the program's results `squares`, the names
    of the matrices that read the input whose squares it sums."""
    squares: dict[tuple[str, ...], Var] = {}
    module = _module(Net(dtypes, format, squares=squares), config, bounds, cache_dtype, OBSERVED)
    return module, tuple(squares)


def _module(net: Net, config: ModelConfig, bounds: StepBounds, cache_dtype: DType, entry: str, layers: range | None = None) -> IRModule:
    """Build the module that `build_step` and `build_observed` return: declare the parameters of the program, and add the programs."""
    t, s = DimVar("t", 0, bounds.max_tokens), DimVar("s", 0, bounds.max_seqs)
    r, h = DimVar("r", 0, bounds.max_seqs), DimVar("h", 0, bounds.max_seqs)
    m, i32 = DimVar("m", 0, min(bounds.max_tokens, bounds.max_tokens // PAGE + bounds.max_seqs)), DType.I32
    found = (group for group in groups_of(config, cache_dtype, bounds.max_context, layers, coarse=net.format.coarse_rows) if group.layers)
    groups = [("" if i == 0 else str(i), group) for i, group in enumerate(found)]
    begins = layers is None or layers.start == 0
    batch = Batch(
        tokens=Var("tokens", tensor((t,), i32)) if begins else Var("x", tensor((t, config.hidden_size), DType.F32)),
        positions=Var("positions", tensor((t,), i32)),
        seq_ids=Var("seq_ids", tensor((t,), i32)),
        logit_rows=None if entry == PART else Var("logit_rows", tensor((r,), i32)),
        hidden_rows=Var("hidden_rows", tensor((h,), i32)) if entry == BOTH else None,
        caches=tuple(_kv_cache(group, t, s, bounds, suffix) for suffix, group in groups if isinstance(group, KVGroup)),
        states=tuple(_state_cache(group, s, m, suffix) for suffix, group in groups if isinstance(group, StateGroup)),
        heard=next((_heard_cache(group, s) for _, group in groups if isinstance(group, HeardGroup)), None),
        seen=_seen_rows(config, t, bounds) if entry == BOTH and config.reads_rows else None,
        starts=Var("starts", tensor((s + 1,), i32)),
        saved=Var("saved", tensor((m,), i32)),
    )
    family, prefix = decoder_family(config.family), prefix_of_decoder(net.dtypes)
    step = Step(net, config, batch, prefix, f"{prefix}{family.embedding}", t, bounds.max_context)
    with net.function(entry, batch.params, pure=False):
        net.builder.returns(_result(step, family, entry, range(config.num_layers) if layers is None else layers))
    if batch.heard is not None:
        add_hearing(net, config, batch.heard.group)
    if batch.seen is not None and config.vision is not None:
        add_seeing(net, config)
    if batch.seen is not None and config.listening is not None:
        add_listening(net, config)
    return net.builder.finish()


def _kv_cache(group: KVGroup, t: DimVar, s: DimVar, bounds: StepBounds, suffix: str) -> KVCache:
    """Return the parameters of a program for a group that caches keys and values. Their names end with `suffix`."""
    pages = DimVar(f"pages{suffix}", 1)
    held = group.arrays(pages)
    return KVCache(
        group,
        slots=Var(f"slots{suffix}", tensor((t,), DType.I32)),
        page_tables=Var(f"page_tables{suffix}", tensor((s, DimVar(f"p{suffix}", 0, bounds.max_pages)), DType.I32)),
        held=tuple(
            Var(f"{name}{suffix}", tensor(shape, DType(dtype))) for name, (shape, dtype) in zip(("cache", "scales"), held, strict=False)
        ),
    )


def _state_cache(group: StateGroup, s: DimVar, m: DimVar, suffix: str) -> StateCache:
    """Return the parameters of a program for a group of states. Their names end with `suffix`."""
    arrays = group.arrays(DimVar(f"pages{suffix}", 1))
    names = ["states" if len(arrays) == 1 else f"states_{part}_" for part in range(len(arrays))]
    return StateCache(
        group,
        sources=Var(f"sources{suffix}", tensor((s,), DType.I32)),
        pages=Var(f"saved_pages{suffix}", tensor((m,), DType.I32)),
        held=tuple(Var(f"{name}{suffix}", tensor(shape, DType(dtype))) for name, (shape, dtype) in zip(names, arrays, strict=True)),
    )


def _heard_cache(group: HeardGroup, s: DimVar) -> HeardCache:
    return HeardCache(group, Var("heard_pages", tensor((s,), DType.I32)), heard_tensors(group, DimVar("heard_parts", 1)))


def _seen_rows(config: ModelConfig, t: DimVar, bounds: StepBounds) -> SeenRows:
    """Return the parameters of a program for the rows of images and audio, which it reads in place of token embeddings."""
    v, i32 = DimVar("v", 0, bounds.max_tokens), DType.I32
    vision, size = config.vision, config.hidden_size * (1 if config.vision is None else config.vision.num_depths)
    lasts = Var("seen_lasts", tensor((v,), i32)) if vision is not None and vision.both_ways else None
    axes = Var("axes", tensor((t, 3), i32)) if vision is not None and vision.three_axes else None
    return SeenRows(Var("seen_at", tensor((v,), i32)), Var("seen_rows", tensor((v, size), DType.F32)), lasts, axes)


def table_and_head(config: ModelConfig, tensors: Mapping[str, object]) -> tuple[str, str]:
    """Return the names of the table of embeddings and of the head. Programs read the tensor of the head only if the embeddings are not
    tied."""
    prefix = prefix_of_decoder(tensors)
    return f"{prefix}{decoder_family(config.family).embedding}.weight", f"{own_head(prefix)}.weight"


def prefix_of_decoder(tensors: Mapping[str, object]) -> str:
    """Return the prefix of the names of the decoder's weights, or "" if no name has a known prefix. Most multimodal checkpoints nest the
    decoder under an extra `language_model.`."""
    known = (f"{PREFIX}decoder.", f"language_model.{PREFIX}", f"{PREFIX}language_model.", f"{PREFIX}text_model.", PREFIX, "backbone.")
    return next(filter(None, (prefix_of(tensors, prefix) for prefix in known)), "")


def _result(step: Step, family: DecoderFamily, entry: str, layers: range) -> Var:
    """Return the result of the program `entry`, which has these layers."""
    x, batch = _stream(step, family) if layers.start == 0 else step.batch.tokens, step.batch
    for number in layers:
        x = deepened(step, family.layer(Layer(step, number), x), number)
    if batch.logit_rows is None:
        return x
    if entry == HIDDEN:
        hidden = _hidden(step, family, x, batch.logit_rows)
        return hidden if step.config.classes is None else classified(step, hidden, step.config.classes)
    found = logits(step, _hidden(step, family, x, batch.logit_rows))
    if step.net.squares is not None:
        return step.net.builder.emit(MakeTuple((found, *step.net.squares.values())))
    if batch.hidden_rows is None:
        return found
    second = step.net.call(CONCAT, *step.attended, axis=1) if step.attended else _hidden(step, family, x, batch.hidden_rows)
    return step.net.builder.emit(MakeTuple((found, second)))


def _stream(step: Step, family: DecoderFamily) -> Var:
    """Return the residual stream before the first layer."""
    x = embed(step)
    step.layer_inputs = None if family.layer_inputs is None else family.layer_inputs(step, x)
    return x if family.widen is None else family.widen(step, x)


def _hidden(step: Step, family: DecoderFamily, x: Var, rows: Var) -> Var:
    """Return the hidden states of the requested rows after the last norm."""
    chosen = step.net.call(EMBEDDING, x, rows)
    return stream_norm(step, chosen if family.narrow is None else family.narrow(step, chosen), f"{step.prefix}{family.last_norm}")
