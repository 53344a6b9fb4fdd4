"""Typed reading of a JSON object: each field has a kind and limits, and an error names field, value and expectation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from compiler.frontend.errors import ConfigError
from runtime.files import regular

MAX_CONFIG_BYTES = 4 << 20
REQUIRED: Any = object()


def read_json(path: Path) -> Any:
    try:
        if (size := regular(path).stat().st_size) > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path.name} has {size} bytes; at most {MAX_CONFIG_BYTES} are read")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is not JSON: {error}") from error


class Fields:
    """A JSON object, and which of its fields were asked for. A field that is null counts as absent."""

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} is {values!r:.80}, expected an object")
        self.values = cast(Mapping[str, Any], values)
        self.where = where
        self.asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        self.asked.add(name)
        return self.values.get(name) is not None

    def raw(self, name: str, default: Any = None) -> Any:
        return self.values[name] if name in self else default

    def integer(self, name: str, default: Any = REQUIRED, *, minimum: int = 1, maximum: int = (1 << 31) - 1) -> Any:
        """Any: an int, or the default whatever it is."""
        return self._get(name, default, f"an integer from {minimum} to {maximum}", lambda v: type(v) is int and minimum <= v <= maximum)

    def number(self, name: str, default: Any = REQUIRED) -> Any:
        """A positive, finite number; floats are written as integers at times."""
        value = self._get(name, default, "a positive number", lambda v: type(v) in (int, float) and 0 < v < 1e30)
        return float(value) if type(value) is int else value

    def flag(self, name: str, default: bool) -> bool:
        return self._get(name, default, "true or false", lambda v: type(v) is bool)

    def text(self, name: str, default: Any = REQUIRED) -> Any:
        return self._get(name, default, "a text", lambda v: isinstance(v, str))

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        def fits(value: Any) -> bool:
            return isinstance(value, list) and len(value) == length and all(type(v) in (int, float) and 0 < v < 1e30 for v in value)

        return tuple(float(v) for v in self._get(name, REQUIRED, f"a list of {length} positive numbers", fits))

    def fields(self, name: str) -> Fields:
        return Fields(self.raw(name, {}), f"{name} of {self.where}")

    def error(self, name: str, expected: str) -> ConfigError:
        return ConfigError(f"{name} of {self.where} is {self.values.get(name)!r:.80}, expected {expected}")

    def _get(self, name: str, default: Any, expected: str, fits: Any) -> Any:
        if name not in self:
            if default is REQUIRED:
                raise ConfigError(f"{self.where} has no {name}, expected {expected}")
            return default
        if not fits(self.values[name]):
            raise self.error(name, expected)
        return self.values[name]
