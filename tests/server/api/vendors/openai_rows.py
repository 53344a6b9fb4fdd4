"""The fields of OpenAI's requests. The values are those that its document allows."""

from __future__ import annotations

from typing import Any

from tests.server.api.vendors.field import Row, honoured, no_effect, refused

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"name": "add", "description": "Add.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CUSTOM = {"type": "custom", "custom": {"name": "shell"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}}
TOOLS, STREAM, LOGPROBS = {"tools": [TOOL]}, {"stream": True}, {"logprobs": True}
HABIT = "sent by habit"

CALLER: dict[str, Row] = {
    "metadata": no_effect({"team": "a"}, {}, None, note=HABIT),
    "user": no_effect("somebody", note=HABIT),
    "safety_identifier": no_effect("somebody", note=HABIT),
    "prompt_cache_key": no_effect("a key", note="the prefix cache finds shared prefixes by itself"),
    "prompt_cache_retention": no_effect("in_memory", "24h", None, note="the prefix cache keeps pages while there is room"),
    "service_tier": no_effect("auto", "default", "flex", "priority", None, note=HABIT),
}
COMMON: dict[str, Row] = {
    "model": honoured("null"),
    "temperature": honoured(0.5, 0, 2, None),
    "top_p": honoured(0.5, 1, None),
    "stream": honoured(True, False, None),
    "stream_options": honoured(
        {"include_usage": True}, {"include_obfuscation": True}, None, beside=STREAM, note="`include_obfuscation` has no effect"
    ),
    "frequency_penalty": honoured(0.5, -2, None),
    "presence_penalty": honoured(0.5, 2, None),
    "logit_bias": honoured({"72": 5}, {}, None),
    "seed": honoured(7, -1, None),
    "stop": honoured("null", ["from", "device"], None),
    "max_tokens": honoured(5, None),
    "n": honoured(2, 1, None),
}

CHAT: dict[str, Row] = {
    **COMMON,
    **CALLER,
    "messages": honoured(
        [{"role": "developer", "content": "Be brief."}, *MESSAGES],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "me"}],
        [*MESSAGES, {"role": "assistant", "content": "hello", "refusal": None}, *MESSAGES],
        [
            *MESSAGES,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        refused=([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],),
        note="text, images for vision models, and audio for models that hear it; parts of other types are refused",
    ),
    "audio": refused({"voice": "alloy", "format": "wav"}, accepted=(None,)),
    "function_call": honoured("none", {"name": "add"}, "auto", beside={"functions": [FUNCTION]}),
    "functions": honoured([FUNCTION]),
    "logprobs": honoured(True, False, None),
    "max_completion_tokens": honoured(5, None),
    "modalities": no_effect(["text"], None, refused=(["text", "audio"],), note="`text` only; `audio` is refused"),
    "parallel_tool_calls": honoured(False, True, beside={**TOOLS, "tool_choice": "required"}),
    "prediction": no_effect({"type": "content", "content": "Hello"}, None, note="it could only make the answer faster"),
    "reasoning_effort": honoured("none", "low", "high", None, note="by the chat template, or as a [budget of thoughts](dialects.md)"),
    "response_format": honoured(
        {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    ),
    "store": no_effect(True, False, None, note="nothing is stored"),
    "tool_choice": honoured("none", "auto", "required", {"type": "function", "function": {"name": "add"}}, ALLOWED, beside=TOOLS),
    "tools": honoured([TOOL], [TOOL, CUSTOM], note="functions; tools of other types are named in `X-Ignored-Params`"),
    "top_logprobs": honoured(3, 0, beside=LOGPROBS),
    "verbosity": no_effect("low", "medium", "high", None, note=HABIT),
    "web_search_options": refused({"search_context_size": "low"}, accepted=({},)),
}

COMPLETIONS: dict[str, Row] = {
    **COMMON,
    "user": CALLER["user"],
    "prompt": honoured("hello", ["a", "b"], [72, 73], [[72], [73]]),
    "best_of": honoured(3, 1, None, note="with `stream`, a value above `n` is refused"),
    "echo": honoured(True, False, None),
    "logprobs": honoured(2, 0, None),
    "suffix": refused("the end", accepted=(None,), note="unless the model can fill in the middle"),
}

EMBEDDINGS: dict[str, Row] = {
    "input": honoured("hello", ["a", "b"], [72, 73], [[72], [73]]),
    "model": honoured("null"),
    "encoding_format": honoured("float", "base64"),
    "dimensions": honoured(4),
    "user": CALLER["user"],
}

RESPONSE_TOOL = {"type": "function", **FUNCTION, "strict": True}
SEARCH = {"type": "web_search"}
RESPONSE_TOOLS = {"tools": [RESPONSE_TOOL]}
ITEMS: list[Any] = [{"role": "user", "content": "hi"}]
TEXT_FORMAT = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
RETURNED = "only returned"
RESPONSES: dict[str, Row] = {
    **{name: COMMON[name] for name in ("model", "temperature", "top_p", "stream")},
    **{name: CALLER[name] for name in ("prompt_cache_retention", "service_tier")},
    **{name: honoured(*CALLER[name].accepted, note=RETURNED) for name in ("metadata", "user", "safety_identifier", "prompt_cache_key")},
    "background": honoured(True, False, None, note="together with `stream` it is refused"),
    "context_management": refused([{"type": "compaction"}], accepted=(None,)),
    "conversation": refused("conv_1", {"id": "conv_1"}, accepted=(None,)),
    "include": honoured(
        ["message.output_text.logprobs"],
        ["reasoning.encrypted_content"],
        [],
        None,
        note="other values than `message.output_text.logprobs` have no effect",
    ),
    "input": honoured(
        "hello",
        ITEMS,
        [{"type": "message", "role": "developer", "content": "Be brief."}, *ITEMS],
        [
            *ITEMS,
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
        refused=([*ITEMS, {"type": "image_generation_call", "id": "i", "status": "completed", "result": "aGk="}],),
        note="text, images, audio, reasoning, calls and their outputs, items about MCP servers, and references to stored items; "
        "other items are refused",
    ),
    "instructions": honoured("Be brief.", None),
    "max_output_tokens": honoured(16, None),
    "max_tool_calls": honoured(3, None, note="limits calls of tools of MCP servers"),
    "parallel_tool_calls": honoured(False, True, None, beside={**RESPONSE_TOOLS, "tool_choice": "required"}),
    "previous_response_id": honoured(None),
    "prompt": refused({"id": "pmpt_1"}),
    "reasoning": honoured(
        {"effort": "low"}, {"effort": "none"}, {"summary": "auto"}, None, note="`summary` is named in `X-Ignored-Params`"
    ),
    "store": honoured(False, True, None),
    "stream_options": no_effect({"include_obfuscation": True}, None, beside=STREAM),
    "text": honoured(
        {"format": TEXT_FORMAT},
        {"format": {"type": "text"}},
        {"format": {"type": "json_object"}},
        {"verbosity": "low"},
        note="`verbosity` has no effect",
    ),
    "tool_choice": honoured("none", "auto", "required", {"type": "function", "name": "add"}, beside=RESPONSE_TOOLS),
    "tools": honoured(
        [RESPONSE_TOOL],
        [RESPONSE_TOOL, SEARCH],
        refused=([{"type": "mcp", "server_label": "docs"}],),
        note="functions, and `mcp` where `mcp_servers` allows it; tools of other types are named in `X-Ignored-Params`",
    ),
    "top_logprobs": honoured(3, 0),
    "truncation": honoured("auto", "disabled", None),
}
IN_A_PROMPT = ("model", "input", "previous_response_id", "tools", "text", "reasoning", "instructions", "conversation", "tool_choice")
COUNTED = {name: RESPONSES[name] for name in (*IN_A_PROMPT, "parallel_tool_calls")} | {"truncation": honoured("auto", "disabled")}
BATCHES: dict[str, Row] = {
    "input_file_id": honoured(),
    "endpoint": honoured(
        "/v1/chat/completions",
        refused=("/v1/images/generations",),
        note="the paths of chat, completions, embeddings and responses; others are refused",
    ),
    "completion_window": honoured("24h"),
    "metadata": honoured({"a": "b"}, {}, note=RETURNED),
    "output_expires_after": no_effect(
        {"anchor": "created_at", "seconds": 3600},
        note="the setting `batch_store_s` says how long output files are kept; named in `X-Ignored-Params`",
    ),
}
ENDPOINTS: dict[str, dict[str, Row]] = {
    "POST /chat/completions": CHAT,
    "POST /completions": COMPLETIONS,
    "POST /embeddings": EMBEDDINGS,
    "POST /responses": RESPONSES,
    "POST /responses/input_tokens": COUNTED,
}
BASE: dict[str, dict[str, Any]] = {
    "POST /chat/completions": {"model": "null", "messages": MESSAGES},
    "POST /completions": {"model": "null", "prompt": "hi"},
    "POST /embeddings": {"model": "null", "input": "hi"},
    "POST /responses": {"model": "null", "input": "hi"},
    "POST /responses/input_tokens": {"model": "null", "input": "hi"},
}


def repaired(endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a drawn request without combinations that OpenAI documents as errors."""
    if "functions" in body:
        body = {name: value for name, value in body.items() if name not in ("tools", "tool_choice", "parallel_tool_calls")}
    if body.get("stream") is not True:
        body = {name: value for name, value in body.items() if name != "stream_options"}
    if endpoint == "POST /completions" and body.get("best_of"):
        body = {name: value for name, value in body.items() if name not in ("stream", "stream_options", "n")}
    if body.get("background"):
        body = {name: value for name, value in body.items() if name not in ("stream", "stream_options", "store")}
    if body.get("logprobs") in (False, None):
        body = {name: value for name, value in body.items() if not (name == "top_logprobs" and endpoint == "POST /chat/completions")}
    return body
