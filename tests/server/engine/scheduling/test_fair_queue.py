"""The queue orders requests first by priority, then by how many tokens their API key has used, so that each key gets a fair share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from server.engine.scheduling.fair_queue import DEEPEST_DEBT, QUANTUM, FairQueue


@dataclass(frozen=True)
class Work:
    fairness_key: str
    rank: tuple[int, int, int]
    cost: int = 100
    had_turn: bool = False


def served(queue: FairQueue[Work], num_turns: int) -> list[Work]:
    turns = []
    for _ in range(num_turns):
        work = queue.head()
        if work is None:
            break
        queue.remove(work)
        queue.charge(work.fairness_key, work.cost)
        turns.append(work)
    return turns


def test_lower_priority_value_first_then_arrival() -> None:
    queue: FairQueue[Work] = FairQueue()
    works = [Work("a", (1, 0, 0)), Work("a", (0, 2, 0)), Work("a", (0, 1, 1)), Work("b", (-1, 3, 0))]
    for work in works:
        queue.push(work)
    assert served(queue, 9) == [works[3], works[2], works[1], works[0]]
    assert queue.head() is None and len(queue) == 0


def test_keys_share_tokens_whatever_they_queue() -> None:
    queue: FairQueue[Work] = FairQueue()
    for i in range(400):
        queue.push(Work("many small", (0, i, 0), cost=50))
        queue.push(Work("few large", (0, i, 1), cost=800))
    tokens = Counter()
    for work in served(queue, 340):
        tokens[work.fairness_key] += work.cost
    assert abs(tokens["many small"] - tokens["few large"]) <= QUANTUM + 800


def test_a_late_key_need_not_wait_for_a_flood() -> None:
    queue: FairQueue[Work] = FairQueue()
    for i in range(1000):
        queue.push(Work("flood", (0, i, 0)))
    served(queue, 20)
    late = Work("late", (0, 5000, 0))
    queue.push(late)
    turns = served(queue, 20)
    assert late in turns[: QUANTUM // 100 + 2]


def test_debt_is_bounded_and_forgotten_without_contention() -> None:
    queue: FairQueue[Work] = FairQueue()
    queue.push(Work("a", (0, 0, 0)))
    queue.push(Work("b", (0, 1, 0)))
    queue.charge("a", 10**9)
    queue.push(Work("a", (0, 2, 0)))
    for i in range(3, 3 + 2 * DEEPEST_DEBT // 100):
        queue.push(Work("b", (0, i, 0)))
    turns = served(queue, 10**6)
    first_of_a = next(i for i, work in enumerate(turns) if work.fairness_key == "a")
    assert DEEPEST_DEBT // 100 <= first_of_a <= (DEEPEST_DEBT + 2 * QUANTUM) // 100 + 2
    queue.charge("a", 10**9)
    queue.push(Work("a", (0, 0, 0)))
    queue.push(Work("b", (0, 1, 0)))
    assert served(queue, 1)[0].fairness_key == "a", "a charge is forgotten if nothing waits"


def test_the_caller_decides_whether_fresh_items_of_a_key_go_first() -> None:
    queue: FairQueue[Work] = FairQueue()
    early, late, fresh = Work("a", (0, 0, 0), had_turn=True), Work("a", (0, 1, 0), had_turn=True), Work("a", (0, 2, 0))
    for work in (late, fresh, early):
        queue.push(work)
    assert queue.head(lambda key: key == "a") is fresh and queue.head(lambda key: key != "a") is early
    queue.remove(fresh)
    assert queue.head(lambda _key: True) is early
    queue.remove(early)
    queue.remove(late)
    queue.push(fresh)
    assert queue.head(lambda _key: False) is fresh
