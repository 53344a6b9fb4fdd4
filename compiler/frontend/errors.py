"""Errors that are raised when a model is loaded. Nearly all of them concern the model's files.

ModelError                A ValueError: the files or the settings of a load are at fault, not the program.
    UnknownModel          No family reads models of this type, or the family reads only models without experts, and the file has experts.
    ConfigError           A file of JSON is absent or unreadable, a field is missing, or a field or a setting has an unsupported value.
    DamagedFile           A file of weights or of a vocabulary cannot be opened, or violates its format.
    UnsafeFile            A file has a format that can run code when it is opened.
    WeightMismatch        The tensors in the files are not those of the model, have other shapes, or are integers without scales.

`ranks.py`, `splitting.py` and `vocabulary/folder.py` define further kinds of ModelError.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class ModelError(ValueError):
    """Raised if the files of a model cannot be used at all, or not with the settings of the load."""


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
