"""`relaxserve bench`: each benchmark is a module with a `main(argv)` in a folder of deploy/bench, imported when it is asked for."""

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
    known = modules()
    if name in ("-h", "--help"):
        answers.print(context.get_help())
        answers.print(f"\nbenchmarks: {', '.join(known)}", highlight=False)
        return
    name = name.replace("-", "_")
    if name not in known:
        raise SettingsError(f"benchmark {name!r} is unknown; known: {', '.join(known)}")
    importlib.import_module(known[name]).main(arguments)


def modules() -> dict[str, str]:
    """Benchmarks by name: the modules that have a `main`, found without running them, since each draws in half the project."""
    files = [path for folder in benchmarks.__path__ for path in Path(folder).glob("*/*.py")]
    found = {path.stem: f"{benchmarks.__name__}.{path.parent.name}.{path.stem}" for path in files if "\ndef main(" in path.read_text()}
    return dict(sorted(found.items()))
