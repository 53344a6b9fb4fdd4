"""Models write calls as plain JSON, often in a fenced block, although their template shows another format."""

from __future__ import annotations

import json

import pytest

from server.text.dialects.calls.plain_calls import PlainCallParser
from server.text.parts import CallArguments, CallStart, Content, Part

NAMES = {"add", "now"}
CALL = '{"name": "add", "arguments": {"a": 1, "b": "}"}}'
INDENTED = json.dumps(json.loads(CALL), indent=2)
FOUND = ("add", {"a": 1, "b": "}"})


def parse(pieces: list[str], max_calls: int | None = None) -> tuple[str, list[tuple[str, dict]]]:
    parser = PlainCallParser(NAMES, max_calls)
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
    ],
)
def test_other_text_stays_content(text):
    for pieces in ([text], [*text], [text[:7], text[7:20], text[20:]]):
        assert parse(pieces) == (text, []), pieces


def test_content_is_not_held_back_longer_than_its_first_key():
    parser = PlainCallParser(NAMES)
    assert parser.push('```json\n{"city": "Paris"') == [Content('```json\n{"city": "Paris"')]
    assert parser.push(", 1 ") == [Content(", 1")]


def test_no_more_calls_than_allowed():
    assert parse([f"{CALL}\n{CALL}\nend"], max_calls=1) == ("", [FOUND])
