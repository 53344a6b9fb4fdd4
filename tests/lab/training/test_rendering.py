"""The chat template renders a conversation to the same text in training and in the server."""

import json
from itertools import islice

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.lab.training.conversation import assistant, calls, result, user
from tests.lab.training.corpus import conversations
from tests.lab.training.rendering import TEMPLATE, parsed_answer, render, rendered_parts

WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def test_plain_turns():
    text = render([user("hi"), assistant("Hello!"), user("bye")], add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_system_message_stands_first():
    assert render([{"role": "system", "content": "Be kind."}, user("hi")]).startswith(
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user"
    )


def test_tools_calls_and_results():
    messages = [
        user("weather in Rome and Paris?"),
        calls(("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Paris"})),
        result({"sky": "<clear>"}),
        result("20 °C"),
    ]
    assert render(messages, [WEATHER], add_generation_prompt=True) == (
        "<|im_start|>system\n# Tools\n<tools>\n"
        '{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}\n'
        "</tools>\nTo call a tool, answer with\n<tool_call>\n"
        '{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nweather in Rome and Paris?<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n<tool_call>\n'
        '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\n'
        '<|im_start|>user\n<tool_response>\n{"sky": "<clear>"}\n</tool_response>\n<tool_response>\n20 °C\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_arguments_may_come_as_json_text():
    parsed = calls(("get_weather", {"city": "Rome"}))
    in_text = calls(("get_weather", {}))
    in_text["tool_calls"][0]["function"]["arguments"] = '{"city": "Rome"}'
    assert render([parsed], [WEATHER]) == render([in_text], [WEATHER])


def test_hugging_face_renders_the_same():
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(TEMPLATE)
    for conversation in islice(conversations(10), 200):
        theirs = template.render(messages=conversation.messages, tools=conversation.tools or None, add_generation_prompt=True)
        assert render(conversation.messages, conversation.tools, add_generation_prompt=True) == theirs


def test_the_parts_of_every_conversation_make_the_whole():
    for conversation in islice(conversations(11), 300):
        parts = rendered_parts(conversation.messages, conversation.tools)
        assert "".join(text for text, _ in parts) == render(conversation.messages, conversation.tools)
        spoken = [text for text, is_spoken in parts if is_spoken]
        assert len(spoken) == sum(message["role"] == "assistant" for message in conversation.messages)
        assert all(text.endswith("<|im_end|>\n") for text in spoken)


def test_what_is_given_of_an_answer_is_not_spoken():
    parts = rendered_parts([user("hi"), assistant('{"a": 1}', given='{"')], ())
    assert parts == [('<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{"', False), ('a": 1}<|im_end|>\n', True)]


def test_what_was_rendered_parses_back():
    for conversation in islice(conversations(12), 300):
        parts = rendered_parts(conversation.messages, conversation.tools)
        spoken = [text.removesuffix("<|im_end|>\n") for text, is_spoken in parts if is_spoken]
        said = [message for message in conversation.messages if message["role"] == "assistant"]
        for text, message in zip(spoken, said, strict=True):
            given = message.get("given", "")
            assert parsed_answer(given + text) == {name: value for name, value in message.items() if name != "given"}


@pytest.mark.parametrize(
    "text",
    (
        '<tool_call>\n{"name": "get_weather"}\n</tool_call>',
        "<tool_call>\nget_weather(Rome)\n</tool_call>",
        "<tool_call>\n[1]\n</tool_call>",
        '<tool_call>\n{"name": "get_weather", "arguments": {}}',
    ),
)
def test_a_call_that_is_not_well_formed_is_no_call(text: str):
    assert "tool_calls" not in parsed_answer(text)
