"""For every request field that the official client or our schema defines, a test checks that the field has its documented effect, that it
changes no answer, or that the server refuses it with an error that names it.

The tables of this file must cover the client's signatures and the schema, so a new field fails here until it has a row. Each request is
sent streamed and unstreamed: the worker must receive the same request both times, the client must get the same answer, and the answer must
match the client's own types.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import openai
import pytest
from openai.resources import Completions, Embeddings
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.types import Completion, CompletionChoice, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from pydantic import AliasChoices, BaseModel

from server.api.request.fields import OFF, UNSUPPORTED
from server.api.request.schema import ChatBody, CompletionBody, EmbeddingBody, StreamOptions
from server.messages import Submit
from server.models.state import ModelSpec
from tests.doubles.worker import ByteTokenizer, NullScript, NullTemplate

# --- a model that shows the effect of every field --------------------------------------------------------------------------

BOS, THINK, FIM_PREFIX = 256, 258, 260
SPECIALS = ["<think>", "</think>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
SAID = "Hello from the null device."
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
PROMPTS = (("query", "Find: "), ("document", ""))


class TellingTemplate(NullTemplate):
    """A template that renders its variables into the prompt, so that tests see which variables it received."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        told = kwargs.get("variables")
        return (json.dumps(told, sort_keys=True) if told else "") + super().render(*args, **kwargs)


class TellingTokenizer(ByteTokenizer):
    def __init__(self) -> None:
        super().__init__(specials=SPECIALS)
        self.chat_template = TellingTemplate()


def answers(text: str) -> Callable[[Submit, int], list[list[int]]]:
    return lambda _submit, _choice: [*([byte] for byte in text.encode()), [BOS]]


pytestmark = pytest.mark.parametrize(
    "shared_server",
    [
        {
            "script": NullScript(embedding_size=8, normalize=False, prompts=PROMPTS),
            "tokenizer": TellingTokenizer(),
            "initial": (ModelSpec("null", "null", tool_parser="hermes", reasoning=True),),
        }
    ],
    indirect=True,
    ids=[""],
    scope="module",
)


# --- requests and observations --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What a test observes of one request: the `Submit` that the worker received, and the answer or its chunks."""

    submit: Submit
    answer: Any = None
    chunks: list[Any] = field(default_factory=list)

    @property
    def prompt(self) -> str:
        return bytes(i for i in self.submit.prompt_ids if i < 256).decode()

    @property
    def choice(self) -> Any:
        return self.answer.choices[0]

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def texts(self) -> list[str]:
        if self.answer is not None:
            return [choice.text if hasattr(choice, "text") else choice.message.content or "" for choice in self.answer.choices]
        texts: dict[int, str] = {}
        for chunk in self.chunks:
            for choice in chunk.choices:
                piece = choice.text if hasattr(choice, "text") else choice.delta.content or ""
                texts[choice.index] = texts.get(choice.index, "") + piece
        return [texts[index] for index in sorted(texts)]


Effect = Callable[[Seen], bool]


@dataclass(frozen=True)
class Probe:
    value: Any
    effect: Effect
    further: Mapping[str, Any] = field(default_factory=dict)  # more fields, without which the probed field has no effect
    says: str = SAID  # the text that the model answers
    streams: bool = True  # whether the request may ask for a stream


def param(name: str, value: Any, found: Any = None, **further: Any) -> Probe:
    """Return the probe of a sampling parameter. The worker must receive `found`, or `value` itself if `found` is None."""
    return Probe(value, lambda seen: getattr(seen.submit.params, name) == (value if found is None else found), further)


def demands(value: Any, text: str, **further: Any) -> Probe:
    def effect(seen: Seen) -> bool:
        constraint = seen.submit.params.constraint
        return constraint is not None and text in constraint.source

    return Probe(value, effect, further)


HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
WELL: list[dict[str, Any]] = [*HI, {"role": "assistant", "content": "Well. "}]
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"zebra": {"type": "string"}}}

GENERATION: dict[str, Probe] = {
    "model": Probe("null", lambda seen: (seen.answer or seen.chunks[0]).model == "null"),
    "stream": Probe(True, lambda seen: len(seen.chunks) > 2, streams=False),
    "stream_options": Probe({"include_usage": True}, lambda seen: seen.chunks[-1].usage.total_tokens > 0, {"stream": True}, streams=False),
    "max_tokens": Probe(5, lambda seen: seen.text == "Hello"),
    "n": Probe(2, lambda seen: len(seen.texts) == 2),
    "temperature": param("temperature", 0.25),
    "do_sample": Probe(False, lambda seen: seen.submit.params.temperature == 0, {"temperature": 0.7}),
    "top_p": param("top_p", 0.5),
    "top_k": param("top_k", 7),
    "min_p": param("min_p", 0.1),
    "typical_p": param("typical_p", 0.9),
    "frequency_penalty": param("frequency_penalty", 0.5),
    "presence_penalty": param("presence_penalty", -0.5),
    "repetition_penalty": param("repetition_penalty", 1.5),
    "logit_bias": param("logit_bias", {"65": -100}, ((65, -100.0),)),
    "seed": param("seed", 11),
    "stop": Probe([" from"], lambda seen: seen.text == "Hello"),
    "stop_token_ids": param("stop_token_ids", [3], (3,)),
    "include_stop_str_in_output": Probe(True, lambda seen: seen.text == "Hello from", {"stop": " from"}),
    "ignore_eos": param("ignore_eos", True),
    "min_tokens": param("min_tokens", 2),
    "skip_special_tokens": Probe(False, lambda seen: seen.text == f"{SAID}<s>"),
    "bad_words": param("banned_token_ids", ["x"], (ord("x"),)),
    "allowed_token_ids": param("allowed_token_ids", [1, 2], (1, 2)),
    "prompt_logprobs": param("prompt_logprobs", 1),
    "logprobs_mode": param("processed_logprobs", "processed_logprobs", found=True),
    "return_token_ids": Probe(True, lambda seen: seen.choice.token_ids == [*SAID.encode(), BOS], streams=False),
    "response_format": demands({"type": "json_schema", "json_schema": {"name": "z", "schema": SCHEMA}}, "zebra"),
    "structured_outputs": demands({"choice": ["zebra"]}, "zebra"),
    "guided_json": demands(SCHEMA, "zebra"),
    "guided_regex": demands("zebra+", "zebra+"),
    "guided_choice": demands(["zebra"], "zebra"),
    "guided_grammar": demands('start: "zebra"', "zebra"),
    "json_schema": demands(SCHEMA, "zebra"),
    "regex": demands("zebra+", "zebra+"),
    "grammar": demands('root ::= "zebra"', "zebra"),
    "truncate_prompt_tokens": Probe(2, lambda seen: len(seen.submit.prompt_ids) == 2),
    "truncation_side": Probe("right", lambda seen: seen.submit.prompt_ids[0] in (BOS, ord("<")), {"truncate_prompt_tokens": 1}),
    "priority": Probe(-4, lambda seen: seen.submit.priority == -4),
    "cache_salt": Probe("s", lambda seen: seen.submit.cache_salt == "s"),
    "timeout": Probe(60, lambda seen: seen.submit.deadline is not None),
    "request_id": Probe("mine-1", lambda seen: (seen.answer or seen.chunks[0]).id.endswith("-mine-1")),
}
CHAT: dict[str, Probe] = {
    **GENERATION,
    "messages": Probe([{"role": "user", "content": "zebra?"}], lambda seen: "zebra?" in seen.prompt),
    "max_completion_tokens": GENERATION["max_tokens"],
    "logprobs": Probe(True, lambda seen: [entry.token for entry in seen.choice.logprobs.content[:2]] == ["H", "e"], streams=False),
    "top_logprobs": Probe(2, lambda seen: len(seen.choice.logprobs.content[0].top_logprobs) == 2, {"logprobs": True}, streams=False),
    "return_tokens_as_token_ids": Probe(
        True, lambda seen: seen.choice.logprobs.content[0].token == "token_id:72", {"logprobs": True}, streams=False
    ),
    "add_special_tokens": Probe(True, lambda seen: seen.submit.prompt_ids[0] == BOS),
    "tools": Probe([NOW], lambda seen: '"now"' in seen.prompt),
    "tool_choice": Probe("none", lambda seen: '"now"' not in seen.prompt, {"tools": [NOW]}),
    "functions": Probe([NOW["function"]], lambda seen: '"now"' in seen.prompt),
    "function_call": Probe("none", lambda seen: '"now"' not in seen.prompt, {"functions": [NOW["function"]]}),
    "parallel_tool_calls": Probe(
        False, lambda seen: len(seen.choice.message.tool_calls) == 1, {"tools": [NOW]}, says=CALL + CALL, streams=False
    ),
    "reasoning_effort": Probe("max", lambda seen: '"reasoning_effort": "max"' in seen.prompt),
    "include_reasoning": Probe(
        False, lambda seen: not hasattr(seen.choice.message, "reasoning"), says=f"<think>hm</think>{SAID}", streams=False
    ),
    "separate_reasoning": Probe(False, lambda seen: seen.text == f"<think>hm</think>{SAID}", says=f"<think>hm</think>{SAID}"),
    "chat_template_kwargs": Probe({"opening": "So,"}, lambda seen: seen.prompt.endswith("So,")),
    "add_generation_prompt": Probe(False, lambda seen: seen.prompt == "<|user|>hi"),
    "continue_final_message": Probe(True, lambda seen: seen.prompt.endswith("Well. "), {"messages": WELL}),
    "documents": Probe([{"title": "zebra"}], lambda seen: '"title": "zebra"' in seen.prompt),
    "echo": Probe(True, lambda seen: seen.text == f"Well. {SAID}", {"messages": WELL}),
    "enable_thinking": Probe(False, lambda seen: '"enable_thinking": false' in seen.prompt),
    "thinking_token_budget": Probe(7, lambda seen: seen.submit.params.thinking is not None and seen.submit.params.thinking.budget == 7),
}
COMPLETIONS: dict[str, Probe] = {
    **GENERATION,
    "prompt": Probe("zebra", lambda seen: seen.prompt == "zebra"),
    "logprobs": Probe(1, lambda seen: seen.choice.logprobs.tokens[:2] == ["H", "e"], streams=False),
    "return_tokens_as_token_ids": Probe(True, lambda seen: seen.choice.logprobs.tokens[0] == "token_id:72", {"logprobs": 0}, streams=False),
    "add_special_tokens": Probe(False, lambda seen: seen.submit.prompt_ids == tuple(b"hi")),
    "suffix": Probe("cd", lambda seen: FIM_PREFIX in seen.submit.prompt_ids),
    "echo": Probe(True, lambda seen: seen.text == f"hi{SAID}", {"max_tokens": 50}),
    "best_of": Probe(3, lambda seen: seen.submit.num_choices == 3 and len(seen.texts) == 1, streams=False),
}
# Accepted fields that change no answer: they identify the caller, give hints for caching, or request the default behaviour.
WITHOUT_EFFECT: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "me",
}
ONLY_CHAT: dict[str, Any] = {"modalities": ["text"], "prediction": {"type": "content", "content": "x"}, "verbosity": "low"}
REFUSED: dict[str, Any] = {
    "audio": {"voice": "ash", "format": "wav"},
    "moderation": {"model": "m"},
    "web_search_options": {"search_context_size": "low"},
}
ABSENT = object()  # a field with this value is left out of the request, even if the tests normally send it
TRANSPORT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


class UnfinishedChoice(CompletionChoice):
    """A choice in a chunk. The client uses one type for the choices of chunks and of whole answers. That type requires a finish reason,
    which only the last chunk has."""

    finish_reason: Literal["stop", "length", "content_filter"] | None


class CompletionChunk(Completion):
    choices: list[UnfinishedChoice]


@dataclass(frozen=True)
class Endpoint:
    name: str
    create: Callable[..., Any]  # the method of the client that sends the request
    body: type[BaseModel]
    probes: Mapping[str, Probe]
    defaults: Mapping[str, Any]
    whole: type[BaseModel]
    chunk: type[BaseModel]

    @property
    def client_fields(self) -> set[str]:
        return inspect.signature(self.create).parameters.keys() - TRANSPORT

    def call(self, client: Any, options: dict[str, Any]) -> Any:
        """Call the client's method. Pass fields that are no parameters of the method in `extra_body`."""
        for part in self.name.split("."):
            client = getattr(client, part)
        known = {name: value for name, value in options.items() if name in self.client_fields}
        return client.create(**known, extra_body={name: value for name, value in options.items() if name not in known})

    def see(self, client: Any, server: Any, options: dict[str, Any]) -> Seen:
        server.worker.submits.clear()
        given = {"model": "null", "seed": 5, **self.defaults, **options}
        answer = self.call(client, {name: value for name, value in given.items() if value is not ABSENT})
        if options.get("stream"):
            chunks = [checked(self.chunk, chunk) for chunk in answer]
            return Seen(server.worker.submits[-1], chunks=chunks)
        return Seen(server.worker.submits[-1], checked(self.whole, answer))


ENDPOINTS = {
    endpoint.name: endpoint
    for endpoint in (
        Endpoint("chat.completions", ChatCompletions.create, ChatBody, CHAT, {"messages": HI}, ChatCompletion, ChatCompletionChunk),
        Endpoint(
            "completions", Completions.create, CompletionBody, COMPLETIONS, {"prompt": "hi", "max_tokens": 28}, Completion, CompletionChunk
        ),
    )
}


# --- answers match the client's types ---------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[4] / "docs" / "api.md").read_text()
FURTHER = set(re.findall(r"`(\w+)`", PAGE.partition("### Fields of answers")[2].partition("\n## ")[0]))


def checked(kind: type[BaseModel], answer: BaseModel) -> Any:
    """Validate an answer strictly against a type of the client. Fields that this type does not have must be in the list of our own fields
    in docs/api.md."""
    parsed = kind.model_validate_json(answer.model_dump_json(exclude_unset=True), strict=True)
    assert set(extras(parsed)) <= FURTHER
    return parsed


def extras(value: object) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from extras(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from extras(item)


# --- the tests ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(shared_server: Any) -> openai.OpenAI:
    return shared_server.openai()


def further(name: str) -> dict[str, Any]:
    return {**WITHOUT_EFFECT, **(ONLY_CHAT if name.startswith("chat") else {})}


@pytest.mark.parametrize("name", ENDPOINTS)
def test_the_tables_have_every_field_there_is(server, name):
    endpoint = ENDPOINTS[name]
    assert endpoint.probes.keys() | further(name).keys() == endpoint.body.model_fields.keys()
    assert endpoint.client_fields <= endpoint.body.model_fields.keys() | REFUSED.keys()
    assert REFUSED.keys() <= UNSUPPORTED.keys()


PROBES = [(name, field) for name, endpoint in ENDPOINTS.items() for field in endpoint.probes]


@pytest.mark.parametrize(("name", "field"), PROBES)
def test_a_field_does_what_it_says(client, server, name, field):
    endpoint, probe = ENDPOINTS[name], ENDPOINTS[name].probes[field]
    server.script.answer = answers(probe.says)
    for spelling in spellings(endpoint.body, field):
        options = {field: ABSENT, **probe.further, spelling: probe.value}
        seen = endpoint.see(client, server, options)
        assert probe.effect(seen), spelling
        if probe.streams:
            streamed = endpoint.see(client, server, {**options, "stream": True})
            assert probe.effect(streamed)
            assert streamed.texts == seen.texts and streamed.submit.params == seen.submit.params


def spellings(body: type[BaseModel], field: str) -> list[str]:
    alias = body.model_fields[field].validation_alias
    return [str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else [field]


@pytest.mark.parametrize(("name", "field"), [(name, field) for name in ENDPOINTS for field in further(name)])
def test_a_field_without_effect_is_taken(client, server, name, field):
    endpoint, value = ENDPOINTS[name], further(name)[field]
    server.script.answer = answers(SAID)
    seen, plain = endpoint.see(client, server, {field: value}), endpoint.see(client, server, {})
    assert (seen.texts, seen.submit.params, seen.submit.prompt_ids) == (plain.texts, plain.submit.params, plain.submit.prompt_ids)


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_of_the_client_that_is_not_implemented_is_refused_by_name(client, field):
    with pytest.raises(openai.BadRequestError) as caught:
        ENDPOINTS["chat.completions"].call(client, {"model": "null", "messages": HI, field: REFUSED[field]})
    assert (caught.value.code, caught.value.param) == ("unsupported_field", field)


# The fields that give a parameter an effect, by the parameter: while a sampler is off, its parameters have none.
SWITCHES: dict[str, dict[str, Any]] = {companion: {switch: "x"} for switch, (_, companions) in OFF.items() for companion in companions} | {
    "repeat_last_n": {"frequency_penalty": 1}
}


@pytest.mark.parametrize("name", ENDPOINTS)
def test_whatever_a_peer_has_is_refused_by_name(server, name):
    endpoint = ENDPOINTS[name]
    honoured = {spelling for field in endpoint.body.model_fields for spelling in spellings(endpoint.body, field)}
    with server.http() as client:
        for field in UNSUPPORTED.keys() - honoured:
            switch = SWITCHES.get(field, {})
            error = client.post(f"/v1/{name.replace('.', '/')}", json={**endpoint.defaults, **switch, field: "x"}).json()["error"]
            assert error["code"] == "unsupported_field" and error["param"] in (field, *switch)


def test_options_and_choices_of_the_client_are_known(client, server):
    assert get_type_hints(ChatCompletionStreamOptionsParam).keys() <= StreamOptions.model_fields.keys()
    for effort in filter(None, strings(get_type_hints(CompletionCreateParamsBase)["reasoning_effort"])):
        assert ENDPOINTS["chat.completions"].see(client, server, {"reasoning_effort": effort}).text


def strings(hint: Any) -> Iterator[str]:
    for part in get_args(hint):
        if isinstance(part, str):
            yield part
        else:
            yield from strings(part)


# --- embeddings -----------------------------------------------------------------------------------------------------------------


def embed(client: Any, options: dict[str, Any]) -> CreateEmbeddingResponse:
    known = inspect.signature(Embeddings.create).parameters.keys() - TRANSPORT
    given = {"model": "null", "input": "hi", "encoding_format": "float", **options}
    extra = {name: given.pop(name) for name in given.keys() - known}
    return checked(CreateEmbeddingResponse, client.embeddings.create(**given, extra_body=extra))


def length(answer: CreateEmbeddingResponse) -> float:
    return sum(x * x for x in answer.data[0].embedding) ** 0.5


EMBEDDINGS: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "model": ({"model": "null"}, lambda answer: answer.model == "null"),
    "input": ({"input": ["a", "b"]}, lambda answer: [row.index for row in answer.data] == [0, 1]),
    "messages": (
        {"messages": HI, "input": None},
        lambda answer: answer.usage.prompt_tokens == len("<|user|>hi"),
    ),
    "add_generation_prompt": (
        {"messages": HI, "input": None, "add_generation_prompt": True},
        lambda answer: answer.usage.prompt_tokens == len("<|user|>hi\n<|assistant|>"),
    ),
    "chat_template_kwargs": (
        {"messages": HI, "input": None, "add_generation_prompt": True, "chat_template_kwargs": {"opening": "So"}},
        lambda answer: answer.usage.prompt_tokens > len("<|user|>hi\n<|assistant|>"),
    ),
    "input_type": ({"input_type": "search_query"}, lambda answer: answer.usage.prompt_tokens == len("Find: hi") + 1),
    "encoding_format": ({"encoding_format": "float"}, lambda answer: isinstance(answer.data[0].embedding, list)),
    "dimensions": ({"dimensions": 3}, lambda answer: len(answer.data[0].embedding) == 3),
    "normalize": ({"normalize": True}, lambda answer: abs(length(answer) - 1) < 1e-5),
    "prompt_name": ({"prompt_name": "query"}, lambda answer: answer.usage.prompt_tokens == len("Find: hi") + 1),
    "truncate_prompt_tokens": ({"truncate_prompt_tokens": 2}, lambda answer: answer.usage.prompt_tokens == 2),
    "truncation_side": ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, lambda answer: answer.usage.prompt_tokens == 2),
    "add_special_tokens": ({"add_special_tokens": False}, lambda answer: answer.usage.prompt_tokens == 2),
    "timeout": ({"timeout": 60}, lambda answer: len(answer.data) == 1),  # test_embeddings.py tests requests whose time is over
    "user": ({"user": "me"}, lambda answer: len(answer.data) == 1),
}


def test_every_field_of_embeddings(client):
    known = inspect.signature(Embeddings.create).parameters.keys() - TRANSPORT
    assert known <= EMBEDDINGS.keys() == EmbeddingBody.model_fields.keys()
    for name, (options, effect) in EMBEDDINGS.items():
        assert effect(embed(client, options)), name
    left = embed(client, EMBEDDINGS["truncation_side"][0]).data[0].embedding
    assert left == embed(client, {"input": [BOS, ord("i")]}).data[0].embedding


def test_models_are_described_in_the_client_s_types(client):
    (listed,) = client.models.list().data
    assert checked(Model, listed) == checked(Model, client.models.retrieve("null"))
