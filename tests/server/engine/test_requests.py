"""Tests how requests end, and which requests are refused. When a request ends, its pages are free within the same step."""

from __future__ import annotations

import gc
import time

import pytest

from server.constraints.isolated import IsolatedMatcher
from server.engine.loop import Engine
from server.engine.overlap import OverlappedEngine
from server.engine.request import Sequence, Stage
from server.engine.step_model import GroupLimits, StepLimits
from server.messages import Abort, Constraint, ConstraintKind, FinishReason, SamplingParams, Submit
from tests.doubles.model import scripted_logits
from tests.server.constraints.processes import wait_until

VOCAB, EOS = 320, 0
ENGINES = pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


def scripted(*script: int):
    return scripted_logits(VOCAB, script)


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "temperature": 0.0, **fields})


@ENGINES
def test_ends(rig, engine) -> None:
    one = rig(engine, logits_of=scripted(5, 6, 7, EOS, 8, 9))
    cases = {
        "eos": (params(), [5, 6, 7], (FinishReason.STOP, EOS)),
        "length": (params(max_tokens=2), [5, 6], (FinishReason.LENGTH, None)),
        "stop token": (params(stop_token_ids=(6,)), [5], (FinishReason.STOP, 6)),
        "eos ignored": (params(max_tokens=5, ignore_eos=True), [5, 6, 7, EOS, 8], (FinishReason.LENGTH, None)),
    }
    outcomes = one.run(Submit(name, (1, 2), p) for name, (p, _, _) in cases.items())
    for name, (_, tokens, end) in cases.items():
        assert (outcomes[name, 0].token_ids, outcomes[name, 0].end) == (tokens, end), name


def test_an_end_is_held_back_until_min_tokens(rig) -> None:
    outcome = rig(logits_of=scripted(5, EOS)).run([Submit("a", (1,), params(min_tokens=4, max_tokens=9))])["a", 0]
    assert len(outcome.token_ids) >= 4 and EOS not in outcome.token_ids


def test_a_sequence_ends_at_the_context(rig) -> None:
    limits = StepLimits(VOCAB, max_context=40, max_tokens=32, max_seqs=4, groups=(GroupLimits(20),))
    one = rig(limits=limits)
    outcome = one.run([Submit("a", tuple(range(1, 31)), params(max_tokens=100, ignore_eos=True))])["a", 0]
    assert len(outcome.token_ids) == 10 and outcome.end == (FinishReason.LENGTH, None)


@pytest.mark.parametrize(
    ("submit", "code", "complaint"),
    [
        (Submit("a", (), GREEDY), "invalid_value", "0 tokens"),
        (Submit("a", (1, VOCAB), GREEDY), "invalid_value", "prompt has token 320; expected 0 to 319"),
        (Submit("a", (1,), params(logit_bias=((-1, 1.0),))), "invalid_value", "logit_bias has token -1"),
        (Submit("a", (1,), params(allowed_token_ids=(999,))), "invalid_value", "allowed_token_ids"),
        (Submit("a", (1,), GREEDY, emitted=((400,),)), "invalid_value", "emitted"),
        (Submit("a", (1,) * 512, GREEDY), "context_length_exceeded", "512 tokens"),
        (Submit("a", (1,) * 200, params(max_tokens=200)), "context_length_exceeded", "KV cache holds 304"),
    ],
)
def test_what_cannot_run_is_refused_by_name(rig, submit, code, complaint) -> None:
    one = rig(limits=StepLimits(VOCAB, 512, 64, 8, (GroupLimits(20),)))
    one.run([submit])
    assert one.failed["a"].code == code and complaint in one.failed["a"].message
    assert not one.outcomes


def test_one_id_cannot_run_twice(rig) -> None:
    one = rig()
    one.run([Submit("a", (1,), GREEDY), Submit("a", (2,), GREEDY)])
    assert "running already" in one.failed["a"].message
    assert len(one.outcomes["a", 0].token_ids) == 20


def test_a_row_that_cannot_be_drawn_fails_its_request_alone(rig) -> None:
    one = rig()
    impossible = params(allowed_token_ids=(4,), banned_token_ids=(4,))
    one.run(
        [
            Submit("bad", (1,), impossible, num_choices=3),
            Submit("both at once", (1,), impossible, num_choices=2, emitted=((5,), (6,))),
            Submit("good", (1,), GREEDY),
        ]
    )
    assert set(one.failed) == {"bad", "both at once"} and set(one.outcomes) == {("good", 0)}
    assert {failed.code for failed in one.failed.values()} == {"invalid_value"}
    assert len(one.outcomes["good", 0].token_ids) == 20


@ENGINES
def test_ended_requests_refer_to_none_of_their_sequences(rig, engine) -> None:
    """Sequences refer to their request. In a cycle, its images would stay until garbage is collected, which a worker does rarely."""
    one = rig(engine)
    impossible = params(allowed_token_ids=(4,), banned_token_ids=(4,))
    submits = [*(Submit(f"ended {number}", (1, 2), GREEDY, num_choices=number) for number in (1, 2, 3)), Submit("failed", (1,), impossible)]
    for submit in (*submits, Submit("aborted", (1, 2), GREEDY)):
        one.engine.submit(submit)
    requests = [*one.engine._requests.living.values()]
    assert len(requests) == 5
    one.engine.abort(Abort("aborted"))
    one.run([])
    assert set(one.failed) == {"failed"} and not one.engine._requests.living
    for request in requests:
        assert not any(isinstance(found, Sequence) for found in gc.get_referents(request, request.sequences, request.followers)), request


# --- aborts and deadlines at every stage ---------------------------------------------------------------------------------

LONG = Submit("long", tuple(1 + i % 300 for i in range(400)), GREEDY)
OTHER = Submit("other", (1, 2, 3), params(max_tokens=300, ignore_eos=True))
LIMITS = StepLimits(VOCAB, max_context=512, max_tokens=32, max_seqs=2, groups=(GroupLimits(100),))


def stage_reached(one, stage: str):
    """Return a function that returns whether the request `victim` has reached the named stage."""

    def sequences():
        request = one.engine._requests.living.get("victim")
        return request.sequences if request else []

    def reached() -> bool:
        match stage:
            case "arrived":
                return bool(sequences())
            case "compiling":
                return bool(one.engine._requests._compiling)
            case "waiting":
                return any(seq.stage is Stage.WAITING for seq in sequences()) and len(one.engine.scheduler.running) == 2
            case "prefilling":
                return any(0 < seq.num_computed < seq.num_prompt for seq in sequences())
            case "decoding":
                return any(seq.num_known > seq.num_prompt + 3 for seq in sequences())
            case "forked":
                return sum(seq.stage is Stage.RUNNING for seq in sequences()) > 1
            case _:
                raise AssertionError(stage)

    return reached


VICTIMS = {
    "arrived": Submit("victim", (4, 5), GREEDY),
    "compiling": Submit("victim", (4,), params(constraint=Constraint(ConstraintKind.REGEX, "a+"))),
    "waiting": Submit("victim", (4, 5), GREEDY),
    "prefilling": Submit("victim", LONG.prompt_ids[::-1], GREEDY),
    "decoding": Submit("victim", (4, 5), GREEDY),
    "forked": Submit("victim", LONG.prompt_ids[:70], GREEDY, num_choices=2),
}


@ENGINES
@pytest.mark.parametrize("stage", VICTIMS)
@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_whoever_ends_early_frees_its_pages_within_a_step(rig, constraints, monkeypatch, engine, stage, how) -> None:
    one = rig(engine, limits=LIMITS, constraints=constraints)
    if stage == "waiting":
        for i in range(2):
            one.engine.submit(Submit(f"busy{i}", (1, 2, i), params(max_tokens=400, ignore_eos=True)))
        one.until(lambda: len(one.engine.scheduler.running) == 2)
    elif stage != "forked":
        one.engine.submit(OTHER)
        one.step()
    if stage == "compiling":
        monkeypatch.setattr("server.constraints.isolated.IsolatedMatcher.poll", lambda self: False)
    now = time.monotonic()
    victim = VICTIMS[stage]
    one.engine.submit(Submit(victim.request_id, victim.prompt_ids, victim.params, victim.num_choices, deadline=now + 60))
    one.until(stage_reached(one, stage))
    if how == "abort":
        one.engine.abort(Abort("victim"))
    else:
        one.engine._requests._clock = lambda: now + 61
    one.step()
    held = sum(len(seq.held.lists[0].pages) for seq in one.engine.scheduler.running)
    assert all(seq.request.submit.request_id != "victim" for seq in one.engine.scheduler.running)
    assert one.engine.scheduler.pool.num_used == held
    assert "victim" not in one.engine._requests.living
    one.run()
    expected = FinishReason.ABORT if how == "abort" else FinishReason.DEADLINE
    for choice in range(victim.num_choices):
        assert one.outcomes["victim", choice].end == (expected, None)


@ENGINES
def test_one_choice_can_be_aborted_and_the_others_go_on(rig, engine) -> None:
    submit = Submit("a", tuple(range(1, 60)), params(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True), num_choices=3)
    whole = rig(engine).run([submit])
    for num_steps in range(8):
        one = rig(engine)
        one.engine.submit(submit)
        for _ in range(num_steps):
            one.step()
        one.engine.abort(Abort("a", 0))
        outcomes = one.run()
        assert outcomes["a", 0].end == (FinishReason.ABORT, None)
        assert outcomes["a", 1] == whole["a", 1] and outcomes["a", 2] == whole["a", 2]


@ENGINES
@pytest.mark.parametrize("ended", [0, 1])
def test_a_choice_that_ends_while_its_constraint_is_compiled_holds_up_no_other(rig, constraints, monkeypatch, engine, ended: int) -> None:
    """The other choice was ready, and waited for this one alone."""
    submit = Submit("a", (4,), params(constraint=Constraint(ConstraintKind.REGEX, "a+")), num_choices=2)
    whole = rig(engine, constraints=constraints).run([submit])
    one, poll = rig(engine, constraints=constraints), IsolatedMatcher.poll
    one.engine.submit(submit)
    request = one.engine._requests.living["a"]
    late, ready = request.sequences[ended], request.sequences[1 - ended]
    monkeypatch.setattr(IsolatedMatcher, "poll", lambda self: self is not late.matcher and poll(self))
    wait_until(lambda: not one.step() and list(one.engine._requests._compiling) == [late])
    one.engine.abort(Abort("a", ended))
    assert ready in one.engine.scheduler.queue
    monkeypatch.undo()
    outcomes = one.run()
    assert outcomes["a", ended].end == (FinishReason.ABORT, None) and outcomes["a", 1 - ended] == whole["a", 1 - ended]


@ENGINES
def test_what_ended_a_choice_is_told_after_a_change_of_workers(rig, constraints, engine) -> None:
    """The earlier worker sent the last token that fits, and died before its grammar had answered that the text is complete."""
    constraint = Constraint(ConstraintKind.CHOICE, '["of"]')
    whole = rig(engine, constraints=constraints).run([Submit("a", (4,), params(constraint=constraint))])["a", 0]
    tokens = tuple(whole.token_ids)
    submit = Submit("a", (4,), params(constraint=constraint, max_tokens=len(tokens)), emitted=(tokens,))
    assert whole.end == (FinishReason.STOP, None) == rig(engine, constraints=constraints).run([submit])["a", 0].end
    longer = Submit("b", (4,), params(constraint=Constraint(ConstraintKind.REGEX, "(of)+"), max_tokens=len(tokens)), emitted=(tokens,))
    assert rig(engine, constraints=constraints).run([longer])["b", 0].end == (FinishReason.LENGTH, None)


def test_an_abort_of_nobody_is_nothing(rig) -> None:
    one = rig()
    one.engine.abort(Abort("never heard of"))
    assert not one.step()
