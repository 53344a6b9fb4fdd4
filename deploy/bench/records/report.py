"""`relaxserve bench report`: write BENCHMARKS.md from the figures that `relaxserve bench NAME --keep` left in deploy/bench/results/."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

from deploy.bench.records.record import ROOT, Record, read_all

FILE = ROOT / "BENCHMARKS.md"
MOST_ROWS = 24  # of a table; of more figures those that matter are shown
HEAD = """# Benchmarks

Written by `relaxserve bench report` from [deploy/bench/results](deploy/bench/results). To measure again on your machine:
`relaxserve bench NAME --keep`, then `relaxserve bench report`. Machines that are shared change by a third within a minute, so goals are
ratios to a limit or to a peer that the same run measured.
"""

Row = Mapping[str, Any]


def written(records: Iterable[Record]) -> str:
    """The whole file."""
    by_machine = groupby(sorted(records, key=lambda record: (record.machine, record.command)), key=lambda record: record.machine)
    sections = [line for machine, some in by_machine for line in (f"\n## {machine}\n", *(_section(record) for record in some))]
    return "\n".join([HEAD.rstrip("\n"), *sections]).rstrip("\n") + "\n"


def _section(record: Record) -> str:
    lines = [f"### {record.benchmark.replace('_', '-')}\n", f"`{record.command}`, {record.date}, commit {record.commit}.\n"]
    for title, rows in _tables(record.found):
        lines += [*([f"**{title}**\n"] if title else []), *_table(rows), ""]
    return "\n".join(lines)


def _tables(found: Any, title: str = "") -> Iterator[tuple[str, list[Row]]]:
    """Tables in what a benchmark printed: lists of rows, at whatever depth, and single values together."""
    if isinstance(found, list):
        rows = cast("list[Row]", found)
        yield (title, _figures(rows) if rows and "goal" in rows[0] else rows)
        return
    values = cast("Row", found)
    alone: Row = {name: value for name, value in values.items() if not isinstance(value, dict | list)}
    if alone:
        yield title, [alone]
    for name, inner in values.items():
        if isinstance(inner, dict | list) and inner:
            yield from _tables(inner, f"{title}: {name}" if title else name)


def _figures(rows: list[Row]) -> list[Row]:
    """Figures beside their goals. Of many of one kind, those nearest to the goal or beyond it."""
    if len(rows) > MOST_ROWS:
        chosen = sorted(rows, key=lambda row: row["value"], reverse=True)[:MOST_ROWS]
        note = f"the {MOST_ROWS} largest of {len(rows)} figures"
        rows = [{**chosen[0], "note": f"{note}; {chosen[0]['note']}"}, *chosen[1:]]
    return [
        {
            "figure": row["name"],
            "measured": f"{_text(row['value'])} {row['unit']}".rstrip(),
            "goal": "" if row["goal"] is None else f"{'>=' if row['at_least'] else '<='} {row['goal']:g}",
            "reached": {None: "", True: "yes", False: "no"}[row["reached"]],
            "note": row["note"],
        }
        for row in rows
    ]


def _table(rows: Sequence[Row]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, dict | list)))
    cells = [[_text(row.get(name, "")) for name in columns] for row in rows]
    kept = [at for at in range(len(columns)) if any(row[at] for row in cells)]
    lines = [[columns[at].replace("_", " ") for at in kept], ["---"] * len(kept), *([row[at] for at in kept] for row in cells)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _text(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        case int():
            return f"{value:,}"
        case _:
            return str(value).replace("|", "\\|").replace("\n", " ")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="relaxserve bench report", description=__doc__)
    parser.parse_args(argv)
    records = read_all()
    FILE.write_text(written(records))
    print(f"{FILE}: {len(records)} records")


if __name__ == "__main__":
    main()
