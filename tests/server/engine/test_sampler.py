"""The sampler agrees with a simple reference. In these tests, NumPy definitions compute the sampler's operators."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.sampling.philox import random_bits
from runtime.sampling import Setting
from server.constraints.matcher import Mask, Matcher
from server.constraints.rules import Bans, Rules, matcher_of
from server.engine.intake import open_request
from server.engine.sampler import RowState, Sampler
from server.engine.step_model import GroupLimits, StepLimits
from server.messages import SamplingParams, Submit
from tests.doubles.model import NullLogits, NullModel

VOCAB = 200
EOS = 3


class Given(NullModel):
    """A null model that samples from the logits that a test passes."""

    def sample(self, logits, batch):
        return super().sample(NullLogits(logits), batch)


def sampler_of(vocab_size: int) -> Sampler:
    return Sampler(Given(StepLimits(vocab_size, max_context=64, max_tokens=64, max_seqs=64, groups=(GroupLimits(8),))))


def row_of(params: SamplingParams, prompt=(1, 2, 2, 9), drawn=(), choice=0) -> RowState:
    row = RowState(params, choice, prompt)
    for token_id in drawn:
        row.advance(token_id)
    return row


def bits(allowed) -> np.ndarray:
    flags = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    flags[list(allowed)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


class Fixed(Matcher):
    """A fake grammar that always allows the same tokens."""

    def __init__(self, allowed) -> None:
        self._mask = bits(allowed)

    def mask(self) -> Mask:
        return self._mask

    def advance(self, token_ids) -> None:
        pass


def mask_of(params: SamplingParams, drawn=(), allowed=None) -> Mask | None:
    """Return the mask of a sequence's matcher after the sequence has sampled the tokens `drawn`."""
    enders = frozenset(params.stop_token_ids + (() if params.ignore_eos else (EOS,)))
    matcher = matcher_of(Bans(params, enders, VOCAB), None if allowed is None else Fixed(allowed), drawn)
    return None if matcher is None else matcher.mask()


def reference(logits, params: SamplingParams, prompt, drawn, allowed=None) -> dict[int, float]:
    """Return the probability of each token. The reference follows the documentation of the parameters, with dictionaries and sorting."""
    values = {i: float(x) for i, x in enumerate(logits)}
    for token_id, bias in params.logit_bias:
        values[token_id] += bias
    counts = Counter(drawn)
    for token_id in {*prompt, *drawn}:
        x = values[token_id]
        values[token_id] = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
    for token_id, count in counts.items():
        values[token_id] -= params.frequency_penalty * count + params.presence_penalty
    if params.allowed_token_ids:
        values = {i: x for i, x in values.items() if i in params.allowed_token_ids}
    banned = set(params.banned_token_ids)
    banned |= {last for *before, last in params.banned_sequences if list(drawn[-len(before) :]) == before}
    if len(drawn) < params.min_tokens:
        banned |= {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
    values = {i: x for i, x in values.items() if i not in banned and (allowed is None or i in allowed)}
    order = sorted(values, key=lambda i: (-values[i], i))
    if params.temperature == 0:
        return {order[0]: 1.0}
    best = max(values.values())
    probs = {i: math.exp((values[i] - best) / params.temperature) for i in order}

    def normalised(kept):
        total = math.fsum(probs[i] for i in kept)
        return {i: probs[i] / total for i in kept}

    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        share, kept = 0.0, []
        for i, p in normalised(order).items():
            if share >= params.top_p:
                break
            kept.append(i)
            share += p
        order = kept
    if params.min_p > 0:
        order = [i for i in order if probs[i] >= params.min_p * probs[order[0]]]
    if params.typical_p < 1:
        p = normalised(order)
        entropy = -math.fsum(x * math.log(x) for x in p.values() if x > 0)
        order = sorted(order, key=lambda i: (abs(-math.log(max(p[i], 1e-300)) - entropy), i))
        share, kept = 0.0, []
        for i in order:
            if share >= params.typical_p:
                break
            kept.append(i)
            share += p[i]
        order = kept
    return normalised(order)


params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    min_tokens=st.sampled_from((0, 5)),
    temperature=st.sampled_from((0.0, 0.3, 1.0, 2.5)),
    top_p=st.sampled_from((1.0, 0.95, 0.5, 0.01)),
    top_k=st.sampled_from((0, 1, 7, 1000)),
    min_p=st.sampled_from((0.0, 0.02, 0.7)),
    typical_p=st.sampled_from((1.0, 0.9, 0.2)),
    frequency_penalty=st.sampled_from((0.0, 1.5, -0.5)),
    presence_penalty=st.sampled_from((0.0, 0.7)),
    repetition_penalty=st.sampled_from((1.0, 1.3, 0.8)),
    logit_bias=st.sampled_from(((), ((5, 4.0), (6, -100.0)))),
    allowed_token_ids=st.sampled_from(((), tuple(range(2, 60)))),
    banned_token_ids=st.sampled_from(((), (8, 9))),
    banned_sequences=st.sampled_from(((), ((1, 12), (2, 3, 13)))),
    stop_token_ids=st.sampled_from(((), (10, 11))),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from((None, 0, 4)),
    processed_logprobs=st.booleans(),
)


@given(
    params=params_strategy,
    drawn=st.lists(st.integers(0, 20), max_size=8),
    allowed=st.sampled_from((None, tuple(range(0, 100, 3)))),
    spread=st.sampled_from((0.1, 3.0)),
    logits_seed=st.integers(0, 1000),
)
def test_against_the_reference(params, drawn, allowed, spread, logits_seed) -> None:
    logits = np.random.default_rng(logits_seed).normal(0, spread, (1, VOCAB)).astype(np.float32)
    prompt = (1, 2, 2, 9)
    probs = reference(logits[0], params, prompt, drawn, allowed)
    result = sampler_of(VOCAB).sample(logits, [row_of(params, prompt, drawn)], [mask_of(params, drawn, allowed)])[0]
    assert result.error is None

    ids = sorted(probs)
    cumulative = np.cumsum([probs[i] for i in ids])
    u = random_bits(params.seed, len(prompt) + len(drawn), 0) * 2.0**-53
    at = ids.index(result.token_id)
    assert (cumulative[at - 1] if at else 0.0) - 1e-6 <= u <= cumulative[at] + 1e-6 or params.temperature == 0

    if params.logprobs is None:
        assert result.logprob is None
        return
    sent = result.logprob
    assert sent is not None and sent.token_id == result.token_id and len(sent.top) <= params.logprobs
    if params.processed_logprobs and params.temperature > 0:
        expected = {i: math.log(p) for i, p in probs.items() if p > 0}
    elif not params.processed_logprobs:
        wide = logits[0].astype(np.float64)
        expected = dict(enumerate(wide - np.log(np.exp(wide).sum())))
    else:
        return
    assert sent.logprob == pytest.approx(expected[sent.token_id], abs=3e-6)
    by_rank = sorted(expected, key=lambda i: (-expected[i], i))
    assert by_rank[sent.rank - 1] == sent.token_id
    assert [i for i, _ in sent.top] == by_rank[: params.logprobs]
    assert [x for _, x in sent.top] == pytest.approx([expected[i] for i in by_rank[: params.logprobs]], abs=3e-6)


def test_a_row_does_not_see_its_neighbours() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (32, VOCAB)).astype(np.float32)
    kinds = [
        SamplingParams(max_tokens=9, temperature=t, top_p=p, typical_p=y, seed=s, logprobs=3)
        for s, (t, p, y) in enumerate([(0.0, 1.0, 1.0), (1.0, 1.0, 1.0), (1.0, 0.8, 1.0), (0.7, 1.0, 0.9)] * 8)
    ]
    rows = [row_of(params) for params in kinds]
    together = sampler_of(VOCAB).sample(logits, rows)
    alone = [sampler_of(VOCAB).sample(logits[i : i + 1].copy(), [row])[0] for i, row in enumerate(rows)]
    assert together == alone
    order = rng.permutation(32)
    shuffled = sampler_of(VOCAB).sample(logits[order], [rows[i] for i in order])
    assert shuffled == [together[i] for i in order]


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 1000])
def test_draws_follow_the_distribution(vocab_size: int) -> None:
    logits = np.random.default_rng(1).normal(0, 1, (1, vocab_size)).astype(np.float32)
    sampler = sampler_of(vocab_size)
    num_draws = 4000
    counts = np.zeros(vocab_size)
    for seed in range(num_draws):
        counts[sampler.sample(logits, [row_of(SamplingParams(max_tokens=1, seed=seed))])[0].token_id] += 1
    probs = np.exp(logits[0]) / np.exp(logits[0]).sum()
    # The expected number of samples in each cell of the histogram is at least 100. Seeds are fixed, so the test cannot fail by chance.
    cells = np.searchsorted(np.cumsum(probs), np.linspace(0, 1, 21)[1:-1])
    seen, expected = np.add.reduceat(counts, np.unique(np.r_[0, cells])), num_draws * np.add.reduceat(probs, np.unique(np.r_[0, cells]))
    assert ((seen - expected) ** 2 / expected).sum() < 50


def test_choices_share_the_distinct_tokens_of_their_prompt() -> None:
    """The prompt may have 100,000 tokens, and a request 128 choices. To find these tokens for each choice would stop all streams for
    seconds, and take 14 MB per choice."""
    limits = StepLimits(VOCAB, max_context=64, max_tokens=64, max_seqs=64, groups=(GroupLimits(8),))
    prompt, drawn = (9, 1, 2, 2, 9), ([], [*range(20, 70), 2, 2, 20], [9])
    submit = Submit("a", prompt, SamplingParams(max_tokens=60, repetition_penalty=1.3), num_choices=3)
    rows = [seq.row for seq in open_request(submit, 0, limits=limits, eos_ids=()).sequences]
    assert all(np.shares_memory(row.seen.ids, rows[0].seen.ids) for row in rows)
    again = rows[2].anew(2, drawn[1])
    assert again.distinct_ids is rows[0].distinct_ids and again.position == len(prompt) + len(drawn[1])
    for row, token_ids in zip(rows, drawn, strict=True):
        for token_id in token_ids:
            row.advance(token_id)
    for row, token_ids in ((again, drawn[1]), *zip(rows, drawn, strict=True)):
        counts = Counter(token_ids)
        wanted = {token_id: counts[token_id] for token_id in (1, 2, 9, *dict.fromkeys(token_ids))}
        assert dict(zip(row.seen.ids.tolist(), row.seen.counts.tolist(), strict=True)) == wanted
        assert row.seen.ids.tolist() == list(wanted), "the order, which decides where the device finds them"


def test_a_drawn_token_does_not_copy_the_distinct_tokens_of_the_prompt() -> None:
    """Each of 128 choices would copy 100,000 of them per token."""
    row = RowState(SamplingParams(max_tokens=9, repetition_penalty=1.3), 0, range(0, 300_000, 3))
    row.advance(1)  # the first token that is not in the prompt gets room
    tracemalloc.start()
    try:
        for token_id in (0, 150_000, 299_997, 1, 2):
            row.advance(token_id)
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()
    assert {token_id: row.seen.counts[row.seen.ids == token_id].tolist() for token_id in (0, 1, 2, 3)} == {0: [1], 1: [2], 2: [1], 3: [0]}


def test_equal_logits_prefer_the_lower_id() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [50, 60, 70]] = 1.0
    sampler = sampler_of(VOCAB)
    result = sampler.sample(logits, [row_of(SamplingParams(max_tokens=1, temperature=0, logprobs=2))])[0]
    assert result.token_id == 50
    assert [i for i, _ in result.logprob.top] == [50, 60]
    drawn = {sampler.sample(logits, [row_of(SamplingParams(max_tokens=1, top_k=2, seed=s))])[0].token_id for s in range(40)}
    assert drawn == {50, 60}


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_cannot_be_drawn_is_an_error_of_its_row(wrong: float) -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[1, 7] = wrong
    impossible = SamplingParams(max_tokens=1, allowed_token_ids=(4,), banned_token_ids=(4,))
    rows = [row_of(impossible), row_of(SamplingParams(max_tokens=1, temperature=0)), row_of(SamplingParams(max_tokens=1))]
    first, second, third = sampler_of(VOCAB).sample(logits, rows, [mask_of(impossible), None, None])
    assert first.error is not None and "no token is left" in str(first.error)
    assert first.error.code == "invalid_value", "the fields of the request contradict each other"
    assert second.error is not None and "NaN or positive infinity" in str(second.error)
    assert second.error.code == "generation_failed"
    assert third.error is None and 0 <= third.token_id < VOCAB


@pytest.mark.parametrize("vocab_size", [VOCAB, 300])
def test_whose_fault_it_is_that_nothing_is_left(vocab_size: int) -> None:
    """Minus infinity for every token is the model's fault, with and without a mask. A mask without any token is the request's."""
    every = SamplingParams(max_tokens=1, banned_token_ids=tuple(range(vocab_size)))
    empty = Rules(Bans(every, frozenset(), vocab_size)).mask()
    one = Rules(Bans(SamplingParams(max_tokens=1, allowed_token_ids=(7,)), frozenset(), vocab_size)).mask()
    logits = np.full((3, vocab_size), -np.inf, np.float32)
    rows = [row_of(SamplingParams(max_tokens=1, seed=seed)) for seed in range(3)]
    found = [drawn.error for drawn in sampler_of(vocab_size).sample(logits, rows, [None, one, empty])]
    assert [error.code for error in found] == ["generation_failed", "generation_failed", "invalid_value"]
    assert "minus infinity" in str(found[0]) and str(found[1]) == str(found[0]) and "no token is left" in str(found[2])


def test_a_batch_does_not_depend_on_the_batch_before_it() -> None:
    """Batches of the same rows share the arrays that do not change. Positions, masks and the tokens seen so far change with each batch."""
    used = sampler_of(VOCAB)
    plain, biased, penalised = (
        row_of(SamplingParams(9, **given))
        for given in ({"seed": 7}, {"logit_bias": ((5, 2.0),), "temperature": 0.5}, {"presence_penalty": 1.0, "seed": 8})
    )
    mask = bits([1, 2])
    steps = [
        ([plain, biased], [None, None]),
        ([plain, biased], [mask, None]),
        ([plain, biased], [None, mask]),
        ([plain, penalised], [None, None]),
        ([plain, penalised], [None, None]),
        ([biased], [None]),
        ([penalised, plain, biased], [mask, None, mask]),
    ]
    for number, (rows, masks) in enumerate(steps):
        places = list(range(number, number + len(rows)))
        batch, expected = used.prepare(rows, masks, places), sampler_of(VOCAB).prepare(rows, masks, places)
        assert batch is not None and expected is not None
        for array, other in zip(batch.arrays, expected.arrays, strict=True):
            np.testing.assert_array_equal(array, other)
            assert array.dtype == other.dtype
        positions = [len(row.prompt_ids) + number for row in rows]
        assert batch.settings[:, Setting.POSITION].tolist() == positions
        for row in (plain, biased, penalised):
            row.advance(11 + number)
