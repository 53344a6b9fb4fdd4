"""A model's dialect (its markers for thoughts and calls) is detected from its chat template. The templates here resemble those of real
models."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from server.text.dialect import Dialect
from server.text.templates.template import ChatTemplate
from tests.doubles.worker import ByteTokenizer

CALLS = "{% for message in messages %}{% for call in message.tool_calls or [] %}CALL{% endfor %}{% endfor %}"


@dataclass
class WithTemplate(ByteTokenizer):
    source: str = ""

    def __post_init__(self) -> None:
        super().__init__(specials=["<think>", "</think>"])
        self.chat_template = ChatTemplate(self.source, {})


@pytest.mark.parametrize(
    ("writes", "name"),
    [
        ('<tool_call>{"name": "{{ call.function.name }}"}</tool_call>', "hermes"),
        ("[TOOL_CALLS][{{ call.function | tojson }}]", "mistral"),
        ('{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}', "llama3"),
        ("{{ call.function | tojson }}", "json"),
        ("{{ raise_exception('no tools here') }}", "json"),
    ],
)
def test_the_template_shows_how_calls_are_written(writes, name):
    dialect = Dialect.of(WithTemplate(CALLS.replace("CALL", writes)), None, None)
    assert dialect.tools.name == name
    assert dialect.thinks and dialect.shown == {258: b"<think>", 259: b"</think>"}


def test_names_win():
    dialect = Dialect.of(WithTemplate(CALLS), "qwen", False)
    assert dialect.tools.name == "hermes" and not dialect.thinks


def test_without_a_template():
    dialect = Dialect.of(ByteTokenizer(chat=False), None, None)
    assert dialect.tools.name == "json" and not dialect.thinks and dialect.shown == {}


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="known are: hermes"):
        Dialect.of(ByteTokenizer(), "nope", None)


def test_a_marker_may_be_one_token_without_being_special():
    """A marker may be a token that the tokenizer does not list as special, as in Qwen's vocabularies. The dialect includes such markers,
    because a grammar must name their tokens."""
    tokenizer = WithTemplate(CALLS)
    tokenizer.special_ids = frozenset()
    assert Dialect.of(tokenizer, None, None).shown == {258: b"<think>", 259: b"</think>"}
