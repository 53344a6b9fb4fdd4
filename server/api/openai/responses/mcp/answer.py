"""Answer with tools of MCP servers. List the tools of the servers, and let the model answer. Make the calls that the model has written, and
let the model continue, until it makes no more calls, its tokens are spent, or the client must act: approve a call, or run a function of its
own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from server.api.answer.blocks import Block, Kind
from server.api.answer.generate import Generation, Usage
from server.api.answer.step_parser import StepParser
from server.api.openai.responses.answer import Keep, ResponseAnswer
from server.api.openai.responses.body import AllowedToolNames, InputItem, McpChoice, ResponseBody, ToolName
from server.api.openai.responses.input import new_id
from server.api.openai.responses.mcp.calls import McpCalls, listed_before
from server.api.openai.responses.mcp.functions import McpFunction
from server.api.openai.responses.mcp.items import ApprovalRequest, McpCall, McpItem, ToolList, approved, tool_fault
from server.api.openai.responses.shapes import OutputItem
from server.api.openai.responses.store import Items
from server.api.request.prepare import ChatPlan
from server.errors import ApiError
from server.mcp.errors import McpError
from server.models.model import Loaded, Model

MAX_ROUNDS = 32  # turns of the model that may call tools
Choice = str | ToolName | McpChoice | AllowedToolNames | None


@dataclass(frozen=True, slots=True)
class Round:
    """The tools, earlier output and limits of a turn of the model."""

    functions: Sequence[McpFunction]
    output: Items  # output items of the response so far
    choice: Choice  # tool choice
    max_tokens: int | None  # tokens that are left for the answer; None: the request sets no limit


PlanRound = Callable[[Round], Awaitable[tuple[ChatPlan, Generation]]]


class McpAnswer(ResponseAnswer):
    """The answer of a response that uses tools of MCP servers."""

    def __init__(
        self,
        body: ResponseBody,
        plan: ChatPlan,
        generation: Generation,
        model: Model,
        loaded: Loaded,
        *,
        keep: Keep,
        calls: McpCalls,
        context: Sequence[InputItem],
        plan_round: PlanRound,
    ) -> None:
        """`plan` and `generation` are for the conversation without the tools of MCP servers; this generation never runs. `context`: the
        items of the conversation. `plan_round` makes the plan and the generation of a turn of the model."""
        super().__init__(body, plan, generation, model, loaded, keep=keep)
        self._calls = calls
        self._context = context
        self._plan_round = plan_round
        self._request = body
        self._own: dict[int, McpItem] = {}  # items about MCP servers, by the index of their block
        self._functions: dict[str, McpFunction] = {}  # functions, by the name by which the model calls them; empty until tools are listed
        self._num_calls = 0  # calls that were made
        self._generations: list[Generation] = []  # one for each turn of the model so far

    @property
    def usage(self) -> Usage:
        """The counts of all turns of the model together."""
        total = Usage()
        for one in (generation.usage for generation in self._generations):
            total.prompt_tokens += one.prompt_tokens
            total.completion_tokens += one.completion_tokens
            total.cached_tokens += one.cached_tokens
            total.reasoning_tokens += one.reasoning_tokens
        return total

    async def whole(self) -> list[bytes]:
        """Answer, and return the response as pieces of JSON. After an error, return a failed response if a call was made before, so that
        the client learns which calls were made. Otherwise raise the ApiError."""
        self.note_begun()
        try:
            async with aclosing(self._events()) as events:
                async for _ in events:
                    pass
            pieces = self.pieces()
        except ApiError as error:
            if not self._num_calls:
                raise
            self.fail(error)
            return [self.snapshot()]
        self._keep(self, b"".join(pieces))
        return pieces

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Answer, and yield the events."""
        for event in self.begin():
            yield event
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    if event:
                        yield event
            ending = self.end()
        except ApiError as error:
            ending = self.failed(error)
        for event in ending:
            yield event

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """List tools, make the calls that the user has approved, and let the model answer. Yield the events."""
        try:
            async with aclosing(self._listed()) as events:
                async for event in events:
                    yield event
            for request in approved(self._context):
                async with aclosing(self._made(self._approved_call(request))) as events:
                    async for event in events:
                        yield event
            async with aclosing(self._rounds()) as events:
                async for event in events:
                    yield event
        finally:
            self._calls.close()

    async def _listed(self) -> AsyncGenerator[bytes, None]:
        """List the tools of the servers whose tools the conversation has not listed before, and yield the events of these lists. Then set
        the functions that the model may call. A server that does not list its tools gets an item with the error, and offers no tools."""
        listed = listed_before(self._context)
        for offer in self._calls.offers:
            label = offer.server_label
            if label in listed:
                continue
            found = ToolList(label)
            block = self._add(found, "mcpl")
            yield self._added(block)
            yield self._told("response.mcp_list_tools.in_progress", block)
            try:
                listed[label] = found.tools = await self._calls.tools(label)
            except McpError as error:
                found.error = str(error)
            yield self._told(f"response.mcp_list_tools.{'completed' if found.error is None else 'failed'}", block)
            yield self._done(block)
        self._functions = {function.name: function for function in self._calls.functions(listed)}

    async def _rounds(self) -> AsyncGenerator[bytes, None]:
        """Let the model answer, and make its calls, until it makes no more calls, its tokens are spent, or the client must act. Yield the
        events. After MAX_ROUNDS turns, or when `max_tool_calls` calls were made, the model takes one more turn, in which it cannot call
        tools."""
        choice: Choice = self._request.tool_choice
        for number in range(MAX_ROUNDS + 1):
            most, first = self._request.max_output_tokens, len(self.blocks)
            left = None if most is None else most - self.usage.completion_tokens
            if left is not None and left < 1:
                self.finish = "length"
                return
            may_call = number < MAX_ROUNDS and self._may_call
            given = Round(list(self._functions.values()), self.output, choice if may_call else "none", left)
            self._begin_turn(*await self._plan_round(given))
            async with aclosing(self._generation.steps()) as steps:
                async for step in steps:
                    for event in self._take(step):
                        yield event
            written = [block for block in self.blocks[first:] if block.kind is Kind.CALL]
            to_make = [block for block in written if isinstance(self._own.get(block.index), McpCall)]
            if not to_make:
                return
            if self.finish == "length" or written[-1].cut_off:
                for block in to_make:
                    if not block.cut_off:
                        yield self._not_made(block)
                return
            for block in to_make:
                async with aclosing(self._made(block)) as events:
                    async for event in events:
                        yield event
            if len(to_make) < len(written):
                return
            choice = _relaxed(choice)

    def _begin_turn(self, plan: ChatPlan, generation: Generation) -> None:
        """Begin a turn of the model: its steps come from `generation`, and are parsed by the rules of `plan`."""
        self._generation = generation
        self._generations.append(generation)
        self._parser, self.finish = StepParser(generation, plan.rules), None

    @property
    def _may_call(self) -> bool:
        """Whether `max_tool_calls` allows another call."""
        return self._request.max_tool_calls is None or self._num_calls < self._request.max_tool_calls

    # --- calls -----------------------------------------------------------------------------------------------------------

    def _approved_call(self, request: InputItem) -> Block:
        """Add the block of a call that the user has approved, and return it. The call has no function if the tool is no longer
        offered."""
        label, name = request.server_label or "", request.name or ""
        function = next((one for one in self._functions.values() if (one.label, one.tool.name) == (label, name)), None)
        block = self._add(McpCall(label, name, function, approval_id=request.id), "mcp")
        block.pieces.append(request.arguments or "{}")
        return block

    async def _made(self, block: Block) -> AsyncGenerator[bytes, None]:
        """Make a call and yield its events. The call ends with an error instead if its tool is not offered, or if `max_tool_calls` forbids
        it. If the user has approved the call after an earlier response, no event of the call's item has been sent yet, so yield its first
        events, too."""
        call = self._own[block.index]
        assert isinstance(call, McpCall)
        if call.approval_id is not None:
            yield self._added(block)
            yield self._told("response.mcp_call.in_progress", block)
            yield self._told("response.mcp_call_arguments.done", block, arguments=block.text)
        if call.function is None:
            call.end(tool_fault(f"no tool {call.tool_name!r} of MCP server {call.label!r} is offered"))
        elif not self._may_call:
            call.end(tool_fault(f"max_tool_calls is {self._request.max_tool_calls}; the call was not made"))
        else:
            self._num_calls += 1
            call.status = "calling"
            call.end(await self._calls.call(call.function, block.text))
        yield self._told(f"response.mcp_call.{call.status}", block)
        yield self._done(block)

    def _not_made(self, block: Block) -> bytes:
        """End a call that is complete in a turn that was cut off, without making the call. Return the call's last event."""
        call = self._own[block.index]
        assert isinstance(call, McpCall)
        call.status = "incomplete"
        return self._done(block)

    def end_early(self, status: str) -> None:
        """End the response early, as ResponseAnswer does. Calls that have not ended become incomplete."""
        if self._growing is not None:
            self._withdraw(self.blocks[-1])
        for own in self._own.values():
            if isinstance(own, McpCall) and own.status in ("in_progress", "calling"):
                own.status = "incomplete"
        super().end_early(status)

    # --- blocks ----------------------------------------------------------------------------------------------------------

    def opened(self, block: Block) -> Sequence[bytes]:
        """Return the events for a block that has just been opened. A call of an MCP server's tool becomes an McpCall, or if the user must
        approve the call, an ApprovalRequest, which has no events until the block is closed. ResponseAnswer handles other blocks."""
        function = self._functions.get(block.call.name) if block.call is not None else None
        if function is None:
            return super().opened(block)
        if function.needs_approval:
            block.id = new_id("mcpr")
            self._own[block.index] = ApprovalRequest(function)
            return ()
        block.id = new_id("mcp")
        self._own[block.index] = McpCall(function.label, function.tool.name, function)
        self.grows_by(block, "response.mcp_call_arguments.delta")
        return self._added(block), self._told("response.mcp_call.in_progress", block)

    def grown(self, block: Block, text: str) -> bytes:
        """Return the event for a text that was just added to a block, or b"" for a request for approval."""
        return b"" if isinstance(self._own.get(block.index), ApprovalRequest) else super().grown(block, text)

    def closed(self, block: Block) -> Sequence[bytes]:
        """Return the events for a block that has just been closed. The item of an McpCall ends after the call was made; only if the call
        was cut off, its item becomes incomplete and ends now. An ApprovalRequest gets all its events now. If its call was cut off, do not
        ask the user: the item becomes an incomplete McpCall."""
        is_withdrawn = block.cut_off and self._withdraw(block)
        opened = (self._added(block), self._told("response.mcp_call.in_progress", block)) if is_withdrawn else ()
        match self._own.get(block.index):
            case McpCall() as call:
                told = self._told("response.mcp_call_arguments.done", block, arguments=block.text)
                if not block.cut_off:
                    return (told,)
                call.status = "incomplete"
                return *opened, told, self._done(block)
            case ApprovalRequest():
                return self._added(block), self._done(block)
            case _:
                return super().closed(block)

    def _withdraw(self, block: Block) -> bool:
        """Turn a request for approval that was cut off into a call, and return True. Return False for other blocks, which stay as they
        are."""
        own = self._own.get(block.index)
        if not isinstance(own, ApprovalRequest):
            return False
        block.id = new_id("mcp")
        self._own[block.index] = McpCall(own.function.label, own.function.tool.name, own.function)
        return True

    def item_of(self, block: Block, *, is_open: bool = False) -> OutputItem:
        own = self._own.get(block.index)
        return super().item_of(block, is_open=is_open) if own is None else own.item(block, is_open=is_open)

    def _add(self, item: McpItem, prefix: str) -> Block:
        """Add a block for an item about an MCP server, and return the block. Its id begins with `prefix`."""
        block = Block(len(self.blocks), Kind.CALL, new_id(prefix))
        self.blocks.append(block)
        self._own[block.index] = item
        return block

    def _added(self, block: Block) -> bytes:
        """Return the event for an item that was added. A request for approval is complete from the beginning; other items have no content
        yet."""
        is_open = not isinstance(self._own[block.index], ApprovalRequest)
        return self.event("response.output_item.added", output_index=block.index, item=self.item_of(block, is_open=is_open))

    def _told(self, kind: str, block: Block, **fields: object) -> bytes:
        """Return an event about an item."""
        return self.event(kind, item_id=block.id, output_index=block.index, **fields)

    def _done(self, block: Block) -> bytes:
        """Return the event for an item that is complete."""
        return self.event("response.output_item.done", output_index=block.index, item=self.item_of(block))


def _relaxed(choice: Choice) -> Choice:
    """Return the tool choice for later turns of the model: the first turn has met a demand for a call, so later turns demand none."""
    match choice:
        case "required" | McpChoice() | ToolName():
            return None
        case AllowedToolNames():
            return choice.model_copy(update={"mode": "auto"})
        case _:
            return choice
