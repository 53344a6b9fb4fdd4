"""POST /v1/chat/completions, and /v1/chat/completions/render, which returns the prompt and the parameters instead of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
from fastapi import APIRouter, Request, Response

from server.api.answer.generate import Generation, Job
from server.api.answer.respond import respond, response_headers
from server.api.answer.shapes import ChatChunk, ChatCompletion, Render
from server.api.context import Caller, Context, caller
from server.api.openai.chat_answer import ChatAnswer
from server.api.request.conversation import NO_MARKERS, for_template, text_of
from server.api.request.limits import check_num_logprobs, check_sizes, num_chars
from server.api.request.media import excerpts_of, media_of
from server.api.request.prefix import prefix_header
from server.api.request.prepare import (
    ChatPlan,
    capped_header,
    constraint_of,
    context_of,
    invalid,
    job_of,
    max_tokens_of,
    off_loop,
    require_generator,
    sampling_params,
    seed_of,
)
from server.api.request.schema import AUDIO_PARTS, IMAGE_PART, ChatBody, Tool
from server.api.request.texts import check_chars, encode_prompts, kept_of, most_chars
from server.api.request.tool_choice import ToolUse, demanded_calls, offered_calls, possible_calls, tool_use, with_tools
from server.api.routes import gives, new_router
from server.errors import NO_CHAT_TEMPLATE, TEMPLATE_FAILED, TEMPLATE_NOT_RENDERED, UNSUPPORTED_FIELD, ApiError
from server.messages import CachePages, Constraint, ConstraintKind, Excerpt, Thinking
from server.models.model import Loaded, Model
from server.settings import ServerSettings
from server.text.dialects.preamble import described
from server.text.templates.errors import TemplateError, TemplateUnavailable
from server.text.templates.limits import RESERVED

THINKING = frozenset({"enable_thinking", "reasoning_effort"})  # fields of a request that set whether and how much the model thinks
BUDGETS = {"none": 0, "minimal": 512, "low": 2048, "medium": 8192}  # most tokens of thoughts, by the effort; higher efforts have no limit
MAX_COUNTED = 1 << 17  # conversations of up to this number of tokens can be counted, even if the model's context is shorter
encode = msgspec.json.encode


def router(context: Context) -> APIRouter:
    routes = new_router("OpenAI")

    @routes.post("/v1/chat/completions", responses=gives(ChatCompletion, event=ChatChunk))
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """Answer a conversation."""
        model, loaded, ignored = context.begin(request, body, body.model)
        who = caller(request)
        plan = await plan_chat(body, model, loaded, who, context.settings)
        generation = Generation(loaded, plan.job, context.metrics_of(model.spec.name), who)
        answer = ChatAnswer(body, plan, generation, model, loaded)
        headers = response_headers(loaded, ignored) | capped_header(body.max_completion_tokens or body.max_tokens, plan.job)
        headers |= await prefix_header(body, plan, loaded)
        return await respond(request, answer, headers, stream=bool(body.stream), settings=context.settings)

    @routes.post("/v1/chat/completions/render", responses=gives(Render))
    async def render(request: Request, body: ChatBody) -> Response:
        """Return the prompt and the effective parameters, without generating."""
        model, loaded, ignored = context.begin(request, body, body.model)
        who = caller(request)
        plan = await plan_chat(body, model, loaded, who, context.settings)
        shown = await off_loop(who.num_body_bytes, lambda: encode(describe_plan(plan.prompt, plan.job, model, loaded)))
        return Response(shown, headers=response_headers(loaded, ignored), media_type="application/json")

    return routes


async def plan_chat(body: ChatBody, model: Model, loaded: Loaded, who: Caller, settings: ServerSettings) -> ChatPlan:
    """Return the plan of a chat request: its prompt, its job, and how the answer is parsed. Raise ApiError if the model cannot answer the
    request."""
    require_generator(model, loaded)
    body = with_tools(body)
    text, excerpts = await written_prompt(body, model, loaded, who, settings, lambda body: _offered(body, loaded, settings))
    return await off_loop(max(who.num_body_bytes, len(text)), lambda: _planned(text, body, loaded, who, settings, excerpts))


async def written_prompt(
    body: ChatBody,
    model: Model,
    loaded: Loaded,
    who: Caller,
    settings: ServerSettings,
    make: Callable[[ChatBody], Conversation] | None = None,
) -> tuple[str, tuple[Excerpt, ...]]:
    """Return the prompt of a conversation as text, and its images or recordings (`Excerpt`). `make` gets the body without the data of its
    images and recordings, checks this body, and converts it to a conversation for the template. Without `make`, the body is converted
    unchecked. Raise ApiError for the reasons of `media_of` and `render_prompt`."""
    emptied, found = await media_of(body, model, loaded, who, settings)
    if make is None:
        text = await render_prompt(lambda: conversation_of(emptied, tool_use(emptied).tools, markers_of(loaded)), loaded, who)
    else:
        text = await render_prompt(lambda: make(emptied), loaded, who)
    text, ordered = loaded.senses.filled(text, found)
    return text, excerpts_of(ordered)


async def num_prompt_tokens(body: ChatBody, model: Model, loaded: Loaded, who: Caller, settings: ServerSettings, param: str) -> int:
    """Count the tokens of a conversation. `param` is the field that an error names."""
    text, _ = await written_prompt(body, model, loaded, who, settings)
    most = max(context_of(loaded), MAX_COUNTED)
    encoded = await off_loop(len(text), lambda: encode_prompts([text], loaded.tokenizer, param, special=False, context=most))
    return len(encoded[0])


def markers_of(loaded: Loaded) -> dict[str, str]:
    """Return the markers: for each type of content part that the model reads beside text, the text that stands for an image or a recording
    while the prompt is rendered."""
    seen = {} if loaded.sight is None else {IMAGE_PART: loaded.sight.marker}
    return seen if loaded.ears is None else {**seen, **dict.fromkeys(AUDIO_PARTS, loaded.ears.marker)}


def _offered(body: ChatBody, loaded: Loaded, settings: ServerSettings) -> Conversation:
    """Check a request, and return its conversation. Raise ApiError if a field is not valid, or if the request is too large. If the prompt
    may be truncated, the size of the conversation is not checked."""
    _check_fields(body, settings)
    check_sizes(body)
    if body.truncate_prompt_tokens is None:
        _check_conversation(body, loaded)
    return conversation_of(body, tool_use(body).tools, markers_of(loaded))


def _planned(
    text: str, body: ChatBody, loaded: Loaded, who: Caller, settings: ServerSettings, excerpts: tuple[Excerpt, ...] = ()
) -> ChatPlan:
    """Return the plan for a rendered prompt `text`. A prompt with `excerpts` (images or recordings) is never truncated. Raise ApiError if
    the prompt is too long, if a field has a value that is not accepted, or if the request asks for something that the model cannot do."""
    use, context = tool_use(body), context_of(loaded)
    asked, side = body.max_completion_tokens or body.max_tokens, body.truncation_side
    keep = None if excerpts else kept_of(body.truncate_prompt_tokens, context, asked or loaded.defaults.max_tokens)
    special = bool(body.add_special_tokens)
    (ids,) = encode_prompts([text], loaded.tokenizer, "messages", special=special, context=context, keep=keep, side=side)
    check_num_logprobs(len(ids), body.prompt_logprobs, "prompt_logprobs")
    max_tokens = max_tokens_of(asked, loaded.defaults.max_tokens, ids, loaded, param="messages", strict=settings.strict)
    thinking = loaded.dialect.is_thinking(text, text_of(body.messages[-1].content) if body.continue_final_message else "")
    constraint = _constraint(body, use, loaded, settings, thinking=thinking)
    params = sampling_params(
        body,
        loaded,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        constraint=constraint,
        seed=seed_of(body),
        thinking=_thinking(body, loaded, is_open=thinking),
    )
    job = job_of(
        body,
        loaded,
        who,
        ids,
        params,
        settings=settings,
        num_choices=body.n or 1,
        shown=loaded.dialect.shown,
        excerpts=excerpts,
    )
    rules = loaded.dialect.rules(
        use.schemas,
        1 if use.single else None,
        demanded=use.demanded,
        thinking=thinking,
        split_reasoning=body.separate_reasoning is not False,
    )
    return ChatPlan(text, job, rules)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The arguments for a chat template."""

    messages: list[dict[str, object]]
    tools: list[dict[str, object]] | None  # None: no tools are offered
    adds_prompt: bool  # the prompt ends with the beginning of an answer
    continues: bool  # the prompt ends inside the last message
    variables: dict[str, object]  # further variables of the template


def conversation_of(body: ChatBody, tools: Sequence[Tool], markers: Mapping[str, str] = NO_MARKERS) -> Conversation:
    """Return the arguments for the chat template. `markers` has the text that stands for an image or a recording, by the type of its part.
    The fields about thinking and `documents` become variables of the template, unless `chat_template_kwargs` sets the same variable. Raise
    ApiError if a message has a part that is no text and whose type has no marker, if a message is not valid for another reason, or if a
    variable has a reserved name."""
    messages = for_template(body.messages, markers)
    extra: dict[str, object] = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
        extra.setdefault("enable_thinking", body.reasoning_effort != "none")
    if body.enable_thinking is not None:
        extra.setdefault("enable_thinking", body.enable_thinking)
    if body.thinking_token_budget is not None and body.thinking_token_budget >= 0:
        extra.setdefault("thinking_budget", body.thinking_token_budget)  # read by Seed-OSS's template
    if body.documents is not None:
        extra.setdefault("documents", body.documents)
    for name in sorted(RESERVED & extra.keys()):
        message = f"chat_template_kwargs has {name}, a reserved name of chat templates; choose another name"
        raise invalid(f"chat_template_kwargs.{name}", message)
    continues = bool(body.continue_final_message)
    adds_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    definitions = [tool.model_dump(exclude_none=True) for tool in tools] or None
    return Conversation(messages, definitions, adds_prompt, continues, extra)


async def render_prompt(make: Callable[[], Conversation], loaded: Loaded, who: Caller) -> str:
    """Return the prompt that the chat template renders from the conversation of `make`. Before rendering, add the model's defaults and, if
    the template shows no tools, a description of the tools. Raise ApiError if there is no template, if the template fails, if no process
    could render the prompt, or if `make` raises ApiError."""
    if loaded.renderer is None:
        raise ApiError(NO_CHAT_TEMPLATE, "the model has no chat template; use /v1/completions", param="messages")
    made = await off_loop(who.num_body_bytes, lambda: _readable(_with_defaults(make(), loaded), loaded))
    try:
        return await loaded.renderer.render(
            loaded.senses.in_parts(made.messages),
            made.tools,
            add_generation_prompt=made.adds_prompt,
            continue_final_message=made.continues,
            variables=made.variables,
        )
    except TemplateUnavailable as error:
        raise ApiError(TEMPLATE_NOT_RENDERED, str(error)) from error
    except TemplateError as error:
        raise ApiError(TEMPLATE_FAILED, f"the chat template refused the messages: {error}", param="messages") from error


def _with_defaults(made: Conversation, loaded: Loaded) -> Conversation:
    """Return a conversation with the model's default system message, if the request has no system message, and with the model's defaults
    for thinking, if the request has no field about thinking. If the template writes no system message, the default text is put before the
    text of the user's first message; without a message of the user, a system message is added nevertheless."""
    defaults, messages = loaded.defaults, made.messages
    thinks = {} if THINKING & made.variables.keys() else defaults.thinking
    if defaults.system and not any(message["role"] == "system" for message in messages):
        at = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
        if _has_system(made, loaded) or at is None:
            messages = [{"role": "system", "content": defaults.system}, *messages]
        else:
            first = {**messages[at], "content": f"{defaults.system}\n\n{messages[at]['content']}"}
            messages = [*messages[:at], first, *messages[at + 1 :]]
    return replace(made, messages=messages, variables={**made.variables, **thinks})


def _readable(made: Conversation, loaded: Loaded) -> Conversation:
    """Return a conversation whose tools reach the model: if the chat template shows no tools, a message describes them as text. If the
    template writes no calls either, the calls and results of earlier turns become text."""
    if loaded.dialect.reads_tools:
        return made
    has_system, writes_calls = _has_system(made, loaded), loaded.dialect.writes_calls
    return replace(made, messages=described(made.messages, made.tools, has_system=has_system, writes_calls=writes_calls), tools=None)


def _has_system(made: Conversation, loaded: Loaded) -> bool:
    """Return whether the template writes a system message into this conversation. Voxtral's template refuses a system message in a
    conversation with audio."""
    dialect, ears = loaded.dialect, loaded.ears
    if ears is None or dialect.has_system_with_audio:
        return dialect.has_system
    return dialect.has_system and not any(ears.marker in str(message["content"]) for message in made.messages)


def _check_conversation(body: ChatBody, loaded: Loaded) -> None:
    """Before rendering, raise ApiError if the conversation is certainly too long: the prompt will contain at least the texts of its
    messages and tools."""
    context = context_of(loaded)
    given = [body.messages, body.tools if body.tool_choice != "none" else None]
    check_chars(num_chars(given, most_chars(loaded.tokenizer, context)), loaded.tokenizer, "messages", context)


def describe_plan(prompt: str, job: Job, model: Model, loaded: Loaded) -> Render:
    """Describe the job that would be sent to the worker, and the KV pages that it would need."""
    submit, ready = job.submit, loaded.ready
    longest = len(submit.prompt_ids) + submit.params.max_tokens
    pages = [pages_needed(group, len(submit.prompt_ids), longest, submit.num_choices) for group in ready.cache_groups]
    return {
        "object": "render",
        "model": model.spec.name,
        "prompt": prompt,
        "token_ids": submit.prompt_ids,
        "num_tokens": len(submit.prompt_ids),
        "max_model_len": context_of(loaded),
        "parameters": msgspec.to_builtins(submit.params),
        "n": submit.num_choices,
        "stop": job.stops.strings,
        "kv_cache": {
            "pages": sum(pages),
            "bytes": sum(count * group.page_bytes for count, group in zip(pages, ready.cache_groups, strict=True)),
            "fits": all(count <= group.num_pages for count, group in zip(pages, ready.cache_groups, strict=True)),
        },
    }


def pages_needed(group: CachePages, num_prompt: int, longest: int, num_choices: int) -> int:
    """Return how many pages of one cache group a request needs if each choice has at most `longest` tokens, including the prompt. In a
    group of layers with an attention window, a choice needs at most the pages of the window."""
    shared = num_prompt // group.page_size  # choices share the full pages of the prompt
    whole = shared + (-(-longest // group.page_size) - shared) * num_choices
    return whole if group.most_each is None else min(whole, group.most_each * num_choices)


def _check_fields(body: ChatBody, settings: ServerSettings) -> None:
    """Raise ApiError if two fields contradict each other, or if one has a value that is not allowed."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is given and stream is not true; set stream, or leave stream_options out")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs is given and logprobs is not true; set logprobs, or leave top_logprobs out")
    if body.max_tokens == 0:
        raise invalid("max_tokens", "max_tokens is 0; expected at least 1")
    if (body.n or 1) > settings.max_choices:
        raise invalid("n", f"n is {body.n}; expected at most {settings.max_choices}")
    if body.add_generation_prompt and body.continue_final_message:
        raise invalid("continue_final_message", "add_generation_prompt and continue_final_message exclude each other")
    if body.continue_final_message and body.messages[-1].role != "assistant":
        raise invalid("continue_final_message", "the last message is not the assistant's; there is nothing to continue")
    if body.echo and body.messages[-1].role != "assistant":
        raise invalid("echo", "the last message is not the assistant's; there is nothing to echo")


def _constraint(body: ChatBody, use: ToolUse, loaded: Loaded, settings: ServerSettings, *, thinking: bool) -> Constraint | None:
    """Return the constraint of an answer, or None if it has none. A demanded call decides the constraint, else a field that demands a
    format, else the offered tools. `thinking`: the prompt has opened a block of thoughts. Raise ApiError if the request demands both a call
    and a format (other than `response_format`, which applies only to messages), if several fields demand a format, or if a schema is not
    valid or too large."""
    dialect = loaded.dialect
    constraint = constraint_of(body, settings)
    is_format = body.response_format is not None and body.response_format.type != "text"  # `constraint` comes from response_format
    if use.demanded:
        if constraint is not None and not is_format:
            raise invalid("tool_choice", "tool_choice demands a call, and another field demands a format; give only one of them")
        constraint = demanded_calls(use, dialect, settings.max_schema_bytes)
    elif constraint is None:
        splits = body.separate_reasoning is not False and (thinking or dialect.thinks)
        return offered_calls(use, loaded, settings.max_schema_bytes, splits=splits, thinking=thinking)
    calls = possible_calls(use, dialect) if constraint.kind is ConstraintKind.JSON_SCHEMA and is_format else None
    return dialect.framed(constraint, thinking=thinking, is_call=use.demanded, calls=calls)


def _thinking(body: ChatBody, loaded: Loaded, *, is_open: bool) -> Thinking | None:
    """Return the limit on the tokens of thoughts, or None if there is none. If the request has a `thinking_token_budget`, that is the
    limit; -1 means none. Otherwise, BUDGETS has the limit for the effort that the request names, or for the model's default effort if the
    request has no field about thinking. An effort sets no limit if the chat template shows the effort to the model, or if no tokens mark
    the model's thoughts. In the latter case, raise ApiError for a `thinking_token_budget` of at least 0. `is_open`: the prompt has opened a
    block of thoughts."""
    dialect = loaded.dialect
    asked, bounds = body.thinking_token_budget, dialect.thought_bounds
    if asked is None:
        said = {**(body.chat_template_kwargs or {}), **_given(body)}
        effort = (said if THINKING & said.keys() else loaded.defaults.thinking).get("reasoning_effort")
        budget = None if dialect.reads_effort or bounds is None else BUDGETS.get(str(effort))
    else:
        budget = None if asked < 0 else asked  # -1: no limit
    if budget is None:
        return None
    if bounds is None:
        message = "thinking_token_budget is not supported: this model has no tokens that open and close its thoughts"
        raise ApiError(UNSUPPORTED_FIELD, message, param="thinking_token_budget")
    return Thinking(budget, *bounds, is_open)


def _given(body: ChatBody) -> dict[str, object]:
    """Return the request's fields about thinking, by name."""
    return {name: value for name in THINKING if (value := getattr(body, name)) is not None}
