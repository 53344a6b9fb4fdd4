"""Pack conversations into training rows: tokens, their loss weights, and the number of the document to which each token belongs."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tests.lab.training.conversation import Conversation
from tests.lab.training.corpus import conversations
from tests.lab.training.rendering import rendered_parts

_PROMPT_WEIGHT = 0.1  # loss weight of text that the model does not generate, such as questions: it teaches the language, not the answers
# maximum total loss weight of an answer's tokens; otherwise long stories, whose words can be chosen freely, would outweigh the facts
_MOST_OF_ONE_ANSWER = 80
_POOL = 64  # number of waiting documents from which the next document of a row is chosen


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: NDArray[np.int64]  # [rows, tokens + 1]
    weights: NDArray[np.float32]  # [rows, tokens + 1]: loss weight of predicting this token
    document_ids: NDArray[np.int64]  # [rows, tokens + 1]; padding is document -1


_Document = tuple[list[int], list[float]]


def batches(tokenizer: Tokenizer, seed: int, *, tokens_per_batch: int, lengths: tuple[int, ...]) -> Iterator[Batch]:
    """Yield batches without end. The row length cycles through `lengths`; conversations longer than the longest row are left out."""
    made = (_document(tokenizer, conversation) for conversation in conversations(seed))
    documents = (document for document in made if len(document[0]) <= max(lengths))
    pool: list[_Document] = []
    while True:
        for length in lengths:
            rows = [_row(documents, pool, length + 1) for _ in range(tokens_per_batch // length)]
            ids, weights, owners = (np.array(column) for column in zip(*rows, strict=True))
            yield Batch(ids, weights.astype(np.float32), owners)


def _document(tokenizer: Tokenizer, conversation: Conversation) -> _Document:
    ids: list[int] = []
    weights: list[float] = []
    for text, spoken in rendered_parts(conversation.messages, conversation.tools):
        piece = tokenizer.encode(text).ids
        ids += piece
        weights += [min(1.0, _MOST_OF_ONE_ANSWER / len(piece)) if spoken else _PROMPT_WEIGHT] * len(piece)
    return ids, weights


def _row(documents: Iterator[_Document], pool: list[_Document], size: int) -> tuple[list[int], list[float], list[int]]:
    """Fill a row with the longest document of the pool that still fits, until none fits. Pad the row with tokens of weight 0.

    A document that is too long for this row stays in the pool for a longer row.
    """
    ids: list[int] = []
    weights: list[float] = []
    owners: list[int] = []
    for number in range(size):
        while sum(len(document[0]) <= size for document in pool) < _POOL:
            pool.append(next(documents))
        chosen = max(pool, key=lambda document: len(document[0]) if len(document[0]) <= size - len(ids) else 0)
        if len(chosen[0]) > size - len(ids):
            break
        pool.remove(chosen)
        ids += chosen[0]
        weights += [0.0, *chosen[1][1:]]  # the first token of a document is not predicted, since no token precedes it
        owners += [number] * len(chosen[0])
    padding = size - len(ids)
    return ids + [0] * padding, weights + [0.0] * padding, owners + [-1] * padding
