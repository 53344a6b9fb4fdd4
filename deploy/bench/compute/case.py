"""A step that `relaxserve bench model` measures, and the work that a model does in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numpy.typing import NDArray

Run = Callable[[], NDArray[Any]]
Steps = Callable[[int, int, int], Run]  # (tokens, sequences, context) of a step -> function that runs the step


class Case(NamedTuple):
    """A step with `tokens` new tokens, split among the sequences. After the step, each sequence has `context` tokens."""

    tokens: int
    sequences: int
    context: int

    @property
    def is_prefill(self) -> bool:
        """Whether a sequence of the step has more than one new token."""
        return self.sequences < self.tokens

    def __str__(self) -> str:
        return f"prefill {self.tokens}" if self.is_prefill else f"decode {self.sequences} x {self.context}"


class Work(NamedTuple):
    """The least work of a step: bytes to read and operations to compute."""

    num_bytes: float  # bytes to read; states of a recurrence are also written, and count twice
    operations: float  # a multiply-add counts as two
