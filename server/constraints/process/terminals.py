"""Find the rules of a GBNF grammar that may be terminals. llguidance follows a terminal by an automaton, which is much faster than its
parser.

A terminal takes as many characters as it can, and never gives one back. So a rule that does not contain itself becomes a terminal only if
the grammar still allows the same texts, which two conditions ensure:

- No other terminal begins with the same byte, so the first byte decides which terminal is read.
- A text of the rule never stands before a character that would continue it to a longer text of the rule. For example, a text in quotes ends
  at the second quote, whatever follows. But `[a-z]+` must not stand before a letter. No text follows the whole grammar, so the rule `root`
  always fulfils this condition.

Of a character, only the first byte of its UTF-8 encoding is considered. So some rules that could be terminals are not recognised.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from llguidance.gbnf_to_lark import AlternativeNode, ASTNode, LiteralNode, RegexNode, RepetitionNode, RuleNode, RuleRefNode, SequenceNode

Bytes = frozenset[int]
Rules = Mapping[str, RuleNode]

ROOT = "root"
NONE: Bytes = frozenset()
ALL: Bytes = frozenset(range(256))
LAST_CODE = 0x10FFFF
MOST_ROUNDS = 50  # after so many rounds of rejections, no rule becomes a terminal
# Limits on the steps in which the expression of one rule is examined, on the steps for all rules together, and on the depth of an
# expression.
MOST_STEPS, MOST_STEPS_TOGETHER, MOST_LEVELS = 20_000, 100_000, 50


@dataclass
class Characters(RegexNode):
    """A class of characters, with the first bytes of their encodings."""

    first: Bytes = NONE


def first_bytes(ranges: Iterable[tuple[int, int]], *, is_inverted: bool = False) -> Bytes:
    """Return the first bytes of the characters in these ranges of code points or, if `is_inverted`, of all other characters."""
    pairs = sorted(ranges)
    if is_inverted:
        begin, others = 0, list[tuple[int, int]]()
        for low, high in pairs:
            others.append((begin, low - 1))
            begin = max(begin, high + 1)
        pairs = [*others, (begin, LAST_CODE)]
    return frozenset(byte for low, high in pairs if low <= high for byte in range(_first_byte(low), _first_byte(high) + 1))


def _first_byte(code: int) -> int:
    for end, mark, shift in ((0x80, 0, 0), (0x800, 0xC0, 6), (0x10000, 0xE0, 12)):
        if code < end:
            return mark | code >> shift
    return 0xF0 | code >> 18


def below(node: ASTNode) -> Iterator[ASTNode]:
    """Yield all nodes below a node."""
    for child in node.children():
        yield child
        yield from below(child)


def terminals_of(rules: Rules, beside: Bytes = NONE) -> set[str]:
    """Return the names of the rules that become terminals. Every rule that is referred to must be defined. `beside` has the first bytes of
    what else may come where the text of the grammar may begin, such as the text that opens thoughts."""
    facts, crowded = _Facts(rules), set[str]()
    for _ in range(MOST_ROUNDS):
        characters, found = _outermost(rules, facts, crowded)
        taken = Counter(byte for name in found for byte in facts.first[name])
        taken.update(characters | beside)
        more = {name for name in found if any(taken[byte] > 1 for byte in facts.first[name])}
        if not more:
            return found
        crowded |= more
    return set()


def _outermost(rules: Rules, facts: _Facts, crowded: set[str]) -> tuple[Bytes, set[str]]:
    """Return two sets: the first bytes of all characters that the grammar reads outside of terminals, and its terminals, which are the
    outermost rules that may be terminals. The rules `crowded` must not be terminals, because another terminal or character begins with the
    same byte."""
    characters, found, reached, pending = set[int](), set[str](), {ROOT}, [ROOT]
    while pending:
        if (name := pending.pop()) not in crowded and facts.may_be_terminal(name):
            found.add(name)
            continue
        for node in below(rules[name]):
            if isinstance(node, RuleRefNode) and node.name not in reached:
                reached.add(node.name)
                pending.append(node.name)
            characters |= _bytes_of(node)
    return frozenset(characters), found


def _bytes_of(node: ASTNode) -> Bytes:
    """Return the first bytes of the characters that a node itself matches."""
    match node:
        case LiteralNode(value):
            return frozenset([_first_byte(ord(json.loads(f'"{value}"')))])
        case Characters(first=first):
            return first
        case RegexNode():
            return ALL
        case _:
            return NONE


class _Facts:
    """Facts about the rules of a grammar."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._may_be_empty: set[str] = set()
        self.first = dict.fromkeys(rules, NONE)  # the bytes with which the texts of a rule begin
        self._after = dict.fromkeys(rules, NONE)  # the bytes that may follow the texts of a rule
        self._regular: set[str] = set()  # the rules that contain no rule which contains itself
        self._answers: dict[str, bool] = {}
        self._has_grown = False  # something was added to `_after`
        self._num_steps = 0  # number of steps in which rules were examined
        uses = {name: {node.name for node in below(rule) if isinstance(node, RuleRefNode)} for name, rule in rules.items()}
        users: dict[str, list[str]] = {name: [] for name in rules}
        for name, used in uses.items():
            for one in used:
                users[one].append(name)
        self._until_stable(self._add_first, users)
        self._until_stable(self._add_after_rules, uses)
        self._until_stable(lambda name: uses[name] <= self._regular and self._add_regular(name), users)

    def may_be_terminal(self, name: str) -> bool:
        """Return whether a rule contains no rule that contains itself, and no text of the rule stands before a character that would
        continue it to a longer one. Return False if that is not certain, and for a rule that matches the empty text, unless it is the whole
        grammar."""
        if name not in self._answers:
            self._answers[name] = name in self._regular and self._ends_by_itself(name)
        return self._answers[name]

    def _ends_by_itself(self, name: str) -> bool:
        if not self._after[name]:
            return name == ROOT or name not in self._may_be_empty
        if name in self._may_be_empty or self._num_steps > MOST_STEPS_TOGETHER:
            return False
        expression = _Expression(self._rules)
        try:
            return self._after[name].isdisjoint(expression.continuing(expression.add(self._rules[name].alternatives)))
        except _TooLarge:
            return False
        finally:
            self._num_steps += expression.num_steps

    def _until_stable(self, add: Callable[[str], bool], dependent: Mapping[str, Iterable[str]]) -> None:
        """Call `add` for all rules, and again for the rules that depend on a rule for which it has added something."""
        pending = dict.fromkeys(self._rules)
        while pending:
            name, _ = pending.popitem()
            if add(name):
                pending |= dict.fromkeys(dependent[name])

    def _add_regular(self, name: str) -> bool:
        if name in self._regular:
            return False
        self._regular.add(name)
        return True

    def _add_first(self, name: str) -> bool:
        """Add to the facts which bytes begin the texts of a rule, and whether the rule matches the empty text, as far as is known. Return
        whether this adds anything."""
        body, before = self._rules[name].alternatives, (self.first[name], name in self._may_be_empty)
        self.first[name] |= self._first(body)
        if self._is_empty(body):
            self._may_be_empty.add(name)
        return before != (self.first[name], name in self._may_be_empty)

    def _add_after_rules(self, name: str) -> bool:
        """Add the bytes that may follow the rules to which a rule refers. Return whether this adds any."""
        self._has_grown = False
        self._add_after(self._rules[name].alternatives, self._after[name])
        return self._has_grown

    def _first(self, node: ASTNode) -> Bytes:
        """Return the bytes with which the texts of a node begin, as far as they are known."""
        match node:
            case RuleRefNode(name):
                return self.first[name]
            case SequenceNode(nodes):
                found = NONE
                for one in nodes:
                    found |= self._first(one)
                    if not self._is_empty(one):
                        break
                return found
            case AlternativeNode(nodes):
                return NONE.union(*map(self._first, nodes))
            case RepetitionNode(inner):
                return self._first(inner)
            case _:
                return _bytes_of(node)

    def _is_empty(self, node: ASTNode) -> bool:
        """Return whether a node matches the empty text, as far as that is known."""
        match node:
            case RuleRefNode(name):
                return name in self._may_be_empty
            case SequenceNode(nodes):
                return all(map(self._is_empty, nodes))
            case AlternativeNode(nodes):
                return any(map(self._is_empty, nodes))
            case RepetitionNode(inner, least, _):
                return not least or self._is_empty(inner)
            case _:
                return False

    def _add_after(self, node: ASTNode, after: Bytes) -> None:
        """Add to the rules below a node the bytes that may follow them, if the bytes `after` may follow the node."""
        match node:
            case RuleRefNode(name):
                self._has_grown |= not after <= self._after[name]
                self._after[name] |= after
            case SequenceNode(nodes):
                for one in reversed(nodes):
                    self._add_after(one, after)
                    after = self._first(one) | (after if self._is_empty(one) else NONE)
            case AlternativeNode(nodes):
                for one in nodes:
                    self._add_after(one, after)
            case RepetitionNode(inner, _, most):
                self._add_after(inner, after if most == 1 else after | self._first(inner))
            case _:
                pass


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an expression: whether it may be empty, and the places of its first and of its last characters."""

    is_empty: bool
    begins: frozenset[int]
    ends: frozenset[int]


class _TooLarge(Exception):
    """Raised if an expression exceeds a limit."""


class _Expression:
    """The expression of a regular rule, which contains no rule that contains itself. Rules to which it refers are written out in the
    expression. Each repetition is written out as often as it must occur; if it may occur more often, it counts as endless. A place is a
    character, or a class of characters, in this expression."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._level = 0
        self.num_steps = 0
        self.bytes: list[Bytes] = []  # by place: the first bytes of its characters
        self.next: list[set[int]] = []  # by place: the places of the characters that may follow

    def add(self, node: ASTNode) -> _Part:
        """Add a node. Raise _TooLarge if the expression exceeds a limit."""
        self._step(1)
        if self._level > MOST_LEVELS:
            raise _TooLarge
        self._level += 1
        part = self._added(node)
        self._level -= 1
        return part

    def _added(self, node: ASTNode) -> _Part:
        match node:
            case RuleRefNode(name):
                return self.add(self._rules[name].alternatives)
            case SequenceNode(nodes):
                return self._row(map(self.add, nodes))
            case AlternativeNode(nodes):
                parts = list(map(self.add, nodes))
                begins, ends = (frozenset[int]().union(*places) for places in zip(*((p.begins, p.ends) for p in parts), strict=True))
                return _Part(any(p.is_empty for p in parts), begins, ends)
            case RepetitionNode(inner, least, most):
                *before, last = (self.add(inner) for _ in range(max(least, 1)))
                if most is None or most > max(least, 1):
                    self._join(last, last)
                row = self._row([*before, last])
                return _Part(row.is_empty or not least, row.begins, row.ends)
            case _:
                self.bytes.append(_bytes_of(node))
                self.next.append(set())
                place = frozenset([len(self.bytes) - 1])
                return _Part(False, place, place)

    def _row(self, parts: Iterable[_Part]) -> _Part:
        whole = _Part(True, frozenset(), frozenset())
        for part in parts:
            self._join(whole, part)
            begins = whole.begins | part.begins if whole.is_empty else whole.begins
            ends = whole.ends | part.ends if part.is_empty else part.ends
            whole = _Part(whole.is_empty and part.is_empty, begins, ends)
        return whole

    def _join(self, first: _Part, second: _Part) -> None:
        self._step(len(first.ends) * len(second.begins))
        for place in first.ends:
            self.next[place] |= second.begins

    def _step(self, count: int) -> None:
        self.num_steps += count
        if self.num_steps > MOST_STEPS:
            raise _TooLarge

    def continuing(self, whole: _Part) -> Bytes:
        """Return the first bytes of the characters that continue a text of the expression `whole` to a longer one. After one text, the next
        character may stand at several places. Raise _TooLarge if the expression exceeds a limit."""
        # A start is what is known after reading a text: whether the text may end there, and the places of the next character.
        found, starts = set[int](), [(False, whole.begins)]
        known = set(starts)
        while starts:
            may_end, places = starts.pop()
            led = dict[int, set[int]]()  # by the byte that is read next: the places to which it leads
            for place in places:
                self._step(len(self.bytes[place]))
                for byte in self.bytes[place]:
                    led.setdefault(byte, set()).add(place)
            if may_end:
                found.update(led)
            for reached in set(map(frozenset, led.values())):
                self._step(sum(len(self.next[place]) for place in reached))
                start = not reached.isdisjoint(whole.ends), frozenset[int]().union(*(self.next[place] for place in reached))
                if start not in known:
                    known.add(start)
                    starts.append(start)
        return frozenset(found)
