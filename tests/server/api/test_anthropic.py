"""`/v1/messages`, used through Anthropic's official client."""

from __future__ import annotations

import inspect
import json
import re
from functools import partial

import pytest

from server.api.anthropic.body import MessagesBody
from server.api.openai import chat
from server.api.request.fields import UNSUPPORTED
from server.defaults import Defaults
from server.messages import Thinking
from server.models.state import ModelSpec
from tests.doubles.worker import ByteTokenizer
from tests.lazily import imported_later

anthropic = imported_later("anthropic")

SAID = "Hello from the null device."
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
HERMES = (ModelSpec("null", "null", tool_parser="hermes", reasoning=True),)
PNG = {"type": "base64", "media_type": "image/png", "data": "aGk="}
HI = [{"role": "user", "content": "hi"}]
LARGE = {"type": "json_schema", "schema": {"type": "object", "title": "x" * 70_000}}


@pytest.fixture
def connect():
    """Return a function that makes a client for a server; clients are closed at the end."""
    made = []

    def connect(server, **options):
        made.append(anthropic.Anthropic(base_url=server.url, **{"api_key": "unused", "max_retries": 0, "timeout": 60, **options}))
        return made[-1]

    yield connect
    for client in made:
        client.close()


def prompt_of(server) -> str:
    return bytes(i for i in server.worker.submits[-1].prompt_ids if i < 256).decode()


def ask(client, **fields) -> anthropic.types.Message:
    return client.messages.create(**{"model": "null", "max_tokens": 100, "messages": HI, **fields})


def checked(message: anthropic.types.Message) -> anthropic.types.Message:
    """Validate the message strictly against the Anthropic client's own type, and return it."""
    return anthropic.types.Message.model_validate_json(message.model_dump_json(exclude_unset=True), strict=True)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": "x\n\ty"}', {"a": "x\n\ty"}),
        (r'{"a": "\ud83d", "b": 1}', {"a": "\ufffd", "b": 1}),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        ('{"a": NaN}', {}),
        ('{"a": 1e999}', {}),
        ('{"a": ', {}),
    ],
)
def test_arguments_are_an_object(serve, answering, connect, written, read):
    """In this API arguments are no text. A tool must not be called without arguments because the model left a line end unescaped."""
    server = serve(script=answering(CALL.replace('{"a": 1}', written)), initial=HERMES)
    (block,) = ask(connect(server), tools=[ADD], max_tokens=200).content
    assert block.name == "add" and block.input == read


def test_a_raw_line_end_in_streamed_arguments_is_escaped(serve, answering, connect):
    server = serve(script=answering(CALL.replace("1", '"x\n\ty\\\n"')), initial=HERMES)
    with connect(server).messages.stream(model="null", messages=HI, max_tokens=200, tools=[ADD]) as events:
        pieces = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
        (block,) = events.get_final_message().content
    assert json.loads("".join(pieces)) == block.input == {"a": "x\n\ty\n"}


def test_whole_answer(server, connect):
    message = checked(ask(connect(server), system="Be brief."))
    assert message.content[0].text == SAID and message.id.startswith("msg_") and message.model == "null"
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == len(SAID) and message.usage.input_tokens == len(prompt_of(server))
    assert prompt_of(server) == "<|system|>Be brief.\n<|user|>hi\n<|assistant|>"


def test_the_client_knows_the_id_of_its_request(server, connect):
    client = connect(server, default_headers={"x-request-id": "mine-1"})
    assert ask(client)._request_id == client.models.retrieve("null")._request_id == "mine-1"
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, max_tokens=-1)
    assert caught.value.request_id == "mine-1"


def test_models_are_listed_and_found(server, connect):
    listed = connect(server, _strict_response_validation=True).models.list()
    assert [model.id for model in listed] == ["null"] and not listed.has_more
    model = connect(server, _strict_response_validation=True).models.retrieve("null")
    assert model == listed.data[0]
    assert (model.type, model.display_name, model.lifecycle) == ("model", "null", "active") and model.max_input_tokens


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_the_stream_has_all_events_in_order(serve, answering, connect, step):
    server = serve(script=answering(f"<think>hm</think>Sure.{CALL}", step=step), initial=HERMES)
    client = connect(server)
    events = list(ask(client, tools=[ADD], stream=True))
    kinds = [(event.type, getattr(getattr(event, "delta", None), "type", None)) for event in events]
    block = [("content_block_start", None), ("content_block_delta", "KIND"), ("content_block_stop", None)]
    expected = [("message_start", None)]
    for kind in ("thinking_delta", "text_delta", "input_json_delta"):
        expected += [(name, kind if part == "KIND" else part) for name, part in block]
    expected.insert(3, ("content_block_delta", "signature_delta"))
    expected += [("message_delta", None), ("message_stop", None)]
    assert [kind for at, kind in enumerate(kinds) if at == 0 or kind != kinds[at - 1]] == expected
    with client.messages.stream(model="null", max_tokens=100, messages=HI, tools=[ADD]) as stream:
        streamed = stream.get_final_message()
    whole = checked(ask(client, tools=[ADD]))
    for message in (streamed, whole):
        thought, text, call = message.content
        assert (thought.thinking, text.text, call.name, call.input) == ("hm", "Sure.", "add", {"a": 1})
        assert message.stop_reason == "tool_use" and message.usage.output_tokens == whole.usage.output_tokens


def test_thoughts_are_counted_apart(serve, answering, connect):
    """`output_tokens` has all tokens, and `output_tokens_details` those of thoughts, in a stream as in a whole message."""
    client = connect(serve(script=answering("<think>hm</think>Sure."), initial=HERMES))
    whole = ask(client)
    *_, last, _ = ask(client, stream=True)
    for usage in (whole.usage, last.usage):
        assert usage.output_tokens == len("<think>hm</think>Sure.")
        assert len("hm") <= usage.output_tokens_details.thinking_tokens <= len("<think>hm</think>")
    assert ask(connect(serve(script=answering("Sure."), initial=HERMES))).usage.output_tokens_details.thinking_tokens == 0


def test_stop_reasons(serve, answering, connect):
    client = connect(serve(script=answering("one two three")))
    assert ask(client, max_tokens=3).stop_reason == "max_tokens"
    stopped = ask(client, stop_sequences=["two"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "two", "one ")
    *_, last, _ = ask(client, stop_sequences=["two"], stream=True)
    assert (last.delta.stop_reason, last.delta.stop_sequence) == ("stop_sequence", "two")


def test_a_default_stop_string_of_the_model_is_no_stop_sequence(serve, answering, connect):
    """The operator's stop strings end a turn: the client has named none, so its answer names none."""
    spec = ModelSpec("null", "null", defaults=Defaults(stop=("two",)))
    client = connect(serve(script=answering("one two three"), initial=(spec,)))
    message = ask(client)
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("one ", "end_turn", None)
    *_, last, _ = ask(client, stream=True)
    assert (last.delta.stop_reason, last.delta.stop_sequence) == ("end_turn", None)


def test_more_tokens_than_fit_are_as_many_as_fit(serve, answering, connect):
    """A `max_tokens` larger than the free part of the context is no error; the answer may fill the context. This API requires `max_tokens`,
    so clients send a large value."""
    server = serve(script=answering("x" * 9000, step=50))
    message = ask(connect(server), max_tokens=64000)
    submit = server.worker.submits[-1]
    assert submit.params.max_tokens + len(submit.prompt_ids) == 4096
    assert message.stop_reason == "model_context_window_exceeded"


# --- the conversation ---------------------------------------------------------------------------------------------------


def test_no_tokens_only_compute_the_prompt(server, connect):
    """As in Anthropic's API, whose clients warm the cache in this way."""
    client = connect(server)
    answer = checked(ask(client, max_tokens=0))
    assert (answer.content, answer.stop_reason, answer.stop_sequence, answer.usage.output_tokens) == ([], "max_tokens", None, 0)
    assert server.worker.submits[-1].params.max_tokens == 1 and answer.usage.input_tokens > 0
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is 0 and stream is true; the answer is empty: leave stream out"):
        client.messages.create(model="null", max_tokens=0, messages=HI, stream=True)


def test_blocks_are_the_conversation(serve, connect):
    server = serve(initial=HERMES)
    cached = {"type": "ephemeral"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Sure."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "2"},
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "no a"}], "is_error": True},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be", "cache_control": cached}, {"type": "text", "text": "kind."}]
    raw = connect(server).messages.with_raw_response.create(model="null", max_tokens=5, messages=messages, system=system, tools=[ADD])
    assert "x-ignored-params" not in raw.headers
    lines = prompt_of(server).split("\n")
    assert lines[0].startswith("<tools>") and '"name": "add"' in lines[0] and '"a": {"type": "integer"}' in lines[0]
    assert lines[1:4] == ["<|system|>Be", "kind.", "<|user|>ab"]
    assert lines[4].startswith("<|assistant|>Sure.<tool_call>") and '"arguments": {"a": 1}' in lines[4]
    assert lines[5:] == ["<|tool|>2", "<|tool|>Error: no a", "<|user|>go on", "<|assistant|>"]


def test_the_beginning_of_an_answer_is_continued(server, connect):
    ask(connect(server), messages=[*HI, {"role": "assistant", "content": "Well,"}])
    assert prompt_of(server) == "<|user|>hi\n<|assistant|>Well,"


@pytest.mark.parametrize(
    ("choice", "held"),
    [({"type": "any"}, True), ({"type": "tool", "name": "add"}, True), ({"type": "auto"}, False), ({"type": "none"}, False)],
)
def test_tool_choice(serve, connect, choice, held):
    server = serve(initial=(ModelSpec("null", "null", tool_parser="hermes", reasoning=False),))
    ask(connect(server), tools=[ADD], tool_choice=choice)
    constraint = server.worker.submits[-1].params.constraint
    assert (constraint is not None and constraint.trigger is None) is held
    assert ("<tools>" in prompt_of(server)) is (choice["type"] != "none")


def test_one_call_where_parallel_calls_are_off(serve, answering, connect):
    client = connect(serve(script=answering(f"{CALL}\n{CALL}"), initial=HERMES))
    assert len(ask(client, tools=[ADD]).content) == 2
    assert len(ask(client, tools=[ADD], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).content) == 1


def test_thoughts_are_asked_for(serve, connect, monkeypatch):
    """A request without `thinking` turns thoughts off if the template has a switch for them. A thinking budget is applied if the model has
    a token that ends thoughts."""
    tokenizer = ByteTokenizer(specials=["<think>", "</think>"])
    server = serve(tokenizer=tokenizer, initial=(ModelSpec("null", "null", tool_parser="hermes", reasoning=True),))
    seen = []
    template = type(tokenizer.chat_template)
    original = template.render
    monkeypatch.setattr(
        template, "render", lambda self, *args, **kwargs: seen.append(kwargs["variables"]) or original(self, *args, **kwargs)
    )
    client = connect(server)
    ask(client, max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024})
    assert seen[-1]["enable_thinking"] is True
    assert server.worker.submits[-1].params.thinking == Thinking(1024, (258,), 259, False)
    ask(client)
    assert seen[-1]["enable_thinking"] is False and server.worker.submits[-1].params.thinking is None
    ask(client, thinking={"type": "adaptive"}, output_config={"effort": "low"})
    assert seen[-1]["enable_thinking"] is True and seen[-1]["reasoning_effort"] == "low"
    ask(client, thinking={"type": "between_tools"})
    assert seen[-1]["enable_thinking"] is False


@pytest.mark.parametrize("display", [None, "summarized", "omitted"])
def test_thoughts_may_be_omitted(serve, answering, connect, display):
    """A client that omits thoughts gets their blocks without text, so that it knows that the model thinks, and sends them back."""
    server = serve(script=answering("<think>hm</think>Sure."), initial=(ModelSpec("null", "null", reasoning=True),))
    client, asked = connect(server), {"type": "adaptive", **({} if display is None else {"display": display})}
    whole = ask(client, max_tokens=100, thinking=asked)
    with client.messages.stream(model="null", messages=HI, max_tokens=100, thinking=asked) as events:
        kinds = [event.delta.type for event in events if event.type == "content_block_delta"]
        streamed = events.get_final_message()
    for message in (whole, streamed):
        thought, text = message.content
        assert (thought.type, thought.thinking, text.text) == ("thinking", "" if display == "omitted" else "hm", "Sure.")
        assert thought.signature
        assert message.usage.output_tokens == whole.usage.output_tokens
    assert ("thinking_delta" in kinds) == (display != "omitted") and kinds.count("signature_delta") == 1
    again = [*HI, {"role": "assistant", "content": [block.model_dump() for block in whole.content]}, *HI]
    assert ask(client, messages=again, thinking=asked).content


def test_a_tool_runner_sends_the_whole_conversation(serve, answering, connect):
    """By default, the client's tool runner lets the server hold the conversation and sends only new messages. The refusal of `thread` makes
    it send all of them."""

    @anthropic.beta_tool
    def add(a: int) -> str:
        """Add."""
        return f"{a} and more"

    script = answering(CALL)
    script.answer = lambda submit, _choice: [
        list(b"Done." if b"and more" in bytes(i for i in submit.prompt_ids if i < 256) else CALL.encode())
    ]
    server = serve(script=script, initial=HERMES)
    runner = connect(server).beta.messages.tool_runner(model="null", max_tokens=200, messages=HI, tools=[add], max_iterations=3)
    assert runner.until_done().content[0].text == "Done."
    assert "<|user|>hi\n<|assistant|><tool_call>" in prompt_of(server) and "<|tool|>1 and more" in prompt_of(server)
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        answer = server.http().post("/v1/messages", json={"max_tokens": 5, "messages": HI, "thread": thread})
        assert answer.status_code == 400 and answer.json()["error"]["details"]["error_code"] == "thread_unsupported_request"


def test_an_answer_may_be_held_to_a_schema(server, connect):
    schema = {"type": "object", "properties": {"zebra": {"type": "integer"}}}
    ask(connect(server), output_config={"format": {"type": "json_schema", "schema": schema}})
    assert '"zebra"' in server.worker.submits[-1].params.constraint.source


def test_the_earlier_name_of_a_format_is_known(server):
    """Clients of the beta, in which structured outputs began, send `output_format` instead of `output_config.format`."""
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"zebra": {"type": "integer"}}}}
    body = {"messages": HI, "max_tokens": 5, "output_format": form}
    answer = server.http().post("/v1/messages?beta=true", json=body)
    assert answer.status_code == 200 and "x-ignored-params" not in answer.headers
    assert '"zebra"' in server.worker.submits[-1].params.constraint.source
    refused = server.http().post("/v1/messages", json={**body, "output_config": {"format": form}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "output_format"


@pytest.mark.parametrize(
    "block",
    [
        {"type": "search_result", "source": "https://example.com", "title": "A", "content": [{"type": "text", "text": "b"}]},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "web_search_tool_result_error", "error_code": "x"}},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "a"}, "caller": "x"},
    ],
)
@pytest.mark.parametrize("is_result", [False, True])
def test_a_block_of_an_unknown_type_is_refused_by_its_type(server, block, is_result):
    """Fields of such a block may have values that fields of known blocks cannot have."""
    content = [{"type": "tool_result", "tool_use_id": "t", "content": [block]}] if is_result else [block]
    answer = server.http().post("/v1/messages", json={"max_tokens": 5, "messages": [{"role": "user", "content": content}]}).json()
    where = "messages[0].content[0].content[0]" if is_result else "messages[0].content[0]"
    assert (answer["error"]["code"], answer["error"]["param"]) == ("unsupported_content", f"{where}.type"), answer


def test_an_error_about_a_format_names_the_field_that_was_sent(serve):
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a" * 200: {"type": "integer"}}}}
    server = serve(max_schema_bytes=100)
    for field, given in (("output_format", {"output_format": form}), ("output_config.format", {"output_config": {"format": form}})):
        error = server.http().post("/v1/messages", json={"messages": HI, "max_tokens": 5, **given}).json()["error"]
        assert error["param"] == f"{field}.schema" and error["message"].startswith(f"{field}.schema has "), error


def test_sampling_reaches_the_worker(server, connect):
    ask(connect(server), extra_body={"temperature": 0.25, "top_p": 0.5, "top_k": 7, "seed": 5})
    params = server.worker.submits[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.25, 0.5, 7, 5)


def test_tokens_are_counted(server, connect):
    client = connect(server)
    counted = client.messages.count_tokens(model="null", messages=HI, system="Be brief.", tools=[ADD])
    ask(client, system="Be brief.", tools=[ADD])
    assert counted.input_tokens == len(server.worker.submits[-1].prompt_ids)
    long = [{"role": "user", "content": "x" * 9000}]
    assert client.messages.count_tokens(model="null", messages=long).input_tokens > 9000, "prompts beyond the context can be counted"


# --- errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": HI}, "max_tokens"),
        ({"max_tokens": 5}, "messages"),
        ({"max_tokens": -1, "messages": HI}, "max_tokens"),
        (
            {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source.type",
        ),
        ({"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        (
            {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image", "source": PNG}]}]},
            "messages[0].content[0].source.data",
        ),
        ({"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"max_tokens": 5, "messages": HI, "tools": [ADD], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"max_tokens": 5, "messages": HI, "mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"max_tokens": 5, "messages": HI, "container": "x"}, "container"),
        ({"max_tokens": 5, "messages": HI, "stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"max_tokens": 5, "messages": HI, "output_config": {"format": LARGE}}, "output_config.format.schema"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(server, body, param):
    response = server.http().post("/v1/messages", json=body)
    answer = response.json()
    assert response.status_code == 400 and answer["type"] == "error", response.text
    assert (answer["error"]["type"], answer["error"]["param"]) == ("invalid_request_error", param)
    assert "response_format" not in answer["error"]["message"] and not answer["error"]["message"].startswith("stop ")


def test_errors_have_the_shape_of_this_api(serve, connect):
    """All errors have Anthropic's format, even errors that the server finds before it calls the endpoint: a wrong key, or a body that is
    too large."""
    server = serve(api_keys=["a-key-of-a-client"], max_body_bytes=2000)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        ask(connect(server))
    assert caught.value.body["error"]["type"] == "authentication_error"
    client = connect(server, api_key="a-key-of-a-client")
    assert ask(client).content[0].text == SAID
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(client, model="other")
    assert missing.value.body["error"]["code"] == "model_not_found"
    with pytest.raises(anthropic.APIStatusError) as large:
        ask(client, messages=[{"role": "user", "content": "x" * 3000}])
    assert large.value.body["error"]["type"] == "request_too_large"
    assert "type" not in server.http().post("/v1/completions", json={}).json()


def test_an_overflow_is_worded_as_clients_know_it(server, connect, monkeypatch):
    monkeypatch.setattr(chat, "MAX_COUNTED", 1)
    client = connect(server)
    for call, length in ((partial(ask, client), 5000), (partial(client.messages.count_tokens, model="null"), 200_000)):
        with pytest.raises(anthropic.BadRequestError) as caught:
            call(messages=[{"role": "user", "content": "x" * length}])
        message = caught.value.body["error"]["message"]
        assert message.startswith("prompt is too long: ") and "truncate_prompt_tokens" not in message, "this API has no such field"


def test_a_refused_block_beside_an_image_is_named_by_its_own_place(server):
    blocks = [{"type": "text", "text": "a"}, {"type": "image", "source": PNG}, {"type": "document", "source": PNG}]
    body = {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": blocks}]}]}
    error = server.http().post("/v1/messages/count_tokens", json={"model": "null", **body}).json()["error"]
    assert error["param"] == "messages[0].content[0].content[2].type"
    assert error["message"].startswith("messages[0].content[0].tool_result.content[2].document has type"), error


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("kind", ["image", "document"])
def test_refused_media_are_named_as_clients_know_them(server, path, kind):
    """Claude Code searches an error for the path of an image or a document, leaves this block out, and asks again. Without such a path,
    each later turn of the conversation would be refused as well."""
    media = {"type": kind, "source": {**PNG, "data": "aGk="}}
    known = re.compile(r"messages[.[](\d+)[\].]+content[.[](\d+)[\].]+(?:tool_result[.[]content[.[]\d+[\].]+)?(image|document|pdf)")
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "read"}, media]}
    called = [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "add", "input": {}}]}]
    for content in ([media], [result]):
        body = {"model": "null", "messages": [*called, {"role": "user", "content": [{"type": "text", "text": "see"}, *content]}]}
        response = server.http().post(path, json=body if path.endswith("tokens") else {**body, "max_tokens": 5})
        found = known.match(response.json()["error"]["message"])
        assert response.status_code == 400 and found is not None and found.groups() == ("2", "1", kind), response.text
        assert response.json()["error"]["param"].startswith("messages[2].content[1]."), "a path of the request itself"


def test_a_failure_in_a_stream_is_an_event(serve, answering, connect):
    client = connect(serve(script=answering("abcdef", fail_after=3)))
    events = []
    with pytest.raises(anthropic.APIStatusError) as caught:
        events.extend(ask(client, stream=True))
    assert caught.value.body["error"]["type"] == "api_error" and caught.value.body["error"]["code"] == "generation_failed"


def test_a_call_that_is_cut_off_is_streamed_as_far_as_it_came(serve, answering, connect):
    server = serve(script=answering(CALL), initial=HERMES)
    events = list(ask(connect(server), tools=[ADD], max_tokens=len(CALL) - 17, stream=True))
    pieces = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
    assert '{"a": 1}'.startswith("".join(pieces)) and pieces and events[-2].delta.stop_reason == "max_tokens"
    whole = server.http().post("/v1/messages", json={"messages": HI, "tools": [ADD], "max_tokens": len(CALL) - 17}).json()
    assert whole["stop_reason"] == "max_tokens" and whole["content"][0]["input"] == {}


def test_a_call_that_a_stop_sequence_cuts_is_not_to_be_made(serve, answering, connect):
    call = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    client = connect(serve(script=answering(call), initial=(ModelSpec("null", "null", tool_parser="qwen3-coder"),)))
    message = ask(client, tools=[ADD], stop_sequences=["1"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "1")


def test_unknown_fields_are_reported_wherever_they_are(serve):
    message = {"role": "user", "content": [{"type": "text", "text": "hi", "zip": 1}], "zap": 1}
    body = {"messages": [message], "max_tokens": 5, "zep": 1, "tools": [{**ADD, "zop": 1}]}
    names = ["zep", "messages[0].zap", "messages[0].content[0].zip", "tools[0].zop"]
    assert serve().http().post("/v1/messages", json=body).headers["x-ignored-params"].split(", ") == names
    assert serve(strict=True).http().post("/v1/messages", json=body).json()["error"]["code"] == "unknown_field"


def test_the_client_s_fields_are_known():
    """For each parameter of the Anthropic client's `messages.create`, the API applies the parameter, ignores it, or refuses it with an
    error that names it."""
    fields = inspect.signature(anthropic.resources.Messages.create).parameters.keys() - {
        "self",
        "extra_headers",
        "extra_query",
        "extra_body",
        "timeout",
    }
    assert fields <= MessagesBody.model_fields.keys() | UNSUPPORTED.keys(), fields - MessagesBody.model_fields.keys()


BILLING = "x-anthropic-billing-header: cc_version=2.1.37.fbe; cc_entrypoint=cli; cch={};"


def test_the_hash_of_claude_code_does_not_change_the_prompt(serve):
    """Claude Code puts a new hash into the first line of each request. Other text with `cch=` is left alone."""
    server, keeping = serve(), serve(keep_agent_hashes=True)

    def prompt_of(one, value: str, first: str = BILLING) -> bytes:
        system = [{"type": "text", "text": first.format(value)}, {"type": "text", "text": "You write code; cch=5."}]
        body = {"model": "null", "max_tokens": 5, "messages": HI, "system": system}
        assert one.http().post("/v1/messages", json=body).status_code == 200
        return bytes(one.worker.submits[-1].prompt_ids[1:])

    assert prompt_of(server, "a1b2c") == prompt_of(server, "00f") and b"cch=0;\nYou write code; cch=5." in prompt_of(server, "a1b2c")
    assert b"cch=a1b2c;" in prompt_of(keeping, "a1b2c")
    assert b"cch=a1b2c" in prompt_of(server, "a1b2c", "See cch={};")
