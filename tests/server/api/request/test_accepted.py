"""The API accepts requests in the formats of OpenAI and of other inference servers. A field that would change the answer is applied or
refused with an error that names the field."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest

from server.api.request.conversation import for_template
from server.api.request.schema import Message, MessageCall
from server.api.request.texts import kept_of
from server.defaults import Defaults
from server.http.json_scan import MAX_PARTS
from server.models.state import ModelSpec
from tests.doubles.worker import ByteTokenizer
from tests.lazily import imported_later

anthropic = imported_later("anthropic")

MESSAGES = [{"role": "user", "content": "hi"}]
END = ByteTokenizer.EOS
JSON = {"content-type": "application/json"}


def prompt_of(server) -> str:
    return bytes(i for i in server.worker.submits[-1].prompt_ids if i < 256).decode()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_unlimited_tokens_are_as_many_as_fit(server, path):
    """`max_tokens` of -1, which llama.cpp's clients send, means no limit except the context: the answer may fill what the prompt leaves
    free."""
    server.http().post(path, json={"messages": MESSAGES, "max_tokens": -1} if "chat" in path else {"prompt": "hi", "max_tokens": -1})
    submit = server.worker.submits[-1]
    assert submit.params.max_tokens + len(submit.prompt_ids) == 4096


def test_an_integer_may_be_written_as_a_fraction(server):
    """The API accepts 20.0 where it expects an integer, because JSON has only one type of number and some clients write 20 as 20.0."""
    assert server.chat(max_tokens=20.0, seed=1.0, top_k=5.0).status_code == 200
    assert server.worker.submits[-1].params.max_tokens == 20 and server.worker.submits[-1].params.top_k == 5
    assert server.chat(max_tokens=True).status_code == 400


def test_a_top_p_of_zero_leaves_the_most_probable_token(server):
    assert server.chat(top_p=0).status_code == 200
    assert 0 < server.worker.submits[-1].params.top_p < 1e-6


def test_the_former_way_of_calling_functions_is_understood_in_history(server):
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "add", "content": "2"},
    ]
    assert server.chat(messages=history).status_code == 200
    assert '"name": "add", "arguments": {"a": 1}' in prompt_of(server) and "<|tool|>2" in prompt_of(server)


def test_an_assistant_may_have_said_nothing(server):
    assert server.chat(messages=[*MESSAGES, {"role": "assistant", "content": None}, *MESSAGES]).status_code == 200


def test_thoughts_are_taken_back_under_either_name(server):
    for name in ("reasoning_content", "reasoning"):
        response = server.chat(messages=[*MESSAGES, {"role": "assistant", "content": "a", name: "hm"}, *MESSAGES])
        assert response.status_code == 200 and "x-ignored-params" not in response.headers


def test_templates_find_thoughts_under_both_of_their_names() -> None:
    """The template receives the thoughts of an earlier assistant message under two names, `reasoning_content` and `thinking`. If the
    message has both calls and content, `thinking` is left out, because gpt-oss's template refuses that combination."""
    call = MessageCall.model_validate({"function": {"name": "add", "arguments": "{}"}})
    for calls, content, shown in ([], "a", True), ([call], None, True), ([call], "a", False):
        (message,) = for_template([Message(role="assistant", content=content, reasoning_content="hm", tool_calls=calls)])
        assert message["reasoning_content"] == "hm" and message.get("thinking") == ("hm" if shown else None)


def test_a_role_is_what_the_template_makes_of_it(server):
    assert server.chat(messages=[{"role": "critic", "content": "x"}]).status_code == 200
    assert "<|critic|>x" in prompt_of(server)


# --- fields of other servers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["max_new_tokens", "n_predict", "num_predict"])
def test_the_length_of_an_answer_under_the_names_of_peers(server, field):
    assert server.chat(**{field: 5}).json()["choices"][0]["message"]["content"] == "Hello"


@pytest.mark.parametrize(
    "field",
    [
        "prompt_embeds",
        "repetition_detection",
        "spaces_between_special_tokens",
        "vllm_xargs",
        "ec_transfer_params",
        "return_token_offsets",
        "return_prompt_text",
        "stream_interval",
        "watermarking",
        "n_probs",
        "samplers",
        "dynatemp_range",
        "min_keep",
        "adaptive_target",
        "t_max_predict_ms",
        "reasoning_format",
        "grammar_lazy",
        "grammar_triggers",
        "response_fields",
        "timings_per_token",
        "reasoning",
        "thinking",
        "options",
        "return_hidden_states",
        "input_type",
    ],
)
def test_what_would_change_an_answer_is_refused_by_name(server, field):
    error = server.chat(**{field: 5}).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_field", field)


@pytest.mark.parametrize("field", ["instruction", "late_chunking", "embd_normalize", "padding", "priority", "cache_salt"])
def test_what_would_change_a_vector_is_refused_by_name(embedder, field):
    error = embedder.http().post("/v1/embeddings", json={"input": "a", field: 5}).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_field", field)


# --- unknown fields at every depth ----------------------------------------------------------------------------------

NESTED = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "zip": 1}], "zap": 1},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "zop": 1}, "zep": 1}]},
    ],
    "tools": [{"type": "function", "foo": 1, "function": {"name": "f", "bar": 1}}],
}
NAMES = [
    "messages[0].zap",
    "messages[0].content[0].zip",
    "messages[1].tool_calls[0].zep",
    "messages[1].tool_calls[0].function.zop",
    "tools[0].foo",
    "tools[0].function.bar",
]


def test_unknown_fields_within_lists_are_reported(server):
    assert server.chat(**NESTED).headers["x-ignored-params"].split(", ") == NAMES


def test_an_unknown_field_that_is_null_asks_for_nothing(serve):
    """Official clients write the fields of an answer that have no value as null when the answer is sent back."""
    strict = serve(strict=True)
    message = {"role": "assistant", "content": "hi", "annotations": None, "audio": None}
    response = strict.chat(messages=[*MESSAGES, message, *MESSAGES], zap=None)
    assert response.status_code == 200 and "x-ignored-params" not in response.headers, response.text


def test_answers_are_sent_back_as_clients_dump_them(serve, answering):
    call = 'Yes.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    server = serve(script=answering(call), initial=[ModelSpec("null", "null", tool_parser="hermes")], strict=True)
    asked, client = {"role": "user", "content": "add"}, server.openai()
    tools: Any = [{"type": "function", "function": ADD}]
    said = client.chat.completions.create(model="null", messages=[asked], tools=tools).choices[0].message
    client.chat.completions.create(model="null", messages=[asked, said.model_dump(), asked], tools=tools)
    first = client.responses.create(model="null", input=[asked], tools=[{"type": "function", **ADD}])
    assert {item.type for item in first.output} == {"message", "function_call"}
    client.responses.create(model="null", input=[asked, *(item.model_dump() for item in first.output), asked])
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=60) as other:
        named = [{"name": "add", "input_schema": ADD["parameters"]}]
        content = other.messages.create(model="null", max_tokens=99, messages=[asked], tools=named).content
        assert [block.type for block in content] == ["text", "tool_use"]
        back = {"role": "assistant", "content": [block.model_dump() for block in content]}
        other.messages.create(model="null", max_tokens=99, messages=[asked, back, asked], tools=named)


def test_unknown_fields_within_lists_are_refused_when_strict(serve):
    strict = serve(strict=True)
    error = strict.chat(**NESTED).json()["error"]
    assert (error["code"], error["param"]) == ("unknown_field", NAMES[0])
    assert strict.chat(messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f", "bar": 1}}]).status_code == 400
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert strict.chat(messages=image).json()["error"]["code"] == "unsupported_content"


# --- the limit of the context -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [{"prompt": "x" * 5000}, {"prompt": "x" * 5000, "max_tokens": 200}, {"prompt": "x" * 600_000}],
)
def test_an_overflow_is_worded_as_clients_know_it(server, body):
    error = server.http().post("/v1/completions", json=body).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 4096 tokens. However, ")


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "field", "room"),
    [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 32_000}, "max_tokens", 4096 - 24),
        ("/v1/chat/completions", {"messages": HI, "max_completion_tokens": 32_000}, "max_tokens", 4096 - 24),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 32_000}, "max_tokens", 4096 - 3),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 32_000}, "max_output_tokens", 4096 - 24),
        ("/api/chat", {"model": "null", "messages": HI, "options": {"num_predict": 32_000}}, "options.num_predict", 4096 - 24),
        ("/v1/messages", {"messages": HI, "max_tokens": 32_000}, None, 4096 - 24),
    ],
)
def test_an_answer_is_limited_to_the_room_in_the_context(server, path, body, field, room):
    """Agents ask for long answers whatever the context is."""
    answer = server.http().post(path, json=body)
    assert answer.status_code == 200 and server.worker.submits[-1].params.max_tokens == room
    assert answer.headers.get("x-capped-params") == (None if field is None else f"{field}={room}")
    fitting = {name: 5 if value == 32_000 else value for name, value in body.items()}
    assert (
        "x-capped-params"
        not in server.http().post(path, json={**fitting, "options": {"num_predict": 5}} if "options" in body else fitting).headers
    )


def test_when_strict_a_limit_beyond_the_context_is_refused(serve):
    strict = serve(strict=True)
    for answer in (strict.chat(max_tokens=5000), strict.complete(max_tokens=5000)):
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")


BUILT_IN = [{"type": "namespace", "name": "x", "tools": [{"type": "function"}]}, {"type": "web_search"}, {"type": "custom", "name": "y"}]
ADD = {"name": "add", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "body", "function"),
    [
        ("/v1/chat/completions", {"messages": HI}, {"type": "function", "function": ADD}),
        ("/v1/responses", {"input": "hi"}, {"type": "function", **ADD}),
        ("/api/chat", {"model": "null", "messages": HI}, {"type": "function", "function": ADD}),
        ("/v1/messages", {"messages": HI, "max_tokens": 5}, {"name": "add", "input_schema": {"type": "object"}}),
    ],
)
def test_tools_of_foreign_types_are_ignored_and_named(serve, caplog, path, body, function):
    server, strict = serve(), serve(strict=True)
    foreign = [{"type": "namespace"}, {"type": "web_search_20250305", "name": "web_search"}] if path == "/v1/messages" else BUILT_IN
    for tools in ([*foreign, function], foreign):
        with caplog.at_level("INFO"):
            answer = server.http().post(path, json={**body, "tools": tools})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ignored-params"] == ", ".join(f"tools[{index}]" for index in range(len(foreign)))
        assert ("add" in bytes(server.worker.submits[-1].prompt_ids).decode()) == (function in tools)
        assert b"namespace" not in bytes(server.worker.submits[-1].prompt_ids)
    assert "tools[0] is ignored: its type is 'namespace'" in caplog.text
    refused = strict.http().post(path, json={**body, "tools": [function, *foreign]})
    assert refused.status_code == 400 and "tools[1].type" in refused.text and "namespace" in refused.text


def test_a_demanded_call_needs_no_format(server):
    """A response format applies to messages, and a demanded call is none; instructor sends both."""
    tools = [{"type": "function", "function": ADD}]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    assert server.chat(tools=tools, tool_choice="required", response_format=form).status_code == 200
    assert "add" in server.worker.submits[-1].params.constraint.source


@pytest.mark.parametrize(
    ("further", "kept"), [({}, 3584), ({"max_tokens": -1}, 3584), ({"max_tokens": 96}, 4000), ({"max_tokens": 32_000}, 2048)]
)
def test_a_prompt_is_cut_to_what_leaves_room_for_the_answer(server, further, kept):
    """With `truncate_prompt_tokens` of -1, the prompt is truncated until prompt and answer fit into the context. If the request does not
    limit the answer, an eighth of the context, which is small here, is left for it."""
    server.chat(messages=[{"role": "user", "content": "x" * 5000}], truncate_prompt_tokens=-1, **further)
    assert len(server.worker.submits[-1].prompt_ids) == kept
    server.complete(prompt="x" * 5000, truncate_prompt_tokens=-1, max_tokens=96)
    assert len(server.worker.submits[-1].prompt_ids) == 4000


@pytest.mark.parametrize("limit", [None, -1])
def test_a_prompt_for_a_large_context_is_cut_only_if_it_leaves_less_than_2048_tokens(limit):
    """Otherwise a prompt that fits would lose its first messages."""
    assert kept_of(-1, 131_072, limit) == 131_072 - 2048
    assert kept_of(-1, 8192, limit) == 8192 - 1024
    assert kept_of(-1, 131_072, 8192) == 131_072 - 8192


def test_a_prompt_is_cut_to_what_leaves_room_for_an_answer_of_the_default_length(serve):
    server = serve(initial=[ModelSpec("null", "null", defaults=Defaults(max_tokens=96))])
    server.chat(messages=[{"role": "user", "content": "x" * 5000}], truncate_prompt_tokens=-1)
    server.complete(prompt="x" * 5000, truncate_prompt_tokens=-1)
    assert [len(submit.prompt_ids) for submit in server.worker.submits] == [4000, 4000]
    plain = serve()
    plain.complete(prompt="x" * 5000, truncate_prompt_tokens=-1)
    assert len(plain.worker.submits[-1].prompt_ids) == 4096 - 16, "completions have 16 tokens by default"


# --- the end of an answer -----------------------------------------------------------------------------------------------


def test_the_end_token_is_counted_and_told(serve, answering):
    """The token that ends an answer has no text. Nevertheless it counts as a completion token and is among the returned token ids, as in
    vLLM."""
    server = serve(script=answering("ok", stop_token_id=END))
    answer = server.chat(return_token_ids=True).json()
    assert answer["usage"]["completion_tokens"] == 3 and answer["choices"][0]["token_ids"] == [*b"ok", END]
    assert answer["choices"][0]["message"]["content"] == "ok"
    assert server.complete(return_token_ids=True).json()["choices"][0]["token_ids"] == [*b"ok", END]
    assert server.chat(max_tokens=1).json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_a_chunk_without_tokens_has_no_log_probabilities(serve, answering, path):
    """A chunk without tokens, such as the final one, has `null` for log-probabilities, not an empty list."""
    script = answering("ok")
    script.answer = lambda _submit, _choice: [*([b] for b in b"ok"), []]
    server = serve(script=script)
    body = {"stream": True, "logprobs": True, "top_logprobs": 1} if path == "chat" else {"stream": True, "logprobs": 1}
    lines = getattr(server, path)(**body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    last = next(chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["finish_reason"])
    assert last["logprobs"] is None and any(chunk["choices"][0]["logprobs"] for chunk in chunks)


# --- embeddings ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def embedder(serve, answering):
    return serve(script=answering("", embedding_size=64))


@pytest.fixture
def prompted(serve, answering):
    prompts = (("query", "Find: "), ("passage", "P: "))
    return serve(script=answering("", embedding_size=8, prompts=prompts, default_prompt="query"))


@pytest.mark.parametrize(
    ("field", "value", "prefix"),
    [
        ("input_type", "search_query", "Find: "),
        ("input_type", "document", "P: "),
        ("task", "retrieval.passage", "P: "),
        ("task", "retrieval.query", "Find: "),
        ("input_type", "passage", "P: "),
    ],
)
def test_the_kind_of_a_text_chooses_the_model_s_prompt(prompted, field, value, prefix):
    answer = prompted.http().post("/v1/embeddings", json={"input": "abc", field: value}).json()
    assert answer["usage"]["prompt_tokens"] == len(prefix + "abc") + 1


def test_a_kind_that_the_model_does_not_tell_apart_is_refused(prompted, embedder):
    assert (
        prompted.http().post("/v1/embeddings", json={"input": "a", "input_type": "classification"}).json()["error"]["param"] == "input_type"
    )
    error = embedder.http().post("/v1/embeddings", json={"input": "a", "task": "query"}).json()["error"]
    assert error["code"] == "unsupported_field" and "no prompts" in error["message"]


def test_a_conversation_is_embedded_as_its_template_writes_it(embedder):
    client = embedder.http()
    conversation = client.post("/v1/embeddings", json={"messages": MESSAGES}).json()
    text = client.post("/v1/embeddings", json={"input": "<|user|>hi", "add_special_tokens": False}).json()
    assert conversation["data"] == text["data"]
    assert client.post("/v1/embeddings", json={}).json()["error"]["param"] == "input"
    assert client.post("/v1/embeddings", json={"input": "a", "messages": MESSAGES}).status_code == 400


def test_embeddings_may_ask_to_be_cut_to_the_context(embedder):
    """A text that fills the context has the same vector with and without truncation: no answer needs room beside it."""
    client, whole = embedder.http(), "x" * 4095  # one token precedes it
    for text in (whole, "x" * 9000):
        answer = client.post("/v1/embeddings", json={"input": text, "truncate_prompt_tokens": -1, "truncation_side": "right"}).json()
        assert answer["usage"]["prompt_tokens"] == 4096
        assert answer["data"] == client.post("/v1/embeddings", json={"input": whole}).json()["data"]


# --- compressed bodies, and HEAD requests -------------------------------------------------------------------------------


def test_large_answers_are_compressed_where_the_client_takes_it(embedder):
    body = {"input": ["a", "b"] * 100}
    packed = embedder.http(headers={"accept-encoding": "gzip"}).post("/v1/embeddings", json=body)
    plain = embedder.http(headers={"accept-encoding": "identity"}).post("/v1/embeddings", json=body)
    refused = embedder.http(headers={"accept-encoding": "gzip;q=0, br"}).post("/v1/embeddings", json=body)
    assert packed.headers["content-encoding"] == "gzip" and not {"content-encoding"} & {*plain.headers, *refused.headers}
    assert packed.json() == plain.json() == refused.json()


def pack(value: object, wbits: int) -> bytes:
    packer = zlib.compressobj(wbits=wbits)
    return packer.compress(json.dumps(value).encode()) + packer.flush()


@pytest.mark.parametrize(("encoding", "wbits"), [("gzip", 31), ("deflate", 15)])
def test_compressed_bodies_are_understood(server, encoding, wbits):
    body = pack({"messages": MESSAGES, "max_tokens": 5}, wbits)
    response = server.http().post("/v1/chat/completions", content=body, headers={**JSON, "content-encoding": encoding})
    assert response.json()["choices"][0]["message"]["content"] == "Hello"


@pytest.mark.parametrize(
    ("content", "encoding", "status"),
    [
        (gzip.compress(b'{"prompt": "' + b"x" * (64 << 20) + b'"}'), "gzip", 413),
        (gzip.compress(json.dumps({"prompt": ["x"] * (MAX_PARTS + 1)}).encode()), "gzip", 413),
        (b'{"prompt": "x"}', "gzip", 400),
        (gzip.compress(b'{"prompt": "x"}')[:20], "gzip", 400),
        (b"x", "br", 415),
    ],
    ids=["bomb", "parts", "plain", "cut", "unknown"],
)
def test_a_compressed_body_is_held_to_the_limits_of_a_plain_one(server, content, encoding, status):
    response = server.http().post("/v1/completions", content=content, headers={**JSON, "content-encoding": encoding})
    assert response.status_code == status and response.json()["error"]["code"]


@pytest.mark.parametrize("path", ["/", "/v1/models", "/health", "/v1/models/null", "/metrics"])
def test_head_is_get_without_the_body(server, path):
    client = server.http()
    head, got = client.head(path), client.get(path)
    assert head.status_code == got.status_code == 200 and head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]
    assert client.head("/nowhere").status_code == 404 and client.head("/v1/completions").status_code == 405


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_the_head_of_a_file_and_of_a_stream_is_a_whole_answer(serve, tmp_path, caplog, kind):
    """The connection stays open, nothing is logged as an error, and the metrics name the path."""
    server = serve(batch_dir=tmp_path / "batches")
    client = server.http()
    if kind == "file":
        uploaded = client.post("/v1/files", files={"file": ("a", b"x" * 200_000)}, data={"purpose": "user_data"}).json()
        path, pattern, length = f"/v1/files/{uploaded['id']}/content", "/v1/files/{file_id}/content", "200000"
    else:
        operation = client.get("/admin/models").json()["data"][0]["operation"]
        path, pattern, length = f"/admin/operations/{operation}/events", "/admin/operations/{operation_id}/events", None
    with server.connect() as sock:
        sock.sendall(f"HEAD {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        sock.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        head, following, _ = server.read_all(sock).split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and following.startswith(b"HTTP/1.1 200")
    assert length is None or f"content-length: {length}".encode() in head
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert f'http_requests_total{{handler="{pattern}",method="HEAD",status="2xx"}} 1.0' in client.get("/metrics").text
