"""POST /v1/completions: continue one or more prompts."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.api.answer.generate import Generation, Job
from server.api.answer.respond import respond, response_headers
from server.api.answer.shapes import Completion, CompletionChunk
from server.api.context import Caller, Context, caller
from server.api.openai.completion_answer import CompletionAnswer
from server.api.request.limits import check_num_logprobs, check_sizes
from server.api.request.prepare import (
    capped_header,
    check_ids,
    constraint_of,
    context_of,
    invalid,
    job_like,
    job_of,
    max_tokens_of,
    off_loop,
    require_generator,
    sampling_params,
    seed_of,
)
from server.api.request.schema import CompletionBody, Prompts
from server.api.request.texts import NOTHING_AROUND, encode_prompts, kept_of, one_by_one, truncate
from server.api.routes import gives, new_router
from server.errors import UNSUPPORTED_FIELD, ApiError
from server.interfaces import Tokenizer
from server.models.model import Loaded, Model
from server.settings import ServerSettings
from server.text.pairs import TextTemplate

DEFAULT_MAX_TOKENS = 16  # the API's default


def router(context: Context) -> APIRouter:
    routes = new_router("OpenAI")

    @routes.post("/v1/completions", responses=gives(Completion, event=CompletionChunk))
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Continue one or more prompts."""
        model, loaded, ignored = context.begin(request, body, body.model)
        who, series = caller(request), context.metrics_of(model.spec.name)

        def prepare() -> tuple[CompletionAnswer, dict[str, str]]:
            jobs = plan_completion(body, model, loaded, who, context.settings)
            generations = [Generation(loaded, job, series, who) for job in jobs]
            return CompletionAnswer(body, jobs, generations, model, loaded), capped_header(body.max_tokens, *jobs)

        answer, capped = await off_loop(who.num_body_bytes, prepare)
        headers = response_headers(loaded, ignored) | capped
        return await respond(request, answer, headers, stream=bool(body.stream), settings=context.settings)

    return routes


def plan_completion(body: CompletionBody, model: Model, loaded: Loaded, who: Caller, settings: ServerSettings) -> list[Job]:
    """Return one job per prompt. Raise ApiError if the model cannot do what a field asks, if a field has a value that is not accepted, or
    if a prompt is too long."""
    require_generator(model, loaded)
    check_sizes(body)
    num_choices = max(body.n or 1, body.best_of or 1)
    _check_fields(body, len(one_by_one(body.prompt)) * num_choices, settings)
    # max_tokens 0 only scores the prompt, which still takes one step; the token that the step samples is not shown.
    asked = 1 if body.max_tokens == 0 else body.max_tokens
    most = loaded.defaults.max_tokens or DEFAULT_MAX_TOKENS
    keep = kept_of(body.truncate_prompt_tokens, context_of(loaded), asked or most)
    prompts = _prompts(body, loaded, keep)
    ranked = num_choices > (body.n or 1)
    prompt_logprobs = body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs
    check_num_logprobs(sum(map(len, prompts)), prompt_logprobs, "logprobs" if body.prompt_logprobs is None else "prompt_logprobs")
    lengths = [max_tokens_of(asked, most, ids, loaded, param="prompt", strict=settings.strict) for ids in prompts]
    params = sampling_params(
        body,
        loaded,
        max_tokens=min(lengths),
        logprobs=0 if ranked and body.logprobs is None else body.logprobs,
        prompt_logprobs=prompt_logprobs,
        constraint=constraint_of(body, settings),
        seed=seed_of(body),
    )
    job = job_of(body, loaded, who, prompts[0], params, settings=settings, num_choices=num_choices, shown={})
    return [job_like(job, ids, max_tokens) for ids, max_tokens in zip(prompts, lengths, strict=True)]


def _prompts(body: CompletionBody, loaded: Loaded, keep: int | None) -> list[list[int]]:
    """Return the tokens of each prompt, with the suffix if there is one. `keep`: number of tokens to which longer prompts are truncated;
    None: prompts are not truncated. Raise ApiError if the model cannot fill in the middle and there is a suffix, if a text is too long, or
    for the reasons of `token_ids`."""
    special, tokenizer, infill = body.add_special_tokens is not False, loaded.tokenizer, loaded.dialect.infill
    context, side = context_of(loaded), body.truncation_side
    if not body.suffix:
        return token_ids(body.prompt, tokenizer, "prompt", special=special, context=context, keep=keep, side=side)
    if infill is None:
        message = "suffix is not supported: this model has no tokens for filling in the middle"
        raise ApiError(UNSUPPORTED_FIELD, message, param="suffix")
    begin = tokenizer.encode("", special)
    (suffix,) = encode_prompts([body.suffix], tokenizer, "suffix", special=False, context=context)
    parts = token_ids(body.prompt, tokenizer, "prompt", special=False, context=context, keep=keep, side=side, may_be_empty=True)
    return [truncate(begin + infill.prompt(ids, suffix), keep, side) for ids in parts]


def token_ids(
    prompt: Prompts,
    tokenizer: Tokenizer,
    param: str,
    *,
    special: bool,
    context: int,
    keep: int | None,
    side: str | None,
    may_be_empty: bool = False,
    around: TextTemplate = NOTHING_AROUND,
) -> list[list[int]]:
    """Return the tokens of each prompt, truncated to `keep` tokens by removing tokens at `side` (None: at the beginning); without `keep`,
    return all. `prompt` is a text, token ids, or a list of texts or of token id lists. Truncation keeps the special tokens `around` a text.
    Raise ApiError for an empty list of prompts, an empty prompt (unless `may_be_empty`), a token id outside the vocabulary, or a long text
    that certainly exceeds the context. The caller checks whether other prompts fit into the context; for completions, `max_tokens_of` does
    so."""
    parts = one_by_one(prompt)
    texts = [part for part in parts if isinstance(part, str)]
    encoded = iter(encode_prompts(texts, tokenizer, param, special=special, context=context, keep=keep, side=side, around=around))
    found = [next(encoded) if isinstance(part, str) else truncate(part, keep, side, around) for part in parts]
    for ids in found:
        if ids or not may_be_empty:
            check_ids(ids, tokenizer, param)
    if not found:
        raise invalid(param, f"{param} is empty; expected at least one token")
    return found


def check_num_choices(num_choices: int, settings: ServerSettings) -> None:
    """Raise ApiError if a request asks for too many choices. `num_choices` is the number for all prompts together."""
    if num_choices > settings.max_choices:
        raise invalid("n", f"the number of prompts times n is {num_choices}; expected at most {settings.max_choices}")


def _check_fields(body: CompletionBody, num_choices: int, settings: ServerSettings) -> None:
    """Raise ApiError if two fields contradict each other, or if there are too many choices. `num_choices`: number of choices to generate
    for all prompts together, even if only the best are returned."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is given and stream is not true; set stream, or leave stream_options out")
    check_num_choices(num_choices, settings)
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise invalid("best_of", f"best_of is {body.best_of}; expected at least n, {body.n}")
    if body.best_of is not None and body.best_of > (body.n or 1) and body.stream:
        raise invalid("best_of", "best_of is greater than n, so the best choices are known only at the end; set stream to false")
    if body.suffix and body.echo:
        raise invalid("echo", "echo and suffix are given; with a suffix there is no place to echo the prompt; leave one out")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "max_tokens is 0 and echo is not true; the answer would be empty; set echo to true")
