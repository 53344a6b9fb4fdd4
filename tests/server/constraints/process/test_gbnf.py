"""Grammars in GBNF match the texts that llama.cpp lets a model write for them."""

from __future__ import annotations

import random
from itertools import product

import pytest
from llguidance import LLMatcher, LLParserLimits

from server.constraints.process.gbnf import lark_of_gbnf
from server.constraints.process.terminals import ALL, NONE, Bytes
from server.messages import Constraint, ConstraintKind
from tests.server.text.vocabulary import accepts, vocabulary

ARITHMETIC = r"""root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*"""  # an example of llama.cpp
JSON = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space
ws ::= | " " | "\n" [ \t]{0,20}
"""


# Rules are terminals where that is possible, or only characters are.
FORMS = pytest.mark.parametrize("beside", [NONE, ALL], ids=["terminals", "characters"])


def made(grammar: str, beside: Bytes, limits: LLParserLimits | None = None) -> LLMatcher:
    matcher = LLMatcher(vocabulary(), LLMatcher.grammar_from_lark(lark_of_gbnf(grammar, beside)), limits=limits)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


@FORMS
@pytest.mark.parametrize(
    ("grammar", "text", "allowed"),
    [
        ('root ::= name "x"\nname ::= [a-z]+', "abx", True),
        ('root ::= name "x"\nname ::= [a-z]+', "ab", False),
        ('root ::= name "x"\nname ::= ("ab")+', "ababx", True),
        ('root ::= "if" "(" | [a-z]+', "ifx", True),
        ('root ::= "ab" "d" | [a-z] "bc"', "abc", True),
        (ARITHMETIC, "1+2=3\n", True),
        (ARITHMETIC, "(a1 *7 )= 9 \n\n2=b\n", True),
        (ARITHMETIC, "1+=3\n", False),
        (JSON, '{"a": [1, -2.5e3, "x\\n\\u00e9", {"b": null}]}', True),
        (JSON, '{"a": 01}', False),
        (r'root ::= "\u00e9\U0001F600\x41\[\]\"\\\t"', 'é😀A[]"\\\t', True),
        (r"root ::= [\u00e0-\u00ff]+", "éà", True),
        (r"root ::= [\u00e0-\u00ff]+", "e", False),
        (r"root ::= [\x41-\x43\]^&~|/-]+", "AC]^&~|/-", True),
        ("root ::= [^a-c]", "d", True),
        ("root ::= [^a-c]", "b", False),
        ("root ::= .+", "a\n", True),
        ('root ::= start\nstart ::= "a"', "a", True),
        ("root ::= fooBar foo-bar foo_bar\nfooBar ::= [a]\nfoo-bar ::= [b]\nfoo_bar ::= [c]", "abc", True),
        ('root ::= "a"? ""', "", True),
        ("root ::= ([0-9a-f]{2})+", "a0ff", True),
        ("root ::= ([0-9a-f]{2})+", "a0f", False),
        ('root ::= ("a"{2})* "b"', "aaaab", True),
        ('root ::= ("a"{2})* "b"', "aaab", False),
        ('root ::= "x" "a"{0} "b"', "xb", True),
        ('root ::= "x" "a"{0} "b"', "xab", False),
        ('root ::= a+\na ::= "x" | "y" a* "z"', "xyxyzzx", True),
        ('root ::= a*\na ::= ("x" b*)? | "y"\nb ::= a', "xyxx", True),
        ('root ::= a* "!"\na ::= a*', "!", True),
        ('root ::= a*\na ::= a* | "x"', "xx", True),
        ('root ::= "x" root | "y" "z" root | "b"', "xyzxb", True),
        ('root ::= "x" root | "y" "z" root | "b"', "xyxb", False),
        ('root ::= "x" root | "y" "z" root | "b"', "xx", False),
        ('root ::= "(" ws ")"\nws ::= ([ \\n] ws)?', "( \n )", True),
        ('root ::= "(" list ")"\nlist ::= item | item "," list\nitem ::= "a" | "(" list ")"', "(a,(a,a),a)", True),
        ('root ::= "(" list ")"\nlist ::= item | item "," list\nitem ::= "a" | "(" list ")"', "(a,(a,),a)", False),
        ('root ::= a\na ::= a a | "x"', "xxx", True),
        ('root ::= a? "y"\na ::= "x" a', "y", True),
    ],
)
def test_a_grammar_allows_its_texts(grammar, text, allowed, beside):
    matcher, ids = made(grammar, beside), [*text.encode()]
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is allowed


@pytest.mark.parametrize(
    ("grammar", "complaint"),
    [
        ("root ::= other", "other is not defined"),
        ('other ::= "a"', "no rule is called root"),
        ('root ::= "a', "Unexpected end"),
        (r'root ::= "\u12"', "Invalid escape"),
        (r'root ::= "\UFFFFFFFF"', "too large"),
        ("root ::= []", "Expected a character"),
        ('root ::= "a"{2,0} "b"', "at least 2, the smaller number first"),
        ('root ::= ("a"?){3,1}', "at least 3, the smaller number first"),
        ("", "no rule is called root"),
    ],
)
def test_a_grammar_that_is_not_valid_is_refused(grammar, complaint):
    with pytest.raises(ValueError, match=complaint):
        accepts(Constraint(ConstraintKind.GRAMMAR, grammar), "a")


@pytest.mark.parametrize(
    "grammar", ['start: "a"', '%llguidance {}\n\nstart: "a"', '  start : "a"', '?start: "a"', 'start[max_tokens=9]: "a"']
)
def test_lark_is_taken_as_it_is(grammar):
    assert accepts(Constraint(ConstraintKind.GRAMMAR, grammar), "a")


LONGEST = 5  # letters of the texts that are tried
Texts = frozenset[str]


def joined(first: Texts, second: Texts) -> Texts:
    return frozenset(one + other for one in first for other in second if len(one + other) <= LONGEST)


def repeated(texts: Texts, least: int, most: int) -> Texts:
    """Return the texts that are `least` to `most` texts in a row, up to LONGEST letters."""
    row, found = frozenset([""]), frozenset[str]()
    for number in range(most + 1):
        found |= row if number >= least else frozenset()
        row = joined(row, texts)
    return found


ENDLESS = 3 * LONGEST
TIMES = {
    "*": (0, ENDLESS),
    "+": (1, ENDLESS),
    "?": (0, 1),
    "{2}": (2, 2),
    "{1,3}": (1, 3),
    "{0,2}": (0, 2),
    "{2,3}": (2, 3),
    "{2,}": (2, ENDLESS),
}


def written(numbers: random.Random, depth: int, rules: list[Texts]) -> tuple[str, Texts]:
    """Return a random expression in GBNF, and its texts. `rules` has the texts of the rules r0, r1, ..."""
    kind = numbers.randrange(7 if depth else 2)
    if kind == 0 and rules:
        at = numbers.randrange(len(rules))
        return f"r{at}", rules[at]
    if kind < 2:
        letter = numbers.choice("ab")
        return f'"{letter}"', frozenset([letter])
    (gbnf, texts), (other, others) = (written(numbers, depth - 1, rules) for _ in range(2))
    if kind == 2:
        return f"({gbnf} | {other})", texts | others
    if kind == 3:
        return f"({gbnf} {other})", joined(texts, others)
    times = numbers.choice(list(TIMES))
    return f"({gbnf}){times}", repeated(texts, *TIMES[times])


@FORMS
@pytest.mark.parametrize("seed", range(100))
def test_repetitions_in_repetitions_mean_what_they_say(seed, beside):
    """Repetitions are flattened. This changes none of the texts that a grammar allows."""
    numbers, rules, lines = random.Random(seed), list[Texts](), list[str]()
    for number in range(2):
        gbnf, texts = written(numbers, 3, rules)
        lines.append(f"r{number} ::= {gbnf}")
        rules.append(texts)
    gbnf, texts = written(numbers, 4, rules)
    grammar = "\n".join([f"root ::= {gbnf}", *lines])
    first = made(grammar, beside)
    for length in range(LONGEST + 1):
        for letters in map("".join, product("ab", repeat=length)):
            matcher = first.deep_copy()
            is_allowed = matcher.try_consume_tokens([*letters.encode()]) == length and matcher.is_accepting()
            assert is_allowed == (letters in texts), (grammar, letters)


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= ([a-z]*)*",
        "root ::= (([a-z]+)+)+",
        "root ::= ws*\nws ::= [a-z]*",
        'root ::= ([a-z]* | "1")*',
        "root ::= ([a-z] | ws)*\nws ::= [a-z]*",
        "root ::= ([a-z]* [0-9]*)+",
        "root ::= [a-z] root | [a-z]",
        "root ::= ws\nws ::= ([a-z] ws)?",
        'root ::= word*\nword ::= | [a-z] word | "1"',
    ],
)
def test_the_work_of_nested_repetitions_does_not_grow_with_the_text(grammar):
    for beside in (NONE, ALL):
        follow_long_text(grammar, beside)


def follow_long_text(grammar: str, beside: Bytes) -> None:
    """Each way to divide the text would be an item of the parser. The limit on items is that of few ways."""
    matcher = made(grammar, beside, LLParserLimits(max_items_in_row=50))
    assert matcher.try_consume_tokens([*b"abc" * 100]) == 300, matcher.get_error()
    assert matcher.compute_bitmask() and not matcher.is_error(), matcher.get_error()


@pytest.mark.parametrize("space", ["[ ]*", '" "?', '| " "'])
def test_the_work_of_a_regular_expression_does_not_grow_with_the_text(space):
    """A word without white space may be divided into words in many ways."""
    follow_long_text(f"root ::= word (ws word)*\nword ::= [a-z]+\nws ::= {space}", NONE)
