"""Nomic BERT: BERT with rotary positions and a gated MLP, configured by GPT-2's field names."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import EncoderConfig, ModelConfig, Norm, read_decoder
from compiler.frontend.family import EncoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.encoder import EncoderLayer, Stem, attend, embedded, gated_mlp, norm, project_stacked, rotate
from compiler.frontend.sentence import EmbeddingConfig, Pooling
from compiler.ir.graph.atoms import Var

OWN_NAMES = {  # usual field names, which newer files have -> field names in most files
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
    "rope_theta": "rotary_emb_base",
}
ABSENT = (  # fields that select a different layer unless they are false, zero or empty
    *("prenorm", "parallel_block", "use_rms_norm", "causal", "rotary_emb_interleaved", "rotary_scaling_factor", "rotary_emb_scale_base"),
    *("moe_every_n_layers", "num_experts", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "scale_attn_by_inverse_layer_idx"),
)


def read(fields: Fields) -> ModelConfig:
    for name in ABSENT:
        if fields.raw(name):
            raise fields.error(name, "no value, because any value selects a layer that is not supported")
    fields.require(rotary_emb_fraction=1.0, activation_function="swiglu")
    # Fields about training, and fields that selected among equivalent implementations in the original code.
    fields.skip("max_trained_positions", "pad_vocab_size_multiple", "parallel_block_tied_norm", "reorder_and_upcast_attn")
    fields.skip("scale_attn_weights", "use_xentropy", "dense_seq_output", "tie_word_embeddings", "fused_bias_fc")
    fields.fill(**{name: fields.raw(own) for name, own in OWN_NAMES.items() if own != "activation_function"})
    fields.fill(rope_theta=1000.0, max_position_embeddings=2048)
    config = read_decoder(fields, eps=1e-12, eps_field="layer_norm_eps")
    return replace(
        config,
        norm=Norm.LAYER,
        encoder=EncoderConfig(0, 0, fields.integer("type_vocab_size", 2)),
        embedding=EmbeddingConfig(Pooling.MEAN, True),
    )


def embed(at: Stem) -> Var:
    return embedded(at, norm="emb_ln")


def layer(at: EncoderLayer, x: Var) -> Var:
    q, k, v = project_stacked(at, x, "attn.Wqkv")
    x = norm(at, at.net.add(x, attend(at, rotate(at, q), rotate(at, k), v, "attn.out_proj")), "norm1")
    return norm(at, at.net.add(x, gated_mlp(at, x, "mlp.fc12", "mlp.fc11", "mlp.fc2")), "norm2")


FAMILY = EncoderFamily(("nomic_bert",), read, layer, None, prefix="bert.", embed=embed, layers="encoder.layers")
