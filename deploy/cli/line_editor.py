"""Read messages of one or several lines at a terminal, with line editing and a history."""

from __future__ import annotations

import os
import readline
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from deploy.cli.output import errors
from runtime.flags import xdg_folder

PROMPT, CONTINUED = "> ", ". "  # what the terminal shows before the first line of a message, and before each further one
BLOCK = '"""'  # begins and ends a message of several lines
MOST_LINES = 2000  # maximum number of lines in the history file


@contextmanager
def history() -> Generator[None]:
    """Load the lines of earlier conversations for the arrow keys. Save the lines of this conversation at the end."""
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
            errors.print(f"the history {file} cannot be written: {error.strerror}", style="dim", highlight=False)


def _write(file: Path) -> None:
    """Write the history to a file that only this user can read, because messages may be private."""
    file.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
    readline.write_history_file(file)


def ask() -> str | None:
    """Read the next message, of one or several lines. Return None at the end of input. An interrupt (Ctrl-C), or a line that is no text,
    discards what was typed of the message. A second interrupt before a message is complete raises KeyboardInterrupt."""
    is_second = False
    while True:
        try:
            return _message()
        except EOFError:
            print()  # begin a new line, on which the shell writes its prompt
            return None
        except UnicodeDecodeError:
            is_second = False
            errors.print("the line is no text in UTF-8; write it again", style="dim")
        except KeyboardInterrupt:
            print()
            if is_second:
                raise
            is_second = True
            errors.print("Ctrl-C again or Ctrl-D leaves", style="dim")


def _message() -> str:
    """Read a message. A line that ends with a backslash continues on the next line, and a message that begins with BLOCK has all lines up
    to the next BLOCK. Raise EOFError at the end of input."""
    line = input(PROMPT)
    if line.lstrip().startswith(BLOCK):
        return _block(line.lstrip().removeprefix(BLOCK))
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{input(CONTINUED)}"
    return line


def _block(first: str) -> str:
    """Read lines up to one that ends with BLOCK. `first` is the rest of the line that began the block."""
    lines = [first]
    while not lines[-1].rstrip().endswith(BLOCK):
        lines.append(input(CONTINUED))
    lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(lines).strip("\n")
