"""Turn a request of Dynamo's frontend, which has token ids, into a request to `/inference/v1/generate` of the server."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

# Fields of `sampling_options`, of `stop_conditions` and of `guided_decoding` that have the same name and meaning for Dynamo and for the
# server.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
)
STOPPING = ("max_tokens", "min_tokens", "ignore_eos")
GUIDES = ("json", "regex", "choice", "grammar")
# Fields that must be absent or neutral, with the values that are neutral, by the part of a request that has them ("": the request itself).
# Dynamo reads an answer until its first choice has ended, so only one choice is allowed.
REFUSED: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "": dict.fromkeys(("prompt_embeds", "multi_modal_data", "encoder_result", "prefill_result", "bootstrap_info"), ()),
    "sampling_options": {"n": (1,), "best_of": (1,), "use_beam_search": (False,), "length_penalty": (1.0,)},
    "stop_conditions": {"max_thinking_tokens": ()},
    "output_options": {"prompt_logprobs": ()},
    "guided_decoding": {"structural_tag": (), "whitespace_pattern": ()},
}


class Refused(ValueError):
    """Raised if a request has a field that the server does not offer."""


def body_of(request: Mapping[str, Any], request_id: str, model: str) -> dict[str, Any]:
    """Return the body for the server. The body has no stop texts: the frontend, which decodes the answer, applies them. A request without a
    seed gets one that depends only on `request_id`. Raise Refused if the request has a field that the server does not offer."""
    sampling, stopping, output = (_fields(request, name) for name in ("sampling_options", "stop_conditions", "output_options"))
    guide = _fields(sampling, "guided_decoding")
    for where, fields in zip(REFUSED, (request, sampling, stopping, output, guide), strict=True):
        _require_neutral(where, fields)
    params = {name: value for name in SAMPLING if (value := sampling.get(name)) is not None}
    params |= {name: value for name in STOPPING if (value := stopping.get(name)) is not None}
    params["seed"] = _seed_of(request_id) if sampling.get("seed") is None else sampling["seed"]
    if ends := _ends(stopping):
        params["stop_token_ids"] = ends
    if output.get("logprobs") is not None:
        params["logprobs"] = output["logprobs"]
    if given := {name: guide[name] for name in GUIDES if guide.get(name) is not None}:
        params["structured_outputs"] = given
    body: dict[str, Any] = {
        "token_ids": request["token_ids"],
        "model": model,
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
        "sampling_params": params,
    }
    routing = _fields(request, "routing")
    if routing.get("cache_salt"):
        body["cache_salt"] = routing["cache_salt"]
    if routing.get("priority"):
        body["priority"] = -routing["priority"]  # Dynamo serves larger numbers first, the server smaller ones
    return body


def _seed_of(request_id: str) -> int:
    """Return the seed of a request without a seed. A request that Dynamo continues on another worker keeps its id, so it gets the same seed
    there, and the same token at each position of the sequence."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8, person=b"seed").digest()) >> 1


def _ends(stopping: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end the answer. The hidden ones end any answer of the model, unless the request sets `ignore_eos`."""
    visible, hidden = (stopping.get(name) or [] for name in ("stop_token_ids", "stop_token_ids_hidden"))
    visible = [*visible, *(stopping.get("stop_token_ids_visible") or [])]
    return sorted({*visible, *([] if stopping.get("ignore_eos") else hidden)})


def _fields(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a request, or {} if the request lacks it or it is null."""
    return request.get(name) or {}


def _require_neutral(where: str, fields: Mapping[str, Any]) -> None:
    """Raise Refused if a field of REFUSED[where] is neither absent, nor null, nor neutral."""
    for name, neutral in REFUSED[where].items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            full = f"{where}.{name}" if where else name
            raise Refused(f"{full} is {value!r:.100}; the server does not offer it: leave it out")
