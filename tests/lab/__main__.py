"""The lab: benchmarks that only this checkout runs, and those of `relaxserve bench`.

python -m tests.lab                          list the benchmarks
python -m tests.lab NAME --help              what a benchmark measures, and its options
python -m tests.lab NAME --keep [OPTIONS]    write the figures, the machine and the commit to a file in tests/lab/results
python -m tests.lab report                   write BENCHMARKS.md, docs/benchmarks and the chart from these files
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path

from deploy.cli import bench
from deploy.cli.root import run
from tests.lab.reporting.record import Record

KEEP = "--keep"


def known() -> dict[str, str]:
    """Map the name of each benchmark to its module. The lab's own measure at least what those of users with the same name measure."""
    own = bench.modules_in([str(Path(__file__).parent)], "tests.lab")
    return {**bench.modules(), **own, "report": "tests.lab.reporting.report"}


def main(arguments: list[str]) -> None:
    name, *options = arguments or ["--help"]
    if name in ("-h", "--help"):
        print(f"{__doc__}\nbenchmarks: {', '.join(sorted(known()))}")
        return
    measure = bench.main_of(name, known())
    if KEEP in options:
        keep(name.replace("-", "_"), [option for option in options if option not in (KEEP, "--json")], measure)
    else:
        measure(options)


def keep(name: str, options: list[str], measure: Callable[[list[str]], None]) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        measure([*options, "--json"])
    print(f"written to {Record.of(name, options, printed.getvalue()).keep()}")


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
