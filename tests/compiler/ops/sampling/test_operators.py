"""Sampling in machine code gives exactly the tokens that `sampling_meaning` gives, whatever other rows are in the batch, with any number of
threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from compiler.driver import Options, compile_module
from compiler.frontend.sampler import LOGPROBS_ENTRY, SAMPLE_ENTRY, build_sampler
from compiler.ir.dtypes import DType
from compiler.ir.errors import AnnotationError
from compiler.ir.types import TensorType, tensor
from compiler.ir.verify.module import verify
from compiler.machine.target import NAMED, Target
from compiler.ops.sampling import truncation
from compiler.ops.sampling.operators import LOGPROB_OPERANDS, SAMPLE, SAMPLE_OPERANDS, TOKEN_LOGPROBS
from compiler.sampling.meaning import sample, token_logprobs
from runtime.sampling import NUM_TOP, SHARE_ONE, Number, SampleBatch, Setting
from runtime.session import Session

MAX_ROWS = 40
Arrays = tuple[NDArray[Any], ...]


# Tests of one vocabulary share an xdist group, so that each sampler is compiled once.
VOCABULARIES = [pytest.param(n, marks=pytest.mark.xdist_group(f"sampling of {n}")) for n in (1, 1024, 5001)]


@pytest.fixture(scope="module", params=VOCABULARIES)
def vocab(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def sessions(vocab: int) -> Iterator[list[Session]]:
    """Yield two sessions of a compiled sampler, one with a single thread and one with three threads."""
    executable = compile_module(build_sampler(vocab, MAX_ROWS))
    made = [Session(executable, device_threads=n) for n in (1, 3)]
    yield made
    for session in made:
        session.close()


def batch(rng: np.random.Generator, vocab: int, num_rows: int, **columns: Any) -> SampleBatch:
    """Return sampling parameters for `num_rows` rows. `columns` sets some parameters; all others are off."""
    numbers = np.zeros((num_rows, len(Number)), np.float32)
    numbers[:] = [1.0, np.inf, 1.0, 0.0, 0.0]
    chosen = np.zeros((num_rows, len(Setting)), np.int64)
    chosen[:] = [0, 0, 0, 0, SHARE_ONE, SHARE_ONE, -1, -1, 0]
    chosen[:, Setting.SEED] = rng.integers(-(2**63), 2**63 - 1, num_rows)
    chosen[:, Setting.POSITION] = rng.integers(0, 2**40, num_rows)
    for name, value in columns.items():
        if name in Number.__members__:
            numbers[:, Number[name]] = value
        elif name in Setting.__members__:
            chosen[:, Setting[name]] = value
    if columns.get("masks"):
        chosen[:, Setting.MASK] = np.arange(num_rows)
    num_masks = num_rows if columns.get("masks") else 0
    masks = rng.integers(-(2**31), 2**31, (num_masks, -(-vocab // 32)), dtype=np.int64).astype(np.int32)

    def lists(count: int, values: NDArray[Any]) -> Arrays:
        count = min(count, vocab)
        ids = np.concatenate([rng.permutation(vocab)[:count] for _ in range(num_rows)]).astype(np.int32)
        return np.arange(num_rows + 1, dtype=np.int32) * count, ids, values[: len(ids)]

    biases = rng.normal(0, 2, num_rows * vocab).astype(np.float32)
    counts = rng.integers(0, 4, num_rows * vocab).astype(np.int32)
    rows = rng.permutation(num_rows).astype(np.int32)
    bias, seen = lists(columns.get("biases", 0), biases), lists(columns.get("seen", 0), counts)
    return SampleBatch(rows, numbers, chosen, bias[0], bias[1], bias[2], seen[0], seen[1], seen[2], masks)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"SHARPNESS": 0.0},
    "plain": {},
    "cold": {"SHARPNESS": 1 / 0.3},
    "frozen": {"SHARPNESS": 1e30},
    "top_k": {"TOP_K": 7},
    "large top_k": {"TOP_K": 150},
    "top_p": {"TOP_P": int(0.9 * SHARE_ONE)},
    "small top_p": {"TOP_P": int(0.05 * SHARE_ONE)},
    "no top_p": {"TOP_P": 0},
    "min_p": {"REACH": 2.5},
    "typical_p": {"TYPICAL_P": int(0.8 * SHARE_ONE)},
    "all truncations": {"TOP_K": 40, "TOP_P": int(0.9 * SHARE_ONE), "REACH": 4.0, "TYPICAL_P": int(0.9 * SHARE_ONE)},
    "masked": {"masks": True, "TOP": 5, "PROCESSED": 1},
    "penalised": {"REPETITION": 1.3, "FREQUENCY": 0.5, "PRESENCE": 0.2, "seen": 20, "TOP": NUM_TOP},
    "biased, masked, cut, reported": {"biases": 5, "masks": True, "TOP_P": SHARE_ONE // 2, "TOP": NUM_TOP, "PROCESSED": 1},
    "neither 0 nor 1": {"TOP_K": 2, "TOP": 3, "PROCESSED": 2},
    "greedy, reported": {"SHARPNESS": 0.0, "TOP": 3, "masks": True},
}
SPREADS: dict[str, Callable[[np.random.Generator, tuple[int, int]], NDArray[Any]]] = {
    "equal": lambda rng, shape: np.zeros(shape),
    "ties": lambda rng, shape: rng.integers(0, 4, shape),
    "flat": lambda rng, shape: rng.normal(0, 0.1, shape),
    "usual": lambda rng, shape: rng.normal(0, 3, shape),
    "steep": lambda rng, shape: rng.normal(0, 30, shape),
    "a few": lambda rng, shape: np.where(rng.random(shape) < 0.02, rng.normal(0, 3, shape), -np.inf),
}


def equal(found: Arrays, expected: Arrays) -> None:
    for name, a, b in zip(
        ("tokens", "distances", "totals", "ranks", "top_ids", "top_distances")[-len(expected) :], found, expected, strict=True
    ):
        np.testing.assert_array_equal(a, b, name)


@pytest.mark.covering("vocab", "kind", "spread")
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("kind", KINDS)
def test_machine_code_draws_what_the_meaning_draws(sessions: list[Session], vocab: int, kind: str, spread: str) -> None:
    rng = np.random.default_rng(3)
    logits = SPREADS[spread](rng, (19, vocab)).astype(np.float32)
    given = batch(rng, vocab, 19, **KINDS[kind])
    expected = sample(logits, *given.arrays)
    for session in sessions:
        equal(session.call(SAMPLE_ENTRY, logits, *given.arrays), expected)


COLUMNS = st.fixed_dictionaries(
    {
        "SHARPNESS": st.sampled_from((0.0, 0.4, 1.0, 3.3, 100.0)),
        "REACH": st.sampled_from((np.inf, 0.0, 1.7, 9.0)),
        "REPETITION": st.sampled_from((1.0, 1.3, 0.8)),
        "FREQUENCY": st.sampled_from((0.0, 1.5, -0.5)),
        "PRESENCE": st.sampled_from((0.0, 0.7)),
        "CHOICE": st.integers(0, 5),
        "TOP_K": st.integers(0, 300),
        "TOP_P": st.integers(0, SHARE_ONE),
        "TYPICAL_P": st.integers(SHARE_ONE // 10, SHARE_ONE),
        "TOP": st.integers(-1, NUM_TOP),
        "PROCESSED": st.integers(-1, 2),
        "masks": st.booleans(),
        "biases": st.integers(0, 9),
        "seen": st.integers(0, 30),
    }
)


@given(columns=COLUMNS, spread=st.sampled_from(list(SPREADS)), seed=st.integers(0, 2**32))
def test_any_parameters_draw_what_the_meaning_draws(
    sessions: list[Session], vocab: int, columns: dict[str, Any], spread: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = SPREADS[spread](rng, (5, vocab)).astype(np.float32)
    given = batch(rng, vocab, 5, **columns)
    equal(sessions[1].call(SAMPLE_ENTRY, logits, *given.arrays), sample(logits, *given.arrays))


def test_a_row_does_not_see_its_neighbours(sessions: list[Session], vocab: int) -> None:
    """A row gets the same result alone as in a batch with rows of other kinds, also if the batch has more rows than the workspace has room
    for at once. Rows with masks, biases or seen tokens are left out."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (MAX_ROWS, vocab)).astype(np.float32)
    kinds = [batch(rng, vocab, 1, **kind) for kind in (list(KINDS.values()) * 3)[:MAX_ROWS] if not {"masks", "biases", "seen"} & set(kind)]
    rows, starts = np.arange(len(kinds), dtype=np.int32), np.zeros(len(kinds) + 1, np.int32)
    numbers, chosen = np.concatenate([k.numbers for k in kinds]), np.concatenate([k.settings for k in kinds])
    chosen[:, Setting.TOP] = 4
    together = replace(kinds[0], rows=rows, numbers=numbers, settings=chosen, bias_starts=starts, seen_starts=starts)
    found = sessions[1].call(SAMPLE_ENTRY, logits, *together.arrays)
    for i in rows:
        own = replace(kinds[0], rows=rows[i : i + 1], numbers=numbers[i : i + 1], settings=chosen[i : i + 1])
        equal(sessions[0].call(SAMPLE_ENTRY, logits.copy(), *own.arrays), tuple(a[i : i + 1] for a in found))


@pytest.mark.parametrize("target", [t for t in NAMED.values() if t.can_run_here], ids=lambda t: t.name)
def test_every_instruction_set_draws_the_same(target: Target) -> None:
    rng = np.random.default_rng(9)
    session = Session(compile_module(build_sampler(333, MAX_ROWS), Options(target)))
    logits = rng.normal(0, 3, (19, 333)).astype(np.float32)
    for kind in KINDS.values():
        given = batch(rng, 333, 19, **kind)
        equal(session.call(SAMPLE_ENTRY, logits, *given.arrays), sample(logits, *given.arrays))
    session.close()


@pytest.mark.parametrize(("margin", "wider"), [(1 / 24, 2.0), (0.0, 0.1)])
def test_a_truncation_does_not_depend_on_the_sample_that_it_begins_with(
    monkeypatch: pytest.MonkeyPatch, margin: float, wider: float
) -> None:
    """Truncation (top-p, typical-p) is exact. It starts from a threshold that is estimated from a sample of the tokens. The result must be
    exact even if the estimate is bad or the sample misses the most probable tokens."""
    monkeypatch.setattr(truncation, "SAMPLED", 16)
    monkeypatch.setattr(truncation, "MARGIN", margin)
    monkeypatch.setattr(truncation, "WIDER", wider)
    vocab, rng = 8_259, np.random.default_rng(10)
    one, halves = np.full(vocab, -np.inf), np.zeros(vocab)
    one[vocab - 1] = 3.0
    halves[100:vocab:3] = 5.0
    rows = [one, halves, np.zeros(vocab), rng.normal(0, 1, vocab), -1.3 * np.log(rng.permutation(vocab) + 1), np.arange(vocab) / 1000]
    logits = np.array(rows, np.float32)
    session = Session(compile_module(build_sampler(vocab, MAX_ROWS)), device_threads=1)
    for share in (0.1, 0.9, 0.999):
        for column in ("TOP_P", "TYPICAL_P"):
            given = batch(rng, vocab, len(logits), **{column: int(share * SHARE_ONE)})
            equal(session.call(SAMPLE_ENTRY, logits, *given.arrays), sample(logits, *given.arrays))
    session.close()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_cannot_be_drawn(sessions: list[Session], vocab: int, bad: float) -> None:
    rng = np.random.default_rng(6)
    logits = rng.normal(0, 1, (3, vocab)).astype(np.float32)
    logits[1, vocab // 2] = bad
    logits[2] = -np.inf
    for sharpness in (0.0, 1.0):
        given = batch(rng, vocab, 3, SHARPNESS=sharpness, TOP=2)
        found = sessions[0].call(SAMPLE_ENTRY, logits, *given.arrays)
        equal(found, sample(logits, *given.arrays))
        assert sorted(found[0])[:2] == [-2, -1] and max(found[0]) >= 0


def test_logprobs_of_given_tokens(sessions: list[Session], vocab: int) -> None:
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 3, (9, vocab)).astype(np.float32)
    arrays = (rng.permutation(9), rng.integers(0, vocab, 9), rng.integers(0, NUM_TOP + 1, 9))
    rows, tokens, tops = (a.astype(np.int32) for a in arrays)
    expected = token_logprobs(logits, rows, tokens, tops)
    for session in sessions:
        equal(session.call(LOGPROBS_ENTRY, logits, rows, tokens, tops), expected)


def test_the_nest_in_numpy(run: Callable[..., Any]) -> None:
    """The interpreter runs the loop nest of the sampler and gets the same results as the NumPy definition of the operator."""
    rng = np.random.default_rng(8)
    logits = rng.normal(0, 2, (2, 70)).astype(np.float32)
    given = batch(rng, 70, 2, TOP_K=30, TOP_P=int(0.9 * SHARE_ONE), TYPICAL_P=int(0.9 * SHARE_ONE), TOP=2, seen=3, biases=2, masks=True)
    run(SAMPLE, logits, *given.arrays, shapes="r 70, n, n 5, n 9, s, b, b, t, c, c, m 3")
    tokens = np.array([3, 69], np.int32)
    run(TOKEN_LOGPROBS, logits, given.rows, tokens, tokens % 4, shapes="r 70, n, n, n")


def test_the_programs_are_well_formed() -> None:
    verify(build_sampler(70, MAX_ROWS))


def test_annotations(deduced: Callable[..., Any]) -> None:
    def types(operands: dict[str, DType], **other: TensorType) -> list[TensorType]:
        shapes = {"logits": (6, 70), "numbers": (4, 5), "settings": (4, 9), "masks": (2, 3), "bias_starts": (5,), "seen_starts": (5,)}
        return [other.get(name, tensor(shapes.get(name, (4,)), dtype)) for name, dtype in operands.items()]

    assert str(deduced(SAMPLE, *types(SAMPLE_OPERANDS))).count("[4") == 6
    assert str(deduced(TOKEN_LOGPROBS, *types(LOGPROB_OPERANDS))).count("[4") == 5
    for name, wrong, text in (
        ("rows", tensor((4,), DType.I64), "rows holds i64"),
        ("bias_starts", tensor((4,), DType.I32), "dimension 0 of bias_starts is 4, expected 5"),
        ("bias_values", tensor((5,), DType.F32), "the length of bias_values is 5, expected 4"),
        ("seen_counts", tensor((3,), DType.I32), "the length of seen_counts is 3, expected 4"),
        ("masks", tensor((2, 4), DType.I32), "dimension 1 of masks is 4, expected 3"),
    ):
        with pytest.raises(AnnotationError, match=text):
            deduced(SAMPLE, *types(SAMPLE_OPERANDS, **{name: wrong}))
