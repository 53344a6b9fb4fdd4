"""Decide what a model serves, by its kind. The server refuses requests for anything else.

A decoder that generates text also has hidden states, but they are no embeddings unless the model was trained for that. It serves
embeddings only if the load asks for them (`Load.embeddings`)."""

from __future__ import annotations

from deploy.model_loading.modes import Encoder, Mode


def embeds(mode: Mode) -> bool:
    """Return whether the model serves embeddings."""
    return mode.files.config.classes is None and (mode.load.embeddings or not mode.generates)


def serves(mode: Mode) -> tuple[str, ...]:
    """Return what the model serves, in words."""
    classes = mode.files.config.classes
    if classes is not None:
        return ("classify", "rerank and score of pairs of texts") if len(classes.names) == 1 else ("classify",)
    generates = ("chat and completions",) if mode.generates else ()
    return (*generates, "embeddings", "rerank and score by cosine") if embeds(mode) else generates


def embedding_note(mode: Mode) -> str:
    """Return what users of the model's embeddings and scores should know, or "" if the model serves no embeddings."""
    if not embeds(mode):
        return ""
    cosine = "rerank and score compare embeddings by their cosine"
    if mode.generates:
        return f"the model was not trained for embeddings: the embedding of a text is the hidden state of its last token; {cosine}"
    embedding = mode.files.config.embedding
    if isinstance(mode, Encoder) and not embedding.is_stated:
        return f"the model's files state no pooling, so the pooling is {embedding.pooling}; {cosine}"
    return cosine
