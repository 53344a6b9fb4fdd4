"""Gemma 3: Gemma 2 with a norm of each query head and each key head, with a separate rope in layers with a window, and without a soft cap
of attention. Most models also read images: they have a SigLIP encoder, a connector that averages neighbouring patches, and attention in
both directions among the tokens of an image. A model whose attention is bidirectional becomes an encoder (`embeddinggemma.py`)."""

from __future__ import annotations

import math
from dataclasses import replace

from compiler.frontend.config import EncoderConfig, ModelConfig, read_softcap, read_windows, text_fields
from compiler.frontend.cutting import STRETCHED
from compiler.frontend.families.gemma2 import GGUF_FIELDS, GGUF_LAYER_NAMES, NORMS, completed_by, read_gemma
from compiler.frontend.family import DecoderFamily, Gguf
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import gated_mlp, head_norm_attention, sandwiched
from compiler.frontend.rope import Rope, read_rope
from compiler.frontend.sentence import EmbeddingConfig, Pooling
from compiler.frontend.towers import SIGLIP, check_tokens, read_tower
from compiler.frontend.vision import Connector, Tower, Vision

MULTIMODAL = "gemma3"
BOTH_WAYS = "embeddinggemma"  # family of bidirectional models, whose config.json has the model type gemma3_text
# MULTIMODAL_SIZES has the values that transformers assumes for absent fields in the text_config of multimodal models.
MULTIMODAL_SIZES = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}
BEGIN = "<start_of_image>"  # text that begins an image
IMAGE_TOKENS = ("image_token_index", "image_token_id")  # older and newer name of the field for the id of the image token


def read(fields: Fields) -> ModelConfig:
    if fields.text("model_type") != MULTIMODAL:
        return _read_text(fields)
    vision = _read_vision(fields) if fields.raw("vision_config") else None  # files of text-only models may have an empty vision_config
    config = _read_text(text_fields(fields, {"model_type": "gemma3_text", **MULTIMODAL_SIZES}))
    if vision is None or config.encoder is not None:
        return config
    check_tokens(fields, vision, config.vocab_size, IMAGE_TOKENS)
    if (least := min((window for window in config.windows if window is not None), default=vision.num_rows)) < vision.num_rows:
        text = f"at most {least}, the sliding_window, because the tokens of an image attend to all of them"
        raise fields.error("mm_tokens_per_image", text)
    return replace(config, vision=vision)


def _read_vision(fields: Fields) -> Vision:
    """Return the configuration of the encoder, whose connector averages squares of patches to `mm_tokens_per_image` vectors. Raise
    ConfigError if the patches cannot be divided into this number of equal squares."""
    num_tokens = fields.integer("mm_tokens_per_image", 256)
    inner = fields.fields("vision_config", SIGLIP)
    edge = inner.integer("image_size") // inner.integer("patch_size")
    rows_per_edge = math.isqrt(num_tokens)
    if rows_per_edge**2 != num_tokens or edge % rows_per_edge:
        raise fields.error("mm_tokens_per_image", f"the square of a divisor of the {edge} patches of an edge")
    return read_tower(
        fields,
        Tower.SIGLIP,
        SIGLIP,
        connector=Connector.AVERAGED,
        merge=edge // rows_per_edge,
        image_token=fields.integer(IMAGE_TOKENS[0], fields.integer(IMAGE_TOKENS[1], 262_144)),
        cutting=STRETCHED,
        marker=BEGIN,
        around=(f"\n\n{BEGIN}", "<end_of_image>\n\n"),
        both_ways=True,
        is_optional=True,
    )


def _read_text(fields: Fields) -> ModelConfig:
    """Return the configuration of the decoder, or that of an embedding model if attention is bidirectional. Raise ConfigError if attention
    has a soft cap: transformers ignores this field, so it is unknown whether the model was trained with a soft cap."""
    fields.fill(max_position_embeddings=131_072)
    config = read_gemma(fields)
    period = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    config = replace(
        with_ropes(fields, config),
        max_context=fields.integer("max_position_embeddings"),  # this field includes the rope scaling
        windows=read_windows(fields, fields.integer("sliding_window", 4096), lambda layer: (layer + 1) % period != 0),
        logit_softcap=read_softcap(fields, "final_logit_softcapping", None),
    )
    if "attn_logit_softcapping" in fields:
        raise fields.error("attn_logit_softcapping", "null: transformers has no soft cap of attention in Gemma 3")
    both_ways = config.family == BOTH_WAYS or fields.flag("use_bidirectional_attention", False)
    return read_both_ways(config) if both_ways else config


def with_ropes(fields: Fields, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the rope of the layers without a window, and the local rope of the layers with a window. Newer files
    state both ropes in `rope_parameters`. Older files state the base of the local rope in `rope_local_base_freq`. Raise ConfigError if
    these two fields disagree about the local rope."""
    if "rope_parameters" in fields:
        local = read_rope(fields, config.head_dim, layer_type="sliding_attention")
        fields.require_equal("rope_local_base_freq", local.theta, "rope_parameters.sliding_attention.rope_theta, the newer field")
    else:
        local = Rope(fields.number("rope_local_base_freq", 10_000.0), config.head_dim)
    return replace(config, rope=read_rope(fields, config.head_dim, theta=1e6, layer_type="full_attention"), local_rope=local)


def read_both_ways(config: ModelConfig) -> ModelConfig:
    """Return the configuration of an encoder with the layers of `config` and mean pooling. Tokens attend to half a window in each
    direction, or, in layers without a window, to their whole text."""
    reaches = tuple(None if window is None else window // 2 for window in config.windows)
    encoder = EncoderConfig(0, 0, 0, reaches=reaches)
    return replace(config, family=BOTH_WAYS, encoder=encoder, embedding=EmbeddingConfig(Pooling.MEAN, True))


FAMILY = DecoderFamily(
    ("gemma3_text", MULTIMODAL),
    read,
    sandwiched(head_norm_attention, gated_mlp, NORMS),
    gguf=Gguf(
        "gemma3",
        {**GGUF_FIELDS, "rope.freq_base_swa": "rope_local_base_freq"},
        GGUF_LAYER_NAMES,
        norm_offset=1.0,
        complete=completed_by(largest=62),
    ),
)
