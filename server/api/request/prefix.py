"""Find where a prompt begins to differ from the most similar earlier prompt, so that a user of the API can see why the prefix cache found
less than expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from server.api.request.conversation import text_of
from server.api.request.prepare import ChatPlan, off_loop
from server.api.request.schema import MEDIA_PARTS, ChatBody, Message, Tool
from server.models.model import Loaded


async def prefix_header(body: ChatBody, plan: ChatPlan, loaded: Loaded) -> dict[str, str]:
    """Store the prompt. Of the earlier prompts with the same cache salt, find the one that shares the longest beginning with this prompt.
    Return the header that names the first part of the request where the two prompts differ. Return no header if this prompt continues the
    earlier one, or if there is no earlier prompt. A role may have letters that no header can contain; these letters are percent-encoded."""

    def find() -> dict[str, str]:
        at = loaded.prompts.difference(plan.job.submit.cache_salt, plan.prompt)
        return {} if at is None else {"x-prefix-ends": quote(part_at(plan.prompt, at, body), safe="[], ")}

    return await off_loop(len(plan.prompt), find)


def part_at(prompt: str, at: int, body: ChatBody) -> str:
    """Name the part of the request that the template has written at index `at` of the prompt, such as `system[0], character 81` or
    `tools[4]`. The template's own text counts to the message that follows it; after the last message, the text is named `template`. Text
    after a message with calls counts to this message, because the text may be a call."""
    messages = list(_named(body.messages))
    end, following = 0, 0  # the end of the last message found in the prompt, and the index of the next message
    for index, (name, message) in enumerate(messages):
        said = text_of(message.content, markers=dict.fromkeys(MEDIA_PARTS, ""))  # images and recordings add no text
        text = said.strip()  # templates write texts without white space around them
        start = prompt.find(text, end) if text else -1
        if start < 0:
            continue
        if at < start:
            break
        if at < start + len(text):
            return f"{name}, character {at - start + said.index(text)}"
        end, following = start + len(text), index + 1
    before = messages[following - 1][1] if following else None
    tools = body.tools or ()
    if tools and (before is None or before.role in {"system", "developer"}):
        named = _tool_at(prompt, at, end, tools)
        if named is not None:
            return named
    if before is not None and before.tool_calls:
        return messages[following - 1][0]
    return messages[following][0] if following < len(messages) else "template"


def _named(messages: list[Message]) -> Iterator[tuple[str, Message]]:
    """Yield each message with its name: its role, and its index among the messages of this role, such as `user[1]`."""
    counts: Counter[str] = Counter()
    for message in messages:
        yield f"{message.role}[{counts[message.role]}]", message
        counts[message.role] += 1


def _tool_at(prompt: str, at: int, start: int, tools: Sequence[object]) -> str | None:
    """Return the last tool, as `tools[INDEX]`, whose name begins between `start` and `at` in the prompt, or None. Search the names in the
    order of the tools, each after the previous name, and stop at the first name that is not found."""
    found = None
    for index, tool in enumerate(tools):
        if not isinstance(tool, Tool):
            continue  # the model does not see such a tool
        start = prompt.find(f'"{tool.function.name}"', start, at + len(tool.function.name) + 2)
        if start < 0:
            break
        found = f"tools[{index}]"
    return found
