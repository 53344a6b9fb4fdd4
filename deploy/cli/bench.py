"""`relaxserve bench`: run a benchmark. Each benchmark is a module with a function `main(argv)` in a subfolder of deploy/bench; only the
chosen module is imported."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable
from pathlib import Path

import typer

from deploy import bench as benchmarks
from deploy.cli.output import answers
from server.settings import SettingsError

KEEP = "--keep"
# Pass all arguments after the benchmark's name to the benchmark, --help included.
CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def bench(context: typer.Context) -> None:
    """Run a benchmark and measure the limits of this machine in the same run. Without a name, list the benchmarks.

    --keep writes the figures, the machine and the commit to a file in deploy/bench/results/ instead of printing them;
    relaxserve bench report makes BENCHMARKS.md from these files.

    [bold]Examples[/bold]

      relaxserve bench

      relaxserve bench http --json

      relaxserve bench http --keep

      relaxserve bench http --help
    """
    name, *arguments = context.args or ["--help"]
    known = modules()
    if name in ("-h", "--help"):
        answers.print(context.get_help())
        answers.print(f"\nbenchmarks: {', '.join(known)}", highlight=False)
        return
    name = name.replace("-", "_")
    if name not in known:
        raise SettingsError(f"benchmark {name!r} is unknown; known: {', '.join(known)}")
    main = importlib.import_module(known[name]).main
    if KEEP in arguments:
        _keep(name, [argument for argument in arguments if argument not in (KEEP, "--json")], main)
    else:
        main(arguments)


def _keep(name: str, arguments: list[str], main: Callable[[list[str]], None]) -> None:
    from deploy.bench.reporting.record import ROOT, Record

    if not (ROOT / ".git").exists():
        raise SettingsError(f"--keep writes to deploy/bench/results in a checkout of relaxserve; {ROOT} is not a checkout")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main([*arguments, "--json"])
    answers.print(f"written to {Record.of(name, arguments, printed.getvalue()).keep()}", highlight=False)


def modules() -> dict[str, str]:
    """Map the name of each benchmark to its module. A module is a benchmark if its source text defines `main`; the modules are not
    imported, because that would import half the project."""
    files = [path for folder in benchmarks.__path__ for path in Path(folder).glob("*/*.py")]
    found = {path.stem: f"{benchmarks.__name__}.{path.parent.name}.{path.stem}" for path in files if "\ndef main(" in path.read_text()}
    return dict(sorted(found.items()))
