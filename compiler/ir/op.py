"""Operators of the graph level, and `Registry`, a table of named things. An operator is declared by its name, its attributes, a rule that
deduces the annotation of its result, the relations of sizes that must hold, and whether it is pure. Its implementations (a NumPy function
and, for most operators, a loop nest) are in the tables of compiler/ops/tables.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from compiler.ir.relations import Relation
from compiler.ir.types import Type

Deduce = Callable[[tuple[Type, ...], Mapping[str, Any]], Type]
Relations = Callable[[tuple[Type, ...], Mapping[str, Any]], Iterable[Relation]]


def no_relations(_: tuple[Type, ...], __: Mapping[str, Any]) -> Iterable[Relation]:
    return ()


@dataclass(frozen=True, slots=True, eq=False)
class OpDef:
    """An operator. `attributes` maps each attribute's name to its default, or to `REQUIRED`. `deduce` returns the annotation of the result,
    and `relations` returns the relations of sizes on which the lowering relies; both get the annotations of the operands and the attributes
    of a call. Passes may remove or share calls of `pure` operators."""

    name: str
    attributes: Mapping[str, Any]
    deduce: Deduce
    pure: bool = True
    relations: Relations = no_relations


REQUIRED: Any = object()

K = TypeVar("K")
V = TypeVar("V")


class Registry(Generic[V]):
    """A table of named things that other modules extend. `noun` is the word for such a thing in messages. For an unknown name, indexing
    raises UnknownName, which lists the known names, and `get` returns None. Adding a name twice raises ValueError."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._items: dict[str, V] = {}

    def add(self, name: str, item: V) -> V:
        if name in self._items:
            raise ValueError(f"{self._noun} {name!r} is defined twice")
        self._items[name] = item
        return item

    def __getitem__(self, name: str) -> V:
        try:
            return self._items[name]
        except KeyError:
            raise UnknownName(f"unknown {self._noun} {name!r}; known: {', '.join(sorted(self._items))}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def get(self, name: str) -> V | None:
        return self._items.get(name)


class UnknownName(KeyError):
    """Raised if a registry has no entry with a name. The text of the error is the message itself; KeyError would put the message in
    quotes."""

    def __str__(self) -> str:
        return str(self.args[0])


OPS: Registry[OpDef] = Registry("operator")
