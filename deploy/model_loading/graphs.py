"""List the step sizes for which a GPU captures graphs before the first request. There is one size per size class, so that nothing has to be
captured while the model serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from runtime.executable import PREPARATION, Executable, Imm, VMFunction
from runtime.executable import Call as Instruction
from runtime.session import Session

MANY = 1 << 24  # upper bound for variables without a declared maximum: pages of a pool, entries of lists
ROWS = ("t", "n")  # names of the variable that counts rows: tokens of a step, texts, or rows to sample
PAGE_STEP = 2  # log2 of the ratio of captured page-table lengths; it may be large, because kernels skip absent pages at once


def prepare(session: Session, executable: Executable) -> None:
    """Capture the graphs of all functions that run while the model serves, for every size class. A CPU captures none."""
    for function in functions_of(executable):
        for sizes in sizes_of(session.variables(function)):
            session.prepare(function, sizes)


def functions_of(executable: Executable) -> Sequence[str]:
    """Return the functions that run while the model serves."""
    return [name for name in executable.meta.functions if PREPARATION not in name]


def captured_launches(executable: Executable) -> int:
    """Return an upper bound for the number of launches in all graphs that `prepare` captures. It may be too large, because sizes may share
    a graph."""
    functions = (executable.meta.functions[name] for name in functions_of(executable))
    return sum(_launches(executable, function) * sum(1 for _ in sizes_of(_variables(function))) for function in functions)


def _launches(executable: Executable, function: VMFunction) -> int:
    """Return the number of launches in all regions that a function runs: one per phase of each kernel."""
    meta = executable.meta
    calls = (i for i in function.instructions if isinstance(i, Instruction) and i.callee == "vm.run_region")
    numbers = [i.args[0].value for i in calls if isinstance(i.args[0], Imm) and isinstance(i.args[0].value, int)]
    return sum(len(meta.kernels[launch.kernel].phases) for number in numbers for launch in meta.regions[number].launches)


def _variables(function: VMFunction) -> dict[str, int | None]:
    """Return the largest value of each variable of a function, or None if this value is unbounded or depends on other variables."""
    upper = {bound.slot: bound.upper for bound in function.bounds}
    found = {function.slots[slot]: upper.get(slot) for slot in function.variables if slot is not None}
    return {name: most if isinstance(most, int) else None for name, most in found.items()}


def sizes_of(variables: Mapping[str, int | None]) -> Iterator[dict[str, int]]:
    """Yield the largest values of the variables in each size class: each class of row counts combined with each class of page-table
    lengths. A variable without a maximum (None) has the value MANY. The remaining variables, such as the number of sequences, are at most
    the number of rows; they are 0 if no variable counts rows."""
    most = {name: MANY if upper is None else upper for name, upper in variables.items()}
    lead = next((name for name in ROWS if name in most), None)
    tables = [name for name in most if name.startswith("p") and not name.startswith("pages")]
    for rows in _tops(most[lead] if lead else 0, 1):
        for pages in _tops(max((most[name] for name in tables), default=0), PAGE_STEP):
            wanted = dict.fromkeys(tables, pages)
            yield {name: upper if variables[name] is None else min(upper, wanted.get(name, rows)) for name, upper in most.items()}


def _tops(most: int, step: int) -> Iterator[int]:
    """Yield 2 ** (1 + k * step) - 1 for k = 0, 1, ... while that is less than `most`; then yield `most`."""
    power = 1
    while (1 << power) - 1 < most:
        yield (1 << power) - 1
        power += step
    yield most
