"""Requests of Dynamo's frontend become requests to the server, and fields that the server does not offer are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.dynamo.request import Refused, body_of
from server.api.vllm.body import GenerateTokensBody

FULL: dict[str, Any] = {
    "token_ids": [1, 2, 3],
    "model": "demo",
    "sampling_options": {
        "n": 1,
        "best_of": None,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": -3,
        "use_beam_search": None,
        "length_penalty": None,
        "guided_decoding": {"json": None, "regex": "[ab]+", "choice": None, "grammar": None, "backend": None},
    },
    "stop_conditions": {
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": None,
        "stop": ["END"],
        "stop_token_ids": [7],
        "stop_token_ids_hidden": [5, 4],
    },
    "output_options": {"logprobs": 3, "prompt_logprobs": None, "skip_special_tokens": True},
}


def test_all_fields_arrive() -> None:
    body = body_of(FULL, "one", "served")
    assert (body["token_ids"], body["model"], body["stream"]) == ([1, 2, 3], "served", True)
    assert body["sampling_params"] == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": -3,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [4, 5, 7],
        "logprobs": 3,
        "structured_outputs": {"regex": "[ab]+"},
    }
    assert GenerateTokensBody.model_validate(body).sampling_params.unknown == {}


def test_salt_and_priority_arrive() -> None:
    """A larger priority is served first by Dynamo, a smaller one by the server."""
    body = body_of({"token_ids": [1], "routing": {"cache_salt": "salt", "priority": 3, "dp_rank": 0}}, "one", "m")
    assert (body["cache_salt"], body["priority"]) == ("salt", -3)
    assert GenerateTokensBody.model_validate(body).priority == -3


def test_what_a_request_leaves_out_the_server_decides() -> None:
    body = body_of({"token_ids": [1], "sampling_options": None}, "one", "m")
    assert body["sampling_params"].keys() == {"seed"}


def test_a_request_that_is_continued_keeps_its_seed() -> None:
    def seed(request_id: str) -> int:
        return body_of({"token_ids": [1]}, request_id, "m")["sampling_params"]["seed"]

    assert seed("one") == seed("one") != seed("two")
    assert 0 <= seed("one") < 1 << 63


def test_an_answer_that_ignores_its_end_has_only_visible_ends() -> None:
    stopping = {"ignore_eos": True, "stop_token_ids_visible": [8], "stop_token_ids_hidden": [5]}
    assert body_of({"token_ids": [1], "stop_conditions": stopping}, "one", "m")["sampling_params"]["stop_token_ids"] == [8]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"multi_modal_data": {"image_url": []}}, "multi_modal_data is {'image_url': \\[\\]}"),
        ({"sampling_options": {"use_beam_search": True}}, "sampling_options.use_beam_search is True"),
        ({"sampling_options": {"n": 2}}, "sampling_options.n is 2"),
        ({"sampling_options": {"best_of": 3}}, "sampling_options.best_of is 3"),
        ({"sampling_options": {"guided_decoding": {"structural_tag": {}}}}, "guided_decoding.structural_tag is {}"),
        ({"stop_conditions": {"max_thinking_tokens": 5}}, "stop_conditions.max_thinking_tokens is 5"),
        ({"output_options": {"prompt_logprobs": 1}}, "output_options.prompt_logprobs is 1"),
    ],
)
def test_what_the_server_does_not_offer_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(Refused, match=f"{named}.*: leave it out"):
        body_of({"token_ids": [1], **given}, "one", "m")


def test_neutral_values_are_not_refused() -> None:
    sampling = {"use_beam_search": False, "length_penalty": 1.0, "best_of": 1, "n": None}
    assert body_of({"token_ids": [1], "sampling_options": sampling}, "one", "m")["sampling_params"].keys() == {"seed"}
