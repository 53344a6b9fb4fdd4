"""BERT: one norm after attention and one after the MLP, and embeddings of segments, usually two."""

from __future__ import annotations

from compiler.frontend.config import ModelConfig, read_encoder
from compiler.frontend.family import EncoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.encoder import EncoderLayer, Head, attend, classify, mlp, norm, project
from compiler.ir.graph.atoms import Var


def read(fields: Fields) -> ModelConfig:
    return read_encoder(fields, position_offset=0, num_segments=fields.integer("type_vocab_size", 2))


def layer(at: EncoderLayer, x: Var) -> Var:
    q, k, v = (project(at, x, f"attention.self.{part}") for part in ("query", "key", "value"))
    x = norm(at, at.net.add(x, attend(at, q, k, v, "attention.output.dense")), "attention.output.LayerNorm")
    return norm(at, at.net.add(x, mlp(at, x)), "output.LayerNorm")


def head(at: Head, x: Var) -> Var:
    return classify(at, x, f"{at.prefix}pooler.dense", "classifier")


FAMILY = EncoderFamily(("bert",), read, layer, head, prefix="bert.")
