"""Print the coefficients of compiler/codegen/vector_math.py. Run this file to check these coefficients, or to fit other polynomials.

Each function is approximated on a small range by a formula with a polynomial q(t); a comment at each fit states the formula. Remez's
exchange algorithm finds q in extended precision. It minimises the largest error of the final result, `weight * (q(t) - wanted(t))`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Real = np.longdouble


def remez(wanted: Array, weight: Array, t: Array, degree: int) -> tuple[Array, float]:
    """Return the coefficients, lowest first, of the polynomial whose largest weighted error on the grid `t` is nearly as small as possible.
    Also return this error. The search ends after 30 exchanges, when the places of the largest errors no longer change, or when the error
    changes its sign less than `degree` + 1 times."""
    powers = np.stack([t**i for i in range(degree + 1)], axis=1)
    nodes = np.cos(np.pi * np.arange(degree + 2) / (degree + 1))
    at = np.searchsorted(t, t[0] + (nodes[::-1] + 1) / 2 * (t[-1] - t[0]))
    at = np.clip(at, 0, len(t) - 1)
    coefficients = np.zeros(degree + 1, Real)
    for _ in range(30):
        signs = np.array([(-1) ** i for i in range(degree + 2)], Real)
        matrix = np.concatenate([powers[at], (signs / weight[at])[:, None]], axis=1)
        coefficients = _solve(matrix, wanted[at])[:-1]
        error = weight * (powers @ coefficients - wanted)
        peaks = _alternating_peaks(error, degree + 2)
        if peaks is None or np.array_equal(peaks, at):
            break
        at = peaks
    error = weight * (powers @ coefficients - wanted)
    return coefficients, float(np.abs(error).max())


def _alternating_peaks(error: Array, count: int) -> Array | None:
    """Return `count` places of largest errors (peaks). Each range of places in which the error keeps its sign has one peak. While there are
    more than `count`, drop the first or the last peak, whichever has the smaller error. Return None if there are fewer."""
    borders = np.flatnonzero(np.diff(np.sign(error))) + 1
    pieces = np.split(np.arange(len(error)), borders)
    peaks = [piece[np.argmax(np.abs(error[piece]))] for piece in pieces]
    while len(peaks) > count:  # drop the smaller one of the first and the last peak
        peaks.pop(0 if abs(error[peaks[0]]) < abs(error[peaks[-1]]) else -1)
    return np.array(peaks) if len(peaks) == count else None


def _solve(matrix: Array, right: Array) -> Array:
    """Solve a linear system by Gaussian elimination, because LAPACK has no extended precision."""
    a, b = matrix.astype(Real).copy(), right.astype(Real).copy()
    for i in range(len(b)):
        pivot = i + int(np.argmax(np.abs(a[i:, i])))
        a[[i, pivot]], b[[i, pivot]] = a[[pivot, i]], b[[pivot, i]]
        for j in range(i + 1, len(b)):
            factor = a[j, i] / a[i, i]
            a[j, i:] -= factor * a[i, i:]
            b[j] -= factor * b[i]
    x = np.zeros(len(b), Real)
    for i in reversed(range(len(b))):
        x[i] = (b[i] - a[i, i + 1 :] @ x[i + 1 :]) / a[i, i]
    return x


def _tail(x: Array, start: int, ratio: Callable[[int], float], power: int) -> Array:
    """Return the sum of the first 60 terms c_n x^(power n), n >= 0, where c_0 = 1 / start! and c_(n+1) = ratio(n) c_n."""
    term = np.full_like(x, 1 / Real(math.factorial(start)))
    total = np.zeros_like(x)
    for n in range(60):
        total += term
        term = term * Real(ratio(n)) * x**power
    return total


def _erf(x: Array) -> Array:
    """Evaluate erf by its Taylor series."""
    term, total = x.copy(), np.zeros_like(x)
    for n in range(120):
        total += term / (2 * n + 1)
        term = -term * x * x / (n + 1)
    return 2 / np.sqrt(Real(np.pi)) * total


def _erfc(x: Array) -> Array:
    """Evaluate erfc by its continued fraction, for x >= 1."""
    tail = np.zeros_like(x)
    for n in range(300, 0, -1):
        tail = (Real(n) / 2) / (x + tail)
    return np.exp(-x * x) / np.sqrt(np.arccos(Real(-1))) / (x + tail)


def fits() -> Iterator[tuple[str, Array, float]]:
    """Yield the name, the coefficients and the largest error of each polynomial."""
    half_ln2 = Real(math.log(2) / 2 * 1.001)
    t = np.linspace(-half_ln2, half_ln2, 4000, dtype=Real)  # an even number of points leaves out t = 0, where the weight is 0

    # exp(t) = 1 + t + t^2 q(t)
    yield "EXP", *remez(_tail(t, 2, lambda n: 1 / (n + 3), 1), t**2 / np.exp(t), t, 4)

    f = np.linspace(Real(math.sqrt(0.5) - 1), Real(math.sqrt(2) - 1), 6000, dtype=Real)
    f = f[np.abs(f) > 1e-3]  # leave out points near 0, where log1p(f) - f cancels; there, the factor f^3 makes errors of q negligible

    # log(1 + f) = f - f^2 / 2 + f^3 q(f)
    yield "LOG", *remez((np.log1p(f) - f + f * f / 2) / f**3, np.abs(f**3 / np.log1p(f)), f, 8)

    x = np.linspace(Real(0.02), Real(0.63), 4001, dtype=Real)
    # tanh(x) = x + x^3 q(x^2)
    yield "TANH", *remez((np.tanh(x) - x) / x**3, x**3 / np.tanh(x), x * x, 4)

    x = np.linspace(Real(0.001), Real(1.005), 4001, dtype=Real)
    # erf(x) = x + x q(x^2)
    yield "ERF", *remez(_erf(x) / x - 1, x / _erf(x), x * x, 6)

    x = np.linspace(Real(0.995), Real(4.0), 4001, dtype=Real)
    # erf(x) = 1 - exp(q(x))
    yield "ERFC", *remez(np.log(_erfc(x)), _erfc(x), x, 6)

    x = np.linspace(Real(0.01), Real(math.pi / 4 * 1.001), 4001, dtype=Real)
    # sin(x) = x + x^3 q(x^2); cos(x) = 1 - x^2 / 2 + x^4 q(x^2)
    yield "SIN", *remez(-_tail(x, 3, lambda n: -1 / ((2 * n + 4) * (2 * n + 5)), 2), np.sinc(x / np.pi) ** -1 * x**2, x * x, 2)
    yield "COS", *remez(_tail(x, 4, lambda n: -1 / ((2 * n + 5) * (2 * n + 6)), 2), x**4 / np.cos(x), x * x, 2)

    s = np.linspace(Real(0.001), Real(0.1716), 4001, dtype=Real)
    # log2((1 + s) / (1 - s)) = s q(s^2)
    yield "LOG2", *remez(2 * np.arctanh(s) / s / np.log(Real(2)), s / (2 * np.arctanh(s)), s * s, 5)

    t = np.linspace(Real(-0.5), Real(0.5), 4001, dtype=Real)
    # exp2(t) = q(t)
    yield "EXP2", *remez(np.exp2(t), np.exp2(-t), t, 7)


def main() -> None:
    for name, coefficients, error in fits():
        print(f"{name}: Final = (  # largest error of the fitted function: {error:.1e}")
        for c in coefficients:
            print(f"    {float(c)!r},")
        print(")")


if __name__ == "__main__":
    main()
