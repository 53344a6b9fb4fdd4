"""The sizes of the steps that are to come, for a device that captures launches for each magnitude: with them it captures before the first
request, and never while it serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from runtime.executable import PREPARATION, Executable, Imm, VMFunction
from runtime.executable import Call as Instruction
from runtime.session import Session

MANY = 1 << 24  # of what has no declared most: pages of a pool, entries of lists
ROWS = ("t", "n")  # tokens of a step, or texts; rows to sample
PAGE_STEP = 2  # powers of two between two lengths of page tables: work on a page that is not there ends at once


def prepare(session: Session, executable: Executable) -> None:
    for function in functions_of(executable):
        for sizes in sizes_of(session.variables(function)):
            session.prepare(function, sizes)


def functions_of(executable: Executable) -> Sequence[str]:
    """Those that run while the model serves."""
    return [name for name in executable.meta.functions if PREPARATION not in name]


def captured_launches(executable: Executable) -> int:
    """In all graphs that `prepare` captures, at most: sizes may share a graph."""
    functions = (executable.meta.functions[name] for name in functions_of(executable))
    return sum(_launches(executable, function) * sum(1 for _ in sizes_of(_variables(function))) for function in functions)


def _launches(executable: Executable, function: VMFunction) -> int:
    meta = executable.meta
    calls = (i for i in function.instructions if isinstance(i, Instruction) and i.callee == "vm.run_region")
    numbers = [i.args[0].value for i in calls if isinstance(i.args[0], Imm) and isinstance(i.args[0].value, int)]
    return sum(len(meta.kernels[launch.kernel].phases) for number in numbers for launch in meta.regions[number].launches)


def _variables(function: VMFunction) -> dict[str, int | None]:
    """The largest value of each; None where any will do, or where that depends on others."""
    upper = {bound.slot: bound.upper for bound in function.bounds}
    found = {function.slots[slot]: upper.get(slot) for slot in function.variables if slot is not None}
    return {name: most if isinstance(most, int) else None for name, most in found.items()}


def sizes_of(variables: Mapping[str, int | None]) -> Iterator[dict[str, int]]:
    """The largest of each magnitude: of rows, and for each of the longest page table. There are never more sequences than rows."""
    most = {name: MANY if upper is None else upper for name, upper in variables.items()}
    lead = next((name for name in ROWS if name in most), None)
    tables = [name for name in most if name.startswith("p") and not name.startswith("pages")]
    for rows in _tops(most[lead] if lead else 0, 1):
        for pages in _tops(max((most[name] for name in tables), default=0), PAGE_STEP):
            wanted = dict.fromkeys(tables, pages)
            yield {name: upper if variables[name] is None else min(upper, wanted.get(name, rows)) for name, upper in most.items()}


def _tops(most: int, step: int) -> Iterator[int]:
    """2 ** (k * step) - 1 for each k, as far as these are less than `most`; then `most`."""
    power = 1
    while (1 << power) - 1 < most:
        yield (1 << power) - 1
        power += step
    yield most
