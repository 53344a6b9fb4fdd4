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
    one 32-bit group of a row to registers. `right` takes a register with one group of each column. The tile prepares each operand once,
    and `add` then uses the registers in many products. If a group of a row has fewer elements than one of the panel, the tile joins the
    registers of several calls of `left`."""

    lanes: int  # number of columns: 32-bit lanes of a register
    left: Callable[[Code, str], Parts]
    right: Callable[[Code, str], Parts]
    add: Callable[[Code, str, Parts, Parts], str]  # add products of a left and a right operand to a total
    bits: int = 8  # maximum number of bits of a weight in a panel of integers for which tiles use the step
    signed: bool = False  # whether the bytes of the right operand are signed; those of the left operand always are
    halves: Halves | None = None  # functions that a tile uses instead of `add` if 16 bits can hold the sums of one load; None: never
    unrolled: int = 4  # loads of each register of columns per iteration, in tiles of several rows; all loaded vectors may be held at once
    # With a single row, finish the products of each load before the next load, and keep constants in registers. Without this, LLVM orders
    # the products by accumulator, which needs more registers.
    in_order: bool = False
    # Replace each byte from 0 to 15 of a register by the number with this index in a table of 16; None: there is no such instruction.
    look_up: Callable[[Code, Sequence[int], str], str] | None = None
    needs: frozenset[str] = frozenset()  # the CPU features that the step needs

    def runs_on(self, target: Target) -> bool:
        return self.needs <= target.features and 32 * self.lanes <= target.vector_bits


@dataclass(frozen=True, slots=True)
class Halves:
    """Functions that add up products in 16 bits. When a sum has `most` results of `product`, the caller must widen it to 32 bits."""

    most: int  # maximum number of results of `product` in a sum, with weights up to LARGEST
    product: Callable[[Code, Parts, Parts], str]  # multiply a group, and add pairs of products
    join: Callable[[Code, str, str], str]  # add two 16-bit sums
    widen: Callable[[Code, str, str], str]  # add pairs of 16-bit sums to a 32-bit total


def shuffle(lanes: int, instruction: str) -> Callable[[Code, Sequence[int], str], str]:
    """Return the `look_up` that uses an instruction which shuffles the bytes of each 128 bits. The operands of the instruction are the
    table and the bytes."""
    words, bytes_ = vec("i32", lanes), vec("i8", 4 * lanes)

    def look_up(code: Code, table: Sequence[int], x: str) -> str:
        numbers = vector_literal("i8", [*table] * (lanes // 4))
        indices = code.op(f"bitcast {words} {x} to {bytes_}")
        return code.op(f"bitcast {bytes_} {code.op(f'call {bytes_} @{instruction}({bytes_} {numbers}, {bytes_} {indices})')} to {words}")

    return look_up
