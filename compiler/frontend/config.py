"""A model's configuration in one vocabulary that all families share.

`load_config` reads a directory as the hub has it; a family is a row of FAMILIES: how the fields of its config.json
become a `ModelConfig`. Defaults are those of transformers, since files leave out what equals them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from compiler.frontend.errors import ConfigError, ModelError, UnknownModel
from compiler.frontend.fields import Fields, read_json
from compiler.frontend.rope import Rope, read_rope
from compiler.frontend.sentence import EmbeddingConfig, Pooling, load_embedding


class Activation(StrEnum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """What only encoders have: learned positions, segments, attention in both directions."""

    num_positions: int  # rows of the position table
    position_offset: int  # row of a text's first token
    num_segments: int  # 0: none; texts are all of segment 0
    relative_buckets: int = 0  # 0: none; MPNet's table of relative positions


@dataclass(frozen=True, slots=True)
class ModelConfig:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int
    activation: Activation
    norm_eps: float
    max_context: int  # tokens, with the scaling of positions applied
    attention_scale: float  # of the products of queries and keys
    windows: tuple[int | None, ...]  # per layer: how many tokens one attends to, itself included; None: all
    rope: Rope | None = None
    local_rope: Rope | None = None  # of the layers with a window, where these differ
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of the projection behind attention
    mlp_bias: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    norm_offset: float = 0.0  # added to the weights of RMS norms
    encoder: EncoderConfig | None = None
    embedding: EmbeddingConfig = field(default=EmbeddingConfig(Pooling.MEAN, True))

    @property
    def is_causal(self) -> bool:
        return self.encoder is None

    def rope_of_layer(self, layer: int) -> Rope | None:
        return self.local_rope if self.local_rope is not None and self.windows[layer] is not None else self.rope


def load_config(path: str | Path) -> ModelConfig:
    """The configuration of a model directory."""
    directory = Path(path)
    if not (file := directory / "config.json").is_file():
        raise ModelError(f"{directory} has no config.json; expected a directory as a model hub has it, or a .gguf file")
    config = parse_config(read_json(file))
    return replace(config, embedding=load_embedding(directory, config.embedding.pooling))


def parse_config(values: object) -> ModelConfig:
    """The content of a config.json."""
    fields = Fields(values, "config.json")
    if "quantization_config" in fields:
        method = fields.fields("quantization_config").text("quant_method", "an unnamed method")
        raise ConfigError(f"the weights are quantized already, by {method}; expected a float checkpoint, quantized at load, or GGUF")
    if fields.text("model_type") == "gemma3":  # it reads images, too; the decoder within it is served
        text = fields.fields("text_config")
        fields = Fields({"model_type": "gemma3_text", **GEMMA3_SIZES, **text.values}, text.where)
    model_type = fields.text("model_type")
    read = FAMILIES.get(model_type)
    if read is None:
        raise UnknownModel(f"model_type {model_type!r} is not known; known are {', '.join(FAMILIES)}")
    config = read(fields)
    if config.is_causal:
        config = replace(config, embedding=EmbeddingConfig(Pooling.LAST, True))
    return config


# --- decoders ---------------------------------------------------------------------------------------------------------------


def _decoder(fields: Fields, family: str, *, eps: float = 1e-6, default_head_dim: int = 0, act: str = "hidden_act") -> ModelConfig:
    """What all decoders have in common: RMS norms, gated MLP, rotary positions, grouped heads."""
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim: int = fields.integer("head_dim", default_head_dim or hidden_size // num_heads)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    rope = read_rope(fields, head_dim)
    num_layers = fields.integer("num_hidden_layers", maximum=10_000)
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=_activation(fields, act, "silu"),
        norm_eps=fields.number("rms_norm_eps", eps),
        max_context=rope.max_context(fields.integer("max_position_embeddings", 2048)),
        attention_scale=head_dim**-0.5,
        windows=(None,) * num_layers,
        rope=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _activation(fields: Fields, name: str, default: str) -> Activation:
    found = ACTIVATIONS.get(fields.text(name, default))
    if found is None:
        raise fields.error(name, f"one of {', '.join(ACTIVATIONS)}")
    return found


def _windows(fields: Fields, window: int | None, has_window: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Per layer; `layer_types`, where it is written down, has the last word over the family's rule."""
    num_layers = fields.integer("num_hidden_layers", maximum=10_000)
    rule = ["sliding_attention" if window is not None and has_window(layer) else "full_attention" for layer in range(num_layers)]
    types = fields.raw("layer_types", rule)
    if not isinstance(types, list) or len(types) != num_layers or not {"sliding_attention", "full_attention"}.issuperset(types):
        raise fields.error("layer_types", f"a list of {num_layers} times sliding_attention or full_attention")
    if window is None and "sliding_attention" in types:
        raise fields.error("sliding_window", "a number of tokens, as layer_types has sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _whole_heads(config: ModelConfig) -> ModelConfig:
    if config.rope is not None and config.rope.size != config.head_dim:
        raise ConfigError(f"{config.rope.size} of {config.head_dim} dimensions rotate; {config.family} rotates all of them")
    return config


def _llama(fields: Fields) -> ModelConfig:
    attention_bias = fields.flag("attention_bias", False)
    return replace(
        _whole_heads(_decoder(fields, "llama")),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _mistral(fields: Fields) -> ModelConfig:
    # Null means none, but where the field is absent the window of the first Mistral applies.
    window = fields.integer("sliding_window", None if "sliding_window" in fields.values else 4096)
    return replace(_whole_heads(_decoder(fields, "mistral")), windows=_windows(fields, window, lambda _: True))


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    first = fields.integer("max_window_layers", 28, minimum=0)
    window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None
    return _windows(fields, window, lambda layer: layer >= first)


def _qwen2(fields: Fields) -> ModelConfig:
    return replace(_whole_heads(_decoder(fields, "qwen2")), qkv_bias=True, windows=_qwen_windows(fields))


def _qwen3(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    config = _whole_heads(_decoder(fields, "qwen3", default_head_dim=128))
    return replace(config, qkv_bias=bias, output_bias=bias, windows=_qwen_windows(fields))


def _gemma(fields: Fields, family: str) -> ModelConfig:
    act = "hidden_activation" if "hidden_activation" in fields else "hidden_act"
    config = _whole_heads(_decoder(fields, family, default_head_dim=256, act=act))
    bias = fields.flag("attention_bias", False)
    return replace(
        config,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        embedding_scale=config.hidden_size**0.5,
        norm_offset=1.0,
        qkv_bias=bias,
        output_bias=bias,
    )


def _softcap(fields: Fields, name: str, default: float | None) -> float | None:
    return fields.number(name, None if name in fields.values else default)


def _gemma2(fields: Fields) -> ModelConfig:
    return replace(
        _gemma(fields, "gemma2"),
        windows=_windows(fields, fields.integer("sliding_window", 4096), lambda layer: layer % 2 == 0),
        attention_softcap=_softcap(fields, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(fields, "final_logit_softcapping", 30.0),
    )


def _gemma3(fields: Fields) -> ModelConfig:
    config = _gemma(fields, "gemma3_text")
    period = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    if "rope_parameters" in fields:
        local = read_rope(fields, config.head_dim, layer_type="sliding_attention")
    else:
        local = Rope(fields.number("rope_local_base_freq", 10_000.0), config.head_dim)
    return replace(
        config,
        rope=read_rope(fields, config.head_dim, theta=1e6, layer_type="full_attention"),
        local_rope=local,
        max_context=fields.integer("max_position_embeddings", 131_072),  # its scaling is counted in already
        windows=_windows(fields, fields.integer("sliding_window", 4096), lambda layer: (layer + 1) % period != 0),
        attention_softcap=_softcap(fields, "attn_logit_softcapping", None),
        logit_softcap=_softcap(fields, "final_logit_softcapping", None),
    )


# Of the decoder in a model with images, whose file leaves out what equals them.
GEMMA3_SIZES = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}


def _phi3(fields: Fields) -> ModelConfig:
    return replace(_decoder(fields, "phi3", eps=1e-5), windows=_windows(fields, fields.integer("sliding_window", None), lambda _: True))


# --- encoders ---------------------------------------------------------------------------------------------------------------


def _encoder(fields: Fields, family: str, *, position_offset: int, num_segments: int, relative_buckets: int = 0) -> ModelConfig:
    if fields.text("position_embedding_type", "absolute") != "absolute":
        raise fields.error("position_embedding_type", "absolute")
    if fields.flag("is_decoder", False):
        raise fields.error("is_decoder", "false")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise fields.error("num_attention_heads", f"a divisor of hidden_size ({hidden_size})")
    num_positions = fields.integer("max_position_embeddings", 512)
    if num_positions <= position_offset:
        raise fields.error("max_position_embeddings", f"more than {position_offset}, the row of the first token")
    num_layers = fields.integer("num_hidden_layers", maximum=10_000)
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        activation=_activation(fields, "hidden_act", "gelu"),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        max_context=num_positions - position_offset,
        attention_scale=(hidden_size // num_heads) ** -0.5,
        windows=(None,) * num_layers,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        encoder=EncoderConfig(num_positions, position_offset, num_segments, relative_buckets),
    )


def _bert(fields: Fields) -> ModelConfig:
    return _encoder(fields, "bert", position_offset=0, num_segments=fields.integer("type_vocab_size", 2))


def _roberta(fields: Fields) -> ModelConfig:
    # Positions are counted from the padding token's id: rows up to there belong to padding.
    offset = fields.integer("pad_token_id", 1, minimum=0) + 1
    return _encoder(fields, "roberta", position_offset=offset, num_segments=fields.integer("type_vocab_size", 2))


def _mpnet(fields: Fields) -> ModelConfig:
    buckets = fields.integer("relative_attention_num_buckets", 32, minimum=2)
    return _encoder(fields, "mpnet", position_offset=2, num_segments=0, relative_buckets=buckets)


FAMILIES: dict[str, Callable[[Fields], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "mpnet": _mpnet,
}
