"""The null model, which the engine's tests use, detects errors of the engine that would make a real model fail."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from server.engine.step_model import EmbedLimits, GroupLimits, Places, StepBatch, StepLimits
from tests.conftest import ROOT
from tests.doubles.model import BatchError, NullEmbedModel, NullModel, scripted_logits

LIMITS = StepLimits(vocab_size=50, max_context=64, max_tokens=32, max_seqs=4, groups=(GroupLimits(9),))


def batch(*sequences: tuple[list[int], int, list[int]]) -> StepBatch:
    """Return a step for several sequences. Each sequence is given as (tokens, first position, pages); the step computes logits for its last
    token."""
    starts = np.cumsum([0, *(len(tokens) for tokens, _, _ in sequences)]).astype(np.int32)
    width = max(len(pages) for _, _, pages in sequences)
    positions = [start + i for tokens, start, _ in sequences for i in range(len(tokens))]
    slots = [pages[p // 16] * 16 + p % 16 for tokens, start, pages in sequences for p in range(start, start + len(tokens))]
    tables = np.array([pages + [0] * (width - len(pages)) for _, _, pages in sequences], np.int32)
    return StepBatch(
        tokens=np.array([t for tokens, _, _ in sequences for t in tokens], np.int32),
        positions=np.array(positions, np.int32),
        query_starts=starts,
        seq_ids=np.repeat(np.arange(len(sequences), dtype=np.int32), np.diff(starts)),
        context_lens=np.array([start + len(tokens) for tokens, start, _ in sequences], np.int32),
        places=(Places(np.array(slots, np.int32), tables),),
        logit_rows=starts[1:] - 1,
    )


def run(model: NullModel, step: StepBatch) -> np.ndarray:
    return model.download(model.run(step))


TEXT = [(3 * i) % 50 for i in range(20)]


def test_a_row_depends_on_its_history_and_on_nothing_else() -> None:
    whole = run(NullModel(LIMITS), batch((TEXT, 0, [1, 2])))
    chunked = NullModel(LIMITS)
    chunked.run(batch((TEXT[:7], 0, [5])))
    together = run(chunked, batch((TEXT[7:], 7, [5, 3]), ([9, 9], 0, [4])))
    assert np.array_equal(whole[0], together[0])
    other = run(NullModel(LIMITS), batch(([1, *TEXT[1:]], 0, [1, 2])))
    assert (whole != other).mean() > 0.9


def test_wrong_pages_give_wrong_tokens() -> None:
    model = NullModel(LIMITS)
    right = run(model, batch((TEXT, 0, [1, 2])))
    follow = NullModel(LIMITS)
    follow.run(batch((TEXT[:16], 0, [1])))
    assert np.array_equal(run(follow, batch((TEXT[16:], 16, [1, 2]))), right)
    assert not np.array_equal(run(follow, batch((TEXT[16:], 16, [3, 2]))), right), "a page never written"


def test_a_page_with_the_same_tokens_behind_another_beginning_is_wrong() -> None:
    model = NullModel(LIMITS)
    page = TEXT[:16]
    right = run(model, batch(([1] * 16, 0, [1])))
    model.run(batch((page, 16, [1, 2])))
    right = run(model, batch(([5], 32, [1, 2, 3])))
    model.run(batch(([2] * 16, 0, [4])))
    model.run(batch((page, 16, [4, 5])))
    assert not np.array_equal(run(model, batch(([5], 32, [1, 5, 3]))), right)
    assert np.array_equal(run(model, batch(([5], 32, [1, 2, 3]))), right)


def test_a_copied_page_is_as_good_as_the_original() -> None:
    model = NullModel(LIMITS)
    model.run(batch((TEXT[:10], 0, [1])))
    model.copy_page(0, 1, 2)
    original = run(model, batch((TEXT[10:12], 10, [1])))
    assert np.array_equal(run(model, batch((TEXT[10:12], 10, [2]))), original)
    with pytest.raises(BatchError, match="page 0"):
        model.copy_page(0, 1, 0)


def test_logits_are_a_handle_that_only_their_model_reads() -> None:
    """The null model returns logits as an opaque handle. So if the engine read numbers from the logits itself, all its tests would fail."""
    model = NullModel(LIMITS)
    logits = model.run(batch((TEXT, 0, [1, 2])))
    assert not {"__array__", "__array_interface__", "__buffer__", "__getitem__", "__len__", "__iter__"} & set(dir(logits))
    numbers = model.download(logits)
    numbers[...] = 0
    assert model.download(logits).any(), "a download is a copy"


GOOD = batch((TEXT, 0, [1, 2]), ([4], 16, [3, 4]))
(PLACES,) = GOOD.places


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (batch((TEXT * 2, 0, [1, 2, 3])), "tokens: 40; expected 1 to 32"),
        (batch(*[([1], 0, [i + 1]) for i in range(5)]), "sequences: 5"),
        (batch(([50], 0, [1])), "token id: 50"),
        (batch(([1], 64, [1, 2, 3, 4, 5])), "context: 65"),
        (batch(([1], 0, [0])), "page 0"),
        (batch(([1], 0, [1]), ([2], 0, [1])), "two tokens are stored in one slot"),
        (replace(GOOD, positions=GOOD.positions + 1), "positions"),
        (replace(GOOD, places=(replace(PLACES, slots=PLACES.slots[::-1].copy()),)), "slots"),
        (replace(GOOD, query_starts=np.array([0, 20, 22], np.int32)), "expected ascending positions that end with 21"),
        (replace(GOOD, seq_ids=GOOD.seq_ids * 0), "seq_ids"),
        (replace(GOOD, seq_ids=GOOD.seq_ids.astype(np.int64)), "seq_ids"),
        (replace(GOOD, logit_rows=GOOD.logit_rows[::-1].copy()), "ascending"),
        (replace(GOOD, places=(replace(PLACES, page_tables=np.array([[1, 2, 7], [3, 4, 0]], np.int32)),)), "beyond its context"),
    ],
)
def test_a_batch_that_breaks_the_contract_is_refused(bad: StepBatch, complaint: str) -> None:
    NullModel(LIMITS).run(GOOD)
    with pytest.raises(BatchError, match=complaint):
        NullModel(LIMITS).run(bad)


def test_a_script_is_followed_over_and_over() -> None:
    logits_of = scripted_logits(50, [7, 8, 7, 9])
    history = [1, 2]
    for _ in range(8):
        history.append(int(logits_of(np.array(history, np.int32)).argmax()))
    assert history == [1, 2, 7, 8, 7, 9, 7, 8, 7, 9]


def test_embeddings_depend_on_their_text_alone() -> None:
    model = NullEmbedModel(EmbedLimits(vocab_size=50, embedding_size=8, max_context=16, max_tokens=20, max_seqs=3))
    together = model.run([[1, 2, 3], [4]], [None, None])
    assert together.shape == (2, 8) and np.array_equal(together[1], model.run([[4]], [None])[0])
    with pytest.raises(BatchError, match="tokens: 21"):
        model.run([[1] * 21], [None])


def test_a_process_without_kernels_imports_no_operators() -> None:
    """Tests start the process hundreds of times. Without the operators it starts in two thirds of the time, and a change of an operator
    reaches fewer tests of the server."""
    program = "import sys, tests.doubles.process; print(*(name for name in sys.modules if name.startswith('compiler.')))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {name.split(".")[1] for name in ran.stdout.split()} == {"sampling"}
