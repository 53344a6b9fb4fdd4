"""Read the tools of an MCP server, and the results of their calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from server.mcp.http import header_value
from server.mcp.wire import Message

NAME = re.compile(r"[\w./-]{1,128}", re.ASCII)
MAX_DESCRIPTION = 16_384  # characters; longer descriptions are cut
MAX_SCHEMA_BYTES = 64 << 10
# An argument whose schema has this field is repeated in an HTTP header. The value of the field is the end of the header's name.
HEADER = "x-mcp-header"
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")  # what the field HEADER may contain


class InvalidTool(Exception):  # an entry in a server's list of tools is not valid
    pass


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool of a server."""

    name: str
    description: str
    schema: Mapping[str, Any]  # JSON schema of the arguments
    annotations: Mapping[str, Any] | None = None  # what the server says about the effects of calls
    headers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # header -> path of the argument that the header repeats

    @property
    def is_read_only(self) -> bool:
        """True if the server says that calls of the tool change nothing. The server may be wrong."""
        return self.annotations is not None and self.annotations.get("readOnlyHint") is True

    def headers_of(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """Return the headers that repeat arguments of a call. An argument that is absent, or is no text, integer or boolean, gets no
        header."""
        found = {header: _at(path, arguments) for header, path in self.headers.items()}
        return {header: header_value(_as_text(value)) for header, value in found.items() if isinstance(value, str | int | bool)}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool has returned, or its error, as text for the model."""

    text: str
    is_error: bool = False


def tool_of(described: object) -> McpTool:
    """Return the tool that an entry of `tools/list` describes. Raise InvalidTool if the entry is no object, if its name is not valid, if
    its schema is absent or too large, or if the schema asks for headers that are not allowed."""
    if not isinstance(described, dict):
        raise InvalidTool("an entry is no object")
    entry = cast("Message", described)
    name, schema, annotations = entry.get("name"), entry.get("inputSchema"), entry.get("annotations")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidTool(f"{name!r:.80} is no name of a tool")
    if not isinstance(schema, dict):
        raise InvalidTool(f"{name} has no inputSchema")
    if len(json.dumps(schema)) > MAX_SCHEMA_BYTES:
        raise InvalidTool(f"{name} has a schema of more than {MAX_SCHEMA_BYTES} bytes")
    shown = cast("Mapping[str, Any]", annotations) if isinstance(annotations, dict) else None
    text = entry.get("description") or entry.get("title") or ""
    return McpTool(name, str(text)[:MAX_DESCRIPTION], cast("Message", schema), shown, _headers(name, cast("Message", schema)))


def result_of_call(result: Message) -> ToolResult:
    """Return the result of `tools/call` as text for the model. Content without text is replaced by a text that says what it is. Structured
    content comes first if there is no block of text. A tool that asks for further input gives an error, because this client does not
    answer."""
    if result.get("resultType", "complete") != "complete":
        asked = result.get("inputRequests")
        wanted = ", ".join(sorted(_methods(asked))) or "more input"
        return ToolResult(f"the tool asks for {wanted}, which this client does not answer", is_error=True)
    content = result.get("content")
    blocks = cast("list[object]", content) if isinstance(content, list) else []
    texts = [_text_of(block) for block in blocks]
    has_text = any(isinstance(block, dict) and cast("Message", block).get("type") == "text" for block in blocks)
    if (structured := result.get("structuredContent")) is not None and not has_text:
        texts.insert(0, json.dumps(structured, ensure_ascii=False))
    return ToolResult("\n".join(texts), is_error=result.get("isError") is True)


def _text_of(block: object) -> str:
    """Return a block of content as text. A block without text is described in brackets."""
    if not isinstance(block, dict):
        return f"[content that is no object: {block!r:.80}]"
    one = cast("Message", block)
    match one.get("type"):
        case "text":
            return str(one.get("text", ""))
        case "image" | "audio" as kind:
            return f"[{kind}: {one.get('mimeType', 'of unknown type')!s:.80}, {_size(one.get('data'))} bytes]"
        case "resource_link":
            return f"[resource {one.get('name', '')!s:.200}: {one.get('uri', '')!s:.1000}]"
        case "resource":
            inner = one.get("resource")
            found = cast("Message", inner) if isinstance(inner, dict) else {}
            if isinstance(text := found.get("text"), str):
                return text
            kind = f"{found.get('mimeType', 'of unknown type')!s:.80}"
            return f"[resource {found.get('uri', '')!s:.1000}: {kind}, {_size(found.get('blob'))} bytes]"
        case kind:
            return f"[content of type {kind!r:.80}]"


def _size(data: object) -> int:
    """Return the number of bytes that a Base64 text stands for; 0 if `data` is no text."""
    return len(data.rstrip("=")) * 3 // 4 if isinstance(data, str) else 0


def _methods(asked: object) -> set[str]:
    """Return the methods of the requests in `asked`, which a server wants this client to answer before it gives a result."""
    requests = cast("Message", asked).values() if isinstance(asked, dict) else ()
    return {str(cast("Message", one).get("method", "input"))[:60] for one in requests if isinstance(one, dict)}


# --- headers that repeat arguments -----------------------------------------------------------------------------------------


def _headers(name: str, schema: Message) -> dict[str, tuple[str, ...]]:
    """Return the headers that the schema asks for. Raise InvalidTool if the name of a header is not valid or occurs twice, if its argument
    is no string, integer or boolean, or if a header is asked for in a place where that is not allowed."""
    found: dict[str, tuple[str, ...]] = {}
    num_reached = 0
    for path, part in _properties(schema, ()):
        if HEADER not in part:
            continue
        num_reached += 1
        asked = part[HEADER]
        if not isinstance(asked, str) or not TOKEN.fullmatch(asked) or part.get("type") not in ("string", "integer", "boolean"):
            raise InvalidTool(f"{name} has an invalid {HEADER} at {'.'.join(path)}")
        header = f"mcp-param-{asked.lower()}"
        if header in found:
            raise InvalidTool(f"{name} has {HEADER} {asked} twice")
        found[header] = path
    if json.dumps(schema).count(f'"{HEADER}":') != num_reached:
        raise InvalidTool(f"{name} has {HEADER} in a place where it is not allowed")
    return found


def _properties(schema: Message, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Message]]:
    """Yield the properties of an object's schema, also those of inner objects, each with its path."""
    inner = schema.get("properties")
    if isinstance(inner, dict):
        for key, part in cast("Message", inner).items():
            if isinstance(part, dict):
                yield (*path, key), cast("Message", part)
                yield from _properties(cast("Message", part), (*path, key))


def _at(path: tuple[str, ...], arguments: Mapping[str, Any]) -> object:
    """Return the argument at a path, or None if there is none."""
    value: object = arguments
    for key in path:
        value = cast("Message", value).get(key) if isinstance(value, dict) else None
    return value


def _as_text(value: str | int | bool) -> str:
    """Return an argument in the form that it has in a header."""
    return ("true" if value else "false") if isinstance(value, bool) else str(value)
