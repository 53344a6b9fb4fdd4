"""Clips have as many tokens as the processors of transformers count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.hops import tokens_of


@given(st.integers(1, 5000))
def test_frames_that_fill_no_token_have_none(num_hops: int) -> None:
    """The number of tokens is that of Qwen2-Audio's and Qwen2.5-Omni's formula."""
    assert tokens_of(num_hops, 2, 0) == ((num_hops - 1) // 2 + 1 - 2) // 2 + 1


@given(st.integers(1, 5000))
def test_each_piece_has_its_own_tokens(num_hops: int) -> None:
    """Each piece of 100 hops has 13 tokens, and the rest has as many as in Qwen3-Omni's formula."""
    whole, rest = divmod(num_hops, 100)
    assert tokens_of(num_hops, 4, 100) == (((rest - 1) // 2 + 1 - 1) // 2 + 1 - 1) // 2 + 1 + 13 * whole


@pytest.mark.parametrize(("num_hops", "expected"), [(1, 1), (8, 1), (9, 2), (99, 13), (100, 13), (101, 14), (800, 104)])
def test_a_rest_of_a_piece_has_a_token(num_hops: int, expected: int) -> None:
    assert tokens_of(num_hops, 4, 100) == expected
