"""Events of the server become the chunks that Dynamo's frontend reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.dynamo.answer import BrokenOff, chunk_of, message_of

USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 1},
    "completion_tokens_details": {"reasoning_tokens": 0},
}


def event(finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 1, "token_ids": [7, 8], "logprobs": None, "finish_reason": finish, **more}
    return b"data: " + json.dumps({"id": "gen-1", "choices": [choice], "usage": USAGE}).encode() + b"\n\n"


def test_tokens_of_a_choice() -> None:
    assert chunk_of(event()) == {"token_ids": [7, 8], "index": 1}


@pytest.mark.parametrize(("said", "heard"), [("stop", "stop"), ("length", "length"), ("abort", "cancelled")])
def test_the_end_of_a_choice_has_the_usage(said: str, heard: str) -> None:
    chunk = chunk_of(event(said))
    assert chunk is not None
    assert chunk["finish_reason"] == heard
    assert chunk["completion_usage"] == {name: USAGE[name] for name in USAGE if name != "completion_tokens_details"}


def test_log_probabilities() -> None:
    def token(number: int, raw: bytes, logprob: float) -> dict[str, Any]:
        return {"token": f"token_id:{number}", "logprob": logprob, "bytes": [*raw]}

    first = {**token(7, b"a", -0.5), "top_logprobs": [token(7, b"a", -0.5), token(9, b"\xff", -2.0)]}
    chunk = chunk_of(event(logprobs={"content": [first, {**token(8, b"b", -0.1), "top_logprobs": []}], "refusal": None}))
    assert chunk is not None
    assert chunk["log_probs"] == [-0.5, -0.1]
    assert chunk["top_logprobs"] == [
        [
            {"rank": 1, "token_id": 7, "token": "a", "logprob": -0.5, "bytes": [97]},
            {"rank": 2, "token_id": 9, "token": "\ufffd", "logprob": -2.0, "bytes": [255]},
        ],
        [],
    ]


@pytest.mark.parametrize("nothing", [b": waiting\n\n", b"data: [DONE]\n\n", b'data: {"choices":[],"usage":null}\n\n'])
def test_other_events_bring_nothing(nothing: bytes) -> None:
    assert chunk_of(nothing) is None


def test_an_error_in_the_stream_is_raised() -> None:
    with pytest.raises(BrokenOff, match="the model computed a logit that is NaN or positive infinity"):
        chunk_of(b'data: {"error":{"message":"the model computed a logit that is NaN or positive infinity"}}\n\n')


@pytest.mark.parametrize("answer", [None, [], {}, {"error": "text"}, {"error": {"message": 5}}])
def test_an_answer_without_a_message(answer: object) -> None:
    assert message_of(answer) == ""
