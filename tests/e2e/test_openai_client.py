"""End-to-end tests with the official OpenAI client and a real server that serves the compiled demo model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.xdist_group("demo server")

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
    },
}


@pytest.fixture(scope="module")
def client(demo_server: Any) -> Iterator[openai.OpenAI]:
    transport = openai.DefaultHttpxClient(verify=False)  # loading certificates would take longer than most tests
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="unused", max_retries=0, timeout=60, http_client=transport) as client:
        yield client


def chat(client: openai.OpenAI, messages: list[dict[str, Any]], **options: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=messages, **{"temperature": 0, "max_tokens": 80, **options})


def text_of(client: openai.OpenAI, messages: list[dict[str, Any]], **options: Any) -> str:
    return chat(client, messages, **options).choices[0].message.content


def test_an_answer_and_the_same_in_a_stream(client):
    answer = chat(client, FRANCE)
    assert "Paris" in answer.choices[0].message.content and answer.choices[0].finish_reason == "stop"
    stream = list(chat(client, FRANCE, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream[:-1]) == answer.choices[0].message.content
    assert stream[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert stream[-1].usage.prompt_tokens == answer.usage.prompt_tokens


def test_a_conversation_remembers(client):
    said = text_of(client, [{"role": "user", "content": "My name is Anna."}])
    turns = [{"role": "user", "content": "My name is Anna."}, {"role": "assistant", "content": said}]
    assert "Anna" in text_of(client, [*turns, {"role": "user", "content": "What is my name?"}])


def test_a_second_turn_finds_the_first_in_the_cache(client):
    story = text_of(client, STORY, max_tokens=120)
    turns = [*STORY, {"role": "assistant", "content": story}, {"role": "user", "content": "What is the capital of Spain?"}]
    usage = chat(client, turns).usage
    assert usage.prompt_tokens_details.cached_tokens >= 64
    assert usage.prompt_tokens_details.cached_tokens % 16 == 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_an_enforced_tool_call_is_made(client, choice):
    """If the request requires a tool call, the answer is a call, even if the model would otherwise answer with text."""
    answer = chat(client, [{"role": "user", "content": "Hello!"}], tools=[WEATHER], tool_choice=choice).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    assert list(json.loads(call.function.arguments)) == ["city"]


def test_a_tool_call_in_a_stream_and_its_result(client):
    question = {"role": "user", "content": "What is the weather in Paris?"}
    whole = chat(client, [question], tools=[WEATHER], tool_choice="required").choices[0]
    (call,) = whole.message.tool_calls
    arguments = ""
    for chunk in chat(client, [question], tools=[WEATHER], tool_choice="required", stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            arguments += delta.function.arguments or ""
    assert json.loads(arguments) == json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "sky": "sunny"}'}
    told = text_of(client, [question, whole.message.model_dump(exclude_none=True), result], tools=[WEATHER])
    assert "21" in told or "sunny" in told


def test_a_call_of_its_own_accord_names_the_tool_that_is_offered(client):
    """If the model decides to call a tool, the call names a tool of the request. The names here differ from those with which the model was
    trained."""
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    num_calls = 0
    for seed, name in enumerate(["get_weather", "sky_report", "forecast_by_town", "weather_now"]):
        tools = [{"type": "function", "function": {**WEATHER["function"], "name": name}}]
        options: dict[str, Any] = {"tools": tools, "temperature": 1.0, "seed": seed}
        calls = chat(client, asked, **options).choices[0].message.tool_calls or ()
        deltas = [delta for chunk in chat(client, asked, **options, stream=True) for delta in chunk.choices[0].delta.tool_calls or ()]
        assert [delta.function.name for delta in deltas if delta.id] == [call.function.name for call in calls]
        assert {call.function.name for call in calls} <= {name}
        num_calls += len(calls)
        assert "Paris" in text_of(client, FRANCE, tools=tools), "offered tools must not disturb an answer without a call"
    assert num_calls


def test_a_schema_is_kept_at_any_temperature(client):
    schema = {
        "type": "object",
        "properties": {"animal": {"enum": ["dog", "cat"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["animal", "legs"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": True}}
    for seed in range(4):
        found = json.loads(text_of(client, FRANCE, response_format=form, temperature=1.5, seed=seed))
        assert set(found) == {"animal", "legs"} and found["animal"] in ("dog", "cat") and 0 <= found["legs"] <= 99


def test_an_expression_is_kept_at_any_temperature(client):
    pattern = r"(red|green|blue)( (red|green|blue)){4}"
    said = {text_of(client, FRANCE, temperature=2.0, seed=seed, extra_body={"guided_regex": pattern}) for seed in range(5)}
    assert all(re.fullmatch(pattern, text) for text in said) and len(said) > 1


def test_a_stop_string_ends_the_answer_before_it(client):
    whole = text_of(client, STORY, max_tokens=120)
    stop = whole[40:46]
    answer = chat(client, STORY, max_tokens=120, stop=[stop]).choices[0]
    assert answer.message.content == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"


def test_choices_differ_and_seeds_repeat(client):
    options: dict[str, Any] = {"temperature": 1.2, "n": 2, "seed": 11, "max_tokens": 40}
    first, again = ([choice.message.content for choice in chat(client, STORY, **options).choices] for _ in range(2))
    assert first == again and first[0] != first[1]
    other = [choice.message.content for choice in chat(client, STORY, **{**options, "seed": 12}).choices]
    assert other != first


def test_log_probabilities_add_up(client):
    tokens = chat(client, FRANCE, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert "Paris" in "".join(token.token for token in tokens)
    for token in tokens:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.logprob == max(other.logprob for other in token.top_logprobs), "temperature 0 takes the most probable"


def test_text_beyond_ascii_comes_whole(client):
    """A character may consist of several tokens of one byte each. Each piece of a stream contains only whole characters."""
    pattern = "(Grüße|日本語|🦊🦊){3}"
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "extra_body": {"guided_regex": pattern}}
    said = [{"role": "user", "content": "Grüße, 日本語 🦊"}]
    whole = text_of(client, said, **options)
    assert re.fullmatch(pattern, whole)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat(client, said, stream=True, **options)]
    assert "".join(pieces) == whole and "\ufffd" not in whole


def test_a_prompt_beyond_the_context_is_refused_with_figures(client):
    long = [{"role": "user", "content": "What is the capital of France? " * 200}]
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, long)
    error = refused.value.body
    assert error["code"] == "context_length_exceeded"
    figures = [int(figure) for figure in re.findall(r"\d+", error["message"])]
    assert 1024 in figures and any(figure > 1024 for figure in figures)


def test_a_model_that_chats_embeds(client):
    texts = ["The capital of France is Paris.", "hello", "Paris is the capital of France."]
    vectors = [item.embedding for item in client.embeddings.create(model="demo", input=texts).data]
    assert [sum(x * x for x in vector) for vector in vectors] == pytest.approx([1.0] * 3, abs=1e-5)
    assert client.embeddings.create(model="demo", input=texts[1]).data[0].embedding == vectors[1]


def test_an_answer_ends_where_the_context_does(client):
    answer = chat(client, STORY, max_tokens=None, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 1024
