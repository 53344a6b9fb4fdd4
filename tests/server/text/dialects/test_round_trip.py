"""The template of a model should write an earlier answer as the model wrote it, so that the prefix cache has its tokens."""

from __future__ import annotations

import pytest

from server.text.dialects.dialect import Dialect
from server.text.dialects.round_trip import fault_of
from server.text.templates.template import ChatTemplate
from tests.doubles.worker import ByteTokenizer
from tests.server.text.dialects.test_formats import Written
from tests.server.text.dialects.written import WRITERS

HEAD = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
CALLS = "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
FOOT = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>PROMPT{% endif %}"


def fault(source: str) -> str:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = ChatTemplate(source, {})
    return fault_of(tokenizer)


@pytest.mark.parametrize("name", WRITERS)
def test_templates_that_repeat_the_answer(name):
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = Written(name)
    assert fault_of(tokenizer) == ""


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (HEAD + CALLS + FOOT.replace("PROMPT", ""), ""),
        (HEAD + CALLS + FOOT.replace("PROMPT", "<think>\n"), "it writes the beginning of an earlier answer otherwise"),
        ("{% if messages[-1].role != 'tool' %}" + HEAD + CALLS + FOOT.replace("PROMPT", "{% endif %}"), "it writes"),
        (HEAD + "{% if loop.last %}" + CALLS + "{% endif %}" + FOOT.replace("PROMPT", ""), "once results follow"),
    ],
)
def test_templates_that_do_not(source, found):
    assert found in fault(source) and bool(found) == bool(fault(source))


def test_tokens_may_differ_where_the_text_does_not():
    class Joining(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [258 if piece == 1 else piece for piece in text.replace(">\n<", ">\x01<").encode()]

    tokenizer = Joining()
    tokenizer.chat_template = ChatTemplate(HEAD.replace("|>", "|>\n", 1) + CALLS + FOOT.replace("PROMPT", "\n"), {})
    assert "changes their tokens" in fault_of(tokenizer)


def test_the_operator_is_told():
    tokenizer = ByteTokenizer()
    shown = "{% if tools %}{{ tools | tojson }}{% endif %}"
    for source, note in [
        (shown + HEAD + CALLS + FOOT.replace("PROMPT", ""), ""),
        (shown + HEAD + CALLS + FOOT.replace("PROMPT", "<think>"), "computed again"),
        (HEAD + FOOT.replace("PROMPT", ""), "shows no tools"),
    ]:
        tokenizer.chat_template = ChatTemplate(source, {})
        assert note in " ".join(notes := Dialect.of(tokenizer, None, None).notes) and bool(note) == bool(notes)
