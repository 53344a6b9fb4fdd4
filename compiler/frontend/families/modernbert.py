"""ModernBERT: rotary positions, norms before attention (except in the first layer) and before the MLP, gated MLPs, and, by default, a
window in two of three layers."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.classes import read_classes
from compiler.frontend.config import EncoderConfig, ModelConfig, Norm, read_decoder, read_windows, rotating_whole_heads
from compiler.frontend.family import EncoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import plain_activation
from compiler.frontend.layers.encoder import EncoderLayer, Head, Stem, attend, embedded, norm, project_stacked, rotate
from compiler.frontend.rope import Rope, read_rope
from compiler.frontend.sentence import EmbeddingConfig, Pooling
from compiler.ir.graph.atoms import Var
from compiler.ops.elementwise import GELU, MULTIPLY

GLOBAL_THETA, LOCAL_THETA = 160_000.0, 10_000.0
POOLING = {"cls": Pooling.CLS, "mean": Pooling.MEAN}


def read(fields: Fields) -> ModelConfig:
    # Fields about training and about the head that predicts masked tokens, and fields that no version of transformers reads.
    fields.skip("position_embedding_type", "layer_norm_eps", "repad_logits_with_grad", "reference_compile", "deterministic_flash_attn")
    fields.skip("sparse_prediction", "sparse_pred_ignore_index", "decoder_bias", "tie_word_embeddings")
    fields.fill(hidden_activation="gelu", max_position_embeddings=8192)
    config = rotating_whole_heads(read_decoder(fields, eps=1e-5, eps_field="norm_eps", act="hidden_activation"))
    rope, local = (_rope(fields, config.head_dim, *kind) for kind in (("full", "global", GLOBAL_THETA), ("sliding", "local", LOCAL_THETA)))
    every, reach = fields.integer("global_attn_every_n_layers", 3), fields.integer("local_attention", 128) // 2
    bias, pooling = fields.flag("attention_bias", False), fields.text("classifier_pooling", "cls")
    if pooling not in POOLING:
        raise fields.error("classifier_pooling", f"one of {', '.join(POOLING)}")
    fields.require(classifier_activation="gelu")
    windows = read_windows(fields, 2 * reach + 1, lambda number: number % every != 0)
    reaches = tuple(None if window is None else reach for window in windows)
    return replace(
        config,
        rope=rope,
        local_rope=local,
        windows=windows,
        norm=Norm.LAYER if fields.flag("norm_bias", False) else Norm.LAYER_WITHOUT_BIAS,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        head_bias=fields.flag("classifier_bias", False),
        encoder=EncoderConfig(0, 0, 0, reaches=reaches, class_pooling=POOLING[pooling]),
        classes=read_classes(fields),
        embedding=EmbeddingConfig(Pooling.MEAN, True),
    )


def _rope(fields: Fields, head_dim: int, kind: str, scope: str, theta: float) -> Rope:
    """Read the rope of the layers without a window ("full", "global") or of those with a window ("sliding", "local"). `kind` names these
    layers in newer files, and `scope` in older files. `theta` is the default of the base."""
    name = f"{scope}_rope_theta"
    if "rope_parameters" in fields:
        rope = read_rope(fields, head_dim, theta=theta, layer_type=f"{kind}_attention")
        fields.require_equal(name, rope.theta, f"rope_parameters.{kind}_attention.rope_theta, the newer field")
        return rope
    if scope == "local" and fields.values.get(name, theta) is None:
        return _rope(fields, head_dim, "full", "global", GLOBAL_THETA)  # null: the base of the layers without a window
    return Rope(fields.number(name, theta), head_dim)


def embed(at: Stem) -> Var:
    return embedded(at, "tok_embeddings", "embeddings.norm")


def layer(at: EncoderLayer, x: Var) -> Var:
    x = at.net.add(x, _attention(at, norm(at, x, "attn_norm") if at.number else x))
    return at.net.add(x, _gated_mlp(at, norm(at, x, "mlp_norm")))


def _attention(at: EncoderLayer, h: Var) -> Var:
    q, k, v = project_stacked(at, h, "attn.Wqkv")
    return attend(at, rotate(at, q), rotate(at, k), v, "attn.Wo")


def _gated_mlp(at: EncoderLayer, h: Var) -> Var:
    net, c, ffn = at.net, at.config, at.config.intermediate_size
    both = net.linear(h, at.name("mlp.Wi"), c.hidden_size, 2 * ffn, bias=c.mlp_bias)
    wide = net.call(MULTIPLY, plain_activation(net, c.activation, net.slice(both, 1, 0, ffn)), net.slice(both, 1, ffn, 2 * ffn))
    return net.linear(wide, at.name("mlp.Wo"), ffn, c.hidden_size, bias=c.mlp_bias)


def head(at: Head, x: Var) -> Var:
    net, c = at.net, at.config
    hidden = net.call(GELU, net.linear(x, "head.dense", c.hidden_size, c.hidden_size, bias=c.head_bias))
    normed = net.layer_norm(hidden, "head.norm", c.hidden_size, c.norm_eps, bias=c.norm is Norm.LAYER)
    return net.linear(normed, "classifier", c.hidden_size, at.num_classes, bias=True)


FAMILY = EncoderFamily(("modernbert",), read, layer, head, prefix="model.", embed=embed, layers="layers", last_norm="final_norm")
