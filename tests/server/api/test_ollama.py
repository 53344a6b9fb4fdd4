"""Ollama's API, used through its official client."""

from __future__ import annotations

import json

import pytest

from server.models.state import ModelSpec
from tests.doubles.worker import ByteTokenizer

ollama = pytest.importorskip("ollama")

SAID = "Hello from the null device."
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
HERMES = (ModelSpec("null", "null", tool_parser="hermes", reasoning=True),)
HI = [{"role": "user", "content": "hi"}]
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@pytest.fixture
def connect():
    """Return a function that makes a client for a server; clients are closed at the end."""
    made = []

    def connect(server):
        made.append(ollama.Client(host=server.url))
        return made[-1]

    yield connect
    for client in made:
        client._client.close()


def prompt_of(server) -> str:
    return bytes(i for i in server.worker.submits[-1].prompt_ids if i < 256).decode()


def test_whole_answer(server, connect):
    answer = connect(server).chat(model="null", messages=[{"role": "system", "content": "Be brief."}, *HI])
    assert answer.message.content == SAID and answer.done and answer.done_reason == "stop" and answer.model == "null"
    assert (answer.prompt_eval_count, answer.eval_count) == (len(prompt_of(server)), len(SAID))
    assert prompt_of(server) == "<|system|>Be brief.\n<|user|>hi\n<|assistant|>"


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_the_stream_is_the_whole_answer(serve, answering, connect, step):
    server = serve(script=answering(f"<think>hm</think>Sure.{CALL}", step=step), initial=HERMES)
    client = connect(server)
    whole = client.chat(model="null", messages=HI, tools=[ADD])
    lines = list(client.chat(model="null", messages=HI, tools=[ADD], stream=True))
    for messages in ([whole.message], [line.message for line in lines]):
        assert "".join(message.content or "" for message in messages) == "Sure."
        assert "".join(message.thinking or "" for message in messages) == "hm"
        calls = [call.function for message in messages for call in message.tool_calls or ()]
        assert [(call.name, call.arguments) for call in calls] == [("add", {"a": 1})]
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].eval_count == whole.eval_count and lines[-1].done_reason == whole.done_reason == "stop"


def test_a_stream_is_lines_and_the_default(server):
    response = server.http().post("/api/chat", json={"model": "null", "messages": HI})
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == SAID and lines[-1]["done"] is True


def test_history_with_calls_reaches_the_template(server, connect):
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "2", "tool_name": "add"}]
    connect(server).chat(model="null", messages=messages)
    assert '"arguments": {"a": 1}' in prompt_of(server) and "<|tool|>2" in prompt_of(server)


def test_options_reach_the_worker(server, connect):
    options = {"temperature": 0.25, "top_k": 7, "top_p": 0.5, "seed": 5, "repeat_penalty": 1.5, "num_predict": 5, "num_ctx": 2048}
    answer = connect(server).chat(model="null", messages=HI, options=options)
    params = server.worker.submits[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.seed, params.repetition_penalty) == (0.25, 7, 0.5, 5, 1.5)
    assert answer.message.content == "Hello" and answer.done_reason == "length"
    connect(server).chat(model="null", messages=HI, options={"num_predict": -1, "stop": ["from"]})
    assert server.worker.submits[-1].params.max_tokens > 4000


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"zebra": {"type": "integer"}}}])
def test_an_answer_may_be_held_to_a_format(server, connect, form):
    connect(server).chat(model="null", messages=HI, format=form)
    source = server.worker.submits[-1].params.constraint.source
    assert ("zebra" in source) is isinstance(form, dict)


def test_a_prompt_goes_through_the_template_unless_it_is_raw(serve, connect):
    server = serve(tokenizer=ByteTokenizer(specials=FIM))
    client = connect(server)
    assert client.generate(model="null", prompt="hi", system="Be brief.").response == SAID
    assert prompt_of(server) == "<|system|>Be brief.\n<|user|>hi\n<|assistant|>"
    assert "".join(line.response for line in client.generate(model="null", prompt="hi", raw=True, stream=True)) == SAID
    assert prompt_of(server) == "hi"
    client.generate(model="null", prompt="ab", suffix="cd")
    assert 258 in server.worker.submits[-1].prompt_ids and {*b"abcd"} <= {*server.worker.submits[-1].prompt_ids}


def test_a_request_without_a_prompt_finds_the_model_loaded(server, connect):
    assert connect(server).generate(model="null").done_reason == "load"
    assert connect(server).chat(model="null").done_reason == "load"
    assert not server.worker.submits


def test_vectors(serve, answering, connect):
    server = serve(script=answering("", embedding_size=8))
    client = connect(server)
    theirs = client.embed(model="null", input=["a", "b"]).embeddings
    rows = server.http().post("/v1/embeddings", json={"input": ["a", "b"], "normalize": True}).json()["data"]
    assert [list(row) for row in theirs] == [row["embedding"] for row in rows]
    assert list(client.embeddings(model="null", prompt="a").embedding) == rows[0]["embedding"]
    assert client.embed(model="null", input="x" * 9000).prompt_eval_count == 4095
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        client.embed(model="null", input="x" * 9000, truncate=False)


def test_models_are_listed_and_shown(serve, answering, connect):
    server = serve(script=answering("", embedding_size=8), initial=HERMES)
    client = connect(server)
    (listed,), (running,) = client.list().models, client.ps().models
    assert listed.model == running.model == "null" and listed.size > 0 and len(listed.digest) == 64 and running.context_length == 4096
    shown = client.show("null")
    assert {"completion", "tools", "thinking", "embedding"} == set(shown.capabilities)
    assert shown.modelinfo["relaxserve.context_length"] == 4096
    assert server.http().get("/api/version").json()["version"]


def test_a_tag_that_clients_add_is_no_part_of_the_name(server, connect):
    assert connect(server).chat(model="null:latest", messages=HI).message.content == SAID
    with pytest.raises(ollama.ResponseError) as caught:
        connect(server).chat(model="other:latest", messages=HI)
    assert caught.value.status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/api/chat", {"messages": HI}, "model"),
        ("/api/chat", {"model": "null", "messages": [{"role": "user", "content": "x", "images": ["x"]}]}, "messages[0].images"),
        ("/api/chat", {"model": "null", "messages": HI, "options": {"mirostat": 1}}, "options.mirostat"),
        ("/api/chat", {"model": "null", "messages": HI, "options": {"temperature": -1}}, "options.temperature"),
        ("/api/generate", {"model": "null", "prompt": "x", "template": "x"}, "template"),
        ("/api/generate", {"model": "null", "prompt": "x", "context": [1]}, "context"),
        ("/api/generate", {"model": "null", "prompt": "x", "images": ["x"]}, "images"),
        ("/api/embed", {"model": "null"}, "input"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(server, path, body, param):
    response = server.http().post(path, json=body)
    answer = response.json()
    assert response.status_code == 400 and isinstance(answer["error"], str) and answer["param"] == param, response.text


def test_a_body_whose_type_is_not_named_is_json(server):
    """The server reads a request without a content type as JSON, because LiteLLM sends such requests."""
    body = json.dumps({"model": "null", "messages": HI, "stream": False, "options": {}}).encode()
    for path in ("/api/chat", "/v1/chat/completions"):
        assert server.http().post(path, content=body).status_code == 200
    assert server.http().post("/api/pull", content=b'{"model": "x"}').status_code == 415, "admin paths require the content type"


def test_a_failure_in_a_stream_is_a_line(serve, answering, connect):
    client = connect(serve(script=answering("abcdef", fail_after=3)))
    with pytest.raises(ollama.ResponseError, match="the script ends in an error here"):
        list(client.chat(model="null", messages=HI, stream=True))
