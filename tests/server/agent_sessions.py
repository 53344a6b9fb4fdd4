"""Generated sessions in the shape in which Claude Code and Codex send them: instructions and tools of thousands of tokens, then turns with
calls and their results. Each request repeats all turns so far. Whatever the programs change from request to request changes here, too."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

WORDS = [
    "the",
    "file",
    "test",
    "build",
    "error",
    "line",
    "token",
    "server",
    "module",
    "import",
    "return",
    "value",
    "class",
    "function",
    "check",
    "path",
    "cache",
    "index",
    "patch",
    "merge",
]


@dataclass(frozen=True)
class Request:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


Session = Iterator[Request]


def prose(dice: random.Random, num_chars: int) -> str:
    text = ""
    while len(text) < num_chars:
        text += dice.choice(WORDS) + dice.choice((" ", " ", " ", ".\n"))
    return text


def schema(dice: random.Random) -> dict[str, Any]:
    fields = {f"{dice.choice(WORDS)}_{index}": {"type": dice.choice(("string", "integer", "boolean"))} for index in range(4)}
    return {"type": "object", "properties": fields, "required": list(fields)[:2], "additionalProperties": False}


def claude_code(seed: int, num_chars: int, num_turns: int, model: str) -> Session:
    """Yield the requests of a session. Four fifths of the first prompt are instructions and tools; a turn adds a fiftieth."""
    dice = random.Random(seed)
    tools = [
        {"name": f"Tool{index}", "description": prose(dice, num_chars // 30), "input_schema": schema(dice), "strict": True}
        for index in range(12)
    ]
    instructions, project = prose(dice, num_chars * 4 // 10), prose(dice, num_chars // 10)
    user_id = f"user_{dice.randbytes(16).hex()}_account__session_{dice.randbytes(8).hex()}"
    reminder = f"<system-reminder>\nAs you answer, you can use the following context:\n{project}</system-reminder>\n"
    messages: list[dict[str, Any]] = [{"role": "user", "content": [_text(reminder), _text(f"{prose(dice, num_chars // 20)}please")]}]
    for turn in range(num_turns):
        billing = f"x-anthropic-billing-header: cc_version=2.1.37.fbe; cc_entrypoint=cli; cch={dice.randbytes(3).hex()};"
        system = [_text(billing), _cached(_text("You are Claude Code, an agent.")), _cached(_text(instructions))]
        # the mark of the last block to cache moves with the conversation
        sent = [*messages[:-1], {**messages[-1], "content": [*messages[-1]["content"][:-1], _cached(messages[-1]["content"][-1])]}]
        body: dict[str, Any] = {"model": model, "max_tokens": 32_000, "stream": True, "system": system, "tools": tools, "messages": sent}
        body |= {"metadata": {"user_id": user_id}, "thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"}}
        body["context_management"] = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-stainless-retry-count": str(turn)}
        yield Request("/v1/messages?beta=true", {**headers, "x-client-request-id": dice.randbytes(8).hex()}, body)
        call = {"type": "tool_use", "id": f"toolu_{dice.randbytes(8).hex()}", "name": "Tool3", "input": {"path": prose(dice, 20)}}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [_text(prose(dice, num_chars // 50))]}
        messages += [{"role": "assistant", "content": [_text("I look."), call]}, {"role": "user", "content": [result]}]


def codex(seed: int, num_chars: int, num_turns: int, model: str) -> Session:
    dice = random.Random(seed)
    tools: list[dict[str, Any]] = [
        {
            "type": "function",
            "name": f"tool_{index}",
            "description": prose(dice, num_chars // 40),
            "parameters": schema(dice),
            "strict": False,
        }
        for index in range(8)
    ]
    tools += [{"type": "web_search", "external_web_access": False}, {"type": "namespace", "name": "mcp", "tools": tools[:2]}]
    tools += [{"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}]
    instructions, conversation = prose(dice, num_chars // 2), dice.randbytes(16).hex()
    surroundings = f"<environment_context>\n  <cwd>/work/repo</cwd>\n{prose(dice, num_chars // 10)}</environment_context>"
    items = [_said("developer", prose(dice, num_chars // 10)), _said("user", surroundings), _said("user", prose(dice, num_chars // 20))]
    for turn in range(num_turns):
        body: dict[str, Any] = {
            "model": model,
            "stream": True,
            "store": False,
            "instructions": instructions,
            "input": list(items),
            "tools": tools,
        }
        body |= {"tool_choice": "auto", "parallel_tool_calls": True, "include": ["reasoning.encrypted_content"]}
        body |= {"reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"}, "prompt_cache_key": conversation}
        headers = {"session_id": conversation, "x-codex-turn-metadata": json.dumps({"turn_id": dice.randbytes(8).hex(), "turn": turn})}
        yield Request("/v1/responses", headers, body)
        call_id = f"call_{dice.randbytes(8).hex()}"
        items.append({"type": "reasoning", "id": f"rs_{call_id}", "summary": [], "encrypted_content": dice.randbytes(200).hex()})
        arguments = json.dumps({"command": prose(dice, 20)})
        items.append({"type": "function_call", "name": "tool_3", "arguments": arguments, "call_id": call_id, "status": "completed"})
        items.append({"type": "function_call_output", "call_id": call_id, "output": prose(dice, num_chars // 50)})


AGENTS: dict[str, Callable[[int, int, int, str], Session]] = {"claude-code": claude_code, "codex": codex}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _cached(block: dict[str, Any]) -> dict[str, Any]:
    return {**block, "cache_control": {"type": "ephemeral"}}


def _said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def usage_of(stream: str) -> tuple[int, int]:
    """Return the number of prompt tokens and how many of them were cached, as the events of a stream say."""
    events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]
    if events[-1]["type"].startswith("response."):
        usage = events[-1]["response"]["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    usage = {name: value for event in events for name, value in (event.get("message") or event).get("usage", {}).items()}
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
