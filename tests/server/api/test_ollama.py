"""Ollama's API, used through its official client."""

from __future__ import annotations

import json
import time

import pytest

from server.messages import Facts
from server.models.state import ModelSpec
from tests.doubles.worker import ByteTokenizer, NullDefaults, NullTemplate

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


@pytest.mark.parametrize("options", [{"stop": ['"a"']}, {"num_predict": len(CALL) - 20}])
def test_a_call_that_was_cut_is_left_out(serve, answering, connect, options):
    """A call of this API has no status, and its arguments are an object: a client would make the call without arguments."""
    client = connect(serve(script=answering(f"{CALL}{CALL.replace('1', '2')}"), initial=HERMES))
    for length, left in ((0, []), (len(CALL), [{"a": 1}])):
        given = {"num_predict": length + options["num_predict"]} if "num_predict" in options else {"stop": ['"a"'] if not left else ["2"]}
        whole = client.chat(model="null", messages=HI, tools=[ADD], options=given).message
        lines = [line.message for line in client.chat(model="null", messages=HI, tools=[ADD], options=given, stream=True)]
        for messages in ([whole], lines):
            assert [call.function.arguments for message in messages for call in message.tool_calls or ()] == left


CHANNEL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("answer", "options", "calls"),
    [
        (CHANNEL + '{"a": 1}<|call|>', {"stop": ["{"]}, []),
        (CHANNEL + '{"a": 1}<|call|>', {"num_predict": len(CHANNEL)}, []),
        (CHANNEL, {}, [{}]),  # the token <|call|> has ended the answer, and its text is not in it
    ],
)
def test_only_a_call_that_the_model_ended_has_no_arguments(serve, answering, connect, answer, options, calls):
    """An earlier version returned a call in a channel that was cut off before its arguments as a call without any."""
    client = connect(serve(script=answering(answer), initial=(ModelSpec("null", "null", tool_parser="harmony"),)))
    whole = client.chat(model="null", messages=HI, tools=[ADD], options=options).message
    lines = [line.message for line in client.chat(model="null", messages=HI, tools=[ADD], options=options, stream=True)]
    for messages in ([whole], lines):
        assert [call.function.arguments for message in messages for call in message.tool_calls or ()] == calls


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


def test_an_answer_with_calls_is_sent_back_as_it_came(serve, answering):
    """Clients in JavaScript send the message of an answer back with all its fields. A strict server knows them all, and the model sees the
    call as it wrote it."""
    server = serve(script=answering(CALL), initial=HERMES, strict=True)
    body = {"model": "null", "messages": HI, "tools": [ADD], "stream": False}
    said = server.http().post("/api/chat", json=body).json()["message"]
    assert said["tool_calls"][0]["function"]["index"] == 0
    results = [{"role": "tool", "content": "2", "tool_name": "add", "tool_call_id": said["tool_calls"][0]["id"]}]
    answer = server.http().post("/api/chat", json={**body, "messages": [*HI, said, *results]})
    assert answer.status_code == 200 and "x-ignored-params" not in answer.headers, answer.text
    assert '{"name": "add", "arguments": {"a": 1}}' in prompt_of(server) and "index" not in prompt_of(server)


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


def test_a_message_with_calls_may_have_null_as_content(server):
    """Ollama reads null as an empty text. Clients that follow OpenAI's shape send it beside calls."""
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    told = {"role": "tool", "content": "2", "tool_name": "add"}
    response = server.http().post("/api/chat", json={"model": "null", "messages": [*HI, called, told], "stream": False})
    assert response.status_code == 200, response.text
    assert prompt_of(server).count("None") == 0


def test_a_request_without_a_prompt_finds_the_model_loaded(server, connect):
    assert connect(server).generate(model="null").done_reason == "load"
    assert connect(server).chat(model="null").done_reason == "load"
    assert not server.worker.submits


@pytest.mark.parametrize("path", ["generate", "chat", "embed", "embeddings"])
def test_a_request_without_a_prompt_wakes_the_model(path, serve, answering, connect):
    """Ollama's clients load a model by such a request before they need it. The answer has no vector, as Ollama's."""
    server = serve(script=answering("", embedding_size=8, generates=path in ("generate", "chat")))
    client = connect(server)
    assert client.generate(model="null", keep_alive=0).done_reason == "unload" and not client.ps().models
    answer = getattr(client, path)(model="null")
    assert [one.model for one in client.ps().models] == ["null"] and not server.worker.submits
    told = {"generate": "done_reason", "chat": "done_reason", "embed": "embeddings", "embeddings": "embedding"}[path]
    assert answer[told] == "load" if path in ("generate", "chat") else list(answer[told]) == []


def test_vectors(serve, answering, connect):
    server = serve(script=answering("", embedding_size=8))
    client = connect(server)
    theirs = client.embed(model="null", input=["a", "b"]).embeddings
    rows = server.http().post("/v1/embeddings", json={"input": ["a", "b"], "normalize": True}).json()["data"]
    assert [list(row) for row in theirs] == [row["embedding"] for row in rows]
    assert list(client.embeddings(model="null", prompt="a").embedding) == rows[0]["embedding"]
    assert client.embed(model="null", input="x" * 9000).prompt_eval_count == 4096
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        client.embed(model="null", input="x" * 9000, truncate=False)


def test_models_are_listed_and_shown(serve, answering, connect):
    server = serve(script=answering("", embedding_size=8), initial=HERMES)
    client = connect(server)
    (listed,), (running,) = client.list().models, client.ps().models
    assert listed.model == running.model == "null" and len(listed.digest) == 64 and running.context_length == 4096
    shown = client.show("null")
    assert {"completion", "tools", "thinking", "embedding"} == set(shown.capabilities)
    assert shown.modelinfo["relaxserve.context_length"] == 4096


def test_clients_that_need_a_version_of_ollama_are_content(server):
    """VS Code refuses servers below version 0.6.4. Clients compare the parts of the version as numbers."""
    told = server.http().get("/api/version").json()
    assert told["version"] == "0.14.0", "the first that has /v1/messages; later ones have more than this server"


def test_a_call_may_have_its_index_where_openai_has_it(serve):
    """Open WebUI sends calls back so."""
    call = {"index": 0, "id": "call_1", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "2", "tool_call_id": "call_1"}]
    answer = serve(strict=True).http().post("/api/chat", json={"model": "null", "messages": messages, "stream": False})
    assert answer.status_code == 200, answer.text


def test_a_tag_that_clients_add_is_no_part_of_the_name(server, connect):
    assert connect(server).chat(model="null:latest", messages=HI).message.content == SAID
    with pytest.raises(ollama.ResponseError) as caught:
        connect(server).chat(model="other:latest", messages=HI)
    assert caught.value.status_code == 404
    assert server.chat(model="null:latest").status_code == 200, "clients use one name for all APIs of a server"
    assert server.http().get("/v1/models/null:latest").json()["id"] == "null"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/api/chat", {"messages": HI}, "model"),
        ("/api/chat", {"model": "null", "messages": [{"role": "user", "content": "x", "images": ["x"]}]}, "messages[0].images[0]"),
        ("/api/chat", {"model": "null", "messages": HI, "options": {"mirostat": 1}}, "options.mirostat"),
        ("/api/chat", {"model": "null", "messages": HI, "options": {"temperature": -1}}, "options.temperature"),
        ("/api/generate", {"model": "null", "prompt": "x", "template": "x"}, "template"),
        ("/api/generate", {"model": "null", "prompt": "x", "context": [1]}, "context"),
        ("/api/generate", {"model": "null", "prompt": "x", "images": ["x"]}, "images[0]"),
        ("/api/embed", {"model": "null"}, "input"),
        ("/api/chat", {"model": "null", "messages": HI, "options": {"stop": ["x"] * 17}}, "options.stop"),
        ("/api/chat", {"model": "null", "messages": HI, "options": {"stop_token_ids": [10**6]}}, "options.stop_token_ids"),
        ("/api/chat", {"model": "null", "messages": HI, "options": {"min_tokens": 3, "num_predict": 2}}, "options.min_tokens"),
        ("/api/chat", {"model": "null", "messages": HI, "format": {"type": "object", "title": "x" * 70_000}}, "format"),
        ("/api/generate", {"model": "null", "prompt": "x", "format": {"type": "object", "title": "x" * 70_000}}, "format"),
        ("/api/generate", {"model": "null", "prompt": "x" * 5000}, "prompt"),
        ("/api/generate", {"model": "null", "prompt": "x", "raw": True, "options": {"stop": [""]}}, "options.stop"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(server, path, body, param):
    response = server.http().post(path, json=body)
    answer = response.json()
    assert response.status_code == 400 and isinstance(answer["error"], str) and answer["param"] == param, response.text
    assert not any(name in answer["error"] for name in ("response_format", "max_tokens", " truncate_prompt_tokens")), response.text


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/x-www-form-urlencoded"}], ids=["no type", "curl -d"])
def test_a_body_whose_type_is_not_named_is_json(server, headers):
    """The server reads a request without a content type as JSON, because LiteLLM sends such requests. The same holds for a declared form,
    because `curl -d` declares one in every example of Ollama's documents."""
    body = json.dumps({"model": "null", "messages": HI, "stream": False, "options": {}}).encode()
    for path in ("/api/chat", "/v1/chat/completions"):
        assert server.http().post(path, content=body, headers=headers).status_code == 200
    assert server.http().post("/api/show", content=b'{"model": "null"}', headers=headers).status_code == 200
    pulled = server.http().post("/api/pull", content=b'{"model": "x/y"}', headers=headers)
    assert pulled.status_code == 400 and "start it with --allow-hub" in pulled.json()["error"]
    refused = server.http().post("/admin/models", content=b'{"source": "x"}', headers=headers)
    assert refused.status_code == 415, "our own administration requires the content type"


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (b"[1]", "application/json", "the body is a list of 1; expected a JSON object"),
        (b"", "application/json", "the body is empty; expected a JSON object"),
        (b"{}", "text/plain", "content-type is 'text/plain'; expected application/json"),
    ],
)
def test_a_body_that_is_no_object_is_refused_for_one_reason(server, body, kind, said):
    response = server.http().post("/api/chat", content=body, headers={"content-type": kind})
    assert response.status_code == 400 and response.json()["error"] == said


def test_the_options_of_ollamas_documents_are_accepted(server, connect):
    """These are the options of the example "Generate request (With options)"."""
    options = {
        "num_keep": 5, "seed": 42, "num_predict": 100, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "typical_p": 0.7, "repeat_last_n": 33,
        "temperature": 0.8, "repeat_penalty": 1.2, "presence_penalty": 1.5, "frequency_penalty": 1.0, "penalize_newline": True,
        "stop": ["\n", "user:"], "numa": False, "num_ctx": 1024, "num_batch": 2, "num_gpu": 1, "main_gpu": 0, "use_mmap": True,
        "num_thread": 8,
    }  # fmt: skip
    response = server.http().post("/api/generate", json={"model": "null", "prompt": "hi", "stream": False, "options": options})
    assert response.status_code == 200 and response.headers["x-ignored-params"] == "options.repeat_last_n"


@pytest.mark.parametrize("think", [True, "high", False])
def test_thoughts_that_a_model_does_not_have_are_named(serve, answering, think):
    body = {"model": "null", "messages": HI, "stream": False, "think": think}
    without = serve(script=answering("Sure.")).http().post("/api/chat", json=body)
    assert (without.status_code, without.headers.get("x-ignored-params")) == (200, "think" if think else None)
    has_thoughts = serve(script=answering("<think>hm</think>Sure."), initial=HERMES).http().post("/api/chat", json=body)
    assert "x-ignored-params" not in has_thoughts.headers


@pytest.mark.parametrize("stream", [False, True])
def test_durations_are_those_of_prompt_and_answer(serve, answering, connect, stream):
    """Clients divide counts by durations, so no duration is 0."""
    client = connect(serve(script=answering("abcdef", prefill_s=0.05, interval_s=0.01)))
    found = client.generate(model="null", prompt="hi", stream=stream)
    last = list(found)[-1] if stream else found
    assert last.prompt_eval_duration >= 50e6 and last.eval_duration >= 40e6
    assert last.total_duration >= last.prompt_eval_duration + last.eval_duration
    whole = connect(serve(script=answering("a"))).chat(model="null", messages=HI)
    assert whole.prompt_eval_duration > 0 and whole.eval_duration > 0


FACTS = Facts("llama", "gguf", 134_515_008, "Q4_1", 98_000_000, 8192)


def test_a_model_is_described_by_its_files(serve, answering, connect):
    tokenizer = ByteTokenizer()
    tokenizer.generation_defaults = NullDefaults(temperature=0.5, top_k=20)
    client = connect(serve(script=answering("", facts=FACTS), tokenizer=tokenizer))
    (listed,) = client.list().models
    assert listed.size == 98_000_000 and listed.details.format == "gguf" and listed.details.family == "llama"
    assert (listed.details.parameter_size, listed.details.quantization_level) == ("134.52M", "Q4_1")
    shown = client.show("null")
    assert shown.template == NullTemplate.source and shown.parameters.split() == ["temperature", "0.5", "top_k", "20"]
    assert shown.modelinfo["general.architecture"] == "llama" and shown.modelinfo["general.parameter_count"] == 134_515_008
    assert client.ps().models[0].size == 0, "the null model has no process, and no memory of its own"


class Mute(NullTemplate):
    """A template without tools, as many instruction-tuned models have."""

    def render(self, messages, tools=None, *args, **options):
        return super().render(messages, None, *args, **options)


def test_a_template_without_tools_gets_them_as_text(serve, connect):
    """The model was not trained for tools, so it is not listed as such; but no tool is dropped."""
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = Mute()
    server = serve(tokenizer=tokenizer)
    client = connect(server)
    assert client.show("null").capabilities == ["completion"]
    client.chat(model="null", messages=HI, tools=[ADD])
    assert "You can call functions" in prompt_of(server) and '"name": "add"' in prompt_of(server)
    assert "x-ignored-params" not in server.chat(tools=[ADD]).headers
    assert "You can call functions" in prompt_of(server)


def test_a_prompt_for_a_model_without_a_template_is_continued(serve, connect):
    server = serve(tokenizer=ByteTokenizer(chat=False))
    assert connect(server).generate(model="null", prompt="Once").response == SAID and prompt_of(server) == "Once"
    with pytest.raises(ollama.ResponseError, match="put the text of system into it"):
        connect(server).generate(model="null", prompt="Once", system="Be brief.")


@pytest.mark.parametrize("zero", [0, "0", "0s", "0m", 0.0])
def test_keep_alive_of_0_gives_the_memory_back(serve, connect, zero):
    server = serve()
    client = connect(server)
    assert [one.model for one in client.ps().models] == ["null"]
    assert client.generate(model="null", keep_alive=zero).done_reason == "unload"
    assert not client.ps().models and [one.model for one in client.list().models] == ["null"]
    assert client.chat(model="null", messages=HI).message.content == SAID, "the next request wakes the model"
    assert client.ps().models


def test_keep_alive_of_0_takes_effect_after_the_answer(serve, connect):
    server = serve()
    client = connect(server)
    assert client.chat(model="null", messages=HI, keep_alive=0).message.content == SAID
    eventually(lambda: not client.ps().models)
    assert len(list(client.chat(model="null", messages=HI, keep_alive=0, stream=True))) > 1
    eventually(lambda: not client.ps().models)
    client.chat(model="null", messages=HI, keep_alive="5m")
    assert client.ps().models


def test_keep_alive_of_0_needs_an_admin_key(serve):
    server = serve(api_keys=("a-client-key",), admin_keys=("an-admin-key",))
    http, client, admin = server.http(), {"x-api-key": "a-client-key"}, {"x-api-key": "an-admin-key"}
    asked = {"model": "null", "keep_alive": 0}
    refused = http.post("/api/generate", json=asked, headers=client)
    assert refused.status_code == 403 and refused.json()["param"] == "keep_alive"
    answered = http.post("/api/generate", json={**asked, "prompt": "hi", "stream": False}, headers=client)
    assert answered.status_code == 200 and answered.headers["x-ignored-params"] == "keep_alive"
    assert http.post("/api/generate", json=asked, headers=admin).json()["done_reason"] == "unload"


def test_keep_alive_does_not_unload_a_pinned_model(serve):
    http = serve(initial=(ModelSpec("null", "null", pin=True),)).http()
    assert http.post("/api/generate", json={"model": "null", "keep_alive": 0}).status_code == 409


def eventually(holds):
    for _ in range(2000):
        if holds():
            return
        time.sleep(0.005)
    raise AssertionError("this did not happen in 10 s")


def test_a_failure_in_a_stream_is_a_line(serve, answering, connect):
    client = connect(serve(script=answering("abcdef", fail_after=3)))
    with pytest.raises(ollama.ResponseError, match="the script ends in an error here"):
        list(client.chat(model="null", messages=HI, stream=True))


@pytest.mark.parametrize("stream", [False, True])
def test_every_token_has_a_log_probability(server, connect, stream):
    """A whole answer has the log-probabilities of all its tokens, and each line of a stream those of its own tokens."""
    fields = {"logprobs": True, "top_logprobs": 2}
    client = connect(server)
    for told in (client.chat(model="null", messages=HI, stream=stream, **fields), client.generate("null", "hi", stream=stream, **fields)):
        found = [one for line in told for one in line.logprobs or ()] if stream else told.logprobs
        assert "".join(one.token for one in found) == SAID and all(len(one.top_logprobs) == 2 for one in found)
