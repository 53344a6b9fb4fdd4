"""Steps go through the stages of a model, whole or in parts, and a lost stage is noticed."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from server.engine.step_model import Places, StepBatch
from server.stages.link import Link, StageLost
from server.stages.messages import CopyPage, Ended, Run, Stream
from server.stages.relay import Relay, fastest, parts_of

SIZE = 4


def batch_of(counts: list[int], starts: list[int]) -> StepBatch:
    """Return a step of sequences that each compute `counts` tokens after `starts` tokens of context."""
    num_tokens = sum(counts)
    seq_ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    positions = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]).astype(np.int32)
    ends = np.cumsum(counts)
    return StepBatch(
        tokens=np.arange(100, 100 + num_tokens, dtype=np.int32),
        positions=positions,
        query_starts=np.append(0, ends).astype(np.int32),
        seq_ids=seq_ids,
        context_lens=np.array([start + count for start, count in zip(starts, counts, strict=True)], np.int32),
        places=(Places(positions + 1000 * seq_ids, np.arange(2 * len(counts), dtype=np.int32).reshape(-1, 2)),),
        logit_rows=(ends - 1).astype(np.int32),
        hidden_rows=np.array([0], np.int32),
    )


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 100])
def test_parts_are_the_step(num_parts: int) -> None:
    """The parts have the tokens, slots and rows of the step in the same order. Each part is itself a step: its sequences are numbered from
    0, and the context of each ends with its last token."""
    batch = batch_of([7, 1, 1, 12, 1], [0, 5, 9, 3, 0])
    parts = parts_of(batch, num_parts)
    assert len(parts) == min(num_parts, len(batch.tokens))
    for of in (lambda part: part.tokens, lambda part: part.positions, lambda part: part.places[0].slots):
        np.testing.assert_array_equal(np.concatenate([of(part) for part in parts]), of(batch))
    rows = [part.tokens[part.logit_rows] for part in parts]
    np.testing.assert_array_equal(np.concatenate(rows), batch.tokens[batch.logit_rows])
    assert sum(len(part.hidden_rows) for part in parts) == 1
    tables = {int(token): table for token, table in zip(batch.tokens, batch.places[0].page_tables[batch.seq_ids], strict=True)}
    for part in parts:
        assert part.query_starts[0] == 0 and part.query_starts[-1] == len(part.tokens) and part.query_starts.dtype == np.int32
        assert part.seq_ids[0] == 0 and part.seq_ids[-1] == len(part.context_lens) - 1
        for seq, (begin, end) in enumerate(zip(part.query_starts[:-1], part.query_starts[1:], strict=True)):
            assert (part.seq_ids[begin:end] == seq).all()
            assert part.context_lens[seq] == part.positions[end - 1] + 1
            np.testing.assert_array_equal(part.places[0].page_tables[seq], tables[int(part.tokens[begin])])


def test_a_step_is_cut_where_that_pays() -> None:
    """Two stages with cores of their own: many tokens take time in proportion, but few take as long as reading the weights does."""
    num_parts = fastest(lambda num_tokens: max(0.01, num_tokens * 0.001), 2)
    assert [num_parts(num_tokens) for num_tokens in (1, 8, 10)] == [1, 1, 1]
    assert num_parts(20) == 2 and num_parts(512) == 8
    assert fastest(lambda num_tokens: 1.0, 5)(512) == 1


class Fake(threading.Thread):
    """A stage that adds a number to what it gets."""

    def __init__(self, link: Link, number: int, serve: Callable[[int], bool] = lambda _num: True) -> None:
        super().__init__(daemon=True)
        self.copied: list[CopyPage] = []
        self.link, self._number, self._serve = link, number, serve
        self.start()

    def run(self) -> None:
        waiting: list[Any] = []
        num_runs = 0
        try:
            while True:
                message, arrays = self.link.receive()
                if isinstance(message, CopyPage):
                    self.copied.append(message)
                elif isinstance(message, Run) and self._number == 0:
                    waiting = [np.tile(arrays[0][:, None].astype(np.float32), SIZE)]
                elif isinstance(message, Stream):
                    waiting = [arrays[0] + self._number]
                if waiting:
                    num_runs += 1
                    if not self._serve(num_runs):
                        self.link.shut()
                        return
                    self.link.send(Stream(), [waiting.pop()])
        except StageLost:
            return
        finally:
            self.link.close()


@contextmanager
def stages(num: int, num_parts: int = 1, serve: Callable[[int], bool] = lambda _num: True) -> Generator[tuple[Relay, list[Fake]]]:
    pairs = [socket.socketpair() for _ in range(num)]
    relay = Relay([Link(near, f"stage {i + 1}") for i, (near, _) in enumerate(pairs)], lambda _num_tokens: num_parts)
    fakes = [Fake(Link(far, "the worker"), i, serve if i == 0 else lambda _num: True) for i, (_, far) in enumerate(pairs)]
    yield relay, fakes
    relay.close()
    for fake in fakes:
        fake.join()


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_streams_pass_all_stages_in_order(num_stages: int, num_parts: int) -> None:
    batch = batch_of([30, 1, 5], [0, 8, 2])
    with stages(num_stages, num_parts) as (relay, fakes):
        for _ in range(20):
            found = [relay.receive() for _ in relay.begin(batch)]
            assert len(found) == num_parts
            expected = np.tile(batch.tokens[:, None], SIZE) + sum(range(num_stages))
            np.testing.assert_array_equal(np.concatenate(found), expected)
        assert relay.waited_s > 0
        relay.copy_page(0, 3, 4)
        assert [len(relay.receive()) for _ in relay.begin(batch_of([1], [0]))] == [1]
    assert [fake.copied for fake in fakes] == [[CopyPage(0, 3, 4)]] * num_stages


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_lost_stage_ends_the_step(num_stages: int) -> None:
    """With three stages, the lost one is not the last, the only one from which the worker reads itself."""
    batch = batch_of([3], [0])
    with stages(num_stages, serve=lambda num_runs: num_runs < 2) as (relay, _):
        assert [len(relay.receive()) for _ in relay.begin(batch)] == [3]
        with pytest.raises(StageLost, match="stage 1"):
            for _ in range(3):
                relay.begin(batch)
                relay.receive()


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_stage_that_is_lost_between_steps_is_told(num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.stages.relay.NOTICES_S", 0.01)
    told: queue.SimpleQueue[StageLost] = queue.SimpleQueue()
    with stages(num_stages) as (relay, fakes):
        relay.watch(told.put)
        fakes[0].link.shut()
        assert "stage 1" in str(told.get(timeout=60))


def test_a_step_that_runs_tells_itself_that_a_stage_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage's host has sent how the process ended. The step reads this message; the watch leaves it alone."""
    monkeypatch.setattr("server.stages.relay.NOTICES_S", 0.01)
    told = list[StageLost]()
    near, far = socket.socketpair()
    relay = Relay([Link(near, "stage 1")])
    relay.watch(told.append)
    relay.begin(batch_of([3], [0]))
    host = Link(far, "the worker")
    host.send(Ended("SIGSEGV", from_outside=False))
    host.shut()
    time.sleep(0.1)  # a part of this process's own is computed meanwhile
    with pytest.raises(StageLost, match="SIGSEGV") as lost:
        relay.receive()
    assert not lost.value.from_outside and not told
    relay.close()
    host.close()


def test_streams_are_read_while_the_step_computes() -> None:
    """A stage sends more than sockets hold, and has sent everything before the step asks for the first part."""
    batch, stream = batch_of([4], [0]), np.ones((1 << 20, SIZE), np.float32)
    near, far = socket.socketpair()
    relay, stage = Relay([Link(near, "stage 1")], lambda _num_tokens: 3), Link(far, "the worker")
    relay.begin(batch)
    sending = threading.Thread(target=lambda: [stage.send(Stream(), [stream * part]) for part in range(3)], daemon=True)
    sending.start()
    sending.join(60)
    assert not sending.is_alive()
    assert [relay.receive()[0, 0] for _ in range(3)] == [0, 1, 2]
    relay.close()
    stage.close()
