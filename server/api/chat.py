"""POST /v1/chat/completions, and its twin that only shows the prompt."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request, Response

from server.api.context import Caller, Context, caller, new_id
from server.api.conversation import for_template
from server.api.fields import check_unknown
from server.api.generate import Generation, Job, Step, TokenEntry, Usage
from server.api.logprobs import LogprobWriter
from server.api.prepare import (
    constraint_of,
    context_of,
    invalid,
    job_of,
    max_tokens_of,
    off_loop,
    require_generator,
    sampling_params,
    seed_of,
    truncate,
)
from server.api.respond import fingerprint, respond, response_headers
from server.api.schema import ChatBody, NamedTool, Tool
from server.errors import NO_CHAT_TEMPLATE, TEMPLATE_FAILED, ApiError
from server.messages import Constraint, TokenLogprob
from server.registry import Loaded, Model
from server.settings import ServerSettings
from server.text.answer import AnswerParser, AnswerRules
from server.text.grammar import ToolSchema, behind_thoughts, forced_calls
from server.text.parts import CallArguments, CallStart, Content, Part, Reasoning
from server.text.reasoning import OPEN

encode = msgspec.json.encode


def router(context: Context) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """Answer a conversation."""
        ignored = check_unknown(body, strict=context.settings.strict)
        model, loaded = context.registry.serve(body.model)
        who = caller(request)
        plan = await plan_chat(body, model, loaded, who, context.settings)
        generation = Generation(loaded, plan.job, context.metrics_of(model.spec.name), who.arrived_s)
        answer = ChatAnswer(body, plan, generation, model, loaded)
        headers = response_headers(loaded, ignored)
        return await respond(request, answer, headers, stream=bool(body.stream), settings=context.settings)

    @routes.post("/v1/chat/completions/render")
    async def render(request: Request, body: ChatBody) -> Response:
        """Show the prompt and the effective parameters; nothing is generated."""
        ignored = check_unknown(body, strict=context.settings.strict)
        model, loaded = context.registry.serve(body.model)
        plan = await plan_chat(body, model, loaded, caller(request), context.settings)
        shown = describe_plan(plan.prompt, plan.job, model, loaded)
        return Response(encode(shown), headers=response_headers(loaded, ignored), media_type="application/json")

    return routes


@dataclass(frozen=True, slots=True)
class ChatPlan:
    prompt: str
    job: Job
    rules: AnswerRules


async def plan_chat(body: ChatBody, model: Model, loaded: Loaded, who: Caller, settings: ServerSettings) -> ChatPlan:
    require_generator(model, loaded)
    _check_fields(body, settings)
    tools = _offered(body)
    text = await render_prompt(body, loaded, tools)
    ids: Sequence[int] = await off_loop(len(text), lambda: loaded.tokenizer.encode(text, bool(body.add_special_tokens)))
    ids = truncate(ids, body.truncate_prompt_tokens, body.truncation_side)
    max_tokens = max_tokens_of(body.max_completion_tokens or body.max_tokens, None, ids, loaded)
    thinking = text.rstrip("\n").endswith(OPEN)
    constraint = _constraint(body, tools, loaded, settings, thinking=thinking)
    params = sampling_params(
        body,
        loaded,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        constraint=constraint,
        seed=seed_of(body),
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
    )
    rules = AnswerRules(
        loaded.dialect,
        thinking=thinking,
        split_reasoning=body.separate_reasoning is not False,
        tool_names=frozenset(tool.function.name for tool in tools),
        max_calls=1 if body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool) else None,
    )
    return ChatPlan(text, job, rules)


async def render_prompt(body: ChatBody, loaded: Loaded, tools: Sequence[Tool]) -> str:
    template = loaded.tokenizer.chat_template
    if template is None:
        raise ApiError(NO_CHAT_TEMPLATE, "the model has no chat template; use /v1/completions", param="messages")
    messages = for_template(body.messages)
    extra: dict[str, object] = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
        extra.setdefault("enable_thinking", body.reasoning_effort != "none")
    if body.documents is not None:
        extra.setdefault("documents", body.documents)
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
        if name in extra:
            raise invalid(f"chat_template_kwargs.{name}", f"chat_template_kwargs has {name}, which is a field of its own")
    continues = bool(body.continue_final_message)
    adds_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    definitions = [tool.model_dump(exclude_none=True) for tool in tools] or None
    size = sum(len(str(message["content"])) for message in messages)

    def run() -> str:
        return template.render(messages, definitions, add_generation_prompt=adds_prompt, continue_final_message=continues, **extra)

    try:
        return await off_loop(size, run)
    except Exception as error:  # a template is a program of the model's authors and may raise anything
        raise ApiError(TEMPLATE_FAILED, f"the chat template refused the messages: {error}", param="messages") from error


def describe_plan(prompt: str, job: Job, model: Model, loaded: Loaded) -> dict[str, object]:
    """What would be asked of the worker, and what it would cost."""
    submit, ready = job.submit, loaded.ready
    longest = len(submit.prompt_ids) + submit.params.max_tokens
    page_bytes = ready.kv_cache_bytes // max(1, ready.num_pages)
    shared = len(submit.prompt_ids) // ready.page_size  # full pages of the prompt are held once
    private = -(-longest // ready.page_size) - shared
    num_pages = shared + private * submit.num_choices
    return {
        "object": "render",
        "model": model.spec.name,
        "prompt": prompt,
        "token_ids": submit.prompt_ids,
        "num_tokens": len(submit.prompt_ids),
        "max_model_len": context_of(loaded),
        "parameters": submit.params,
        "n": submit.num_choices,
        "stop": job.stops.strings,
        "kv_cache": {
            "pages": num_pages,
            "bytes": num_pages * page_bytes,
            "fits": num_pages <= ready.num_pages,
        },
    }


def _check_fields(body: ChatBody, settings: ServerSettings) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is given and stream is not true")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs is given and logprobs is not true")
    if body.max_tokens == 0:
        raise invalid("max_tokens", "max_tokens is 0; expected at least 1")
    if (body.n or 1) > settings.max_choices:
        raise invalid("n", f"n is {body.n}; expected at most {settings.max_choices}")
    if body.add_generation_prompt and body.continue_final_message:
        raise invalid("continue_final_message", "add_generation_prompt and continue_final_message exclude each other")
    if body.continue_final_message and body.messages[-1].role != "assistant":
        raise invalid("continue_final_message", "the last message is not the assistant's; there is nothing to continue")


def _offered(body: ChatBody) -> list[Tool]:
    """The tools that the model may call, and so gets to see."""
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice == "required" or isinstance(choice, NamedTool):
            raise invalid("tool_choice", "tool_choice demands a call and tools is empty")
        return []
    if isinstance(choice, NamedTool):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            raise invalid("tool_choice", f"tool_choice names {choice.function.name!r}, which is not among tools")
        return named
    return [] if choice == "none" else tools


def _constraint(
    body: ChatBody, tools: Sequence[Tool], loaded: Loaded, settings: ServerSettings, *, thinking: bool
) -> Constraint | None:
    dialect = loaded.dialect
    specials = {text.decode(): token_id for token_id, text in dialect.shown.items()}
    constraint = constraint_of(body, settings)
    if body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool):
        if constraint is not None:
            raise invalid("tool_choice", "tool_choice demands a call and the answer is to match a format; choose one")
        schemas = [ToolSchema(tool.function.name, tool.function.parameters or {}) for tool in tools]
        several = body.tool_choice == "required" and body.parallel_tool_calls is not False
        constraint = forced_calls(dialect.tools, schemas, specials, several=several)
        if len(constraint.source.encode()) > settings.max_schema_bytes:
            raise invalid("tools", f"tools have more than {settings.max_schema_bytes} bytes of schema")
    if constraint is not None and (thinking or dialect.thinks):
        return behind_thoughts(constraint, specials, open_already=thinking)
    return constraint


class _ChatChoice:
    """The answer of one choice as it grows."""

    __slots__ = ("arguments", "content", "entries", "finish", "parser", "reasoning", "stop_reason", "token_ids", "tool_calls")

    def __init__(self, rules: AnswerRules) -> None:
        self.parser = AnswerParser(rules)
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.tool_calls: list[CallStart] = []
        self.arguments: list[list[str]] = []
        self.entries: list[TokenEntry] = []
        self.token_ids: list[int] = []
        self.finish: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case Content(text):
                    self.content.append(text)
                case Reasoning(text):
                    self.reasoning.append(text)
                case CallStart():
                    self.tool_calls.append(part)
                    self.arguments.append([])
                case CallArguments(index, text):
                    self.arguments[index].append(text)


class ChatAnswer:
    """One answer, as chunks or as a whole; both are made of the same parts."""

    def __init__(self, body: ChatBody, plan: ChatPlan, generation: Generation, model: Model, loaded: Loaded) -> None:
        self._body = body
        self._generation = generation
        self._writer = LogprobWriter(loaded.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._choices = [_ChatChoice(plan.rules) for _ in range(plan.job.submit.num_choices)]
        self._prompt_ids = plan.job.submit.prompt_ids
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        self._shows_reasoning = body.include_reasoning is not False
        self._envelope: dict[str, object] = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.model or model.spec.name,
            "system_fingerprint": fingerprint(loaded),
        }
        options = body.stream_options
        self._usage_at_end = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats

    @property
    def usage(self) -> Usage:
        return self._generation.usage

    async def whole(self) -> bytes:
        async with aclosing(self._generation.steps()) as steps:
            async for step in steps:
                choice = self._choices[step.choice]
                choice.add(self._take(choice, step))
                choice.entries += step.entries
                choice.token_ids += step.token_ids
        answer: dict[str, object] = {
            **self._envelope,
            "choices": [self._describe(index, choice) for index, choice in enumerate(self._choices)],
            "usage": self.usage.describe(),
        }
        if self._prompt_logprobs:
            answer["prompt_logprobs"] = self._writer.prompt(self._prompt_logprobs)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._prompt_ids
        return encode(answer)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        head = encode({**self._envelope, "object": "chat.completion.chunk"})[:-1] + b',"choices":['
        tail = b'],"usage":null}' if self._usage_at_end and not self._usage_always else b"]}"
        opened: set[int] = set()
        async with aclosing(self._generation.steps()) as steps:
            async for step in steps:
                choice = self._choices[step.choice]
                parts = self._take(choice, step)
                if self._usage_always:
                    tail = b'],"usage":' + encode(self.usage.describe()) + b"}"
                if step.choice not in opened:
                    opened.add(step.choice)
                    yield head + self._opening(step) + tail
                if self._is_plain(choice, step, parts):
                    for part in parts:  # at most one; the path of nearly every token
                        text = encode(part.text) if isinstance(part, Content) else b'""'
                        yield b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}%b' % (
                            head,
                            step.choice,
                            text,
                            tail,
                        )
                elif (chunk := self._chunk(choice, step, parts)) is not None:
                    yield head + chunk + tail
        if self._usage_at_end or self._usage_always:
            yield head + b'],"usage":' + encode(self.usage.describe()) + b"}"

    def _take(self, choice: _ChatChoice, step: Step) -> list[Part]:
        """The parts that a step brings; ends the choice in the worker when nothing more can matter."""
        parser = choice.parser
        reasons = parser.reasons
        parts = parser.push(step.text) if step.text else []
        if reasons or parser.reasons:
            self.usage.reasoning_tokens += len(step.token_ids)
        finish = step.finish
        if finish is None and parser.done:
            self._generation.end(step.choice)
            finish = "stop"
        if finish is not None:
            parts += parser.finish()
            choice.finish = "tool_calls" if parser.num_calls and finish == "stop" else finish
            choice.stop_reason = step.stop_reason
        if step.prompt_logprobs:
            self._prompt_logprobs = step.prompt_logprobs
        return parts

    def _is_plain(self, choice: _ChatChoice, step: Step, parts: Sequence[Part]) -> bool:
        return (
            choice.finish is None
            and not step.entries
            and not self._body.return_token_ids
            and len(parts) <= 1
            and all(isinstance(part, Content) for part in parts)
        )

    def _opening(self, step: Step) -> bytes:
        opening: dict[str, object] = {
            "index": step.choice,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if step.prompt_logprobs:
            opening["prompt_logprobs"] = self._writer.prompt(step.prompt_logprobs)
        if self._body.return_token_ids:
            opening["prompt_token_ids"] = self._prompt_ids
        return encode(opening)

    def _chunk(self, choice: _ChatChoice, step: Step, parts: Sequence[Part]) -> bytes | None:
        choice.entries += step.entries
        choice.token_ids += step.token_ids
        delta = self._delta(parts)
        if not delta and choice.finish is None:
            return None  # its log-probabilities go with the next text
        chunk: dict[str, object] = {
            "index": step.choice,
            "delta": delta,
            "logprobs": self._writer.chat(choice.entries) if self._body.logprobs else None,
            "finish_reason": choice.finish,
        }
        if choice.finish is not None:
            chunk["stop_reason"] = choice.stop_reason
        if self._body.return_token_ids:
            chunk["token_ids"] = choice.token_ids
        choice.entries, choice.token_ids = [], []
        return encode(chunk)

    def _delta(self, parts: Sequence[Part]) -> dict[str, object]:
        delta: dict[str, object] = {}
        if content := "".join(part.text for part in parts if isinstance(part, Content)):
            delta["content"] = content
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        if reasoning and self._shows_reasoning:
            delta["reasoning_content"] = delta["reasoning"] = reasoning
        calls: dict[int, dict[str, object]] = {}
        pieces: dict[int, str] = {}
        for part in parts:
            match part:
                case CallStart(index, call_id, name):
                    pieces[index] = ""
                    calls[index] = {"index": index, "id": call_id, "type": "function", "function": {"name": name}}
                case CallArguments(index, text):
                    pieces[index] = pieces.get(index, "") + text
                    calls.setdefault(index, {"index": index, "function": {}})
                case _:
                    pass
        for index, call in calls.items():
            function = call["function"]
            assert isinstance(function, dict)
            call["function"] = {**function, "arguments": pieces[index]}
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta

    def _describe(self, index: int, choice: _ChatChoice) -> dict[str, object]:
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(arguments)}}
            for call, arguments in zip(choice.tool_calls, choice.arguments, strict=True)
        ]
        content = "".join(choice.content)
        message: dict[str, object] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        if choice.reasoning and self._shows_reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(choice.reasoning)
        described: dict[str, object] = {
            "index": index,
            "message": message,
            "logprobs": self._writer.chat(choice.entries) if self._body.logprobs else None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if self._body.return_token_ids:
            described["token_ids"] = choice.token_ids
        return described
