"""Translate GBNF, the EBNF of llama.cpp that vLLM and SGLang accept too, into Lark.

llguidance has a translation of its own, of which only the parser is used. It makes terminals of rules such as `[a-z]+`, and a terminal
takes as many characters as it can. Then `name "x"` matches nothing, because the name takes the x. Here each terminal is one character, so
that every way to divide a text is tried, as llama.cpp does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from llguidance.gbnf_to_lark import (
    ASTNode,
    GbnfToLarkError,
    GrammarParser,
    LiteralNode,
    Position,
    RegexNode,
    RuleRefNode,
    SequenceNode,
)

ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([\"\\\[\]nrt]))")
NAMED = {"n": "\n", "r": "\r", "t": "\t"}
ANY_CHARACTER = "(?s:.)"
LARK = re.compile(r"(?m)^\s*(%llguidance\b|\??start\s*(\[[^\]\n]*\]\s*)?:(?!:=))")


def is_lark(grammar: str) -> bool:
    """Return whether a grammar is written in Lark, not in GBNF."""
    return LARK.search(grammar) is not None


def lark_of_gbnf(grammar: str) -> str:
    """Return a GBNF grammar as Lark. Raise an exception if it is not valid."""
    rules = _Parser().parse(grammar)
    if "root" not in rules:
        raise ValueError("no rule is called root")
    for number, (name, rule) in enumerate(rules.items()):
        rule.comment, rule.name = "", "start" if name == "root" else f"rule_{number}"
        rule.alternatives = rule.alternatives.simplify()
    for node in [node for rule in rules.values() for node in _below(rule)]:
        if isinstance(node, RegexNode) and node.rx == ".":
            node.rx = ANY_CHARACTER
        elif isinstance(node, RuleRefNode):
            if node.name not in rules:
                raise ValueError(f"rule {node.name} is not defined")
            node.target = rules[node.name]
    return "\n".join(["%llguidance {}", *map(str, rules.values())])


def _below(node: ASTNode) -> Iterator[ASTNode]:
    """Yield all nodes below a node."""
    for child in node.children():
        yield child
        yield from _below(child)


class _Parser(GrammarParser):
    """Reads all escapes of GBNF, and writes characters as Lark reads them."""

    def _parse_literal(self, pos: Position) -> tuple[ASTNode, Position]:
        chars, pos = list[ASTNode](), pos.advance()
        while pos.current() != '"':
            char, pos = _character(pos)
            chars.append(LiteralNode(json.dumps(char)[1:-1]))
        return SequenceNode(chars), pos.advance()

    def _parse_char_class(self, pos: Position) -> tuple[ASTNode, Position]:
        is_inverted = pos.peek(2) == "[^"
        ranges, pos = "", pos.advance(2 if is_inverted else 1)
        while pos.current() != "]":
            first, pos = _character(pos)
            last = first
            if pos.current() == "-" and pos.peek(2) != "-]":
                last, pos = _character(pos.advance())
            ranges += f"\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}"
        if not ranges:
            raise GbnfToLarkError(pos, "Expected a character")
        return RegexNode(f"[{'^' if is_inverted else ''}{ranges}]"), pos.advance()


def _character(pos: Position) -> tuple[str, Position]:
    """Return the next character of a literal or of a class, and the position after it. Raise an exception if there is none."""
    char = pos.current()
    if not char:
        raise GbnfToLarkError(pos, "Unexpected end of input")
    if char != "\\":
        return char, pos.advance()
    found = ESCAPE.match(pos.text, pos.pos)
    if found is None:
        raise GbnfToLarkError(pos, "Invalid escape sequence")
    digits = found[1] or found[2] or found[3]
    return chr(int(digits, 16)) if digits else NAMED.get(found[4], found[4]), pos.advance(len(found[0]))
