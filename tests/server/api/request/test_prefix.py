"""The part of a request in which its prompt departs from an earlier one has a name."""

from __future__ import annotations

from urllib.parse import unquote

import pytest

from server.api.request.conversation import for_template
from server.api.request.prefix import part_at
from server.api.request.schema import ChatBody
from tests.doubles.worker import NullTemplate

TOOLS = [{"type": "function", "function": {"name": name, "description": f"It {name}s."}} for name in ("read", "write", "search")]
CALL = {"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
MESSAGES = [
    {"role": "system", "content": " You write code. Today is Monday."},
    {"role": "user", "content": "Read it."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "File one"},
    {"role": "assistant", "content": "I write.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "File two"},
    {"role": "user", "content": [{"type": "text", "text": "Go "}, {"type": "text", "text": "on."}]},
]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Monday", "system[0], character 26"),
        ("It reads", "tools[0]"),
        ("It searchs", "tools[2]"),
        ("it.", "user[0], character 5"),
        ('"arguments"', "assistant[0]"),
        ("one", "tool[0], character 5"),
        ("write.", "assistant[1], character 2"),
        ("two", "tool[1], character 5"),
        ("on.", "user[1], character 3"),
    ],
)
def test_a_part_is_named_by_its_role_and_number(text: str, name: str) -> None:
    body = ChatBody.model_validate({"messages": MESSAGES, "tools": TOOLS})
    prompt = NullTemplate().render(for_template(body.messages), tools=TOOLS)
    assert part_at(prompt, prompt.index(text), body) == name


def test_calls_behind_a_text_belong_to_its_message() -> None:
    body = ChatBody.model_validate({"messages": MESSAGES, "tools": TOOLS})
    prompt = NullTemplate().render(for_template(body.messages), tools=TOOLS)
    assert part_at(prompt, prompt.rindex('"arguments"'), body) == "assistant[1]"
    assert part_at(prompt, len(prompt), body) == "template"


def test_a_role_may_have_any_letters(serve):
    server = serve()
    asked = [server.chat(messages=[{"role": "роль", "content": text}]) for text in ("one" + "x" * 200, "one" + "y" * 200)]
    assert [answer.status_code for answer in asked] == [200, 200]
    assert unquote(asked[1].headers["x-prefix-ends"]) == "роль[0], character 3"
