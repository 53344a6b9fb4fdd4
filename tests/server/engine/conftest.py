"""An engine with a model that computes nothing, and a collector of the messages that the engine sends."""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from server.constraints.compiler import ConstraintCompiler
from server.engine.loop import Engine
from server.engine.page_exchange import ExchangeOf
from server.engine.scheduling.pace import Pace
from server.engine.step_model import GroupLimits, StepLimits
from server.messages import (
    Constraint,
    ConstraintKind,
    Embedding,
    Failed,
    FinishReason,
    FromWorker,
    PagesGiven,
    SamplingParams,
    Stats,
    Step,
    Submit,
    TokenLogprob,
    Tokens,
)
from tests.doubles.model import LogitsOf, NullModel, StepTime

EOS = 0
VOCAB = 320


@dataclass
class Outcome:
    """Everything that the engine sent for one of a request's answers ("choices")."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    end: tuple[FinishReason, int | None] | None = None


class Rig:
    """An engine with a null model. The rig collects the engine's messages and checks the engine's integrity after every step."""

    def __init__(
        self,
        engine: type[Engine] = Engine,
        *,
        limits: StepLimits | None = None,
        logits_of: LogitsOf | None = None,
        cost: StepTime | None = None,
        constraints: ConstraintCompiler | None = None,
        eos_ids: tuple[int, ...] = (EOS,),
        pace: Pace | None = None,
        clock: Callable[[], float] = time.perf_counter,
        exchange: ExchangeOf | None = None,
        model_class: type[NullModel] = NullModel,
    ) -> None:
        self.limits = limits or StepLimits(VOCAB, max_context=512, max_tokens=128, max_seqs=32, groups=(GroupLimits(600),))
        self.outcomes: dict[tuple[str, int], Outcome] = {}
        self.failed: dict[str, Failed] = {}
        self.embedded: dict[str, Embedding] = {}
        self.stats: Stats | None = None
        self.announced_s: list[float] = []  # limits of long steps
        self.num_cached: dict[str, int] = {}
        self.given: list[PagesGiven] = []
        self.model = model_class(self.limits, logits_of=logits_of, cost=cost)
        self.engine = engine(
            self.model,
            self.hear,
            eos_ids=eos_ids,
            constraints=constraints,
            pace=pace,
            clock=clock,
            exchange=exchange,
        )

    def hear(self, message: FromWorker) -> None:
        match message:
            case Tokens():
                for event in message.events:
                    outcome = self.outcomes.setdefault((event.request_id, event.choice), Outcome())
                    assert outcome.end is None, "a choice sent tokens after its end"
                    outcome.token_ids += event.token_ids
                    outcome.logprobs += event.logprobs
                    outcome.prompt_logprobs = outcome.prompt_logprobs or event.prompt_logprobs
                    self.num_cached.setdefault(event.request_id, event.num_cached)
                    if event.finish_reason is not None:
                        outcome.end = event.finish_reason, event.stop_token_id
            case Failed():
                assert message.request_id not in self.failed
                self.failed[message.request_id] = message
            case Embedding():
                assert message.request_id not in self.embedded
                self.embedded[message.request_id] = message
            case Stats():
                self.stats = message
            case PagesGiven():
                self.given.append(message)
            case Step():
                self.announced_s.append(message.limit_s)
            case _:
                raise AssertionError(message)

    def step(self) -> bool:
        ran = self.engine.step()
        self.engine.check_integrity()
        return ran

    def steps(self, num: int) -> None:
        """Run `num` steps, or fewer if the engine runs out of work. A step that only waits for a constraint is not counted."""
        while num and self.engine.has_work:
            if self.step():
                num -= 1
            else:
                time.sleep(0.001)

    def until(self, condition: Callable[[], object], max_steps: int = 500) -> None:
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"not reached in {max_steps} steps")

    def run(self, submits: Iterable[Submit] = (), *, per_step: int = 1_000_000, max_steps: int = 20_000) -> dict[tuple[str, int], Outcome]:
        """Run until the engine has no work. Before each step, submit `per_step` requests. A step may do nothing while a constraint is
        compiled."""
        arriving, num_steps, end = deque(submits), 0, time.monotonic() + 120
        while arriving or self.engine.has_work:
            for _ in range(min(per_step, len(arriving))):
                self.engine.submit(arriving.popleft())
            if self.step():
                num_steps += 1
            else:
                time.sleep(0.001)
            assert num_steps <= max_steps and time.monotonic() < end, f"not finished after {num_steps} steps"
        assert self.engine.scheduler.pool.num_used == 0
        return self.outcomes


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    """Return a small byte-level BPE tokenizer as JSON. Because of its merges, several token sequences have the same text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(['{"name": "bob", "colour": "green"} the colour of the name'] * 20, trainer)
    assert tokenizer.token_to_id("<eos>") == EOS and tokenizer.get_vocab_size() < VOCAB
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def tokenizer(tokenizer_json: str) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json)


@pytest.fixture(scope="session")
def constraints(tokenizer_json: str) -> Iterable[ConstraintCompiler]:
    compiler = ConstraintCompiler(tokenizer_json.encode, eos_ids=[EOS], vocab_size=VOCAB)
    yield compiler
    compiler.close()


@pytest.fixture(scope="session")
def rig() -> type[Rig]:
    return Rig


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["green", "greek"]}, "name": {"type": "string", "maxLength": 8}},
    "required": ["colour", "name"],
    "additionalProperties": False,
}
CONSTRAINTS = (
    Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    Constraint(ConstraintKind.REGEX, "(the|of) [a-f]{3,9}!"),
    Constraint(ConstraintKind.CHOICE, '["colour", "name", "a (b)"]'),
)


@pytest.fixture(scope="session")
def random_submits() -> Callable[[int, int], list[Submit]]:
    """Return a function that makes requests with mixed lengths, parameters, seeds and constraints; some prompts share a prefix."""

    def make(num: int, seed: int, max_prompt: int = 90, max_tokens: int = 40) -> list[Submit]:
        rng = random.Random(seed)
        common = tuple(rng.randrange(1, VOCAB) for _ in range(70))
        submits: list[Submit] = []
        for i in range(num):
            shared = common[: rng.choice((0, 0, 17, 32, 70))]
            own = tuple(rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, max_prompt)))
            constraint = rng.choice((*[None] * 9, *CONSTRAINTS))
            params = SamplingParams(
                max_tokens=rng.randrange(1, max_tokens),
                min_tokens=rng.choice((0, 0, 3)) if constraint is None else 0,
                temperature=rng.choice((0.0, 0.7, 1.0, 1.6)),
                top_p=rng.choice((1.0, 1.0, 0.9)),
                top_k=rng.choice((0, 0, 5, 40)),
                min_p=rng.choice((0.0, 0.0, 0.05)),
                typical_p=rng.choice((1.0, 1.0, 0.8)),
                frequency_penalty=rng.choice((0.0, 0.0, 0.6)),
                presence_penalty=rng.choice((0.0, 0.0, -0.4)),
                repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
                logit_bias=rng.choice(((), ((7, 2.5), (9, -50.0)))),
                banned_token_ids=rng.choice(((), (3, 4, 5))) if constraint is None else (),
                stop_token_ids=rng.choice(((), tuple(range(100, 110)))) if constraint is None else (),
                ignore_eos=rng.random() < 0.5,
                seed=rng.getrandbits(63),
                logprobs=rng.choice((None, None, 0, 3)),
                processed_logprobs=rng.random() < 0.5,
                prompt_logprobs=rng.choice((None, None, None, None, 2)),
                constraint=constraint,
            )
            num_choices = rng.choice((1, 1, 1, 1, 2, 3))
            submits.append(Submit(f"r{i}", shared + own, params, num_choices=num_choices, fairness_key=f"key{i % 3}"))
        return submits

    return make
