"""Relations of sizes on which the lowering of an operator relies, such as that the number of query heads is a multiple of the number of kv
heads.

An operator declares its relations once, next to its deduction. If a call is proved to violate a relation, deducing its annotation raises an
error that names the sizes. The pass `check_facts` inserts a check for each relation that is not proved, and the interpreter checks all
relations.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.dims import Dim, DimLike, dim_max, dim_min
from compiler.ir.prove import prove_eq, prove_le, prove_ne


@dataclass(frozen=True, slots=True)
class Relation:
    given: Dim
    expected: Dim  # equal to `given` if and only if the relation holds
    sentence: str  # what `given` is, and what is expected

    @property
    def is_proved(self) -> bool:
        return prove_eq(self.given, self.expected)

    @property
    def is_violated(self) -> bool:
        """Whether the relation is proved not to hold."""
        return prove_ne(self.given, self.expected)


def equal(given: DimLike, wanted: DimLike, what: str) -> Relation:
    return Relation(Dim.of(given), Dim.of(wanted), f"{what} is {given}, expected {wanted}")


def at_most(given: DimLike, most: DimLike, what: str, of: str) -> Relation:
    """Return the relation `given` <= `most`. In the message of the relation, `what` names `given`, and `of` names `most`."""
    return Relation(Dim.of(given), dim_min(given, most), f"{what} is {given}, expected at most {most}, {of}")


def at_least(given: DimLike, least: int, what: str) -> Relation:
    return Relation(Dim.of(given), dim_max(given, least), f"{what} is {given}, expected at least {least}")


def multiple(given: DimLike, of: DimLike, what: str, whose: str) -> tuple[Relation, ...]:
    """Return the relations that `of` is at least 1, and that `given` is a multiple of `of`. If `of` is proved to be less than 1, return
    only the first relation. `what` names `given` in messages, and `whose` names `of`."""
    if prove_le(of, 0):
        return (at_least(of, 1, whose),)
    given, of = Dim.of(given), Dim.of(of)
    return at_least(of, 1, whose), Relation(given, given // of * of, f"{what} is {given}, expected a multiple of {of}, {whose}")
