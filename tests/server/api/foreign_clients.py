"""Requests and model answers that the tests of third-party clients share."""

from __future__ import annotations

from server.models.state import ModelSpec

SAID = "Hello from the null device."
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"zebra": {"type": "integer"}}, "required": ["zebra"], "additionalProperties": False}
HERMES = (ModelSpec("null", "null", tool_parser="hermes", reasoning=True),)
HI = [{"role": "user", "content": "hi"}]
LONG = [{"role": "user", "content": "x" * 5000}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
