"""DistilBERT: BERT without segments, with other names of fields and weights."""

from __future__ import annotations

from compiler.frontend.config import ModelConfig, read_encoder
from compiler.frontend.family import EncoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.encoder import EncoderLayer, Head, attend, classify, mlp, norm, project
from compiler.ir.graph.atoms import Var
from compiler.ops.elementwise import RELU

# usual field names -> DistilBERT's names of the same fields
OWN_NAMES = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers", "intermediate_size": "hidden_dim"}


def read(fields: Fields) -> ModelConfig:
    fields.fill(dim=768, n_heads=12, n_layers=6, hidden_dim=3072, activation="gelu")
    fields.fill(**{name: fields.raw(own) for name, own in OWN_NAMES.items()}, hidden_act=fields.raw("activation"))
    # The checkpoint has the position table even if it consists of sinusoids.
    # The head for masked tokens, whose weights `tie_weights_` ties, is not served.
    fields.skip("sinusoidal_pos_embds", "tie_weights_")
    return read_encoder(fields, position_offset=0, num_segments=0)


def layer(at: EncoderLayer, x: Var) -> Var:
    q, k, v = (project(at, x, f"attention.{part}_lin") for part in "qkv")
    x = norm(at, at.net.add(x, attend(at, q, k, v, "attention.out_lin")), "sa_layer_norm")
    return norm(at, at.net.add(x, mlp(at, x, "ffn.lin1", "ffn.lin2")), "output_layer_norm")


def head(at: Head, x: Var) -> Var:
    return classify(at, x, "pre_classifier", "classifier", RELU)


FAMILY = EncoderFamily(("distilbert",), read, layer, head, prefix="distilbert.", layers="transformer.layer")
