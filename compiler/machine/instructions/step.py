"""Steps: how an instruction set adds one group of products to a register of accumulators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiler.llvm.ssa import Code
from compiler.machine.target import Target

Parts = tuple[str, ...]  # registers that `left` or `right` makes from one register of operands


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a dot tile. `left` broadcasts one 32-bit group of the left operand to a register. `right` takes a register of groups of the
    right operand. Each prepares its operand once for all products with it."""

    lanes: int
    left: Callable[[Code, str], Parts]
    right: Callable[[Code, str], Parts]
    add: Callable[[Code, str, Parts, Parts], str]
    bits: int = 8  # largest width of the right operand's integers for which sums are exact
    signed: bool = False  # the bytes of the right operand are signed, like those of the left
    halves: Halves | None = None  # steps that replace `add` when many products are added, or None
    unrolled: int = 4  # loads of each right register per iteration if a tile has several rows; all loaded values may be live at once
    # a single row multiplies load by load, and constants stay in registers; without it, LLVM orders products by accumulator
    in_order: bool = False
    needs: frozenset[str] = frozenset()  # required features

    def runs_on(self, target: Target) -> bool:
        return self.needs <= target.features and 32 * self.lanes <= target.vector_bits


@dataclass(frozen=True, slots=True)
class Halves:
    """Steps that add products in 16 bits. After `most` steps the sums must be widened to 32 bits."""

    most: int
    product: Callable[[Code, Parts, Parts], str]
    join: Callable[[Code, str, str], str]
    widen: Callable[[Code, str, str], str]  # adds 16-bit sums to a 32-bit total
