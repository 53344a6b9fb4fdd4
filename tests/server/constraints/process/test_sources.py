"""Every kind of constraint that a client can request is converted to an equivalent grammar, with and without a required text before it."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from server.constraints.process import sources
from server.constraints.process.sources import grammar_of
from server.constraints.process.wire import Source
from server.messages import Constraint, ConstraintKind
from server.text.dialects.thoughts import THINK

HEAD = 'start: "so " thought answer\nthought: /[.]*/'


@pytest.fixture(scope="module")
def vocabulary(tokenizer_json) -> LLTokenizer:
    return LLTokenizer(tokenizer_json)


@pytest.mark.parametrize("head", ["", HEAD])
@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("grammar", 'start: "yes" | "no"', "yes", "start"),
        ("grammar", 'root ::= "yes" | no\nno ::= "n" [op]', "no", "root"),
        ("grammar", 'start: "(" start ")" | "x"', "((x))", "((x)"),
        ("grammar", 'start: "(" start ")" | "x"', "(x)", "(so x)"),
        ("grammar", 'start : answer\nanswer: "yes" | thought // }\nthought: "{" /[}a]+/', "{a}", "{b}"),
        ("grammar", "start: WORD+\nWORD: /[a-z]+/\n%ignore /[ ]+/", "a b", "a  B"),
        ("regex", "a/b\\/c", "a/b/c", "a/b"),
        ("regex", "\\\\/b", "\\/b", "/b"),
        ("regex", "a\nb", "a\nb", "ab"),
        ("regex", "a\\\nb", "a\nb", "ab"),
        ("regex", "\\\\\nb", "\\\nb", "\nb"),
        ("choice", json.dumps(["a (b)", "naïve", "c/d\n"]), "c/d\n", "a b"),
        ("json_schema", '{"type": "integer"}', "7", '"7"'),
    ],
)
def test_it_means_what_the_client_wrote(vocabulary, kind, source, good, bad, head) -> None:
    before = "so " if head else ""
    for text, is_good in ((good, True), (bad, False)):
        matcher = LLMatcher(vocabulary, grammar_of(Source(kind, source, head)))
        assert not matcher.is_error(), matcher.get_error()
        ids = vocabulary.tokenize_str(before + text)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is is_good


def test_calls_beside_an_answer_in_gbnf_are_allowed(vocabulary) -> None:
    """One terminal for the answer would take the beginning of a call, and then need its own end."""
    head = 'start: (answer | calls)\ncalls: "<call>" /[a-z]+/ "</call>"'
    for text in ("<call>x</call>", "sure!"):
        matcher = LLMatcher(vocabulary, grammar_of(Source("grammar", 'root ::= [^!]+ "!"', head)))
        ids = vocabulary.tokenize_str(text)
        assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting(), (text, matcher.get_error())


def test_line_breaks_behind_thoughts_are_not_taken_for_the_answer(vocabulary) -> None:
    """One terminal for the answer would read them as its own beginning, and then need a b."""
    head = 'start: "t" gap answer\ngap: /\\n*/'
    matcher = LLMatcher(vocabulary, grammar_of(Source("grammar", r'root ::= "\nab" | "ac"', head)))
    ids = vocabulary.tokenize_str("t\nac")
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting(), matcher.get_error()


@pytest.mark.parametrize("text", ["<think>a\nb</think>\n\nx", "<think></think>x", "<x"])
def test_thoughts_that_begin_with_a_text_are_not_taken_for_the_answer(vocabulary, text: str) -> None:
    """One terminal for the answer would read the marker and the first line of the thoughts as the answer."""
    answer = Constraint(ConstraintKind.GRAMMAR, r"root ::= [^\n]+")
    head = THINK.before(answer, {}, open_already=False).head
    matcher = LLMatcher(vocabulary, grammar_of(Source("grammar", answer.source, head)))
    ids = vocabulary.tokenize_str(text)
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting(), matcher.get_error()


@pytest.mark.parametrize("head", ["", HEAD])
@pytest.mark.parametrize(
    ("kind", "source", "complaint"),
    [
        ("grammar", "root ::= (", "neither Lark"),
        ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "^the grammar nests too deeply to be read"),
        ("json_schema", "[1", "is not JSON"),
        ("json_schema", "[" * 100_000, "is not JSON"),
        ("json_schema", "[1]", "expected a JSON object"),
        ("choice", '"a"', "expected a JSON list"),
        ("choice", "[]", "expected a JSON list"),
    ],
)
def test_what_cannot_be_read_is_named(kind, source, complaint, head) -> None:
    with pytest.raises(ValueError, match=complaint):
        grammar_of(Source(kind, source, head))


def test_a_grammar_that_is_too_large_is_no_syntax_error(monkeypatch) -> None:
    """The client gets TOO_LARGE for a MemoryError, and its text says nothing."""

    def exhausted(grammar: str, beside: object) -> str:
        raise MemoryError

    monkeypatch.setattr(sources, "lark_of_gbnf", exhausted)
    with pytest.raises(MemoryError):
        grammar_of(Source("grammar", 'root ::= "a"', ""))
