"""An answer that must be calls ends after the calls that the model wants, and nothing but calls and thoughts becomes part of it."""

from __future__ import annotations

import pytest

from server.text.dialects.format import AnswerRules
from server.text.dialects.registry import FORMATS
from server.text.parts import CallArguments, CallStart, Content, Part
from tests.server.text.dialects.written import TOOLS, WRITERS
from tests.server.text.vocabulary import accepts

ADD, OTHER, NOW = ("add", {"a": 1}), ("add", {"a": 12}), ("now", {})


def parse(name: str, pieces: list[str]) -> tuple[list[Part], bool, int]:
    """Return the parts of a demanded answer, whether the parser has ended it, and the number of its calls."""
    form = FORMATS[name]
    parser = AnswerRules(form, form.thoughts[0], splits=True, tools=TOOLS, demanded=True).parser()
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
        if parser.done:
            break
    return parts + parser.finish(), parser.done, parser.num_calls


def calls_of(parts: list[Part]) -> list[tuple[str, str]]:
    arguments = ["".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == start.index) for start in starts(parts)]
    return [(start.name, text) for start, text in zip(starts(parts), arguments, strict=True)]


def starts(parts: list[Part]) -> list[CallStart]:
    return [part for part in parts if isinstance(part, CallStart)]


@pytest.mark.parametrize("name", WRITERS)
def test_text_after_a_call_ends_the_answer(name):
    text = WRITERS[name]([ADD, NOW])
    parts, done, num_calls = parse(name, [*text, *"\n\nThe sum is 3.", *text])
    assert done and num_calls == 2 and [start.name for start in starts(parts)] == ["add", "now"]
    assert not any(isinstance(part, Content) for part in parts)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_repeated_call_is_cut(name, is_whole):
    """Calls that begin alike are both kept; a call that is the same as an earlier one ends the answer."""
    text = WRITERS[name]([ADD, OTHER, NOW, OTHER, ADD])
    parts, done, num_calls = parse(name, [text] if is_whole else [*text])
    assert done and num_calls == 3
    assert [(start.index, start.name) for start in starts(parts)] == [(0, "add"), (1, "add"), (2, "now")]
    once = parse(name, [WRITERS[name]([ADD, OTHER, NOW])])
    assert calls_of(parts) == calls_of(once[0]) and not once[1]


@pytest.mark.parametrize("name", WRITERS)
def test_wherever_an_answer_is_cut_off_it_has_no_content(name):
    text = WRITERS[name]([ADD, NOW])
    for end in range(len(text)):
        parts, _, num_calls = parse(name, [*text[:end]])
        assert not any(isinstance(part, Content) for part in parts), text[:end]
        assert len(starts(parts)) - num_calls in (0, 1)


@pytest.mark.parametrize("name", WRITERS)
def test_the_grammar_lets_the_model_stop_calling(name):
    """After a call, a mask must not leave only another call."""
    form = FORMATS[name]
    several, one = (form.forced_calls(TOOLS, {}, several=several) for several in (True, False))
    text = WRITERS[name]([ADD])
    for rest in ["", "\n\nThe sum", " so"]:
        assert accepts(several, text + rest), rest
    assert not accepts(one, text + "\n\nThe sum")
    opening = form.call_syntax.opening
    assert not opening or not accepts(several, f"{text}\n{opening}1")
