"""What the grammars of calls allow, the parsers read: calls of offered tools, with arguments that match the schemas. A random model writes
the calls from seeds."""

from __future__ import annotations

import json
import random

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from server.constraints.process.sources import grammar_of
from server.constraints.process.wire import Source
from server.messages import Constraint
from server.text.dialects.calls.tagged_calls import TaggedCalls
from server.text.dialects.format import AnswerRules, Format
from server.text.dialects.registry import WRITTEN
from server.text.dialects.tool import ToolSchema
from server.text.parts import CallArguments, CallStart
from tests.server.text.vocabulary import ByteVocabulary

PROPERTIES = {
    "text": {"type": "string"},
    "n": {"type": "integer", "minimum": -3, "maximum": 12},
    "x": {"type": "number"},
    "b": {"type": "boolean"},
    "e": {"enum": ["on", "off", None]},
    "l": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    "o": {"type": "object", "properties": {"k": {"type": "integer"}, "m": {"type": ["integer", "null"]}}, "required": ["k"]},
    "u": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "any": {},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["text", "n"], "additionalProperties": False}
TOOLS = [ToolSchema("get", SCHEMA), ToolSchema("get_all", {"type": "object", "additionalProperties": False}), ToolSchema("free")]
USUAL = frozenset(b'"}])>\n</,:abc e1')  # bytes that a model often writes; most of them end something
MOST_TOKENS = 1500


def written(constraint: Constraint, ids: dict[str, int], chance: random.Random) -> str | None:
    """Return a text that the constraint allows, from a vocabulary of bytes and markers; None if it did not end."""

    class Marked(ByteVocabulary):
        eos_token_id = 256 + len(ids)
        tokens = [bytes([i]) for i in range(256)] + [marker.encode() for marker in ids] + [b"<eos>"]
        special_token_ids = [*range(256, 257 + len(ids))]  # noqa: RUF012

    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(Marked())), grammar_of(Source(constraint.kind, constraint.source, constraint.head)))
    assert not matcher.is_error(), matcher.get_error()
    text = b""
    for _ in range(MOST_TOKENS):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")).tolist()
        if matcher.is_stopped() or Marked.eos_token_id in allowed:
            return text.decode(errors="replace")
        assert allowed, text
        usual = [token_id for token_id in allowed if token_id >= 256 or token_id in USUAL]
        token_id = chance.choice(usual if usual and chance.random() < 0.9 else allowed)
        assert matcher.consume_token(token_id)
        text += Marked.tokens[token_id]
    return None


def markers_of(form: Format) -> tuple[str, ...]:
    calls = form.call_syntax
    return calls.tokens if isinstance(calls, TaggedCalls) and calls.tokens else form.markers


@pytest.mark.parametrize("form", WRITTEN, ids=lambda form: form.name)
@pytest.mark.parametrize("are_tokens", [False, True])
def test_calls_that_the_grammar_allows_are_read(form, are_tokens):
    ids = {marker: 256 + number for number, marker in enumerate(markers_of(form))} if are_tokens else {}
    num_ended = 0
    for seed in range(10):
        constraint = form.forced_calls(TOOLS, ids, several=seed % 2 == 0)
        if (text := written(constraint, ids, random.Random(seed))) is None:
            continue
        num_ended += 1
        parser = AnswerRules(form, tools=TOOLS, demanded=True).parser()
        parts = [*parser.push(text), *parser.finish()]
        starts = [part for part in parts if isinstance(part, CallStart)]
        assert starts, text
        for start in starts:
            arguments = "".join(part.text for part in parts if isinstance(part, CallArguments) and part.index == start.index)
            schema = {tool.name: tool.parameters or {} for tool in TOOLS}[start.name]
            assert jsonschema_rs.is_valid(schema, json.loads(arguments)), text
    assert num_ended
