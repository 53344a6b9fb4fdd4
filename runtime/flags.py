"""Developer switches: the table of all switches, and the only code that reads them from the environment. `python -m runtime.flags` prints
the table."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.errors import InvalidFlag


@dataclass(frozen=True, slots=True)
class Flags:
    """The values of the switches. SWITCHES says what each switch means."""

    debug: int = 0
    dump: Path | None = None
    verify: bool = False
    no_cache: bool = False
    cache: Path = field(default_factory=lambda: xdg_folder("XDG_CACHE_HOME", ".cache") / "relaxserve")
    cache_key_file: Path | None = None
    threads: int | None = None
    target: str | None = None


@dataclass(frozen=True, slots=True)
class _Switch:
    """A developer switch: its variable of the environment, its field of Flags, how its text is read, and what it means."""

    variable: str
    field: str
    parse: Callable[[str], Any]  # raises ValueError for a text that is not `expected`
    expected: str
    meaning: str


def _level(text: str) -> int:
    level = int(text)
    if not 0 <= level <= 5:
        raise ValueError(text)
    return level


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError(text)
    return count


def _yes_or_no(text: str) -> bool:
    return {"0": False, "1": True}[text]


def _name(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def _path(text: str) -> Path:
    if not text:
        raise ValueError(text)
    return Path(text).expanduser()


SWITCHES = (
    _Switch(
        "RELAXSERVE_DEBUG",
        "debug",
        _level,
        "a level from 0 to 5",
        "1 summary and cache hits, 2 time per pass and step, 3 IR after each phase, 4 generated code, 5 IR after each pass as a diff",
    ),
    _Switch("RELAXSERVE_DUMP", "dump", _path, "a directory", "write the output of all levels as numbered files"),
    _Switch("RELAXSERVE_VERIFY", "verify", _yes_or_no, "0 or 1", "verify the IR between passes"),
    _Switch("RELAXSERVE_NO_CACHE", "no_cache", _yes_or_no, "0 or 1", "compile every program, and neither read nor write the cache"),
    _Switch("RELAXSERVE_CACHE", "cache", _path, "a directory", "where compiled programs and packed weights are stored"),
    _Switch("RELAXSERVE_CACHE_KEY_FILE", "cache_key_file", _path, "a file", "key of a cache that replicas share, kept outside the cache"),
    _Switch("RELAXSERVE_THREADS", "threads", _count, "a number of at least 1", "threads per model instead of all usable cores"),
    _Switch("RELAXSERVE_TARGET", "target", _name, "a target of compiler/machine/target.py", "use only the instructions of this target"),
)


def parse(environment: Mapping[str, str]) -> Flags:
    """Read the switches from environment variables. A variable that is not set leaves the default. Raise InvalidFlag if the value of a
    variable is not valid."""
    values: dict[str, Any] = {}
    for switch in SWITCHES:
        text = environment.get(switch.variable)
        if text is None:
            continue
        try:
            values[switch.field] = switch.parse(text)
        except (ValueError, KeyError, RuntimeError):  # RuntimeError: the path is in the home of a user who does not exist
            raise InvalidFlag(switch.variable, text, switch.expected) from None
    return Flags(**values)


_current: ContextVar[Flags | None] = ContextVar("flags", default=None)


def current() -> Flags:
    """Return the switches of this context: those of the innermost `scope`, or else those of the environment."""
    return _current.get() or parse(os.environ)


@contextmanager
def scope(**changes: Any) -> Generator[Flags]:
    """Change switches for this context until the `with` ends: `with scope(debug=3): ...`."""
    flags = replace(current(), **changes)
    token = _current.set(flags)
    try:
        yield flags
    finally:
        _current.reset(token)


def xdg_folder(variable: str, below_home: str) -> Path:
    """Return the user's folder for a kind of files by the XDG base directory specification, which says to ignore relative paths."""
    named = Path(os.environ.get(variable, ""))
    return named if named.is_absolute() else Path.home() / below_home


def table() -> str:
    """Return a table of all switches with their present values."""
    flags = current()
    rows = [(s.variable, str(getattr(flags, s.field)), f"{s.meaning} ({s.expected})") for s in SWITCHES]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    return "\n".join(f"{name:{widths[0]}}  {value:{widths[1]}}  {meaning}" for name, value, meaning in rows)


if __name__ == "__main__":
    print(table())
