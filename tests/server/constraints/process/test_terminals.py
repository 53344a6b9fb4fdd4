"""Rules of GBNF grammars that are terminals: which they are, and that they allow the same tokens as characters do."""

from __future__ import annotations

import random

import pytest
from llguidance import LLMatcher

from server.constraints.process.gbnf import lark_of_gbnf, rules_of
from server.constraints.process.terminals import ALL, NONE, first_bytes, terminals_of
from tests.server.constraints.process.test_gbnf import ARITHMETIC, JSON
from tests.server.text.vocabulary import vocabulary

NESTED = 'root ::= "(" root ")" | '  # a grammar that is no regular expression


@pytest.mark.parametrize(
    ("grammar", "terminals"),
    [
        ('root ::= [a-z]* "a" rest?\nrest ::= " " [a-z]', {"root"}),
        ('root ::= "x" root | "b"', {"root"}),
        (f'{NESTED}text\ntext ::= "q" [a-p]* "q"', {"text"}),
        (f'{NESTED}text ","\ntext ::= "q" ([a-p] | "x" ("q" | "u" [a-f]{{4}}))* "q" " "?', {"text"}),
        (f"{NESTED}word\nword ::= [a-z]+", {"word"}),
        (f"{NESTED}word\nword ::= letter+\nletter ::= [a-z]", {"word"}),
        (f'{NESTED}word "a"\nword ::= [a-z]+', set()),  # the word would take the a
        (f"{NESTED}word word\nword ::= [a-z] [0-9]?", {"word"}),
        (f"{NESTED}word word\nword ::= [a-z] [a-z]?", set()),
        (f'{NESTED}word\nword ::= "a" ")"?', set()),
        (f'{NESTED}word "è"\nword ::= "é"+', set()),  # both characters begin with the same byte
        (f'{NESTED}text | "q("\ntext ::= "q" [a-p]* "q"', set()),  # two terminals would begin with q
        (f'{NESTED}text | word\ntext ::= "q" "a"\nword ::= "q" "b"', set()),
        (f'{NESTED}text | name\ntext ::= "q" "a"\nname ::= word\nword ::= "q" "b"', set()),
        (f'{NESTED}word\nword ::= "a"? "a"? "b"', {"word"}),  # a text of it can be read in two ways
        (f'{NESTED}row\nrow ::= word (space word)*\nword ::= [a-z]+\nspace ::= " "*', {"row"}),
        (f'{NESTED}row " ."\nrow ::= word (space word)*\nword ::= [a-z]+\nspace ::= " "*', set()),  # the row would take the space
        (f'{NESTED}word\nword ::= "a"*', set()),  # may be empty
        (JSON, {"string", "number"}),
        (ARITHMETIC, set()),
    ],
)
def test_which_rules_are_terminals(grammar: str, terminals: set[str]) -> None:
    assert terminals_of(rules_of(grammar)) == terminals


def test_a_rule_that_begins_like_what_stands_beside_the_grammar_is_no_terminal() -> None:
    rules = rules_of(f'{NESTED}text\ntext ::= "q" [a-p]* "q"')
    assert terminals_of(rules, frozenset(b"q")) == terminals_of(rules, ALL) == set()
    assert terminals_of(rules, frozenset(b"x")) == {"text"}


@pytest.mark.parametrize("last", ['"a"', '""'])
def test_an_expression_of_endless_size_is_not_written_out(last: str) -> None:
    """Each rule refers to the next one twice, and each of a long row of rules to the next one."""
    twice = [f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)]
    row = [f"s{i} ::= s{i + 1}" for i in range(2000)]
    rules = rules_of("\n".join([f'{NESTED}r0 "," | s0 ";"', *twice, f"r60 ::= {last}", *row, 's2000 ::= "b"+']))
    assert not terminals_of(rules) & {"r0", "s0"}


def test_the_first_bytes_of_characters() -> None:
    ranges = [(0x41, 0x43), (0xE9, 0xE9), (0x4E00, 0x4E01), (0x1F600, 0x1F600)]
    assert first_bytes(ranges) == {0x41, 0x42, 0x43, 0xC3, 0xE4, 0xF0}
    others = first_bytes([(0x30, 0x7F), (0x20, 0x22), (0x21, 0x2F)], is_inverted=True)
    assert others >= {0x1F, 0xC3, 0xF4} and not others & set(range(0x20, 0x80))


def inside(numbers: random.Random, depth: int) -> str:
    """Return a random expression that does not contain itself."""
    kind = numbers.randrange(7 if depth else 3)
    if kind == 0:
        return '"' + "".join(numbers.choices("abéè", k=numbers.randint(1, 2))) + '"'
    if kind == 1:
        return numbers.choice(["[ab]", "[^q()]", "[b-é]", "[a]", "[^aq]"])
    if kind == 2:
        return numbers.choice(["space", '"q"', "part"])
    first, second = (inside(numbers, depth - 1) for _ in range(2))
    if kind in (3, 4):
        return f"{first} {second}"
    return f"({first} | {second})" if kind == 5 else f"({first})" + numbers.choice(["*", "+", "?", "{2}", "{1,3}"])


def around(numbers: random.Random, depth: int) -> str:
    """Return a random expression that may contain the whole grammar."""
    kind = numbers.randrange(8 if depth else 2)
    if kind == 0:
        return numbers.choice(["text", "text", "word", "space", "root"])
    if kind == 1:
        return numbers.choice(['"("', '")"', '"x"', '"e"', "text"])
    first, second = (around(numbers, depth - 1) for _ in range(2))
    if kind < 5:
        return f"{first} {second}"
    return f"({first} | {second})" if kind < 7 else f"({first})" + numbers.choice(["*", "+", "?", "{2}"])


def random_grammar(numbers: random.Random) -> str:
    ends, spaces = ['"q"', '"q" space', "[ab]", '"qq"'], ['" "?', '" "*', '| "x"', '" " | "e"']
    words = [f'"b" {inside(numbers, 2)}', inside(numbers, 2), '"é" part', '"u" [a-b]+ "q"?']
    return f"""root ::= "(" root ")" | {around(numbers, 3)}
text ::= "q" ({inside(numbers, 2)})* {numbers.choice(ends)}
word ::= {numbers.choice(words)}
part ::= {numbers.choice(["[ab]", '"a" "b"', '"a"+'])}
space ::= {numbers.choice(spaces)}"""


def state_of(matcher: LLMatcher) -> tuple[bytes, bool, bool]:
    return matcher.compute_bitmask(), matcher.is_accepting(), matcher.is_error()


@pytest.mark.parametrize("seed", range(60))
def test_terminals_allow_the_tokens_that_characters_allow(seed: int) -> None:
    numbers = random.Random(seed)
    while not terminals_of(rules_of(grammar := random_grammar(numbers))):
        pass
    larks = (lark_of_gbnf(grammar, beside) for beside in (NONE, ALL))
    pending = [(b"", *(LLMatcher(vocabulary(), LLMatcher.grammar_from_lark(lark)) for lark in larks))]
    for _ in range(60):
        text, one, other = pending.pop(numbers.randrange(len(pending)))
        assert state_of(one) == state_of(other), (grammar, text)
        for byte in "abexqu() é".encode() + "è".encode()[1:] if len(text) < 9 else b"":
            first, second = one.deep_copy(), other.deep_copy()
            taken = first.try_consume_tokens([byte])
            assert taken == second.try_consume_tokens([byte]), (grammar, text, byte)
            if taken:
                pending.append((text + bytes([byte]), first, second))
        if not pending:
            break
