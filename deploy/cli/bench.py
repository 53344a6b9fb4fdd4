"""`relaxserve bench`: run a benchmark. Each benchmark is a module with a function `main(argv)` in one of FOLDERS below deploy/bench; only
the chosen module is imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import typer

import deploy.bench
from deploy.cli.output import answers
from server.settings import SettingsError

FOLDERS = ("compute", "serving")  # the folders of a package that contain benchmarks
# Pass all arguments after the benchmark's name to the benchmark, --help included.
CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def bench(context: typer.Context) -> None:
    """Run a benchmark. Without a name, list the benchmarks.

    [bold]Examples[/bold]

      relaxserve bench

      relaxserve bench model --synthetic 0.5b --quantize int8

      relaxserve bench serve --model demo --json

      relaxserve bench serve --help
    """
    name, *arguments = context.args or ["--help"]
    if name in ("-h", "--help"):
        answers.print(context.get_help())
        answers.print(f"\nbenchmarks: {', '.join(modules())}", highlight=False)
        return
    main_of(name, modules())(arguments)


def main_of(name: str, known: Mapping[str, str]) -> Callable[[list[str]], None]:
    """Import the module of a benchmark and return its function `main`. Raise SettingsError if `known` has no benchmark of this name."""
    module = known.get(name.replace("-", "_"))
    if module is None:
        raise SettingsError(f"benchmark {name!r} is unknown; known: {', '.join(known)}")
    return importlib.import_module(module).main


def modules() -> dict[str, str]:
    """Map the name of each benchmark to its module."""
    return modules_in(deploy.bench.__path__, deploy.bench.__name__)


def modules_in(folders: Iterable[str], package: str) -> dict[str, str]:
    """Map the name of each benchmark of a package to its module. A module is a benchmark if its source text defines `main`; the modules are
    not imported, because that would import half the project."""
    files = [path for folder in folders for part in FOLDERS for path in Path(folder, part).glob("*.py")]
    found = {path.stem: f"{package}.{path.parent.name}.{path.stem}" for path in files if "\ndef main(" in path.read_text()}
    return dict(sorted(found.items()))
