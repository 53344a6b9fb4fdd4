"""The runtime of exported models in JavaScript: ES modules for browsers and Node, without a bundler. An export copies these files."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

_SUFFIXES = (".mjs", ".html", ".css", ".txt")


def page_files() -> dict[str, bytes]:
    """Return the contents of the chat page, of its style, of its modules and of their licences, by path."""
    return dict(_read(files(__name__), ""))


def _read(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    """Return the path and the content of each file in a folder and in the folders below it whose names do not begin with an underscore.
    Only files with a suffix of _SUFFIXES count. `prefix` comes before each path."""
    found: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.name.startswith("_"):
            found += _read(entry, f"{prefix}{entry.name}/")
        elif PurePosixPath(entry.name).suffix in _SUFFIXES:
            found.append((prefix + entry.name, entry.read_bytes()))
    return found
