"""Gemma 3: Gemma 2 without soft caps, with a norm per head, and with a separate rope in layers with a window. Of multimodal models, only
the decoder is served."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import EncoderConfig, ModelConfig, read_softcap, read_windows, text_fields
from compiler.frontend.families.gemma2 import GGUF_FIELDS, GGUF_LAYER_NAMES, NORMS, completed_by, read_gemma
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, gated_mlp, head_norm_attention, sandwiched
from compiler.frontend.rope import Rope, read_rope
from compiler.frontend.sentence import EmbeddingConfig, Pooling
from compiler.ir.graph.atoms import Var

MULTIMODAL = "gemma3"
BOTH_WAYS = "embeddinggemma"  # family of bidirectional models, whose config.json has the model type gemma3_text
# MULTIMODAL_SIZES has the defaults of the text_config in multimodal models.
MULTIMODAL_SIZES = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}


def read(fields: Fields) -> ModelConfig:
    if fields.text("model_type") == MULTIMODAL:
        fields = text_fields(fields, {"model_type": "gemma3_text", **MULTIMODAL_SIZES})
    config = read_gemma(fields)
    period = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    config = replace(
        with_ropes(fields, config),
        max_context=fields.integer("max_position_embeddings", 131_072),  # already includes the rope scaling
        windows=read_windows(fields, fields.integer("sliding_window", 4096), lambda layer: (layer + 1) % period != 0),
        attention_softcap=read_softcap(fields, "attn_logit_softcapping", None),
        logit_softcap=read_softcap(fields, "final_logit_softcapping", None),
    )
    if config.family != BOTH_WAYS and not fields.flag("use_bidirectional_attention", False):
        return config
    if config.attention_softcap is not None:
        raise fields.error("attn_logit_softcapping", "null, since attention is bidirectional")
    return read_both_ways(config)


def with_ropes(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the ropes of the layers without and with a window."""
    if "rope_parameters" in fields:
        local = read_rope(fields, config.head_dim, layer_type="sliding_attention")
    else:
        local = Rope(fields.number("rope_local_base_freq", 10_000.0), config.head_dim)
    return replace(config, rope=read_rope(fields, config.head_dim, theta=1e6, layer_type="full_attention"), local_rope=local)


def read_both_ways(config: ModelConfig) -> ModelConfig:
    """Return the configuration of an encoder with these layers. Tokens attend to half a window in each direction."""
    reaches = tuple(None if window is None else window // 2 for window in config.windows)
    encoder = EncoderConfig(0, 0, 0, reaches=reaches)
    return replace(config, family=BOTH_WAYS, encoder=encoder, embedding=EmbeddingConfig(Pooling.MEAN, True))


def layer(at: Layer, x: Var) -> Var:
    return sandwiched(at, x, head_norm_attention, gated_mlp, NORMS)


FAMILY = DecoderFamily(
    ("gemma3_text", MULTIMODAL),
    read,
    layer,
    gguf=Gguf(
        "gemma3",
        {**GGUF_FIELDS, "rope.freq_base_swa": "rope_local_base_freq"},
        GGUF_LAYER_NAMES,
        norm_offset=1.0,
        complete=completed_by(largest=62),
    ),
)
