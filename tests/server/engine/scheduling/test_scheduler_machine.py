"""Model-based test of the scheduler and the page pools with random sequences of arrivals, aborts, pauses and steps. No page is leaked or
wrongly shared, no batch exceeds the limits (the null model would refuse it), and every request finishes with the tokens that a plain loop
computes.

The Hypothesis profile `full` runs more than 10,000 steps.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.engine import request
from server.engine.loop import Engine
from server.engine.overlap import OverlappedEngine
from server.engine.request import Stage
from server.engine.step_model import GroupLimits, SeeingLimits, StepLimits
from server.messages import IDLE, Abort, Crop, Embed, Embedding, Failed, FinishReason, SamplingParams, Stats, Submit, TokenLogprob, Tokens
from tests.doubles.model import NullModel, hashed_logits

VOCAB = 40
LIMITS = StepLimits(vocab_size=VOCAB, max_context=96, max_tokens=24, max_seqs=5, groups=(GroupLimits(13),), embedding_size=8)
MARK = VOCAB - 2
SEEING = SeeingLimits(square_bytes=3, edge_tokens=1, token=VOCAB - 1, cost=4, most_squares=6, both_ways=True)
FULL = settings.get_current_profile_name() == "full"
LOGITS_OF = hashed_logits(VOCAB)
HIDDEN_OF = hashed_logits(LIMITS.embedding_size)
PATIENCE = st.sampled_from((None, None, None, 1, 4, 12))  # seconds until a request's deadline; None for no deadline
BEGINNINGS = tuple(tuple((7 * i + k) % VOCAB for i in range(40)) for k in range(2))


@cache
def plainly_generated(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(LOGITS_OF(np.array(tokens, np.int32)).argmax()))
    return tokens[len(prompt) :]


@cache
def plain_prompt_logprobs(prompt: tuple[int, ...]) -> list[tuple[int, float]]:
    """Return each prompt token after the first with its log-probability, computed by a plain loop."""
    found: list[tuple[int, float]] = []
    for i, token_id in enumerate(prompt[1:], 1):
        logits = LOGITS_OF(np.array(prompt[:i], np.int32)).astype(np.float64)
        found.append((token_id, float(logits[token_id] - np.log(np.exp(logits).sum()))))
    return found


class Machine(RuleBasedStateMachine):
    engine_class: type[Engine] = Engine
    limits: StepLimits = LIMITS
    model_class: type[NullModel] = NullModel

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.measured = 0.0  # reading of the clock that measures steps, in seconds
        self.reading_s = 0.001  # seconds by which each reading advances that clock
        model = self.model_class(self.limits, logits_of=LOGITS_OF)
        self.engine = self.engine_class(model, self.hear, clock=self.clock, deadline_clock=lambda: self.now)
        self.embeds: dict[str, Embed] = {}
        self.vectors: dict[str, np.ndarray] = {}
        self.dropped: set[str] = set()  # ids of requests that were aborted or missed their deadline
        self.received: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[str, tuple[TokenLogprob | None, ...]] = {}
        self.ends: dict[tuple[str, int], FinishReason] = {}
        self.submits: dict[str, Submit] = {}
        self.texts: dict[str, list[int]] = {}  # request id -> tokens of the prompt and of the longest possible answer

    def clock(self) -> float:
        self.measured += self.reading_s
        return self.measured

    def hear(self, message) -> None:
        match message:
            case Tokens():
                for event in message.events:
                    key = event.request_id, event.choice
                    assert key not in self.ends
                    self.received.setdefault(key, []).extend(event.token_ids)
                    if event.prompt_logprobs:
                        assert event.request_id not in self.logprobs
                        self.logprobs[event.request_id] = event.prompt_logprobs
                    if event.finish_reason is not None:
                        self.ends[key] = event.finish_reason
                    assert event.num_cached <= self.longest_known(self.submits[event.request_id])
            case Embedding():
                assert message.request_id not in self.vectors and message.request_id not in self.dropped
                self.vectors[message.request_id] = np.frombuffer(message.vector, "<f4")
            case Failed():
                assert message.code == "deadline_exceeded" and self.embeds[message.request_id].deadline <= self.now
                self.dropped.add(message.request_id)
            case Stats():
                assert message.num_pages_used <= message.num_pages

    def longest_known(self, submit: Submit) -> int:
        """Return the length of the longest prefix that this prompt shares with another request of the same cache salt. A prefix hit cannot
        be longer."""
        others = [self.texts[s.request_id] for s in self.submits.values() if s.cache_salt == submit.cache_salt and s is not submit]
        if not submit.cache_salt:
            others += [list(embed.prompt_ids) for embed in self.embeds.values()]
        return max((common(other, submit.prompt_ids) for other in others), default=0)

    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        num_shared=st.sampled_from((0, 16, 17, 31, 32, 40)),
        own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
        max_tokens=st.integers(1, 24),
        num_choices=st.sampled_from((1, 1, 1, 2, 4)),
        priority=st.sampled_from((0, 0, 0, 1, -1, IDLE)),
        key=st.sampled_from("abc"),
        salt=st.sampled_from(("", "", "x")),
        prompt_logprobs=st.sampled_from((None, None, 0)),
        patience=PATIENCE,
    )
    def submit(self, beginning, num_shared, own, max_tokens, num_choices, priority, key, salt, prompt_logprobs, patience) -> None:
        request_id = str(len(self.submits))
        prompt, crops = self.with_images((*beginning[:num_shared], *own))
        prompt_logprobs = None if crops else prompt_logprobs
        submit = Submit(
            request_id,
            prompt,
            SamplingParams(max_tokens=max_tokens, temperature=0.0, prompt_logprobs=prompt_logprobs),
            num_choices=num_choices,
            priority=priority,
            fairness_key=key,
            cache_salt=salt,
            deadline=None if patience is None else self.now + patience,
            excerpts=crops,
        )
        self.submits[request_id] = submit
        self.texts[request_id] = [*prompt, *plainly_generated(prompt, max_tokens)]
        self.engine.submit(submit)

    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        num_shared=st.sampled_from((0, 16, 40)),
        own=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=50),
        key=st.sampled_from("abc"),
        patience=PATIENCE,
    )
    def embed(self, beginning, num_shared, own, key, patience) -> None:
        deadline = None if patience is None else self.now + patience
        embed = Embed(f"text{len(self.embeds)}", self.without_images((*beginning[:num_shared], *own)), False, key, deadline)
        self.embeds[embed.request_id] = embed
        self.engine.embed(embed)

    def with_images(self, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Crop, ...]]:
        return prompt, ()

    def without_images(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        return prompt

    @rule(seconds=st.sampled_from((0.0, 1e-6, 1e-3, 1.0)))
    def steps_take(self, seconds: float) -> None:
        """Change how long steps take. Step times change how many prompt tokens the scheduler puts into a step, but not what a client
        receives."""
        self.reading_s = seconds

    @rule(seconds=st.integers(1, 5))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(num=st.integers(1, 6))
    def step(self, num: int) -> None:
        for _ in range(num):
            paused = self.engine.scheduler.paused
            had_work = bool(self.engine.scheduler.running or len(self.engine.scheduler.queue))
            ran = self.engine.step()
            self.engine.check_integrity()
            assert ran or paused or not had_work or not self.is_busy, "the engine had work but ran nothing"
            living = self.engine._requests.living.values()
            assert all((deadline := request.submit.deadline) is None or deadline > self.now for request in living)

    @property
    def is_busy(self) -> bool:
        return bool(self.engine.scheduler.running or len(self.engine.scheduler.queue))

    @precondition(lambda self: self.submits)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data, whole: bool) -> None:
        submit = data.draw(st.sampled_from(list(self.submits.values())))
        choice = None if whole else data.draw(st.integers(0, submit.num_choices - 1))
        self.engine.abort(Abort(submit.request_id, choice))

    @precondition(lambda self: self.embeds)
    @rule(data=st.data())
    def abort_text(self, data) -> None:
        request_id = data.draw(st.sampled_from(list(self.embeds)))
        self.engine.abort(Abort(request_id))
        if request_id not in self.vectors:
            self.dropped.add(request_id)

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.engine.pause(paused)

    @invariant()
    def whoever_ended_holds_nothing(self) -> None:
        self.engine.check_integrity()
        scheduler = self.engine.scheduler
        assert all(seq.stage is Stage.RUNNING for seq in scheduler.running)
        assert len(scheduler.running) <= LIMITS.max_seqs

    def teardown(self) -> None:
        self.engine.pause(False)
        # Each step advances at least the sequence of the highest rank by a token; other sequences may be preempted and start again.
        bound = 20 + sum((len(s.prompt_ids) + s.params.max_tokens) * s.num_choices for s in self.submits.values())
        bound += sum(len(embed.prompt_ids) for embed in self.embeds.values())
        for _ in range(bound):
            if not self.engine.has_work:
                break
            self.engine.step()
            self.engine.check_integrity()
        assert not self.engine.has_work, f"not finished after {bound} steps"
        assert self.engine.scheduler.pool.num_used == 0
        for submit in self.submits.values():
            expected = plainly_generated(submit.prompt_ids, min(submit.params.max_tokens, 96 - len(submit.prompt_ids)))
            for choice in range(submit.num_choices):
                key = submit.request_id, choice
                received = self.received.get(key, [])
                assert received == expected[: len(received)], key
                is_cut = self.ends[key] is FinishReason.ABORT or (
                    self.ends[key] is FinishReason.DEADLINE and submit.deadline is not None and submit.deadline <= self.now
                )
                assert is_cut or len(received) == len(expected), key
            # Prompt log-probabilities are sent with the first token of choice 0.
            if submit.params.prompt_logprobs is not None and self.received.get((submit.request_id, 0)):
                self.check_prompt(submit)
        for request_id, embed in self.embeds.items():
            assert (request_id in self.vectors) != (request_id in self.dropped)
            if request_id in self.vectors:
                np.testing.assert_array_equal(self.vectors[request_id], HIDDEN_OF(np.array(embed.prompt_ids, np.int32)))
        self.engine.close()

    def check_prompt(self, submit: Submit) -> None:
        first, *others = self.logprobs[submit.request_id]
        assert first is None
        received = [(one.token_id, one.logprob) for one in others if one is not None]
        expected = plain_prompt_logprobs(submit.prompt_ids)
        assert [token_id for token_id, _ in received] == [token_id for token_id, _ in expected]
        np.testing.assert_allclose([logprob for _, logprob in received], [logprob for _, logprob in expected], atol=1e-4)


def common(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class OverlappedMachine(Machine):
    engine_class = OverlappedEngine


class GroupsMachine(OverlappedMachine):
    """Repeat the test with a model of five cache groups: one group keeps all tokens, two groups have windows, and two groups keep states,
    in pages of 16 and of 32 tokens."""

    states = GroupLimits(9, 17, True), GroupLimits(9, 33, True, page_size=32)
    limits = replace(LIMITS, groups=(*LIMITS.groups, GroupLimits(9, window=20), GroupLimits(5, window=2), *states))


class WholeCrops(NullModel):
    """Keeps only the rows of images that are spared, and refuses steps that end within an image."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.forgets = True

    def run(self, batch):
        assert all(seen.row + seen.count == seen.excerpt.num_tokens for seen in batch.seen), batch.seen
        logits = super().run(batch)
        assert not self.late, "an image was not encoded before its step"
        return logits


class ImagesMachine(OverlappedMachine):
    """Repeat the test with images whose tokens must all be in one step. The first two tokens MARK of a prompt become images."""

    limits = replace(LIMITS, excerpts=(SEEING,), groups=(*LIMITS.groups, GroupLimits(9, window=20)))
    model_class = WholeCrops

    def with_images(self, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Crop, ...]]:
        found: list[int] = []
        crops: list[Crop] = []
        for number, token_id in enumerate(prompt):
            if token_id == MARK and len(crops) < 2:
                rows, columns = ((2, 3), (4, 1))[number % 2]
                crops.append(Crop.of(bytes(3 * rows * columns), rows, columns))
                found += [SEEING.token] * crops[-1].num_tokens
            else:
                found += self.without_images((token_id,))
        return tuple(found), tuple(crops)

    @rule()
    def forget(self) -> None:
        """Forget the rows of all images, also those that the plan for the next step reads: its sequences wait again."""
        self.engine._model.encoded = set()

    def without_images(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(0 if token_id == SEEING.token else token_id for token_id in prompt)


class TurnsMachine(OverlappedMachine):
    """Repeat the test with turns of few tokens, so that sequences of a key often make way for each other."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(request, "TURN", 2)

    @initialize(prompts=st.lists(st.integers(0, VOCAB - 1), min_size=12, max_size=20))
    def many(self, prompts) -> None:
        for token_id in prompts:
            self.submit((), 0, [token_id], 24, 1, 0, "a", "", None, None)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.patch.undo()


SCALE = settings(
    max_examples=150 if FULL else 15,
    stateful_step_count=60 if FULL else 40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if FULL else [])],  # shrinking takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestPlain = Machine.TestCase
TestPlain.settings = SCALE
TestOverlapped = OverlappedMachine.TestCase
TestOverlapped.settings = SCALE
TestTurns = TurnsMachine.TestCase
TestTurns.settings = SCALE
TestGroups = GroupsMachine.TestCase
TestGroups.settings = SCALE
TestImages = ImagesMachine.TestCase
TestImages.settings = SCALE
