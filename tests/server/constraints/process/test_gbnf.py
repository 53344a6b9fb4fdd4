"""Grammars in GBNF match the texts that llama.cpp lets a model write for them."""

from __future__ import annotations

import pytest

from server.messages import Constraint, ConstraintKind
from tests.server.text.vocabulary import accepts

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
    ],
)
def test_a_grammar_allows_its_texts(grammar, text, allowed):
    assert accepts(Constraint(ConstraintKind.GRAMMAR, grammar), text) is allowed


@pytest.mark.parametrize(
    ("grammar", "complaint"),
    [
        ("root ::= other", "other is not defined"),
        ('other ::= "a"', "no rule is called root"),
        ('root ::= "a', "Unexpected end"),
        (r'root ::= "\u12"', "Invalid escape"),
        (r'root ::= "\UFFFFFFFF"', "too large"),
        ("root ::= []", "Expected a character"),
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
