"""A tokenizer that is assembled from the parts of tokenizer.json is the one that the package builds from the whole."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from server.text import tokenizer_json
from server.text.tokenizer_json import read_tokenizer
from tests.server.text.test_tokenizer import TEXT, byte_level, sentencepiece, wordpiece

Fields = dict[str, Any]
ASSEMBLED = {"byte level": byte_level().to_str(), "sentencepiece": sentencepiece().to_str()}


def changed(name: str, change: Callable[[Fields], object]) -> bytes:
    fields = json.loads(ASSEMBLED[name])
    change(fields)
    return json.dumps(fields).encode()


def as_texts(fields: Fields) -> None:
    fields["model"]["merges"] = [" ".join(pair) for pair in fields["model"]["merges"]]


def with_gaps(fields: Fields) -> None:
    fields["model"]["vocab"]["a long token"] = 1000


def with_later_ids(fields: Fields) -> None:
    """The package gives a token that is not in the vocabulary the next id, whatever the file says."""
    fields["added_tokens"].append({**fields["added_tokens"][0], "content": "<later>", "id": 5000, "special": False})


def with_padding(fields: Fields) -> None:
    fields["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}


CHANGES = (lambda _: None, as_texts, with_gaps, with_later_ids, with_padding)


@pytest.fixture
def by_package(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Record the contents that are left to the package."""
    left: list[bytes] = []
    real = tokenizer_json._read_by_package
    monkeypatch.setattr(tokenizer_json, "_read_by_package", lambda content: left.append(content) or real(content))
    return left


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ASSEMBLED)
def test_it_is_the_tokenizer_that_the_package_builds(name: str, change: Callable[[Fields], None], by_package: list[bytes]) -> None:
    content = changed(name, change)
    found, expected = read_tokenizer(content), tokenizers.Tokenizer.from_buffer(content)
    assert by_package == []
    assert json.loads(found.tokenizer.to_str()) == json.loads(expected.to_str())
    assert found.tokenizer.encode(TEXT + "<end><later>").ids == expected.encode(TEXT + "<end><later>").ids
    whole = expected.get_vocab(with_added_tokens=True)
    assert (found.num_ids, found.max_chars) == (max(whole.values()) + 1, max(map(len, whole)))
    assert tokenizer_json._read_by_package(content).num_ids == found.num_ids


@given(st.text())
def test_texts_become_the_same_tokens(text: str) -> None:
    for name, (found, expected) in BOTH.items():
        assert found.encode(text).ids == expected.encode(text).ids, name


BOTH = {name: (read_tokenizer(text.encode()).tokenizer, tokenizers.Tokenizer.from_str(text)) for name, text in ASSEMBLED.items()}


def version_among_merges(fields: Fields) -> None:
    as_texts(fields)
    fields["model"]["merges"].insert(0, "#version: 0.2")


@pytest.mark.parametrize(
    "content",
    [
        wordpiece().to_str().encode(),
        tokenizers.Tokenizer(models.Unigram([("a", 0.0), ("<unk>", -1.0)], unk_id=1)).to_str().encode(),
        changed("byte level", version_among_merges),
        changed("byte level", lambda fields: fields["model"].update(unheard_of=1)),
    ],
)
def test_the_package_reads_other_files_itself(content: bytes, by_package: list[bytes]) -> None:
    found = read_tokenizer(content)
    assert by_package == [content]
    assert json.loads(found.tokenizer.to_str()) == json.loads(tokenizers.Tokenizer.from_buffer(content).to_str())


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields["model"]["merges"].append(["no", "such"]),
        lambda fields: fields["model"].update(merges=["a b c"]),
        lambda fields: fields["model"].update(merges=[["a", "b"], "a b"]),
        lambda fields: fields["model"].update(dropout=2.0),
        lambda fields: fields["model"]["vocab"].update(a=-1),
        lambda fields: fields["model"]["vocab"].update(a=1 << 40),
        lambda fields: fields["model"]["vocab"].update(a="b"),
        lambda fields: fields["model"].update(vocab=None),
        lambda fields: fields.update(model=7),
        lambda fields: fields.update(added_tokens=[{"id": 1}]),
        lambda fields: fields.update(decoder={"type": "unheard of"}),
        lambda fields: fields.pop("model"),
    ],
)
def test_a_damaged_file_is_refused_as_the_package_refuses_it(change: Callable[[Fields], object]) -> None:
    content = changed("byte level", change)
    with pytest.raises(Exception) as expected:  # the package raises bare Exception
        tokenizers.Tokenizer.from_buffer(content)
    with pytest.raises(Exception) as found:
        read_tokenizer(content)
    assert str(found.value) == str(expected.value)


# --- merges with which the package would abort the process --------------------------------------------------------------------


CUT = {"vocab": {"a": 0, "é": 1, "ab": 2}, "merges": [["a", "é"]], "continuing_subword_prefix": "x"}
SOUND = json.loads(ASSEMBLED["byte level"])["model"]


def with_models(*named: dict[str, object], after: str = "}") -> bytes:
    """Return a file that names each of these models, one after the other."""
    fields = json.loads(ASSEMBLED["byte level"])
    del fields["model"]
    return (json.dumps(fields)[:-1] + "".join(f', "model": {json.dumps(model)}' for model in named) + after).encode()


def cut(**changes: object) -> dict[str, object]:
    return {**SOUND, **CUT, **changes}


TWICE = json.dumps(cut(unheard_of=1)).replace('"x"', '"x", "continuing_subword_prefix": null')


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (with_models(cut()), r"the right part of the merge .*'é'.* does not begin with continuing_subword_prefix 'x'"),
        (with_models(cut(merges=["#version: 0.2", "a é"])), "does not begin with"),
        (with_models(cut(unheard_of=1)), "does not begin with"),
        (with_models(cut(vocab={"a": 0, "": 1, "ab": 2}, merges=[["a", ""]])), "does not begin with"),
        (with_models(cut(vocab={"a": 0, "éb": 1, "ab": 2}, merges=[["a", "éb"]], continuing_subword_prefix="é")), "expected ASCII"),
        (with_models(cut(), {**SOUND, "unheard_of": 1}), "names a field twice"),
        (with_models(cut(), after=""), "truncated"),
        (with_models({}).replace(b'"model": {}', b'"model": ' + TWICE.encode()), "names a field twice"),
        (with_models(cut(unheard_of=1)).replace(b'"continuing', b'"\\u0063ontinuing'), "with escapes"),
    ],
    ids=range(9),
)
def test_merges_that_would_abort_the_process_are_refused_before_the_package_sees_them(
    content: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tokenizers.Tokenizer

    class Package:
        @staticmethod
        def from_buffer(given: bytes) -> tokenizers.Tokenizer:
            assert json.loads(given)["model"]["merges"] == [], "the package would join the merges"
            return real.from_buffer(given)

    monkeypatch.setattr(tokenizers, "Tokenizer", Package)
    monkeypatch.setattr(models, "BPE", lambda *_, **__: pytest.fail("the package would join the merges"))
    with pytest.raises((ValueError, msgspec.DecodeError), match=message):
        read_tokenizer(content)


@pytest.mark.parametrize("unheard_of", [{}, {"unheard_of": 1}])
def test_merges_whose_right_parts_continue_a_word_are_read(unheard_of: dict[str, int]) -> None:
    content = with_models(
        {**SOUND, "vocab": {"a": 0, "##é": 1, "aé": 2}, "merges": [["a", "##é"]], "continuing_subword_prefix": "##", **unheard_of}
    )
    assert json.loads(read_tokenizer(content).tokenizer.to_str()) == json.loads(tokenizers.Tokenizer.from_buffer(content).to_str())
