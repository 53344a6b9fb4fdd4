"""Proofs about dimensions: bounds, order, equality, divisibility.

Bounds, order and equality rest on `_lower_bound(p)`: a number that p never falls below, for all values that the declarations of the
variables allow. `prove_ne` also compares remainders, and `prove_divisible` checks whether the canonical remainder is 0.

`_lower_bound` eliminates one atom at a time: first some mins and maxes (`_next_atom`), then the newest atom. With p = c * atom + rest
and c >= 0, a lower bound of the atom in terms of older atoms gives a lower bound of p. For example, with i <= n - 1 and j <= m - 1, the
inequality i*m + j <= n*m - 1 means n*m - 1 - i*m - j >= 0. Eliminating j leaves n*m - 1 - i*m - (m - 1); eliminating i leaves
n*m - (n - 1)*m - m = 0.

Elimination ends because the range of a variable mentions only older variables, and a node consists of older atoms. A budget of steps,
divided among alternatives, keeps elimination short. The proofs are sound but not complete: False means "not proved".
"""

from __future__ import annotations

import math
from functools import lru_cache
from operator import attrgetter

from compiler.ir.dims import Atom, Dim, DimLike, DimVar, FloorDiv, Max, Min, Mod, bare, canonical, factor_of, split

Extended = int | float  # an integer, or plus or minus infinity as a float
INF = math.inf
BUDGET = 64  # elimination steps per lower bound; proofs about index arithmetic take two to ten steps
MAX_TERMS = 32  # elimination stops at a polynomial with more terms, because symbolic divisors multiply the number of terms

Bound = tuple[Dim, Dim]  # (scale, value): a lower bound says scale * atom >= value, an upper bound <=; scale is positive


# --- what can be proved ------------------------------------------------------------------------------------------------


def bounds(d: DimLike) -> tuple[int | None, int | None]:
    """Return a lower and an upper bound of the values of a dimension, both inclusive. None stands for a bound that is not found. The
    interval may be wider than necessary."""
    low, high = _interval(Dim.of(d))
    return (None if isinstance(low, float) else low, None if isinstance(high, float) else high)


def prove_le(a: DimLike, b: DimLike) -> bool:
    """Return whether a <= b is proved. The functions below do the same for <, ==, != and divisibility."""
    return _nonnegative(Dim.of(b) - a)


def prove_lt(a: DimLike, b: DimLike) -> bool:
    return _nonnegative(Dim.of(b) - a - 1)


def prove_eq(a: DimLike, b: DimLike) -> bool:
    difference = Dim.of(a) - b
    return not difference.terms or (_nonnegative(difference) and _nonnegative(-difference))


def prove_ne(a: DimLike, b: DimLike) -> bool:
    difference = Dim.of(a) - b
    offset = difference.constant_term
    step = (difference - offset).factor
    return (offset % step != 0 if step else offset != 0) or _nonnegative(difference - 1) or _nonnegative(-difference - 1)


def prove_divisible(a: DimLike, k: int) -> bool:
    """Return whether it is proved that k, which is not 0, divides a."""
    return not (Dim.of(a) % k).terms


def _nonnegative(p: Dim) -> bool:
    low, high = _term_interval(p)
    return low >= 0 or (high >= 0 and _lower_bound(p, BUDGET) >= 0)


# --- intervals ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 14)
def _interval(p: Dim) -> tuple[Extended, Extended]:
    return _lower_bound(p, BUDGET), -_lower_bound(-p, BUDGET)


@lru_cache(maxsize=1 << 14)
def _term_interval(p: Dim) -> tuple[Extended, Extended]:
    """Bound each term separately, which is fast and ignores what terms have in common."""
    low: Extended = 0
    high: Extended = 0
    for c, m in p.terms:
        ends: tuple[Extended, Extended] = (c, c)
        for atom in m:
            a, b = ends
            c, d = _atom_interval(atom)
            products = (_product(a, c), _product(a, d), _product(b, c), _product(b, d))
            ends = min(products), max(products)
        low, high = _sum(low, ends[0]), _sum(high, ends[1])
    return low, high


def _product(a: Extended, b: Extended) -> Extended:
    if a == 0 or b == 0:  # infinity represents finite numbers of any size, so 0 times infinity is 0
        return 0
    if isinstance(a, float) or isinstance(b, float):
        return INF if (a > 0) == (b > 0) else -INF
    return a * b


def _sum(a: Extended, b: Extended) -> Extended:
    return a if isinstance(a, float) else b if isinstance(b, float) else a + b


@lru_cache(maxsize=1 << 14)
def _atom_interval(atom: Atom) -> tuple[Extended, Extended]:
    match atom:
        case DimVar(lower=lower, upper=upper):
            high = INF if upper is None else upper if isinstance(upper, int) else _interval(upper)[1]
            low, high = lower, high
        case FloorDiv():
            low, high = _quotient_interval(_interval(atom.numerator), _interval(atom.divisor))
        case Mod():
            low, high = _remainder_interval(_interval(atom.numerator), _interval(atom.divisor))
        case Min():
            ends = [_interval(o) for o in atom.operands]
            low, high = min(e[0] for e in ends), min(e[1] for e in ends)
        case Max():
            ends = [_interval(o) for o in atom.operands]
            low, high = max(e[0] for e in ends), max(e[1] for e in ends)
    return _round_up(low, atom.factor), -_round_up(-high, atom.factor)


def _quotient_interval(x: tuple[Extended, Extended], d: tuple[Extended, Extended]) -> tuple[Extended, Extended]:
    """Return an interval of x // d for intervals of x and d. If d may be negative, the interval is unbounded."""
    if d[0] < 0:
        return -INF, INF
    least, greatest = max(d[0], 1), max(d[1], 1)  # no divisor is zero
    return _floor(x[0], least if x[0] < 0 else greatest), _floor(x[1], least if x[1] >= 0 else greatest)


def _floor(x: Extended, d: Extended) -> Extended:
    """Return x // d for d > 0. For an infinite d, return the limit."""
    if isinstance(x, float):
        return x
    if isinstance(d, float):
        return -1 if x < 0 else 0
    return x // d


def _remainder_interval(x: tuple[Extended, Extended], d: tuple[Extended, Extended]) -> tuple[Extended, Extended]:
    """Return an interval of x % d for intervals of x and d. If d may be negative, the interval is unbounded."""
    if d[0] < 0:
        return -INF, INF
    return 0, min(d[1] - 1, x[1]) if x[0] >= 0 else d[1] - 1


def _round_up(x: Extended, step: int) -> Extended:
    """Return the smallest multiple of `step` that is at least x."""
    return x if isinstance(x, float) or step <= 1 else -(-x // step) * step


# --- elimination -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 15)
def _lower_bound(p: Dim, budget: int) -> Extended:
    """Return a number that p never falls below; minus infinity if none is found within `budget` steps of elimination."""
    best = _term_interval(p)[0]
    if budget > 0 and len(p.terms) <= MAX_TERMS and not _independent(p):
        best = max(best, _shared_factor(p, budget), _eliminate(p, _next_atom(p), budget))
    offset = p.constant_term
    step = factor_of(p.terms[:-1] if offset else p.terms)
    return _sum(_round_up(_sum(best, -offset), step), offset)


def _next_atom(p: Dim) -> Atom:
    """Return the atom to eliminate next. A min or max whose operands must all be tried comes first, because the choice of its operand
    often decides other mins and maxes. Otherwise return the newest atom."""
    for atom in p.atoms():
        if isinstance(atom, Min | Max):
            low, high = _term_interval(split(p, atom)[0])
            if (high if isinstance(atom, Min) else -low) > 0:
                return atom
    return max(p.atoms(), key=attrgetter("rank"))


def _independent(p: Dim) -> bool:
    """Whether each term is a constant, or a multiple of one variable that has a constant range. Then `_term_interval` is exact."""
    return all(len(m) == 0 or (len(m) == 1 and isinstance(m[0], DimVar) and not isinstance(m[0].upper, Dim)) for _, m in p.terms)


def _shared_factor(p: Dim, budget: int) -> Extended:
    """Bound p = f*q + constant from below, where f is an atom that is not negative and that all terms but the constant share. The bound
    uses the lower bound of q times the lower bound of f, or times the upper bound of f if the bound of q is negative. Return minus infinity
    if there is no such f."""
    offset = p.constant_term
    product = p - offset
    for atom in product.terms[0][1]:
        least, most = _atom_interval(atom)
        if least >= 0 and len(product.terms) > 1 and all(atom in m for _, m in product.terms):
            factor = _lower_bound(split(product, atom)[0], budget // 4)
            return _sum(_product(factor, least if factor >= 0 else most), offset)
    return -INF


def _eliminate(p: Dim, atom: Atom, budget: int) -> Extended:
    """Bound p from below by replacing the atom by its bounds or, if it is a min or max, by its operands."""
    c, rest = split(p, atom)
    low, high = _term_interval(c)
    if low < 0 < high:
        low, high = _lower_bound(c, budget // 4), -_lower_bound(-c, budget // 4)
    if isinstance(atom, Min | Max):
        # The atom equals one of its operands, so the least bound over all operands is a bound of p. If c <= 0 for a min, or c >= 0 for a
        # max, every operand gives a bound of p, so take the best one.
        cases = [(Dim.of(1), o) for o in atom.operands]
        any_will_do = high <= 0 if isinstance(atom, Min) else low >= 0
        found = _replaced(c, rest, cases, budget - 1)
        return max(found) if any_will_do else min(found)
    if low >= 0:
        return max(_replaced(c, rest, _lows(p, atom), budget - 1), default=-INF)
    if high <= 0:
        return max(_replaced(c, rest, _highs(p, atom), budget - 1), default=-INF)
    if atom in c.atoms():
        return -INF
    # p is linear in the atom, and the slope may have either sign: the minimum is at one of the ends.
    at_low = max(_replaced(c, rest, _lows(p, atom), budget // 2), default=-INF)
    at_high = max(_replaced(c, rest, _highs(p, atom), budget // 2), default=-INF)
    return min(at_low, at_high)


def _replaced(c: Dim, rest: Dim, choices: list[Bound], budget: int) -> list[Extended]:
    """For each choice (scale, value), set atom = value / scale in c * atom + rest, and return a lower bound of the result. If the scale is
    not a constant, the bound is 0, or minus infinity if 0 is not proved to be a bound."""
    found: list[Extended] = []
    share = budget // len(choices) if choices else 0
    for scale, value in choices:
        if not scale.is_const:
            # scale * p >= -(scale - 1) implies p >= 0, since p is an integer.
            least = _lower_bound(scale * rest + c * value + scale - 1, share)
            found.append(0 if least >= 0 else -INF)
            continue
        if scale.const == 1:
            found.append(_lower_bound(rest + c * value, share))
            continue
        common = math.gcd(scale.const, *(k for k, _ in c.terms))
        multiple = scale.const // common
        least = _lower_bound(multiple * rest + canonical({m: k // common for k, m in c.terms}) * value, share)
        found.append(least if isinstance(least, float) else -(-least // multiple))
    return found


def _lows(p: Dim, atom: Atom) -> list[Bound]:
    return _constant_bound(_atom_interval(atom)[0]) + _symbolic_bounds(p, atom)[0]


def _highs(p: Dim, atom: Atom) -> list[Bound]:
    return _constant_bound(_atom_interval(atom)[1]) + _symbolic_bounds(p, atom)[1]


def _constant_bound(end: Extended) -> list[Bound]:
    return [] if isinstance(end, float) else [(Dim.of(1), Dim.of(end))]


def _symbolic_bounds(p: Dim, atom: Atom) -> tuple[list[Bound], list[Bound]]:
    """Return lower and upper bounds of the atom in terms of older atoms. If p contains x // d beside the atom x % d, one bound is the exact
    value x - d * (x // d)."""
    one = Dim.of(1)
    match atom:
        case DimVar(upper=upper):
            return [], [(one, upper)] if isinstance(upper, Dim) else []
        case FloorDiv() if atom.exact:
            return [(atom.divisor, atom.numerator)], [(atom.divisor, atom.numerator)]
        case FloorDiv() if _interval(atom.divisor)[0] >= 0:
            x, d = atom.numerator, atom.divisor
            small = [(one, x)] if not d.is_const and _interval(x)[0] >= 0 else []
            return [(d, x - d + 1)], [(d, x), *small]
        case Mod() if _interval(atom.divisor)[0] >= 0:
            x, d = atom.numerator, atom.divisor
            small = [(one, x)] if _interval(x)[0] >= 0 else []
            whole = [(one, x - d * bare(q)) for q in p.atoms() if isinstance(q, FloorDiv) and q.operands == atom.operands]
            return whole, [(one, d - 1), *small, *whole]
        case _:
            return [], []
