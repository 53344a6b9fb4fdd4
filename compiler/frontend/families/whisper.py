"""Whisper: an encoder of audio, and a decoder whose layers also attend to the encoder's results."""

from __future__ import annotations

from compiler.frontend.alignment import default_heads
from compiler.frontend.config import Hearing, ModelConfig, Norm, read_activation
from compiler.frontend.family import DecoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.audio import project
from compiler.frontend.layers.decoder import Layer, Step, attend, hear, mlp, norm, residual
from compiler.frontend.sentence import EmbeddingConfig, Pooling
from compiler.ir.dims import Dim
from compiler.ir.graph.atoms import Var

QKV = ("q_proj", "k_proj", "v_proj")
UNREAD = (  # fields of generation and of training, and one that repeats encoder_layers; none of them changes what the program computes
    *(
        "encoder_layerdrop",
        "decoder_layerdrop",
        "apply_spec_augment",
        "median_filter_width",
        "use_weighted_layer_sum",
        "is_encoder_decoder",
    ),
    *("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids", "init_std", "max_length", "num_hidden_layers"),
)
EPS = 1e-5
AUTO_FORMAT = "int8-fast"  # transcribes spoken words with no more errors than f32 does (decision 0141)


def read(fields: Fields) -> ModelConfig:
    fields.skip(*UNREAD, *(name for name in fields.values if name.startswith("mask_")))
    size, heads, num_layers = (
        fields.integer("d_model"),
        fields.integer("decoder_attention_heads"),
        fields.integer("decoder_layers", maximum=1000),
    )
    encoder_heads = fields.integer("encoder_attention_heads")
    for name, count in (("decoder_attention_heads", heads), ("encoder_attention_heads", encoder_heads)):
        if size % count:
            raise fields.error(name, f"a divisor of d_model ({size})")
    fields.require(scale_embedding=False)
    fields.fill(hidden_act=fields.values.get("activation_function"))
    fields.skip("activation_function")
    if read_activation(fields, "hidden_act", "gelu") != "gelu":
        raise fields.error("activation_function", "gelu")
    return ModelConfig(
        family=fields.text("model_type"),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=size,
        intermediate_size=fields.integer("decoder_ffn_dim"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=size // heads,
        activation=read_activation(fields, "hidden_act", "gelu"),
        norm_eps=EPS,
        max_context=fields.integer("max_target_positions", 448),
        attention_scale=(size // heads) ** -0.5,
        windows=(None,) * num_layers,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        output_bias=True,
        mlp_bias=True,
        norm=Norm.LAYER,
        hearing=Hearing(
            num_mels=fields.integer("num_mel_bins", 80),
            num_frames=fields.integer("max_source_positions", 1500),
            num_layers=fields.integer("encoder_layers", maximum=1000),
            num_heads=encoder_heads,
            intermediate_size=fields.integer("encoder_ffn_dim"),
            aligned=default_heads(num_layers, heads),
        ),
        embedding=EmbeddingConfig(Pooling.LAST, True),
        auto_format=AUTO_FORMAT,
    )


def widen(step: Step, x: Var) -> Var:
    """Return the residual stream before the first layer: the token embeddings `x` plus learned vectors of positions."""
    c = step.config
    return step.net.add(x, step.net.embedding(f"{step.prefix}embed_positions", step.batch.positions, c.max_context, c.hidden_size))


def layer(at: Layer, x: Var) -> Var:
    """Attend to the text, then to the audio, and apply the MLP."""
    step, c = at.step, at.step.config
    h = norm(at, x, "self_attn_layer_norm")
    q, k, v = project(step.net, h, at.name("self_attn."), QKV, c.hidden_size, c.num_heads, Dim.of(step.t))
    x = residual(at, x, attend(at, q, k, v, "self_attn.out_proj"))
    (q,) = project(
        step.net, norm(at, x, "encoder_attn_layer_norm"), at.name("encoder_attn."), QKV[:1], c.hidden_size, c.num_heads, Dim.of(step.t)
    )
    x = residual(at, x, hear(at, q, "encoder_attn.out_proj"))
    return residual(at, x, mlp(at, norm(at, x, "final_layer_norm"), "fc1", "fc2"))


FAMILY = DecoderFamily(("whisper",), read, layer, embedding="embed_tokens", last_norm="layer_norm", widen=widen)
