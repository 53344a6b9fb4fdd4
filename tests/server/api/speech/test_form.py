"""The fields of the forms that ask for a transcript: how lists are written, and which names are unknown."""

from __future__ import annotations

import pytest

from server.api.speech.form import SpeechForm, read_form
from server.errors import ApiError
from server.http.multipart import Form


def read(*fields: tuple[str, str], strict: bool = False, translates: bool = False) -> SpeechForm:
    form = Form("multipart/form-data; boundary=b", lambda _data: None)
    form.filename = "a.wav"
    for name, value in fields:
        form.values.setdefault(name, []).append(value)
    return read_form(form, strict=strict, translates=translates)


def refusal(*fields: tuple[str, str], strict: bool = False, translates: bool = False) -> tuple[str, str | None]:
    with pytest.raises(ApiError) as caught:
        read(*fields, strict=strict, translates=translates)
    return caught.value.kind.code, caught.value.param


@pytest.mark.parametrize("names", [("", ""), ("[]", "[]"), ("[0]", "[1]"), ("[7]", "")])
def test_lists_are_written_in_several_ways(names: tuple[str, str]) -> None:
    first, second = (f"timestamp_granularities{name}" for name in names)
    asked = read((first, "word"), (second, "segment"), ("response_format", "verbose_json"), strict=True)
    assert asked.times == {"word", "segment"} and not asked.ignored
    assert read((f"include{names[0]}", "logprobs"), strict=True).tells_logprobs


@pytest.mark.parametrize("name", ["timestamp_granularities", "timestamp_granularities[]", "include[0]", "known_speaker_names[]"])
def test_an_empty_list_is_absent(name: str) -> None:
    assert read((name, ""), strict=True) == read()


@pytest.mark.parametrize(
    "name",
    [
        "language[]",
        "prompt[]",
        "temperature[x]",
        "model[0]",
        "include[x]",
        "timestamp_granularities[0][1]",
        "include[",
        "chunking_strategies[a]",
    ],
)
def test_brackets_elsewhere_make_a_name_unknown(name: str) -> None:
    assert read((name, "de")).ignored == (name,)
    assert refusal((name, "de"), strict=True) == ("unknown_field", name)


def test_the_parts_of_a_strategy_are_known() -> None:
    assert read(("chunking_strategy[type]", "server_vad"), ("chunking_strategy", "auto"), strict=True) == read()


@pytest.mark.parametrize("brackets", ["", "[]", "[0]"])
def test_speakers_are_not_told_apart(brackets: str) -> None:
    assert refusal((f"known_speaker_names{brackets}", "Ada")) == ("unsupported_field", "known_speaker_names[]")


@pytest.mark.parametrize("name", ["language", "language[]", "language[0]"])
def test_translations_have_no_language(name: str) -> None:
    assert refusal((name, "de"), translates=True) == ("unsupported_field", "language")


@pytest.mark.parametrize(("name", "param"), [("include[3]", "include[]"), ("timestamp_granularities[0]", "timestamp_granularities[]")])
def test_items_are_checked(name: str, param: str) -> None:
    assert refusal((name, "letter")) == ("invalid_value", param)
