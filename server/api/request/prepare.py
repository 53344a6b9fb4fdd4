"""Build the worker's job from a request's body: apply every default, and raise ApiError if a value exceeds a limit."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import msgspec

from server.api.answer.generate import Job
from server.api.context import Caller
from server.api.request.limits import num_chars, read_json
from server.api.request.schema import GenerationBody, JsonObject, ResponseFormat
from server.api.request.texts import encode_texts, too_long
from server.errors import INVALID_SCHEMA, INVALID_VALUE, NOT_A_GENERATOR, ApiError
from server.interfaces import Tokenizer
from server.messages import IDLE, Constraint, ConstraintKind, Excerpt, SamplingParams, Submit, Thinking
from server.models.model import Loaded, Model
from server.open_values import new_seed
from server.peers.named import GIVER
from server.settings import ServerSettings
from server.text.detokenize import StopRules
from server.text.dialects.format import AnswerRules
from server.text.grammar import Structure, json_text, structured

T = TypeVar("T")
ANY_OBJECT = Constraint(ConstraintKind.JSON_SCHEMA, json_text({"type": "object"}))
LEAST_SHARE = 1e-9  # replaces a top_p of 0, so that only the most probable token remains
# bytes of a body or of vectors, characters of a text, or tokens of an answer; more are processed on a thread, so that other streams do not
# wait
LONG = 4096


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat request that is ready to be answered: its prompt, the job for the worker, and the rules for parsing the answer."""

    prompt: str
    job: Job
    rules: AnswerRules


def invalid(param: str, message: str) -> ApiError:
    """Return the error for a value of the field `param` that is not accepted."""
    return ApiError(INVALID_VALUE, message, param=param)


def context_of(loaded: Loaded) -> int:
    """Return the largest number of tokens that a sequence may have: the model's context, or the size of the KV cache if that is smaller."""
    ready = loaded.ready
    return min(ready.max_context, max(0, ready.num_pages - 1) * ready.page_size or ready.max_context)


def require_generator(model: Model, loaded: Loaded) -> None:
    """Raise ApiError unless the model generates text."""
    if loaded.ready.num_hops:
        raise ApiError(NOT_A_GENERATOR, f"model {model.spec.name!r} only transcribes speech; ask /v1/audio/transcriptions", param="model")
    if not loaded.ready.generates:
        raise ApiError(NOT_A_GENERATOR, f"model {model.spec.name!r} only embeds or classifies and generates no text", param="model")


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run `work` on a thread if `size` is large, otherwise directly. Other tasks can run meanwhile only because no call in `work` holds the
    GIL for long: see `limits.py`."""
    return await asyncio.to_thread(work) if size > LONG else work()


def check_ids(ids: Sequence[int], tokenizer: Tokenizer, param: str) -> None:
    """Raise ApiError if there are no token ids, or if one is outside the vocabulary."""
    if not ids:
        raise invalid(param, f"{param} is empty; expected at least one token")
    if max(ids) >= tokenizer.vocab_size:
        raise invalid(param, f"{param} has token id {max(ids)}; expected 0 to {tokenizer.vocab_size - 1}")


def deadline_of(timeout_s: float | None, settings: ServerSettings) -> float | None:
    """Return the deadline of a request that may take `timeout_s`, as a time of the monotonic clock, or None if `timeout_s` is None. Raise
    ApiError if `timeout_s` is longer than the server allows."""
    if timeout_s is None:
        return None
    if timeout_s > settings.max_timeout_s:
        raise invalid("timeout", f"timeout is {timeout_s:g} s; expected at most {settings.max_timeout_s:g}")
    return time.monotonic() + timeout_s


def stop_rules(body: GenerationBody, settings: ServerSettings, default: Sequence[str] = ()) -> StopRules:
    """Return the stop strings that end an answer, and how they apply. `default` has the stop strings of the model, for requests that set
    none. Raise ApiError if there are too many stop strings, or if one is empty or too long."""
    if body.stop is None:
        return StopRules(tuple(default), bool(body.include_stop_str_in_output), body.min_tokens or 0)
    strings = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if len(strings) > settings.max_stop_strings:
        raise invalid("stop", f"stop has {len(strings)} strings; expected at most {settings.max_stop_strings}")
    for string in strings:
        if not 0 < len(string) <= settings.max_stop_chars:
            raise invalid("stop", f"a stop string has {len(string)} characters; expected 1 to {settings.max_stop_chars}")
    return StopRules(strings, bool(body.include_stop_str_in_output), body.min_tokens or 0)


def max_tokens_of(
    asked: int | None, default: int | None, prompt_ids: Sequence[int], loaded: Loaded, *, param: str, strict: bool = False
) -> int:
    """Return the largest number of tokens to generate: `asked`, or if that is None or 0, `default`, but at most what fits into the context.
    If there is no default either, or if `asked` is -1, return as many as fit. Raise ApiError if no token fits or, if `strict`, if `asked`
    does not fit. `param` is the field with the prompt."""
    context, num = context_of(loaded), len(prompt_ids)
    room = context - num
    if asked == -1:
        asked = default = None
    if room < 1:
        raise too_long(context, f"the prompt has {num} tokens", param)
    if strict and asked is not None and asked > room:
        raise too_long(context, f"you requested {num + asked} tokens ({num} in the prompt, {asked} in the completion)", "max_tokens")
    return min(room, asked or default or room)


def capped_header(asked: int | None, *jobs: Job, name: str = "max_tokens") -> dict[str, str]:
    """Return the header that states the limit on the answer's tokens, if it is lower than `asked` because the context has less room. Of
    several `jobs`, the lowest limit counts. Otherwise, or if the request sets no limit, return no header. `name`: the field by which the
    request sets the limit."""
    least = min(job.submit.params.max_tokens for job in jobs)
    return {} if asked is None or asked <= least or asked < 1 else {"x-capped-params": f"{name}={least}"}


def sampling_params(
    body: GenerationBody,
    loaded: Loaded,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    constraint: Constraint | None,
    seed: int,
    thinking: Thinking | None = None,
) -> SamplingParams:
    """Return the sampling parameters of a request. The model's defaults apply to those that the request does not set. The keyword arguments
    are parameters that each API names and limits in its own way. Raise ApiError if a value is not accepted."""
    tokenizer, defaults = loaded.tokenizer, loaded.sampling
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise invalid("min_tokens", f"min_tokens is {body.min_tokens}; expected at most max_tokens, {max_tokens}")
    for param in ("stop_token_ids", "allowed_token_ids"):
        if ids := getattr(body, param):
            check_ids(ids, tokenizer, param)
    banned = _banned(body.bad_words or [], tokenizer)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=0.0 if body.do_sample is False else _first(body.temperature, defaults["temperature"]),
        top_p=max(LEAST_SHARE, _first(body.top_p, defaults["top_p"])),
        top_k=max(0, int(_first(body.top_k, defaults["top_k"]))),  # -1 means off, like 0
        min_p=_first(body.min_p, defaults["min_p"]),
        typical_p=_first(body.typical_p, defaults["typical_p"]),
        frequency_penalty=_first(body.frequency_penalty, defaults.get("frequency_penalty", 0.0)),
        presence_penalty=_first(body.presence_penalty, defaults.get("presence_penalty", 0.0)),
        repetition_penalty=_first(body.repetition_penalty, defaults["repetition_penalty"]),
        logit_bias=_logit_bias(body.logit_bias or {}, tokenizer),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        banned_token_ids=tuple(ids[0] for ids in banned if len(ids) == 1),
        banned_sequences=tuple(ids for ids in banned if len(ids) > 1),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        seed=seed,
        logprobs=logprobs,
        processed_logprobs=body.logprobs_mode == "processed_logprobs",
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
        thinking=thinking,
    )


def seed_of(body: GenerationBody) -> int:
    """Return the seed of a request. If the request has no seed, or the seed -1, return a new seed: -1 asks for one in vLLM, llama.cpp and
    Ollama."""
    return new_seed() if body.seed is None or body.seed == -1 else body.seed % 2**64


def job_of(
    body: GenerationBody,
    loaded: Loaded,
    caller: Caller,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    settings: ServerSettings,
    num_choices: int,
    shown: Mapping[int, bytes],
    excerpts: tuple[Excerpt, ...] = (),
) -> Job:
    """Return the job that answers a prompt. `shown`: the special tokens that appear in the answer, unless the request wants all of them.
    Raise ApiError if the timeout or a stop string is not accepted."""
    if body.skip_special_tokens is False:
        shown = loaded.tokenizer.special_texts
    submit = Submit(
        request_id=secrets.token_hex(12),  # never the client's id: two clients may choose the same
        prompt_ids=tuple(prompt_ids),
        params=params,
        num_choices=num_choices,
        priority=IDLE if caller.is_idle else body.priority or 0,
        fairness_key=caller.key_digest,
        cache_salt=caller.salt(body.cache_salt),
        deadline=deadline_of(body.timeout, settings),
        excerpts=excerpts,
        giver=GIVER.get(),
    )
    return Job(submit, stop_rules(body, settings, loaded.defaults.stop or ()), shown)


def job_like(job: Job, prompt_ids: Sequence[int], max_tokens: int) -> Job:
    """Return a job like `job` for another prompt of the same request, with `max_tokens` and a request id of its own."""
    submit = msgspec.structs.replace(
        job.submit,
        request_id=secrets.token_hex(12),
        prompt_ids=tuple(prompt_ids),
        params=msgspec.structs.replace(job.submit.params, max_tokens=max_tokens),
    )
    return Job(submit, job.stops, job.shown)


def constraint_of(body: GenerationBody, settings: ServerSettings) -> Constraint | None:
    """Return the constraint on the answer, whichever field of the request sets it, or None. Raise ApiError if several fields set a
    constraint, or if the constraint is not valid or too large."""
    found = [(param, constraint) for param, constraint in _constraints(body, settings.max_schema_bytes) if constraint is not None]
    if len(found) > 1:
        names = ", ".join(param for param, _ in found)
        raise invalid(found[1][0], f"{names} are given; expected at most one of them")
    for param, constraint in found:
        if len(constraint.source.encode()) > settings.max_schema_bytes:
            size = len(constraint.source.encode())
            raise invalid(param, f"{param} has {size} bytes; expected at most {settings.max_schema_bytes}")
        return constraint
    return None


def _constraints(body: GenerationBody, most: int) -> list[tuple[str, Constraint | None]]:
    """Return all fields that may set a constraint, and the constraint of each. `most`: most bytes of a schema. Raise ApiError if a
    constraint is not valid."""
    outputs, form = body.structured_outputs, body.response_format
    found = [
        ("guided_json", _schema(body.guided_json, "guided_json", most)),
        ("json_schema", _schema(body.json_schema, "json_schema", most)),
        ("guided_regex", _plain(ConstraintKind.REGEX, body.guided_regex)),
        ("regex", _plain(ConstraintKind.REGEX, body.regex)),
        ("guided_choice", _choice(body.guided_choice, "guided_choice", most)),
        ("guided_grammar", _plain(ConstraintKind.GRAMMAR, body.guided_grammar)),
        ("grammar", _plain(ConstraintKind.GRAMMAR, body.grammar or None)),  # clients of llama.cpp send an empty grammar
    ]
    if form is not None:
        found.append(("response_format", _response_format(body, most)))
    if outputs is not None:
        found += [
            ("structured_outputs.json", _schema(outputs.json_, "structured_outputs.json", most)),
            ("structured_outputs.regex", _plain(ConstraintKind.REGEX, outputs.regex)),
            ("structured_outputs.choice", _choice(outputs.choice, "structured_outputs.choice", most)),
            ("structured_outputs.grammar", _plain(ConstraintKind.GRAMMAR, outputs.grammar)),
        ]
        if outputs.json_object:
            found.append(("structured_outputs.json_object", ANY_OBJECT))
    return found


def _response_format(body: GenerationBody, most: int) -> Constraint | None:
    """Return the constraint of `response_format`, or None if it is absent or of type `text`. Raise ApiError if it lacks a field, or if a
    schema or structure is not valid."""
    form = body.response_format
    match form.type if form else "text":
        case "json_object":
            schema = form.schema_ if form else None
            named = _schema(schema, "response_format.schema", most)
            return named or ANY_OBJECT
        case "json_schema":
            asked = form.json_schema if form else None
            schema = asked.schema_ if asked else ((form.schema_ if form.value is None else form.value) if form else None)
            if schema is None:
                raise invalid(
                    "response_format.json_schema.schema", "response_format has type json_schema and no schema; expected an object"
                )
            return _schema(schema, "response_format.json_schema.schema", most)
        case "regex":
            value = (form.regex_schema or form.value) if form else None
            if not isinstance(value, str):
                raise invalid("response_format.value", "response_format has type regex and no value; expected a regular expression")
            return _plain(ConstraintKind.REGEX, value)
        case "structural_tag":
            return structured(_structures(form, most)) if form else None
        case _:
            return None


def _structures(form: ResponseFormat, most: int) -> list[Structure]:
    """Return the structures of `response_format`. Raise ApiError if it has no structures or no triggers, if the structures are too large,
    or if the `begin` of a structure does not begin with one of the triggers."""
    if not form.structures or not form.triggers:
        raise invalid("response_format.structures", "response_format has type structural_tag; expected structures and triggers")
    _check_size(list(form.structures), "response_format.structures", most)
    found: list[Structure] = []
    for index, one in enumerate(form.structures):
        trigger = next((trigger for trigger in form.triggers if trigger and one.begin.startswith(trigger)), None)
        if trigger is None:
            param = f"response_format.structures[{index}].begin"
            raise invalid(param, f"{param} is {one.begin!r:.60}; expected it to begin with one of the triggers")
        found.append(Structure(trigger, one.begin, one.schema_, one.end))
    return found


def _check_size(value: object, param: str, most: int) -> None:
    """Before a value is parsed or encoded, raise ApiError if it is too large. The JSON text of a value has at least as many bytes as
    `num_chars` counts."""
    if num_chars(value, most) > most:
        raise invalid(param, f"{param} has more than {most} bytes; expected at most {most}")


def _schema(schema: JsonObject | bool | str | None, param: str, most: int) -> Constraint | None:
    """Return the constraint of a JSON schema, which may be written as a text, or None if there is no schema. Raise ApiError if it is too
    large, not JSON, or neither an object nor true. Other faults of a schema are found later, when it is compiled."""
    if schema is None:
        return None
    _check_size(schema, param, most)
    if isinstance(schema, str):
        try:
            schema = cast("JsonObject | bool | str | None", read_json(schema))
        except ApiError as error:
            raise ApiError(INVALID_SCHEMA, f"{param} is not JSON: {error.message}", param=param) from error
    schema = {} if schema is True else schema  # both allow every value
    if not isinstance(schema, dict):
        raise ApiError(INVALID_SCHEMA, f"{param} is {json.dumps(schema):.60}; expected an object, or true", param=param)
    return Constraint(ConstraintKind.JSON_SCHEMA, json_text(schema))


def _plain(kind: ConstraintKind, source: str | None) -> Constraint | None:
    """Return the constraint with the text `source`, or None if `source` is None."""
    return None if source is None else Constraint(kind, source)


def _choice(choices: list[str] | None, param: str, most: int) -> Constraint | None:
    """Return the constraint that allows one of some texts, or None if the field is absent. Raise ApiError if the list is empty, if a text
    is empty, or if the texts together are too large."""
    if choices is None:
        return None
    _check_size(choices, param, most)
    if not choices or not all(choices):
        raise invalid(param, f"{param} is {choices!r:.60}; expected one or more strings that are not empty")
    return Constraint(ConstraintKind.CHOICE, json.dumps(choices))


def _logit_bias(bias: Mapping[str, float], tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Return pairs of a token id and its bias. Raise ApiError if a key is no token id of the vocabulary."""
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < tokenizer.vocab_size):
            last = tokenizer.vocab_size - 1
            raise invalid("logit_bias", f"logit_bias has the key {key!r:.40}; expected a token id from 0 to {last}")
    return tuple((int(key), value) for key, value in bias.items())


def _banned(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the tokens of banned words. A word has other tokens after a space than at the start of a text; both variants are banned. Raise
    ApiError for an empty word."""
    for word in words:
        if not word.strip():
            raise invalid("bad_words", f"bad_words has {word!r:.40}; expected words that are not empty")
    texts = [text for word in words for text in (word, f" {word}")]
    return sorted({tuple(ids) for ids in encode_texts(texts, tokenizer, special=False)})


def _first(asked: T | None, default: T) -> T:
    """Return a request's value of a field, or `default` if the request does not set the field."""
    return default if asked is None else asked
