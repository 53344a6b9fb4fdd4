"""Constraints in isolated processes: they allow the same tokens as llguidance, delay no other request, and leave no process behind."""

from __future__ import annotations

import json
import random
import socket
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer, models

from server.constraints.compile_slots import CompileSlots
from server.constraints.compiler import ConstraintCompiler
from server.constraints.isolated import IsolatedMatcher
from server.constraints.process.process_socket import ProcessSocket
from server.constraints.process.sources import grammar_of
from server.constraints.process.wire import Answer, Question, Source, write_answer
from server.engine.loop import Engine
from server.engine.overlap import OverlappedEngine
from server.messages import Constraint, ConstraintKind, FinishReason, SamplingParams, Submit
from tests.process_states import is_running
from tests.server.constraints.processes import allowed_by, answered, forced_by, mask_of, matcher_of, processes_of, wait_until

EOS, VOCAB = 0, 320
ENGINES = pytest.mark.parametrize("engine", [Engine, OverlappedEngine])


def grammar(source: str) -> Constraint:
    return Constraint(ConstraintKind.GRAMMAR, source)


LITERAL = grammar('start: "the colour of the name is " colour "!"\ncolour: "green" | "greek"')
LIST = grammar('start: item ("," " "? item)*\nitem: /[a-f]{1,4}/ | "(" start ")"')
DEEP = grammar('start: r\nr: "a" r | "b"')
FIELDS = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}}
SCHEMA = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(FIELDS))
EXPRESSION = Constraint(ConstraintKind.REGEX, "(the|of)/[a-f]{3,9}\\/!")
CHOICE = Constraint(ConstraintKind.CHOICE, '["colour", "name/", "a (b)"]')
CONSTRAINTS = LITERAL, LIST, DEEP, SCHEMA, EXPRESSION, CHOICE


def heavy(num_rules: int, what: str) -> Constraint:
    """Return a grammar whose mask after the first letter takes many seconds to compute, if `what` is a space and the vocabulary has tokens
    of many spaces."""
    names = [f"e{i}" for i in range(num_rules)]
    rules = [f'{name}: {" | ".join(f"{name} {other}" for other in names)} | "{what}"' for name in names]
    return grammar("\n".join(['start: "x" e0', *rules]))


HEAVY = heavy(30, " ")


def submit_of(name: str, constraint: Constraint | None = None, max_tokens: int = 20, **params) -> Submit:
    return Submit(name, (5, 6, 7), SamplingParams(max_tokens=max_tokens, constraint=constraint, ignore_eos=True, **params))


# --- which tokens are allowed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["", 'start: "so " answer'])
@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_each_token_is_judged_as_by_llguidance_itself(tokenizer_json, constraints, constraint, head) -> None:
    rng = np.random.default_rng(3)
    vocabulary = LLTokenizer(tokenizer_json, n_vocab=VOCAB, eos_token=[EOS])
    source = grammar_of(Source(constraint.kind, constraint.source, head))
    for _ in range(3):
        here = LLMatcher(vocabulary, source, limits=LLParserLimits(max_items_in_row=10_000))
        there = matcher_of(constraints, msgspec.structs.replace(constraint, head=head))
        for _ in range(60):
            assert there.is_complete == here.is_stopped()
            if there.is_complete:
                break
            forced, mask = here.compute_ff_tokens(), np.frombuffer(here.compute_bitmask(), np.int32)[: VOCAB // 32]
            assert forced_by(there) == forced
            assert np.array_equal(mask_of(there), mask)
            token_ids = forced if rng.random() < 0.5 and forced else [int(rng.choice(allowed_by(mask)))]
            if token_ids == [EOS]:
                break
            here.consume_tokens(token_ids)
            for token_id in token_ids:
                there.advance([token_id])
                answered(there)


def test_a_vocabulary_may_be_large_and_a_multiple_of_32(tokenizer_json) -> None:
    compiler = ConstraintCompiler(tokenizer_json.encode, eos_ids=[EOS], vocab_size=151_936)
    assert allowed_by(mask_of(matcher_of(compiler, CHOICE)))
    compiler.close()


def test_what_is_forced_is_asked_for_once(constraints, monkeypatch) -> None:
    matcher = matcher_of(constraints, LITERAL)
    forced = forced_by(matcher)
    asked = []
    ask = IsolatedMatcher._ask
    monkeypatch.setattr(IsolatedMatcher, "_ask", lambda self, what: (asked.append(what), ask(self, what)))
    for token_id in forced:
        matcher.advance([token_id])
    assert len(forced) > 3 and asked == [Question.STATE]


@ENGINES
def test_late_answers_change_no_token(rig, constraints, random_submits, monkeypatch, engine) -> None:
    rng = random.Random(8)
    receive = ProcessSocket.receive

    def constrained(submit: Submit) -> Submit:
        constraint = None if submit.params.constraint is None else rng.choice(CONSTRAINTS)
        return msgspec.structs.replace(submit, params=msgspec.structs.replace(submit.params, constraint=constraint))

    submits = [constrained(submit) for submit in random_submits(50, 5)]
    monkeypatch.setattr(ProcessSocket, "receive", lambda self, patience_s: receive(self, 60.0 if patience_s else 0.0))
    expected = rig(constraints=constraints).run(submits)
    monkeypatch.setattr(
        ProcessSocket, "receive", lambda self, patience_s: rng.random() < 0.5 and receive(self, 60.0 if patience_s else 0.0)
    )
    one = rig(engine, constraints=constraints)
    park, num_late = one.engine._requests.park, []
    monkeypatch.setattr(one.engine._requests, "park", lambda seq: (num_late.append(seq), park(seq)))
    outcomes = one.run(submits)
    assert not one.failed and len(num_late) > 50
    assert outcomes == expected


@ENGINES
def test_who_is_resumed_goes_on_where_it_was(rig, constraints, engine) -> None:
    whole = rig(engine, constraints=constraints).run([submit_of("a", LITERAL, seed=2, logprobs=0)])["a", 0]
    assert whole.end == (FinishReason.STOP, None)
    for num_told in (1, 4, len(whole.token_ids)):
        sent = tuple(whole.token_ids[:num_told])
        rest = msgspec.structs.replace(submit_of("a", LITERAL, seed=2), emitted=(sent,))
        outcome = rig(engine, constraints=constraints).run([rest])["a", 0]
        assert [*sent, *outcome.token_ids] == whole.token_ids and outcome.end == whole.end


def test_a_cached_grammar_is_compiled_once(compiler) -> None:
    one = compiler()
    first = matcher_of(one, LIST)
    assert mask_of(first) is not None
    processes = processes_of(one)
    second = matcher_of(one, LIST)
    assert np.array_equal(mask_of(second), mask_of(first))
    assert len(processes_of(one) - processes) == 1


def test_a_tokenizer_that_cannot_be_read_fails_the_request_and_not_the_engine(rig) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    compiler = ConstraintCompiler(words.to_str().encode, eos_ids=[EOS], vocab_size=VOCAB)
    one = rig(constraints=compiler)
    one.run([submit_of("a", LIST)])
    assert "tokenizer" in one.failed["a"].message
    compiler.close()


# --- resource limits -----------------------------------------------------------------------------------------------------


@ENGINES
def test_a_heavy_mask_fails_its_requests_and_holds_up_nobody(rig, compiler, engine) -> None:
    one = rig(engine, constraints=compiler(excess_s=0.2))
    one.run([submit_of("light", LIST)])  # this request starts the constraint process
    for submit in (submit_of("heavy", HEAVY), submit_of("heavy too", HEAVY)):
        one.engine.submit(submit)
    one.until(lambda: len(one.engine._requests._parked) == 2, max_steps=1_000_000)
    # hide the parked sequences from the engine, as if their masks never arrived
    waiting, one.engine._requests._parked = one.engine._requests._parked, set()
    for submit in (submit_of("plain"), submit_of("light too", LIST)):
        one.engine.submit(submit)
    one.until(lambda: all(name in one.outcomes and one.outcomes[name].end for name in (("plain", 0), ("light too", 0))), 1_000_000)
    assert not one.failed
    one.engine._requests._parked = waiting
    one.run()
    assert set(one.failed) == {"heavy", "heavy too"}
    for failed in one.failed.values():
        assert failed.code == "invalid_schema" and "0.2 s more than the 20 ms allowed each" in failed.message


def test_slow_masks_are_not_waited_for(monkeypatch) -> None:
    """After one slow mask, the engine does not wait for the next mask of this matcher, even if the constraint process accepts the token
    quickly."""
    monkeypatch.setattr("server.constraints.isolated.PATIENCE_S", 1000.0)
    near, far = socket.socketpair()
    with far:
        line = ProcessSocket(near)
        settings = SimpleNamespace(slow_s=0.02, vocab_size=0)
        matcher = IsolatedMatcher(SimpleNamespace(open_child=lambda: line, settings=settings))
        for mask_s, is_next_waited_for in ((0.5, False), (0.01, True)):
            write_answer(far, Answer.MASK, took_s=mask_s)
            write_answer(far, Answer.GOES_ON)
            mask_of(matcher)
            matcher.advance([5])
            assert not matcher.is_late
            matcher.prefetch_mask()
            assert (matcher._give_way_s > time.monotonic()) is is_next_waited_for


def test_many_slow_tokens_are_too_many(rig, compiler) -> None:
    one = rig(constraints=compiler(slow_s=0.0, excess_s=0.01))
    one.run([submit_of("slow", grammar('start: e\ne: e e | "a" | "b"'), max_tokens=400, banned_token_ids=(EOS,))])
    assert one.failed["slow"].code == "invalid_schema"


@ENGINES
def test_compiling_takes_a_while_at_most(rig, compiler, engine) -> None:
    one = rig(engine, constraints=compiler(compile_s=0.05, grammar_size=10_000_000, source_bytes=10 << 20))
    one.run([submit_of("slow", heavy(200, "a")), submit_of("light", LIST), submit_of("plain")])
    assert one.failed["slow"].code == "invalid_schema" and "took more than 0.05 s of CPU time" in one.failed["slow"].message
    assert len(one.outcomes["plain", 0].token_ids) == 20 and one.outcomes["light", 0].end is not None


@ENGINES
def test_memory_is_bounded(rig, compiler, engine) -> None:
    one = rig(engine, constraints=compiler(memory_bytes=4 << 20))
    large = grammar("start: " + " ".join(f'"word {i}"' for i in range(8000)))
    one.run([submit_of("large", large), submit_of("light", LIST), submit_of("plain")])
    assert one.failed["large"].code == "invalid_schema" and "more than 4 MiB of memory" in one.failed["large"].message
    assert len(one.outcomes["plain", 0].token_ids) == 20 and one.outcomes["light", 0].end is not None


def test_who_compiles_gives_the_turn_back_or_is_forgotten() -> None:
    class Waiting: ...

    turns = CompileSlots(2)
    first, second, third = Waiting(), Waiting(), Waiting()
    assert turns.take(first) and turns.take(second) and turns.take(first)
    assert not turns.take(third)
    turns.give_back(first)
    assert turns.take(third) and not turns.take(first)
    del second
    assert turns.take(first)


def test_a_compilation_that_nobody_waits_for_ends(compiler) -> None:
    one = compiler(compile_s=600.0, grammar_size=10_000_000, source_bytes=10 << 20, num_compiling=1)
    first = one.open(heavy(200, "a"))
    assert not first.poll()
    wait_until(lambda: processes_of(one))
    (own,) = processes_of(one)
    second = one.open(LIST)
    assert not second.poll(), "the second must wait for its turn"
    del first
    assert mask_of(answered(second)) is not None
    wait_until(lambda: not is_running(own))


def test_what_is_cached_is_bounded_in_memory(compiler) -> None:
    one = compiler(cached_bytes=1)
    for constraint in (LIST, DEEP):
        assert mask_of(matcher_of(one, constraint)) is not None
    assert not one._cached and not one._grammars
