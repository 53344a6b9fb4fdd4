"""Split a kernel into basic blocks (here called "pieces"), and find the pieces at which threads that a branch separated reconverge."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.gpu.ptx.text import Instruction, Kernel, Symbol


@dataclass(slots=True)
class Piece:
    """A basic block. `successors` lists the target of a taken branch first. A successor equal to the number of pieces means the end of the
    kernel."""

    start: int
    end: int  # index of the instruction after the last one
    successors: tuple[int, ...] = ()
    join: int = -1  # nearest piece that every path from here to the end passes


@dataclass(slots=True)
class Flow:
    pieces: list[Piece] = field(default_factory=list)

    @property
    def exit(self) -> int:
        return len(self.pieces)


def leaves(instruction: Instruction) -> bool:
    return instruction.opcode in ("ret", "exit", "trap")


def branches(instruction: Instruction) -> bool:
    return instruction.opcode in ("bra", "brx") or leaves(instruction)


def flow_of(kernel: Kernel, suspends: frozenset[int]) -> Flow:
    """Split a kernel into pieces. Each instruction in `suspends`, at which threads may wait, becomes a piece of its own."""
    code = kernel.instructions
    starts = {0, *kernel.labels.values()} & set(range(len(code)))
    for number, instruction in enumerate(code):
        if branches(instruction):
            starts.add(number + 1)
        elif number in suspends:
            starts.update((number, number + 1))
    begins = sorted(s for s in starts if s < len(code))
    piece_at = {start: number for number, start in enumerate(begins)}
    flow = Flow([Piece(start, end) for start, end in zip(begins, [*begins[1:], len(code)], strict=True)])
    exit_ = flow.exit

    def piece_of(label: str) -> int:
        return piece_at.get(kernel.labels[label], exit_)

    for number, piece in enumerate(flow.pieces):
        last = code[piece.end - 1]
        after = number + 1
        if last.opcode == "bra":
            assert isinstance(last.operands[0], Symbol)
            taken: tuple[int, ...] = (piece_of(last.operands[0].name),)
        elif last.opcode == "brx":
            assert isinstance(last.operands[1], Symbol)
            taken = tuple(piece_of(label) for label in kernel.tables[last.operands[1].name])
        elif leaves(last):
            taken = (exit_,)
        else:
            taken = (after,)
        guarded = last.guard is not None and (branches(last) or piece.start in suspends)
        piece.successors = (*taken, after) if guarded else taken
    _find_joins(flow)
    return flow


def _find_joins(flow: Flow) -> None:
    """Find the join of each piece, that is its nearest post-dominator. A set of pieces is represented by an integer with one bit per
    piece."""
    exit_ = flow.exit
    everything = (1 << (exit_ + 1)) - 1
    after = [everything] * exit_ + [1 << exit_]
    changed = True
    while changed:
        changed = False
        for number in range(exit_ - 1, -1, -1):
            common = everything
            for successor in flow.pieces[number].successors:
                common &= after[successor]
            common |= 1 << number
            if common != after[number]:
                after[number], changed = common, True
    for number, piece in enumerate(flow.pieces):
        rest = after[number] & ~(1 << number)
        # If no path leads from a piece to the kernel's end, all pieces count as its post-dominators: its threads never reconverge.
        piece.join = next((n for n in range(exit_) if rest >> n & 1 and after[n] == rest), exit_)
