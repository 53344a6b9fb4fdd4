"""Scans whose states are stored in pages: the gated delta rule and the recurrence of Mamba-2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from compiler.ir.dims import DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.types import ScalarType, tensor
from compiler.ops.scan import STATE_SCAN
from runtime.executable import Executable
from runtime.session import Session
from tests.compiler.ops.conftest import operand, program

F32, I32 = DType.F32, DType.I32
T, S = DimVar("t"), DimVar("s")
KEYS, HEADS, ROWS, SIZE = 2, 4, 6, 24
SHAPES = "l p z, t 2 6, t 2 6, t 4 24, t 4, s, u, m, m, t 4"


def gates(rng: np.random.Generator, tokens: int) -> dict[str, np.ndarray]:
    k = rng.standard_normal((tokens, KEYS, ROWS)).astype(np.float32)
    return {
        "q": rng.standard_normal((tokens, KEYS, ROWS)).astype(np.float32),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.standard_normal((tokens, HEADS, SIZE)).astype(np.float32),
        "decay": rng.uniform(0.2, 1.0, (tokens, HEADS)).astype(np.float32),
        "beta": rng.uniform(0.0, 1.0, (tokens, HEADS)).astype(np.float32),
    }


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def scan(run: Any, states: np.ndarray, given: dict[str, np.ndarray], lists: tuple[np.ndarray, ...], *, delta: bool, layer: int = 1) -> Any:
    args = [states, *(given[name] for name in ("q", "k", "v", "decay")), *lists, layer, *([given["beta"]] if delta else [])]
    return run(STATE_SCAN, *args, shapes=SHAPES.replace("z", str(states.shape[-1])), compiled=True)


def expected_of(state: np.ndarray, given: dict[str, np.ndarray], t: int, *, delta: bool) -> np.ndarray:
    """Return the states [heads, rows, size] after token t, given the states before it."""
    found = np.empty_like(state)
    for h in range(HEADS):
        k, before = given["k"][t, h // 2].astype(np.float64), state[h] * given["decay"][t, h]
        u = given["v"][t, h].astype(np.float64)
        if delta:
            u = given["beta"][t, h] * (u - k @ before)
        found[h] = before + np.outer(k, u)
    return found


@pytest.mark.parametrize("delta", [True, False])
def test_each_sequence_goes_on_from_its_state_and_leaves_those_behind_saved_tokens(run, rng, delta) -> None:
    """Each sequence continues from the state in its source page. The states after the tokens listed in `saved` are written to pages. Page 0
    stands for zeros whatever it contains; the second sequence starts from it. The third sequence has one token."""
    given, states = gates(rng, 8), rng.standard_normal((2, 5, HEADS * ROWS * SIZE)).astype(np.float32)
    states[:, 0] = np.nan
    starts, saved, pages = ints(0, 4, 7, 8), ints(1, 3, 6, 7), ints(4, 2, 1, 3)
    out, left = scan(run, states, given, (ints(4, 0, 3), starts, saved, pages), delta=delta)
    begin = {4: states[1, 4], 0: 0 * states[1, 1], 3: states[1, 3]}
    kept = {1: 4, 3: 2, 6: 1, 7: 3}
    for s, source in enumerate((4, 0, 3)):
        state = begin[source].reshape(HEADS, SIZE // 8, ROWS, 8).swapaxes(1, 2).reshape(HEADS, ROWS, SIZE).astype(np.float64)
        for t in range(starts[s], starts[s + 1]):
            state = expected_of(state, given, t, delta=delta)
            for h in range(HEADS):
                np.testing.assert_allclose(out[t, h], given["q"][t, h // 2] @ state[h], rtol=1e-4, atol=1e-4)
            if t in kept:
                blocks = state.reshape(HEADS, ROWS, SIZE // 8, 8).swapaxes(1, 2).reshape(-1)
                np.testing.assert_allclose(left[1, kept[t]], blocks, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(left[0], states[0])


@pytest.mark.parametrize("delta", [True, False])
def test_bits_do_not_depend_on_where_the_step_begins(bits_of, rng, delta) -> None:
    given, states = gates(rng, 9), np.zeros((2, 3, HEADS * ROWS * SIZE), np.float32)
    whole, last = bits_of(states, given, (ints(0), ints(0, 9), ints(8), ints(1)), delta)
    for cut in range(1, 9):
        first = {name: x[:cut] for name, x in given.items()}
        head, left = bits_of(states, first, (ints(0), ints(0, cut), ints(cut - 1), ints(1)), delta)
        rest = {name: x[cut:] for name, x in given.items()}
        tail, left = bits_of(left, rest, (ints(1), ints(0, 9 - cut), ints(8 - cut), ints(1)), delta)
        np.testing.assert_array_equal(np.concatenate([head, tail]), whole)
        np.testing.assert_array_equal(left, last)


@pytest.mark.parametrize("delta", [True, False])
def test_bits_do_not_depend_on_other_sequences(bits_of, rng, delta) -> None:
    given, states = gates(rng, 11), rng.standard_normal((2, 5, HEADS * ROWS * SIZE)).astype(np.float32)
    starts = ints(0, 3, 4, 11)
    out, _ = bits_of(states, given, (ints(1, 2, 0), starts, ints(2, 3, 10), ints(3, 2, 4)), delta)
    for s, (low, high) in enumerate(pairwise(starts)):
        alone = {name: x[low:high] for name, x in given.items()}
        found, _ = bits_of(states, alone, (ints((1, 2, 0)[s]), ints(0, high - low), ints(high - low - 1), ints(4)), delta)
        np.testing.assert_array_equal(found, out[low:high])


@pytest.fixture
def bits_of(compiled_once: Callable[..., Executable]) -> Iterator[Callable[..., Any]]:
    """Return a function that runs a scan in machine code. All steps use one compiled program."""
    sessions: dict[bool, Session] = {}

    def call(states: np.ndarray, given: dict[str, np.ndarray], lists: tuple[np.ndarray, ...], delta: bool) -> Any:
        arrays = [states, *(given[name] for name in ("q", "k", "v", "decay")), *lists, *([given["beta"]] if delta else [])]
        if delta not in sessions:
            dims: dict[str, DimVar] = {}
            shapes = SHAPES.replace("z", str(states.shape[-1])).split(",")
            atoms = [operand(a, shape, dims, f"x{i}") for i, (a, shape) in enumerate(zip(arrays, shapes, strict=False))]
            atoms.insert(9, operand(1, None, dims, "layer"))
            sessions[delta] = Session(compiled_once(program(STATE_SCAN, atoms, {})))
        return sessions[delta].call("main", *(a.copy() for a in arrays))

    yield call
    for session in sessions.values():
        session.close()


STATES, X, V, GATES = tensor((2, 4, 48), F32), tensor((T, 2, 3), F32), tensor((T, 4, 4), F32), tensor((T, 4), F32)
IDS, STARTS, LAYER = tensor((S,), I32), tensor((S + 1,), I32), ScalarType(DType.I64)


@pytest.mark.parametrize(
    ("error", "place", "given"),
    [
        ("states holds i32, expected floats", 0, tensor((2, 4, 48), I32)),
        ("size of states is 40, expected 48", 0, tensor((2, 4, 40), F32)),
        ("dimension 2 of q is 4, expected 3", 1, tensor((T, 2, 4), F32)),
        ("dimension 1 of decay is 2, expected 4", 4, tensor((T, 2), F32)),
        ("sources holds f32, expected integers", 5, tensor((S,), F32)),
        ("length of starts is s, expected s \\+ 1", 6, IDS),
        ("layer is .*, expected an integer", 9, X),
        ("dimension 1 of beta is 2, expected 4", 10, tensor((T, 2), F32)),
    ],
)
def test_what_does_not_fit_is_refused(deduced, error, place, given) -> None:
    args = [STATES, X, X, V, GATES, IDS, STARTS, IDS, IDS, LAYER, GATES]
    args[place] = given
    with pytest.raises(AnnotationError, match=error):
        deduced(STATE_SCAN, *args)


def test_the_heads_of_values_are_a_multiple_of_the_heads_of_keys(deduced) -> None:
    v, gates = tensor((T, 3, 4), F32), tensor((T, 3), F32)
    with pytest.raises(AnnotationError, match="the number of heads of v is 3, expected a multiple of 2, the number of heads of k"):
        deduced(STATE_SCAN, tensor((2, 4, 36), F32), X, X, v, gates, IDS, STARTS, IDS, IDS, LAYER, gates)
