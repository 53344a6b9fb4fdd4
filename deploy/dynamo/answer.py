"""Turn the events of `/inference/v1/generate` into the chunks that Dynamo's frontend expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

DATA = b"data: "
DONE = b"[DONE]"
ENDS = {"stop": "stop", "length": "length", "abort": "cancelled"}  # the server's word for why an answer ended -> Dynamo's word
NAME = "token_id:"  # precedes the number of a token in log-probabilities


class BrokenOff(Exception):
    """Raised if the server reports an error in a stream, after the answer has begun."""


def chunk_of(event: bytes) -> dict[str, Any] | None:
    """Return the chunk of an event, or None for an event without tokens: a comment, the event with the final usage, or the end of the
    stream. The last chunk also has the usage and the reason why the answer ended. Raise BrokenOff if the event reports an error."""
    if not event.startswith(DATA) or event[len(DATA) :].startswith(DONE):
        return None
    found = msgspec.json.decode(event[len(DATA) :])
    if (error := found.get("error")) is not None:
        raise BrokenOff(message_of(found) or str(error))
    if not found["choices"]:
        return None
    (choice,) = found["choices"]
    chunk: dict[str, Any] = {"token_ids": choice["token_ids"], "index": choice["index"]}
    if (logprobs := choice.get("logprobs")) is not None:
        chunk["log_probs"] = [entry["logprob"] for entry in logprobs["content"]]
        chunk["top_logprobs"] = [_ranked(entry["top_logprobs"]) for entry in logprobs["content"]]
    if (finish := choice["finish_reason"]) is not None:
        usage = found["usage"]
        chunk["finish_reason"] = ENDS[finish]
        chunk["completion_usage"] = {
            name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")
        }
    return chunk


def message_of(answer: object) -> str:
    """Return the message of the server's answer if it is an error, otherwise ""."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else ""


def _ranked(top: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the most probable tokens at a position in Dynamo's form, in the order of their ranks."""
    return [
        {
            "rank": rank,
            "token_id": int(entry["token"].removeprefix(NAME)),
            "token": bytes(entry["bytes"]).decode(errors="replace"),
            "logprob": entry["logprob"],
            "bytes": entry["bytes"],
        }
        for rank, entry in enumerate(top, 1)
    ]
