"""Messages in the Harmony format, with several channels, are parsed into texts, thoughts and calls. llguidance checks what the constraints
allow."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from server.constraints.process.sources import grammar_of
from server.constraints.process.wire import Source
from server.messages import Constraint, ConstraintKind
from server.text.dialects.dialect import Dialect
from server.text.dialects.formats.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MARKERS,
    MAX_HEADER,
    MESSAGE,
    RETURN,
    START,
    ChannelParser,
    Harmony,
)
from server.text.dialects.tool import ToolSchema
from server.text.parts import CallArguments, CallStart, Content, Part, Reasoning
from server.text.templates.template import ChatTemplate
from tests.doubles.worker import ByteTokenizer

NAMES = frozenset({"add", "now"})
ANALYSIS, FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{CHANNEL}final{MESSAGE}"
NEXT = f"{END}{START}assistant"
TO_ADD = f"{CHANNEL}commentary to=functions.add {CONSTRAIN}json{MESSAGE}"


def joined(parts: list[Part]) -> list[tuple[str, ...]]:
    """Join neighbouring texts of the same kind. Represent each call by its name."""
    found: list[tuple[str, ...]] = []
    for part in parts:
        kind = type(part).__name__
        if isinstance(part, CallStart):
            assert part.id.startswith("call_")
            found.append((kind, part.name))
        elif found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + part.text)
        else:
            found.append((kind, part.text))
    return found


def parse(text: str, cuts: list[int] | None = None, *, splits: bool = True, names: frozenset[str] = NAMES, most: int | None = None):
    parser, parts, at = ChannelParser(names, most, splits=splits), list[Part](), 0
    sizes = iter(cuts or [])
    while at < len(text):
        size = next(sizes, 1 if cuts is not None else len(text))
        parts += parser.push(text[at : at + size])
        at += size
    parts += parser.finish()
    return joined(parts), parser.num_calls


CASES = [
    (f"{ANALYSIS}hm{NEXT}{FINAL}yes", [("Reasoning", "hm"), ("Content", "yes")]),
    (f"{ANALYSIS}hm{NEXT}{FINAL}yes{RETURN}more", [("Reasoning", "hm"), ("Content", "yes")]),
    (f"{ANALYSIS}hm{NEXT}{TO_ADD}" + '{"a": 1}', [("Reasoning", "hm"), ("CallStart", "add"), ("CallArguments", '{"a": 1}')]),
    (f"{TO_ADD}{CALL}{START}assistant{FINAL}no", [("CallStart", "add"), ("CallArguments", "{}")]),
    (f" to=functions.f{CHANNEL}commentary json{MESSAGE}" + "{}", [("CallStart", "f"), ("CallArguments", "{}")]),
    (f"{CHANNEL}analysis to=now code{MESSAGE}" + "{}", [("CallStart", "now"), ("CallArguments", "{}")]),
    (f'{CHANNEL}analysis to=now code{MESSAGE}print("a\nb")', [("CallStart", "now"), ("CallArguments", 'print("a\nb")')]),
    (f"{CHANNEL}analysis to=python code{MESSAGE}1+1", [("Reasoning", "1+1")]),
    (f"{CHANNEL}commentary{MESSAGE}I look.{NEXT}{FINAL}yes", [("Content", "I look.\n\nyes")]),
    (f"{FINAL}{END}", []),
    (f"{ANALYSIS}cut o", [("Reasoning", "cut o")]),
    (f"{FINAL}a < b <|en", [("Content", "a < b <|en")]),
    (f"{CHANNEL}ana", []),
    ("goes on without a header", [("Content", "goes on without a header")]),
    ("to", [("Content", "to")]),
    (f"to={'x' * MAX_HEADER}{MESSAGE}", [("Content", f"to={'x' * MAX_HEADER}{MESSAGE}")]),
    ("", []),
]


@pytest.mark.parametrize(("text", "parts"), CASES)
def test_messages_become_parts(text, parts):
    for cuts in (None, []):
        assert parse(text, cuts) == (parts, sum(kind == "CallStart" for kind, _ in parts))


pieces = st.lists(
    st.sampled_from([*MARKERS, "assistant", "analysis", "final", " to=functions.add", "<|", "mess", "{}", "\n", "a", "to"]), max_size=12
)


@given(pieces.map("".join), st.lists(st.integers(1, 6), max_size=20), st.booleans(), st.sampled_from([None, 1]))
@example("to=" + "x" * (MAX_HEADER - 3) + MESSAGE, [MAX_HEADER + 3], True, None)
@example("to=" + "x" * (MAX_HEADER - 2) + MESSAGE, [MAX_HEADER + 3], True, None)
def test_the_same_for_every_cut(text, cuts, splits, most):
    assert parse(text, cuts, splits=splits, most=most) == parse(text, splits=splits, most=most)


def test_thoughts_that_stay_in_the_content_keep_their_markers():
    assert parse(f"{ANALYSIS}hm{NEXT}{FINAL}yes", splits=False)[0] == [("Content", f"{ANALYSIS}hm{END}yes")]


def test_without_tools_a_call_is_content():
    assert parse(TO_ADD + "{}", names=frozenset())[0] == [("Content", "{}")]


def test_no_more_calls_than_are_allowed():
    parser = ChannelParser(NAMES, 1, splits=True)
    parser.push(TO_ADD + "{}" + NEXT)
    assert parser.done and parser.push(TO_ADD) == parser.finish() == []


def test_reasoning_is_told_by_the_body():
    parser = ChannelParser(NAMES, None, splits=True)
    seen = []
    for text in (CHANNEL, "analysis", MESSAGE, "hm", END, START):
        parser.push(text)
        seen.append(parser.reasons)
    assert seen == [False, False, True, True, False, False]


# --- the Harmony dialect -------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}"
    "{% for call in message.tool_calls or [] %} to=functions.{{ call.function.name }}"
    "<|channel|>commentary json<|message|>{{ call.function.arguments | tojson }}<|call|>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def dialect(*, thinks: bool | None = None) -> Dialect:
    tokenizer = ByteTokenizer(specials=MARKERS)
    tokenizer.chat_template = ChatTemplate(TEMPLATE, {})
    return Dialect.of(tokenizer, None, thinks)


def test_the_template_shows_channels():
    found = dialect()
    assert isinstance(found.format, Harmony) and found.thinks and set(found.specials) == set(MARKERS)
    assert not dialect(thinks=False).thinks


EOS = 256 + len(MARKERS)


class Vocabulary:
    eos_token_id = EOS
    bos_token_id = None
    # llguidance reads this attribute and `special_token_ids`
    tokens = [bytes([i]) for i in range(256)] + [marker.encode() for marker in MARKERS] + [b"<eos>"]
    special_token_ids = [*range(256, EOS + 1)]  # noqa: RUF012

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def accepts(constraint: Constraint, text: str) -> bool:
    """Return whether the constraint allows a text. Each Harmony marker in the text is one token."""
    ids, rest = list[int](), text
    while rest:
        marker = next((marker for marker in MARKERS if rest.startswith(marker)), "")
        ids += [256 + MARKERS.index(marker)] if marker else list(rest[0].encode())
        rest = rest[len(marker) or 1 :]
    matcher = LLMatcher(
        LLTokenizer(TokenizerWrapper(Vocabulary())), grammar_of(Source(constraint.kind, constraint.source, constraint.head))
    )
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


IDS = {marker: 256 + number for number, marker in enumerate(MARKERS)}
TOOLS = [
    ToolSchema("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}),
    ToolSchema("now", None),
]


@pytest.fixture(scope="module")
def channels() -> Dialect:
    found = dialect()
    return Dialect(found.format, found.thoughts, found.thinks, {number: marker.encode() for marker, number in IDS.items()})


@pytest.mark.parametrize("thoughts", ["", f"{ANALYSIS}hm <|{NEXT}", f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}"])
def test_a_demanded_call_comes_behind_thoughts(channels, thoughts):
    demanded = channels.framed(channels.forced_calls(TOOLS, several=True), thinking=False, is_call=True)
    for call, allowed in [
        (TO_ADD + '{"a": 1}', True),
        (TO_ADD + "{}", False),
        (TO_ADD.replace("add", "now") + "{}", True),
        (TO_ADD.replace("add", "other") + "{}", False),
        (f"{FINAL}yes", False),
    ]:
        assert accepts(demanded, thoughts + call) is allowed, call
        if allowed:
            assert parse(thoughts + call)[1] == 1, "the parser must find the forced call"


def test_a_format_holds_in_the_final_channel(channels):
    constraint = channels.framed(Constraint(ConstraintKind.REGEX, "[0-9]+"), thinking=False, is_call=False)
    assert accepts(constraint, f"{FINAL}12") and accepts(constraint, f"{ANALYSIS}hm{NEXT}{FINAL}12")
    assert not accepts(constraint, "12") and not accepts(constraint, f"{FINAL}yes") and not accepts(constraint, f"{ANALYSIS}12")


def test_an_answer_in_json_may_be_a_call_instead(channels):
    answer = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "integer"}')
    calls = channels.forced_calls([ToolSchema("now"), ToolSchema("add")], several=True)
    constraint = channels.framed(answer, thinking=False, is_call=False, calls=calls)
    for thoughts in ("", f"{ANALYSIS}hm{NEXT}"):
        assert accepts(constraint, f"{thoughts}{FINAL}12") and accepts(constraint, thoughts + TO_ADD + '{"a": "x"}')
        for text in ("12", f"{FINAL}yes", TO_ADD.replace("add", "other") + "{}", FINAL + TO_ADD + "{}"):
            assert not accepts(constraint, thoughts + text), text


def test_parts_have_the_types_that_answers_know():
    parts = [part for text, _ in CASES for part in ChannelParser(NAMES, None, splits=True).push(text)]
    assert {type(part) for part in parts} == {Content, Reasoning, CallStart, CallArguments}
