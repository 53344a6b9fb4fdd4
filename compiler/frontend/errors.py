"""The errors of a model's files.

ModelError                a ValueError: the files are at fault, not the program
    UnknownModel          no family of that name
    ConfigError           a field of a configuration is missing or has a value that nobody implements
    DamagedFile           a file is not what its format says
    UnsafeFile            a format that runs code when it is opened
    WeightMismatch        the tensors of the files are not those of the model
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class ModelError(ValueError):
    """The files of a model cannot be used."""


class UnknownModel(ModelError):
    pass


class ConfigError(ModelError):
    pass


class DamagedFile(ModelError):
    pass


class UnsafeFile(ModelError):
    pass


class WeightMismatch(ModelError):
    pass


MAX_LISTED = 20  # names that a message has room for


def listed(names: Iterable[str]) -> str:
    """The first names, as many as a message has room for."""
    return ", ".join(_shortened(list(names)))


def _shortened(names: list[str]) -> Iterator[str]:
    yield from names[:MAX_LISTED]
    if len(names) > MAX_LISTED:
        yield f"and {len(names) - MAX_LISTED} more"
