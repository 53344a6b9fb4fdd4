"""Tools are described as text if the chat template shows none, and calls and results of earlier turns become text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.text.dialects.dialect import Dialect
from server.text.dialects.preamble import described
from server.text.templates.built_in import BUILT_IN
from server.text.templates.template import ChatTemplate
from tests.doubles.worker import ByteTokenizer

ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
PLAIN = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
STRICT = (
    "{% for message in messages %}{% if message.role == 'system' or (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)
QWEN2_AUDIO = json.loads((Path(__file__).parents[3] / "golden/listening_models/qwen2_audio/tokenizer_config.json").read_text())
TURNS = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    {"role": "tool", "tool_call_id": "other", "content": "3"},
    {"role": "user", "content": "Go on."},
]


def dialect_of(source: str) -> Dialect:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = ChatTemplate(source, {})
    return Dialect.of(tokenizer, None, None)


@pytest.mark.parametrize(("source", "has_system"), [(PLAIN, True), (STRICT, False)])
def test_a_template_without_tools_is_noticed(source, has_system):
    dialect = dialect_of(source)
    assert (dialect.reads_tools, dialect.writes_calls, dialect.has_system) == (False, False, has_system)


@pytest.mark.parametrize(("source", "with_audio"), [(BUILT_IN["voxtral"], False), (QWEN2_AUDIO["chat_template"], True)])
def test_a_template_that_refuses_a_system_message_beside_audio_is_noticed(source, with_audio):
    dialect = dialect_of(source)
    assert (dialect.has_system, dialect.has_system_with_audio) == (True, with_audio)


@pytest.mark.parametrize("has_system", [True, False])
def test_tools_are_described_in_the_first_message(has_system):
    for given in ([], [{"role": "system", "content": "Be brief."}] if has_system else []):
        messages = described([*given, TURNS[0]], [ADD], has_system=has_system, writes_calls=False)
        first = messages[0]
        assert first["role"] == ("system" if has_system else "user")
        assert json.dumps(ADD["function"]) in first["content"] and '{"name": "function", "arguments"' in first["content"]
        assert not given or first["content"].startswith("Be brief.")
        assert messages[-1]["content"].endswith("1 + 1?") and len(messages) == 1 + has_system


def test_calls_and_results_become_text():
    messages = described(TURNS, None, has_system=True, writes_calls=False)
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1] == {"role": "assistant", "content": '{"name": "add", "arguments": {"a": 1}}'}
    assert messages[2]["content"] == "Result of add:\n2\n\nResult of the function:\n3\n\nGo on."
    assert described(TURNS, None, has_system=True, writes_calls=True) == TURNS
    assert ChatTemplate(STRICT, {}).render(described(TURNS, [ADD], has_system=False, writes_calls=False))
