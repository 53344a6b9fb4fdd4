"""Constraints from the HTTP request to the answer: the model generates random tokens, and llguidance in the worker makes the answer match
the constraint."""

from __future__ import annotations

import json
import re
import sys

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from server.messages import Load
from server.models.state import ModelSpec
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TokenizerFiles
from server.workers.supervisor import Supervisor
from tests.doubles.process import NullConfig, null_source

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"enum": ["m", "ft"]}},
    "required": ["a", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "measure", "parameters": ARGUMENTS}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """Return a model folder with a chat template and a tokenizer. Its tokens are single bytes, sequences of spaces and the markers of tool
    calls."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    runs = {"Ġ" * length: 254 + length for length in range(2, 33)}
    merges = [(run[1:], "Ġ") for run in runs]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=alphabet | runs, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def noise(serve, model_folder):
    """Return a function that starts a server whose model has pseudo-random logits."""
    tokenizer = Tokenizer(TokenizerFiles.from_dir(model_folder).contents)
    config = NullConfig(vocab_size=290, tokenizer=str(model_folder / "tokenizer.json"), eos_ids=tokenizer.eos_ids)

    def make_worker(spec: ModelSpec, progress) -> Supervisor:
        load = Load(spec.name, null_source(config), max_batch=spec.max_batch)
        return Supervisor([sys.executable, "-m", "tests.doubles.process"], load, progress=progress)

    def start(**fields):
        return serve(make_worker=make_worker, tokenizer=tokenizer, initial=[ModelSpec("null", "null", **fields)])

    return start


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral", "json"])
def test_a_required_call_is_made(noise, form):
    server = noise(tool_parser=form, reasoning=False)
    client = server.openai()
    body = {
        "model": "null",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": TOOLS,
        "max_tokens": 600,
        "parallel_tool_calls": False,
    }
    for seed in range(3):
        choice = client.chat.completions.create(**body, tool_choice="required", seed=seed).choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        arguments = json.loads(call.function.arguments)
        if call.function.name == "measure":
            assert 0 <= arguments["a"] <= 99 and arguments["unit"] in ("m", "ft") and len(arguments) == 2
        else:
            assert (call.function.name, arguments) == ("now", {})
    named = {"type": "function", "function": {"name": "measure"}}
    stream = client.chat.completions.create(**body, tool_choice=named, stream=True)
    deltas = [delta for chunk in stream for delta in chunk.choices[0].delta.tool_calls or []]
    assert deltas[0].function.name == "measure"
    assert json.loads("".join(delta.function.arguments for delta in deltas)).keys() == {"a", "unit"}


def test_calls_that_a_model_chooses_to_make_are_of_the_tools_offered(noise):
    """If a model begins a call although no call is required, the call names an offered tool. Here the model begins calls by chance. A logit
    bias makes the calls short, because unconstrained arguments may be long."""
    server = noise(tool_parser="hermes", reasoning=False)
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    odd = {"type": "object", "properties": {"a": {"pattern": "(?!x)"}}}  # the worker cannot compile this pattern
    client = server.openai()
    body = {"model": "null", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "temperature": 1}
    begin, end = 288, ord("}")
    for seed in range(2):
        asked = {**body, "seed": seed, "logit_bias": {str(begin): 7, str(end): 9}}
        choice = client.chat.completions.create(**asked, tools=[strict, TOOLS[1]]).choices[0]
        assert len(choice.message.tool_calls) > 1 and choice.message.content
        *whole, _ = choice.message.tool_calls
        for call in whole:
            arguments = json.loads(call.function.arguments)
            assert call.function.name == "now" or (call.function.name, arguments.keys()) == ("measure", {"a", "unit"})
        stream = client.chat.completions.create(**asked, tools=[strict, TOOLS[1]], stream=True)
        deltas = [delta for chunk in stream for delta in chunk.choices[0].delta.tool_calls or []]
        assert [delta.function.name for delta in deltas if delta.id] == [call.function.name for call in choice.message.tool_calls]

        broken = {"type": "function", "function": {"name": "odd", "strict": True, "parameters": odd}}
        choice = client.chat.completions.create(**asked, tools=[broken]).choices[0]
        assert {call.function.name for call in choice.message.tool_calls} == {"odd"}


def test_formats_are_met_behind_thoughts_too(noise):
    server = noise(reasoning=True)
    asked = {
        "temperature": 1,
        "max_tokens": 300,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ARGUMENTS}},
    }
    for seed in range(3):
        message = server.chat(**asked, seed=seed).json()["choices"][0]["message"]
        assert json.loads(message["content"]).keys() == {"a", "unit"}
    assert re.fullmatch("[ab]{4}c", server.chat(guided_regex="[ab]{4}c", seed=1).json()["choices"][0]["message"]["content"])
    assert server.chat(guided_choice=["yes", "no"], seed=2).json()["choices"][0]["message"]["content"] in ("yes", "no")


def test_what_cannot_be_compiled_is_refused(noise):
    server = noise(reasoning=False)
    for body in ({"guided_regex": "(("}, {"guided_grammar": "start: nothing"}, {"guided_json": {"type": "alien"}}):
        for stream in (False, True):
            response = server.chat(**body, stream=stream)
            assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_schema", response.text


def test_an_expression_that_expands_is_refused_and_another_followed(noise):
    """A regex that needs too much memory is refused, by itself and as a pattern in a schema. Afterwards the worker still answers the next
    request."""
    server = noise(reasoning=False)
    for body in ({"guided_regex": "(e{1000}){4000}"}, {"guided_json": {"type": "string", "pattern": "^(e{1000}){4000}$"}}):
        for stream in (False, True):
            response = server.chat(**body, stream=stream)
            assert stream or response.status_code == 400  # a stream sends status 200 before the worker refuses the regex
            assert "invalid_schema" in response.text and "128 MiB of memory" in response.text
    answer = server.chat(guided_regex="[ab]{4}c", seed=1)
    assert re.fullmatch("[ab]{4}c", answer.json()["choices"][0]["message"]["content"])
    assert server.http().get("/health/ready").status_code == 200


def test_a_grammar_that_is_heavy_is_refused_and_another_followed(noise):
    server = noise(reasoning=False)
    rules = [f"e{i}: " + " | ".join(f"e{i} e{j}" for j in range(30)) + ' | " "' for i in range(30)]
    response = server.chat(guided_grammar="\n".join(["start: e0", *rules]))
    assert response.status_code == 400
    assert "invalid_schema" in response.text and "more than 3 s of CPU time" in response.text
    answer = server.chat(guided_grammar='start: "so " ("a" | "b") "!"', seed=1)
    assert answer.json()["choices"][0]["message"]["content"] in ("so a!", "so b!")
