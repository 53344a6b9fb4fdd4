"""The pace, which decides how many prompt tokens each step computes, on simulated machines with step times measured on real models.

The score of a pace is the sum of all requests' latencies, from arrival to the last token. The tests compare this score with the best of
several fixed policies, which give prompts the same number of tokens in every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import SimpleNamespace

import pytest

from server.engine.intake import open_request
from server.engine.overlap import OverlappedEngine
from server.engine.scheduling.pace import ALONE_S, EFFICIENT, IDLE_STEP_S, RECENT, SMALLEST, Measured, Pace, StepCosts
from server.engine.scheduling.scheduler import Scheduler
from server.engine.step_model import GroupLimits, StepLimits
from server.messages import IDLE, SamplingParams, Submit

LIMITS = StepLimits(vocab_size=64, max_context=4096, max_tokens=512, max_seqs=64, groups=(GroupLimits(8000),))
UNBOUNDED_S = 3600.0

# Machine -> (number of tokens in a step -> duration of that step in seconds), for a model of 0.5 billion parameters on two cores.
MACHINES: dict[str, Mapping[int, float]] = {
    "int8": {1: 0.030, 4: 0.031, 8: 0.036, 16: 0.055, 32: 0.095, 64: 0.17, 128: 0.32, 256: 0.62, 512: 1.24},
    "int4": {1: 0.018, 4: 0.021, 8: 0.030, 16: 0.052, 32: 0.092, 64: 0.17, 128: 0.32, 256: 0.62, 512: 1.24},
    "bf16": {1: 0.048, 4: 0.050, 8: 0.055, 16: 0.070, 32: 0.12, 64: 0.22, 128: 0.42, 256: 0.82, 512: 1.62},
    "int4 and a matrix unit": {1: 0.0133, 4: 0.0155, 16: 0.0185, 32: 0.0245, 64: 0.0361, 128: 0.058, 256: 0.103, 384: 0.145, 512: 0.198},
    "a matrix unit": {1: 0.048, 8: 0.050, 16: 0.052, 32: 0.058, 64: 0.070, 128: 0.10, 256: 0.18, 512: 0.34},
}
FEW = ("int4", "a matrix unit")  # two machines, for quick tests; on the others, steps cost as much in other proportions
machines = pytest.mark.parametrize(
    "machine", [pytest.param(steps, id=name, marks=() if name in FEW else pytest.mark.slow) for name, steps in MACHINES.items()]
)


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    num_prompt: int
    num_new: int
    priority: int = 0


class Fixed(Pace):
    """A fixed policy, for comparison: it gives prompts the same number of tokens in every step."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(LIMITS.max_tokens, Measured(), UNBOUNDED_S)
        self._num_tokens = num_tokens

    def prefill_budget(self, num_decode: int, *, is_halved: bool = False) -> int:
        return min(self._num_tokens, LIMITS.max_tokens - num_decode)


class Machine:
    """A simulated clock. Each step advances the clock by its duration, and some steps are randomly slower. `slowness` returns by what
    factor the machine is slower at a given time."""

    def __init__(self, costs: Mapping[int, float], slowness: Callable[[float], float] = lambda _: 1.0, noise: float = 0.04) -> None:
        self.now_s = 0.0
        self.steps_s: list[float] = []
        self._cost = StepCosts(costs)
        self._slowness = slowness
        self._noise = noise
        self._rng = random.Random(0)

    def __call__(self) -> float:
        return self.now_s

    def spend(self, num_tokens: int) -> None:
        disturbed = 1 + self._noise * abs(self._rng.gauss(0, 1)) + 0.2 * (self._rng.random() < 0.02)
        self.steps_s.append(self._cost(num_tokens) * disturbed * self._slowness(self.now_s))
        self.now_s += self.steps_s[-1]


@dataclass(frozen=True, slots=True)
class Served:
    first_s: list[float]  # per request: seconds from arrival to the first token
    whole_s: list[float]
    wall_s: float
    gaps_s: list[float]

    @property
    def lost_s(self) -> float:
        return sum(self.whole_s)


def serve(rig, machine: Machine, pace: Pace, requests: Sequence[Request]) -> Served:
    one = rig(limits=LIMITS, cost=machine, clock=machine, pace=pace)
    waiting, begun = list(enumerate(requests)), dict[int, float]()
    ended: dict[int, float] = {}
    gaps_s: list[float] = []
    while waiting or one.engine.has_work:
        if not one.engine.has_work:
            machine.now_s = max(machine.now_s, waiting[0][1].at_s)
        while waiting and waiting[0][1].at_s <= machine.now_s:
            number, request = waiting.pop(0)
            prompt = tuple((i * 7 + number) % 64 for i in range(request.num_prompt))
            params = SamplingParams(request.num_new, temperature=0.0, ignore_eos=True)
            one.engine.submit(Submit(str(number), prompt, params, priority=request.priority))
        num_streams = len(begun) - len(ended)
        one.engine.step()
        if num_streams:
            gaps_s.append(machine.steps_s[-1])
        for (name, _), outcome in one.outcomes.items():
            if outcome.token_ids:
                begun.setdefault(int(name), machine.now_s)
            if outcome.end is not None:
                ended.setdefault(int(name), machine.now_s)
    at = [request.at_s for request in requests]
    numbers = range(len(requests))
    return Served([begun[i] - at[i] for i in numbers], [ended[i] - at[i] for i in numbers], machine.now_s, gaps_s)


def burst(num: int = 32) -> list[Request]:
    return [Request(0.0, 128, 128)] * num


def arrivals(every_s: float, num: int = 24) -> list[Request]:
    rng, at_s = random.Random(1), 0.0
    found: list[Request] = []
    for _ in range(num):
        at_s += rng.expovariate(1 / every_s)
        found.append(Request(at_s, rng.choice((32, 128, 128, 400)), rng.choice((32, 64, 128))))
    return found


def long_beside_streams() -> list[Request]:
    return [Request(0.0, 16, 60)] * 16 + [Request(1.0, 2000, 8)]


LOADS: dict[str, Callable[[], list[Request]]] = {
    "a burst": burst,
    "steady arrivals": lambda: arrivals(2.5),
    "one long prompt": long_beside_streams,
}


QUICK = (
    ("int4, half as fast for seconds", "a burst"),
    ("int4, half as fast for seconds", "one long prompt"),
    ("a matrix unit", "steady arrivals"),
)
VARIANTS = {
    f"{name}{', half as fast for seconds' * half}": (MACHINES[name], half) for name in ("int4", "a matrix unit") for half in (False, True)
}


# The quick tests run each load on only one machine, whose speed may vary. The slow tests run all combinations.
@pytest.mark.parametrize(
    ("machine", "half_speed", "load"),
    [
        pytest.param(*variant, load, id=f"{name}-{loaded}", marks=[] if (name, loaded) in QUICK else pytest.mark.slow)
        for name, variant in VARIANTS.items()
        for loaded, load in LOADS.items()
    ],
)
def test_no_fixed_policy_is_much_better(rig, machine, load, half_speed: bool) -> None:
    def slowness(now_s: float) -> float:
        return 2.0 if half_speed and now_s % 10 > 6 else 1.0

    requests = load()
    found = serve(rig, Machine(machine, slowness), Pace(LIMITS.max_tokens, Measured(machine), UNBOUNDED_S), requests)
    fixed = [serve(rig, Machine(machine, slowness), Fixed(num), requests).lost_s for num in (32, 128, 256, 512)]
    assert min(fixed) / found.lost_s >= 0.9


@machines
def test_a_burst_gets_what_the_machine_can_do(rig, machine) -> None:
    """A burst of requests takes hardly longer than the ideal, which first prefills all prompts in full chunks and then decodes all requests
    together."""
    cost = StepCosts(machine)
    found = serve(rig, Machine(machine), Pace(LIMITS.max_tokens, Measured(machine), UNBOUNDED_S), burst())
    prompts_s = 32 * 128 / 512 * cost(512) * 1.04  # random disturbances multiply step times by 1.04 on average
    assert (prompts_s + 127 * cost(32) * 1.04) / found.wall_s >= 0.95
    assert median(found.first_s) <= 0.55 * prompts_s + cost(cost.efficient(512))  # a prompt ends only at the end of a step
    assert max(found.first_s) <= 1.15 * prompts_s


@machines
def test_a_measurement_of_small_steps_is_enough(rig, machine) -> None:
    """On a slow machine, a load measures no large steps. A burst then takes as long as if the load had measured all steps."""
    few = {size: seconds for size, seconds in machine.items() if size <= 64}
    all_s, few_s = (
        serve(rig, Machine(machine), Pace(LIMITS.max_tokens, Measured(steps), UNBOUNDED_S), burst()).lost_s for steps in (machine, few)
    )
    assert few_s <= 1.02 * all_s


@pytest.mark.parametrize(("machine", "chunk"), [("int8", 256), ("bf16", 256), ("int4 and a matrix unit", 384), ("a matrix unit", 512)])
def test_brief_steps_predict_the_efficient_chunk(machine: str, chunk: int) -> None:
    brief = {size: seconds for size, seconds in MACHINES[machine].items() if size in (1, 4, 16, 64)}
    assert Pace(LIMITS.max_tokens, Measured(brief), UNBOUNDED_S).prefill_budget(0) == chunk


def test_the_efficient_size_may_be_larger_than_all_measured_ones() -> None:
    assert StepCosts({}).efficient(512) is None
    assert StepCosts({1: 1.0}).efficient(512) == 1, "one size shows no cost that all sizes have"
    assert StepCosts({1: 1.0, 4: 1.0}).efficient(512) == 512
    assert StepCosts({1: 2.0, 16: 3.0}).efficient(512) == 384
    assert StepCosts({1: 0.11, 64: 6.5}).efficient(512) == 64
    assert StepCosts({1: 1.0, 4: 0.9}).efficient(512) == 512, "a measurement may be disturbed"


@machines
def test_gaps_stay_within_the_bound_that_was_set(rig, machine) -> None:
    bound_s = 0.1
    found = serve(rig, Machine(machine), Pace(LIMITS.max_tokens, Measured(machine), bound_s), long_beside_streams())
    floor_s = StepCosts(machine)(16 + SMALLEST)
    assert max(found.gaps_s) <= 1.4 * max(bound_s, floor_s), "1.4 allows for slow steps"
    unbounded = serve(rig, Machine(machine), Pace(LIMITS.max_tokens, Measured(machine), UNBOUNDED_S), long_beside_streams())
    assert max(unbounded.gaps_s) > max(found.gaps_s)
    assert unbounded.first_s[-1] < found.first_s[-1]
    assert unbounded.first_s[-1] <= 1.5 * 2000 / 512 * StepCosts(machine)(512)


def test_a_bound_holds_without_a_measurement_and_after_the_machine_has_changed(rig) -> None:
    machine = MACHINES["int8"]
    for known in ({}, {1: 0.003, 16: 0.005}):
        found = serve(
            rig, Machine(machine), Pace(LIMITS.max_tokens, Measured(known), 0.25), [*long_beside_streams(), Request(40.0, 2000, 8)]
        )
        assert max(found.gaps_s[len(found.gaps_s) // 2 :]) <= 1.4 * 0.25


class Counter:
    """A simulated machine whose steps take no time. `taken` lists the number of tokens of each step."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def spend(self, num_tokens: int) -> None:
        self.taken.append(num_tokens)


@pytest.mark.parametrize(("tokens_per_token", "most"), [(0.0, 20 * 8), (1 / 32, 5 * 8)], ids=["free", "dear"])
def test_chunks_behind_long_contexts_share_a_step_as_far_as_their_contexts_cost_no_more(rig, tokens_per_token: float, most: int) -> None:
    """The 20 prompts share a cached prefix of 1,600 tokens, and each prompt has eight more tokens. If reading the prefix costs nothing, one
    step computes the chunks of all prompts. If reading is expensive, a chunk costs as much as 58 tokens of the step's budget of 256, so a
    step computes at most five chunks."""
    steps, shared, counter = MACHINES["int8"], tuple(i % 64 for i in range(1600)), Counter()
    pace = Pace(LIMITS.max_tokens, Measured(steps, tokens_per_token * steps[512] / 512), UNBOUNDED_S)
    one = rig(limits=LIMITS, cost=counter, pace=pace)
    one.run([Submit("first", (*shared, 1), SamplingParams(1, temperature=0.0, ignore_eos=True))])
    counter.taken.clear()
    one.run([Submit(str(i), (*shared, *([i] * 8)), SamplingParams(1, temperature=0.0, ignore_eos=True)) for i in range(20)])
    assert sum(counter.taken) == 20 * 8 and max(counter.taken) == most


# --- the estimated step time -------------------------------------------------------------------------------------------


def test_costs_are_linear_between_measured_sizes_and_beyond() -> None:
    costs = StepCosts({1: 0.010, 17: 0.026, 33: 0.058})
    assert [costs(n) for n in (1, 9, 17, 25, 33, 66)] == pytest.approx([0.010, 0.018, 0.026, 0.042, 0.058, 0.124])
    assert costs.most_tokens(1, 512, 0.0421) == 25
    assert costs.most_tokens(1, 512, 60.0) == 512
    assert costs.most_tokens(20, 512, 0.001) == 20, "the minimum holds even if no step is that fast"


def test_the_time_of_a_prompt_is_that_of_its_steps() -> None:
    steps = {1: 1.0, 64: 10.0, 128: 16.0}
    pace = Pace(128, Measured(steps), UNBOUNDED_S)
    assert pace.prompt_s(64) == 10.0 and pace.prompt_s(128) == 16.0
    assert pace.prompt_s(1280) == pytest.approx(160.0)
    assert Pace(128, Measured(), UNBOUNDED_S).prompt_s(1000) == 0.0


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    costs = StepCosts({1: 0.010, 512: 0.5})
    for _ in range(10):
        costs.observe(512, 2.0)
    assert costs.most_tokens(16, 512, 1.0) < 400
    for _ in range(RECENT):
        costs.observe(16, costs(16))
    for _ in range(20):
        costs.observe(16, 0.010 + 15 * 0.49 / 511)
    assert costs.most_tokens(16, 512, 1.0) == 512


def test_one_disturbed_step_changes_little() -> None:
    costs = StepCosts({1: 0.010, 512: 0.5})
    costs.observe(256, costs(256))
    before = costs(256)
    costs.observe(256, 100 * before)
    assert costs(256) <= 1.8 * before
    for _ in range(12):
        costs.observe(256, before)
    assert costs(256) == pytest.approx(before, rel=0.05)


def of_a_batch(num: int = 40, num_prompt: int = 128) -> list[Request]:
    return [Request(0.0, num_prompt, 64, IDLE)] * num


@machines
def test_streams_are_hardly_slower_beside_a_batch(rig, machine) -> None:
    """Streams that begin while a batch runs wait for one short step, and are then as fast as alone."""
    streams = [Request(1.0, 16, 200)] * 8

    def served(requests: Sequence[Request]) -> Served:
        return serve(rig, Machine(machine), Pace(LIMITS.max_tokens, Measured(machine), UNBOUNDED_S), requests)

    alone, beside = served(streams), served([*of_a_batch(), *streams])
    step_s = max(IDLE_STEP_S, 2 * machine[1])
    assert max(beside.first_s[-8:]) <= max(alone.first_s) + 1.5 * step_s
    assert max(beside.whole_s[-8:]) <= 1.05 * max(alone.whole_s) + 1.5 * step_s


@pytest.mark.parametrize("noise", [pytest.param(0.04, marks=pytest.mark.slow), 0.4])
def test_costs_that_were_measured_too_low_slow_down_no_stream(rig, noise: float) -> None:
    """Steps are measured with one prompt. A step of several sequences costs more, above all of a small model. Streams that come and go must
    not pay for that."""
    believed = {1: 0.0055, 4: 0.0058, 16: 0.0092, 64: 0.024, 256: 0.083, 512: 0.17}
    real = {1: 0.0055, 2: 0.0062, 4: 0.0087, 8: 0.0134, 16: 0.021, 64: 0.05, 256: 0.12, 512: 0.2}
    rng, at_s = random.Random(3), 0.0
    streams: list[Request] = []
    for _ in range(60):
        at_s += rng.expovariate(1 / 0.25)
        streams.append(Request(at_s, 16, 48))

    def served(requests: Sequence[Request]) -> Served:
        return serve(rig, Machine(real, noise=noise), Pace(LIMITS.max_tokens, Measured(believed), UNBOUNDED_S), requests)

    alone, beside = served(streams), served([*of_a_batch(400, 32), *streams])
    assert median(beside.whole_s[-60:]) <= 1.06 * median(alone.whole_s)
    assert median(beside.first_s[-60:]) <= median(alone.first_s) + believed[1], "a pause between streams begins with short steps"
    assert beside.wall_s <= 2 * served(of_a_batch(400, 32)).wall_s + alone.wall_s, "the batch advances"


@machines
def test_a_batch_gets_all_that_others_leave(rig, machine) -> None:
    """Beside other requests, a batch takes little longer than alone plus the time of the others, because its steps begin short after each
    of them. Alone it uses most of what short steps allow."""

    def served(requests: Sequence[Request]) -> Served:
        return serve(rig, Machine(machine), Pace(LIMITS.max_tokens, Measured(machine), UNBOUNDED_S), requests)

    others = [Request(float(at), 128, 32) for at in range(1, 8)]
    alone = served(of_a_batch())
    both = served([*of_a_batch(), *others])
    assert max(both.whole_s[:40]) <= 1.25 * (alone.wall_s + sum(both.whole_s[40:]))
    assert alone.wall_s <= 1.5 * served([Request(0.0, 128, 64)] * 40).wall_s


def test_an_image_of_a_batch_beside_streams_is_charged() -> None:
    """A step that encodes an image of a batch may take long. Afterwards streams run for a hundred times as long before the next one."""
    pace = Pace(LIMITS.max_tokens, Measured({1: 0.01, 128: 0.3}), UNBOUNDED_S)
    for _ in range(50):
        pace.observe(1, 0.01)
    assert pace.idle_budget(1) > 0
    pace.charge_idle(1, 0.51)
    steps = 0
    while pace.idle_budget(1) < 1:
        pace.observe(1, 0.01)
        steps += 1
    assert 0.5 / 0.01 * 90 < steps < 0.5 / 0.01 * 110
    pace.charge_idle(0, 5.0)  # beside no stream: nobody waited
    assert pace.idle_budget(1) > 0


def test_a_batch_waits_while_a_prompt_waits(rig) -> None:
    """No token of a batch delays the prompt of another request, whatever the pace allows."""
    one = rig(limits=LIMITS, pace=Pace(LIMITS.max_tokens, Measured(), UNBOUNDED_S))
    one.engine.submit(Submit("batch", tuple(range(40)), SamplingParams(50, ignore_eos=True), priority=IDLE))
    one.steps(3)
    one.engine.submit(Submit("other", tuple(range(60)), SamplingParams(3, ignore_eos=True)))
    before = len(one.outcomes["batch", 0].token_ids)
    one.until(lambda: ("other", 0) in one.outcomes)
    assert len(one.outcomes["batch", 0].token_ids) <= before + 1, "a token was under way"
    one.run()
    assert len(one.outcomes["batch", 0].token_ids) == 50


@pytest.mark.parametrize("num_prompt", [40, 3])
def test_a_prompt_that_arrives_late_takes_the_place_of_a_batch_in_the_next_step(rig, num_prompt: int) -> None:
    """The overlapped engine plans a step while the one before runs. Beside a prompt that arrives meanwhile, no idle token stays in it."""
    sizes: list[int] = []
    lines = [Submit(f"line {i}", tuple(range(i, num_prompt + i)), SamplingParams(20, ignore_eos=True), priority=IDLE) for i in range(6)]
    pace = Pace(LIMITS.max_tokens, Measured(), UNBOUNDED_S)
    one = rig(OverlappedEngine, limits=LIMITS, pace=pace, cost=SimpleNamespace(spend=sizes.append))
    for line in lines:
        one.engine.submit(line)
    for number in range(3, 30, 4):
        one.steps(4)
        one.engine.submit(Submit(f"late {number}", (1, 2, 3, number), SamplingParams(1, ignore_eos=True)))
        one.steps(1)
        assert sizes[-1] == 4, "the prompt alone"
    outcomes = one.run()
    alone = rig(limits=LIMITS).run(lines)
    assert all(outcomes[line.request_id, 0].token_ids == alone[line.request_id, 0].token_ids for line in lines)


def test_tokens_that_a_grammar_forces_in_a_batch_run_in_short_steps() -> None:
    """A step of a batch alone is short, so it may have no room for all tokens that a grammar has forced. They run in several steps."""
    costs = StepCosts(MACHINES["int4"])
    scheduler = Scheduler(LIMITS, Pace(LIMITS.max_tokens, Measured(MACHINES["int4"]), UNBOUNDED_S))
    lines = [open_request(Submit(name, (1, 2, 3), SamplingParams(99), priority=IDLE), 0, limits=LIMITS, eos_ids=()) for name in "ab"]
    seqs = [seq for line in lines for seq in line.sequences]
    for number, seq in enumerate(seqs):
        seq.rank = (IDLE, number, 0)
        scheduler.add(lines[number])

    def run_step() -> float:
        plan = scheduler.settle(scheduler.schedule())
        assert plan.items, "nothing else runs"
        scheduler.collect(plan)
        scheduler.observe(plan, step_s := costs(plan.num_tokens))
        scheduler.check_integrity(seqs)
        return step_s

    while any(seq.num_computed < seq.num_prompt for seq in seqs):
        run_step()
    for seq in seqs:
        for token_id in range(60):
            seq.append(token_id)
    scheduler.pace.observe(1, costs(1))  # a stream has just ended
    steps_s = [run_step()]
    while any(seq.num_to_compute for seq in seqs):
        steps_s.append(run_step())
    assert steps_s[0] == costs(1) and max(steps_s) <= 1.1 * IDLE_STEP_S


@pytest.mark.parametrize("hears", [False, True])
def test_a_batch_that_leaves_a_plan_gives_its_pages_back(hears: bool) -> None:
    """A prompt that arrives late gets the pages, too, except one with audio that is heard already."""
    limits = replace(LIMITS, groups=(GroupLimits(9), GroupLimits(4, page_size=256))) if hears else replace(LIMITS, groups=(GroupLimits(9),))
    scheduler = Scheduler(limits, Pace(LIMITS.max_tokens, Measured(), UNBOUNDED_S))
    line, late = (
        open_request(Submit(name, tuple(range(60)), SamplingParams(20), priority=priority), number, limits=limits, eos_ids=())
        for number, (name, priority) in enumerate((("line", IDLE), ("late", 0)))
    )
    scheduler.add(line)
    (seq,) = line.sequences
    seq.has_heard = hears
    assert seq in scheduler.schedule().items and len(seq.held.lists[0].pages) == 4
    scheduler.add(late)
    plan = scheduler.extend()
    assert [*plan.items] == late.sequences and scheduler.num_preemptions == 0
    assert [len(pages.pages) for pages in seq.held.lists] == ([1, 1] if hears else [0])
    scheduler.check_integrity([seq, *late.sequences])


def test_a_batch_gives_up_its_places(rig) -> None:
    """A batch that fills all places makes room for other requests, and gets the same tokens as without them."""
    limits = StepLimits(vocab_size=64, max_context=256, max_tokens=64, max_seqs=4, groups=(GroupLimits(40),))
    lines = [Submit(f"line {i}", tuple(range(i, 30 + i)), SamplingParams(40, ignore_eos=True, seed=i), priority=IDLE) for i in range(6)]
    alone = rig(limits=limits).run(lines)
    one = rig(limits=limits)
    for line in lines:
        one.engine.submit(line)
    one.steps(6)
    for i in range(4):
        one.engine.submit(Submit(f"other {i}", tuple(range(20 + i)), SamplingParams(10, ignore_eos=True)))
    one.until(lambda: all((f"other {i}", 0) in one.outcomes for i in range(4)), max_steps=8)
    found = one.run()
    assert [found[line.request_id, 0].token_ids for line in lines] == [alone[line.request_id, 0].token_ids for line in lines]


@pytest.mark.parametrize(
    ("num_tokens", "num_decode", "max_gap_s", "limit_s"),
    [
        (0, 0, 1.0, ALONE_S),  # only new requests wait
        (128, 0, 1.0, 0.3),  # half of the time, beside prompts
        (1, 1, 1.0, 0.01 / (EFFICIENT - 1)),  # a step is a small share of the time
        (1, 1, 0.2, 0.19),  # the stream waits for the step, too
        (128, 1, 1.0, 0.7),
        (1, 1, 0.005, 0.0),  # the step alone takes longer than the gap
    ],
)
def test_excerpts_are_encoded_for_as_long_as_streams_may_wait(num_tokens: int, num_decode: int, max_gap_s: float, limit_s: float) -> None:
    pace = Pace(LIMITS.max_tokens, Measured({1: 0.01, 128: 0.3}), max_gap_s)
    assert pace.encoding_s(num_tokens, num_decode) == pytest.approx(limit_s)
