"""Continue prompts greedily, for the goldens of models that see or hear."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.golden.vision_subject import CONTINUATION

MIN_MARGIN = 1e-3  # least gap between the two largest logits, relative to the spread of all
LEAST_DISTINCT = 8  # least number of distinct tokens in a continuation


def continued(prompt: str, prompt_ids: Sequence[int], row_of: Callable[[list[int]], NDArray[Any]], never: Collection[int]) -> Any:
    """Return the arrays of a conversation: its prompt as text and as token ids, the logits that follow it, and the greedy continuation.
    `row_of` returns the logits after some tokens. Return None if two logits are nearly equal, if a token of `never` is drawn, or if the
    text repeats itself."""
    ids, rows = list(prompt_ids), list[NDArray[Any]]()
    for _ in range(CONTINUATION):
        row = row_of(ids)
        second, first = np.sort(row)[-2:]
        if first - second < MIN_MARGIN * row.std() or int(row.argmax()) in never:
            return None
        rows.append(row)
        ids.append(int(row.argmax()))
    continuation = ids[len(prompt_ids) :]
    if len(set(continuation)) < LEAST_DISTINCT:
        return None
    prompt_array, continued_array = (np.array(part, np.int32) for part in (prompt_ids, continuation))
    return {"text": np.array(prompt), "prompt": prompt_array, "logits": np.stack(rows), "continuation": continued_array}
