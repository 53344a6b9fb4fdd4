"""States that are stored in pages, and the causal convolution that starts from a state."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from compiler.ir.dims import DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.types import ScalarType, tensor
from compiler.ops.states import CAUSAL_CONV, INPUT_TAILS, STATE_READ, STATE_WRITE

F32, I32, I64 = DType.F32, DType.I32, DType.I64
T, S = DimVar("t"), DimVar("s")
SIZE, TAPS = 5, 4
LENGTHS = (7, 2, 1)
SEQUENCES = np.repeat(np.arange(3), LENGTHS).astype(np.int32)
STARTS = np.cumsum([0, *LENGTHS]).astype(np.int32)


def test_a_state_is_read_of_its_page_and_is_zero_at_the_beginning(run, rng) -> None:
    """A state is read from the sequence's page. A sequence without a page uses page 0, which stands for zeros whatever it contains."""
    states = rng.standard_normal((2, 4, SIZE)).astype(np.float32)
    states[:, 0] = np.nan
    found = run(STATE_READ, states, np.array([3, 0, 3], np.int32), 1, shapes="l p 5, s", compiled=True)
    np.testing.assert_array_equal(found, [states[1, 3], np.zeros(SIZE), states[1, 3]])


def test_writing_leaves_other_states(run, rng) -> None:
    states, values = rng.standard_normal((2, 4, SIZE)).astype(np.float32), rng.standard_normal((2, SIZE)).astype(np.float32)
    found = run(STATE_WRITE, states, values, np.array([3, 1], np.int32), 0, shapes="l p 5, m 5, m", compiled=True)
    expected = states.copy()
    expected[0, [3, 1]] = values
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shapes", [None, "t 5, 4 5, s 3 5, t, u", "t 5, 4 5, s r 5, w, u"])
def test_a_convolution_goes_on_behind_the_inputs_before(run, rng, shapes) -> None:
    x, weight = rng.standard_normal((10, SIZE)).astype(np.float32), rng.standard_normal((TAPS, SIZE)).astype(np.float32)
    before = rng.standard_normal((3, TAPS - 1, SIZE)).astype(np.float32)
    found = run(CAUSAL_CONV, x, weight, before, SEQUENCES, STARTS, shapes=shapes, compiled=shapes is not None)
    for s, (start, stop) in enumerate(pairwise(STARTS)):
        inputs = np.concatenate([before[s], x[start:stop]])
        for t in range(start, stop):
            expected = (inputs[t - start : t - start + TAPS] * weight).sum(0)
            np.testing.assert_allclose(found[t], expected, rtol=1e-5, atol=1e-6)


def test_the_bits_of_a_convolution_do_not_depend_on_where_the_step_begins(run, rng) -> None:
    x, weight = rng.standard_normal((9, SIZE)).astype(np.float32), rng.standard_normal((TAPS, SIZE)).astype(np.float32)
    zeros, one, shapes = np.zeros((1, TAPS - 1, SIZE), np.float32), np.zeros(9, np.int32), "t 5, 4 5, s 3 5, t, u"
    whole = run(CAUSAL_CONV, x, weight, zeros, one, np.array([0, 9], np.int32), shapes=shapes, compiled=True)
    for cut in range(1, 9):
        starts, last = np.array([0, cut], np.int32), np.array([cut - 1], np.int32)
        tail = run(INPUT_TAILS, x[:cut], zeros, one[:cut], starts, last, shapes="t 5, s 3 5, t, u, m", compiled=True)
        rest = run(CAUSAL_CONV, x[cut:], weight, tail, one[cut:], np.array([0, 9 - cut], np.int32), shapes=shapes, compiled=True)
        np.testing.assert_array_equal(rest, whole[cut:])


def test_the_tail_of_a_short_piece_has_inputs_from_before_it(run, rng) -> None:
    x = rng.standard_normal((10, SIZE)).astype(np.float32)
    before = rng.standard_normal((3, TAPS - 1, SIZE)).astype(np.float32)
    found = run(INPUT_TAILS, x, before, SEQUENCES, STARTS, np.array([3, 6, 8, 9], np.int32), shapes="t 5, s 3 5, t, u, m", compiled=True)
    np.testing.assert_array_equal(found, [x[1:4], x[4:7], [before[1, 2], x[7], x[8]], [before[2, 1], before[2, 2], x[9]]])


STATES, X, IDS, LAYER = tensor((2, 4, 6), F32), tensor((T, 3), F32), tensor((T,), I32), ScalarType(I64)
BEFORE = tensor((S, 2, 3), F32)


@pytest.mark.parametrize(
    ("error", "op", "args"),
    [
        ("states holds i32, expected floats", STATE_READ, (tensor((2, 4, 6), I32), IDS, LAYER)),
        ("sources holds f32, expected integers", STATE_READ, (STATES, tensor((T,), F32), LAYER)),
        ("size of values is 5, expected 6", STATE_WRITE, (STATES, tensor((T, 5), F32), IDS, LAYER)),
        ("length of pages is 2, expected 3", STATE_WRITE, (STATES, tensor((3, 6), F32), tensor((2,), I32), LAYER)),
        ("size of weight is 4, expected 3", CAUSAL_CONV, (X, tensor((3, 4), F32), BEFORE, IDS, IDS)),
        ("taps of weight is 4, expected 3", CAUSAL_CONV, (X, tensor((4, 3), F32), BEFORE, IDS, IDS)),
        ("size of before is 4, expected 3", INPUT_TAILS, (X, tensor((S, 2, 4), F32), IDS, IDS, IDS)),
    ],
)
def test_what_does_not_fit_is_refused(deduced, error, op, args) -> None:
    with pytest.raises(AnnotationError, match=error):
        deduced(op, *args)
