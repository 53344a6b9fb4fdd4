"""Lazy constraints begin at a trigger token. Text before the trigger is free, text after it matches the constraint, and results are
reproducible."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from server.constraints import isolated
from server.constraints.lazy import LazyMatcher
from server.constraints.matcher import ConstraintError
from server.constraints.process.process_socket import ProcessSocket
from server.constraints.tool_selection import ToolSelection
from server.engine.loop import Engine
from server.engine.overlap import OverlappedEngine
from server.engine.step_model import GroupLimits, StepLimits
from server.messages import Constraint, ConstraintKind, FinishReason, SamplingParams, Submit, Trigger
from tests.doubles.model import hashed_logits
from tests.server.constraints.processes import allowed_by, answered, forced_by, mask_of, matcher_of

EOS, VOCAB = 0, 320
TRIGGER, OPEN, CLOSE = 310, 311, 312  # token ids beyond the tokenizer's vocabulary, which have no text
ARGUMENTS = json.dumps({"enum": ["green", "greek"]})
CALL = Constraint(ConstraintKind.GRAMMAR, f'start: "name " colour ";"\ncolour: %json {ARGUMENTS}', Trigger(TRIGGER))
UNMARKED = Constraint(ConstraintKind.GRAMMAR, "", Trigger())
IMPOSSIBLE = msgspec.structs.replace(CALL, source="start: nothing")


def eager(history):
    """Return random logits that favour three kinds of tokens: the trigger (about every sixth token is a trigger), letters, and the tokens
    that open and close a thought."""
    logits = hashed_logits(VOCAB)(history)
    logits[TRIGGER] += 5
    logits[65:91] += 2
    logits[[OPEN, CLOSE]] += 4
    return logits


def submit_of(constraint: Constraint | None, seed: int, prompt: tuple[int, ...] = (5, 6, 7), **params) -> Submit:
    return Submit(f"r{seed}", prompt, SamplingParams(max_tokens=60, seed=seed, ignore_eos=True, constraint=constraint, **params))


def calls(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    """Return the text after each trigger, up to the next trigger. The last text may be incomplete."""
    spans: list[list[int]] = []
    for token_id in token_ids:
        if token_id == TRIGGER:
            spans.append([])
        elif spans:
            spans[-1].append(token_id)
    return [tokenizer.decode(span) for span in spans]


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_what_a_trigger_begins_is_finished_and_the_rest_is_free(rig, tokenizer, constraints, engine) -> None:
    outcomes = rig(engine, constraints=constraints, logits_of=eager).run([submit_of(CALL, seed) for seed in range(6)])
    num_whole = 0
    for outcome in outcomes.values():
        *whole, last = calls(tokenizer, outcome.token_ids)
        num_whole += len(whole)
        assert all(re.match('name "gree[nk]";', text) for text in whole)
        assert re.match('name "gree[nk]";', last) or 'name "green";'.startswith(last) or 'name "greek";'.startswith(last)
        assert outcome.end == (FinishReason.LENGTH, None)
    assert num_whole > 6, "after a call the text is free again, so another call may follow"
    assert len({tuple(outcome.token_ids[:3]) for outcome in outcomes.values()}) == 6


def test_free_text_is_drawn_as_without_a_constraint(rig, constraints) -> None:
    silent = [submit_of(c, 1, banned_token_ids=(TRIGGER,)) for c in (CALL, None)]
    with_it, without = (rig(constraints=constraints, logits_of=eager).run([submit])["r1", 0] for submit in silent)
    assert with_it == without


def test_the_trigger_means_nothing_in_thoughts(rig, tokenizer, constraints) -> None:
    thinking = msgspec.structs.replace(CALL, trigger=Trigger(TRIGGER, (), OPEN, CLOSE, is_open=True))
    outcomes = rig(constraints=constraints, logits_of=eager).run([submit_of(thinking, seed) for seed in range(8)])
    inside, outside = [], []
    for outcome in outcomes.values():
        thinks, span = True, None
        for token_id in outcome.token_ids:
            if token_id == TRIGGER:
                span = []
                (inside if thinks else outside).append(span)
            elif thinks and token_id == CLOSE:
                thinks = False
            elif span is not None:
                span.append(token_id)
    texts = [tokenizer.decode(span) for span in outside]
    assert sum(re.match('name "gree[nk]";', text) is not None for text in texts) > 5
    assert all('name "gree'.startswith(text[:10]) for text in texts)
    assert not any(tokenizer.decode(span).startswith("name") for span in inside) and len(inside) > 5


def test_a_mask_is_computed_only_behind_the_trigger(constraints) -> None:
    matcher = matcher_of(constraints, CALL)
    assert isinstance(matcher, LazyMatcher)
    matcher.advance([7, 8, 9])
    assert matcher.mask() is None and matcher.forced() == []
    matcher.advance([TRIGGER])
    assert np.count_nonzero(mask_of(matcher)) and forced_by(matcher)
    matcher.advance([300])  # a token that the constraint forbids, as if an earlier worker had sampled it without the constraint
    assert answered(matcher).mask() is None


def test_the_token_that_completes_a_grammar_begins_no_other(tokenizer, constraints) -> None:
    """The grammar ends with the token that triggers it. This token was sent to the grammar before the sequence got it, as the engine does,
    or with others, as after a change of workers."""
    (mark,) = tokenizer.encode("!").ids
    constraint = msgspec.structs.replace(CALL, source='start: "no!"', trigger=Trigger(mark))
    *begun, last = (mark, *tokenizer.encode("no!").ids)
    assert last == mark
    early, whole = matcher_of(constraints, constraint), answered(constraints.open(constraint, (*begun, last)))
    for token_id in (*begun, last):
        early.prefetch(token_id)
        early.advance([token_id])
        answered(early)
    assert early.mask() is None and whole.mask() is None


def with_plain(tokenizer: Tokenizer, constraint: Constraint) -> Constraint:
    """Return the constraint with another one that the two tokens of `OP` begin."""
    ids = tuple(tokenizer.encode("OP").ids)
    trigger = msgspec.structs.replace(constraint.trigger or Trigger(), plain=((66, *ids), ids))
    return msgspec.structs.replace(constraint, trigger=trigger, plain=f'start: "OP" colour ";"\ncolour: %json {ARGUMENTS}')


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_a_sequence_of_tokens_may_be_the_trigger(rig, tokenizer, constraints, engine) -> None:
    first, second = tokenizer.encode("OP").ids

    def favours(history):
        logits = eager(history)
        logits[[first, second]] += 8
        return logits

    submits = [submit_of(with_plain(tokenizer, constraint), seed) for seed, constraint in enumerate([UNMARKED, CALL] * 3)]
    outcomes = rig(engine, constraints=constraints, logits_of=favours).run(submits)
    num_whole = 0
    for seed, submit in enumerate(submits):  # the order of `outcomes` says only whose grammar was compiled first
        drawn = (outcome := outcomes[submit.request_id, 0]).token_ids
        ends = [at for at in range(2, len(drawn) - 12) if drawn[at - 2 : at] == [first, second]]
        num_whole += len(ends)
        assert all(re.match('"gree[nk]";', tokenizer.decode(drawn[end:])) for end in ends)
        if seed % 2:
            assert all('name "gree'.startswith(call[:10]) for call in calls(tokenizer, outcome.token_ids))
    assert num_whole > 6
    alone = rig(engine, constraints=constraints, logits_of=favours).run(submits[:1])
    assert alone.items() <= outcomes.items()


def test_a_sequence_means_nothing_in_thoughts_and_only_as_a_whole(tokenizer, constraints) -> None:
    first, second = tokenizer.encode("OP").ids
    matcher = matcher_of(
        constraints, with_plain(tokenizer, msgspec.structs.replace(UNMARKED, trigger=Trigger(None, (), OPEN, CLOSE, is_open=True)))
    )
    for drawn in ([first, second], [CLOSE, first], [7, second], [first]):
        matcher.advance(drawn)
        assert answered(matcher).mask() is None, drawn
    matcher.advance([second])
    assert forced_by(matcher)


def test_a_plain_call_may_have_a_weaker_grammar_or_none(tokenizer, constraints) -> None:
    impossible = msgspec.structs.replace(with_plain(tokenizer, CALL), plain=IMPOSSIBLE.source)
    matcher = matcher_of(constraints, impossible)
    matcher.advance(tokenizer.encode("OP").ids)
    assert answered(matcher).mask() is None
    matcher = matcher_of(constraints, msgspec.structs.replace(impossible, plain_fallback='start: "OP;"'))
    matcher.advance(tokenizer.encode("OP").ids)
    assert tokenizer.decode(forced_by(matcher)) == ";"


@pytest.mark.parametrize("constraint", [IMPOSSIBLE, msgspec.structs.replace(IMPOSSIBLE, fallback=IMPOSSIBLE.source)])
def test_what_cannot_be_compiled_is_free(rig, constraints, constraint) -> None:
    one, blind, free = rig(constraints=constraints, logits_of=eager), rig(logits_of=eager), rig(logits_of=eager)
    assert one.run([submit_of(constraint, 1)]) == blind.run([submit_of(constraint, 1)]) == free.run([submit_of(None, 1)])
    assert not one.failed and not blind.failed


def test_there_may_be_a_weaker_grammar(rig, tokenizer, constraints) -> None:
    names = msgspec.structs.replace(IMPOSSIBLE, fallback='start: "name;"')
    outcome = rig(constraints=constraints, logits_of=eager).run([submit_of(names, 1)])["r1", 0]
    assert all(text.startswith("name;") for text in calls(tokenizer, outcome.token_ids)[:-1])


@pytest.mark.parametrize("fault", [{"properties": {"a": {"type": "array", "uniqueItems": True}}}, {"x-guidance": 5}])
def test_a_schema_that_cannot_be_compiled_frees_no_other(tokenizer, constraints, caplog, fault) -> None:
    """One strict tool has a schema with a keyword that cannot be enforced. The arguments of the other strict tool are still held to theirs,
    and those of the faulty one are an object."""
    faulty = json.dumps({"type": "object", **fault})
    rules = ["start: good | bad", 'good: "good " colour ";"', 'bad: "bad " arguments ";"']
    rules += [f"colour: %json {ARGUMENTS}", f"arguments: %json {faulty}"]
    constraint = msgspec.structs.replace(CALL, source="\n".join(rules), fallback='start: "any;"')
    good = matcher_of(constraints, constraint)
    good.advance([TRIGGER, *tokenizer.encode('good "gree').ids])
    assert {tokenizer.decode([token_id]) for token_id in allowed_by(mask_of(good))} <= {"n", "k", 'n"', 'k"'}
    bad = matcher_of(constraints, constraint)
    bad.advance([TRIGGER, *tokenizer.encode("bad ").ids])
    assert {tokenizer.decode([token_id])[0] for token_id in allowed_by(mask_of(bad))} == {"{"}
    bad.advance(tokenizer.encode('{"a": [1, 1]}').ids)
    assert {tokenizer.decode([token_id])[0] for token_id in allowed_by(mask_of(bad))} == {";"}
    assert [*fault.values()] == [5] or "uniqueItems" in caplog.text


def test_a_client_s_own_grammar_keeps_every_schema(constraints) -> None:
    """A constraint of the whole answer is demanded, so it is refused rather than weakened."""
    source = 'start: arguments\narguments: %json {"type": "array", "uniqueItems": true}'
    with pytest.raises(ConstraintError, match="uniqueItems"):
        matcher_of(constraints, Constraint(ConstraintKind.GRAMMAR, source))


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_company_chunks_preemption_and_later_workers_change_nothing(rig, tokenizer, constraints, engine) -> None:
    kinds = (CALL, msgspec.structs.replace(CALL, trigger=Trigger(TRIGGER, (), OPEN, CLOSE)), offering(tokenizer))
    submits = [submit_of(kinds[seed % 3], seed, logprobs=(None, 1)[seed // 3]) for seed in range(6)]
    alone = {}
    for submit in submits:
        alone |= rig(constraints=constraints, logits_of=eager).run([submit])
    assert rig(engine, constraints=constraints, logits_of=eager).run(submits) == alone, "together"

    small = StepLimits(VOCAB, max_context=512, max_tokens=16, max_seqs=12, groups=(GroupLimits(12),))
    tight = rig(engine, limits=small, constraints=constraints, logits_of=eager)
    pushing = [msgspec.structs.replace(submit, priority=-i // 3) for i, submit in enumerate(submits)]
    assert tight.run(pushing, per_step=1) == alone, "preemptions changed the tokens"
    assert tight.engine.scheduler.num_preemptions > 0

    sent, going_on = rig(), submits
    while going_on:
        worker = rig(engine, constraints=constraints, logits_of=eager)
        worker.outcomes = sent.outcomes
        for submit in going_on:
            worker.engine.submit(submit)
        worker.steps(17)
        outcomes = {submit: sent.outcomes.get((submit.request_id, 0)) for submit in submits}
        going_on = [
            msgspec.structs.replace(submit, emitted=(tuple(outcome.token_ids) if outcome else (),))
            for submit, outcome in outcomes.items()
            if outcome is None or outcome.end is None
        ]
    assert sent.outcomes == alone, "a change of workers changed the tokens"


NAMES = ("get time", "name", "get sky")


def offering(tokenizer: Tokenizer) -> Constraint:
    offers = tuple(tuple(tokenizer.encode(f"{name}!").ids) for name in NAMES)
    return Constraint(ConstraintKind.GRAMMAR, f'start: /{"|".join(NAMES)}/ "!" /[a-c]/ ";"', Trigger(TRIGGER, offers=offers))


def test_an_offer_is_chosen_as_a_whole(rig, tokenizer, constraints) -> None:
    """The model must choose one of the complete offers. Its logits prefer the first letter of the offer `get`, but continue it in a way
    that no offer allows, so the model must select `name`."""
    constraint = offering(tokenizer)
    ids = {text: tokenizer.encode(text).ids[0] for text in ("g", "n")}

    def wrong(history):
        logits = np.full(VOCAB, -20, np.float32)
        wishes = {TRIGGER: {ids["g"]: 3, tokenizer.encode("name").ids[0]: 1}}.get(history[-1], {TRIGGER: 5})
        for token_id, wish in wishes.items():
            logits[token_id] = wish
        return logits

    for logprobs in (None, 0):
        submit = submit_of(constraint, 1, temperature=0, logprobs=logprobs)
        outcome = rig(constraints=constraints, logits_of=wrong).run([submit])["r1", 0]
        assert all(text.startswith("name!") for text in calls(tokenizer, outcome.token_ids)[:-1])
        assert len(outcome.logprobs) == (0 if logprobs is None else len(outcome.token_ids))


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_an_offer_that_is_banned_fails_nothing(rig, tokenizer, constraints, engine) -> None:
    constraint = offering(tokenizer)
    everything = tuple({token_id for offer in constraint.trigger.offers for token_id in offer} | set(tokenizer.encode("green").ids))
    submits = [submit_of(one, seed, banned_token_ids=everything) for seed, one in enumerate((constraint, CALL))]
    one = rig(engine, constraints=constraints, logits_of=eager)
    outcomes = one.run(submits)
    assert not one.failed and all(outcome.end == (FinishReason.LENGTH, None) for outcome in outcomes.values())
    assert any(outcome.token_ids.count(TRIGGER) > 1 for outcome in outcomes.values())


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_what_is_taken_back_is_nowhere(rig, tokenizer, constraints, engine) -> None:
    """A draft of a tool selection that is discarded leaves no trace in the prefix cache or in log-probabilities, wherever in a page it
    began. It causes no preemption."""
    constraint = offering(tokenizer)
    longest = max(constraint.trigger.offers, key=len)
    assert len(longest) > 4
    following = {TRIGGER: longest[0], **dict(pairwise(longest[:-1]))}

    def drafting(history):
        """Return logits that favour all tokens of an offer except the last, so that the engine discards the draft."""
        logits = eager(history)
        logits[following.get(int(history[-1]), TRIGGER)] += 6
        return logits

    for length in range(1, 40, 2):
        prompt = tuple(range(20, 20 + length))
        jumps, draws = submit_of(constraint, 1, prompt), submit_of(constraint, 2, prompt, prompt_logprobs=1)
        draws = msgspec.structs.replace(draws, params=msgspec.structs.replace(draws.params, seed=1))
        alone = rig(engine, constraints=constraints, logits_of=drafting).run([jumps])["r1", 0]
        one = rig(engine, limits=StepLimits(VOCAB, 512, 64, 1, (GroupLimits(60),)), constraints=constraints, logits_of=drafting)
        outcomes = one.run([draws, jumps])
        assert outcomes["r1", 0] == alone, length
        assert outcomes["r2", 0].token_ids == alone.token_ids, length
        assert len(outcomes["r2", 0].prompt_logprobs) == length
        assert one.engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_late_answers_change_no_token(rig, tokenizer, constraints, monkeypatch, engine) -> None:
    rng, receive = random.Random(4), ProcessSocket.receive
    submits = [submit_of((CALL, offering(tokenizer))[seed % 2], seed) for seed in range(8)]
    monkeypatch.setattr(ProcessSocket, "receive", lambda self, patience_s: receive(self, 60.0 if patience_s else 0.0))
    whole = rig(constraints=constraints, logits_of=eager).run(submits)
    monkeypatch.setattr(
        ProcessSocket, "receive", lambda self, patience_s: rng.random() < 0.5 and receive(self, 60.0 if patience_s else 0.0)
    )
    one = rig(engine, constraints=constraints, logits_of=eager)
    assert one.run(submits) == whole and not one.failed
    resumed = []
    # A new engine can continue from any prefix of the sent tokens, because tokens of an unfinished tool selection are not sent.
    for submit in submits[::2]:
        sent = tuple(whole[submit.request_id, 0].token_ids[:30])
        rest = rig(engine, constraints=constraints, logits_of=eager).run([msgspec.structs.replace(submit, emitted=(sent,))])
        resumed.append([*sent, *rest[submit.request_id, 0].token_ids])
    assert resumed == [whole[submit.request_id, 0].token_ids for submit in submits[::2]]


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_no_sequence_is_parked_if_its_grammar_answers_in_time(rig, tokenizer, constraints, monkeypatch, engine) -> None:
    """A parked sequence computes the tokens of its last page again, so parking after each token costs more than the grammar."""
    parked = []
    monkeypatch.setattr(isolated, "PATIENCE_S", 60.0)
    one = rig(engine, constraints=constraints, logits_of=eager)
    park = one.engine._requests.park
    monkeypatch.setattr(one.engine._requests, "park", lambda seq: (parked.append(seq), park(seq)))
    outcomes = one.run([submit_of(CALL, seed) for seed in range(4)])
    assert sum(len(calls(tokenizer, outcome.token_ids)) for outcome in outcomes.values()) > 4
    assert not parked


@pytest.mark.parametrize("banned", ["", "g", "et"])
def test_a_worker_that_dies_in_a_choice_leaves_nothing_to_remember(rig, tokenizer, constraints, banned) -> None:
    """If a worker dies during a tool selection, a new worker continues with the same tokens. This holds even if banned tokens made the old
    worker give up the selection and send its draft."""
    ids = tuple(tokenizer.encode(banned).ids) if banned else ()
    submit = submit_of(offering(tokenizer), 4, banned_token_ids=ids)
    whole = rig(constraints=constraints, logits_of=eager).run([submit])["r4", 0]
    for num_steps in range(1, 60, 3):
        former = rig(constraints=constraints, logits_of=eager)
        former.engine.submit(submit)
        former.steps(num_steps)
        sent = former.outcomes.get(("r4", 0))
        emitted = tuple(sent.token_ids) if sent is not None else ()
        later = rig(constraints=constraints, logits_of=eager).run([msgspec.structs.replace(submit, emitted=(emitted,))])["r4", 0]
        assert [*emitted, *later.token_ids] == whole.token_ids, num_steps


def test_a_worker_that_dies_behind_a_call_that_was_let_go_goes_on_exactly(rig, tokenizer, constraints) -> None:
    """Banned tokens keep each call from its end, so the first worker drops its grammar there. What the model draws then is free text, in
    which the next trigger counts, also right there."""
    banned = tuple(token_id for token_id in range(TRIGGER) if "!" in tokenizer.decode([token_id]))
    constraint = msgspec.structs.replace(CALL, source='start: "AB" ("CD" | "EF") "!"')
    num_in_a_row = 0
    for seed in range(8, 11):
        submit = submit_of(constraint, seed, banned_token_ids=banned)
        whole = rig(constraints=constraints, logits_of=eager).run([submit])[submit.request_id, 0].token_ids
        num_in_a_row += sum(call in ("ABCD", "ABEF") for call in calls(tokenizer, whole)[:-1])
        for at, token_id in enumerate(whole):
            if token_id == TRIGGER:
                later = rig(constraints=constraints, logits_of=eager)
                later.run([msgspec.structs.replace(submit, emitted=(tuple(whole[: at + 1]),))])
                assert [*whole[: at + 1], *later.outcomes[submit.request_id, 0].token_ids] == whole, (seed, at)
    assert num_in_a_row


def test_a_selection_may_begin_where_an_earlier_worker_dropped_one(tokenizer, constraints) -> None:
    """A rule banned the first token of the offers, so the worker dropped the selection, and the model wrote the trigger again."""
    constraint = offering(tokenizer)
    offer = constraint.trigger.offers[0]
    once, again = (answered(constraints.open(constraint, (*triggers, *offer))) for triggers in ((TRIGGER,), (TRIGGER, TRIGGER)))
    assert once.mask() is not None and np.array_equal(once.mask(), again.mask())


def test_offers_beyond_the_vocabulary_are_none(rig, constraints, tokenizer) -> None:
    constraint = offering(tokenizer)
    trigger = msgspec.structs.replace(constraint.trigger, offers=(*constraint.trigger.offers, (VOCAB + 80, 1)))
    submits = [submit_of(msgspec.structs.replace(constraint, trigger=t), 1) for t in (constraint.trigger, trigger)]
    one, other = (rig(constraints=constraints, logits_of=eager).run([submit]) for submit in submits)
    assert one == other


def test_the_choice_is_between_wholes() -> None:
    choice = ToolSelection([(1, 2, 3, 4), (1, 2, 3, 5), (6, 3)])
    assert choice.forced() == [] and choice.candidates() == [1, 6]
    choice.weigh({1: -0.1, 6: -2})
    choice.say(1)
    assert choice.candidates() == [2]
    choice.weigh({2: -7})
    assert choice.without_draft().forced() == [6, 3], "the draft continued as no offer does"
    choice.weigh({2: 6})
    again = choice.without_draft()
    assert again.forced() == [1, 2, 3], "the two offers with this prefix remain candidates"
    for token_id in (1, 2, 3):
        again.say(token_id)
    assert again.candidates() == [4, 5] and not again.is_made
    again.say(5)
    assert again.is_made


def test_what_is_forced_is_what_would_be_drawn(rig, constraints) -> None:
    """Tokens that the constraint forces equal the tokens that sampling would give. The test compares a request without log-probabilities,
    whose forced tokens are not sampled, with a request with log-probabilities, of which every token is sampled."""
    jumping, drawing = rig(constraints=constraints, logits_of=eager), rig(constraints=constraints, logits_of=eager)
    fast, slow = jumping.run([submit_of(CALL, 3)])["r3", 0], drawing.run([submit_of(CALL, 3, logprobs=0)])["r3", 0]
    assert fast.token_ids == slow.token_ids
    assert jumping.engine.timing.num_steps < drawing.engine.timing.num_steps
