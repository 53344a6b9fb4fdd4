"""Helpers for functions that rewrite nodes. A node that does not change keeps its identity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import is_
from typing import Any, TypeVar

from compiler.ir.fields import Holds, all_names, parts

T = TypeVar("T")


def updated(node: T, **changes: Any) -> T:
    """Return a copy of the node in which these fields are changed, or the node itself if its fields hold the same objects already."""
    return remade(node, {name: value for name, value in changes.items() if getattr(node, name) is not value})


def remade(node: T, changes: Mapping[str, Any]) -> T:
    """Return a copy of the node in which these fields are changed, or the node itself if `changes` is empty. The changes are not compared
    with the values that the fields have."""
    if not changes:
        return node
    make: Any = type(node)
    return make(*[changes[name] if name in changes else getattr(node, name) for name in all_names(make)])


def mapped(node: T, what: Holds, fn: Callable[[Any], Any]) -> T:
    """Replace every item of kind `what` that the node holds in its own fields, or in a nested node (NODE), by what `fn` returns for it.
    Return the node itself if `fn` returns every item unchanged."""
    changes: dict[str, Any] = {}
    for part in parts(type(node)):
        if part.what is what or part.what is Holds.NODE:
            held = getattr(node, part.name)
            new = map_items(held, fn) if part.what is what else mapped(held, what, fn)
            if new is not held:
                changes[part.name] = new
    return remade(node, changes)


def map_items(held: Any, fn: Callable[[Any], Any]) -> Any:
    """Apply `fn` to what a field holds: one item, each item of a tuple, or each item of a tuple of tuples. None stays None. A tuple whose
    items stay the same objects is returned itself."""
    if not isinstance(held, tuple):
        return held if held is None else fn(held)
    some: tuple[Any, ...] = held
    if some and isinstance(some[0], tuple):
        return map_tuple(some, lambda inner: map_tuple(inner, fn))
    return map_tuple(some, fn)


def map_tuple(items: tuple[T, ...], fn: Callable[[T], T]) -> tuple[T, ...]:
    """Apply `fn` to each item. Return the tuple itself if all items stay the same objects."""
    new = tuple([fn(i) for i in items])
    return items if all(map(is_, new, items)) else new
