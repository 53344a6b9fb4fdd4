"""/v1/responses: create, get, delete and cancel responses, list their input, and count the tokens of an input."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response

from server.api.answer.generate import Generation
from server.api.answer.respond import Pieces, json_answer, respond, response_headers
from server.api.answer.sse import Framing
from server.api.context import Caller, Context, caller, stays
from server.api.openai.chat import num_prompt_tokens, plan_chat
from server.api.openai.responses.answer import ResponseAnswer
from server.api.openai.responses.body import CountedBody, McpOffer, ResponseBody
from server.api.openai.responses.input import as_items, chat_of, ineffective, items_of, kept_form
from server.api.openai.responses.mcp.answer import McpAnswer, Round
from server.api.openai.responses.mcp.calls import McpCalls
from server.api.openai.responses.shapes import InputItemList, InputTokens, ResponseDeleted, ResponseEvent, ResponseObject
from server.api.openai.responses.store import Items, ResponseStore, Stored
from server.api.request.limits import check_sizes
from server.api.request.paging import NO_ID, page_after
from server.api.request.prefix import prefix_header
from server.api.request.prepare import ChatPlan, capped_header, invalid, off_loop, require_generator
from server.api.request.schema import ChatBody
from server.api.request.words import in_words
from server.api.routes import gives, new_router
from server.errors import INTERNAL, NOT_FOUND_PATH, PREVIOUS_RESPONSE_NOT_FOUND, UNSUPPORTED_FIELD, ApiError
from server.mcp.servers import McpServers
from server.models.model import Loaded, Model
from server.settings import ServerSettings

log = logging.getLogger(__name__)

NAMES = {  # fields of a chat request, and their names in this API
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "thinking_token_budget": "reasoning",
    "instructions.content": "instructions",
}
# values of `include` begin with the type of an item; these types are accepted
KNOWN = ("file_search_call", "web_search_call", "computer_call_output", "code_interpreter_call", "message", "reasoning")
MOST_LISTED = 100
encode = msgspec.json.encode


def _error(error: ApiError) -> bytes:
    """Encode an error that occurs before the first event of a response."""
    fault = {"type": "error", "sequence_number": 0, "code": error.kind.code, "message": error.message, "param": error.param}
    return encode(fault)


FRAMING = Framing(_error, named=True, end=b"")


def router(context: Context) -> APIRouter:
    routes, settings = new_router("OpenAI"), context.settings
    store = ResponseStore(settings.response_store_bytes, settings.response_store_s)
    servers = McpServers(settings.mcp_servers, settings.mcp_timeout_s)

    def owner_of(who: Caller) -> str:
        """Return the owner of a response. Without API keys, callers cannot be distinguished and share one owner."""
        return who.key_digest if settings.has_api_keys else ""

    async def plan_turn(
        chat: ChatBody, model: Model, loaded: Loaded, who: Caller, *, deadline: float | None = None
    ) -> tuple[ChatPlan, Generation]:
        """Plan a turn of the model. `deadline` is the deadline that all turns of a response with tools of MCP servers share. If it is None,
        the timeout of `chat` sets the deadline, if there is a timeout. Raise ApiError if the model cannot answer."""
        with in_words(NAMES):
            plan = await plan_chat(chat, model, loaded, who, settings)
        if deadline is not None:
            plan = replace(plan, job=replace(plan.job, submit=msgspec.structs.replace(plan.job.submit, deadline=deadline)))
        return plan, Generation(loaded, plan.job, context.metrics_of(model.spec.name), who)

    @routes.post("/v1/responses", responses=gives(ResponseObject, event=ResponseEvent, done=False))
    async def create(request: Request, body: ResponseBody) -> Response:
        """Answer a conversation. The server may store the response."""
        model, loaded, ignored = context.begin(request, body, body.model)
        ignored += ineffective(body)
        who = caller(request)
        _check_fields(body, settings)
        owner = owner_of(who)
        calls = McpCalls(body, servers) if any(isinstance(tool, McpOffer) for tool in body.tools or ()) else None
        # The tools of MCP servers are not known yet, so the tool choice is left out here, and `plan_round` applies it in each turn of the
        # model.
        asked = body if calls is None else body.model_copy(update={"tool_choice": None})
        chat, items = await _conversation(asked, store, owner, who.num_body_bytes, settings.max_body_bytes)
        plan, generation = await plan_turn(chat, model, loaded, who)

        def keep(answer: ResponseAnswer, written: bytes) -> None:
            """Store the response with this JSON, unless the request forbids it."""
            if body.store is not False:
                store.put(Stored(answer.id, owner, written, items, answer.output, in_background=bool(body.background)))

        if calls is None:
            answer = ResponseAnswer(body, plan, generation, model, loaded, keep=keep)
        else:
            # A background response goes on after its request was answered. From then on, `receive` of the request reports that the client
            # has left, so `stays`, which never returns, replaces `receive`.
            turns = (replace(who, receive=stays) if body.background else who).parts()

            async def plan_round(given: Round) -> tuple[ChatPlan, Generation]:
                """Plan a turn of a response that uses tools of MCP servers. The turn's conversation includes the output of earlier
                turns."""
                planner = next(turns)
                asked = body.model_copy(update={"tool_choice": given.choice, "max_output_tokens": given.max_tokens})
                size = sum(len(item) for part in (items, given.output) for _, item in part)
                said = await off_loop(size, lambda: as_items([*items, *given.output]))
                turn = await off_loop(size, lambda: chat_of(asked, said, len(said), given.functions))
                return await plan_turn(turn, model, loaded, planner, deadline=plan.job.submit.deadline)

            said = await off_loop(who.num_body_bytes, lambda: as_items(items))
            answer = McpAnswer(body, plan, generation, model, loaded, keep=keep, calls=calls, context=said, plan_round=plan_round)
        headers = response_headers(loaded, ignored) | capped_header(body.max_output_tokens, plan.job, name="max_output_tokens")
        headers |= await prefix_header(chat, plan, loaded)
        if body.background:
            return json_answer(msgspec.Raw(_begin(answer, items, owner, store)), headers=headers)
        return await respond(request, answer, headers, stream=bool(body.stream), settings=settings, framing=FRAMING)

    @routes.post("/v1/responses/input_tokens", responses=gives(InputTokens))
    async def input_tokens(request: Request, body: CountedBody) -> Response:
        """Count the tokens of a conversation, without generating. Tools of MCP servers are not counted."""
        model, loaded, ignored = context.begin(request, body, body.model)
        ignored += ineffective(body)
        ignored += [f"tools[{index}]" for index, tool in enumerate(body.tools or ()) if isinstance(tool, McpOffer)]
        McpCalls(body, servers)  # raises ApiError if this server may not call one of the MCP servers
        require_generator(model, loaded)
        who = caller(request)
        chat, _ = await _conversation(body, store, owner_of(who), who.num_body_bytes, settings.max_body_bytes)
        with in_words(NAMES):
            num_tokens = await num_prompt_tokens(chat, model, loaded, who, settings, "input")
        counted: InputTokens = {"object": "response.input_tokens", "input_tokens": num_tokens}
        return json_answer(counted, headers=response_headers(loaded, ignored))

    @routes.post("/v1/responses/compact", include_in_schema=False)
    async def compact() -> Response:
        """Refuse to compact a conversation."""
        message = "conversations are not compacted here; send a shorter one, or truncation: auto"
        raise ApiError(NOT_FOUND_PATH, message)

    @routes.get("/v1/responses/{response_id}", responses=gives(ResponseObject))
    async def get(request: Request, response_id: str, stream: bool = False) -> Response:
        """Return a stored response."""
        if stream:
            raise ApiError(UNSUPPORTED_FIELD, "stream is not supported here: a stored response cannot be streamed again", param="stream")
        return Pieces([store.get(response_id, owner_of(caller(request))).body], {})

    @routes.delete("/v1/responses/{response_id}", responses=gives(ResponseDeleted))
    async def delete(request: Request, response_id: str) -> Response:
        """Delete a stored response. Responses that continue the deleted one are kept."""
        store.delete(response_id, owner_of(caller(request)))
        deleted: ResponseDeleted = {"id": response_id, "object": "response", "deleted": True}
        return json_answer(deleted)

    @routes.post("/v1/responses/{response_id}/cancel", responses=gives(ResponseObject))
    async def cancel(request: Request, response_id: str) -> Response:
        """Cancel a background response. The part that was generated so far is stored. A response that has ended already is returned as it
        is."""
        owner = owner_of(caller(request))
        found = store.get(response_id, owner)
        if not found.in_background:
            raise invalid("response_id", f"response {response_id:.80} was not created with background; expected one that was")
        if found.task is not None:
            found.task.cancel()
            await asyncio.wait((found.task,))
        return Pieces([store.get(response_id, owner).body], {})

    @routes.get("/v1/responses/{response_id}/input_items", responses=gives(InputItemList))
    async def input_items(
        request: Request,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str | None, Query(max_length=256)] = None,
    ) -> Response:
        """List the input items of a response, including those of earlier turns."""
        items = list(store.get(response_id, owner_of(caller(request))).context)
        listed = items if order == "asc" else items[::-1]
        page, ends = page_after(listed, after or None, limit, MOST_LISTED, NO_ID)
        return Pieces([b'{"object":"list","data":[' + b",".join(item.json for item in page) + b"]," + encode(ends)[1:]], {})

    return routes


def _begin(answer: ResponseAnswer, items: Items, owner: str, store: ResponseStore) -> bytes:
    """Start a background response and store it as running. Return the response as JSON, with the status `queued`. When the model begins to
    answer, the stored JSON is updated. When the response ends, its `keep` stores it, unless it was deleted before."""

    async def run() -> None:
        """Generate the response, and store how it ends."""
        try:
            await answer.whole()
        except ApiError as error:
            answer.fail(error)
        except asyncio.CancelledError:
            if store.has_running(answer.id):  # false if the response was deleted
                answer.end_early("cancelled")
        except Exception:
            log.exception("background response %s failed", answer.id)
            answer.fail(ApiError(INTERNAL, f"the server failed on this request; its log has the cause under {answer.id}"))

    written = answer.snapshot()
    stored = Stored(answer.id, owner, written, items, in_background=True, task=asyncio.create_task(run()))

    def note_begun() -> None:
        stored.body = answer.snapshot()

    answer.on_begin = note_begun
    store.put(stored)
    return written


async def _conversation(
    body: ResponseBody, store: ResponseStore, owner: str, num_body_bytes: int, most_bytes: int
) -> tuple[ChatBody, Items]:
    """Return the conversation as a chat request, and its items for the store: those of the conversation that `previous_response_id` names,
    then those of this request. Raise ApiError if the earlier response is unknown or still runs, if the conversation is too large or has
    neither items nor instructions, or if an item is not valid."""
    earlier: Items = ()
    if body.previous_response_id is not None:
        kind, param = PREVIOUS_RESPONSE_NOT_FOUND, "previous_response_id"
        found = store.get(body.previous_response_id, owner, kind=kind, param=param)
        if found.is_running:
            raise invalid(param, f"response {found.id} is not complete; expected one that is")
        earlier = [*found.context, *found.output]
    num_bytes = sum(len(item) for _, item in earlier)
    if num_bytes > most_bytes:
        message = f"the conversation that previous_response_id names has {num_bytes} bytes; expected at most {most_bytes}"
        raise invalid("previous_response_id", message)

    def make() -> tuple[ChatBody, Items]:
        check_sizes(body)
        new = items_of(body, store, owner)
        chat = chat_of(body, [*as_items(earlier), *new], len(earlier))
        return chat, [*earlier, *kept_form(new, earlier)]

    return await off_loop(num_body_bytes + num_bytes, make)


def _check_fields(body: ResponseBody, settings: ServerSettings) -> None:
    """Raise ApiError if two fields contradict each other, or if a field asks for something that this server does not do."""
    for index, part in enumerate(body.include or ()):
        if part.partition(".")[0] not in KNOWN:
            raise invalid(f"include[{index}]", f"include[{index}] is {part!r:.80}; expected a part of {', '.join(KNOWN)}")
    if body.background and not settings.response_store_bytes:
        raise invalid("background", "background is true, and this server stores no responses; set response_store_bytes")
    if body.background and body.stream:
        raise ApiError(UNSUPPORTED_FIELD, "stream is not supported with background; ask for the response later", param="stream")
    if body.background and body.store is False:
        raise invalid("store", "store is false and background is true; a background response is fetched later, so it must be stored")
