"""Helpers for functions that rewrite nodes. A node that does not change keeps its identity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import is_
from typing import Any, TypeVar

from compiler.ir.fields import Holds, all_names, parts

T = TypeVar("T")


def updated(node: T, **changes: Any) -> T:
    """Return the node with these fields changed, or the node itself if its fields have these values already."""
    return remade(node, {name: value for name, value in changes.items() if getattr(node, name) is not value})


def remade(node: T, changes: Mapping[str, Any]) -> T:
    """Return the node with these fields changed. The caller makes sure that each value is new."""
    if not changes:
        return node
    make: Any = type(node)
    return make(*[changes[name] if name in changes else getattr(node, name) for name in all_names(make)])


def mapped(node: T, what: Holds, fn: Callable[[Any], Any]) -> T:
    """Return the node with `fn` applied to every item of kind `what`."""
    changes: dict[str, Any] = {}
    for part in parts(type(node)):
        if part.what is what or part.what is Holds.NODE:
            held = getattr(node, part.name)
            new = map_items(held, fn) if part.what is what else mapped(held, what, fn)
            if new is not held:
                changes[part.name] = new
    return remade(node, changes)


def map_items(held: Any, fn: Callable[[Any], Any]) -> Any:
    """Apply `fn` to one item, to each item of a tuple, or to each item of a tuple of tuples. None stays None."""
    if not isinstance(held, tuple):
        return held if held is None else fn(held)
    some: tuple[Any, ...] = held
    if some and isinstance(some[0], tuple):
        return map_tuple(some, lambda inner: map_tuple(inner, fn))
    return map_tuple(some, fn)


def map_tuple(items: tuple[T, ...], fn: Callable[[T], T]) -> tuple[T, ...]:
    new = tuple([fn(i) for i in items])
    return items if all(map(is_, new, items)) else new
