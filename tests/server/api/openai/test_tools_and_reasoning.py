"""Tool calls, reasoning and response formats: which request the worker receives, and which answer the client receives."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from server.messages import ConstraintKind, Trigger
from server.models.state import ModelSpec
from server.text.grammar import Structure, json_text, structured
from tests.doubles.worker import ByteTokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HERMES = (ModelSpec("null", "null", tool_parser="hermes", reasoning=True),)


def streamed(stream) -> tuple[str, str, list[dict], list[str]]:
    """Join the chunks of a stream, as a client does. Return content, reasoning, calls and finish reasons."""
    content, reasoning, calls, finish = "", "", [], []
    for chunk in stream:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for delta in choice.delta.tool_calls or []:
            if delta.index == len(calls):
                assert delta.type == "function"
                calls.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
            else:
                assert delta.index == len(calls) - 1 and delta.id is None and delta.function.name is None
            calls[delta.index]["arguments"] += delta.function.arguments or ""
        finish += [choice.finish_reason] if choice.finish_reason else []
    return content, reasoning, calls, finish


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_thoughts_and_parallel_calls(serve, answering, step):
    server = serve(script=answering(f"<think>\nhm</think>\n\nSure.\n{CALL}\n{CALL}", step=step), initial=HERMES)
    client = server.openai()
    message = client.chat.completions.create(model="null", messages=MESSAGES, tools=TOOLS).choices[0]
    assert message.finish_reason == "tool_calls" and message.message.content == "Sure."
    assert message.message.reasoning_content == message.message.reasoning == "hm"
    assert [call.function.name for call in message.message.tool_calls] == ["add", "add"]
    assert [json.loads(call.function.arguments) for call in message.message.tool_calls] == [{"a": 1}] * 2

    content, reasoning, calls, finish = streamed(client.chat.completions.create(model="null", messages=MESSAGES, tools=TOOLS, stream=True))
    assert (content, reasoning, finish) == ("Sure.", "hm", ["tool_calls"])
    assert [(call["name"], call["arguments"]) for call in calls] == [("add", '{"a": 1}')] * 2
    assert len({call["id"] for call in calls}) == 2


TAGGED = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(("form", "call"), [("hermes", CALL), ("qwen3-coder", TAGGED)])
def test_an_answer_that_a_stop_string_cuts_within_a_call_has_stopped(serve, answering, form, call):
    """`tool_calls` would tell the client to make the call."""
    server = serve(script=answering(f"{call}\n{call.replace('1', '2')}"), initial=(ModelSpec("null", "null", tool_parser=form),))
    client = server.openai()
    choice = client.chat.completions.create(model="null", messages=MESSAGES, tools=TOOLS, stop="2").choices[0]
    assert (choice.finish_reason, choice.message.tool_calls[0].function.arguments) == ("stop", '{"a": 1}')
    *_, calls, finish = streamed(client.chat.completions.create(model="null", messages=MESSAGES, tools=TOOLS, stop="2", stream=True))
    assert finish == ["stop"] and calls[0]["arguments"] == '{"a": 1}' and len(calls) == 2


def test_arguments_are_streamed_as_they_come(serve, answering):
    server = serve(script=answering(CALL), initial=HERMES)
    stream = server.openai().chat.completions.create(model="null", messages=MESSAGES, tools=TOOLS, stream=True)
    pieces = [d.function.arguments for c in stream for d in c.choices[0].delta.tool_calls or [] if d.function.arguments]
    assert len(pieces) == len('{"a": 1}')


def test_a_raw_line_end_in_arguments_is_escaped(serve, answering):
    client = serve(script=answering(CALL.replace("1", '"x\n\ty\\\n"')), initial=HERMES).openai()
    asked = {"model": "null", "messages": MESSAGES, "tools": TOOLS}
    (whole,) = client.chat.completions.create(**asked).choices[0].message.tool_calls
    _, _, (call,), _ = streamed(client.chat.completions.create(**asked, stream=True))
    for arguments in (whole.function.arguments, call["arguments"]):
        assert json.loads(arguments) == {"a": "x\n\ty\n"}


@pytest.mark.parametrize("demanded", [False, True])
def test_functions_are_answered_by_a_function_call(serve, answering, demanded):
    """Clients of 2023 still send `functions`, which `tools` has replaced, and read `function_call`."""
    client = serve(script=answering(f"{CALL}\n{CALL}"), initial=HERMES).openai()
    functions = [tool["function"] for tool in TOOLS]
    asked = {"model": "null", "messages": MESSAGES, "functions": functions, "function_call": {"name": "add"} if demanded else "auto"}
    (choice,) = client.chat.completions.create(**asked).choices
    assert (choice.message.function_call.name, choice.message.function_call.arguments) == ("add", '{"a": 1}')
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    calls = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert "".join(call.name or "" for call in calls) == "add" and "".join(call.arguments for call in calls) == '{"a": 1}'
    assert chunks[-1].finish_reason == "function_call"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [TOOLS[0]["function"]], "tools": TOOLS}, "functions"),
        ({"functions": [TOOLS[0]["function"]], "function_call": {"name": "nobody"}}, "function_call"),
        ({"function_call": {"name": "nobody"}}, "function_call"),
    ],
)
def test_functions_that_contradict_are_refused(server, fields, param):
    assert server.chat(**fields).json()["error"]["param"] == param


def test_one_call_when_parallel_calls_are_off(serve, answering):
    server = serve(script=answering(f"{CALL}\n{CALL}", interval_s=0.001), initial=HERMES)
    answer = server.chat(tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]
    assert len(answer["message"]["tool_calls"]) == 1 and answer["finish_reason"] == "tool_calls"
    assert server.worker.aborted, "the worker went on with a second call"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_demanded_call_is_enforced(serve, answering, choice):
    server = serve(script=answering(CALL), initial=(ModelSpec("null", "null", tool_parser="hermes", reasoning=False),))
    server.chat(tools=TOOLS, tool_choice=choice)
    constraint = server.worker.submits[-1].params.constraint
    assert constraint.kind is ConstraintKind.GRAMMAR and '"(now)"' in constraint.source
    assert ('"(add)"' in constraint.source) == (choice == "required")


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_all_tools_only_those_allowed_are_offered(server, mode):
    server.chat(tools=TOOLS, tool_choice=allowed(mode, "now"))
    submit = server.worker.submits[-1]
    assert b'"now"' in bytes(submit.prompt_ids) and b'"add"' not in bytes(submit.prompt_ids)
    if mode == "auto":
        constraint = submit.params.constraint
        assert not constraint.source and '"(now)"' in constraint.plain and '"(add' not in constraint.plain
    else:
        assert '"(now)"' in submit.params.constraint.source and '"(add' not in submit.params.constraint.source


def test_without_demand_no_call_is_enforced_and_none_hides_the_tools(server):
    server.chat(tools=TOOLS, tool_choice="auto")
    assert server.worker.submits[-1].params.constraint.trigger is not None and b"<tools>" in bytes(server.worker.submits[-1].prompt_ids)
    server.chat(tools=TOOLS, tool_choice="none")
    assert b"<tools>" not in bytes(server.worker.submits[-1].prompt_ids)


STRICT = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
OFFERED = [*TOOLS, {"type": "function", "function": {"name": "sky", "strict": True, "parameters": STRICT}}]
MARKERS = ["<tool_call>", "</tool_call>"]
MARKERS_OF_CHANNELS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>")
OPENS, THINKS, THOUGHT = 258, 260, 261
INTEGER = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}


def test_an_offered_call_is_held_to_the_offer_from_its_marker_on(serve):
    server = serve(tokenizer=ByteTokenizer(specials=MARKERS), initial=[ModelSpec("null", "null", tool_parser="hermes", reasoning=False)])
    server.chat(tools=OFFERED)
    constraint = server.worker.submits[-1].params.constraint
    assert msgspec.structs.replace(constraint.trigger, plain=()) == Trigger(OPENS)
    assert '"(add|now)"' in constraint.source and '"(sky)"' in constraint.source and '"(add|now|sky)"' in constraint.fallback
    assert '"city"' in constraint.source and '"city"' not in constraint.fallback, "only strict tools enforce their schema"
    assert '"a"' not in constraint.source
    assert '"city"' in constraint.plain and '"city"' not in constraint.plain_fallback and '"a"' not in constraint.plain
    begun = {bytes(beginning).decode() for beginning in constraint.trigger.plain}
    assert {'name": "sky", "arguments', 'name":"now","parameters', 'name": "add",\n  "arguments'} <= begun

    shown = server.http().post("/v1/chat/completions/render", json={"messages": MESSAGES, "tools": OFFERED}).json()
    assert shown["parameters"]["constraint"]["trigger"]["token_id"] == OPENS

    for free in ({}, {"tools": OFFERED, "tool_choice": "none"}):
        server.chat(**free)
        assert server.worker.submits[-1].params.constraint is None
    for governed in ({"response_format": INTEGER}, {"tool_choice": "required"}):
        server.chat(tools=OFFERED, **governed)
        assert server.worker.submits[-1].params.constraint.trigger is None


@pytest.mark.parametrize(("max_bytes", "held"), [(10_000, "city"), (700, "add"), (100, "")])
def test_of_an_offer_beyond_the_limit_only_so_much_is_held_to(serve, max_bytes, held):
    spec = ModelSpec("null", "null", tool_parser="hermes", reasoning=False)
    server = serve(tokenizer=ByteTokenizer(specials=MARKERS), initial=[spec], max_schema_bytes=max_bytes)
    assert server.chat(tools=OFFERED).status_code == 200
    constraint = server.worker.submits[-1].params.constraint
    assert held in constraint.source if held else constraint is None
    assert held == "city" or constraint is None or not constraint.fallback


@pytest.mark.parametrize(("form", "has_calls"), [("hermes", True), ("harmony", True), ("llama3", False), ("phi4", False)])
def test_an_answer_in_json_may_be_a_call_instead(serve, form, has_calls):
    """A response format applies to messages, not to calls. If calls begin like JSON, a mask could not tell them apart."""
    spec = ModelSpec("null", "null", tool_parser=form, reasoning=False)
    server = serve(tokenizer=ByteTokenizer(specials=[*MARKERS, *MARKERS_OF_CHANNELS]), initial=[spec])

    def head(**fields) -> str:
        assert server.chat(**fields).status_code == 200
        return server.worker.submits[-1].params.constraint.head

    assert ("add|now|sky" in head(tools=OFFERED, response_format=INTEGER)) is has_calls
    for other in ({"tool_choice": "none"}, {"tool_choice": "required"}):
        assert "now" not in head(tools=OFFERED, response_format=INTEGER, **other)
    assert "now" not in head(response_format=INTEGER) + head(tools=OFFERED, guided_json=True)
    assert "now" not in head(tools=OFFERED, guided_json=True, response_format={"type": "text"})


def test_a_format_of_text_is_none(server):
    asked = {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "text"}}
    assert server.chat(**asked).status_code == 200
    answer = server.chat(**asked, guided_json=True)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice"


def test_a_schema_is_not_copied_without_end(serve):
    """In this format each parameter has a copy of the parts to which it refers. This schema of 60 KB would have 75 MB of them."""
    spec = ModelSpec("null", "null", tool_parser="qwen3-coder", reasoning=False)
    server = serve(tokenizer=ByteTokenizer(specials=MARKERS), initial=[spec], max_schema_bytes=1 << 20)
    properties = {f"p{number}": {"$ref": "#/$defs/all"} for number in range(1000)}
    parameters = {"properties": properties, "$defs": {"all": {"type": "object", "properties": {f"q{n}": {} for n in range(5000)}}}}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    refused = server.chat(tools=[tool], tool_choice="required", truncate_prompt_tokens=-1)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
    assert "the grammar of the tools' schemas has more than" in refused.json()["error"]["message"]
    assert server.chat(tools=[tool], truncate_prompt_tokens=-1).status_code == 200
    constraint = server.worker.submits[-1].params.constraint
    assert "call_0: " in constraint.source and "q4999" not in constraint.source and not constraint.fallback


@pytest.mark.parametrize(
    ("form", "specials", "trigger"),
    [
        ("hermes", [*MARKERS, "<think>", "</think>"], Trigger(OPENS, (), THINKS, THOUGHT)),
        ("hermes", MARKERS, None),  # no constraint: without tokens for markers, thoughts cannot be distinguished from the answer
        ("hermes", ["<think>", "</think>"], Trigger(None, (), OPENS, OPENS + 1)),  # only calls in plain JSON are known by their tokens
        ("mistral", ["[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"], Trigger(OPENS, (), THINKS, THOUGHT)),
        ("llama3", ["<|python_tag|>", "<think>", "</think>"], Trigger(None, (), OPENS + 1, OPENS + 2)),  # calls may omit their marker
        ("json", ["<think>", "</think>"], Trigger(None, (), OPENS, OPENS + 1)),
    ],
)
def test_calls_are_free_where_tokens_do_not_tell_them(serve, form, specials, trigger):
    server = serve(tokenizer=ByteTokenizer(specials=specials), initial=[ModelSpec("null", "null", tool_parser=form, reasoning=True)])
    server.chat(tools=TOOLS)
    constraint = server.worker.submits[-1].params.constraint
    assert (None if constraint is None else msgspec.structs.replace(constraint.trigger, plain=())) == trigger
    assert constraint is None or constraint.trigger.plain


def test_text_that_looks_like_a_call_is_text_when_no_tools_are_offered(serve, answering):
    server = serve(script=answering(CALL), initial=HERMES)
    assert server.chat().json()["choices"][0]["message"]["content"] == CALL


def test_history_with_calls_reaches_the_template(server):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "2"}]
    assert server.chat(messages=messages, tools=TOOLS).status_code == 200
    # without quotes around the arguments: the template received an object, not JSON text
    assert b'"arguments": {"a": 1}' in bytes(server.worker.submits[-1].prompt_ids)


@pytest.mark.parametrize(
    ("tool_choice", "tools", "param"),
    [
        ({"type": "function", "function": {"name": "other"}}, TOOLS, "tool_choice"),
        ("required", [], "tool_choice"),
        (allowed("auto", "other"), TOOLS, "tool_choice.allowed_tools"),
        ("sometimes", TOOLS, "tool_choice"),
        ("auto", [{"type": "function", "function": {"name": "sp ace"}}], "tools[0].function.name"),
        ("required", [{"type": "web_search"}], "tool_choice"),
        ({"type": "web_search"}, [{"type": "web_search"}], "tool_choice.type"),
    ],
)
def test_tools_are_refused_by_name(server, tool_choice, tools, param):
    response = server.chat(tools=tools, tool_choice=tool_choice)
    assert response.status_code == 400 and response.json()["error"]["param"].startswith(param), response.text


def test_markers_that_are_special_tokens_are_seen(serve, answering):
    tokenizer = ByteTokenizer(specials=["<think>", "</think>", "[TOOL_CALLS]"])
    script = answering("")
    answer = [258, *b"hm", 259, 260, *b'[{"name": "now", "arguments": {}}]']
    script.answer = lambda _submit, _choice: [[token] for token in answer]
    spec = ModelSpec("null", "null", tool_parser="mistral")
    message = serve(script=script, tokenizer=tokenizer, initial=[spec]).chat(tools=TOOLS).json()["choices"][0]["message"]
    assert message["reasoning"] == "hm" and message["tool_calls"][0]["function"]["name"] == "now"
    assert message["content"] is None and len(message["tool_calls"][0]["id"]) == 9


HARMONY = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Sure.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
)


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("specials", [(), MARKERS_OF_CHANNELS])
def test_channels_become_reasoning_content_and_calls(serve, answering, step, specials):
    """Harmony channels become reasoning, content and calls, whether their markers are special tokens (as in gpt-oss) or plain text."""
    tokenizer, script = ByteTokenizer(specials=specials), answering("")
    ids = [
        id
        for part in re.split("(" + "|".join(map(re.escape, MARKERS_OF_CHANNELS)) + ")", HARMONY)
        for id in tokenizer.encode(part, add_special_tokens=False)
    ]
    script.answer = lambda _submit, _choice: [ids[at : at + step] for at in range(0, len(ids), step)]
    server = serve(script=script, tokenizer=tokenizer, initial=[ModelSpec("null", "null", tool_parser="harmony")])
    whole = server.chat(tools=TOOLS).json()
    message = whole["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Sure.", "hm")
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]] == [("add", '{"a": 1}')]
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert step > 1 or whole["usage"]["completion_tokens_details"]["reasoning_tokens"] >= len("hm")
    stream = server.openai().chat.completions.create(model="null", messages=MESSAGES, tools=TOOLS, stream=True)
    content, reasoning, calls, finish = streamed(stream)
    assert (content, reasoning, finish) == ("Sure.", "hm", ["tool_calls"])
    assert [(call["name"], call["arguments"]) for call in calls] == [("add", '{"a": 1}')]
    responded = server.openai().responses.create(
        model="null", input="hi", tools=[{"type": "function", **TOOLS[0]["function"], "strict": False}]
    )
    assert [item.type for item in responded.output] == ["reasoning", "message", "function_call"]
    assert responded.output[0].content[0].text == "hm" and responded.output_text == "Sure."
    body = {"model": "null", "max_tokens": 1000, "messages": MESSAGES, "tools": [{"name": "add", "input_schema": {"type": "object"}}]}
    blocks = server.http().post("/v1/messages", json=body).json()
    assert [block["type"] for block in blocks["content"]] == ["thinking", "text", "tool_use"] and blocks["stop_reason"] == "tool_use"
    body = {"model": "null", "messages": MESSAGES, "tools": TOOLS, "stream": False}
    said = server.http().post("/api/chat", json=body).json()["message"]
    assert (said["thinking"], said["content"], said["tool_calls"][0]["function"]["arguments"]) == ("hm", "Sure.", {"a": 1})


def test_a_format_of_an_answer_in_channels_holds_behind_their_headers(serve):
    server = serve(initial=[ModelSpec("null", "null", tool_parser="harmony")])
    server.chat(response_format=INTEGER)
    assert '"final"' in server.worker.submits[-1].params.constraint.head
    server.chat(tools=TOOLS, tool_choice="required")
    constraint = server.worker.submits[-1].params.constraint
    assert '"final"' not in constraint.head and '"commentary to=functions."' in constraint.source
    server.chat(tools=TOOLS)
    assert server.worker.submits[-1].params.constraint is None


@pytest.mark.parametrize(
    ("begun", "found"),
    [("<think>\nI add", ("b", "c")), ("<think>a</think>\nSo", ("", "b</think>c"))],
)
def test_a_continued_message_may_end_in_a_think_block(serve, answering, begun, found):
    server = serve(script=answering("b</think>c"))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": begun}]
    message = server.chat(messages=messages, continue_final_message=True).json()["choices"][0]["message"]
    assert ((message.get("reasoning_content") or ""), message["content"]) == found


def test_the_prompt_may_open_the_think_block(serve, answering):
    server = serve(script=answering("hm</think>yes"), initial=(ModelSpec("null", "null", reasoning=False),))
    answer = server.chat(chat_template_kwargs={"opening": "<think>\n"}).json()
    assert answer["choices"][0]["message"]["reasoning_content"] == "hm"
    assert answer["choices"][0]["message"]["content"] == "yes"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("hm</think>")


def test_reasoning_can_be_left_out_or_left_in(serve, answering):
    server = serve(script=answering("<think>hm</think>yes"), initial=HERMES)
    hidden = server.chat(include_reasoning=False).json()["choices"][0]["message"]
    assert "reasoning" not in hidden and hidden["content"] == "yes"
    raw = server.chat(separate_reasoning=False).json()["choices"][0]["message"]
    assert raw["content"] == "<think>hm</think>yes"


def test_reasoning_effort_reaches_the_template(server, monkeypatch):
    seen = {}
    template = type(server.registry.models()[0].loaded.tokenizer.chat_template)
    original = template.render
    monkeypatch.setattr(
        template, "render", lambda self, *args, **kwargs: seen.update(kwargs["variables"]) or original(self, *args, **kwargs)
    )
    server.chat(reasoning_effort="none")
    assert seen["reasoning_effort"] == "none" and seen["enable_thinking"] is False


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STRUCTURAL = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize(
    ("body", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", json_text({"type": "object"})),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "json_schema", json_text(SCHEMA)),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", json_text(SCHEMA)),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema", json_text(SCHEMA)),
        ({"response_format": {"type": "json_schema", "value": SCHEMA}}, "json_schema", json_text(SCHEMA)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": True}}}, "json_schema", json_text({})),
        ({"guided_json": "true"}, "json_schema", json_text({})),
        ({"response_format": {"type": "regex", "value": "[0-9]+"}}, "regex", "[0-9]+"),
        ({"guided_json": SCHEMA}, "json_schema", json_text(SCHEMA)),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", json_text(SCHEMA)),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json_text(SCHEMA)),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"response_format": STRUCTURAL}, "grammar", structured([Structure("<f", "<f>", SCHEMA, "</f>")]).source),
    ],
)
def test_formats_become_constraints(server, body, kind, source):
    assert server.chat(**body).status_code == 200
    constraint = server.worker.submits[-1].params.constraint
    assert (constraint.kind, constraint.source) == (kind, source)


@pytest.mark.parametrize("body", [{"response_format": {"type": "text"}}, {"grammar": ""}])
def test_text_is_no_constraint(server, body):
    assert server.chat(**body).status_code == 200
    assert server.worker.submits[-1].params.constraint is None


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"guided_json": "{"}, "invalid_schema"),
        ({"guided_json": "[1]"}, "invalid_schema"),
        ({"guided_json": False}, "invalid_schema"),
        ({"response_format": {"type": "json_schema"}}, "invalid_value"),
        ({"guided_choice": []}, "invalid_value"),
        ({"guided_regex": "a" * 70_000}, "invalid_value"),
        ({"guided_regex": "a", "tools": TOOLS, "tool_choice": "required"}, "invalid_value"),
        ({"response_format": {"type": "structural_tag"}}, "invalid_value"),
        ({"response_format": {**STRUCTURAL, "triggers": ["<g"]}}, "invalid_value"),
        ({"structured_outputs": {"structural_tag": "x"}}, "unsupported_field"),
    ],
)
def test_formats_are_refused(server, body, code):
    response = server.chat(**body)
    assert response.status_code == 400 and response.json()["error"]["code"] == code
