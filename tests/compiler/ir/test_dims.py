"""The algebra of dimensions: tests of each rule, then random expressions, whose results are compared with evaluation at all small
values."""

from __future__ import annotations

import itertools
import math
import operator
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.ir.dims import Dim, DimLike, DimVar, FloorDiv, Min, UnboundDimError, ceil_div, dim_max, dim_min
from compiler.ir.prove import bounds, prove_divisible, prove_eq, prove_le, prove_lt, prove_ne

n, m, k = DimVar("n"), DimVar("m"), DimVar("k")
i, j, l = DimVar("i", upper=n - 1), DimVar("j", upper=m - 1), DimVar("l", upper=k - 1)  # noqa: E741  # the index of the third loop
lane = DimVar("lane", upper=15)
aligned = DimVar("aligned", multiple_of=16)
signed = DimVar("signed", lower=-100)

# --- canonical form ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("built", "expected"),
    [
        (n + m - n, m.dim),
        (n - n, Dim.of(0)),
        ((n + 1) * (n - 1), n * n - 1),
        (n * m - m * n, Dim.of(0)),
        ((i * m + j) // m, i.dim),
        ((i * m + j) % m, j.dim),
        ((i * (m + 1) + j) // (m + 1), i.dim),
        (((i * m + j) * k + l) // (m * k), i.dim),
        (((i * m + j) * k + l) % (m * k), j * k + l),
        (((i * m + j) * k + l) // k % m, j.dim),
        ((4 * n + 8) // 4, n + 2),
        ((4 * n + 9) // 16, (n + 2) // 4),
        ((4 * n + 9) % 16, 4 * ((n + 2) % 4) + 1),
        ((n * 16 + lane) // 16, n.dim),
        ((n * 16 + lane) % 16, lane.dim),
        ((n * 16 + lane) // 64, n // 4),
        ((n * m) // m, n.dim),
        ((n * m) // (k * m), n // k),
        ((signed // 3) // 5, signed // 15),
        ((signed // 3 + 2) // 5, (signed + 6) // 15),
        ((signed % 16) % 4, signed % 4),
        ((signed % 16) // 4, signed // 4 % 4),
        ((signed % m) % m, signed % m),
        (signed // 1, signed.dim),
        (signed % 1, Dim.of(0)),
        (signed // -4, (-signed) // 4),
        (0 // n, Dim.of(0)),
        (n // n, Dim.of(1)),
        ((signed // m) * m + signed % m, signed.dim),
        (8 * (n // 8) + 4 * (n // 4 % 2) + n % 4, n.dim),
        (aligned % 16, Dim.of(0)),
        (aligned // 16 * 16, aligned.dim),
        (aligned // 16 * 4, aligned // 4),
        ((aligned + lane) // 16, aligned // 16),
        ((aligned + lane) % 16, lane.dim),
        (j // m, Dim.of(0)),
        (j % m, j.dim),
        ((j - m) // m, Dim.of(-1)),
        (dim_min(n, dim_min(m, 128), 64), dim_min(64, m, n)),
        (dim_min(i, n), i.dim),
        (dim_max(n, 0), n.dim),
        (dim_max(dim_min(n, 8), n), n.dim),
        (dim_min(lane, 15, 20), lane.dim),
        (ceil_div(n, 16), (n - 1) // 16 + 1),
    ],
    ids=str,
)
def test_canonical_form(built: Dim, expected: Dim) -> None:
    assert built == expected
    assert hash(built) == hash(expected)


@pytest.mark.parametrize(
    ("dim", "text"),
    [
        (Dim.of(0), "0"),
        (1 + n * 4, "4*n + 1"),
        (1 - n, "-n + 1"),
        (n // 16, "n // 16"),
        (n % 16, "n % 16"),
        ((4 * n + 2) // 7, "(4*n + 2) // 7"),
        (4 * (n // 16) - n % 3 + 1, "4*(n // 16) - (n % 3) + 1"),
        (n // 16 % 5 // m, "((n // 16) % 5) // m"),
        (n // (m * k), "n // (m*k)"),
        (dim_min(128, n), "min(n, 128)"),
        (dim_max(n // 2, m) * 2, "2*max(m, n // 2)"),
    ],
    ids=str,
)
def test_text(dim: Dim, text: str) -> None:
    assert str(dim) == text


def test_order_does_not_depend_on_names() -> None:
    b, a = DimVar("b"), DimVar("a")
    assert str(a + b) == "b + a"
    assert (a + b).vars() == (b, a)


def test_variables_are_compared_by_identity() -> None:
    assert DimVar("n") + 1 != DimVar("n") + 1


def test_parts() -> None:
    assert Dim.of(7).const == 7
    assert (n + 0).var is n
    assert (2 * n).var is None
    assert (n * 4 + 1).terms == ((4, (n,)), (1, ()))
    assert dim_min(n // m, k).vars() == (k, n, m)
    with pytest.raises(ValueError, match="n is symbolic"):
        _ = n.dim.const


def test_atoms_show_their_operands() -> None:
    quotient, least = (n // 16).atom, dim_min(n, 128).atom
    assert isinstance(quotient, FloorDiv)
    assert (quotient.numerator, quotient.divisor) == (n.dim, Dim.of(16))
    assert isinstance(least, Min)
    assert least.operands == (n.dim, Dim.of(128))


def test_numpy_integers_are_integers_and_floats_are_not() -> None:
    assert n + int(np.int64(3)) == n + np.int64(3)  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(TypeError, match=r"1\.5"):
        Dim.of(1.5)  # pyright: ignore[reportArgumentType]


def test_a_divisor_that_is_always_zero_is_named() -> None:
    nothing = DimVar("nothing", upper=0)
    for divisor in (0, n - n, nothing):
        with pytest.raises(ZeroDivisionError, match=f"n divided by {Dim.of(divisor)}"):
            _ = n // divisor


def test_a_declaration_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple_of is 0"):
        DimVar("n", multiple_of=0)


def test_an_expression_nested_too_deep_is_refused() -> None:
    dim = signed.dim
    with pytest.raises(ValueError, match="33 deep, expected at most 32"):
        for step in range(40):
            dim = (3 * dim + 1) // (m + step)
    assert dim.vars() == (signed, m)


def test_evaluating_without_a_value_names_the_variable() -> None:
    with pytest.raises(UnboundDimError, match="no value for m"):
        (n * 4 + m // 3).evaluate({n: 1})


def test_substituting() -> None:
    assert ((n * m + k) // m).substitute({k: 0}) == n.dim
    assert dim_min(n, 128).substitute({n: 64}) == Dim.of(64)
    assert (n + m).substitute({n: m, m: n}) == n + m


# --- proofs of order, equality and divisibility ------------------------------------------------------------------------

blocks = ceil_div(n, 16)
block = DimVar("block", upper=blocks - 1)
small = DimVar("small", lower=1, upper=64)
flat = DimVar("flat", upper=n * m - 1)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (j, m - 1),
        (i * m + j, n * m - 1),
        ((i * m + j) * k + l, n * m * k - 1),
        (n, blocks * 16),
        (blocks * 16, n + 15),
        (block * 16 + lane, n + 14),
        (dim_min(n, 128), n),
        (dim_min(n, 128), 128),
        (n, dim_max(m, n)),
        (dim_min(n - block * 16, 16) + block * 16, n),
        (n // 16, n),
        (n // m, n),
        (n % m, m - 1),
        (n % m, n),
        (i // 16, (n - 1) // 16),
        (i // 16 * m, n // 16 * m),
        (flat // m, n - 1),
        ((3 * small + 63) // 64 * 64, (5 * small + 63) // 64 * 64),
        ((3 * small + 63) // 64 * 64, 192),
        (1, dim_min(block * 16 + 16, n) - block * 16),
        (n * small, n * 64),
        (n * m, n * m * small),
        (48 * (n // 16) + n % 16, 48 * (n // 16) + n),
        (48 * (n // 16) + n % 16, n + 32 * (n // 16)),
    ],
    ids=str,
)
def test_order_is_proved(low: DimLike, high: DimLike) -> None:
    assert prove_le(low, high)
    assert prove_lt(low, Dim.of(high) + 1)


@pytest.mark.parametrize(
    ("low", "high"),
    [(n, m), (n, n - 1), (n * m, n), (n, n // 2 * 2), (signed % m, signed), (n, signed * n), (1, n), (blocks * 16, n)],
    ids=str,
)
def test_what_does_not_hold_is_not_proved(low: DimLike, high: DimLike) -> None:
    assert not prove_le(low, high)


def test_equality_and_difference() -> None:
    assert prove_eq(dim_min(n, m) + dim_max(n, m), n + m)
    assert prove_eq(dim_min(n + 1, m + 1), dim_min(n, m) + 1)
    assert prove_eq(n // 8, n // 4 // 2)
    assert prove_ne(2 * n, 2 * m + 1)
    assert prove_ne(n + 1, 0)
    assert prove_ne(aligned, 8)
    assert not prove_ne(n, m)
    assert not prove_eq(n, m)


def test_divisibility() -> None:
    assert prove_divisible(4 * n + 8, 4)
    assert prove_divisible(aligned * n + 32, 16)
    assert prove_divisible(dim_min(aligned, 64), 16)
    assert prove_divisible(n - n % 16, 16)
    assert not prove_divisible(n, 2)


@pytest.mark.parametrize(
    ("dim", "expected"),
    [
        (Dim.of(3), (3, 3)),
        (n, (0, None)),
        (m - j, (1, None)),
        (3 * lane - 1, (-1, 44)),
        (signed % 7, (0, 6)),
        ((-signed) // 7, (None, 14)),
        (DimVar("half", lower=1, upper=50, multiple_of=16), (16, 48)),
        (DimVar("of_small", upper=small - 1), (0, 63)),
        (small - DimVar("of_small", upper=small - 1), (1, 64)),
    ],
    ids=str,
)
def test_bounds(dim: DimLike, expected: tuple[int | None, int | None]) -> None:
    assert bounds(dim) == expected


def test_a_factor_of_the_divisor_is_counted_once() -> None:
    """`wide*k` is a multiple of `wide` and of 16, but not of 16 * wide, so it reaches into the remainder by 16 * wide."""
    wide, low, deep = DimVar("wide", lower=16, multiple_of=16), DimVar("low", upper=255), DimVar("deep", lower=1)
    x, d = 16 * wide * n + wide * k + low, 16 * wide * deep
    env = {wide: 16, n: 0, k: 15, low: 255, deep: 1}
    assert (x // d).evaluate(env) == (16 * 15 + 255) // 256
    assert (x % d).evaluate(env) == (16 * 15 + 255) % 256


def test_remainders_join_only_where_the_outer_divisor_is_positive() -> None:
    turned = DimVar("turned", lower=-4)
    assert (signed % small) + small * (signed // small % m) == signed % (small * m)
    joined = (signed % small) + small * (signed // small % turned)
    assert joined.evaluate({signed: -9, small: 2, turned: -1}) == 1


# --- random expressions, compared with evaluation at all small values --------------------------------------------------

Env = dict[DimVar, int]


@dataclass(frozen=True)
class Tree:
    """A random expression: a function that evaluates the expression as it was drawn, and the dimension into which the algebra simplified
    it."""

    written: Callable[[Env], int]
    dim: Dim


OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod}


@st.composite
def variables(draw: st.DrawFn) -> list[DimVar]:
    """Draw up to four variables. The upper bound of a variable may contain an earlier variable, as in nested loops."""
    made: list[DimVar] = []
    for name in "abcd"[: draw(st.integers(1, 4))]:
        lower = draw(st.sampled_from([0, 0, 0, 1, 1, 2, -3]))
        uppers: list[int | Dim | None] = [None, lower + draw(st.integers(0, 6)), *(v - 1 for v in made), *(v * 2 for v in made)]
        made.append(DimVar(name, lower, draw(st.sampled_from(uppers)), draw(st.sampled_from([1, 1, 1, 2, 3, 4]))))
    return made


@st.composite
def trees(draw: st.DrawFn, names: list[DimVar], depth: int) -> Tree:
    kind = draw(st.sampled_from(["leaf", *OPERATORS, "*", "//", "%", "min", "max"] if depth else ["leaf"]))
    if kind == "leaf":
        leaf = draw(st.sampled_from(names) | st.integers(-3, 9))
        return Tree(lambda env: leaf if isinstance(leaf, int) else env[leaf], Dim.of(leaf))
    a, b = draw(trees(names, depth - 1)), draw(trees(names, depth - 1))
    if kind in OPERATORS:
        apply = OPERATORS[kind]
        try:
            return Tree(lambda env: apply(a.written(env), b.written(env)), apply(a.dim, b.dim))
        except ZeroDivisionError:
            return a
    whole, pick = (dim_min, min) if kind == "min" else (dim_max, max)
    return Tree(lambda env: pick(a.written(env), b.written(env)), whole(a.dim, b.dim))


def assignments(names: list[DimVar], *, at_most: int = 60) -> list[Env]:
    """Return up to `at_most` assignments of values that the variables' declarations allow. The values are small, because errors already
    show at small values."""
    envs: list[Env] = [{}]
    for v in names:
        envs = [{**env, v: value} for env in envs for value in _values(v, env)]
    return random.Random(0).sample(envs, at_most) if len(envs) > at_most else envs


def _values(v: DimVar, env: Env) -> Iterator[int]:
    upper = v.upper if isinstance(v.upper, int) else v.lower + 6 * v.multiple_of if v.upper is None else v.upper.evaluate(env)
    return (x for x in range(v.lower, upper + 1) if x % v.multiple_of == 0)


def defined(envs: list[Env], *whole: Tree) -> Iterator[tuple[Env, list[int]]]:
    """Yield each assignment for which no tree divides by zero, with the values of all trees, evaluated as they were drawn."""
    for env in envs:
        try:
            yield env, [t.written(env) for t in whole]
        except ZeroDivisionError:
            continue


@given(st.data())
def test_the_canonical_form_means_what_was_written(data: st.DataObject) -> None:
    names = data.draw(variables())
    tree = data.draw(trees(names, 3))
    text = str(tree.dim)
    low, high = bounds(tree.dim)
    for env, (value,) in defined(assignments(names), tree):
        assert tree.dim.evaluate(env) == value
        assert eval(text, {"min": min, "max": max}, {v.name: x for v, x in env.items()}) == value
        assert -math.inf if low is None else low <= value
        assert math.inf if high is None else value <= high
        assert value % tree.dim.factor == 0 if tree.dim.factor else value == 0


@given(st.data())
def test_what_is_proved_holds(data: st.DataObject) -> None:
    names = data.draw(variables())
    a, b = data.draw(trees(names, 2)), data.draw(trees(names, 2))
    divisor = data.draw(st.integers(1, 8))
    claims: list[tuple[bool, Callable[[int, int], bool]]] = [
        (prove_le(a.dim, b.dim), operator.le),
        (prove_lt(a.dim, b.dim), operator.lt),
        (prove_eq(a.dim, b.dim), operator.eq),
        (prove_ne(a.dim, b.dim), operator.ne),
        (prove_divisible(a.dim, divisor), lambda x, _: x % divisor == 0),
    ]
    for env, (x, y) in defined(assignments(names), a, b):
        for proved, claim in claims:
            assert not proved or claim(x, y), (a.dim, b.dim, env)


@given(st.data())
def test_substituting_then_evaluating_is_evaluating(data: st.DataObject) -> None:
    names = data.draw(variables())
    tree, new = data.draw(trees(names, 2)), data.draw(trees(names, 2))
    v = data.draw(st.sampled_from(names))
    try:
        substituted = tree.dim.substitute({v: new.dim})
    except ZeroDivisionError:
        return
    for env, (value,) in defined(assignments(names), new):
        moved = {**env, v: value}
        if all(env[w] in _values(w, env) and moved[w] in _values(w, moved) for w in names):
            for _, (expected,) in defined([moved], tree):
                assert substituted.evaluate(env) == expected


@given(st.data())
def test_index_arithmetic_of_reshape_cancels(data: st.DataObject) -> None:
    """A flat index computed from indices stays inside the array, and splitting the flat index gives the indices back."""
    shape = [data.draw(st.sampled_from([DimVar("s", lower=1), 2, 3, 16])) for _ in range(data.draw(st.integers(1, 4)))]
    loops = [DimVar(f"i{axis}", upper=extent - 1) for axis, extent in enumerate(shape)]
    position = Dim.of(0)
    for extent, loop in zip(shape, loops, strict=True):
        position = position * extent + loop
    total = math.prod(shape, start=Dim.of(1))
    assert prove_lt(position, total)
    rest, back = position, list[Dim]()
    for extent in reversed(shape):
        back.append(rest % extent)
        rest = rest // extent
    assert back[::-1] == [loop.dim for loop in loops]


@pytest.mark.parametrize("first", ["dims", "prove", "simplify"])
def test_any_of_the_three_files_may_be_imported_first(first: str) -> None:
    """Any of the three modules of the algebra may be imported first, although the modules import each other. Late imports in dims.py break
    the cycle."""
    subprocess.run([sys.executable, "-c", f"import compiler.ir.{first}; from compiler.ir.dims import DimVar; DimVar('n') // 2"], check=True)


def test_equal_sums_are_equal_in_any_order() -> None:
    parts: list[DimLike] = [n, 3 * m, n * m, signed // 16 * 16, signed % 16, -1]
    sums = {sum(order, Dim.of(0)) for order in itertools.permutations(parts)}
    assert len(sums) == 1
