"""What a sequence has drawn decides what it may draw next: words of several tokens that are banned, and thoughts that must end."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.messages import SamplingParams


@dataclass(slots=True, eq=False)
class Watch:
    """Sees every token that joins one sequence, forced ones included."""

    params: SamplingParams
    is_needed: bool = field(init=False)
    _tail: tuple[int, ...] = ()  # of the tokens drawn, as many as a banned sequence looks back
    _num_back: int = field(init=False)
    _endings: dict[int, list[tuple[int, ...]]] = field(init=False)  # banned sequences, by their last token but one
    _num_thoughts: int | None = field(init=False)  # tokens in the open think block; None outside of one

    def __post_init__(self) -> None:
        sequences, thinking = self.params.banned_sequences, self.params.thinking
        self.is_needed = bool(sequences) or thinking is not None
        self._endings = {}
        for sequence in sequences:
            self._endings.setdefault(sequence[-2], []).append(sequence)
        self._num_back = max((len(sequence) - 1 for sequence in sequences), default=0)
        self._num_thoughts = 0 if thinking is not None and thinking.is_open else None

    def advance(self, token_id: int) -> None:
        if self._num_back:
            self._tail = (*self._tail, token_id)[-self._num_back :]
        thinking = self.params.thinking
        if thinking is None:
            return
        if token_id in (thinking.open_id, thinking.close_id):
            self._num_thoughts = 0 if token_id == thinking.open_id else None
        elif self._num_thoughts is not None:
            self._num_thoughts += 1

    def banned(self) -> list[int]:
        """Tokens that would complete a banned sequence."""
        tail = self._tail
        return [sequence[-1] for sequence in self._endings.get(tail[-1], ()) if tail[1 - len(sequence) :] == sequence[:-1]] if tail else []

    def demanded(self) -> int | None:
        """The one token that may come next, or None for any."""
        thinking = self.params.thinking
        is_due = thinking is not None and self._num_thoughts is not None and self._num_thoughts >= thinking.budget
        return thinking.close_id if thinking is not None and is_due else None
