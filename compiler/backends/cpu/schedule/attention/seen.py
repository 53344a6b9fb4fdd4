"""The keys that rows see."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.dims import Dim
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import less, less_equal, select


@dataclass(frozen=True, slots=True)
class Seen:
    """Positions `low` to `high`, which a row sees, or at least one of several rows."""

    low: Dim
    high: Dim
    has_window: bool  # whether keys before `low` exist

    def overlaps(self, begin: Dim, end: Dim) -> Scalar:
        """Return whether any of the positions `begin` to `end` - 1 is seen."""
        return less_equal(begin, self.high) & less(self.low, end)

    def lacks(self, begin: Dim, end: Dim) -> Scalar:
        """Return whether any of the positions `begin` to `end` - 1 is not seen. All rows see the beginning of their sequence, if there is
        no window."""
        late = less(self.high + 1, end)
        return late | less(begin, self.low) if self.has_window else late

    def hide(self, position: Dim, score: Scalar) -> Scalar:
        """Return the score of a key that is seen, or -inf for any other key."""
        inside = less_equal(position, self.high)
        if self.has_window:
            inside = inside & less_equal(self.low, position)
        return select(inside, score, float("-inf"))
