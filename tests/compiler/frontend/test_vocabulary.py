"""Vocabularies without tokenizer.json give the ids of sentencepiece and of transformers' classes in Python (`make_vocabularies.py`)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from compiler.frontend.errors import DamagedFile
from compiler.frontend.vocabulary import protobuf
from compiler.frontend.vocabulary.folder import NAMES, Unreadable, tokenizer_files
from compiler.frontend.vocabulary.pieces import UNKNOWN, USER_DEFINED, merges_by_score
from tests.golden.make_vocabularies import HERE, STRINGS, TEXTS

ALL = sorted(folder.name for folder in HERE.iterdir())
OF_PIECES = [name for name in ALL if (HERE / name / "tokenizer.model").exists()]


def files_of(name: str, **changes: Any) -> dict[str, bytes]:
    """Return the files of a vocabulary. `changes` are fields of tokenizer_config.json."""
    found = {file.name: file.read_bytes() for file in (HERE / name).iterdir() if file.name in NAMES}
    return {**found, "tokenizer_config.json": json.dumps({**json.loads(found["tokenizer_config.json"]), **changes}).encode()}


def read(files: dict[str, bytes]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(tokenizer_files(files)["tokenizer.json"].decode())


def differences(name: str, part: str, texts: list[str]) -> list[tuple[str, list[int], list[int]]]:
    tokenizer, expected = read(files_of(name)), json.loads((HERE / name / "ids.json").read_text())[part]
    found = [tokenizer.encode(text, add_special_tokens=part == "whole").ids for text in texts]
    different = [triple for triple in zip(texts, found, expected[: len(texts)], strict=True) if triple[1] != triple[2]]
    if name == "not_legacy":  # a space at the beginning stands for its mark
        different = [triple for triple in different if not triple[0].startswith((" ", "▁"))]
    scores = json.loads(tokenizer.to_str())["model"]["vocab"]
    return [triple for triple in different if isinstance(scores, dict) or not is_tie(*triple[1:], scores)]


def is_tie(one: list[int], other: list[int], scores: list[tuple[str, float]]) -> bool:
    """Return whether a unigram model splits a text in two ways whose scores are equal but for rounding to 32 bits."""
    first, second = (sum(scores[id][1] for id in ids) for ids in (one, other))
    spelled = {"".join(scores[id][0] for id in ids) for ids in (one, other)}
    return len(spelled) == 1 and abs(first - second) < 1e-5 * abs(first)


@pytest.mark.parametrize("name", OF_PIECES)
def test_texts_become_the_ids_of_sentencepiece(name: str) -> None:
    """Sentencepiece knows no special tokens in a text, so texts with such tokens are left to the other test."""
    different = [text for text, *_ in differences(name, "plain", STRINGS)]
    assert len(STRINGS) == 300 and [text for text in different if "<" not in text] == []


@pytest.mark.parametrize("name", ALL)
def test_prompts_become_the_ids_of_transformers(name: str) -> None:
    assert differences(name, "whole", [*STRINGS, *TEXTS]) == []


@pytest.mark.parametrize("name", ALL)
def test_the_package_would_write_the_same_file(name: str) -> None:
    """The file is written without building the tokenizer. It has everything that the package writes after it has read the file."""

    def fields(text: str) -> list[Any]:
        found = json.loads(text)
        vocabulary = found["model"].pop("vocab")
        if isinstance(vocabulary, list):  # the package reads scores to 15 digits
            vocabulary = [(token, round(score, 9)) for token, score in vocabulary]
        return [found["added_tokens"], found["model"], vocabulary]

    text = tokenizer_files(files_of(name))["tokenizer.json"].decode()
    assert fields(tokenizers.Tokenizer.from_str(text).to_str()) == fields(text)


# --- what the files beside a vocabulary say ----------------------------------------------------------------------------------


def test_special_tokens_of_the_vocabulary_are_those_of_the_model() -> None:
    """Without other files, sentencepiece's own special tokens end an answer and begin a prompt."""
    made = tokenizer_files({"tokenizer.model": files_of("gemma")["tokenizer.model"]})
    special = json.loads(made["special_tokens_map.json"])
    assert special == {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    assert tokenizers.Tokenizer.from_str(made["tokenizer.json"].decode()).encode("").tokens == ["<bos>"]


def test_former_names_of_added_tokens_are_read() -> None:
    files = files_of("llama") | {"added_tokens.json": b'{"<|call|>": 700, "<note>": 701}'}
    files["special_tokens_map.json"] = b'{"additional_special_tokens": ["<|call|>"]}'
    tokenizer = read(files)
    assert tokenizer.encode("a<|call|>b<note>", add_special_tokens=False).ids.count(700) == 1
    assert {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special} >= {"<|call|>", "<s>"}
    assert not tokenizer.get_added_tokens_decoder()[701].special


def test_ends_are_as_the_configuration_says() -> None:
    tokenizer = read(files_of("llama", add_bos_token=False, add_eos_token=True))
    assert tokenizer.encode("").tokens == ["</s>"]
    assert read(files_of("gpt2", add_bos_token=True)).encode("").tokens == ["<|endoftext|>"]


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_a_class_that_no_file_names_is_the_usual_one(name: str) -> None:
    files = files_of(name, tokenizer_class=None) | {"config.json": b'{"model_type": "qwen3"}' if name == "qwen2" else b"{}"}
    assert [read(files).encode(text).ids for text in STRINGS] == [read(files_of(name)).encode(text).ids for text in STRINGS]


# --- merges ------------------------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.text("abé", min_size=1, max_size=6), st.integers(-9, 0), min_size=1, max_size=60),
    st.lists(st.text("abé", max_size=12), max_size=20),
    st.data(),
)
def test_merges_that_never_happen_are_left_out(scores: dict[str, int], texts: list[str], data: st.DataObject) -> None:
    """With a merge for each way to split a piece, all texts become the same tokens. At most one way to make a piece is left."""
    ids = {piece: id for id, piece in enumerate(["?", *scores])}
    kinds = [UNKNOWN, *data.draw(st.lists(st.sampled_from((1, 1, 1, 1, USER_DEFINED)), min_size=len(scores), max_size=len(scores)))]
    merges = merges_by_score(ids, kinds, [0.0, *map(float, scores.values())])
    made = ["".join(pair) for pair in merges]
    assert len(set(made)) == len(made)
    normal = [piece for piece in scores if kinds[ids[piece]] == 1]
    ways = [
        (piece[:cut], piece[cut:])
        for piece in sorted(normal, key=lambda piece: (-scores[piece], ids[piece]))
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    of_all, of_needed = (tokenizers.Tokenizer(models.BPE(ids, some, unk_token="?")) for some in (ways, merges))
    for text in (*texts, *scores):
        assert of_needed.encode(text).ids == of_all.encode(text).ids


def num_calls(pieces: Sequence[str]) -> int:
    """Count the calls of functions, and the steps of loops, with which merges are derived."""
    calls = list[str]()
    before = sys.getprofile()
    sys.setprofile(lambda _, event, argument: calls.append(event))
    try:
        merges_by_score({piece: id for id, piece in enumerate(pieces)}, [1] * len(pieces), [0.0] * len(pieces))
    finally:
        sys.setprofile(before)
    return len([event for event in calls if event in ("call", "c_call")])


@pytest.mark.parametrize(
    "pieces",
    [
        ["a" * (1 << i) for i in range(9)],
        ["a" * i for i in range(1, 100)],
        ["a", "b", *("ab" * (1 << i) for i in range(8)), *("ba" * (1 << i) for i in range(8))],
    ],
)
def test_the_limit_of_long_pieces_counts_the_work_that_they_make(pieces: list[str]) -> None:
    """A hostile file costs a front at most the seconds of work that the limit stands for."""
    most = sum(len(piece) ** 2 for piece in pieces)
    assert most / 4 < num_calls(pieces) <= most


def test_pieces_that_would_take_longer_than_the_limit_are_refused() -> None:
    pieces = ["a" * (1 << i) for i in range(14)]
    with pytest.raises(DamagedFile, match=f"would read 89478485 characters, expected at most {1 << 25}"):
        merges_by_score({piece: id for id, piece in enumerate(pieces)}, [1] * len(pieces), [0.0] * len(pieces))


# --- how a text is split into words ------------------------------------------------------------------------------------------


def test_the_vocabulary_shows_whether_digits_are_split() -> None:
    """SmolLM and StarCoder name GPT-2's class, but merge no digits. In the vocabulary of GPT-2, years are tokens."""
    files = files_of("gpt2")
    assert "2010" in read(files).encode("in 2010").tokens[-1]
    pairs = [line.split() for line in files["merges.txt"].decode().splitlines()[1:]]
    kept = [pair for pair in pairs if not re.search(r"\d.|.\d", decoders.ByteLevel().decode(["".join(pair)]))]
    joined = {"".join(pair) for pair in pairs if pair not in kept}
    vocabulary = {token: id for token, id in json.loads(files["vocab.json"]).items() if token not in joined}
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in kept if set(pair) <= vocabulary.keys())])
    split = read(files | {"vocab.json": json.dumps(vocabulary).encode(), "merges.txt": merges.encode()})
    assert split.pre_tokenizer is not None
    assert [text for text, _ in split.pre_tokenizer.pre_tokenize_str("in 2010")] == ["in", "Ġ", "2", "0", "1", "0"]


def test_marks_belong_to_words_of_qwen_3_5() -> None:
    made = read({**files_of("qwen2"), "config.json": b'{"model_type": "qwen3_5_text"}'})
    text = "हिन्दी भाषा"
    assert made.pre_tokenizer is not None
    assert [text[begin:end] for _, (begin, end) in made.pre_tokenizer.pre_tokenize_str(text)] == ["हिन्दी", " भाषा"]


# --- refusals ----------------------------------------------------------------------------------------------------------------


def with_merge(files: dict[str, bytes], left: str, right: str) -> dict[str, bytes]:
    vocabulary = json.loads(files["vocab.json"])
    vocabulary |= {token: id for id, token in enumerate((left, right, left + right), 1000) if token not in vocabulary}
    merges = files["merges.txt"] + f"\n{left} {right}\n".encode()
    return {**files, "vocab.json": json.dumps(vocabulary).encode(), "merges.txt": merges}


LLAMA, GPT2 = files_of("llama"), files_of("gpt2")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"vocab.txt": b"x"}, r"^vocab\.txt cannot replace it$"),
        ({"spiece.model": b"x", "vocab.txt": b"{}"}, r"^spiece\.model and vocab\.txt cannot replace it$"),
        ({"tekken.json": b"{}"}, r"^tekken\.json cannot replace it: tekken\.json is damaged: .*missing required field"),
        ({"vocab.json": b"{}"}, r"^vocab\.json cannot replace it: merges\.txt is missing"),
        ({"tokenizer.model": b""}, r"^tokenizer\.model cannot replace it: it has 0 pieces"),
        ({"tokenizer.model": b"x"}, "a field has|an integer does not end|wire type"),
        ({"tokenizer.model": LLAMA["tokenizer.model"][:500]}, "a field has .* bytes, expected at most"),
        ({"tokenizer.model": b"IQ== 0\nIg== 1\n"}, "it is a vocabulary of tiktoken"),
        ({**LLAMA, "tokenizer_config.json": b'{"tokenizer_class": "T5Tokenizer"}'}, "is 'T5Tokenizer'; expected one of CodeLlama"),
        ({**GPT2, "tokenizer_config.json": b'{"tokenizer_class": "CLIPTokenizer"}'}, "is 'CLIPTokenizer'; expected one of CodeGen"),
        ({**LLAMA, "tokenizer_config.json": b'{"legacy": 3}'}, r"legacy in tokenizer_config\.json is 3, expected true or false"),
        ({**LLAMA, "tokenizer_config.json": b"["}, r"tokenizer_config\.json is not JSON"),
        ({**LLAMA, "added_tokens.json": b'{"a": -1}'}, r"the id of a token in added_tokens\.json is -1"),
        ({**LLAMA, "special_tokens_map.json": b'{"pad_token": 7}'}, "pad_token is 7, expected a text"),
        ({**GPT2, "vocab.json": b'{"a": "b"}'}, r"vocab\.json is damaged"),
        ({**GPT2, "vocab.json": b'{"a": 1, "b": 1}'}, "expected an id of its own for each token"),
        ({**GPT2, "merges.txt": b"#version: 0.2\na b c\n"}, r"merges\.txt is damaged: line 2 is 'a b c'"),
        (with_merge(GPT2, "(", "s"), r"they do not say how a text is split into words, and the token '\(s' shows"),
        ({**files_of("unigram"), "added_tokens.json": b'{"a": 9999}'}, "no token has the id [0-9]+, and a token has the id 9999"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_exactly_is_refused(files: dict[str, bytes], said: str) -> None:
    with pytest.raises(Unreadable, match=said):
        tokenizer_files(files)


@pytest.mark.parametrize("files", [LLAMA, GPT2])
def test_a_vocabulary_of_another_format_beside_it_changes_nothing(files: dict[str, bytes]) -> None:
    """A tekken.json of an early version states no special tokens, so it cannot be read; files beside it can."""
    assert tokenizer_files({**files, "tekken.json": b"{}"}) == tokenizer_files(files)


def test_a_part_of_a_vocabulary_beside_a_whole_one_changes_nothing() -> None:
    with pytest.raises(Unreadable, match=r"^tekken\.json cannot replace it"):
        tokenizer_files({"vocab.json": GPT2["vocab.json"], "tekken.json": b"{}"})


def test_a_folder_without_a_vocabulary_has_none() -> None:
    assert tokenizer_files({"tokenizer_config.json": b"{}", "config.json": b"{}"}) == {}


@given(st.binary(max_size=400), st.integers(0, len(LLAMA["tokenizer.model"])))
def test_damaged_files_are_refused_or_read(noise: bytes, at: int) -> None:
    """No content crashes the reader. What it accepts encodes texts."""
    content = LLAMA["tokenizer.model"]
    for damaged in (noise, content[:at] + noise + content[at + len(noise) :]):
        try:
            made = tokenizer_files({"tokenizer.model": damaged})
        except Unreadable:
            continue
        tokenizers.Tokenizer.from_str(made["tokenizer.json"].decode()).encode("the text")


def test_integers_are_signed() -> None:
    (found,) = protobuf.fields(memoryview(bytes([40 << 3 & 0x7F | 0x80, 40 >> 4, *[0xFF] * 9, 1])))
    assert (found[0], protobuf.number(found[1])) == (40, -1)
