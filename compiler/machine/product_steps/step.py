"""Steps: how an instruction set multiplies the elements along k that share 32 bits in each operand, and adds the products to
accumulators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compiler.llvm.ssa import Code, vec, vector_literal
from compiler.machine.target import Target

Parts = tuple[str, ...]  # the registers that `left` or `right` prepares from one register


LARGEST = 15  # largest integer of 4 bits


@dataclass(frozen=True, slots=True)
class Step:
    """One multiply-add of a tile, as functions that emit LLVM IR. A group is the elements along k that share 32 bits. `left` broadcasts
    one 32-bit group of a row to a register. `right` takes a register with one group of each column. The tile prepares each operand once,
    and `add` then uses the registers in many products."""

    lanes: int
    left: Callable[[Code, str], Parts]
    right: Callable[[Code, str], Parts]
    add: Callable[[Code, str, Parts, Parts], str]
    bits: int = 8  # maximum number of bits of the right operand's integers with which the sums are exact
    signed: bool = False  # whether the bytes of the right operand are signed; those of the left operand always are
    halves: Halves | None = None  # functions that replace `add` where a tile adds many products; None: `add` is always used
    unrolled: int = 4  # loads of each column register per iteration, in tiles of several rows; all of them may be in registers at once
    # With a single row, finish the products of each load before the next load, and keep constants in registers. Without this, LLVM orders
    # the products by accumulator, which needs more registers.
    in_order: bool = False
    # Replace each byte from 0 to 15 of a register by the number with this index in a table of 16.
    look_up: Callable[[Code, Sequence[int], str], str] | None = None
    needs: frozenset[str] = frozenset()  # the CPU features that the step needs

    def runs_on(self, target: Target) -> bool:
        return self.needs <= target.features and 32 * self.lanes <= target.vector_bits


@dataclass(frozen=True, slots=True)
class Halves:
    """Functions that add up products in 16 bits. After `most` steps the caller must widen the sums to 32 bits."""

    most: int  # maximum number of steps, with weights up to LARGEST
    product: Callable[[Code, Parts, Parts], str]
    join: Callable[[Code, str, str], str]
    widen: Callable[[Code, str, str], str]  # add 16-bit sums to a 32-bit total


def shuffle(lanes: int, instruction: str) -> Callable[[Code, Sequence[int], str], str]:
    """Return the `look_up` that uses an instruction which shuffles the bytes of each 128 bits. Its operands are the table and the bytes."""
    words, bytes_ = vec("i32", lanes), vec("i8", 4 * lanes)

    def look_up(code: Code, table: Sequence[int], x: str) -> str:
        numbers = vector_literal("i8", [*table] * (lanes // 4))
        indices = code.op(f"bitcast {words} {x} to {bytes_}")
        return code.op(f"bitcast {bytes_} {code.op(f'call {bytes_} @{instruction}({bytes_} {numbers}, {bytes_} {indices})')} to {words}")

    return look_up
