"""A mask that takes long holds up its own sequence and no other, and changes no token; one that takes too long fails its request."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest

from server.engine import masks, matcher
from server.engine.constrain import ConstraintCompiler
from server.engine.loop import Engine
from server.engine.matcher import Matcher
from server.engine.overlap import OverlappedEngine
from server.messages import Constraint, ConstraintKind, FinishReason, SamplingParams, Submit, Trigger

EOS, VOCAB = 0, 320
HEAVY = Constraint(ConstraintKind.GRAMMAR, 'start: e\ne: e e | "a" | "b"')
LIGHT = Constraint(ConstraintKind.REGEX, "[a-f]{40}")
TRIGGER = 310


def submit_of(name: str, constraint: Constraint | None, max_tokens: int = 20) -> Submit:
    params = SamplingParams(max_tokens=max_tokens, seed=3, constraint=constraint, ignore_eos=True, banned_token_ids=(EOS,))
    return Submit(name, (5, 6, 7), params)


@pytest.fixture
def held(monkeypatch):
    """While it is clear, masks of the heavy grammar are not made; a thread that waits so may spend the processor's time."""
    go, burns = threading.Event(), threading.Event()
    make = Matcher.mask

    def mask(self):
        if self.grammar.source_of_test == HEAVY.source:
            while burns.is_set() and not go.is_set():
                pass
            assert go.wait(60)
        return make(self)

    compiled = ConstraintCompiler._compiled

    def mark(self, kind, source):
        grammar = compiled(self, kind, source)
        grammar.source_of_test = source
        return grammar

    monkeypatch.setattr(Matcher, "mask", mask)
    monkeypatch.setattr(ConstraintCompiler, "_compiled", mark)
    yield go, burns
    go.set()


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_who_waits_for_a_mask_holds_up_nobody_else(rig, constraints, held, engine) -> None:
    go, _ = held
    one = rig(engine, constraints=constraints)
    for submit in (submit_of("heavy", HEAVY), submit_of("same", HEAVY), submit_of("light", LIGHT), submit_of("plain", None)):
        one.engine.submit(submit)
    while not all(name in one.outcomes and one.outcomes[name].end for name in (("light", 0), ("plain", 0))):
        one.step()
        time.sleep(0.001)
    assert not one.failed and ("heavy", 0) not in one.outcomes and ("same", 0) not in one.outcomes
    one.engine.submit(submit_of("later", HEAVY))  # its matcher shares a lock with the others
    for _ in range(20):
        one.step()
    go.set()
    outcomes = one.run()
    assert outcomes["heavy", 0].end == (FinishReason.LENGTH, None)
    assert outcomes["heavy", 0] == outcomes["same", 0] == outcomes["later", 0]


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_late_masks_change_no_token(rig, constraints, random_submits, monkeypatch, engine) -> None:
    submits = random_submits(40, 5)
    expected = rig(constraints=constraints).run(submits)
    num_late = 0
    set_aside = one = None

    def count(seq, late):
        nonlocal num_late
        num_late += 1
        set_aside(seq, late)

    monkeypatch.setattr(masks, "PATIENCE_S", 0.0)
    one = rig(engine, constraints=constraints)
    set_aside = one.engine._requests.set_aside
    monkeypatch.setattr(one.engine._requests, "set_aside", count)
    assert one.run(submits) == expected
    assert num_late > 20


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_a_mask_that_takes_too_much_is_not_waited_for(rig, constraints, held, monkeypatch, engine) -> None:
    go, burns = held
    burns.set()
    monkeypatch.setattr(masks, "EXCESS_S", 0.05)
    one = rig(engine, constraints=constraints)
    one.run([submit_of("heavy", HEAVY), submit_of("same", HEAVY), submit_of("plain", None)])
    assert {name: failed.code for name, failed in one.failed.items()} == dict.fromkeys(("heavy", "same"), "constraint_too_complex")
    assert "read in one way only" in one.failed["heavy"].message
    assert len(one.outcomes["plain", 0].token_ids) == 20
    burns.clear()
    go.set()
    again = one.run([submit_of("again", HEAVY)])["again", 0]
    assert len(again.token_ids) == 20, "compiled anew: the old one may be busy for long"


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_a_sequence_has_a_budget_for_all_of_its_tokens(rig, constraints, monkeypatch, engine) -> None:
    monkeypatch.setattr(matcher, "SLOW_S", 0.0)
    monkeypatch.setattr(matcher, "EXCESS_S", 0.02)
    one = rig(engine, constraints=constraints)
    one.run([submit_of("heavy", HEAVY, 500), submit_of("plain", None)])
    assert one.failed["heavy"].code == "constraint_too_complex"
    assert len(one.outcomes["plain", 0].token_ids) == 20


def test_an_offer_whose_mask_takes_too_much_is_let_go(rig, constraints, held, monkeypatch) -> None:
    _, burns = held
    burns.set()
    monkeypatch.setattr(masks, "EXCESS_S", 0.05)
    offer = msgspec.structs.replace(HEAVY, trigger=Trigger(TRIGGER))
    submit = submit_of("offer", offer)
    submit = msgspec.structs.replace(submit, params=msgspec.structs.replace(submit.params, logit_bias=((TRIGGER, 30.0),)))
    one = rig(constraints=constraints)
    assert len(one.run([submit])["offer", 0].token_ids) == 20 and not one.failed


def test_what_a_small_grammar_may_ask_for(rig, constraints, monkeypatch) -> None:
    """Few rules, and a mask that takes long: many seconds where tokens are long."""
    monkeypatch.setattr(masks, "EXCESS_S", 0.05)
    rules = "\n".join(f'e{i}: e e | "a"' for i in range(400))
    source = f"start: e\ne: {' | '.join(f'e{i}' for i in range(400))}\n{rules}"
    one = rig(constraints=constraints)
    one.run([submit_of("heavy", Constraint(ConstraintKind.GRAMMAR, source)), submit_of("plain", None)])
    assert one.failed["heavy"].code == "constraint_too_complex"
    assert len(one.outcomes["plain", 0].token_ids) == 20
