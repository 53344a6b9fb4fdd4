"""A worker reads from a tokenizer's files what the built tokenizer says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from server.text.tokenizer_files import ModelFilesError, TokenizerFiles
from tests.server.text.test_tokenizer import byte_level, sentencepiece, wordpiece
from tests.unreadable import make_faulty


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


PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
PIECES = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9), min_size=1)
MODELS = st.one_of(
    PIECES.map(lambda vocab: models.BPE(vocab, [])),
    PIECES.map(lambda vocab: models.WordPiece(vocab, unk_token="a")),
    st.lists(st.sampled_from("abcd"), min_size=1).map(lambda pieces: models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0)),
)
ADDED = st.lists(st.tuples(st.sampled_from(["a", "b", "x", "y", "z", ""]), st.sampled_from([0, 1, 5, 5000]), st.booleans()))


@given(MODELS, ADDED)
def test_an_added_token_has_the_id_that_the_package_gives(model: models.Model, added: Sequence[tuple[str, int, bool]]) -> None:
    """The front asks the built tokenizer and the worker reads the file. If they disagreed, answers would not end."""
    fields = json.loads(tokenizers.Tokenizer(model).to_str())
    fields["added_tokens"] = [{"content": text, "id": id, "special": special, **PLAIN} for text, id, special in added]
    content = json.dumps(fields).encode()
    built = tokenizers.Tokenizer.from_buffer(content)
    for text in ("a", "b", "x", "y", "z", "q", ""):
        found = TokenizerFiles({"tokenizer.json": content, "tokenizer_config.json": json.dumps({"eos_token": text}).encode()})
        assert found.eos_ids() == found.eos_ids(built.token_to_id), text


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


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja"])
def test_a_file_that_cannot_be_looked_for_is_not_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Otherwise a network drive that is away for a moment would change the defaults or the prompts of a model until its next load."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / name).write_text("{}")
    make_faulty(monkeypatch, tmp_path / name)
    with pytest.raises(ModelFilesError, match=f"{name} cannot be read: Input/output error"):
        TokenizerFiles.from_dir(tmp_path)
