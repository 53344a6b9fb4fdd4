"""Constraints: what comes out obeys them, jumping ahead changes no token, and bad ones are refused in time."""

from __future__ import annotations

import json
import re
import threading
import time
from itertools import count

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from server.engine.constrain import ConstraintCompiler, ConstraintLimits
from server.engine.loop import Engine
from server.engine.matcher import ConstraintError
from server.engine.overlap import OverlappedEngine
from server.messages import Constraint, ConstraintKind, FinishReason, SamplingParams, Submit

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
            assert constraint.kind is ConstraintKind.GRAMMAR, "only this one has no longest text"
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
    """Log-probabilities make the engine draw every token, and change nothing else: a bias that bites nowhere does too."""
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
            looking, blind = (wait_for(constraints.compile(constraint)) for _ in range(2))
            while not looking.is_complete:
                forced = looking.forced()
                allowed = np.flatnonzero(np.unpackbits(looking.mask().view(np.uint8), bitorder="little"))
                assert np.array_equal(looking.mask(), blind.mask()), "asking for forced tokens changed the mask"
                assert not forced or list(allowed) == forced[:1]
                num_forced += len(forced)
                token_id = int(rng.choice(allowed))
                looking.advance([token_id])
                blind.advance([token_id])
    assert num_forced > 20


def wait_for(pending):
    while (matcher := pending.poll()) is None:
        time.sleep(0.001)
    return matcher


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
    """One that ends with itself grows with every token; that there is a limit shows only when a token is taken in."""
    constraints = ConstraintCompiler(tokenizer_json, eos_ids=[EOS], vocab_size=VOCAB, limits=ConstraintLimits(row_items=30))
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
    matcher = wait_for(constraints.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": fields}))))
    for _ in range(5):
        matcher.advance(matcher.forced()[:1] or [int(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little").argmax())])


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_a_grammar_that_takes_long_fails_its_request_alone(rig, constraints, monkeypatch, engine) -> None:
    """Masks of 0.3 s on a clock of the test's; each may take 0.02, and all of them 1 s more."""
    ticks = count()
    monkeypatch.setattr("server.engine.matcher.time.thread_time", lambda: 0.3 * next(ticks))
    heavy = Constraint(ConstraintKind.GRAMMAR, 'start: e\ne: e e | "a" | "b"')
    one = rig(engine, constraints=constraints)
    one.run([submit_of(heavy, 1, banned_token_ids=(EOS,)), Submit("plain", (1, 2), SamplingParams(max_tokens=20, ignore_eos=True))])
    failed = one.failed["grammar-1"]
    assert failed.code == "invalid_schema" and "1 s more than the 20 ms that each may" in failed.message
    assert len(one.outcomes["plain", 0].token_ids) == 20


def test_a_grammar_is_bounded_in_size(tokenizer_json) -> None:
    limits = ConstraintLimits(grammar_size=5, initial_fuel=100)
    compiler = ConstraintCompiler(tokenizer_json, eos_ids=[EOS], vocab_size=VOCAB, limits=limits)
    with pytest.raises(ConstraintError, match="cannot be compiled"):
        wait_for(compiler.compile(SCHEMA))
    compiler.close()


def test_a_constraint_that_compiles_too_long_is_given_up(tokenizer_json, rig, monkeypatch) -> None:
    slow = ConstraintCompiler(tokenizer_json, eos_ids=[EOS], vocab_size=VOCAB, limits=ConstraintLimits(compile_s=0.05))
    release = threading.Event()
    monkeypatch.setattr(slow, "_build", lambda constraint: release.wait())
    one = rig(constraints=slow)
    one.run([submit_of(REGEX)], max_steps=10_000_000)
    assert "took more than 0.05 s" in one.failed["regex-0"].message
    release.set()
    slow.close()


def test_compiled_constraints_are_shared_and_bounded(tokenizer_json, monkeypatch) -> None:
    compiler = ConstraintCompiler(tokenizer_json, eos_ids=[EOS], vocab_size=VOCAB, limits=ConstraintLimits(num_cached=2))
    built = []
    build = compiler._build
    monkeypatch.setattr(compiler, "_build", lambda constraint: (built.append(constraint), build(constraint))[1])
    first, second = (wait_for(compiler.compile(CHOICE)) for _ in range(2))
    assert built == [CHOICE]
    first.advance(first.forced() or [int(np.flatnonzero(np.unpackbits(first.mask().view(np.uint8), bitorder="little"))[0])])
    assert not np.array_equal(first.mask(), second.mask()), "each sequence has a matcher of its own"
    for constraint in (REGEX, GRAMMAR, CHOICE):
        wait_for(compiler.compile(constraint))
    assert built == [CHOICE, REGEX, GRAMMAR, CHOICE]
    compiler.close()


def test_without_a_tokenizer_constraints_are_refused(rig) -> None:
    one = rig()
    one.run([submit_of(REGEX)])
    assert one.failed["regex-0"].code == "invalid_schema"


def test_a_failed_compilation_is_tried_again(constraints) -> None:
    bad = Constraint(ConstraintKind.REGEX, "(")
    for _ in range(2):
        with pytest.raises(ConstraintError):
            wait_for(constraints.compile(bad))


def test_a_tokenizer_that_cannot_be_read_fails_the_request_and_not_the_engine(rig) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    compiler = ConstraintCompiler(words.to_str(), eos_ids=[EOS], vocab_size=VOCAB)
    one = rig(constraints=compiler)
    one.run([submit_of(REGEX)])
    assert "tokenizer" in one.failed["regex-0"].message
    compiler.close()
