"""Names for printing. Every variable gets a name that is unique in its scope, so that the text can be parsed."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

from compiler.ir.dims import Dim, DimVar
from compiler.ir.text.syntax import is_name


class Names:
    """Unique names for the objects of one namespace. A name is derived from a preferred one, the `wish` (`x`, `x_1`, ...). If `canonical`
    is a letter, wishes are ignored, and each name is this letter and a number."""

    def __init__(self, canonical: str = "") -> None:
        self.canonical = canonical
        self._names: dict[object, str] = {}
        self._used: set[str] = set()
        self._counts: dict[str, int] = {}

    def is_used(self, name: str) -> bool:
        return name in self._used

    def of(self, thing: object, wish: str) -> str:
        """Return the name of the thing. Give the thing a name if it has none."""
        return self._names.get(thing) or self.give(thing, wish)

    def give(self, thing: object, wish: str) -> str:
        """Give the thing a new name, even if it has one, and return the name."""
        name = self._fresh(self.canonical or _word(wish))
        self._names[thing] = name
        self._used.add(name)
        return name

    def _fresh(self, base: str) -> str:
        """Return an unused name: `base` itself, or `base` and a number. The number also turns a reserved word into a name."""
        if not self.canonical and base not in self._used and is_name(base):
            return base
        count = self._counts.get(base, 0)
        while True:
            count += 1
            name = f"{base}{count}" if self.canonical else f"{base}_{count}"
            if name not in self._used:
                self._counts[base] = count
                return name

    @contextmanager
    def scope(self) -> Generator[None]:
        """When the `with` ends, forget the names that were given inside it, so that they can be used again."""
        outer = dict(self._names), set(self._used), dict(self._counts)
        yield
        self._names, self._used, self._counts = outer


class DimNames(Names):
    """Names of symbolic variables, and the text of expressions over them."""

    def __init__(self, canonical: str = "") -> None:
        super().__init__(canonical)
        self.free: list[DimVar] = []  # variables that were mentioned before any `bind` of them, in order
        self._renamed: dict[DimVar, DimVar] = {}  # maps each named variable to a new one that has its name in the text
        self._texts: dict[Dim, str] = {}
        self._mentions: dict[DimVar, list[Dim]] = {}  # for each variable, the expressions in `_texts` that mention the variable

    def text(self, dim: Dim) -> str:
        """Return the text of an expression. Variables without a name get one, and are added to `free`."""
        text = self._texts.get(dim)
        if text is None:
            text = self._texts[dim] = str(self._written(dim))
            for var in dim.vars():
                self._mentions.setdefault(var, []).append(dim)
        return text

    def _written(self, dim: Dim) -> Dim:
        for var in dim.vars():
            self.variable(var)
        return dim.substitute(self._renamed)

    def variable(self, var: DimVar) -> str:
        """Return the name of a variable. A variable without a name gets one, and is added to `free`."""
        if var not in self._names:
            self.free.append(var)
            self.bind(var)
        return self._names[var]

    def bind(self, var: DimVar) -> str:
        """Give the variable a new name, and return the name. An expression is printed after renaming its variables, so its terms are in the
        order in which the text first mentions the variables, not in the order in which the variables were created."""
        upper = self._written(var.upper) if isinstance(var.upper, Dim) else var.upper
        name = self.give(var, var.name)
        self._forget(var)
        self._renamed[var] = DimVar(name, var.lower, upper, var.multiple_of)
        return name

    @contextmanager
    def scope(self) -> Generator[None]:
        outer = dict(self._renamed)
        with super().scope():
            yield
        for var, renamed in self._renamed.items():
            if outer.get(var) is not renamed:
                self._forget(var)
        self._renamed = outer

    def _forget(self, var: DimVar) -> None:
        """Forget the texts of all expressions with a variable, because its name changes."""
        for dim in self._mentions.pop(var, ()):
            self._texts.pop(dim, None)


def _word(wish: str) -> str:
    """Return a word close to the preferred name. Either the word is a name, or it becomes one when `_fresh` appends a number: `for` is
    reserved, but `for_1` is a name."""
    word = re.sub(r"[^A-Za-z0-9_.]", "_", wish)
    if not re.match("[A-Za-z_]", word):
        word = f"v{word}" if word else "v"
    return word if is_name(word) or is_name(f"{word}_1") else word.replace(".", "_")
