"""Constraints in the engine: answers match their constraint, forced tokens change no result, and invalid constraints are refused within the
time limit."""

from __future__ import annotations

import json
import random
import re
from contextlib import closing

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from server.constraints.compile_slots import CompileSlots
from server.constraints.compiler import ConstraintCompiler, ConstraintLimits
from server.constraints.matcher import ConstraintError
from server.engine.loop import Engine
from server.engine.overlap import OverlappedEngine
from server.messages import Constraint, ConstraintKind, FinishReason, SamplingParams, Submit
from tests.server.constraints.processes import allowed_by, answered, forced_by, mask_of, matcher_of

EOS, VOCAB = 0, 320
SCHEMA = Constraint(
    ConstraintKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {"colour": {"enum": ["green", "greek"]}, "name": {"type": "string", "maxLength": 6}},
            "required": ["colour", "name"],
            "additionalProperties": False,
        }
    ),
)
REGEX = Constraint(ConstraintKind.REGEX, "(the|of) [a-f]{3,9}!")
CHOICE = Constraint(ConstraintKind.CHOICE, '["colour", "a (b)", "naïve"]')
GRAMMAR = Constraint(ConstraintKind.GRAMMAR, 'start: "x" ("," "x")*')
MARKDOWN = r"""root ::= (line "\n\n")+
line ::= (word | code | bold) ((" " | "\n") (word | code | bold))*
code ::= "`" [^`\n]+ "`"
bold ::= "**" [^*\n]+ "**"
word ::= [^ \n*`]+"""
OBJECT = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "object"}')


def submit_of(constraint: Constraint, seed: int = 0, **params) -> Submit:
    return Submit(
        f"{constraint.kind}-{seed}",
        (5, 6, 7),
        SamplingParams(max_tokens=200, seed=seed, constraint=constraint, **params),
    )


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_texts_obey_their_constraint(rig, tokenizer, constraints, engine) -> None:
    submits = [submit_of(c, seed) for c in (SCHEMA, REGEX, CHOICE, GRAMMAR) for seed in range(5)]
    one = rig(engine, constraints=constraints)
    outcomes = one.run(submits)
    assert not one.failed
    for submit in submits:
        outcome = outcomes[submit.request_id, 0]
        text = tokenizer.decode(outcome.token_ids)
        constraint = submit.params.constraint
        if outcome.end[0] is FinishReason.LENGTH:
            assert constraint.kind is ConstraintKind.GRAMMAR, "only the grammar allows texts of any length"
        elif constraint is SCHEMA:
            assert json.loads(text)["colour"] in ("green", "greek")
        elif constraint is REGEX:
            assert re.fullmatch(REGEX.source, text)
        elif constraint is CHOICE:
            assert text in json.loads(CHOICE.source)
        else:
            assert re.fullmatch("x(,x)*", text)
        assert EOS not in outcome.token_ids


def test_an_object_is_json(rig, tokenizer, constraints) -> None:
    biased = SamplingParams(max_tokens=60, seed=4, constraint=OBJECT, logit_bias=((tokenizer.token_to_id("}"), 12.0),), temperature=0.5)
    outcome = rig(constraints=constraints).run([Submit("a", (5,), biased)])["a", 0]
    assert outcome.end[0] is FinishReason.STOP
    assert isinstance(json.loads(tokenizer.decode(outcome.token_ids)), dict)


def test_jumping_ahead_changes_no_token(rig, constraints) -> None:
    """The engine does not sample tokens that the constraint forces, unless the request asks for log-probabilities. Both ways give the same
    tokens, but without sampling forced tokens the engine needs fewer steps."""
    for seed in range(8):
        jumping, drawing = rig(constraints=constraints), rig(constraints=constraints)
        fast = jumping.run([submit_of(SCHEMA, seed)])
        slow = drawing.run([submit_of(SCHEMA, seed, logprobs=0)])
        assert [o.token_ids for o in fast.values()] == [o.token_ids for o in slow.values()]
        assert jumping.engine.timing.num_steps < drawing.engine.timing.num_steps


def test_a_forced_token_may_be_a_stop_token(rig, tokenizer, constraints) -> None:
    stop = tokenizer.token_to_id("name")
    for logprobs in (None, 0):
        one = rig(constraints=constraints)
        outcome = one.run([submit_of(SCHEMA, 1, logprobs=logprobs, stop_token_ids=(stop,))])["json_schema-1", 0]
        assert outcome.end == (FinishReason.STOP, stop)
        assert tokenizer.decode(outcome.token_ids).rstrip().endswith('"') and stop not in outcome.token_ids


def test_forced_tokens_are_the_only_ones_allowed(constraints) -> None:
    rng = np.random.default_rng(3)
    num_forced = 0
    for constraint in (SCHEMA, REGEX, CHOICE):
        for _ in range(10):
            looking, blind = (matcher_of(constraints, constraint) for _ in range(2))
            while not looking.is_complete:
                forced, allowed = forced_by(looking), allowed_by(mask_of(looking))
                assert np.array_equal(mask_of(looking), mask_of(blind)), "asking for forced tokens changed the mask"
                assert not forced or allowed == forced[:1]
                num_forced += len(forced)
                token_id = int(rng.choice(allowed))
                for matcher in (looking, blind):
                    matcher.advance([token_id])
                    answered(matcher)
    assert num_forced > 20


@pytest.mark.parametrize(
    ("constraint", "complaint"),
    [
        (Constraint(ConstraintKind.REGEX, "("), "unclosed group"),
        (Constraint(ConstraintKind.JSON_SCHEMA, "[1"), "is not JSON"),
        (Constraint(ConstraintKind.JSON_SCHEMA, "[1]"), "expected a JSON object"),
        (Constraint(ConstraintKind.JSON_SCHEMA, '{"type": 3}'), "cannot be compiled"),
        (Constraint(ConstraintKind.CHOICE, '"a"'), "expected a JSON list"),
        (Constraint(ConstraintKind.CHOICE, "[]"), "expected a JSON list"),
        (Constraint(ConstraintKind.GRAMMAR, "start: other"), "cannot be compiled"),
        (Constraint(ConstraintKind.REGEX, "a" * 300_000), "expected at most"),
    ],
)
def test_a_bad_constraint_fails_its_request_alone(rig, constraints, constraint, complaint) -> None:
    one = rig(constraints=constraints)
    one.run([submit_of(constraint), Submit("plain", (1, 2), SamplingParams(max_tokens=5, ignore_eos=True))])
    failed = one.failed[f"{constraint.kind}-0"]
    assert failed.code == "invalid_schema" and complaint in failed.message
    assert len(one.outcomes["plain", 0].token_ids) == 5


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_a_grammar_that_becomes_too_deep_fails_its_request_alone(rig, tokenizer_json, engine) -> None:
    """If a grammar exceeds the depth limit while tokens are decoded, its request fails and other requests finish. The test uses a
    right-recursive grammar, which nests deeper with every token."""
    constraints = ConstraintCompiler(tokenizer_json.encode, eos_ids=[EOS], vocab_size=VOCAB, limits=ConstraintLimits(row_items=30))
    deep = Constraint(ConstraintKind.GRAMMAR, 'start: r\nr: "a" r | "a"')
    one = rig(engine, constraints=constraints)
    outcomes = one.run([submit_of(deep, 1, banned_token_ids=(EOS,)), submit_of(CHOICE, 2)])
    assert set(one.failed) == {"grammar-1"}
    failed = one.failed["grammar-1"]
    assert failed.code == "invalid_schema" and "max is 30" in failed.message
    assert outcomes["choice-2", 0].end == (FinishReason.STOP, None)
    constraints.close()


def test_a_schema_may_have_a_thousand_optional_fields(constraints) -> None:
    fields = {f"field{number}": {"type": "integer"} for number in range(1000)}
    matcher = matcher_of(constraints, Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": fields})))
    for _ in range(5):
        matcher.advance(forced_by(matcher)[:1] or allowed_by(mask_of(matcher))[:1])
        answered(matcher)


def test_a_grammar_is_bounded_in_size(tokenizer_json) -> None:
    limits = ConstraintLimits(grammar_size=5, initial_fuel=100)
    compiler = ConstraintCompiler(tokenizer_json.encode, eos_ids=[EOS], vocab_size=VOCAB, limits=limits)
    with pytest.raises(ConstraintError, match="cannot be compiled"):
        matcher_of(compiler, SCHEMA)
    compiler.close()


def test_a_grammar_of_single_characters_suits_a_large_vocabulary() -> None:
    """Most terminals of a grammar in GBNF are single characters if a rule contains itself, so a mask follows each token by the letter. This
    one needs more than llguidance's own limit, 50,000 items. Without quotes in quotes, the grammar is one terminal, which needs few."""
    chance, alphabet = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"".join(chance.choices("abcdefghijklmnopqrstuvwxyz*`ĠĊ", k=chance.randint(2, 8))) for _ in range(30_000)}
    vocab = {token: index for index, token in enumerate(["<eos>", *alphabet, *sorted(words)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    markdown = Constraint(ConstraintKind.GRAMMAR, MARKDOWN.replace("root ::= (line", 'root ::= ("> " root | line'))

    def compiler(**limits: int) -> ConstraintCompiler:
        return ConstraintCompiler(tokenizer.to_str().encode, eos_ids=[EOS], vocab_size=len(vocab), limits=ConstraintLimits(**limits))

    with closing(compiler()) as usual, closing(compiler(step_items=50_000)) as strict:
        matcher = matcher_of(usual, markdown)
        matcher.advance([vocab["a"], vocab["b"]])
        assert vocab["c"] in allowed_by(mask_of(answered(matcher)))
        with pytest.raises(ConstraintError, match="Too many items"):
            matcher_of(strict, markdown)
        matcher_of(strict, Constraint(ConstraintKind.GRAMMAR, MARKDOWN))


def test_without_a_tokenizer_constraints_are_refused(rig) -> None:
    one = rig()
    one.run([submit_of(REGEX)])
    assert one.failed["regex-0"].code == "invalid_schema"


def test_a_failed_compilation_is_tried_again(constraints) -> None:
    bad = Constraint(ConstraintKind.REGEX, "(")
    for _ in range(2):
        with pytest.raises(ConstraintError):
            matcher_of(constraints, bad)


def test_compiled_constraints_are_shared_and_bounded(tokenizer_json) -> None:
    compiler = ConstraintCompiler(tokenizer_json.encode, eos_ids=[EOS], vocab_size=VOCAB, limits=ConstraintLimits(num_cached=2))
    first, second = (matcher_of(compiler, CHOICE) for _ in range(2))
    assert first._grammar is second._grammar
    first.advance(forced_by(first) or allowed_by(mask_of(first))[:1])
    assert not np.array_equal(mask_of(first), mask_of(second)), "each sequence has a matcher of its own"
    cached = []
    for constraint in (REGEX, GRAMMAR, CHOICE):
        matcher_of(compiler, constraint)
        cached.append([source.kind for _, source in compiler._cached])
    assert cached == [["choice", "regex"], ["regex", "grammar"], ["grammar", "choice"]]
    compiler.close()


def test_no_key_evicts_the_grammars_of_others_or_learns_of_them(tokenizer_json) -> None:
    """Keys share no compiled grammar, and a key that compiles many loses its own."""
    compiler = ConstraintCompiler(tokenizer_json.encode, eos_ids=[EOS], vocab_size=VOCAB, limits=ConstraintLimits(num_cached=3))
    victim = matcher_of(compiler, CHOICE, salt="victim:", key="victim")
    other = compiler.open(CHOICE, salt="other:", key="other")
    assert other._grammar is not victim._grammar and not other._grammar.is_compiled
    for num in range(5):
        matcher_of(compiler, Constraint(ConstraintKind.REGEX, f"a{{{num + 1}}}"), salt="other:", key="other")
    assert [salt for salt, _ in compiler._cached] == ["victim:", "other:", "other:"]
    assert compiler.open(CHOICE, salt="victim:", key="victim")._grammar.is_compiled
    compiler.close()


class Compiling:
    """A grammar that waits for a slot or has one."""


def test_keys_take_turns_at_compiling() -> None:
    """A key with many grammars delays another key by at most one of them, and not by its whole queue."""
    slots = CompileSlots(1)
    flood, late, third = [Compiling() for _ in range(5)], [Compiling() for _ in range(2)], Compiling()
    assert [slots.take(one, "flood") for one in flood] == [True, False, False, False, False]
    assert [slots.take(one, "late") for one in late] == [True, False], "a key that compiles nothing gets a further slot"
    assert not slots.take(third, "third")
    slots.give_back(flood[0])
    assert not slots.take(flood[1], "flood") and slots.take(third, "third"), "the key without a slot is first"
    slots.give_back(late[0])
    slots.give_back(third)
    assert slots.take(flood[1], "flood"), "the turn goes to the key that took a slot longest ago"
    assert slots.take(flood[1], "flood"), "a slot is kept until it is given back"


def test_a_key_that_no_longer_asks_holds_up_nobody() -> None:
    slots, first, gone, waits = CompileSlots(1), Compiling(), Compiling(), Compiling()
    assert slots.take(first, "a") and slots.take(waits, "b")
    assert not slots.take(gone, "c")
    slots.give_back(first)
    slots.give_back(waits)
    again = Compiling()
    assert not slots.take(again, "a"), "the other key is first"
    assert slots.take(again, "a"), "the other key did not ask in between"
