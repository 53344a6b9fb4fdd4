"""The page reads requests, thoughts and the arguments of calls as the server does. Only its modules run here, and no model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from server.api.request.conversation import for_template
from server.api.request.schema import ChatBody, Message
from server.errors import ApiError
from server.text.dialects.thoughts import Thoughts, ThoughtSplitter
from server.text.parts import Reasoning
from server.text.templates.errors import TemplateError
from server.text.templates.template import ChatTemplate, reads_parts
from tests.node import run_node

RUNTIME = Path(__file__).parents[3] / "runtime" / "web"

SPLIT = """
import { pathToFileURL } from 'node:url';
const [module, given] = process.argv.slice(1), { answers, thoughts } = JSON.parse(given);
const { areOpen, ThoughtSplitter } = await import(pathToFileURL(module));
console.log(JSON.stringify(answers.map(({ pieces, prompt }) => {
  const splitter = new ThoughtSplitter(thoughts, areOpen(prompt, thoughts));
  return [...pieces.flatMap((piece) => splitter.push(piece)), ...splitter.finish()];
})));
"""


@pytest.mark.parametrize("thoughts", [Thoughts("<think>", "</think>"), Thoughts("<|channel>", "<channel|>", "thought\n")])
def test_thoughts_are_found_as_the_server_finds_them(thoughts: Thoughts) -> None:
    chance = random.Random(5)
    fragments = [thoughts.opening, thoughts.begin, thoughts.closing, thoughts.closing[:3], "<", "\n", " ", "\x85", "\ufeff", "so", "🙂"]
    answers: list[dict[str, Any]] = []
    for _ in range(400):
        text = "".join(chance.choices(fragments, k=chance.randint(0, 7)))
        cuts = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(0, 5))))
        pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        answers.append({"pieces": pieces, "prompt": chance.choice(["hi", f"hi{thoughts.begin}", f"hi{thoughts.begin}\n\n"])})
    given = {"thoughts": {"begin": thoughts.begin, "closing": thoughts.closing}, "answers": answers}
    found = json.loads(run_node(SPLIT, RUNTIME / "thoughts.mjs", json.dumps(given)))
    for answer, parts in zip(answers, found, strict=True):
        splitter = ThoughtSplitter(thoughts, inside=thoughts.are_open(answer["prompt"]))
        expected = [part for piece in answer["pieces"] for part in splitter.push(piece)] + splitter.finish()
        assert parts == [{"reasoning" if isinstance(part, Reasoning) else "content": part.text} for part in expected], answer


LONG = """
import { pathToFileURL } from 'node:url';
const from = (file) => import(pathToFileURL(`${process.argv[1]}/${file}`));
const [{ areOpen }, { Template }] = [await from('thoughts.mjs'), await from('template.mjs')];
const prompt = `a${'\\n'.repeat(1e6)}b`;
console.log(JSON.stringify([areOpen(prompt, { begin: '<think>\\n' }), new Template(process.argv[2]).render({ prompt })]));
"""


def test_long_runs_of_spaces_and_digits_take_linear_time() -> None:
    """With quadratic time, any of these would take longer than the patience with Node.js."""
    source = "{{ prompt.strip() | length }} {{ prompt | trim | length }} {{ ('1' * 1000000 ~ 'x') | int(7) }}"
    assert json.loads(run_node(LONG, RUNTIME, source)) == [False, "1000002 1000002 7"]


CHECKED = """
import { pathToFileURL } from 'node:url';
const [folder, given] = process.argv.slice(1), from = (file) => import(pathToFileURL(`${folder}/${file}`));
const [{ parsed }, { forTemplate }] = [await from('request.mjs'), await from('messages.mjs')];
const model = { sampling: {}, defaults: {}, vocab_size: 2048, max_context: 256, tools: {} };
const said = (body) => {
  try {
    parsed(body, model);
    forTemplate(body.messages);
    return null;
  } catch ({ param }) { return param ?? 'a fault'; }
};
console.log(JSON.stringify(JSON.parse(given).map(said)));
"""
FIELDS: list[dict[str, Any]] = [
    *({"temperature": value} for value in (0, 2, 50, 100, 101, -1)),
    *({"top_p": value} for value in (0, 1, 1.1)),
    *({"typical_p": value} for value in (0, 0.1, 1)),
    *({"top_k": value} for value in (-1, 0, 5, -2, 1.5)),
    *({"max_tokens": value} for value in (-1, 0, 1, -2, 1.5)),
    *({"max_completion_tokens": value} for value in (0, 1, -1)),
    *({"seed": value} for value in (0, -5, 1.5, "a")),
    *({"presence_penalty": value} for value in (-2, 2, 2.5)),
    *({"repetition_penalty": value} for value in (0, 0.01, 100)),
    *({"logprobs": True, "top_logprobs": value} for value in (0, 20, 21, -1)),
    *({"stop": value} for value in ("a", ["a", "b"], 5, [5])),
    *({"tools": [{"type": "function", "function": {"name": name}}]} for name in ("a", "a.b-c_1", "a b", "é", "", "a" * 65)),
]
MESSAGES: list[Any] = [
    {"role": "user", "content": "hi"},
    {
        "role": "user",
        "content": [{"type": kind, "text": "hi"} for kind in ("text", "input_text", "output_text", "summary_text", "reasoning_text")],
    },
    {"role": "user", "content": [{"type": "refusal", "refusal": "no"}]},
    {"role": "user", "content": [{"type": "text"}]},
    {"role": "user", "content": 5},
    {"role": "user", "content": {}},
    {"role": "user", "content": []},
    {"role": "user"},
    {"role": "a b", "content": "hi"},
    {"role": "", "content": "hi"},
    {"role": "critic", "content": "hi"},
    *({"role": role, "content": "hi"} for role in ("é", "日本", "a\u0301", "a" * 64, "🙂", "a\n", "é" * 65)),
    {"role": "user", "content": "hi", "name": 5},
    {"role": "assistant", "content": "hi", "reasoning_content": {}},
    {"role": "assistant", "content": "hi", "refusal": 1},
    {"role": "tool", "content": "hi", "tool_call_id": None},
    {"role": "tool", "content": "hi", "tool_call_id": 3},
    *(
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        for arguments in ("{}", "", None, {}, {"a": 1}, [], 5, True, "[" * 65 + "]" * 65, '{"a": ' * 64 + "1" + "}" * 64)
    ),
    {"role": "assistant", "tool_calls": [{"function": {"name": 5}}]},
    "hi",
]


def is_accepted(body: dict[str, Any]) -> bool:
    """Return whether the server accepts a request, as far as its fields show."""
    try:
        for_template(ChatBody.model_validate_json(json.dumps(body)).messages)
    except (ValidationError, ApiError):
        return False
    return True


def test_requests_are_accepted_and_refused_as_in_the_server() -> None:
    bodies = [{"messages": MESSAGES[:1], **fields} for fields in FIELDS] + [{"messages": [message]} for message in MESSAGES]
    found = json.loads(run_node(CHECKED, RUNTIME, json.dumps(bodies)))
    assert [(body, param is None) for body, param in zip(bodies, found, strict=True)] == [(body, is_accepted(body)) for body in bodies]
    assert "a fault" not in found, "each refusal names its field"


WRITTEN = """
import { pathToFileURL } from 'node:url';
const [folder, given] = process.argv.slice(1), { model, conversations } = JSON.parse(given);
const from = (file) => import(pathToFileURL(`${folder}/${file}`));
const [{ TextCodec }, { Template }] = [await from('text.mjs'), await from('template.mjs')];
const template = new Template(model.chat_template), codec = Object.create(TextCodec.prototype);
Object.assign(codec, { model, template, toolTemplate: template });
const said = (messages) => { try { return codec.prompt(messages); } catch ({ param, message }) { return [param, message]; } };
console.log(JSON.stringify(conversations.map(said)));
"""
ARGUMENTS = [
    '{"a": 1.0, "b": 9007199254740993, "c": 1e21, "d": 1e-7, "e": 1E5, "f": -0.0, "g": -0, "h": 1e16, "i": 123456789012345680000}',
    '{"b": 1, "10": 2, "2": 3, "a": 4, "": 5, "__proto__": {"x": 1}, "items": 6, "b": 7}',
    '{"deep": [{"x": [1.5, null, true, "\\ud83d\\ude42"]}, [], {}]}',
    '{"half": "\\ud800"}',
    '{"much": 1e999}',
    '{"a": NaN}',
    '{"cut": "of',
    '["list", 1.0]',
]
ALTERNATING = """
{%- for message in messages -%}
  {%- set before = loop.previtem.role if loop.previtem -%}
  {%- if message.role == 'system' and not loop.first -%}{{ raise_exception('a system message comes first') }}{%- endif -%}
  {%- if message.role == before -%}{{ raise_exception('roles take turns') }}{%- endif -%}
  {%- if message.role == 'user' and before == 'tool' -%}{{ raise_exception('an answer follows a result') }}{%- endif -%}
  {{ message.role }}:{{ message.content }}{{ message.reasoning_content }}{{ message['__proto__'] }}
  {%- for call in message.tool_calls %}{{ call.function }}{% endfor %}|
{%- endfor -%}
"""
LOOPING = ALTERNATING.replace("{{ message.content }}", "{% for part in message.content %}{{ part.text }};{% endfor %}")
CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"a": 9007199254740993}'}}]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "12"}
TURNS: list[list[dict[str, Any]]] = [
    [
        {"role": role, "content": f"{role} {number}", **({"reasoning": "why"} if role == "assistant" else {})}
        for number, role in enumerate(roles)
    ]
    for roles in (
        ["user", "user"],
        ["system", "system", "user"],
        ["user", "system", "user", "assistant", "assistant", "user"],
        ["system", "user", "assistant", "system"],
        ["tool", "tool"],
        ["constructor", "__proto__"],  # names that every object of JavaScript has
    )
] + [
    [{"role": "user", "content": "hi"}, CALL, RESULT, {"role": "user", "content": "go"}, {"role": "user", "content": ""}],
    [{"role": "user", "content": "hi"}, CALL, CALL, RESULT],
    [{"role": "user", "content": ""}, {"role": "user", "content": ""}],
    [{"role": "user", "content": "hi", "__proto__": "x"}, {"role": "user", "content": "so"}],
]


@pytest.mark.parametrize("source", [ALTERNATING, LOOPING], ids=["texts", "parts"])
def test_a_refused_conversation_is_changed_as_in_the_server(source: str) -> None:
    assert reads_parts(source) is (source == LOOPING)
    found = rendered(source, TURNS)
    assert found == [in_python(source, conversation) for conversation in TURNS]
    assert sum(isinstance(one, str) for one in found) > 4


def rendered(source: str, conversations: list[list[dict[str, Any]]]) -> list[Any]:
    """Return the prompts that the page makes, or the reason for which it refuses a conversation."""
    facts = {"tests_none": [False, False], "special_tokens": {}, "writes_calls": True, "vision": None}
    defaults = {"system": None, "has_system": True, "thinking": {}}
    model = {**facts, "name": "m", "chat_template": source, "defaults": defaults, "reads_parts": [reads_parts(source)] * 2}
    found = json.loads(run_node(WRITTEN, RUNTIME, json.dumps({"model": model, "conversations": conversations})))
    return [one if isinstance(one, str) else [one[1].removeprefix("the chat template refused the messages: ")] for one in found]


def in_python(source: str, conversation: list[dict[str, Any]]) -> str | list[str]:
    """Return what the server makes of a conversation."""
    try:
        return ChatTemplate(source, {}).render(for_template([Message.model_validate(one) for one in conversation]))
    except TemplateError as error:
        return [error.message.removeprefix("TypeError: ")]


WRITES_CALLS = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}{{ call.function.arguments HOW }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("how", ["", "| tojson", "~ ''", "+ ''"])
def test_arguments_of_calls_are_written_as_in_python(how: str) -> None:
    """Numbers keep their fraction and all their digits, and keys their order. A template that appends arguments to a text gets a text."""
    source = WRITES_CALLS.replace("HOW", how)
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": text}} for text in ARGUMENTS]
    conversations = [[{"role": "assistant", "content": "", "tool_calls": [call]}] for call in calls]
    assert rendered(source, conversations) == [in_python(source, conversation) for conversation in conversations]
