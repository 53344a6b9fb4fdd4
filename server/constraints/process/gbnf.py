"""Translate GBNF, the EBNF of llama.cpp that vLLM and SGLang accept too, into Lark.

llguidance has such a translation, too, but only its parser of GBNF is used. llguidance's translation makes terminals of rules such as `name
::= [a-z]+`, and a terminal takes as many characters as it can. Then `name "x"` matches nothing, because the name takes the x. In the
translation below, most terminals are one character, so that the parser tries every way to divide a text, as llama.cpp does. Only rules for
which a single way is certain become terminals: see `terminals.py`. With a vocabulary of 150,000 tokens, a mask takes 6 ms of processor time
where characters are terminals, and 0.03 ms where rules are terminals.

Repetitions within repetitions are flattened: `(a*)*` becomes `a*`. Otherwise llguidance would try each way to divide a run of a's, and the
number of these ways grows with the text. A rule that ends with itself becomes a repetition: `x ::= "a" x | "b"` becomes `"a"* "b"`.
Otherwise, at the end of the text, the parser would complete the rule once for each "a".
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GbnfToLarkError,
    GrammarParser,
    LiteralNode,
    Position,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    SequenceNode,
)

from server.constraints.process.terminals import NONE, ROOT, Bytes, Characters, below, first_bytes, terminals_of

ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([\"\\\[\]nrt]))")
NAMED = {"n": "\n", "r": "\r", "t": "\t"}
ANY_CHARACTER = "(?s:.)"
LARK = re.compile(r"(?m)^\s*(%llguidance\b|\??start\s*(\[[^\]\n]*\]\s*)?:(?!:=))")


def is_lark(grammar: str) -> bool:
    """Return whether a grammar is written in Lark, not in GBNF: whether it has a rule called start, or a line that begins with
    `%llguidance`."""
    return LARK.search(grammar) is not None


def lark_of_gbnf(grammar: str, beside: Bytes = NONE) -> str:
    """Return a GBNF grammar as Lark. `beside` has the first bytes of what else may come where the text of the grammar may begin, such as
    the text that opens thoughts. Raise an exception if the grammar is not valid."""
    rules = rules_of(grammar)
    return "\n".join(["%llguidance {}", *_written(rules, terminals_of(rules, beside))])


def rules_of(grammar: str) -> dict[str, RuleNode]:
    """Return the rules of a GBNF grammar by name, with flat repetitions. Raise an exception if the grammar is not valid."""
    rules = _Parser().parse(grammar)
    if ROOT not in rules:
        raise ValueError("no rule is called root")
    for rule in rules.values():
        rule.comment = ""
        rule.alternatives = rule.alternatives.simplify()
    _Flattener(rules).run()
    for node in [node for rule in rules.values() for node in below(rule)]:
        if isinstance(node, RegexNode) and node.rx == ".":
            node.rx = ANY_CHARACTER
        elif isinstance(node, RuleRefNode):
            if node.name not in rules:
                raise ValueError(f"rule {node.name} is not defined")
            node.target = rules[node.name]
    return rules


def _written(rules: Mapping[str, RuleNode], terminals: set[str]) -> Iterator[str]:
    """Yield the rules in Lark. Rules that terminals refer to are written as terminals, too."""
    for number, rule in enumerate(rules.values()):
        rule.name = f"RULE_{number}"
    for name in _reached(rules, [name for name in rules if name in terminals]):
        yield str(rules[name])
    for name, rule in rules.items():
        rule.name = rule.name if name in terminals else rule.name.lower()
    if ROOT in terminals:
        yield f"start: {rules[ROOT].name}"
        return
    rules[ROOT].name = "start"
    for name in _reached(rules, {ROOT}, until=terminals):
        yield str(rules[name])


def _reached(rules: Mapping[str, RuleNode], names: Collection[str], until: Collection[str] = ()) -> list[str]:
    """Return the rules with these names, and all rules to which they refer, directly or through other rules. Leave out the rules `until`,
    and rules to which only those refer."""
    found, pending = dict[str, None](), list(names)
    while pending:
        name = pending.pop()
        if name not in found and name not in until:
            found[name] = None
            pending += [node.name for node in below(rules[name]) if isinstance(node, RuleRefNode)]
    return list(found)


class _Repetition(RepetitionNode):
    """A repetition that is written in parentheses within another repetition."""

    def is_atomic(self) -> bool:
        return False


class _Flattener:
    """Flattens the repetitions of a grammar in place."""

    def __init__(self, rules: dict[str, RuleNode]) -> None:
        """The rules that flattening needs are added to `rules`."""
        self._rules = rules
        self._may_be_empty: set[str] = set()  # names of rules that match the empty text
        self._added: dict[tuple[int, ...], str] = {}  # by the identities of parts: the name of the rule that has them as alternatives
        users: dict[str, list[str]] = {}  # by the name of a rule: the rules that refer to it
        for name, rule in rules.items():
            for node in below(rule):
                if isinstance(node, RuleRefNode):
                    users.setdefault(node.name, []).append(name)
        pending = list(rules)
        while pending:
            name = pending.pop()
            if name not in self._may_be_empty and self._matches_empty(rules[name].alternatives):
                self._may_be_empty.add(name)
                pending += users.get(name, ())

    def run(self) -> None:
        """Flatten all rules. The added rules share their nodes with the rules that were there before, so flattening those flattens the
        added ones, too."""
        rules = list(self._rules.items())
        for name, rule in rules:
            rule.alternatives = _without_end(name, rule.alternatives)
        for _, rule in rules:
            rule.alternatives = self._flat(rule.alternatives)

    def _flat(self, node: ASTNode) -> ASTNode:
        """Return a node that matches the same texts, with flattened repetitions. Nodes below it are changed in place."""
        match node:
            case SequenceNode(nodes) | AlternativeNode(nodes):
                nodes[:] = map(self._flat, nodes)
            case RepetitionNode(inner, least, most):
                node.node = self._flat(inner)
                return self._repeated(node.node, least, most)
            case _:
                pass
        return node

    def _repeated(self, node: ASTNode, least: int, most: int | None) -> ASTNode:
        """Return the repetition of a node, `least` to `most` times; `most` is None if there is no limit. If the node contains repetitions,
        they are merged with this one where the result matches the same texts."""
        if most == 0:
            return SequenceNode([])
        if most is None and least <= 1:
            parts = list({str(part): part for part in self._parts(node, set())}.values())
            if not parts:
                return SequenceNode([])
            return _Repetition(self._one_of(parts), 0 if self._matches_empty(node) else least, None)
        if least == most == 1:
            return node
        if isinstance(node, RepetitionNode) and _has_no_gaps(node, least, most):
            most = None if most is None or node.max_times is None else most * node.max_times
            return _Repetition(node.node, least * node.min_times, most)
        return _Repetition(node, least, most)

    def _one_of(self, parts: list[ASTNode]) -> ASTNode:
        """Return a node that matches one of the parts. Several parts become a rule of their own, because a part may belong to another rule,
        or may contain the repetition of these parts."""
        if len(parts) == 1 and isinstance(parts[0], LiteralNode | RegexNode | RuleRefNode):
            return parts[0]
        key = tuple(map(id, parts))
        if key not in self._added:
            # No other node is printed like this: a name in GBNF has no slash, and a sequence such as `parts /1/` has spaces.
            self._added[key] = name = f"parts/{len(self._rules)}"
            self._rules[name] = RuleNode(name, AlternativeNode(parts), "")
        return RuleRefNode(self._added[key])

    def _parts(self, node: ASTNode, seen: set[str]) -> list[ASTNode]:
        """Return nodes, none of which matches the empty text. An endless repetition of these nodes, in any order, matches the same texts as
        an endless repetition of `node`. `seen`: names of the rules whose parts were returned already."""
        match node:
            case AlternativeNode(nodes):
                return [part for one in nodes for part in self._parts(one, seen)]
            case SequenceNode(nodes) if all(map(self._matches_empty, nodes)):
                return [part for one in nodes for part in self._parts(one, seen)]
            case RepetitionNode(_, _, 0):
                return []
            case RepetitionNode(inner, least, _) if least <= 1 or self._matches_empty(inner):
                return self._parts(inner, seen)
            case RuleRefNode(name) if name in self._rules:
                if name in seen:
                    return []
                seen.add(name)
                body = self._rules[name].alternatives
                parts = self._parts(body, seen)
                own = body.alternatives if isinstance(body, AlternativeNode) else [body]
                is_plain = len(parts) == len(own) and all(part is one for part, one in zip(parts, own, strict=True))
                return [node] if is_plain else parts
            case _:
                return [node]

    def _matches_empty(self, node: ASTNode) -> bool:
        """Return whether a node matches the empty text."""
        match node:
            case SequenceNode(nodes):
                return all(map(self._matches_empty, nodes))
            case AlternativeNode(nodes):
                return any(map(self._matches_empty, nodes))
            case RepetitionNode(inner, least, _):
                return not least or self._matches_empty(inner)
            case RuleRefNode(name):
                return name in self._may_be_empty
            case _:
                return False


def _without_end(name: str, body: ASTNode) -> ASTNode:
    """Return a body for the rule `name` that does not end with the rule itself: the body `A | B R` of a rule R becomes `B* A`, and the body
    `(A | B R)?` becomes `B* A?`. Return a body of another form as it is."""
    if isinstance(body, RepetitionNode) and (body.min_times, body.max_times) == (0, 1):
        given = [*(body.node.alternatives if isinstance(body.node, AlternativeNode) else [body.node]), SequenceNode([])]
    else:
        given = body.alternatives if isinstance(body, AlternativeNode) else [body]
    again, last = list[ASTNode](), list[ASTNode]()
    for one in given:
        match one:
            case SequenceNode([*before, RuleRefNode(end)]) if before and end == name:
                again.append(SequenceNode(before))
            case _:
                last.append(one)
    if not again or not last:
        return body
    return SequenceNode([_Repetition(AlternativeNode(again), 0, None), AlternativeNode(last)])


def _has_no_gaps(inner: RepetitionNode, least: int, most: int | None) -> bool:
    """Return whether the repetition of `inner`, `least` to `most` times, is the same as one repetition of the node that `inner` repeats:
    whether every number of this node between the smallest and the largest is possible. In `(a{2})*`, odd numbers of `a` are not."""
    if inner.max_times is None:
        return least > 0 or inner.min_times <= 1
    # no number is left out between n and n + 1 times `inner`, for the smallest n and so for larger n
    return least == most or least * inner.max_times + 1 >= (least + 1) * inner.min_times


class _Parser(GrammarParser):
    """Reads all escapes of GBNF, and writes characters as Lark reads them."""

    def _parse_repetition(self, pos: Position, nodes: list[ASTNode]) -> Position:
        """Read the repetition of the last node, if there is one, and replace the node. Raise GbnfToLarkError if its larger number comes
        first."""
        pos = super()._parse_repetition(pos, nodes)
        if nodes and isinstance(found := nodes[-1], RepetitionNode):
            if found.max_times is not None and found.max_times < found.min_times:
                raise GbnfToLarkError(pos, f"Expected a repetition of at least {found.min_times}, the smaller number first")
            nodes[-1] = _Repetition(found.node, found.min_times, found.max_times)
        return pos

    def _parse_literal(self, pos: Position) -> tuple[ASTNode, Position]:
        """Read a literal. Return a sequence with a node for each character, and the position after it. Raise GbnfToLarkError if the literal
        is not closed, or has an unknown escape."""
        chars, pos = list[ASTNode](), pos.advance()
        while pos.current() != '"':
            char, pos = _character(pos)
            chars.append(LiteralNode(json.dumps(char)[1:-1]))
        return SequenceNode(chars), pos.advance()

    def _parse_char_class(self, pos: Position) -> tuple[ASTNode, Position]:
        """Read a class such as `[^a-z]`. Return it as a regular expression of ranges, and the position after it. Raise GbnfToLarkError if
        the class is empty, is not closed, or has an unknown escape."""
        is_inverted = pos.peek(2) == "[^"
        ranges, pos = list[tuple[int, int]](), pos.advance(2 if is_inverted else 1)
        while pos.current() != "]":
            first, pos = _character(pos)
            last = first
            if pos.current() == "-" and pos.peek(2) != "-]":
                last, pos = _character(pos.advance())
            ranges.append((ord(first), ord(last)))
        if not ranges:
            raise GbnfToLarkError(pos, "Expected a character")
        written = "".join(f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in ranges)
        return Characters(f"[{'^' if is_inverted else ''}{written}]", first_bytes(ranges, is_inverted=is_inverted)), pos.advance()


def _character(pos: Position) -> tuple[str, Position]:
    """Return the next character of a literal or of a class, and the position after it. Raise GbnfToLarkError if the text ends here, or has
    an unknown escape."""
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
