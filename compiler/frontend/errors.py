"""Errors in a model's files.

ModelError                a ValueError: the files are at fault, not the program
    UnknownModel          no family reads models of this type
    ConfigError           a field of a configuration is missing or has an unsupported value
    DamagedFile           a file violates its format
    UnsafeFile            a file has a format that runs code when it is opened
    WeightMismatch        the tensors in the files are not those of the model, or have other shapes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class ModelError(ValueError):
    """Raised if the files of a model cannot be used."""


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


MAX_LISTED = 20  # maximum number of names that a message lists


def listed(names: Iterable[str]) -> str:
    """Join the names for a message. If there are more than MAX_LISTED, list the first ones and count the remaining names."""
    return ", ".join(_shortened(list(names)))


def _shortened(names: list[str]) -> Iterator[str]:
    yield from names[:MAX_LISTED]
    if len(names) > MAX_LISTED:
        yield f"and {len(names) - MAX_LISTED} more"
