"""Integer expressions over named variables. Dimensions, indices, loop bounds and byte counts are such expressions.

A `Dim` is a polynomial over atoms. An atom is a variable, or a node that a polynomial cannot express:

    Dim   ::= coefficient * Atom * Atom + ... + constant
    Atom  ::= DimVar | Dim // Dim | Dim % Dim | min(Dim, ...) | max(Dim, ...)

Every `Dim` is in a canonical form, which its operators compute. `==` compares these forms; where they differ, `prove.prove_eq` may still
prove two expressions equal. Canonicalization relies on the declared range and divisibility of variables, so a value that is substituted for
a variable must satisfy the variable's declaration. Canonicalization also relies on divisors never being zero: a divisor that is not
negative is at least 1. Substituting `n` does not change the declaration of another variable: a loop variable `j` with `upper = n - 1` keeps
that bound, in terms of the old `n`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from operator import attrgetter, floordiv, index, mod
from typing import Any

Key = tuple[Any, ...]  # nested tuples of integers, by which atoms, terms and Dims are sorted
by_key = attrgetter("key")
MAX_DEPTH = 32  # nesting depth of //, %, min and max: far above what programs need, and within Python's recursion limit


class UnboundDimError(Exception):
    """Raised if an expression is evaluated without a value for one of its variables."""


class _Operators:
    """Arithmetic shared by `Dim` and `DimVar`."""

    __slots__ = ()

    def __add__(self, other: DimLike) -> Dim:
        return _plus(as_dim(self), as_dim(other), 1)

    def __radd__(self, other: DimLike) -> Dim:
        return _plus(as_dim(other), as_dim(self), 1)

    def __sub__(self, other: DimLike) -> Dim:
        return _plus(as_dim(self), as_dim(other), -1)

    def __rsub__(self, other: DimLike) -> Dim:
        return _plus(as_dim(other), as_dim(self), -1)

    def __mul__(self, other: DimLike) -> Dim:
        return _times(as_dim(self), as_dim(other))

    def __rmul__(self, other: DimLike) -> Dim:
        return _times(as_dim(other), as_dim(self))

    def __floordiv__(self, other: DimLike) -> Dim:
        return _divide(as_dim(self), as_dim(other))[0]

    def __rfloordiv__(self, other: DimLike) -> Dim:
        return _divide(as_dim(other), as_dim(self))[0]

    def __mod__(self, other: DimLike) -> Dim:
        return _divide(as_dim(self), as_dim(other))[1]

    def __rmod__(self, other: DimLike) -> Dim:
        return _divide(as_dim(other), as_dim(self))[1]

    def __neg__(self) -> Dim:
        return _times(MINUS_ONE, as_dim(self))


# --- atoms -------------------------------------------------------------------------------------------------------------

_serial = count()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DimVar(_Operators):
    """A named integer, compared by identity. The range may be empty; then no expression that contains the variable is ever evaluated."""

    name: str
    lower: int = 0
    upper: int | Dim | None = None  # the largest value, or None for no limit; a loop variable j < m has upper = m - 1
    multiple_of: int = 1
    # `serial` is the order of creation. `upper` mentions only variables that were created earlier.
    serial: int = field(init=False, default_factory=_serial.__next__)
    key: Key = field(init=False)
    dim: Dim = field(init=False)

    def __post_init__(self) -> None:
        if self.multiple_of < 1:
            raise ValueError(f"variable {self.name}: multiple_of is {self.multiple_of}, expected an integer >= 1")
        if isinstance(self.upper, Dim) and self.upper.is_const:  # a constant bound is always an int
            object.__setattr__(self, "upper", self.upper.const)
        object.__setattr__(self, "key", (0, self.serial))
        object.__setattr__(self, "dim", Dim(((1, (self,)),)))

    @property
    def rank(self) -> tuple[int, int]:
        return (self.serial, 0)

    @property
    def factor(self) -> int:
        return self.multiple_of

    def __repr__(self) -> str:
        return self.name


class _Node:
    """An atom made of Dims. Only simplify.py creates nodes, because it brings their operands into canonical form."""

    __slots__ = ("_hash", "factor", "key", "operands", "rank")
    order: int  # position of this kind of atom when atoms are sorted; variables have 0
    symbol: str

    operands: tuple[Dim, ...]
    key: Key
    rank: tuple[int, int]  # (newest variable, nesting depth): greater than the rank of every atom inside the node
    factor: int  # an integer known to divide every value of the node

    def __init__(self, *operands: Dim) -> None:
        self.operands = operands
        self.key = (self.order, *(o.key for o in operands))
        inner = [a.rank for o in operands for a in o.atoms()]
        self.rank = (max(serial for serial, _ in inner), 1 + max(depth for _, depth in inner))
        if self.rank[1] > MAX_DEPTH:
            text = f"a dimension nests //, %, min and max {self.rank[1]} deep, expected at most {MAX_DEPTH}"
            raise ValueError(f"{text}; bind a part of it to a variable")
        self.factor = self._factor()
        self._hash = hash((self.order, operands))

    def _factor(self) -> int:
        return math.gcd(*(o.factor for o in self.operands))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, _Node) and self._hash == other._hash and self.order == other.order and self.operands == other.operands

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return _show_atom(self)  # pyright: ignore[reportArgumentType]  # the four kinds below are all there are


class _Division(_Node):
    __slots__ = ()

    @property
    def numerator(self) -> Dim:
        return self.operands[0]

    @property
    def divisor(self) -> Dim:
        return self.operands[1]


class FloorDiv(_Division):
    __slots__ = ()
    order, symbol = 1, "//"

    @property
    def exact(self) -> bool:
        """Whether the divisor is a constant that is known to divide the numerator."""
        return self.divisor.is_const and self.numerator.factor % self.divisor.const == 0

    def _factor(self) -> int:
        return self.numerator.factor // self.divisor.const if self.exact else 1


class Mod(_Division):
    __slots__ = ()
    order, symbol = 2, "%"


class Min(_Node):
    __slots__ = ()
    order, symbol = 3, "min"


class Max(_Node):
    __slots__ = ()
    order, symbol = 4, "max"


Atom = DimVar | FloorDiv | Mod | Min | Max
Monomial = tuple[Atom, ...]  # a product of atoms, sorted by key; () is 1
Term = tuple[int, Monomial]


# --- expressions -------------------------------------------------------------------------------------------------------


class Dim(_Operators):
    """An immutable expression in canonical form. `==` and `hash` look at structure; a `Dim` never equals an int or a DimVar."""

    __slots__ = ("_hash", "_key", "terms")

    terms: tuple[Term, ...]

    def __init__(self, terms: tuple[Term, ...]) -> None:
        """Create a Dim from terms that are already canonical. Other packages use `Dim.of` and operators."""
        self.terms = terms
        self._hash = hash(terms)
        self._key: Key | None = None

    @property
    def key(self) -> Key:
        """The key by which Dims are sorted. The key is computed when first needed, because most Dims are never sorted."""
        if self._key is None:
            self._key = tuple([(-len(m), tuple([a.key for a in m]), c) for c, m in self.terms])
        return self._key

    @staticmethod
    def of(x: DimLike) -> Dim:
        return as_dim(x)

    @property
    def is_const(self) -> bool:
        return not self.terms or not self.terms[0][1]

    @property
    def const(self) -> int:
        """The value of a constant expression. Raises ValueError if the expression mentions a variable."""
        if not self.terms:
            return 0
        if self.terms[0][1]:
            raise ValueError(f"dimension {self} is symbolic, expected a constant; substitute {_names(self.vars())} first")
        return self.terms[0][0]

    @property
    def var(self) -> DimVar | None:
        """The variable, if the expression is a single variable, else None."""
        return atom if isinstance(atom := self.atom, DimVar) else None

    @property
    def atom(self) -> Atom | None:
        """The atom, if the expression is a single atom with coefficient 1, else None."""
        if len(self.terms) == 1 and self.terms[0][0] == 1 and len(self.terms[0][1]) == 1:
            return self.terms[0][1][0]
        return None

    @property
    def constant_term(self) -> int:
        return self.terms[-1][0] if self.terms and not self.terms[-1][1] else 0

    @property
    def factor(self) -> int:
        """The greatest integer that is known, from the coefficients and the declarations of variables, to divide every value of the
        expression; 0 if the expression is zero."""
        return factor_of(self.terms)

    def atoms(self) -> Iterator[Atom]:
        """Yield the atoms that are factors of the terms, with repeats, without the atoms inside them."""
        for _, monomial in self.terms:
            yield from monomial

    def vars(self) -> tuple[DimVar, ...]:
        """Return the variables of the expression, also those inside other atoms, each once. Variables that only the declared range of
        another variable mentions are left out."""
        return () if self.is_const else tuple(dict.fromkeys(self._occurrences()))

    def _occurrences(self) -> Iterator[DimVar]:
        for atom in self.atoms():
            if isinstance(atom, DimVar):
                yield atom
            else:
                for operand in atom.operands:
                    yield from operand._occurrences()

    def substitute(self, mapping: Mapping[DimVar, DimLike]) -> Dim:
        """Replace all variables of the mapping at once. Return the expression itself if it mentions none of them."""
        if not any(v in mapping for v in self._occurrences()):
            return self
        total = ZERO
        for coefficient, monomial in self.terms:
            term = as_dim(coefficient)
            for atom in monomial:
                term = term * _substitute_atom(atom, mapping)
            total = total + term
        return total

    def evaluate(self, env: Mapping[DimVar, int]) -> int:
        """Return the value of the expression for these values of variables. Raise UnboundDimError if a value is missing, and
        ZeroDivisionError if a divisor is 0."""
        try:
            return sum(c * math.prod(_evaluate_atom(a, env) for a in m) for c, m in self.terms)
        except KeyError:
            missing = [v for v in self.vars() if v not in env]
            raise UnboundDimError(f"cannot evaluate {self}: no value for {_names(missing)}") from None

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Dim) and self._hash == other._hash and self.terms == other.terms)

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        text = ""
        for coefficient, monomial in self.terms:
            sign = ("-" if coefficient < 0 else "") if not text else (" - " if coefficient < 0 else " + ")
            text += sign + _show_term(abs(coefficient), monomial, alone=len(self.terms) == 1 and coefficient == 1)
        return text or "0"

    __repr__ = __str__


DimLike = int | DimVar | Dim


def factor_of(terms: Sequence[Term]) -> int:
    """Return the greatest integer known to divide every value of a sum of terms; 0 if there are no terms."""
    common = 0
    for c, m in terms:
        for atom in m:
            c *= atom.factor
        common = math.gcd(common, c)
        if common == 1:
            break
    return common


def as_dim(x: object) -> Dim:
    """Convert an integer or a variable to a Dim; a Dim stays as it is. Raise TypeError for anything else."""
    if isinstance(x, Dim):
        return x
    if isinstance(x, DimVar):
        return x.dim
    try:
        return _constant(index(x))  # pyright: ignore[reportArgumentType]  # accepts integers of NumPy, and raises TypeError for floats
    except TypeError:
        raise TypeError(f"a dimension is an int, a DimVar or a Dim, not {x!r}") from None


def bare(atom: Atom) -> Dim:
    """Return the Dim that consists of this atom alone."""
    return Dim(((1, (atom,)),))


def dim_min(*xs: DimLike) -> Dim:
    from compiler.ir.simplify import extreme  # imported late, see _divide

    return extreme(Min, tuple(as_dim(x) for x in xs))


def dim_max(*xs: DimLike) -> Dim:
    from compiler.ir.simplify import extreme  # imported late, see _divide

    return extreme(Max, tuple(as_dim(x) for x in xs))


def ceil_div(a: DimLike, b: DimLike) -> Dim:
    """Return a / b rounded up, for b > 0, as (a + b - 1) // b: the form that passes recognise."""
    return (as_dim(a) + b - 1) // b


# --- sums and products -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _constant(value: int) -> Dim:
    return Dim(((value, ()),) if value else ())


ZERO = _constant(0)
ONE = _constant(1)
MINUS_ONE = _constant(-1)


def canonical(sums: dict[Monomial, int]) -> Dim:
    """Return the Dim with these coefficients: drop zeros, recombine division nodes, and sort the terms by falling degree, then by the keys
    of their atoms."""
    terms = [(c, m) for m, c in sums.items() if c]
    for _, m in terms:
        for atom in m:
            if isinstance(atom, _Division):
                return _recombined(sums, terms)
    return _sorted(terms)


def _recombined(sums: dict[Monomial, int], terms: list[Term]) -> Dim:
    from compiler.ir.simplify import recombine  # imported late, see _divide

    simpler = recombine(sums)
    return _sorted(terms) if simpler is None else simpler


def _sorted(terms: list[Term]) -> Dim:
    if len(terms) > 1:
        terms.sort(key=_term_order)
    return Dim(tuple(terms))


def _term_order(term: Term) -> Key:
    monomial = term[1]
    return (-len(monomial), *[a.key for a in monomial])


def _plus(a: Dim, b: Dim, sign: int) -> Dim:
    if not b.terms:
        return a
    sums = {m: c for c, m in a.terms}
    for c, m in b.terms:
        sums[m] = sums.get(m, 0) + sign * c
    return canonical(sums)


def _times(a: Dim, b: Dim) -> Dim:
    if b.is_const:
        a, b = b, a
    if a.is_const:
        factor = a.const
        if factor == 1:
            return b
        if factor == -1:  # negation neither changes the order of terms nor lets division nodes recombine
            return Dim(tuple([(-c, m) for c, m in b.terms]))
        return canonical({m: factor * c for c, m in b.terms})
    return canonical(products(a.terms, b.terms))


def products(a: tuple[Term, ...], b: tuple[Term, ...]) -> dict[Monomial, int]:
    """Multiply every term of `a` by every term of `b`, and add up like terms."""
    sums: dict[Monomial, int] = {}
    for c, m in a:
        for d, n in b:
            product = tuple(sorted(m + n, key=by_key))
            sums[product] = sums.get(product, 0) + c * d
    return sums


def _divide(a: Dim, b: Dim) -> tuple[Dim, Dim]:
    # Imported late to break an import cycle: simplifying a division needs proofs, and proofs need the sums above.
    from compiler.ir.simplify import divide

    return divide(a, b)


def split(p: Dim, atom: Atom) -> tuple[Dim, Dim]:
    """Return (c, rest) such that p == c * atom + rest and `atom` is no factor in rest. From a power of the atom, one factor is taken out,
    and the others stay in c."""
    inside: list[Term] = []
    rest: list[Term] = []
    for c, m in p.terms:
        if atom in m:
            at = m.index(atom)
            inside.append((c, m[:at] + m[at + 1 :]))
        else:
            rest.append((c, m))
    # Removing terms keeps a form canonical. Removing a factor from terms may not keep it canonical.
    return _constant(inside[0][0]) if len(inside) == 1 and not inside[0][1] else canonical({m: c for c, m in inside}), Dim(tuple(rest))


def _substitute_atom(atom: Atom, mapping: Mapping[DimVar, DimLike]) -> Dim:
    if isinstance(atom, DimVar):
        return as_dim(mapping.get(atom, atom))
    return _DIM_OPERATORS[type(atom)](*(o.substitute(mapping) for o in atom.operands))


def _evaluate_atom(atom: Atom, env: Mapping[DimVar, int]) -> int:
    if isinstance(atom, DimVar):
        return env[atom]
    return _INT_OPERATORS[type(atom)](*(o.evaluate(env) for o in atom.operands))


_DIM_OPERATORS: dict[type[_Node], Callable[..., Dim]] = {FloorDiv: floordiv, Mod: mod, Min: dim_min, Max: dim_max}
_INT_OPERATORS: dict[type[_Node], Callable[..., int]] = {FloorDiv: floordiv, Mod: mod, Min: min, Max: max}


# --- printing ----------------------------------------------------------------------------------------------------------


def _show_term(coefficient: int, monomial: Monomial, *, alone: bool) -> str:
    """Return a term as text. `alone` means that no operator is next to the term, so a term that is a single division or
    remainder needs no parentheses."""
    factors = [str(coefficient)] if coefficient != 1 or not monomial else []
    bare = alone and len(monomial) == 1
    return "*".join(factors + [_show_atom(a) if bare or not isinstance(a, _Division) else f"({_show_atom(a)})" for a in monomial])


def _show_atom(atom: Atom) -> str:
    match atom:
        case DimVar():
            return atom.name
        case FloorDiv() | Mod():
            return f"{_show_operand(atom.numerator)} {atom.symbol} {_show_operand(atom.divisor)}"
        case Min() | Max():
            return f"{atom.symbol}({', '.join(map(str, atom.operands))})"


def _show_operand(d: Dim) -> str:
    bare = (d.is_const and d.const >= 0) or (d.atom is not None and not isinstance(d.atom, _Division))
    return str(d) if bare else f"({d})"


def _names(variables: tuple[DimVar, ...] | list[DimVar]) -> str:
    return ", ".join(v.name for v in variables)


def product_of(extents: Sequence[Dim]) -> Dim:
    product = Dim.of(1)
    for extent in extents:
        product = product * extent
    return product


def row_major(indices: Iterable[DimLike], extents: Iterable[DimLike]) -> Dim:
    """Return the row-major index of the element at `indices` in an array with these extents: the last axis varies fastest."""
    number = ZERO
    for at, extent in zip(indices, extents, strict=True):
        number = number * extent + at
    return number
