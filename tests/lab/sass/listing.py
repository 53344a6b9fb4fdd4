"""Read the text of a disassembled kernel: its instructions, what they wait for, and its loops.

The assembler schedules statically. Each instruction of 128 bits says in bits 105 to 121 for how many cycles the warp pauses after the
instruction, which of six scoreboards it sets when its result is written or its operands are read, and for which scoreboards it waits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

CONTROL_BIT = 105 - 64  # of the upper 64 bits of an instruction
NO_SCOREBOARD = 7
_FUNCTION = re.compile(r"^\.text\.(\S+):")
_LABEL = re.compile(r"^(\.L_\S+):")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/")
_UPPER = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_WIDE = {"64": 2, "128": 4}
_WAITING = {"SYNCS", "BRA", "NOP"}  # instructions of a block that only waits


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    predicate: str  # "" if the instruction has none
    name: str  # with its modifiers, such as LDG.E.64
    operands: str
    stall: int  # number of cycles that the warp pauses after the instruction
    sets: int | None  # the scoreboard that is set until the result is written
    reads: int | None  # the scoreboard that is set until the operands are read
    waits: frozenset[int]  # the scoreboards for which the instruction waits
    target: str | None  # the label to which a branch goes

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]

    @property
    def never_runs(self) -> bool:
        """Whether the instruction is one that the assembler adds as a pause, with a predicate that is false."""
        return self.predicate == "!PT"

    @property
    def num_bytes(self) -> int:
        """The number of bytes that a lane loads."""
        parts = self.name.split(".")
        return next((4 * count for width, count in _WIDE.items() if width in parts), 2 if "U16" in parts else 4)


@dataclass(frozen=True, slots=True)
class Loop:
    """The instructions from a label to the branch back to it."""

    begin: int  # index of the first instruction
    end: int  # index after the branch

    def contains(self, other: Loop) -> bool:
        return self != other and self.begin <= other.begin and other.end <= self.end


@dataclass(frozen=True)
class Listing:
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]  # index of the instruction after the label

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """All loops, in the order in which they begin, an outer loop before those that it contains. A wait for an mbarrier is no loop, and
        neither is the branch to itself after the end of a kernel."""
        ends: dict[int, int] = {}
        for number, instruction in enumerate(self.instructions):
            begin = self.labels.get(instruction.target or "", number + 1)
            if begin <= number and not self._waits(number):
                ends[begin] = max(ends.get(begin, 0), number + 1)
        return tuple(sorted((Loop(b, e) for b, e in ends.items()), key=lambda loop: (loop.begin, -loop.end)))

    @cached_property
    def innermost(self) -> tuple[Loop, ...]:
        return tuple(loop for loop in self.loops if not any(loop.contains(other) for other in self.loops))

    @property
    def num_local(self) -> int:
        """The number of loads and stores in local memory, where a thread's stack is."""
        return sum(x.kind in ("LDL", "STL") for x in self.instructions)

    def _waits(self, number: int) -> bool:
        """Return whether a branch is in a block that only tests an mbarrier again. The assembler puts such blocks behind the kernel."""
        begin = number
        while begin > 0 and not _never_falls_through(self.instructions[begin - 1]):
            begin -= 1
        return {x.kind for x in self.instructions[begin : number + 1]} <= _WAITING

    def body(self, loop: Loop) -> tuple[Instruction, ...]:
        return self.instructions[loop.begin : loop.end]

    def loops_with(self, pattern: str) -> list[Loop]:
        """Return the innermost loops that have an instruction whose name begins with the pattern, a regular expression."""
        return [loop for loop in self.innermost if any(re.match(pattern, x.name) for x in self.body(loop))]


def _never_falls_through(instruction: Instruction) -> bool:
    return instruction.kind in ("BRA", "EXIT", "RET") and not instruction.predicate


def read_listings(text: str) -> dict[str, Listing]:
    """Read the output of `nvdisasm -hex`: map the name of each kernel to its listing."""
    return {name: _listing(lines) for name, lines in _functions(text)}


def _functions(text: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in text.splitlines():
        if begins := _FUNCTION.match(line):
            if name:
                yield name, lines
            name, lines = begins[1], []
        elif line.startswith("//----") or line.lstrip().startswith(".section"):
            if name:
                yield name, lines
            name = ""
        elif name:
            lines.append(line)
    if name:
        yield name, lines


def _listing(lines: Sequence[str]) -> Listing:
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    for number, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif match := _INSTRUCTION.search(line):
            upper = _UPPER.match(lines[number + 1])
            assert upper is not None, f"the second half of an instruction is missing: {line}"
            found.append(_instruction(match, int(upper[1], 16) >> CONTROL_BIT))
    return Listing(tuple(found), labels)


def _instruction(match: re.Match[str], control: int) -> Instruction:
    address, predicate, name, operands, _ = match.groups()
    sets, reads, waits = control >> 5 & 7, control >> 8 & 7, control >> 11 & 63
    target = _TARGET.search(operands) if name.startswith("BRA") else None
    return Instruction(
        int(address, 16),
        predicate or "",
        name,
        operands,
        control & 15,
        None if sets == NO_SCOREBOARD else sets,
        None if reads == NO_SCOREBOARD else reads,
        frozenset(i for i in range(6) if waits >> i & 1),
        None if target is None else target[1],
    )
