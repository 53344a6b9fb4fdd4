"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT in which a text's first token has the row pad_token_id + 1 of the position table. Lower rows
belong to padding."""

from __future__ import annotations

from compiler.frontend.config import ModelConfig, read_encoder
from compiler.frontend.families import bert
from compiler.frontend.family import EncoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.layers.encoder import Head, classify
from compiler.ir.graph.atoms import Var


def read(fields: Fields) -> ModelConfig:
    offset = fields.integer("pad_token_id", 1, minimum=0) + 1
    return read_encoder(fields, position_offset=offset, num_segments=fields.integer("type_vocab_size", 2))


def head(at: Head, x: Var) -> Var:
    return classify(at, x, "classifier.dense", "classifier.out_proj")


FAMILY = EncoderFamily(("roberta", "xlm-roberta", "camembert"), read, bert.layer, head, prefix="roberta.")
