"""`relaxserve bench`: each benchmark is a module of deploy/bench with a `main(argv)`, imported when it is asked for."""

from __future__ import annotations

import importlib
from pathlib import Path

import typer

from deploy import bench as benchmarks
from deploy.cli.output import answers
from server.settings import SettingsError

# What stands behind the name belongs to the benchmark, --help included.
CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def bench(context: typer.Context) -> None:
    """Measure, with the limits of this machine in the same run. Without a name, lists the benchmarks.

    [bold]Examples[/bold]

      relaxserve bench

      relaxserve bench http --json

      relaxserve bench http --help
    """
    name, *arguments = context.args or ["--help"]
    known = names()
    if name in ("-h", "--help"):
        answers.print(context.get_help())
        answers.print(f"\nbenchmarks: {', '.join(known)}", highlight=False)
        return
    if name not in known:
        raise SettingsError(f"benchmark {name!r} is unknown; known: {', '.join(known)}")
    importlib.import_module(f"{benchmarks.__name__}.{name}").main(arguments)


def names() -> list[str]:
    """The modules that have a `main`, found without running them: each draws in half the project."""
    sources = {path.stem: path.read_text() for folder in benchmarks.__path__ for path in sorted(Path(folder).glob("*.py"))}
    return [name for name, source in sources.items() if "\ndef main(" in source]
