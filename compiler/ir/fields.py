"""Declarations of what the fields of IR nodes hold.

A field of a scalar, a statement or a value of the graph level declares whether it holds other nodes, dimensions, buffers or the variables
that the node defines. Without a declaration, such a field holds plain data. Most functions that walk or rewrite these nodes
(graph/visit.py, loops/visit.py) follow the declarations, so they need no code for a new kind of node. The fields of atoms, bindings,
blocks, bodies and functions have no declarations; the functions that walk them name these fields.

Only a *scoped* field may use what its node defines: the body of a loop may use the loop's variable, but the extent of the loop may not.
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
    SCALAR = auto()  # a scalar expression of the loop level
    STMT = auto()
    DIM = auto()
    BUFFER = auto()  # a buffer that is defined elsewhere
    PLACE = auto()  # a load that names a place in memory, not its value
    NEW_VAR = auto()  # the node defines an integer variable
    NEW_AXES = auto()  # the node defines variables in order, each with its extent
    NEW_BUFFER = auto()  # the node defines a buffer
    ATOM = auto()  # an operand of the graph level
    BODY = auto()  # a body of the graph level, such as a branch
    TYPE = auto()  # an annotation
    ATTRS = auto()  # attributes, possibly with dimensions among them
    NODE = auto()  # a nested node; its items count as items of the node that contains it

    __hash__ = object.__hash__  # Enum's own hash runs in Python, which slows every walk


def holds(what: Holds, *, scoped: bool = False, default: Any = MISSING, default_factory: Any = MISSING) -> Any:
    """Declare a field of a node. The field holds an item, a tuple of items, a tuple of tuples of dimensions, or None. The item of an ATTRS
    field is the whole mapping of attributes."""
    made: Any = field(default=default, default_factory=default_factory, metadata={"holds": what, "scoped": scoped})
    return made


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(holds, field))
def node(cls: type[T]) -> type[T]:
    """Decorate an IR node: immutable, compared by identity."""
    return dataclass(frozen=True, slots=True, eq=False)(cls)


@dataclass(frozen=True, slots=True)
class Part:
    """A declared field of a node type."""

    name: str
    what: Holds
    scoped: bool


@cache
def parts(node_type: type) -> tuple[Part, ...]:
    """Return the declared fields of a node type: first the fields that are not scoped, then the definitions, then the scoped fields."""
    found = [Part(f.name, f.metadata["holds"], f.metadata["scoped"]) for f in fields(node_type) if f.metadata]
    return tuple(sorted(found, key=lambda p: p.scoped * 2 + (p.what in DEFINITIONS)))


DEFINITIONS = frozenset((Holds.NEW_VAR, Holds.NEW_AXES, Holds.NEW_BUFFER))


@cache
def getter(node_type: type, what: Holds) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that returns the items of kind `what` of a node of this type. A tuple of tuples of dimensions gives its dimensions.
    A nested node (NODE) gives its items of this kind. The function is chosen once per type, so that a walk does not inspect the fields of
    each node."""
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
    """Return the names of all fields, plain data included, in the order of the constructor."""
    return tuple(f.name for f in fields(node_type))


def items(node: Any, what: Holds) -> tuple[Any, ...]:
    """Return the items of kind `what` that the node holds in its own fields, in the order of `parts` (see `getter`)."""
    return getter(type(node), what)(node)
