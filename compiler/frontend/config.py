"""A model's configuration under field names that all families share, and functions that read the fields common to many of them.

Defaults are those of transformers, since files omit values that equal the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from compiler.frontend.audio import Listening
from compiler.frontend.classes import Classes, read_classes
from compiler.frontend.errors import ConfigError
from compiler.frontend.fields import Fields
from compiler.frontend.mixture import Mixture
from compiler.frontend.recurrence import Recurrence, ShortConvolution
from compiler.frontend.reranker import PairPrompt, Verdict
from compiler.frontend.rope import Rope, read_rope
from compiler.frontend.sentence import EmbeddingConfig, Pooling
from compiler.frontend.vision import Vision


class Activation(StrEnum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU2 = "relu2"  # activation relu(x) squared
    XIELU = "xielu"  # has learned parameters: see `layers/xielu.py`
    QUICK_GELU = "quick_gelu"  # x * sigmoid(1.702 * x)


DECODERS_ONLY = (Activation.RELU2, Activation.XIELU)  # activations that only layers of decoders have
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "quick_gelu": Activation.QUICK_GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
    "xielu": Activation.XIELU,
}


class Norm(StrEnum):
    """The kind of a model's norms: RMS norms, or layer norms with or without a bias."""

    RMS = "rms"
    LAYER = "layer"
    LAYER_WITHOUT_BIAS = "layer_without_bias"


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The settings that only encoders have: learned positions, segments, and to which tokens a token attends."""

    num_positions: int  # rows of the position table; 0: no position table
    position_offset: int  # row of the position table for a text's first token
    num_segments: int  # segments that embeddings distinguish; 0: no segment embeddings
    relative_buckets: int = 0  # buckets in MPNet's table of relative positions; 0: no relative positions
    embedding_size: int | None = None  # size of token embeddings, which are projected to the hidden size; None: the hidden size
    # Per layer: how many tokens away a token attends in either direction; None: to its whole text. Empty: to its whole text in all layers.
    reaches: tuple[int | None, ...] = ()
    looks_back: bool = False  # whether a token attends only to itself and earlier tokens
    is_padded: bool = False  # whether texts are padded to the number of positions, as in training; tokens attend to the padding, too
    class_pooling: Pooling = Pooling.CLS  # how the vectors of a text become the vector that a classification head reads


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Attention temperature tuning for long contexts (Llama 4, Ministral 3): a query is multiplied by
    `1 + beta * log(1 + (position + ahead) // original_context)`, which grows with its position."""

    beta: float
    original_context: int  # number of positions after which the factor first grows; Llama 4 calls it floor_scale
    ahead: int = 0  # 1 if the formula counts positions from 1, as in Llama 4


@dataclass(frozen=True, slots=True)
class Heads:
    """The key and value heads of a layer."""

    num_kv: int  # number of key and value heads; divides the number of query heads
    size: int  # elements of a key
    value_size: int | None = None  # a value is the first `value_size` elements of its key; None: the cache has values beside keys


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: the keys and values of all heads are projections of one latent vector per token. Keys also have a part
    that RoPE rotates, which all heads share."""

    rank: int  # size of the latent vector of keys and values
    query_rank: int | None  # size of the latent vector of queries; None: queries are projected without a latent
    plain_size: int  # elements of a head's query and key that are not rotated
    rotated_size: int  # elements of the rotated part of a head's query, and of the rotated part of keys, which all heads share
    value_size: int  # elements of a head's value

    @property
    def kept_size(self) -> int:
        """The number of elements that the cache stores per token."""
        return self.rank + self.rotated_size


@dataclass(frozen=True, slots=True)
class BranchFactors:
    """Factors that multiply the inputs and outputs of a layer's attention and of its Mamba-2 part, and the gate and output of its MLP."""

    attention_in: float
    attention_out: float
    state_in: float
    state_out: float
    mlp_gate: float  # factor that multiplies the gate before its activation
    mlp_out: float


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Per-layer embeddings: an additional input vector per token and layer."""

    size: int
    vocab_size: int  # rows of the per-layer embedding table; tokens with ids from `vocab_size` on read the first row


@dataclass(frozen=True, slots=True)
class AltUp:
    """Alternating updates (Baykal et al., arXiv 2301.13310): the residual stream is several streams side by side. A layer predicts its
    results for all streams, and computes the result of only the first stream. The error of the prediction for the first stream then
    corrects all predictions."""

    num_streams: int
    laurel_rank: int  # rank of the learned part of the residual connection around attention


@dataclass(frozen=True, slots=True)
class Hearing:
    """The encoder of a speech model. It has the hidden size of the decoder."""

    num_mels: int
    num_frames: int  # frames of a window of audio, each of 20 ms
    num_layers: int
    num_heads: int
    intermediate_size: int
    aligned: tuple[tuple[int, int], ...]  # (layer, head) pairs whose attention to the audio shows which frames a token belongs to

    @property
    def num_hops(self) -> int:
        """The number of hops (of 10 ms) in a window. The second convolution makes one frame of two hops."""
        return 2 * self.num_frames


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a model of any family. Fields that do not concern a family keep their defaults."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # number of key and value heads; divides num_heads
    head_dim: int
    activation: Activation
    norm_eps: float
    max_context: int  # maximum number of tokens of a sequence; includes the extension by rope scaling
    attention_scale: float  # factor that multiplies the products of queries and keys
    windows: tuple[int | None, ...]  # per layer: number of most recent tokens, including itself, to which a token attends; None: all
    rope: Rope | None = None
    local_rope: Rope | None = None  # rope of the layers with a window; None: the same as in other layers
    global_heads: Heads | None = None  # key and value heads of the layers without a window; None: the same as in other layers
    values_from_keys: frozenset[int] = frozenset()  # layers that project values with the key matrix
    # `kv_sources` has for each layer the layer whose keys and values it reads. Empty: each layer reads its own keys and values.
    kv_sources: tuple[int, ...] = ()
    intermediate_sizes: tuple[int, ...] = ()  # intermediate size per layer; empty: `intermediate_size` in all layers
    attending: frozenset[int] | None = None  # layers that have attention; None: all layers without a state
    latent: Latent | None = None
    layer_inputs: LayerInputs | None = None
    altup: AltUp | None = None
    sparsities: tuple[float, ...] = ()  # per layer: fraction of the activation's inputs that are set to 0; empty: none in any layer
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # bias of the output projection of attention
    mlp_bias: bool = False
    qkv_limit: float | None = None  # limit to which elements of queries, keys and values are clipped, in both directions
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sinks: bool = False  # whether a learned score per head, to which no value belongs, takes part in each softmax
    head_norms: bool = False  # whether each query head and key head has a norm, in families in which only some models have such norms
    parallel: bool = False  # whether attention and MLP read the same norm, in families in which only some models have such layers
    norm: Norm = Norm.RMS  # norm of the residual stream
    norm_offset: float = 0.0  # added to the weights of norms
    unrotated: frozenset[int] = frozenset()  # layers without RoPE
    chunked: bool = False  # whether windows are chunks: see `compiler/frontend/layers/chunks.py`
    query_growth: QueryGrowth | None = None
    convolution: ShortConvolution | None = None
    recurrence: Recurrence | None = None
    embedding_scale: float = 1.0  # multiplies the token embeddings
    residual_scale: float = 1.0  # multiplies the outputs of attention and MLP before they are added to the residual stream
    logit_scale: float = 1.0  # multiplies the logits before the soft cap
    factors: BranchFactors | None = None
    head_bias: bool = False  # bias of the projection to logits
    mixture: Mixture | None = None
    apart: bool = False  # with `latent`: whether key and value matrices are separate, as in GGUF files; safetensors files stack them
    unused: tuple[str, ...] = ()  # shell patterns of the names of tensors that checkpoints contain and the model does not read
    left_out: tuple[str, ...] = ()  # prefixes of the names of tensors that belong to further models in the checkpoint, which are not served
    encoder: EncoderConfig | None = None
    hearing: Hearing | None = None
    vision: Vision | None = None
    listening: Listening | None = None
    image_padding: int = 0  # token whose per-layer embeddings stand in for those of image tokens, in models with per-layer embeddings
    classes: Classes | None = None  # classes of a classification head; None: the model generates or embeds
    verdict: Verdict | None = None  # the two tokens by whose logits a decoder without a classification head scores a pair of texts
    pair_prompt: PairPrompt | None = None  # prompt around a pair of texts; None: the tokenizer joins the texts
    embedding: EmbeddingConfig = field(default=EmbeddingConfig(Pooling.MEAN, True))
    auto_format: str = "auto"  # name of the format of weights that the setting "auto" stands for on CPUs; "auto": the format of the files

    @property
    def is_causal(self) -> bool:
        """Whether the model is a decoder, with a KV cache or states. False for all encoders, even those whose tokens look back only."""
        return self.encoder is None

    @property
    def beyond_text(self) -> dict[str, bool]:
        """Whether each of these phrases is true of the model. All are false for a decoder that only reads and writes text."""
        return {
            "is an encoder": not self.is_causal,
            "hears speech": self.hearing is not None,
            "sees images": self.vision is not None,
            "hears audio in conversations": self.listening is not None,
            "has a classification head": self.classes is not None,
        }

    @property
    def reads_rows(self) -> bool:
        """Whether the step reads rows of images or audio in place of token embeddings."""
        return self.vision is not None or self.listening is not None

    @property
    def num_mels(self) -> int | None:
        """The number of mel bands per hop of audio that the encoder reads, or None if the model hears nothing."""
        heard = self.hearing or self.listening
        return None if heard is None else heard.num_mels

    @property
    def stateful(self) -> frozenset[int]:
        """The layers with a recurrent state. Of these layers, only those in `attending` also have keys and values."""
        found = self.convolution or self.recurrence
        return frozenset() if found is None else found.layers

    @property
    def tells_pairs_apart(self) -> bool:
        """Whether the two texts of a pair have different segments."""
        return self.classes is not None and self.encoder is not None and self.encoder.num_segments > 1

    @property
    def keeping(self) -> tuple[int, ...]:
        """The layers that append keys and values to the cache."""
        attending = frozenset(range(self.num_layers)) - self.stateful if self.attending is None else self.attending
        return tuple(layer for layer in sorted(attending) if self.kv_source(layer) == layer)

    def kv_source(self, layer: int) -> int:
        """Return the layer whose keys and values this layer reads: itself, or an earlier one."""
        return self.kv_sources[layer] if self.kv_sources else layer

    def intermediate_size_of(self, layer: int) -> int:
        return self.intermediate_sizes[layer] if self.intermediate_sizes else self.intermediate_size

    def heads_of_layer(self, layer: int) -> Heads:
        if self.global_heads is not None and self.windows[layer] is None:
            return self.global_heads
        return Heads(self.num_kv_heads, self.head_dim, None if self.latent is None else self.latent.rank)

    def rope_of_layer(self, layer: int) -> Rope | None:
        """Return the layer's rope, or None if its queries and keys are not rotated."""
        if layer in self.unrotated:
            return None
        return self.local_rope if self.local_rope is not None and self.windows[layer] is not None else self.rope


# --- reading a config.json ---------------------------------------------------------------------------------------------


def read_decoder(
    fields: Fields,
    *,
    eps: float = 1e-6,
    eps_field: str = "rms_norm_eps",
    default_head_dim: int = 0,
    act: str = "hidden_act",
    intermediate_size: int | None = None,
    bias: str = "",
) -> ModelConfig:
    """Read the fields that most decoders have: sizes, grouped heads, rotary positions, and a norm. Unless the family overrides it, the norm
    is an RMS norm. `eps` and `default_head_dim` are the defaults of the epsilon and of `head_dim`; if `default_head_dim` is 0, the default
    is the hidden size divided by the number of heads. `eps_field` and `act` name the fields of the epsilon and of the activation. If
    `intermediate_size` is given, the field of this name is not read. `bias` names the flag that says whether all projections of attention
    have biases; if `bias` is empty, they have none. Raise ConfigError if a required field is missing, or a field has an unsupported
    value."""
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim: int = fields.integer("head_dim", default_head_dim or hidden_size // num_heads)
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    rope = read_rope(fields, head_dim)
    has_biases = bool(bias) and fields.flag(bias, False)
    num_layers = fields.integer("num_hidden_layers", maximum=10_000)
    return ModelConfig(
        family=fields.text("model_type"),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=read_activation(fields, act, "silu", in_decoder=True),
        norm_eps=fields.number(eps_field, eps),
        max_context=rope.max_context(fields.integer("max_position_embeddings", 2048)),
        attention_scale=head_dim**-0.5,
        windows=(None,) * num_layers,
        qkv_bias=has_biases,
        output_bias=has_biases,
        rope=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        embedding=EmbeddingConfig(Pooling.LAST, True),
    )


def require_causal(fields: Fields) -> None:
    """Raise ConfigError if the fields say that a decoder's attention is not causal."""
    fields.require("because attention in decoders is causal", is_causal=True)


def text_fields(fields: Fields, defaults: Mapping[str, Any]) -> Fields:
    """Return the fields of the decoder within a multimodal model: those in `text_config`, with these `defaults`. Fields outside
    `text_config` count as read, and do not affect the decoder. Only an outer `tie_word_embeddings` overrides the inner one, since the head
    belongs to the outer model. Raise ConfigError if the decoder is not causal."""
    fields.skip(*fields.values)
    text = fields.fields("text_config", defaults, {name: fields.values[name] for name in ("tie_word_embeddings",) if name in fields})
    require_causal(text)
    return text


def read_activation(fields: Fields, name: str, default: str, *, in_decoder: bool = False) -> Activation:
    """Return the activation that the field `name` names, or `default` if the field is absent. Raise ConfigError if the activation is
    unknown, or if it is one of DECODERS_ONLY and `in_decoder` is false."""
    known = {text: found for text, found in ACTIVATIONS.items() if in_decoder or found not in DECODERS_ONLY}
    found = known.get(fields.text(name, default))
    if found is None:
        raise fields.error(name, f"one of {', '.join(known)}")
    return found


def require_silu(fields: Fields, config: ModelConfig) -> None:
    """Raise ConfigError unless the activation is SiLU, the only one that is supported in layers with a state."""
    if config.activation is not Activation.SILU:
        raise fields.error("hidden_act", "silu")


def read_windows(fields: Fields, window: int | None, has_window: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Return the window of each layer: `window` tokens, or None. By the family's rule, a layer has a window if `has_window(layer)` is true
    and `window` is not None. If the field `layer_types` is present, it overrides the rule. Raise ConfigError if this field is malformed, or
    gives a layer a window although `window` is None."""
    num_layers = fields.integer("num_hidden_layers", maximum=10_000)
    rule = ["sliding_attention" if window is not None and has_window(layer) else "full_attention" for layer in range(num_layers)]
    types = read_kinds(fields, rule, ("sliding_attention", "full_attention"))
    if window is None and "sliding_attention" in types:
        raise fields.error("sliding_window", "a number of tokens, as layer_types has sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def read_one_window(fields: Fields) -> tuple[int | None, ...]:
    """Return the window of each layer in a family whose layers all have the window `sliding_window`, or none if this field is absent. Raise
    ConfigError if `layer_types` contradicts `sliding_window`: in these families, transformers ignores `layer_types` when it masks
    attention."""
    window = fields.integer("sliding_window", None)
    windows = read_windows(fields, window, lambda _: True)
    if any(found != window for found in windows):
        raise fields.error("layer_types", f"sliding_attention for all layers, as sliding_window is {window}")
    return windows


def read_kinds(fields: Fields, rule: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """Return the kind of each layer, one of `known`. If the field `layer_types` is present, it overrides the family's rule. Raise
    ConfigError if the field is not a list of known kinds, one for each layer."""
    kinds = fields.raw("layer_types", list(rule))
    if not isinstance(kinds, list) or len(kinds) != len(rule) or not set(known).issuperset(kinds):
        raise fields.error("layer_types", f"a list of {len(rule)} entries, each {' or '.join(known)}")
    return kinds


def rotating_neighbours(config: ModelConfig) -> ModelConfig:
    """Return the configuration with a rope that rotates adjacent dimensions of a head as pairs."""
    assert config.rope is not None
    return replace(config, rope=replace(config.rope, interleaved=True))


def rotating_whole_heads(config: ModelConfig) -> ModelConfig:
    """Return the configuration unchanged. Raise ConfigError if only part of each head rotates, which the family does not support."""
    if config.rope is not None and config.rope.size != config.head_dim:
        raise ConfigError(f"{config.rope.size} of {config.head_dim} dimensions of a head rotate; expected all of them for {config.family}")
    return config


def read_softcap(fields: Fields, name: str, default: float | None) -> float | None:
    """Return a soft cap. If the field is null, return None (no cap). If the field is absent, return the default."""
    return fields.number(name, None if name in fields.values else default)


def read_encoder(fields: Fields, *, position_offset: int, num_segments: int, relative_buckets: int = 0) -> ModelConfig:
    """Read the fields that encoders like BERT have: learned positions, layer norms, and biases everywhere. The other arguments become the
    fields of EncoderConfig with the same names. Raise ConfigError if a required field is missing, or a field has an unsupported value."""
    fields.require(position_embedding_type="absolute", is_decoder=False)
    fields.skip("tie_word_embeddings")  # concerns the head that predicts masked tokens, which is not served
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise fields.error("num_attention_heads", f"a divisor of hidden_size ({hidden_size})")
    num_positions = fields.integer("max_position_embeddings", 512)
    if num_positions <= position_offset:
        raise fields.error("max_position_embeddings", f"more than {position_offset}, the position table's row for a text's first token")
    num_layers = fields.integer("num_hidden_layers", maximum=10_000)
    return ModelConfig(
        family=fields.text("model_type"),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        activation=read_activation(fields, "hidden_act", "gelu"),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        max_context=num_positions - position_offset,
        attention_scale=(hidden_size // num_heads) ** -0.5,
        windows=(None,) * num_layers,
        norm=Norm.LAYER,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        encoder=EncoderConfig(num_positions, position_offset, num_segments, relative_buckets),
        classes=read_classes(fields),
    )
