"""How a model scores texts. A worker reports this to the front in its message Ready."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ClassScores(StrEnum):
    """The function that turns the outputs of a classifier into scores."""

    SOFTMAX = "softmax"  # a text belongs to exactly one class
    SIGMOID = "sigmoid"  # a text may belong to several classes, or to none
    RAW = "raw"  # the outputs are the scores


class Scoring(StrEnum):
    """How a model scores two texts, for requests to rerank or score."""

    PAIRS = "pairs"  # a reranker reads both texts together
    COSINE = "cosine"  # the cosine of the embeddings of the two texts


class PairPrompt(msgspec.Struct, frozen=True):
    """The text around an instruction, a query and a document, for a model that scores documents."""

    before: str
    marks: tuple[str, str, str]  # texts before the instruction, the query and the document
    after: str
    instruction: str  # the instruction if a request has none
