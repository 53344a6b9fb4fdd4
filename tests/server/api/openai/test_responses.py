"""`/v1/responses`, used through the official OpenAI client."""

from __future__ import annotations

import inspect
import json
import time
from dataclasses import replace

import openai
import pytest
from openai.resources.responses import Responses
from openai.types.responses import Response
from pydantic import BaseModel

from server.api.openai.responses.answer import ResponseAnswer
from server.api.openai.responses.body import ResponseBody
from server.api.request.fields import UNSUPPORTED
from server.defaults import Defaults
from server.messages import ConstraintKind
from server.models.state import ModelSpec

SAID = "Hello from the null device."
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}, "strict": False}
HERMES = (ModelSpec("null", "null", tool_parser="hermes", reasoning=True),)


def prompt_of(server) -> str:
    return bytes(i for i in server.worker.submits[-1].prompt_ids if i < 256).decode()


def checked(response: Response) -> Response:
    """Validate the response strictly against the OpenAI client's own type, and return it."""
    return Response.model_validate_json(response.model_dump_json(exclude_unset=True), strict=True)


def test_whole_answer(server):
    response = checked(server.openai().responses.create(model="null", input="hi", instructions="Be brief.", metadata={"a": "b"}))
    assert response.output_text == SAID and response.status == "completed" and response.id.startswith("resp_")
    assert response.usage.output_tokens == len(SAID) and response.usage.total_tokens == response.usage.input_tokens + len(SAID)
    assert response.instructions == "Be brief." and response.metadata == {"a": "b"} and response.model == "null"
    assert prompt_of(server) == "<|system|>Be brief.\n<|user|>hi\n<|assistant|>"


def test_an_answer_that_is_cut_off_is_incomplete(server):
    response = checked(server.openai().responses.create(model="null", input="hi", max_output_tokens=5))
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output_text == "Hello" and response.output[0].status == "incomplete"
    assert server.worker.submits[-1].params.max_tokens == 5


EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
]


# Answers with a call, by the format that reads them, and a stop string within the call's arguments.
CUT = [
    ("hermes", CALL, ': {"a'),
    ("hermes", CALL, "1"),
    ("qwen3-coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "<parameter"),
    ("pythonic", "[add(a=1)]", "1"),
]


@pytest.mark.parametrize(("form", "answer", "stop"), CUT)
def test_a_call_that_a_stop_string_cuts_is_incomplete(serve, answering, form, answer, stop):
    spec = ModelSpec("null", "null", tool_parser=form, defaults=Defaults(stop=(stop,)))
    client = serve(script=answering(answer), initial=(spec,)).openai()
    whole = checked(client.responses.create(model="null", input="hi", tools=[ADD]))
    *_, last = client.responses.create(model="null", input="hi", tools=[ADD], stream=True)
    for made in (whole, last.response):
        assert [(item.type, item.status) for item in made.output] == [("function_call", "incomplete")]


@pytest.mark.parametrize("held", ["```", "[", '{"name": "add",'])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_text_that_was_held_back_does_not_complete_a_cut_call(serve, answering, held, is_stopped):
    """The text might begin a call in plain JSON. An earlier version returned it after the call that followed it, as if that call were
    complete."""
    answer = f"I add:\n{held}\n{CALL}"
    spec = ModelSpec("null", "null", tool_parser="hermes", defaults=Defaults(stop=('{"a"',) if is_stopped else ()))
    asked = {"model": "null", "input": "hi", "tools": [ADD], "max_output_tokens": 999 if is_stopped else answer.index('{"a"')}
    client = serve(script=answering(answer), initial=(spec,)).openai()
    *_, last = client.responses.create(**asked, stream=True)
    for made in (checked(client.responses.create(**asked)), last.response):
        assert [(item.type, item.status) for item in made.output] == [("message", "completed"), ("function_call", "incomplete")]
        assert made.output_text == f"I add:\n{held}" and made.output[1].arguments == ""


def test_a_call_that_is_whole_when_a_stop_string_comes_is_complete(serve, answering):
    spec = ModelSpec("null", "null", tool_parser="hermes", defaults=Defaults(stop=("</tool_call>",)))
    made = checked(serve(script=answering(CALL), initial=(spec,)).openai().responses.create(model="null", input="hi", tools=[ADD]))
    assert [(item.status, item.arguments) for item in made.output] == [("completed", '{"a": 1}')]


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_the_stream_has_all_events_in_order(serve, answering, step):
    server = serve(script=answering(f"<think>hm</think>Sure.{CALL}", step=step), initial=HERMES)
    events = list(server.openai().responses.create(model="null", input="hi", tools=[ADD], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]] == EVENTS
    final = checked(events[-1].response)
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[0].content[0].text == "hm" and final.output_text == "Sure."
    assert json.loads(final.output[2].arguments) == {"a": 1}
    assert step > 1 or final.usage.output_tokens_details.reasoning_tokens > 0
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in final.output]
    whole = server.openai().responses.create(model="null", input="hi", tools=[ADD])
    assert [shape(item) for item in whole.output] == [shape(item) for item in final.output]


def shape(item) -> dict:
    return {name: value for name, value in item.to_dict().items() if name not in ("id", "call_id")}


def test_the_client_s_helpers(serve, answering):
    class Animal(BaseModel):
        legs: int

    server = serve(script=answering('{"legs": 4}'))
    client = server.openai()
    assert client.responses.parse(model="null", input="hi", text_format=Animal).output_parsed == Animal(legs=4)
    constraint = server.worker.submits[-1].params.constraint
    assert constraint.kind is ConstraintKind.JSON_SCHEMA and '"legs"' in constraint.source
    with client.responses.stream(model="null", input="hi", text_format=Animal) as stream:
        assert stream.get_final_response().output_parsed == Animal(legs=4)


def test_log_probabilities(server):
    response = server.openai().responses.create(
        model="null", input="hi", include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=3
    )
    entries = response.output[0].content[0].logprobs
    assert [entry.token for entry in entries] == ["H", "e", "l"] and len(entries[0].top_logprobs) == 2
    stream = server.openai().responses.create(model="null", input="hi", top_logprobs=2, max_output_tokens=3, stream=True)
    deltas = [event.logprobs[0].token for event in stream if event.type == "response.output_text.delta"]
    assert deltas == ["H", "e", "l"]


# --- the conversation ---------------------------------------------------------------------------------------------------


def test_items_are_the_conversation(serve):
    server = serve(initial=HERMES)
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Sure.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
    ]
    response = server.http().post("/v1/responses", json={"input": items})
    assert response.status_code == 200 and "x-ignored-params" not in response.headers
    lines = prompt_of(server).split("\n")
    assert lines[:2] == ["<|system|>Be kind.", "<|user|>hi"]
    assert lines[2].startswith("<|assistant|>Sure.<tool_call>") and lines[2].count('"name": "add"') == 2 and '{"a": 2}' in lines[2]
    assert lines[3:] == ["<|tool|>2", "<|tool|>3", "<|assistant|>"]


def test_a_response_continues_another(serve, answering):
    """The prompt of a follow-up contains the earlier messages but not the earlier instructions."""
    server = serve(script=answering(CALL), initial=HERMES)
    client = server.openai()
    first = client.responses.create(model="null", input="hi", tools=[ADD], instructions="Be brief.")
    call = first.output[0]
    result = [{"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
    second = client.responses.create(model="null", input=result, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    lines = prompt_of(server).split("\n")
    assert lines[0] == "<|user|>hi" and '"name": "add"' in lines[1] and lines[2] == "<|tool|>2"
    client.responses.create(model="null", input="more", previous_response_id=second.id)
    assert prompt_of(server).startswith("\n".join(lines[:3])) and "<|user|>more" in prompt_of(server)


def test_a_response_is_kept_until_it_is_deleted(server):
    client = server.openai()
    made = client.responses.create(model="null", input="hi")
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    (item,) = client.responses.input_items.list(made.id).data
    assert item.role == "user" and item.content[0].text == "hi"
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.retrieve(made.id)
    assert caught.value.code == "response_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="null", input="hi", previous_response_id=made.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_streamed_response_is_kept_too(server):
    client = server.openai()
    *_, last = client.responses.create(model="null", input="hi", stream=True)
    assert client.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()


def test_a_response_is_not_kept_where_the_request_says_so(server):
    client = server.openai()
    made = client.responses.create(model="null", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_input_items_are_listed_page_by_page(server):
    client = server.openai()
    made = client.responses.create(model="null", input=[{"role": "user", "content": str(number)} for number in range(5)])
    pages = client.responses.input_items.list(made.id, limit=2, order="asc")
    assert [item.content[0].text for item in pages] == ["0", "1", "2", "3", "4"]
    assert [item.content[0].text for item in client.responses.input_items.list(made.id, limit=2).data] == ["4", "3"]


def test_an_item_that_is_kept_can_be_referred_to(server):
    client = server.openai()
    made = client.responses.create(model="null", input="hi")
    reference = {"type": "item_reference", "id": made.output[0].id}
    client.responses.create(model="null", input=[{"role": "user", "content": "a"}, reference, {"role": "user", "content": "b"}])
    assert prompt_of(server) == f"<|user|>a\n<|assistant|>{SAID}\n<|user|>b\n<|assistant|>"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="null", input=[{"type": "item_reference", "id": "msg_none"}])
    assert caught.value.param == "input[0].id"


def test_only_the_key_that_made_a_response_sees_it(serve):
    server = serve(api_keys=["key-of-the-one", "key-of-the-other"])
    one, other = server.openai(api_key="key-of-the-one"), server.openai(api_key="key-of-the-other")
    made = one.responses.create(model="null", input="hi")
    assert one.responses.retrieve(made.id).id == made.id
    for attempt in (
        lambda: other.responses.retrieve(made.id),
        lambda: other.responses.delete(made.id),
        lambda: other.responses.input_items.list(made.id),
        lambda: other.responses.create(model="null", input="hi", previous_response_id=made.id),
        lambda: other.responses.create(model="null", input=[{"type": "item_reference", "id": made.output[0].id}]),
    ):
        with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
            attempt()


def test_what_is_kept_is_bounded_in_bytes(serve):
    """When stored responses exceed `response_store_bytes`, the server deletes the least recently used ones."""
    server = serve(response_store_bytes=60_000)
    client = server.openai()
    made = [client.responses.create(model="null", input="x" * 3000).id]
    for _ in range(40):
        client.responses.retrieve(made[0])
        made.append(client.responses.create(model="null", input="x" * 3000).id)
    http = server.http()
    kept = [response_id for response_id in made if http.get(f"/v1/responses/{response_id}").status_code == 200]
    assert made[0] in kept and made[-1] in kept and made[1] not in kept and 2 < len(kept) < 20


def test_what_is_kept_is_forgotten_in_time(serve):
    client = serve(response_store_s=0.05).http()
    made = client.post("/v1/responses", json={"input": "hi"}).json()["id"]
    time.sleep(0.06)
    assert client.get(f"/v1/responses/{made}").status_code == 404


def test_nothing_is_kept_where_the_server_is_told_so(serve):
    client = serve(response_store_bytes=0).http()
    made = client.post("/v1/responses", json={"input": "hi"}).json()
    assert client.get(f"/v1/responses/{made['id']}").status_code == 404


# --- background responses ----------------------------------------------------------------------------------------------


def until(client, response_id, statuses):
    for _ in range(2000):
        found = client.responses.retrieve(response_id)
        if found.status in statuses:
            return found
        time.sleep(0.01)
    raise AssertionError(found.status)


def test_a_response_in_the_background_is_asked_for_later(server):
    client = server.openai()
    made = client.responses.create(model="null", input="hi", background=True)
    assert made.status == "queued" and made.output == []
    found = checked(until(client, made.id, {"completed"}))
    assert found.output_text == SAID and found.background is True
    assert client.responses.create(model="null", input="more", previous_response_id=made.id).status == "completed"


def test_a_response_in_the_background_says_that_it_has_begun(serve, answering):
    client = serve(script=answering("a" * 1000, interval_s=0.05)).openai()
    made = client.responses.create(model="null", input="hi", background=True)
    assert made.status == "queued"
    begun = checked(until(client, made.id, {"in_progress"}))
    assert begun.output == [] and begun.usage is None
    client.responses.delete(made.id)


def test_a_response_in_the_background_is_cancelled(serve, answering):
    server = serve(script=answering("a" * 1000, interval_s=0.05))
    client = server.openai()
    made = client.responses.create(model="null", input="hi", background=True)
    assert checked(client.responses.cancel(made.id)).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"
    assert client.responses.cancel(made.id).status == "cancelled"
    for _ in range(1000):
        if not server.worker.running:
            break
        time.sleep(0.01)
    assert not server.worker.running
    finished = client.responses.create(model="null", input="hi", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(finished.id)


def test_cancelling_a_background_response_that_is_complete_returns_it(server):
    client = server.openai()
    made = client.responses.create(model="null", input="hi", background=True)
    until(client, made.id, {"completed"})
    found = client.responses.cancel(made.id)
    assert found.status == "completed" and found.output_text == SAID


def test_a_response_that_is_deleted_while_it_runs_stays_away(serve, answering):
    server = serve(script=answering("a" * 1000, interval_s=0.05))
    client = server.openai()
    made = client.responses.create(model="null", input="hi", background=True)
    client.responses.delete(made.id)
    for _ in range(1000):
        if server.worker.submits and not server.worker.running:
            break
        time.sleep(0.01)
    for _ in range(3):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)


def test_a_server_that_keeps_nothing_takes_no_background_response(serve):
    response = serve(response_store_bytes=0).http().post("/v1/responses", json={"input": "hi", "background": True})
    assert response.status_code == 400 and response.json()["error"]["param"] == "background"


def test_an_unforeseen_failure_in_the_background_is_told(server, monkeypatch):
    """If the computation of a background response raises an unexpected exception, the status of the response becomes `failed`; it does not
    stay `queued`."""

    async def whole(_self):
        raise ValueError("unforeseen")

    monkeypatch.setattr(ResponseAnswer, "whole", whole)
    client = server.openai()
    made = client.responses.create(model="null", input="hi", background=True)
    assert until(client, made.id, {"failed"}).error.code == "server_error"


def test_a_failure_in_the_background_is_told(serve, answering):
    client = serve(script=answering("abcdef", fail_after=3)).openai()
    made = client.responses.create(model="null", input="hi", background=True)
    found = checked(until(client, made.id, {"failed"}))
    assert found.error.code == "server_error" and found.error.message and found.output_text == "abc"


# --- errors -------------------------------------------------------------------------------------------------------------


def test_a_failure_in_a_stream_ends_it_as_a_failed_response(serve, answering):
    client = serve(script=answering("abcdef", fail_after=3)).openai()
    *_, last = client.responses.create(model="null", input="hi", stream=True)
    assert last.type == "response.failed" and last.response.error.message and last.response.output_text == "abc"
    assert client.responses.retrieve(last.response.id).status == "failed"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "x" * 5000}, "input"),
        ({"input": "hi", "tools": [ADD], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"type": "shell_call", "action": {"commands": ["ls"]}, "call_id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "tool_search_call", "arguments": {"query": "x"}}]}, "input[0].type"),
        ({"input": [{"id": "msg_nowhere"}]}, "input[0].id"),
        ({"input": "hi", "tools": [ADD], "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"input": "hi", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "hi", "include": ["nonsense"]}, "include[0]"),
        ({"input": "hi", "conversation": "conv_1"}, "conversation"),
        ({"input": "hi", "prompt": {"id": "x"}}, "prompt"),
        ({"input": "hi", "prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"input": "hi", "text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"input": "hi", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        (
            {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"title": "x" * 70_000}}}},
            "text.format.schema",
        ),
        ({"input": "hi", "background": True, "stream": True}, "stream"),
        ({"input": "hi", "background": True, "store": False}, "store"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(server, body, param):
    response = server.http().post("/v1/responses", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"verbosity": "high"}},
        {"service_tier": "fast"},
        {"prompt_cache_options": {"mode": "explicit", "ttl": "30m", "prewarm": False, "comparison_response_id": None}},
        {"stream_options": {"include_obfuscation": True}, "stream": True},
        {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]},
    ],
)
def test_what_clients_send_by_habit_is_accepted(server, fields):
    response = server.http().post("/v1/responses", json={"input": "hi", **fields})
    assert response.status_code == 200 and "x-ignored-params" not in response.headers, response.text


def test_tools_that_the_server_would_run_are_left_out_beside_functions(server):
    """Codex and others offer the vendor's own tools beside functions."""
    tools = [{"type": "web_search", "filters": {"allowed_domains": ["x"]}}, ADD, {"type": "custom", "name": "x", "format": {}}]
    response = server.http().post("/v1/responses", json={"input": "hi", "tools": tools, "reasoning": {"summary": "auto"}})
    assert response.status_code == 200, response.text
    assert response.headers["x-ignored-params"] == "tools[0], tools[2], reasoning.summary"
    assert [tool["name"] for tool in response.json()["tools"]] == ["add"]
    prompt = bytes(i for i in server.worker.submits[-1].prompt_ids if i < 256).decode()
    assert '"add"' in prompt and "web_search" not in prompt


def test_the_older_name_of_a_summary_is_named_too(server):
    response = server.http().post("/v1/responses", json={"input": "hi", "reasoning": {"generate_summary": "concise"}})
    assert response.status_code == 200 and response.headers["x-ignored-params"] == "reasoning.generate_summary"


def test_a_reference_may_lack_its_type(server):
    http = server.http()
    first = http.post("/v1/responses", json={"input": "hi"}).json()
    again = http.post("/v1/responses", json={"input": [{"id": first["output"][0]["id"]}, {"role": "user", "content": "and?"}]})
    assert again.status_code == 200, again.text
    listed = http.get(f"/v1/responses/{again.json()['id']}/input_items?order=asc").json()["data"]
    assert listed[0]["content"][0] == {"type": "output_text", "text": SAID, "annotations": [], "logprobs": []}


def test_a_conversation_that_is_too_long_is_truncated_if_asked(server):
    asked = {"input": "x" * 9000, "max_output_tokens": 10}
    assert server.http().post("/v1/responses", json=asked).status_code == 400
    response = server.http().post("/v1/responses", json={**asked, "truncation": "auto"})
    assert response.status_code == 200 and response.json()["truncation"] == "auto"
    assert len(server.worker.submits[-1].prompt_ids) == 4096 - 10


def test_input_tokens_are_counted(server):
    http = server.http()
    counted = http.post("/v1/responses/input_tokens", json={"input": "hi", "tools": [ADD]}).json()
    used = http.post("/v1/responses", json={"input": "hi", "tools": [ADD]}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": used["usage"]["input_tokens"]}
    after = http.post("/v1/responses/input_tokens", json={"previous_response_id": used["id"], "tools": [ADD]}).json()
    assert after["input_tokens"] > counted["input_tokens"]
    assert http.post("/v1/responses/input_tokens", json={}).json()["error"]["param"] == "input"
    refused = http.post("/v1/responses/compact", json={"input": "hi"})
    assert refused.status_code == 404 and "not compacted" in refused.json()["error"]["message"]


def test_unknown_fields_are_reported_wherever_they_are(serve):
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hi", "zip": 1}], "zap": 1}]
    body = {"input": items, "text": {"zop": 1}, "zep": 1}
    names = ["zep", "input[0].zap", "input[0].content[0].zip", "text.zop"]
    assert serve().http().post("/v1/responses", json=body).headers["x-ignored-params"].split(", ") == names
    strict = serve(strict=True).http()
    assert strict.post("/v1/responses", json=body).json()["error"]["code"] == "unknown_field"
    assert strict.post("/v1/responses", json={"input": "hi"}).status_code == 200


def test_the_client_s_fields_are_known(server):
    """For each parameter of the OpenAI client's `responses.create`, the API applies the parameter, ignores it, or refuses it with an error
    that names it."""
    fields = inspect.signature(Responses.create).parameters.keys() - {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert fields <= ResponseBody.model_fields.keys() | UNSUPPORTED.keys(), fields - ResponseBody.model_fields.keys()


# --- items that several responses have ------------------------------------------------------------------------------------


def test_an_item_is_kept_as_long_as_a_response_has_it(server):
    client = server.openai()
    first = client.responses.create(model="null", input="hi")
    second = client.responses.create(model="null", input="more", previous_response_id=first.id)
    client.responses.delete(second.id)
    reference = {"type": "item_reference", "id": first.output[0].id}
    client.responses.create(model="null", input=[reference, {"role": "user", "content": "b"}])
    assert prompt_of(server).startswith(f"<|assistant|>{SAID}")


def test_keys_may_use_the_same_ids(serve):
    """Clients choose the ids of the items that they send."""
    server = serve(api_keys=["key-of-the-one", "key-of-the-other"])
    one, other = server.openai(api_key="key-of-the-one"), server.openai(api_key="key-of-the-other")
    for client, text in ((one, "of the one"), (other, "of the other")):
        client.responses.create(model="null", input=[{"type": "message", "id": "msg_1", "role": "user", "content": text}])
    one.responses.create(model="null", input=[{"type": "item_reference", "id": "msg_1"}])
    assert prompt_of(server).startswith("<|user|>of the one")


def test_a_long_answer_with_log_probabilities_is_continued(serve, answering):
    server = serve(script=replace(answering("x" * 5000, step=500), max_context=1 << 15))
    http = server.http()
    body = {"input": "hi", "include": ["message.output_text.logprobs"]}
    made = http.post("/v1/responses", json=body).json()
    assert len(made["output"][0]["content"][0]["logprobs"]) == 5000
    more = http.post("/v1/responses", json={"input": "more", "previous_response_id": made["id"]})
    assert more.status_code == 200, more.text
    assert http.get(f"/v1/responses/{made['id']}").json() == made
    items = http.get(f"/v1/responses/{more.json()['id']}/input_items?order=asc").json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant", "user"] and items[1]["content"][0]["text"] == "x" * 5000


def test_pages_of_input_items_end(server):
    """A client may send an item again that its conversation has already."""
    client = server.openai()
    items = [{"type": "message", "id": f"msg_{name}", "role": "user", "content": name} for name in "abac"]
    made = client.responses.create(model="null", input=items)
    listed = client.responses.input_items.list(made.id, limit=1, order="asc")
    found = [item for item, _ in zip(listed, range(10), strict=False)]
    assert [item.content[0].text for item in found] == ["a", "b", "a", "c"]
    more = client.responses.create(model="null", input=items[:1], previous_response_id=made.id)
    found = [item for item, _ in zip(client.responses.input_items.list(more.id, limit=2), range(10), strict=False)]
    assert len(found) == 6 and len({item.id for item in found}) == 6
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_items.list(made.id, after="msg_none")
    assert caught.value.param == "after"


INGRESS = "key-of-an-ingress"


def test_a_request_that_an_ingress_sends_again_stores_one_response(serve):
    """Its ids follow from the ingress's nonce, so the second response has the id of the first. A response that continues another must be
    asked of the server that has the other, so both may reach one server."""
    server = serve(ingress_key=INGRESS, response_store_bytes=3000)
    http = server.http(headers={"x-relaxserve-open": f"{INGRESS} {'ab' * 16} 1700000000"})
    ids = {http.post("/v1/responses", json={"model": "null", "input": "hi"}).json()["id"] for _ in range(6)}
    (response_id,) = ids
    assert http.delete(f"/v1/responses/{response_id}").json()["deleted"] is True
    assert http.get(f"/v1/responses/{response_id}").status_code == 404
    own = server.http().post("/v1/responses", json={"model": "null", "input": "hi"}).json()["id"]
    assert server.http().get(f"/v1/responses/{own}").status_code == 200, "nothing is counted that is not stored"
