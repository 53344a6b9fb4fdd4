"""A small disassembled kernel for tests: a loop that waits for an mbarrier, and twice for loads from memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.lab.sass.listing import NO_SCOREBOARD, Listing, read_listings

# (label), or (instruction, stall, scoreboard that is set, scoreboards that are awaited)
Line = tuple[str] | tuple[str, int, int, int]
LINES: tuple[Line, ...] = (
    ("S2R R0, SR_TID.X", 1, 0, 0),
    (".L_x_1:",),
    ("SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR5], R28", 1, 1, 0),
    ("@!P2 BRA `(.L_x_9)", 5, NO_SCOREBOARD, 0b10),
    (".L_x_2:",),
    ("LDG.E.64 R2, desc[UR4][R8.64]", 1, 2, 0b1),
    ("LDG.E R4, desc[UR4][R8.64+0x8]", 1, 3, 0),
    ("FADD R5, R2, R3", 4, NO_SCOREBOARD, 0b100),
    ("FADD R5, R4, R5", 4, NO_SCOREBOARD, 0b1000),
    ("LDG.E R6, desc[UR4][R8.64+0x10]", 1, 2, 0),
    ("FADD R5, R5, R6", 4, NO_SCOREBOARD, 0b100),
    ("BAR.SYNC.DEFER_BLOCKING 0x0", 5, NO_SCOREBOARD, 0),
    ("@P1 BRA `(.L_x_1)", 5, NO_SCOREBOARD, 0),
    ("EXIT", 5, NO_SCOREBOARD, 0),
    (".L_x_9:",),
    ("SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR5], R28", 1, 1, 0),
    ("@!P2 BRA `(.L_x_9)", 5, NO_SCOREBOARD, 0b10),
    ("BRA `(.L_x_2)", 5, NO_SCOREBOARD, 0),
)


def sample(*before: Line) -> Listing:
    """Return the sample, with further lines before it."""
    return read_listings("\n".join([".text.k:", *_text((*before, *LINES))]))["k"]


def _text(lines: Sequence[Line]) -> Iterator[str]:
    address = 0
    for line in lines:
        if len(line) == 1:
            yield line[0]
            continue
        text, stall, sets, waits = line
        control = stall | sets << 5 | NO_SCOREBOARD << 8 | waits << 11
        yield f"        /*{address:04x}*/       {text} ;       /* 0x{0:016x} */"
        yield f"                                               /* 0x{control << 41:016x} */"
        address += 16
