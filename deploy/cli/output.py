"""The consoles to which commands write: results go to standard output, all other messages to standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import TaskID

# Brackets are not read as markup, because commands print file names and texts from outside, which may contain brackets.
answers = Console(width=None if sys.stdout.isatty() else 160, markup=False)  # a pipe has no width, so choose one
errors = Console(stderr=True, markup=False)

ReportStage = Callable[[str, float], None]  # gets the name of a stage, and the fraction of it that is done


class Bars:
    """Shows a progress bar per model with its stage and the fraction done. Without a terminal, it prints one line per stage."""

    def __init__(self) -> None:
        # imported only here, because a server without a terminal shows no bars
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[stage]}", markup=False),
            TimeElapsedColumn(),
            console=errors,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}  # the bar of each model
        self._stages: dict[str, str] = {}  # the stage of each model that was printed last, without a terminal

    def __enter__(self) -> Bars:
        if errors.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if errors.is_terminal:
            self._progress.stop()

    def show(self, name: str, stage: str, fraction: float) -> None:
        """Show how far a model is in a stage. Without a terminal, print a line if the stage has changed."""
        if not errors.is_terminal:
            if self._stages.get(name) != stage:
                errors.print(f"{name}: {stage}", highlight=False)
            self._stages[name] = stage
            return
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=1.0, stage=stage)
        self._progress.update(self._tasks[name], completed=fraction, stage=stage)


@contextmanager
def stages(name: str) -> Generator[ReportStage]:
    """Show the progress of work on one model, such as a load or a download. Yield the function that reports the stage and its
    progress."""
    with Bars() as bars:
        yield lambda stage, fraction: bars.show(name, stage, fraction)
