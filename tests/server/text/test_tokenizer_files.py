"""A worker reads from a tokenizer's files what the built tokenizer says."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import models

from server.text.tokenizer_files import ModelFilesError, TokenizerFiles
from tests.server.text.test_tokenizer import byte_level, sentencepiece, wordpiece


def unigram() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("</s>", -2.0)], unk_id=0))


def files(tokenizer: tokenizers.Tokenizer, **contents: object) -> TokenizerFiles:
    others = {f"{name}.json": json.dumps(value).encode() for name, value in contents.items()}
    return TokenizerFiles({"tokenizer.json": tokenizer.to_str().encode(), **others})


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece(), wordpiece(), unigram()])
def test_an_end_is_found_as_the_built_tokenizer_finds_it(tokenizer: tokenizers.Tokenizer) -> None:
    for text in ("</s>", "<end>", "<tool>", "[SEP]", "##ld", "lo", "a", "nothing of this kind"):
        known = tokenizer.token_to_id(text)
        found = files(tokenizer, tokenizer_config={"eos_token": {"content": text}}).eos_ids()
        assert found == (() if known is None else (known,)), text


def test_ends_come_from_three_files_and_are_listed_once() -> None:
    found = files(
        byte_level(),
        special_tokens_map={"eos_token": "</s>"},
        generation_config={"eos_token_id": [1, 9]},
        config={"text_config": {"eos_token_id": 7}, "eos_token_id": 8},
    )
    assert found.eos_ids() == (1, 9, 7)
    assert files(byte_level(), config={"text_config": {"hidden_size": 8}, "eos_token_id": [1, 106]}).eos_ids() == (1, 106)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b'{"added_tokens": 1}', b'{"model": {"vocab": 3}}', b"[" * 100_000])
def test_a_damaged_tokenizer_is_named(content: bytes) -> None:
    damaged = TokenizerFiles({"tokenizer.json": content, "tokenizer_config.json": b'{"eos_token": "</s>"}'})
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json is not understood"):
        damaged.eos_ids()
