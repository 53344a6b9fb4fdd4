"""Typed reading of a JSON object: each field has a kind and limits, and an error names the field, its value and the expectation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from compiler.frontend.errors import ConfigError
from runtime.files import AGAIN, STAND_IN_BYTES, regular, stand_in

MAX_CONFIG_BYTES = 4 << 20
MAX_TOKENIZER_BYTES = 256 << 20  # the largest tokenizer.json in use has 33 MB
REQUIRED: Any = object()
EMPTY: Mapping[str, Any] = {}
SPECIAL, SPECIAL_FLOATS = "__float__", {"Infinity": math.inf, "-Infinity": -math.inf}


def read_json(path: Path, *, most_bytes: int = MAX_CONFIG_BYTES) -> Any:
    """Return the JSON value in a file. Raise ConfigError if the file cannot be read, has more than `most_bytes` bytes, is not JSON, or is
    only a stand-in for a file that was not downloaded."""
    try:
        if (size := regular(path).stat().st_size) > most_bytes:
            raise ConfigError(f"{path.name} has {size} bytes; at most {most_bytes} are read")
        content = path.read_bytes()
        if found := stand_in(content[:STAND_IN_BYTES]):
            raise ConfigError(f"{path.name} {found}")
        return json.loads(content, object_hook=_float_of)
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from error
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is not JSON: {error}; {AGAIN}") from error


def _float_of(value: dict[str, Any]) -> Any:
    """Return the infinity that an object stands for: transformers writes such objects, since JSON has no infinity. Return other objects
    unchanged."""
    return SPECIAL_FLOATS.get(str(value[SPECIAL]), value) if value.keys() == {SPECIAL} else value


class Fields:
    """A JSON object that records which of its fields were read. A field that is null counts as absent."""

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} is {values!r:.80}, expected an object")
        self.values = cast(Mapping[str, Any], values)
        self.where = where
        self.asked: set[str] = set()
        self._nested: dict[str, Fields] = {}

    def __contains__(self, name: str) -> bool:
        """Return whether the field is present. It then counts as read."""
        self.asked.add(name)
        return self.values.get(name) is not None

    def raw(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, whatever its kind, or the default if the field is absent."""
        return self.values[name] if name in self else default

    def integer(self, name: str, default: Any = REQUIRED, *, minimum: int = 1, maximum: int = (1 << 31) - 1) -> Any:
        """Return an integer within the limits. If the field is absent, return the default, which may have any type. Raise ConfigError if an
        absent field has no default, or if the value is anything but such an integer."""
        return self._get(name, default, f"an integer from {minimum} to {maximum}", lambda v: type(v) is int and minimum <= v <= maximum)

    def fill(self, **defaults: Any) -> None:
        """Set absent fields to these defaults of a family."""
        self.values = {**self.values, **{name: value for name, value in defaults.items() if self.values.get(name) is None}}

    def skip(self, *names: str) -> None:
        """Mark fields as read, because they change nothing in this family."""
        self.asked.update(names)

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yield the fields that were never read. The name of a nested field is a dotted path. Null, false, zero and empty values are
        omitted, since they request nothing."""
        for name, value in self.values.items():
            if name in self._nested:
                yield from ((f"{name}.{inner}", found) for inner, found in self._nested[name].unread())
            elif value and name not in self.asked:
                yield name, value

    def number(self, name: str, default: Any = REQUIRED, *, zero: bool = False) -> Any:
        """Return a positive number below 1e30, or zero if `zero` is true. An integer is converted to a float, since some files write floats
        as integers. If the field is absent, return the default. Raise ConfigError as `integer` does."""
        expected = "a positive number or zero" if zero else "a positive number"
        value = self._get(name, default, expected, lambda v: type(v) in (int, float) and (0 < v < 1e30 or (zero and v == 0)))
        return float(value) if type(value) is int else value

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false, or the default if the field is absent. Raise ConfigError for another value."""
        return self._get(name, default, "true or false", lambda v: type(v) is bool)

    def text(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a text. If the field is absent, return the default. Raise ConfigError as `integer` does."""
        return self._get(name, default, "a text", lambda v: isinstance(v, str))

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """Return the numbers of a list of `length` positive numbers. Raise ConfigError if the field is absent or anything else."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and len(value) == length and all(type(v) in (int, float) and 0 < v < 1e30 for v in value)

        return tuple(float(v) for v in self._get(name, REQUIRED, f"a list of {length} positive numbers", fits))

    def fields(self, name: str, defaults: Mapping[str, Any] = EMPTY, overrides: Mapping[str, Any] = EMPTY) -> Fields:
        """Return the object in a field; an absent field counts as an empty object. `defaults` supplies fields that the object lacks, but
        does not replace null, and `overrides` adds or replaces fields. Later calls for the field return the same object, and ignore
        `defaults` and `overrides`. Raise ConfigError if the field is no object."""
        if name not in self._nested:
            nested = Fields(self.raw(name, {}), f"{name} of {self.where}")
            nested.values = {**defaults, **nested.values, **overrides}
            self._nested[name] = nested
        return self._nested[name]

    def require(self, why: str = "", /, **wanted: bool | float | str | None) -> None:
        """Raise ConfigError if one of these fields is present and has another value than the given one, which is the only supported value.
        `why` is the end of the message."""
        for name, value in wanted.items():
            found = self.raw(name, value)
            if found != value or isinstance(found, bool) is not isinstance(value, bool):
                shown = str(value).lower() if isinstance(value, bool) else str(value)
                raise self.error(name, f"{shown}, {why}" if why else shown)

    def require_equal(self, name: str, value: float, source: str) -> None:
        """Raise ConfigError if the field is present and differs from `value`, the value of the field `source`."""
        if self.raw(name, value) != value:
            raise self.error(name, f"{value}, the value of {source}")

    def error(self, name: str, expected: str) -> ConfigError:
        """Return the error that the field has another value than expected."""
        return ConfigError(f"{name} of {self.where} is {self.values.get(name)!r:.80}, expected {expected}")

    def _get(self, name: str, default: Any, expected: str, fits: Any) -> Any:
        """Return the value of a field, or the default if the field is absent. Raise ConfigError if an absent field has no default, or if
        `fits` is false for the value. `expected` describes the values that fit."""
        if name not in self:
            if default is REQUIRED:
                raise ConfigError(f"{self.where} has no {name}, expected {expected}")
            return default
        if not fits(self.values[name]):
            raise self.error(name, expected)
        return self.values[name]
