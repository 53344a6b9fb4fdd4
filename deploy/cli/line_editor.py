"""Lines that are typed at a terminal: edited, kept in a history, and joined to messages of several lines."""

from __future__ import annotations

import os
import readline
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from deploy.cli.output import errors
from runtime.flags import xdg_folder

PROMPT, CONTINUED = "> ", ". "
BLOCK = '"""'
MOST_LINES = 2000  # of the history


@contextmanager
def history() -> Generator[None]:
    """Lines of earlier conversations come back by the arrow keys, and those of this one the next time."""
    file = xdg_folder("XDG_STATE_HOME", ".local/state") / "relaxserve" / "chat_history"
    with suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        readline.set_history_length(MOST_LINES)
        try:
            _write(file)
        except OSError as error:
            errors.print(f"the history {file} cannot be written: {error.strerror}", style="dim", markup=False, highlight=False)


def _write(file: Path) -> None:
    """For this user alone: what is asked may be private."""
    file.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
    readline.write_history_file(file)


def ask() -> str | None:
    """The next message, of one line or several; None at the end of input."""
    try:
        line = input(PROMPT)
        if line.lstrip().startswith(BLOCK):
            return _block(line.lstrip().removeprefix(BLOCK))
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{input(CONTINUED)}"
        return line
    except EOFError:
        print()  # the shell's prompt begins a line
        return None
    except KeyboardInterrupt:
        print()
        errors.print("Ctrl-D leaves", style="dim")
        return ""


def _block(first: str) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(BLOCK):
        lines.append(input(CONTINUED))
    lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(lines).strip("\n")
