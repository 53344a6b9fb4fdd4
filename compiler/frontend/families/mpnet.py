"""MPNet: BERT without segments. A text's first token has row 2 of the position table. A bias that depends on the distance between two
tokens is added to attention scores."""

from __future__ import annotations

from compiler.frontend.config import ModelConfig, read_encoder
from compiler.frontend.families import roberta
from compiler.frontend.family import EncoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.encoder import EncoderLayer, attend, mlp, norm, project
from compiler.ir.graph.atoms import Var


def read(fields: Fields) -> ModelConfig:
    buckets = fields.integer("relative_attention_num_buckets", 32, minimum=2)
    return read_encoder(fields, position_offset=2, num_segments=0, relative_buckets=buckets)


def layer(at: EncoderLayer, x: Var) -> Var:
    q, k, v = (project(at, x, f"attention.attn.{part}") for part in "qkv")
    x = norm(at, at.net.add(x, attend(at, q, k, v, "attention.attn.o")), "attention.LayerNorm")
    return norm(at, at.net.add(x, mlp(at, x)), "output.LayerNorm")


FAMILY = EncoderFamily(("mpnet",), read, layer, roberta.head, prefix="mpnet.")
