"""vLLM's `/inference/v1/generate`: the tokens are those of a completion of the same prompt, in vLLM's shape."""

from __future__ import annotations

import json

import pytest

from server.api.request.schema import SamplingBody
from server.api.vllm.body import NO_EFFECT, TokenSampling

SAID = "Hello from the null device."
IDS = [256, 104, 105]
PATH = "/inference/v1/generate"
# the fields of a client that writes all fields of vLLM's SamplingParams with their defaults
DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "flat_logprobs": False,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": 0,
    "skip_clone": False,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
    "bad_words": [],
    "thinking_token_budget": None,
    "repetition_detection": None,
    "skip_reading_prefix_cache": None,
}


def generate(server, token_ids=IDS, **fields):
    response = server.http().post(PATH, json={"token_ids": token_ids, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server, **fields):
    response = server.http().post(PATH, json={"token_ids": IDS, "stream": True, **fields})
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def refusal(server, **fields):
    response = server.http().post(PATH, json={"token_ids": IDS, **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_whole_answer(server):
    answer = generate(server, request_id="mine")
    (choice,) = answer["choices"]
    assert bytes(choice["token_ids"]).decode() == SAID
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None and choice["logprobs"] is None
    assert answer["request_id"] == "mine" and answer["id"] == "gen-mine" and answer["model"] == "null"
    assert answer["usage"]["prompt_tokens"] == 3 and answer["prompt_logprobs"] is None and answer["kv_transfer_params"] is None
    submit = server.worker.submits[-1]
    assert submit.prompt_ids == tuple(IDS) and submit.params.max_tokens == 4096 - 3


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"max_tokens": 5},
        {"n": 3, "max_tokens": 4, "seed": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"logprobs": 2, "prompt_logprobs": 1, "max_tokens": 6},
        {"stop": "from", "include_stop_str_in_output": True},
        {"stop_token_ids": [102], "min_tokens": 2, "ignore_eos": True, "logit_bias": {"65": -5.0}, "bad_words": ["xy"]},
        {"structured_outputs": {"regex": "[a-z]+"}, "max_tokens": 3},
    ],
    ids=str,
)
def test_the_tokens_are_those_of_a_completion(server, params):
    """The worker gets the same job as for a completion of the same tokens, and whole answers, streams and completions have the same tokens,
    reasons and log-probabilities."""
    params = {"seed": 1, **params}
    answer = generate(server, sampling_params=params)
    asked = server.worker.submits[-1]
    chunks = stream(server, sampling_params=params)
    streamed = server.worker.submits[-1]
    completed = server.complete(prompt=IDS, return_token_ids=True, **{"max_tokens": -1, **params}).json()
    plain = server.worker.submits[-1]
    assert asked.params == streamed.params == plain.params and asked.num_choices == plain.num_choices
    for choice, other in zip(answer["choices"], completed["choices"], strict=True):
        of_choice = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert choice["token_ids"] == other["token_ids"] == [token for part in of_choice for token in part["token_ids"]]
        assert choice["finish_reason"] == other["finish_reason"] == of_choice[-1]["finish_reason"]
        if params.get("logprobs"):
            entries = choice["logprobs"]["content"]
            assert entries == [entry for part in of_choice for entry in part["logprobs"]["content"]]
            assert [entry["logprob"] for entry in entries] == other["logprobs"]["token_logprobs"]
            assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"][: len(entries)]]
    if params.get("prompt_logprobs"):
        assert len(answer["prompt_logprobs"]) == len(IDS) and answer["prompt_logprobs"] == chunks[0]["choices"][0]["prompt_logprobs"]


def test_fields_beside_the_parameters(server):
    generate(server, cache_salt="salt", priority=-3, model="null", sampling_params={"cache_salt": "other", "priority": 5})
    assert server.worker.submits[-1].cache_salt == "salt" and server.worker.submits[-1].priority == -3
    chunks = stream(server, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == len(SAID)


def test_all_of_a_clients_defaults_are_accepted(server):
    response = server.http().post(PATH, json={"token_ids": IDS, "features": None, "kv_transfer_params": None, "sampling_params": DEFAULTS})
    assert response.status_code == 200 and "x-ignored-params" not in response.headers
    assert response.json()["choices"][0]["token_ids"] == list(SAID.encode()[:16])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [300]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"token_ids": [[1]]}, "token_ids[0]"),
        ({"token_ids": [1] * 5000}, "token_ids"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"logprobs": -1}}, "sampling_params.logprobs"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"min_tokens": 9, "max_tokens": 3}}, "sampling_params.min_tokens"),
        ({"sampling_params": {"n": 1000}}, "sampling_params.n"),
        ({"sampling_params": {"stop": [""]}}, "sampling_params.stop"),
        ({"sampling_params": {"stop_token_ids": [999]}}, "sampling_params.stop_token_ids"),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "sampling_params.extra_args"),
        ({"sampling_params": {"logprob_token_ids": [1]}}, "sampling_params.logprob_token_ids"),
        ({"sampling_params": {"skip_reading_prefix_cache": True}}, "sampling_params.skip_reading_prefix_cache"),
        ({"sampling_params": {"thinking_token_budget": 5}}, "sampling_params.thinking_token_budget"),
    ],
    ids=str,
)
def test_refusals_name_the_field(server, fields, param):
    assert refusal(server, **fields)["param"] == param


def test_an_unknown_parameter_is_reported(server):
    response = server.http().post(PATH, json={"token_ids": IDS, "sampling_params": {"nonsense": 1}})
    assert response.headers["x-ignored-params"] == "sampling_params.nonsense"


def test_a_limit_beyond_the_context_is_lowered(server):
    response = server.http().post(PATH, json={"token_ids": IDS, "sampling_params": {"max_tokens": 5000}})
    assert response.headers["x-capped-params"] == f"sampling_params.max_tokens={4096 - 3}"


def test_no_field_of_the_parameters_is_dropped():
    """Each field that a completion samples by reaches it, and no field without effect is honoured elsewhere."""
    assert set(SamplingBody.model_fields) | {"n", "max_tokens", "logprobs", "prompt_logprobs", "structured_outputs"} == set(
        TokenSampling.model_fields
    )
    assert not set(NO_EFFECT) & set(TokenSampling.model_fields)
