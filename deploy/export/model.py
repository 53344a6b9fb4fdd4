"""What all exports need of a model."""

from __future__ import annotations

import numpy as np

from deploy.model_loading.modes import Generator
from deploy.model_loading.servable import Servable
from server.interfaces import LoadError
from server.messages import ErrorCode
from server.text.tokenizer import Tokenizer


def require_generator(model: Servable, name: str) -> Generator:
    if not isinstance(model.mode, Generator):
        raise LoadError(ErrorCode.NOT_A_GENERATIVE_MODEL, f"{name} gives embeddings alone; models that generate text can be exported")
    if any(group.keeps_states for group in model.mode.groups):
        raise LoadError(ErrorCode.LOAD_REFUSED, f"{name} keeps a state per sequence; only models that keep keys and values can be exported")
    return model.mode


def cache_shapes(mode: Generator) -> dict[str, tuple[int, ...]]:
    """Of the step's inputs that hold keys and values of one sequence. Each group has a page of padding, and those of a full context."""
    return {
        f"{kind}{number or ''}": shape
        for number, group in enumerate(mode.groups)
        for kind, (shape, _) in zip(("cache", "scales"), group.arrays(1 + mode.bounds.max_pages), strict=False)
    }


def pieces(tokenizer: Tokenizer, vocab_size: int) -> bytes:
    """The bytes that each token stands for in a text: their lengths as 16-bit integers, and behind them all bytes."""
    found = [tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b"" for token_id in range(vocab_size)]
    return np.array([len(piece) for piece in found], "<u2").tobytes() + b"".join(found)
