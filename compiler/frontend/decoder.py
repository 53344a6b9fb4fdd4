"""The step of a causal decoder, composed of the layers of its family.

    step(tokens[t], positions[t], slots[t], seq_ids[t], page_tables[s, p], logit_rows[r], cache, scales?) -> logits[r, vocabulary]
    hidden(...the same...) -> hidden[r, size]    of models that only embed: the output of the last norm, without the head
    both(..., logit_rows[r], hidden_rows[h], ...) -> (logits[r, vocabulary], hidden[h, size])

`t` tokens of `s` sequences, prefill and decode mixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compiler.frontend.config import ModelConfig
from compiler.frontend.family import DecoderFamily
from compiler.frontend.layers.decoder import Batch, Layer, Step, embed, logits, stream_norm
from compiler.frontend.layers.nn import DEFAULT_FORMAT, Net, WeightFormat, prefix_of
from compiler.frontend.registry import decoder_family
from compiler.ir.dims import DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Var
from compiler.ir.graph.values import MakeTuple
from compiler.ir.module import IRModule
from compiler.ir.types import tensor
from compiler.ops.attention.kv_cache import PAGE
from compiler.ops.embedding import EMBEDDING

ENTRY, HIDDEN, BOTH = "step", "hidden", "both"
PREFIX = "model."
UNUSED = (
    *("*rotary_emb.inv_freq", "lm_head.weight", "language_model.lm_head.weight"),  # computed, and beside tied embeddings
    *("vision_tower.*", "multi_modal_projector.*", "model.vision_tower.*", "model.multi_modal_projector.*", "visual.*", "model.visual.*"),
)


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Declared ranges of the step's variables: what memory is planned for."""

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
) -> IRModule:
    net = Net(dtypes, format)
    t, s = DimVar("t", 0, bounds.max_tokens), DimVar("s", 0, bounds.max_seqs)
    p, r, h = DimVar("p", 0, bounds.max_pages), DimVar("r", 0, bounds.max_seqs), DimVar("h", 0, bounds.max_seqs)
    pages = DimVar("pages", 1)
    kv_shape = (config.num_layers, 2, pages, config.num_kv_heads, PAGE * config.head_dim)
    i32 = DType.I32
    batch = Batch(
        tokens=Var("tokens", tensor((t,), i32)),
        positions=Var("positions", tensor((t,), i32)),
        slots=Var("slots", tensor((t,), i32)),
        seq_ids=Var("seq_ids", tensor((t,), i32)),
        page_tables=Var("page_tables", tensor((s, p), i32)),
        logit_rows=Var("logit_rows", tensor((r,), i32)),
        hidden_rows=Var("hidden_rows", tensor((h,), i32)) if entry == BOTH else None,
        cache=Var("cache", tensor(kv_shape, cache_dtype)),
        scales=Var("scales", tensor((*kv_shape[:4], PAGE), DType.F32)) if cache_dtype is DType.I8 else None,
    )
    scales = () if batch.scales is None else (batch.scales,)
    step = Step(net, config, batch, _prefix(dtypes), t, bounds.max_context, batch.cache, scales)
    with net.function(entry, batch.params, pure=False):
        net.builder.returns(_result(step, decoder_family(config.family), entry))
    return net.builder.finish()


def _prefix(dtypes: Mapping[str, DType]) -> str:
    """The prefix of the decoder's weights. Multimodal checkpoints nest the decoder under an extra `language_model.`."""
    known = (f"language_model.{PREFIX}", f"{PREFIX}language_model.", PREFIX)
    return next(filter(None, (prefix_of(dtypes, prefix) for prefix in known)), "")


def _result(step: Step, family: DecoderFamily, entry: str) -> Var:
    x, batch = embed(step), step.batch
    for number in range(step.config.num_layers):
        x = family.layer(Layer(step, number), x)
    if entry == HIDDEN:
        return _hidden(step, family, x, batch.logit_rows)
    found = logits(step, _hidden(step, family, x, batch.logit_rows))
    if batch.hidden_rows is None:
        return found
    return step.net.builder.emit(MakeTuple((found, _hidden(step, family, x, batch.hidden_rows))))


def _hidden(step: Step, family: DecoderFamily, x: Var, rows: Var) -> Var:
    """The rows that are asked for, through the last norm."""
    return stream_norm(step, step.net.call(EMBEDDING, x, rows), f"{step.prefix}{family.last_norm}")
