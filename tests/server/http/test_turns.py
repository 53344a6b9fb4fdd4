"""Each iteration of the event loop runs one piece of work of each queue."""

from __future__ import annotations

import asyncio

from server.http.turns import Turns


def test_further_work_does_not_delay_fresh_work():
    done: list[str] = []

    async def run() -> None:
        turns = Turns()
        for number in range(3):
            turns.add(lambda number=number: done.append(f"further {number}"), is_fresh=False)
        await asyncio.sleep(0)
        assert done == ["further 0"]
        turns.add(lambda: done.append("fresh"), is_fresh=True)
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert done == ["further 0", "fresh", "further 1", "further 2"]


def test_work_may_add_work():
    done: list[int] = []

    async def run() -> None:
        turns = Turns()

        def again() -> None:
            done.append(len(done))
            if len(done) < 5:
                turns.add(again, is_fresh=True)

        turns.add(again, is_fresh=True)
        while len(done) < 5:
            await asyncio.sleep(0)

    asyncio.run(run())
    assert done == [0, 1, 2, 3, 4]


def test_work_that_fails_costs_no_other_work():
    done: list[str] = []
    told: list[str] = []

    def fail() -> None:
        raise ValueError("no")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(str(context["exception"])))
        turns = Turns()
        turns.add(fail, is_fresh=True)
        turns.add(lambda: done.append("further"), is_fresh=False)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert (done, told) == (["further"], ["no"])
