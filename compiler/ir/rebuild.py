"""Helpers of the rewriting functions: what does not change keeps its identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

T = TypeVar("T")


def updated(node: T, **changes: Any) -> T:
    """The node with these fields; itself if it has them already."""
    if all(getattr(node, name) is value for name, value in changes.items()):
        return node
    return replace(node, **changes)  # pyright: ignore[reportUnknownVariableType,reportArgumentType]  # nodes are dataclasses


def map_tuple(items: tuple[T, ...], fn: Callable[[T], T]) -> tuple[T, ...]:
    mapped = tuple(fn(i) for i in items)
    return mapped if any(m is not i for m, i in zip(mapped, items, strict=True)) else items
