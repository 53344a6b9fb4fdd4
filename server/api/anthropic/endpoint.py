"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients use them."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

import msgspec
from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from server.api.answer.generate import Generation
from server.api.answer.respond import json_answer, respond, response_headers
from server.api.answer.sse import Framing
from server.api.anthropic.answer import AnthropicAnswer, MessageAnswer, MessageEvent
from server.api.anthropic.body import MessagesBody, PromptBody
from server.api.anthropic.input import BLOCK, chat_of, with_type
from server.api.context import Context, caller
from server.api.openai.chat import num_prompt_tokens, plan_chat
from server.api.request.limits import check_sizes
from server.api.request.prefix import prefix_header
from server.api.request.prepare import ChatPlan, job_like, off_loop, require_generator
from server.api.request.schema import ChatBody
from server.api.request.texts import TOO_LONG_REMEDY
from server.api.request.words import in_words
from server.api.routes import gives, new_router
from server.errors import CONTEXT_LENGTH_EXCEEDED, INVALID_VALUE, UNSUPPORTED_FIELD, ApiError
from server.settings import ServerSettings
from server.text.dialects.dialect import Dialect


class TokenCount(TypedDict):
    input_tokens: int


def error_body(error: ApiError) -> bytes:
    """Encode an error in Anthropic's shape, with `code` and `param` as in the errors of the other APIs."""
    fault = {"type": TYPES.get(error.kind.status, "api_error"), "message": error.message}
    return msgspec.json.encode({"type": "error", "error": {**fault, "code": error.kind.code, "param": error.param, **error.details}})


NAMES = {  # fields of a chat request, and their names in this API
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "system.content": "system",
}
EARLIER = NAMES | dict.fromkeys(("response_format", "response_format.json_schema"), "output_format")  # for requests with `output_format`
IMAGE = re.compile(rf"{BLOCK.pattern}\.source\b")  # path of an image in a request
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Anthropic's tool runners send only new messages by default. The error code below tells them to send all messages.
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
ERROR_SHAPES = {"/v1/messages": error_body}
FRAMING = Framing(error_body, named=True, end=b"")


@contextmanager
def _in_own_words(body: PromptBody) -> Generator[None]:
    """Let errors name fields as the request does, and not as the chat request made from it. An error about a prompt that is too long, or
    about an image, gets the words that clients recognise."""
    try:
        with in_words(NAMES if body.output_format is None else EARLIER):
            yield
    except ApiError as error:
        if error.param is not None and (found := IMAGE.match(error.param)) is not None:
            path = error.param[: found.end()]
            error.message = error.message.replace(path, with_type(path, "image"), 1)
        if error.kind is not CONTEXT_LENGTH_EXCEEDED:
            raise
        found = error.message.removesuffix(TOO_LONG_REMEDY)
        message = f"prompt is too long: {found}; shorten the conversation."  # its first words make clients summarise the conversation
        raise ApiError(CONTEXT_LENGTH_EXCEEDED, message, param=error.param) from error


def router(context: Context) -> APIRouter:
    routes, settings = new_router("Anthropic"), context.settings

    @routes.post("/v1/messages", responses=gives(AnthropicAnswer, event=MessageEvent, done=False))
    async def messages(request: Request, body: MessagesBody) -> Response:
        """Answer a conversation."""
        model, loaded, ignored = context.begin(request, body, body.model)
        if body.thread is not None:
            message = "thread is not supported: the server holds no conversations; send all messages without thread"
            raise ApiError(UNSUPPORTED_FIELD, message, param="thread", details=NO_THREADS)
        if body.max_tokens == 0 and body.stream:
            raise ApiError(INVALID_VALUE, "max_tokens is 0 and stream is true; the answer is empty: leave stream out", param="stream")
        who = caller(request)
        chat = await off_loop(who.num_body_bytes, lambda: _chat(body, loaded.dialect, settings))
        with _in_own_words(body):
            plan = await plan_chat(chat, model, loaded, who, settings)
        room = plan.job.submit.params.max_tokens
        # Even if max_tokens is 0, computing the prompt takes a step, which samples one token.
        job = job_like(plan.job, plan.job.submit.prompt_ids, min(room, body.max_tokens or 1))
        generation = Generation(loaded, job, context.metrics_of(model.spec.name), who)
        plan = ChatPlan(plan.prompt, job, plan.rules)
        omits_thoughts = body.thinking is not None and body.thinking.display == "omitted"
        name = body.model or model.spec.name
        answer = MessageAnswer(
            plan,
            generation,
            name,
            is_capped=room < body.max_tokens,
            is_empty=body.max_tokens == 0,
            omits_thoughts=omits_thoughts,
            has_stops=body.stop_sequences is not None,
        )
        headers = response_headers(loaded, ignored) | await prefix_header(chat, plan, loaded)
        return await respond(request, answer, headers, stream=bool(body.stream), settings=settings, framing=FRAMING)

    @routes.post("/v1/messages/count_tokens", responses=gives(TokenCount))
    async def count_tokens(request: Request, body: PromptBody) -> Response:
        """Count the tokens of a conversation, without generating."""
        model, loaded, ignored = context.begin(request, body, body.model)
        require_generator(model, loaded)
        who = caller(request)
        chat = await off_loop(who.num_body_bytes, lambda: _chat(body, loaded.dialect, settings))
        with _in_own_words(body):
            counted: TokenCount = {"input_tokens": await num_prompt_tokens(chat, model, loaded, who, settings, "messages")}
        return json_answer(counted, headers=response_headers(loaded, ignored))

    return routes


def _chat(body: PromptBody, dialect: Dialect, settings: ServerSettings) -> ChatBody:
    """Return the chat request for a body. Raise ApiError if the body is too large or not valid."""
    check_sizes(body)
    return chat_of(body, dialect, keeps_hash=settings.keep_agent_hashes)
