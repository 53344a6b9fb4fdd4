"""The chat endpoint, used through the official OpenAI client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import msgspec
import openai
import pytest
from pydantic import BaseModel

from server.api.openai.chat import pages_needed
from server.messages import CachePages, Submit, Thinking
from tests.doubles.worker import ByteTokenizer, NullDefaults

MESSAGES = [{"role": "user", "content": "hi"}]


def test_whole_answer(server):
    answer = server.openai().chat.completions.create(model="null", messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello from the null device."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint == "fp_null"
    usage = answer.usage
    assert usage.completion_tokens == 27 and usage.prompt_tokens + 27 == usage.total_tokens


def test_stream_is_the_whole_answer(server):
    client = server.openai()
    chunks = list(client.chat.completions.create(model="null", messages=MESSAGES, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == client.chat.completions.create(model="null", messages=MESSAGES).choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]].count("stop") == 1
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 27
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_the_client_s_helpers(serve, answering):
    class Animal(BaseModel):
        legs: int

    client = serve(script=answering('{"legs": 4}')).openai()
    parsed = client.chat.completions.parse(model="null", messages=MESSAGES, response_format=Animal)
    assert parsed.choices[0].message.parsed == Animal(legs=4)
    with client.chat.completions.stream(model="null", messages=MESSAGES, response_format=Animal) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Animal(legs=4)


def test_several_choices(server):
    stream = server.openai().chat.completions.create(model="null", messages=MESSAGES, n=3, stream=True)
    texts, finished = ["", "", ""], []
    for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        finished += [choice.index] if choice.finish_reason else []
    assert texts == ["Hello from the null device."] * 3 and sorted(finished) == [0, 1, 2]


def test_usage_in_every_chunk(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(server.openai().chat.completions.create(model="null", messages=MESSAGES, stream=True, stream_options=options))
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts == sorted(counts) and counts[-1] == 27


def test_max_tokens_is_length(server):
    answer = server.openai().chat.completions.create(model="null", messages=MESSAGES, max_completion_tokens=5)
    assert answer.choices[0].message.content == "Hello" and answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_and_aborts_only_its_choice(serve, answering, stream):
    script = answering("", interval_s=0.005)
    script.answer = lambda _submit, choice: [[b] for b in (b"one STOP two" if choice == 0 else b"one two three four five")]
    server = serve(script=script)
    body = {"stop": [" STOP"], "n": 2, "stream": stream}
    response = server.chat(**body)
    assert response.status_code == 200
    if stream:
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        deltas = [event["choices"][0] for event in events]
        texts = ["".join(d["delta"].get("content", "") for d in deltas if d["index"] == i) for i in (0, 1)]
        reasons = {d["index"]: d["stop_reason"] for d in deltas if d["finish_reason"]}
    else:
        texts = [choice["message"]["content"] for choice in response.json()["choices"]]
        reasons = {choice["index"]: choice["stop_reason"] for choice in response.json()["choices"]}
    assert texts == ["one", "one two three four five"]
    assert reasons == {0: " STOP", 1: None}
    assert [choice for _, choice in server.worker.aborted] == [0]


def test_logprobs_have_the_shape_of_the_api(server):
    answer = server.openai().chat.completions.create(model="null", messages=MESSAGES, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert content[0].bytes == [ord("H")] and content[0].logprob == -0.5
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)


def test_streamed_logprobs_are_those_of_the_whole(serve, answering):
    server = serve(script=answering("käse ist gut, STOP", step=2))
    client, options = server.openai(), {"model": "null", "messages": MESSAGES, "logprobs": True, "stop": ", STOP"}
    whole = client.chat.completions.create(**options).choices[0]
    streamed = [c.choices[0] for c in client.chat.completions.create(**options, stream=True)]
    entries = [entry for choice in streamed if choice.logprobs for entry in choice.logprobs.content]
    assert [e.token for e in entries] == [e.token for e in whole.logprobs.content]
    assert bytes(b for e in entries for b in e.bytes).decode() == whole.message.content == "käse ist gut"


def test_prompt_logprobs_and_token_ids(server):
    answer = server.chat(prompt_logprobs=1, return_token_ids=True, max_tokens=3).json()
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    assert answer["choices"][0]["token_ids"] == list(b"Hel")


def test_sampling_parameters_reach_the_worker(server):
    server.chat(
        temperature=0.25, top_p=0.5, top_k=7, min_p=0.1, frequency_penalty=0.5, presence_penalty=-0.5, repetition_penalty=1.5,
        logit_bias={"65": -100}, seed=-2, stop_token_ids=[3], ignore_eos=True, min_tokens=2, max_tokens=9, priority=-4,
        cache_salt="s", typical_p=0.9, allowed_token_ids=[1, 2], bad_words=["x", "no"],
    )  # fmt: skip
    submit = server.worker.submits[-1]
    params = submit.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.typical_p) == (0.25, 0.5, 7, 0.1, 0.9)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.5, -0.5, 1.5)
    assert params.logit_bias == ((65, -100.0),) and params.seed == 2**64 - 2
    assert params.stop_token_ids == (3,) and params.ignore_eos and (params.min_tokens, params.max_tokens) == (2, 9)
    assert params.allowed_token_ids == (1, 2) and params.banned_token_ids == (ord("x"),)
    assert set(params.banned_sequences) == {tuple(b" x"), tuple(b"no"), tuple(b" no")}
    assert (submit.priority, submit.cache_salt) == (-4, "s")


def test_what_the_model_s_authors_recommend_is_the_default(serve):
    tokenizer = ByteTokenizer()
    tokenizer.generation_defaults = NullDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1)
    server = serve(tokenizer=tokenizer)
    server.chat()
    params = server.worker.submits[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (0.6, 0.95, 20, 0.05, 1.1)
    shown = server.http().get("/v1/models/null").json()["sampling"]
    assert shown == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "typical_p": 1.0, "repetition_penalty": 1.1}
    server.chat(temperature=0, top_k=-1)
    params = server.worker.submits[-1].params
    assert (params.temperature, params.top_p, params.top_k) == (0, 0.95, 0)


def test_a_tool_choice_of_another_type_is_refused_by_its_type(server):
    error = server.chat(tool_choice={"type": "custom", "custom": {"name": "x"}}).json()["error"]
    assert (error["param"], error["message"]) == ("tool_choice.type", "tool_choice.type is 'custom'; expected function, allowed_tools")
    assert server.chat(tool_choice="sometimes").json()["error"]["param"].startswith("tool_choice")


@pytest.mark.parametrize(
    ("defaults", "said"),
    [
        (NullDefaults(), "temperature 1 (its files recommend nothing)"),
        (NullDefaults(temperature=0.6, top_k=20), "temperature 0.6, top_k 20 (as its files recommend)"),
        (NullDefaults(temperature=0.8, origin="llama.cpp"), "temperature 0.8 (the defaults of llama.cpp)"),
    ],
)
def test_a_load_tells_how_it_samples(serve, caplog, defaults, said):
    tokenizer = ByteTokenizer()
    tokenizer.generation_defaults = defaults
    with caplog.at_level("INFO", "server.models.load_report"):
        serve(tokenizer=tokenizer)
    assert f"null samples by default with {said}" in caplog.text


def test_a_model_without_a_chat_template_says_so(serve, caplog):
    with caplog.at_level("INFO", "server.models.load_report"):
        server = serve(tokenizer=ByteTokenizer(chat=False))
    assert server.http().get("/v1/models/null").json()["chats"] is False
    assert "null has no chat template: it answers /v1/completions and refuses conversations" in caplog.text
    refused = server.chat()
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "no_chat_template"


def test_special_tokens_are_shown_when_asked(serve, answering):
    script = answering("")
    script.answer = lambda _submit, _choice: [[ord("a")], [256], [ord("b")]]
    server = serve(script=script)
    assert server.chat().json()["choices"][0]["message"]["content"] == "ab"
    assert server.chat(skip_special_tokens=False).json()["choices"][0]["message"]["content"] == "a<s>b"


def test_unseeded_requests_differ(server):
    server.chat(), server.chat()
    first, second = (submit.params.seed for submit in server.worker.submits)
    assert first != second


def test_default_of_max_tokens_is_what_is_left(server):
    server.chat()
    submit = server.worker.submits[-1]
    assert submit.params.max_tokens + len(submit.prompt_ids) == 4096


def test_prompt_that_does_not_fit(server):
    response = server.chat(messages=[{"role": "user", "content": "x" * 5000}])
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 4096 tokens. However, ")


def test_truncation_only_when_asked(server):
    long = [{"role": "user", "content": "x" * 5000}]
    assert server.chat(messages=long, truncate_prompt_tokens=100, max_tokens=1).json()["usage"]["prompt_tokens"] == 100
    assert server.worker.submits[-1].prompt_ids[-1] == ord(">")  # truncation keeps the end of the prompt


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 20.5}, "max_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "<|user|>", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"request_id": "with space"}, "request_id"),
        ({"echo": True}, "echo"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),  # refused, because the model has no tokens that mark thoughts
        ({"timeout": 1e9}, "timeout"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
        ({"chat_template_kwargs": {"namespace": 1}}, "chat_template_kwargs.namespace"),
        ({"chat_template_kwargs": {"raise_exception": None}}, "chat_template_kwargs.raise_exception"),
    ],
)
def test_invalid_values_are_refused_by_name(server, body, param):
    response = server.chat(**body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "field", ["use_beam_search", "lora_path", "mirostat", "structural_tag", "suffix", "audio", "stop_regex", "best_of"]
)
def test_known_fields_that_are_missing_here_are_refused(server, field):
    response = server.chat(**{field: "x"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_field" and response.json()["error"]["param"] == field
    assert server.chat(**{field: None}).status_code == 200


def test_unknown_fields_are_reported(server):
    response = server.chat(zap=1, stream_options={"include_usage": True, "zip": 1}, stream=True)
    assert response.status_code == 200
    assert response.headers["x-ignored-params"] == "zap, stream_options.zip"


def test_names_that_cannot_stand_in_a_header_and_floods_are_reported_too(server):
    assert server.chat(**{"a\nb": 1, "ü": 2}).headers["x-ignored-params"] == "a%0Ab, %C3%BC"
    assert server.chat(**{f"x{i}": 1 for i in range(40)}).headers["x-ignored-params"].endswith("x31, and 8 more")


def test_unknown_fields_are_refused_when_strict(serve):
    response = serve(strict=True).chat(zap=1)
    assert response.status_code == 400 and response.json()["error"]["code"] == "unknown_field"


def test_content_parts(server):
    client = server.openai()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    client.chat.completions.create(model="null", messages=[{"role": "user", "content": parts}])
    assert b"<|user|>ab\n" in bytes(server.worker.submits[-1].prompt_ids)
    image = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="null", messages=[{"role": "user", "content": image}])
    assert caught.value.code == "unsupported_content" and caught.value.param == "messages[0].content[0].type"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,aGk="}},
    ],
)
def test_a_model_without_ears_refuses_audio_by_name(server, part):
    answer = server.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_content", "messages[0].content[1].type")
    assert "is audio, and model 'null' only reads text; ask a model that hears audio" in error["message"]


def test_unknown_model(server):
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai().chat.completions.create(model="nope", messages=MESSAGES)
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_render_shows_what_would_be_asked(server):
    body = {"messages": MESSAGES, "temperature": 0.5, "max_tokens": 10, "n": 2}
    shown = server.http().post("/v1/chat/completions/render", json=body).json()
    assert shown["prompt"] == "<|user|>hi\n<|assistant|>"
    assert bytes(shown["token_ids"]).decode() == shown["prompt"]
    assert shown["parameters"]["temperature"] == 0.5 and shown["parameters"]["max_tokens"] == 10
    assert shown["kv_cache"]["pages"] == 1 + 2 * 2 and shown["kv_cache"]["fits"]
    assert server.worker.submits == []


def test_a_window_needs_no_more_pages_than_it_holds():
    whole, window, states = CachePages(100, 4096, 16), CachePages(100, 4096, 16, most_each=5), CachePages(100, 4096, 64, most_each=3)
    assert [pages_needed(group, 320, 368, num_choices=2) for group in (whole, window, states)] == [26, 10, 6]
    assert [pages_needed(group, 17, 48, num_choices=2) for group in (whole, window, states)] == [5, 5, 2]


def test_continue_final_message(server):
    messages = [*MESSAGES, {"role": "assistant", "content": "Well"}]
    server.chat(messages=messages, continue_final_message=True)
    assert bytes(server.worker.submits[-1].prompt_ids).endswith(b"<|assistant|>Well")


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_what_is_continued(server, stream):
    messages = [*MESSAGES, {"role": "assistant", "content": "Well. "}]
    body = {"messages": messages, "continue_final_message": True, "echo": True, "max_tokens": 5, "stream": stream}
    response = server.chat(**body)
    if stream:
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    else:
        text = response.json()["choices"][0]["message"]["content"]
    assert text == "Well. Hello"


@pytest.mark.parametrize("name", ["request_id", "rid"])
def test_an_answer_bears_the_name_of_its_request(server, name):
    assert server.chat(**{name: "mine-1"}).json()["id"] == "chatcmpl-mine-1"
    assert server.complete(**{name: "mine-1"}).json()["id"] == "cmpl-mine-1"
    # The server makes its own request ids for the worker, because two clients may choose the same id.
    assert [submit.request_id for submit in server.worker.submits if "mine" in submit.request_id] == []


def test_a_thinking_budget_names_the_tokens_around_thoughts(serve):
    server = serve(tokenizer=ByteTokenizer(specials=["<think>", "</think>"]))
    server.chat(thinking_token_budget=7)
    assert server.worker.submits[-1].params.thinking == Thinking(7, (258,), 259, is_open=False)
    server.chat(reasoning_budget=-1)
    assert server.worker.submits[-1].params.thinking is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("expected", "status"), [("fp_null", 200), ('"fp_null"', 200), ("*", 200), ("fp_other", 412)])
def test_if_match_names_the_fingerprint(server, expected: str, status: int, stream: bool) -> None:
    """A model that would not give the same bytes refuses before the answer begins."""
    body = {"messages": MESSAGES, "stream": stream}
    answer = server.http(headers={"if-match": expected}).post("/v1/chat/completions", json=body)
    assert answer.status_code == status
    if status == 412:
        error = answer.json()["error"]
        assert error["code"] == "fingerprint_mismatch" and "this model has the fingerprint fp_null" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("headers", [{}, {"if-match": "fp_null"}])
def test_a_worker_of_another_fingerprint_gives_no_answer_in_the_name_of_the_former(serve, headers: dict[str, str], stream: bool) -> None:
    """The request waits while a worker takes the place of one that has died, and the model's files were replaced meanwhile. The answer
    would state the former fingerprint, or end an answer that another server has begun, with other bytes."""
    server = serve()
    script = server.worker.script
    plain = script.answer

    def replaced(submit: Submit, choice: int) -> Sequence[Sequence[int]]:
        server.worker.ready = msgspec.structs.replace(server.worker.ready, fingerprint="fp_other")
        return plain(submit, choice)

    script.answer = replaced
    body = {"messages": MESSAGES, "stream": stream}
    answer = server.http(headers=headers).post("/v1/chat/completions", json=body)
    assert "null device" not in answer.text and '"model_not_ready"' in answer.text
    assert "has the fingerprint fp_other since its restart" in answer.text and (stream or answer.status_code == 503)
    script.answer = plain
    assert '"model_not_ready"' in server.http().post("/v1/chat/completions", json=body).text, "its tokens are those of the old files"
    assert len(server.worker.submits) == 1, "the worker, which might refuse the tokens, does not get them"
    asyncio.run_coroutine_threadsafe(server.worker.before_change(server.worker.ready), server.loop).result(60)
    again = server.http().post("/v1/chat/completions", json=body)
    assert "fp_other" in again.text and "fp_null" not in again.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", lambda effort: {"messages": MESSAGES, "reasoning_effort": effort}),
        ("/v1/responses", lambda effort: {"input": "hi", "reasoning": {"effort": effort}}),
        ("/v1/messages", lambda effort: {"messages": MESSAGES, "max_tokens": 9, "output_config": {"effort": effort}}),
        ("/v1/chat/completions", lambda effort: {"messages": MESSAGES, "chat_template_kwargs": {"reasoning_effort": effort}}),
    ],
)
def test_an_effort_is_a_budget_of_thoughts(serve, path, fields):
    """Clients send an effort to every model, so it is no error if a model has no token that ends thoughts."""
    server, plain = serve(tokenizer=ByteTokenizer(specials=["<think>", "</think>"])), serve()
    for effort, budget in {"minimal": 512, "low": 2048, "medium": 8192, "high": None}.items():
        for one in (server, plain):
            assert one.http().post(path, json={"model": "null", **fields(effort)}).status_code == 200
        found = server.worker.submits[-1].params.thinking
        assert found == (None if budget is None else Thinking(budget, (258,), 259, is_open=False))
        assert plain.worker.submits[-1].params.thinking is None
