"""Simplification of `//`, `%`, `min` and `max` of dimensions.

Quotient and remainder are found together, so `q * d + r` equals the numerator whichever rule applied. Each rule is an identity of floor
division, whose condition is proved from the declarations of the variables.
"""

from __future__ import annotations

import math
from functools import lru_cache

from compiler.ir.dims import (
    ONE,
    ZERO,
    Atom,
    Dim,
    FloorDiv,
    Max,
    Min,
    Mod,
    Monomial,
    Term,
    bare,
    canonical,
    products,
)
from compiler.ir.prove import bounds, prove_le

Division = tuple[Dim, Dim]  # quotient, remainder


def divide(x: Dim, d: Dim) -> Division:
    """Return x // d and x % d. Raise ZeroDivisionError if d is proved to be always zero."""
    if bounds(d) == (0, 0):
        raise ZeroDivisionError(f"{x} divided by {d}, which is always zero; expected a divisor that can be nonzero")
    return _divide(x, d)


@lru_cache(maxsize=1 << 14)
def _divide(x: Dim, d: Dim) -> Division:
    if d.is_const:
        if d.const < 0:
            quotient, remainder = _divide(-x, -d)
            return quotient, -remainder
        if d.const == 1:
            return x, ZERO
    if x.is_const and d.is_const:
        quotient, remainder = divmod(x.const, d.const)
        return Dim.of(quotient), Dim.of(remainder)
    if not x.terms:
        return ZERO, ZERO
    for rule in (_whole_multiples, _common_factor, _in_range, _low_part, _nested):
        if (result := rule(x, d)) is not None:
            return result
    return bare(FloorDiv(x, d)), _remainder(x, d)


def _positive(d: Dim) -> bool:
    """Whether d is proved positive. A divisor is never zero, so d >= 0 suffices."""
    return prove_le(0, d)


# --- the rules of division ---------------------------------------------------------------------------------------------


def _whole_multiples(x: Dim, d: Dim) -> Division | None:
    """(q*d + r) // d -> q + r // d"""
    whole, rest = _whole_constant(x, d.const) if d.is_const else _whole_symbolic(x, d)
    if rest == x:
        return None
    quotient, remainder = _divide(rest, d)
    return whole + quotient, remainder


def _whole_constant(x: Dim, d: int) -> Division:
    """Return (whole, rest) such that x = whole * d + rest, where d is not known to divide any term of `rest`."""
    whole, rest = ZERO, ZERO
    for c, m in x.terms:
        if c * math.prod(a.factor for a in m) % d == 0:
            common = math.gcd(c, d)
            whole = whole + c // common * _exact_quotient(m, d // common)
        else:
            # Round the coefficient of a variable toward zero: the remainder then keeps -n, which is shorter than n * (d - 1). Round a
            # constant down.
            times = -(-c // d) if c < 0 and m else c // d
            whole = whole + canonical({m: times})
            rest = rest + canonical({m: c - times * d})
    return whole, rest


def _exact_quotient(monomial: Monomial, d: int) -> Dim:
    """Return monomial / d, where d divides the product of the atoms' known factors."""
    quotient = ONE
    for atom in monomial:
        share = math.gcd(atom.factor, d)
        d //= share
        quotient = quotient * _exact_atom(atom, share)
    return quotient


def _exact_atom(atom: Atom, d: int) -> Dim:
    """Return atom / d, where d divides the atom's known factor."""
    if d == 1:
        return bare(atom)
    if isinstance(atom, FloorDiv):
        return _divide(atom.numerator, atom.divisor * d)[0]
    if isinstance(atom, Mod) and atom.divisor.factor % d == 0:
        return _divide(_divide(atom.numerator, Dim.of(d))[0], _divide(atom.divisor, Dim.of(d))[0])[1]
    return bare(FloorDiv(bare(atom), Dim.of(d)))


def _whole_symbolic(x: Dim, d: Dim) -> Division:
    """Divide polynomials. Return (0, x) unless the remainder has fewer terms than x."""
    (lead_c, lead), whole, rest = d.terms[0], ZERO, x
    position = 0
    while position < len(rest.terms):
        c, m = rest.terms[position]
        factor = _without(m, lead)
        if factor is None or c % lead_c:
            position += 1
            continue
        step = canonical({factor: c // lead_c})
        whole, rest, position = whole + step, rest - step * d, 0
    return (whole, rest) if len(rest.terms) < len(x.terms) else (ZERO, x)


def _common_factor(x: Dim, d: Dim) -> Division | None:
    """(f*x) // (f*d) -> x // d"""
    common = _gcd([*x.terms, *d.terms])
    if common == (1, ()):
        return None
    quotient, remainder = _divide(_over(x, common), _over(d, common))
    return quotient, remainder * Dim((common,))


def _in_range(x: Dim, d: Dim) -> Division | None:
    """x // d -> q if q*d <= x < (q + 1)*d. If d is not a constant, only the quotients 0 and -1 are found."""
    if d.is_const:
        low, high = bounds(x)
        if low is None or high is None or low // d.const != high // d.const:
            return None
        return Dim.of(low // d.const), x - low // d.const * d
    if prove_le(0, x) and prove_le(x, d - 1):
        return ZERO, x
    if prove_le(-d, x) and prove_le(x, -1):
        return Dim.of(-1), x + d
    return None


def _low_part(x: Dim, d: Dim) -> Division | None:
    """(f*a + b) // (f*e) -> a // e if 0 <= b < f and e > 0, since b cannot reach the next multiple of f"""
    content = _gcd(d.terms)
    tried: set[Term] = {(1, ())}
    for c, m in x.terms:
        known = c * math.prod(a.factor for a in m) if d.is_const else c
        f = _gcd([(known, m), content])
        if f in tried:
            continue
        tried.add(f)
        low = _not_multiple(x, f)
        if low.terms and low != x and prove_le(0, low) and prove_le(low, Dim((f,)) - 1) and _positive(d):
            quotient, remainder = _divide(x - low, d)
            return quotient, remainder + low
    return None


def _not_multiple(x: Dim, f: Term) -> Dim:
    """Return the terms of x that f is not known to divide. If f is a number, the constant term becomes its remainder modulo f."""
    f_c, f_m = f
    low: dict[Monomial, int] = {}
    for c, m in x.terms:
        rest = _without(m, f_m)
        if not m and not f_m:
            low[m] = c % f_c
        # f divides the term if f_c divides c times the known factors of the atoms that are not in f
        elif rest is None or c * math.prod(a.factor for a in rest) % f_c:
            low[m] = c
    return canonical(low)


def _nested(x: Dim, d: Dim) -> Division | None:
    """(y // a + c) // d -> (y + a*c) // (a*d) if d > 0, and (y % a) // d -> (y // d) % (a // d) if a and d are constants and d divides a"""
    inner = (x - x.constant_term).atom
    if isinstance(inner, FloorDiv) and _positive(d):
        numerator = inner.numerator + inner.divisor * x.constant_term
        return _divide(numerator, inner.divisor * d)[0], _remainder(x, d)
    if isinstance(inner, Mod) and x.constant_term == 0 and d.is_const and inner.divisor.is_const and inner.divisor.const % d.const == 0:
        quotient, remainder = _divide(inner.numerator, d)
        return _divide(quotient, Dim.of(inner.divisor.const // d.const))[1], remainder
    return None


def _remainder(x: Dim, d: Dim) -> Dim:
    """Return x % d. If a and d are constants and d divides c*a, a term c * (y % a) of x becomes c * y."""
    if d.is_const:
        for c, m in x.terms:
            for i, atom in enumerate(m):
                if isinstance(atom, Mod) and atom.divisor.is_const and c * atom.divisor.const % d.const == 0:
                    rest = canonical({m[:i] + m[i + 1 :]: c})
                    return _divide(x + rest * (atom.numerator - bare(atom)), d)[1]
    return bare(Mod(x, d))


# --- monomials ---------------------------------------------------------------------------------------------------------


def _gcd(terms: list[Term] | tuple[Term, ...]) -> Term:
    """Return the greatest term that divides all these terms: the greatest common divisor of the coefficients, and the shared atoms."""
    common = list(terms[0][1])
    for _, m in terms[1:]:
        left = list(m)
        kept: list[Atom] = []
        for atom in common:
            if atom in left:
                left.remove(atom)
                kept.append(atom)
        common = kept
    return math.gcd(*(c for c, _ in terms)), tuple(common)


def _without(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    """Return monomial / divisor, or None if the divisor does not divide it."""
    left = list(monomial)
    for atom in divisor:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def _over(x: Dim, divisor: Term) -> Dim:
    """Return x / divisor. The divisor must divide each term."""
    quotient: dict[Monomial, int] = {}
    for c, m in x.terms:
        rest = _without(m, divisor[1])
        assert rest is not None
        quotient[rest] = c // divisor[0]
    return canonical(quotient)


# --- sums that contain divisions ---------------------------------------------------------------------------------------


def recombine(sums: dict[Monomial, int]) -> Dim | None:
    """Return the sum of these terms after applying one of the identities of `_recombine_term`, or None if none applies."""
    for m, c in sums.items():
        if not c:
            continue
        for i, atom in enumerate(m):
            if isinstance(atom, FloorDiv | Mod):
                around = Dim(((c, m[:i] + m[i + 1 :]),))
                if (simpler := _recombine_term(sums, m, atom, around)) is not None:
                    return simpler
    return None


def _recombine_term(sums: dict[Monomial, int], m: Monomial, atom: FloorDiv | Mod, around: Dim) -> Dim | None:
    """Return the sum after applying an identity to the term with monomial `m`, which is `around` times the atom. Return None if no identity
    applies."""
    x, d = atom.numerator, atom.divisor
    if isinstance(atom, FloorDiv):  # d * (x // d) -> x where d divides x
        common = math.gcd(around.terms[0][0], d.const) if atom.exact else 1
        if common == 1:
            return None
        (c, rest) = around.terms[0]
        return canonical({**sums, m: 0}) + canonical({rest: c // common}) * _exact_quotient((_sole(x),), d.const // common)
    quotient = _divide(x, d)[0]
    whole = _product(around, d, quotient)
    if _contains(sums, whole, m):  # d * (x // d) + x % d -> x
        return canonical({**sums, m: 0, **dict.fromkeys(whole, 0)}) + around * x
    for outer in [a for n in sums for a in n if isinstance(a, Mod) and a.numerator == quotient]:
        high = _product(around, d, bare(outer))
        if _contains(sums, high, m) and _positive(outer.divisor):  # d * ((x // d) % e) + x % d -> x % (d * e) if e > 0
            return canonical({**sums, m: 0, **dict.fromkeys(high, 0)}) + around * _divide(x, d * outer.divisor)[1]
    return None


def _sole(x: Dim) -> Atom:
    """Return the only atom of x, a numerator that must be a single atom (see `_exact_quotient`)."""
    atom = x.atom
    assert atom is not None
    return atom


def _product(*factors: Dim) -> dict[Monomial, int]:
    """Return the terms of the product, multiplied out but not recombined: the caller looks for them in a sum."""
    sums: dict[Monomial, int] = {(): 1}
    for factor in factors:
        sums = products(tuple((c, m) for m, c in sums.items()), factor.terms)
    return sums


def _contains(sums: dict[Monomial, int], part: dict[Monomial, int], apart_from: Monomial) -> bool:
    """Return whether the sum has all terms of `part`, with the same coefficients, and none of them is the term with the monomial
    `apart_from`."""
    return bool(part) and apart_from not in part and all(sums.get(m) == c for m, c in part.items())


# --- min and max -------------------------------------------------------------------------------------------------------


def extreme(kind: type[Min] | type[Max], operands: tuple[Dim, ...]) -> Dim:
    """Return the min or max in canonical form: flat, sorted, without operands that another operand is proved to dominate."""
    if not operands:
        raise ValueError(f"{kind.symbol} of no dimensions; expected at least one")
    flat: dict[Dim, None] = {}
    for x in operands:
        flat.update(dict.fromkeys(x.atom.operands if isinstance(x.atom, kind) else (x,)))
    kept = sorted(flat, key=lambda x: x.key)
    for x in list(kept):
        if any(y is not x and (prove_le(y, x) if kind is Min else prove_le(x, y)) for y in kept):
            kept.remove(x)
    return kept[0] if len(kept) == 1 else bare(kind(*kept))
