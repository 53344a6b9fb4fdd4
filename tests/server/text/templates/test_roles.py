"""A template that refuses an order of roles gets the conversation in one that it accepts."""

from __future__ import annotations

from typing import Any

import pytest

from server.text.templates.errors import TemplateRejection
from server.text.templates.limits import Limits
from server.text.templates.template import ChatTemplate

# Gemma 3's template in short: the roles of all messages after the system message alternate.
ALTERNATING = (
    "{% set rest = messages %}{% if messages[0].role == 'system' %}{{ '[' + messages[0].content + ']' }}{% set rest = messages[1:] %}"
    "{% endif %}{% for message in rest %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate at ' ~ loop.index0) }}{% endif %}{{ message.role ~ '<' ~ message.content ~ '>' }}{% endfor %}"
)
# Mistral's template in short: calls and results do not count.
WITH_CALLS = (
    "{% set ns = namespace(index=0) %}{% for message in messages %}"
    "{% if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}"
    "{% if (message.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{{ message.role ~ '<' ~ message.content ~ '>' }}{% endfor %}"
)
# Qwen 3.5's template in short.
SYSTEM_FIRST = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the "
    "beginning.') }}{% endif %}{{ message.role ~ '<' ~ message.content ~ '>' }}{% endfor %}"
)


def said(*messages: tuple[str, Any], **last: Any) -> list[dict[str, Any]]:
    made = [{"role": role, "content": content} for role, content in messages]
    made[-1].update(last)
    return made


CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        (said(("user", "a"), ("user", "b")), "user<a\n\nb>"),
        (said(("system", "s"), ("system", "t"), ("user", "a"), ("user", ""), ("user", "b")), "[s\n\nt]user<a\n\nb>"),
        (said(("user", "a"), ("assistant", "b"), ("assistant", "c"), ("user", "d")), "user<a>assistant<b\n\nc>user<d>"),
        (said(("user", "a"), ("assistant", "b"), ("system", "t"), ("user", "c")), "user<a>assistant<b>user<t\n\nc>"),
        (said(("user", "a"), ("assistant", "b"), ("system", "t")), "user<a>assistant<b>user<t>"),
    ],
)
def test_roles_that_do_not_alternate_are_joined(messages: list[dict[str, Any]], prompt: str) -> None:
    assert ChatTemplate(ALTERNATING, {}).render(messages) == prompt


def test_text_behind_results_belongs_to_the_last_one() -> None:
    """Anthropic's clients send results and further text in one message of the user."""
    called = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    messages = [*said(("user", "a")), called, *said(("tool", "1"), ("tool", "2"), ("user", "b"), ("user", "c"))]
    assert ChatTemplate(WITH_CALLS, {}).render(messages) == "user<a>assistant<>tool<1>tool<2\n\nb\n\nc>"


def test_later_system_messages_become_the_users() -> None:
    messages = said(("system", "s"), ("user", "a"), ("assistant", "b"), ("system", "t"), ("user", "c"))
    assert ChatTemplate(SYSTEM_FIRST, {}).render(messages) == "system<s>user<a>assistant<b>user<t>user<c>"


def test_a_later_turn_extends_the_prompt_of_an_earlier_one() -> None:
    """The prefix cache finds what the prompts share. A later system message must not join the user's messages before it, which the template
    accepts."""
    template = ChatTemplate(SYSTEM_FIRST, {})
    first = said(("system", "s"), ("user", "a"), ("user", "b"))
    again = template.render([*first, *said(("assistant", "c"), ("system", "t"), ("user", "d"))])
    assert again.startswith(template.render(first)) and again.endswith("assistant<c>user<t>user<d>")
    assert template.render([*first, *said(("system", "a reminder that the next turn lacks"))]).startswith(template.render(first))


def test_a_conversation_that_the_template_accepts_stays_as_it_is() -> None:
    plain = ChatTemplate("{% for message in messages %}{{ message.role ~ '<' ~ message.content ~ '>' }}{% endfor %}", {})
    messages = said(("system", "s"), ("user", "a"), ("user", "b"), ("system", "t"), ("tool", "1"), ("user", "c"))
    assert plain.render(messages) == "system<s>user<a>user<b>system<t>tool<1>user<c>"


def test_images_and_texts_are_joined_as_parts() -> None:
    source = ALTERNATING.replace("message.content ~ '>'", "message.content | map(attribute='text') | join ~ '>'")
    parts = [{"type": "image", "text": "IMAGE"}, {"type": "text", "text": "b"}]
    assert ChatTemplate(source, {}).render(said(("user", [{"type": "text", "text": "a"}]), ("user", parts))) == "user<a\n\nIMAGEb>"
    mixed = ChatTemplate(
        "{{ messages | length == 1 or raise_exception('one') }}{{ messages[0].content | map(attribute='text') | join }}", {}
    )
    assert mixed.render(said(("user", "a"), ("user", parts), ("user", "c"))) == "Truea\n\nIMAGEb\n\nc"


def test_texts_beside_images_are_not_run_together_by_a_template_that_trims_them() -> None:
    """The templates of Gemma 3 trim each part."""
    source = ALTERNATING.replace("message.content ~ '>'", "message.content | map(attribute='text') | map('trim') | join ~ '>'")
    image, look = {"type": "image", "text": "IMAGE"}, {"type": "text", "text": "Look at the cat"}
    template = ChatTemplate(source, {})
    assert template.render(said(("user", [image, look]), ("user", "and the dog"))) == "user<IMAGELook at the cat\n\nand the dog>"
    assert template.render(said(("user", [look]), ("user", "the dog"), ("user", [image]))) == "user<Look at the cat\n\nthe dogIMAGE>"
    assert template.render(said(("user", [image]), ("user", [image]), ("user", ""), ("user", [look]))) == "user<IMAGEIMAGELook at the cat>"


def test_texts_are_joined_as_one_part_for_a_template_that_reads_parts() -> None:
    parts = "{% for part in message['content'] %}{{ part.text | trim ~ '|' }}{% endfor %}"
    source = ALTERNATING.replace("{{ message.role ~ '<' ~ message.content ~ '>' }}", parts)
    assert ChatTemplate(source, {}).render(said(("user", "a"), ("user", "b"))) == "a\n\nb|"


def test_thoughts_and_calls_of_joined_answers_are_kept() -> None:
    source = (
        "{{ messages | length == 2 or raise_exception('two') }}{{ messages[1].reasoning_content }}|{{ messages[1].tool_calls | length }}"
    )
    first = {"role": "assistant", "content": "b", "reasoning_content": "x"}
    second = {"role": "assistant", "content": "", "reasoning_content": "y", "tool_calls": [CALL]}
    assert ChatTemplate(source, {}).render([*said(("user", "a")), first, second]) == "Truex\n\ny|1"


def test_the_answer_that_is_continued_may_be_joined() -> None:
    messages = said(("user", "a"), ("user", "b"), ("assistant", "c"))
    prompt = ChatTemplate(ALTERNATING, {}).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt == "user<a\n\nb>assistant<c"


def test_the_first_refusal_is_told_if_no_order_is_accepted() -> None:
    messages = said(("assistant", "a"), ("user", "b"), ("user", "c"))
    with pytest.raises(TemplateRejection, match="roles must alternate at 0"):
        ChatTemplate(ALTERNATING, {}).render(messages)
    with pytest.raises(TemplateRejection, match="never 3"):
        ChatTemplate("{{ raise_exception('never ' ~ messages | length) }}", {}).render(messages)


def test_an_image_is_not_put_into_a_result() -> None:
    """Templates write a result as a text."""
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    image = [{"type": "image"}, {"type": "text", "text": "b"}]
    with pytest.raises(TemplateRejection, match="roles must alternate"):
        ChatTemplate(WITH_CALLS, {}).render([*said(("user", "a")), called, *said(("tool", "1"), ("user", image))])


def test_the_first_refusal_is_told_if_another_form_fails() -> None:
    source = "{{ raise_exception('two') if messages | length == 2 else 1 + messages[0].content }}"
    with pytest.raises(TemplateRejection, match="two"):
        ChatTemplate(source, {}).render(said(("user", "a"), ("user", "b")))


def test_all_tries_keep_to_the_limits_together() -> None:
    template = ChatTemplate("{{ messages[0].content | upper }}{{ messages | length == 1 or raise_exception('two') }}", {})
    limits = Limits(time_s=2.0, memory_bytes=500_000)  # a try takes two bytes for a character: for the text, and for what is written
    assert template.render(said(("user", "a" * 200_000)), limits=limits)
    with pytest.raises(TemplateRejection, match="two"):
        template.render(said(("user", "a" * 100_000), ("user", "b" * 100_000)), limits=limits)


def test_many_messages_are_joined_in_one_pass() -> None:
    """Joining them pair by pair would copy the text once per message."""
    texts = [str(number) for number in range(16_384)]
    prompt = ChatTemplate(ALTERNATING, {}).render(said(*(("user", text) for text in texts)))
    assert prompt == f"user<{(chr(10) * 2).join(texts)}>"
