"""The sizes of the steps that are to come, for a device that captures launches for each magnitude: with them it captures before the first
request, and never while it serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from runtime.session import Session

MANY = 1 << 24  # of what has no declared most: pages of a pool, entries of lists
ROWS = ("t", "n")  # tokens of a step, or texts; rows to sample
PAGE_STEP = 2  # powers of two between two lengths of page tables: work on a page that is not there ends at once


def prepare(session: Session, functions: Sequence[str]) -> None:
    for function in functions:
        for sizes in sizes_of(session.variables(function)):
            session.prepare(function, sizes)


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
