"""How the server handles a field of a vendor's requests, as a row of a table. Tests verify each row, and docs/api.md is written from it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

NOTHING: Mapping[str, Any] = {}


class Handling(StrEnum):
    HONOURED = "honoured"  # one of the values changes what the worker computes, or the answer
    NO_EFFECT = "no effect"  # no value changes anything
    REFUSED = "refused"  # with 400 and its name; a value that asks for nothing is accepted


@dataclass(frozen=True)
class Row:
    handling: Handling
    accepted: tuple[Any, ...] = ()
    refused: tuple[Any, ...] = ()  # values that are refused by the name of the field, or of a field in it
    beside: Mapping[str, Any] = field(default_factory=dict[str, Any])  # fields without which the vendor does not allow this one
    note: str = ""


def honoured(*accepted: Any, beside: Mapping[str, Any] = NOTHING, refused: tuple[Any, ...] = (), note: str = "") -> Row:
    return Row(Handling.HONOURED, accepted, refused, beside, note)


def no_effect(*accepted: Any, beside: Mapping[str, Any] = NOTHING, refused: tuple[Any, ...] = (), note: str = "") -> Row:
    return Row(Handling.NO_EFFECT, accepted, refused, beside, note)


def refused(*values: Any, accepted: tuple[Any, ...] = (), beside: Mapping[str, Any] = NOTHING, note: str = "") -> Row:
    return Row(Handling.REFUSED, accepted, values, beside, note)


def drawn(rows: Mapping[str, Row], base: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Draw a request that the vendor allows: `base` with some of the other fields, each with one of its accepted values."""
    body = dict(base)
    for name in sorted(rows):
        if rng.random() < 0.25 and rows[name].accepted:
            body |= {**rows[name].beside, name: rng.choice(rows[name].accepted)}
    return body


def table(rows: Mapping[str, Row]) -> str:
    """Return the rows as a table of a document. Fields with the same handling and the same note share a line."""
    shared: dict[tuple[Handling, str], list[str]] = {}
    for name, row in rows.items():
        shared.setdefault((row.handling, row.note), []).append(f"`{name}`")
    order = sorted(shared, key=lambda one: (list(Handling).index(one[0]), one[1] != "", shared[one]))
    lines = [f"| {', '.join(sorted(shared[one]))} | {one[0]}{f': {one[1]}' if one[1] else ''} |" for one in order]
    return "\n".join(["| Fields | Handling |", "|---|---|", *lines])
