"""Tokenizers of real files give the ids that llama.cpp gives, on 300 odd strings (tokens.json says how they were made)."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.model_loading.tokenizer import load_tokenizer
from tests.real.conftest import file_of

GOLDEN = json.loads((Path(__file__).parent / "tokens.json").read_text())


def test_strings_become_the_ids_of_llama_cpp(model: str) -> None:
    tokenizer = load_tokenizer(str(file_of(model)))
    found = [tokenizer.encode(text, False) for text in GOLDEN["strings"]]
    different = [pair for pair in zip(GOLDEN["strings"], found, GOLDEN["ids"][model], strict=True) if pair[1] != pair[2]]
    assert len(found) == 300 and different == []


def test_ids_become_the_strings_again(model: str) -> None:
    """Text without markers of the vocabulary survives encoding and decoding; Qwen's tokenizer composes characters first."""
    tokenizer = load_tokenizer(str(file_of(model)))
    plain = [text for text in GOLDEN["strings"] if text.isascii() and not any(mark in text for mark in ("<", "[", "\x00"))]
    assert len(plain) > 80
    assert [text for text in plain if tokenizer.decode(tokenizer.encode(text, False)) != text] == []
