"""ELECTRA: BERT whose embeddings may be narrower than its layers."""

from __future__ import annotations

from dataclasses import replace

from compiler.frontend.config import ModelConfig
from compiler.frontend.families import bert
from compiler.frontend.family import EncoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.encoder import Head, Stem, classify, embedded
from compiler.ir.graph.atoms import Var
from compiler.ops.elementwise import GELU


def read(fields: Fields) -> ModelConfig:
    fields.skip("summary_activation", "summary_last_dropout", "summary_type", "summary_use_proj")  # fields of heads that are not served
    config = bert.read(fields)
    size = fields.integer("embedding_size", 128)
    assert config.encoder is not None
    return replace(config, encoder=replace(config.encoder, embedding_size=None if size == config.hidden_size else size))


def embed(at: Stem) -> Var:
    c, x = at.config, embedded(at)
    assert c.encoder is not None
    if c.encoder.embedding_size is None:
        return x
    return at.net.linear(x, f"{at.prefix}embeddings_project", c.encoder.embedding_size, c.hidden_size, bias=True)


def head(at: Head, x: Var) -> Var:
    return classify(at, x, "classifier.dense", "classifier.out_proj", GELU)


FAMILY = EncoderFamily(("electra",), read, bert.layer, head, prefix="electra.", embed=embed)
