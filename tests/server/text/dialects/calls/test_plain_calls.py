"""Models write calls as plain JSON, often in a fenced block, although their template shows another format."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from server.messages import Constraint, ConstraintKind
from server.text.dialects.calls.plain_calls import LAYOUTS, PlainCallParser, PlainCalls, plain_grammar
from server.text.dialects.format import AnswerRules
from server.text.dialects.registry import FORMATS
from server.text.dialects.tool import ToolSchema
from server.text.parts import CallArguments, CallStart, Content, Part
from tests.doubles.worker import ByteTokenizer
from tests.server.text.vocabulary import accepts

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
OFFERED = [ToolSchema("add", SCHEMA), ToolSchema("now", {})]
CALL = '{"name": "add", "arguments": {"a": 1, "b": "}"}}'
INDENTED = json.dumps(json.loads(CALL), indent=2)
FOUND = ("add", {"a": 1, "b": "}"})
# small models repeat the definitions of tools as the prompt has them
DEFINITION = json.dumps({"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}})


def parse(pieces: list[str], max_calls: int | None = None) -> tuple[str, list[tuple[str, dict]]]:
    parser = PlainCallParser(OFFERED, max_calls)
    parts: list[Part] = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    starts = [part for part in parts if isinstance(part, CallStart)]
    assert [start.index for start in starts] == list(range(parser.num_calls))
    texts = {part.index: part.text for part in parts if isinstance(part, CallArguments)}
    content = "".join(part.text for part in parts if isinstance(part, Content))
    return content, [(start.name, json.loads(texts[start.index])) for start in starts]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"```json\n{INDENTED}\n```", "", [FOUND]),
        (f"```\n{CALL}\n```\n", "", [FOUND]),
        (f"I add.\n\n```json\n{CALL}\n```\n\nDone.", "I add.\n\nDone.", [FOUND]),
        (f"{CALL}\n{CALL}", "", [FOUND, FOUND]),
        (f"```json\n[{CALL}, {CALL}]\n```", "", [FOUND, FOUND]),
        (f"```json\n{CALL}\n```\n```json\n{CALL}\n```", "", [FOUND, FOUND]),
        (f"Sure:\n{CALL}", "Sure:", [FOUND]),
        (f"{{{CALL}}}\n{{{CALL}}} end", "end", [FOUND, FOUND]),
        ('{"name": "now", "parameters": {}}', "", [("now", {})]),
        ('{"name": "now", "arguments": "{}"}', "", [("now", {})]),
        ('{"type": "function", "function": {"name": "now", "arguments": {}}}', "", [("now", {})]),
        ('{"id": "a", "type": "function", "name": "now", "why": "so", "arguments": {}}', "", [("now", {})]),
        ('{"name": "now", "description": "Tell the time.", "parameters": {"zone": "UTC"}}', "", [("now", {"zone": "UTC"})]),
        (f'{CALL}\n{{"name": "other", "arguments": {{}}}}', '{"name": "other", "arguments": {}}', [FOUND]),
    ],
)
def test_calls_in_plain_json(text, content, calls):
    for pieces in ([text], [*text], [text[:7], text[7:20], text[20:]]):
        assert parse(pieces) == (content, calls), pieces


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "plain\ntext\n",
        '```json\n{"name": "other", "arguments": {}}\n```\nend',
        '{"name": "add"}',
        '{"name": "add", "arguments": [1]}',
        '{"city": "Paris", "name": "add", "arguments": {}}',
        f"See {CALL}",
        f"```python\nprint(1)\n```\n\nand {CALL}\n",
        "```json\n[1, 2]\n```",
        '{"name": "add", "arguments": {"a": 1',
        "``` {",
        "{{ user.name }}",
        '{{"name": "add"}}',
        "[",
        "{}",
        "`code` here",
        f"<tools>\n{DEFINITION}\n</tools>",
        DEFINITION,
        json.dumps(json.loads(DEFINITION)["function"], indent=2),
        '{"name": "now", "description": "Tell the time.", "parameters": {}}',
        '{"type": "function", "function": {"name": "now", "description": "Tell the time.", "parameters": {}}}',
    ],
)
def test_other_text_stays_content(text):
    for pieces in ([text], [*text], [text[:7], text[7:20], text[20:]]):
        assert parse(pieces) == (text, []), pieces


def said(parts: list[Part]) -> str:
    assert all(isinstance(part, Content) for part in parts)
    return "".join(part.text for part in parts if isinstance(part, Content))


def test_content_is_not_held_back_longer_than_its_first_key():
    parser = PlainCallParser(OFFERED)
    assert said(parser.push('```json\n{"city": "Paris"')) == '```json\n{"city": "Paris"'
    assert said(parser.push(", 1 ")) == ", 1"


def test_an_object_is_no_call_once_it_has_a_key_that_no_call_has_before_its_name():
    parser = PlainCallParser(OFFERED)
    assert parser.push('{"id": 7, "type": "river", ') == []
    assert said(parser.push('"length": 6')) == '{"id": 7, "type": "river", "length": 6'
    assert said(parser.push("650}")) == "650}"


@pytest.mark.parametrize("held", ["```", "```json\n[", '{"name": "add",'])
def test_text_that_was_held_back_comes_before_a_call_of_another_format(held):
    text = f"Look:\n{held}\n<tool_call>\n{CALL}\n</tool_call>\n{CALL}\nend"
    for pieces in ([text], [*text], [text[:7], text[7:20], text[20:]]):
        parser = AnswerRules(FORMATS["hermes"], tools=OFFERED).parser()
        parts = [*(part for piece in pieces for part in parser.push(piece)), *parser.finish()]
        first, second = (at for at, part in enumerate(parts) if isinstance(part, CallStart))
        assert said(parts[:first]) == f"Look:\n{held}", pieces
        assert all(isinstance(part, CallArguments) and part.index == 0 for part in parts[first + 1 : second]), pieces
        assert said(parts[second + 2 :]) == "end", pieces


def test_no_more_calls_than_allowed():
    assert parse([f"{CALL}\n{CALL}\nend"], max_calls=1) == ("", [FOUND])


# --- what holds a plain call to its schema ---------------------------------------------------------------------------------

TOOLS = [
    ToolSchema("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    ToolSchema("now", None),
]
PLAIN = Constraint(ConstraintKind.GRAMMAR, plain_grammar(TOOLS))


def trained() -> tokenizers.Tokenizer:
    """Return a tokenizer with merges that cross the boundaries of JSON's names and signs."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    made.train_from_iterator(['{"name": "add", "arguments": {"a": 1}}', '{"name":"now"', '"arguments":{"'] * 9, trainer)
    return made


class Pieces:
    """The tokenizers library as the server's interface."""

    def __init__(self, made: tokenizers.Tokenizer) -> None:
        self.made = made

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.made.encode(text, add_special_tokens=add_special_tokens).ids

    def token_bytes(self, token_id: int) -> bytes:
        return self.made.decode([token_id]).encode()


@pytest.mark.parametrize("spaces", [(None, (", ", ": ")), (None, (",", ":")), (2, None), (4, None), ("\t", None)])
@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Pieces(trained())], ids=["bytes", "merges"])
def test_a_grammar_begins_with_the_key_of_the_arguments(tokenizer, key, spaces):
    indent, separators = spaces
    written = json.dumps({"name": "add", key: {"a": 1}}, indent=indent, separators=separators)
    ids = tokenizer.encode(written, False)
    ends = [
        (at + len(beginning), beginning)
        for beginning in PlainCalls(tokenizer).beginnings(["add", "now"])
        for at in range(len(ids))
        if tuple(ids[at : at + len(beginning)]) == beginning
    ]
    (end, beginning), *_ = sorted(ends)
    begun = b"".join(map(tokenizer.token_bytes, beginning)).decode()
    rest = b"".join(map(tokenizer.token_bytes, ids[end:])).decode()
    assert written.endswith(begun + rest) and key in begun
    assert accepts(PLAIN, begun + rest)
    assert not accepts(PLAIN, begun + rest.replace("1", '"one"')) and not accepts(PLAIN, begun + rest.replace('"a"', '"b"'))


@pytest.mark.parametrize("text", ['name": "other", "arguments": {}}', 'name": "add", "arguments": {}}', 'name": "now", "arguments": [1]}'])
def test_other_calls_are_refused(text):
    assert not accepts(PLAIN, text)
    assert accepts(PLAIN, 'name": "now", "arguments": {"x": [1, "}"]}}')


@pytest.mark.parametrize("name", ["add", "_add", "add_", "a-d", "arguments", "name", "d", "0", "_", "-"])
def test_the_shared_tokens_of_names_are_those_of_each_layout(name):
    made = PlainCalls(Pieces(trained()))
    each = [made._read(name, layout) for layout in LAYOUTS]
    assert set(made.beginnings([name])) == {one.whole for one in each if one is not None}
    assert len(each) == 14


def test_tokens_that_do_not_spell_a_call_begin_none():
    class Lossy(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return super().encode(text.upper(), add_special_tokens)

    assert PlainCalls(Lossy()).beginnings(["add"]) == ()
