"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Request, Response

from server.api.answers import Completion, CompletionChunk
from server.api.completion_answer import CompletionAnswer
from server.api.context import Caller, Context, caller
from server.api.fields import check_unknown
from server.api.generate import Generation, Job
from server.api.prepare import (
    check_ids,
    constraint_of,
    invalid,
    job_of,
    max_tokens_of,
    off_loop,
    require_generator,
    sampling_params,
    seed_of,
    truncate,
)
from server.api.respond import respond, response_headers
from server.api.routes import gives, new_router
from server.api.schema import CompletionBody
from server.errors import UNSUPPORTED_FIELD, ApiError
from server.handle import Tokenizer
from server.model import Loaded, Model
from server.settings import ServerSettings

DEFAULT_MAX_TOKENS = 16  # of the API


def router(context: Context) -> APIRouter:
    routes = new_router("OpenAI")

    @routes.post("/v1/completions", responses=gives(Completion, event=CompletionChunk))
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Continue one or more prompts."""
        ignored = check_unknown(body, strict=context.settings.strict)
        model, loaded = context.registry.serve(body.model)
        who, series = caller(request), context.metrics_of(model.spec.name)
        jobs = await plan_completion(body, model, loaded, who, context.settings)
        generations = [Generation(loaded, job, series, who.arrived_s) for job in jobs]
        answer = CompletionAnswer(body, jobs, generations, model, loaded)
        headers = response_headers(loaded, ignored)
        return await respond(request, answer, headers, stream=bool(body.stream), settings=context.settings)

    return routes


async def plan_completion(body: CompletionBody, model: Model, loaded: Loaded, who: Caller, settings: ServerSettings) -> list[Job]:
    """One job per prompt."""
    require_generator(model, loaded)
    prompts = await _prompts(body, loaded)
    num_choices = max(body.n or 1, body.best_of or 1)
    _check_fields(body, len(prompts) * num_choices, settings)
    constraint, seed = await constraint_of(body, settings), seed_of(body)
    ranked = num_choices > (body.n or 1)
    jobs: list[Job] = []
    for ids in prompts:
        ids = truncate(ids, body.truncate_prompt_tokens, body.truncation_side)
        # A prompt that is only to be scored still takes one step; its token is not shown.
        asked = 1 if body.max_tokens == 0 else body.max_tokens
        params = sampling_params(
            body,
            loaded,
            max_tokens=max_tokens_of(asked, DEFAULT_MAX_TOKENS, ids, loaded, param="prompt"),
            logprobs=0 if ranked and body.logprobs is None else body.logprobs,
            prompt_logprobs=body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs,
            constraint=constraint,
            seed=seed,
        )
        jobs.append(job_of(body, loaded, who, ids, params, settings=settings, num_choices=num_choices, shown={}))
    return jobs


async def _prompts(body: CompletionBody, loaded: Loaded) -> Sequence[Sequence[int]]:
    special, tokenizer, infill = body.add_special_tokens is not False, loaded.tokenizer, loaded.dialect.infill
    if not body.suffix:
        return await token_ids(body.prompt, tokenizer, "prompt", special)
    if infill is None:
        message = "suffix is not supported: this model has no tokens for filling in the middle"
        raise ApiError(UNSUPPORTED_FIELD, message, param="suffix")
    begin, suffix = tokenizer.encode("", special), await _encode(body.suffix, tokenizer, special=False)
    prompts = [begin + infill.prompt(await _encode(one, tokenizer, special=False), suffix) for one in _one_by_one(body.prompt)]
    for ids in prompts:
        check_ids(ids, tokenizer, "prompt")
    return prompts


async def token_ids(
    prompt: str | list[int] | list[str] | list[list[int]], tokenizer: Tokenizer, param: str, special: bool
) -> list[Sequence[int]]:
    """The prompts of a request, in any of the four forms the API knows."""
    encoded: list[Sequence[int]] = []
    for one in _one_by_one(prompt):
        ids = await _encode(one, tokenizer, special=special)
        check_ids(ids, tokenizer, param)
        encoded.append(ids)
    if not encoded:
        raise invalid(param, f"{param} is empty; expected at least one token")
    return encoded


async def _encode(one: str | list[int], tokenizer: Tokenizer, *, special: bool) -> Sequence[int]:
    return await off_loop(len(one), lambda: tokenizer.encode(one, special)) if isinstance(one, str) else one


def _one_by_one(prompt: str | list[int] | list[str] | list[list[int]]) -> Iterator[str | list[int]]:
    if isinstance(prompt, str):
        yield prompt
        return
    ids: list[int] = []
    for one in prompt:
        if isinstance(one, int):
            ids.append(one)
        else:
            yield one
    if ids:
        yield ids


def _check_fields(body: CompletionBody, num_choices: int, settings: ServerSettings) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is given and stream is not true")
    if num_choices > settings.max_choices:
        raise invalid("n", f"prompts times n is {num_choices}; expected at most {settings.max_choices}")
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise invalid("best_of", f"best_of is {body.best_of}; expected at least n, {body.n}")
    if body.best_of is not None and body.best_of > (body.n or 1) and body.stream:
        raise invalid("best_of", "best_of is greater than n and stream is true; the best is known only at the end")
    if body.suffix and body.echo:
        raise invalid("echo", "echo and suffix are given; the answer stands between two texts, so there is no one place for it")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "max_tokens is 0 and echo is not true; nothing would be answered")
