"""Translate a client's constraint into a grammar for llguidance. Parsing may take long, so the grammar's process does it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from llguidance import LLMatcher

from server.constraints.process.gbnf import is_lark, lark_of_gbnf
from server.constraints.process.terminals import ALL, NONE, Bytes
from server.constraints.process.wire import Source
from server.messages import ConstraintKind

# The beginning of a rule for calls, which may come in place of the answer: see `or_calls` in server/text/grammar.py.
CALLS = re.compile(r"(?m)^calls: ")
# The beginning of a head in which thoughts may precede the answer, up to the text that opens them. If a single token opens them, nothing
# matches: see `Thoughts.before` in server/text/dialects/thoughts.py.
OPENING = re.compile(r'start: \(("(?:[^"\\]|\\.)+")')
SCHEMA = re.compile(r"(?m)^(\w+: %json )(\{.*\})$")  # a rule that is a schema, as the dialects write it
TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
LITERAL_ENDS = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}


def grammar_of(source: Source) -> str:
    """Return the constraint as a grammar for llguidance. Raise ValueError, with a message for the client, if the constraint is faulty."""
    kind = ConstraintKind(source.kind)
    if source.head:
        return LLMatcher.grammar_from_lark(f"{source.head}\n{_answer_of(kind, source.source, _beside(source.head))}")
    match kind:
        case ConstraintKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(_schema(source.source))
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(source.source)
        case ConstraintKind.CHOICE:
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, _choices(source.source))))
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(_lark(source.source))


def without_faults(lark: str, fault_of: Callable[[str], str]) -> tuple[str, list[str]]:
    """Return a Lark grammar in which schemas with a fault are weakened, and return the faults. A weakened schema allows any value of the
    type that it names, or any value if it names no type. `fault_of` returns why a schema cannot be compiled, or an empty text if it can
    be."""
    faults: list[str] = []

    def weakened(found: re.Match[str]) -> str:
        """Return a rule, with a weaker schema if its own has a fault."""
        fault = fault_of(found[2])
        if not fault:
            return found[0]
        faults.append(fault)
        schema = json.loads(found[2])
        kept = {word: value for word, value in schema.items() if word == "type" and _names_types(value)}
        guided = json.dumps({word: schema[word] for word in ("x-guidance",) if word in schema} | kept)
        return found[1] + (json.dumps(kept) if fault_of(guided) else guided)

    return SCHEMA.sub(weakened, lark), faults


def _names_types(value: object) -> bool:
    """Return whether a value names one or more types of JSON."""
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _beside(head: str) -> Bytes:
    """Return the first bytes of what a head allows, besides the answer, where the answer may begin. If the head allows calls, return all
    bytes, because a call may begin with any byte. Otherwise return the first bytes of line breaks, which may follow thoughts, and of the
    text that opens thoughts."""
    if CALLS.search(head):
        return ALL
    found = OPENING.match(head)
    opening: str = json.loads(found[1]) if found else ""
    return frozenset(b"\n" + opening.encode()[:1])


def _answer_of(kind: ConstraintKind, source: str, beside: Bytes) -> str:
    """Return the rule `answer`, to which a head refers. A client's grammar is nested in this rule, so that the rules of the grammar may
    have any names. `beside` has the first bytes of what the head allows, besides the answer, where the answer may begin."""
    match kind:
        case ConstraintKind.JSON_SCHEMA:
            return f"answer: %json {_schema(source)}"
        case ConstraintKind.REGEX:
            return f"answer: EXPRESSION\nEXPRESSION: /{_without_ends(source)}/"
        case ConstraintKind.CHOICE:
            return "answer: " + " | ".join(json.dumps(choice) for choice in _choices(source))
        case ConstraintKind.GRAMMAR:
            return f"answer: %lark {{\n{_lark(source, beside)}\n}}"


def _lark(source: str, beside: Bytes = NONE) -> str:
    """Return a grammar as Lark; GBNF is translated. Raise ValueError if the grammar is neither Lark nor GBNF, or nests too deeply."""
    if is_lark(source):
        return source
    try:
        return lark_of_gbnf(source, beside)
    except MemoryError:  # the syntax tree exceeds the memory limit, but the syntax may be right
        raise
    except RecursionError:
        raise ValueError("the grammar nests too deeply to be read; write inner parts as rules of their own") from None
    except Exception as error:  # the parser may raise any exception
        raise ValueError(f"the grammar is neither Lark (no rule is called start) nor GBNF: {error}") from error


def _without_ends(expression: str) -> str:
    """Escape the slashes and the line ends of a regular expression, because they would end a Lark literal. An escaped slash stays as it is.
    A line end becomes a backslash and an n, whether it was escaped or not."""
    return re.sub(r"\\?\n|\\.|/", lambda found: LITERAL_ENDS.get(found[0], found[0]), expression)


def _schema(source: str) -> str:
    """Return a JSON schema. Raise ValueError if the schema is not a JSON object."""
    if not isinstance(_parsed(source), dict):
        raise ValueError(f"the schema is {source[:80]}, expected a JSON object")
    return source


def _choices(source: str) -> list[str]:
    """Return the choices. Raise ValueError if they are no list of texts, or if the list or a text is empty."""
    choices = _parsed(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError(f"the choices are {source[:80]}, expected a JSON list of non-empty strings")
    return choices


def _parsed(source: str) -> object:
    """Return the value of a JSON text. Raise ValueError if it is not valid."""
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source[:80]} is not JSON: {error}") from error
