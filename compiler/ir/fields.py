"""What the fields of IR nodes hold.

A node says of each field whether it holds values, statements, dimensions, buffers or what the node defines; a field that says nothing holds
plain data. Walking, rewriting and comparing follow from that (graph/visit.py, loops/visit.py, equal.py), so a new node is declared once.

A *scoped* field sees what its node defines (the body of a loop sees the loop's variable); the other fields stand outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum, auto
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


class Holds(Enum):
    DATA = auto()
    SCALAR = auto()  # a value of the loop level
    STMT = auto()
    DIM = auto()
    BUFFER = auto()  # one that is defined elsewhere
    PLACE = auto()  # a load that names a place in memory
    NEW_VAR = auto()  # defines an integer variable
    NEW_AXES = auto()  # defines variables one after another, each beside its extent
    NEW_BUFFER = auto()
    ATOM = auto()  # an operand of the graph level
    BODY = auto()
    TYPE = auto()
    ATTRS = auto()  # attributes, dimensions possibly among them
    NODE = auto()  # a node that is a part of this one: what it holds, this one holds too

    __hash__ = object.__hash__  # Enum hashes by name, in Python: slow on every walk


def holds(what: Holds, *, scoped: bool = False, default: Any = MISSING, default_factory: Any = MISSING) -> Any:
    """A field of a node. It may be a single item, a tuple of items (of tuples, for dimensions), or None."""
    made: Any = field(default=default, default_factory=default_factory, metadata={"holds": what, "scoped": scoped})
    return made


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(holds, field))
def node(cls: type[T]) -> type[T]:
    """The decorator of all IR nodes: immutable, compared by identity."""
    return dataclass(frozen=True, slots=True, eq=False)(cls)


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    what: Holds
    scoped: bool


@cache
def parts(node_type: type) -> tuple[Part, ...]:
    """The fields that are not plain data, in order; those outside the scope first, then definitions, then what is scoped."""
    found = [Part(f.name, f.metadata["holds"], f.metadata["scoped"]) for f in fields(node_type) if f.metadata]
    return tuple(sorted(found, key=lambda p: p.scoped * 2 + (p.what in DEFINITIONS)))


DEFINITIONS = frozenset((Holds.NEW_VAR, Holds.NEW_AXES, Holds.NEW_BUFFER))


@cache
def getter(node_type: type, what: Holds) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gives the items of this kind in a node of this type."""
    if any(p.what is Holds.NODE for p in parts(node_type)):
        return lambda node: tuple(_items_of_parts(node, what))
    names = [p.name for p in parts(node_type) if p.what is what]
    stated = {f.name: str(f.type) for f in fields(node_type)}
    if not names:
        return _nothing
    if what is Holds.DIM and all(stated[name].startswith("tuple[tuple") for name in names):
        return lambda node: tuple(i for name in names for inner in getattr(node, name) for i in inner)
    if len(names) == 1 and stated[names[0]].startswith("tuple"):
        return attrgetter(*names)
    if not any(stated[name].startswith("tuple") or "None" in stated[name] for name in names):
        get = attrgetter(*names)
        return get if len(names) > 1 else lambda node: (get(node),)
    return lambda node: tuple(_items(getattr(node, name) for name in names))


def _nothing(node: Any) -> tuple[Any, ...]:
    return ()


def _items_of_parts(node: Any, what: Holds) -> Iterator[Any]:
    for part in parts(type(node)):
        held = getattr(node, part.name)
        if part.what is Holds.NODE:
            yield from items(held, what)
        elif part.what is what:
            yield from _items(iter((held,)))


def _items(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from value
        elif value is not None:
            yield value


@cache
def all_names(node_type: type) -> tuple[str, ...]:
    """Of all fields, plain data too, as the constructor takes them."""
    return tuple(f.name for f in fields(node_type))


def items(node: Any, what: Holds) -> tuple[Any, ...]:
    """What the node itself holds of a kind, in the order of its fields."""
    return getter(type(node), what)(node)
