"""What an instruction set contributes to the dot tiles: one group of products added to a register of accumulators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiler.llvm.ssa import Code
from compiler.machine.target import Target

Parts = tuple[str, ...]  # operands made of one register


@dataclass(frozen=True, slots=True)
class Step:
    """`left` spreads one 32-bit group to a register, `right` takes a register of groups; both prepare it once for all its uses."""

    lanes: int
    left: Callable[[Code, str], Parts]
    right: Callable[[Code, str], Parts]
    add: Callable[[Code, str, Parts, Parts], str]
    bits: int = 8  # of the bytes of `right`, where they are bytes: larger ones would not add up exactly
    signed: bool = False  # the bytes of `right` are signed, as those of `left` are
    halves: Halves | None = None  # in the place of `add`, where many products are added
    unrolled: int = 4  # loads of each register of `right`, written out for several rows: all of them may live at once
    needs: frozenset[str] = frozenset()  # features

    def runs_on(self, target: Target) -> bool:
        return self.needs <= target.features and 32 * self.lanes <= target.vector_bits


@dataclass(frozen=True, slots=True)
class Halves:
    """Steps that add products in 16 bits. After `most` steps the sums must be widened."""

    most: int
    product: Callable[[Code, Parts, Parts], str]
    join: Callable[[Code, str, str], str]
    widen: Callable[[Code, str, str], str]  # added to a total
