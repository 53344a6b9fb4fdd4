"""Rows of training data contain whole conversations that do not attend to each other. The loss weight of a token depends on who says it."""

from itertools import islice

import numpy as np
import pytest
from tokenizers import Tokenizer

from deploy.demo import MODEL
from tests.lab.training.packing import Batch, batches
from tests.lab.training.vocabulary import END_OF_TURN, START_OF_TURN


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def batch(tokenizer: Tokenizer) -> Batch:
    return next(batches(tokenizer, 1, tokens_per_batch=4096, lengths=(512,)))


def test_a_row_is_mostly_full(batch: Batch):
    assert batch.token_ids.shape == (8, 513)
    assert (batch.document_ids < 0).mean() < 0.1


def test_every_document_is_a_whole_conversation(tokenizer: Tokenizer, batch: Batch):
    for ids, owners in zip(batch.token_ids, batch.document_ids, strict=True):
        for number in range(owners.max() + 1):
            text = tokenizer.decode(ids[owners == number].tolist(), skip_special_tokens=False)
            assert text.startswith(START_OF_TURN) and text.endswith(END_OF_TURN + "\n")


def test_nothing_is_learnt_across_documents_or_from_padding(batch: Batch):
    starts = np.diff(batch.document_ids, axis=1, prepend=-2) != 0
    assert not batch.weights[starts].any()
    assert not batch.weights[batch.document_ids < 0].any()


def test_what_the_assistant_says_weighs_most(tokenizer: Tokenizer, batch: Batch):
    prompt_weight = np.unique(batch.weights)[1]  # prompt tokens have the smallest weight above zero
    spoken = batch.weights > prompt_weight
    assert 0.2 < spoken.mean() < 0.7
    assert f"{START_OF_TURN}user" not in tokenizer.decode(batch.token_ids[spoken].tolist(), skip_special_tokens=False)


def test_a_story_weighs_no_more_than_a_few_facts(tokenizer: Tokenizer):
    """Tokens of stories have a small loss weight. The test looks at several batches, because only one conversation in twenty is a story."""
    several = islice(batches(tokenizer, 1, tokens_per_batch=4096, lengths=(512,)), 4)
    assert any(((batch.weights > 0.2) & (batch.weights < 0.5)).any() for batch in several)


def test_row_lengths_go_round(tokenizer: Tokenizer):
    stream = batches(tokenizer, 1, tokens_per_batch=2048, lengths=(256, 1024))
    assert [next(stream).token_ids.shape for _ in range(3)] == [(8, 257), (2, 1025), (8, 257)]


def test_long_conversations_never_crowd_out_the_short_rows(tokenizer: Tokenizer):
    stream = batches(tokenizer, 1, tokens_per_batch=1024, lengths=(256, 256, 256, 1024))
    for _, batch in zip(range(200), stream, strict=False):
        assert (batch.document_ids >= 0).mean() > 0.8
