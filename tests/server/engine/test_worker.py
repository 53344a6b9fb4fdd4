"""The worker's loop, tested over a socket. While the front does not read, the worker pauses steps but still handles messages."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest

from runtime.device.base import CardUsage
from server.engine.channel import (
    LENGTH_BYTES,
    OUTBOX_MESSAGES,
    ChannelError,
    WorkerChannel,
    decode_from_worker,
    frame,
    payload_bytes,
)
from server.engine.step_model import GroupLimits, Logits, StepBatch, StepLimits
from server.engine.worker import RECEIVE_S, LoadedModel, Worker
from server.messages import (
    Abort,
    Card,
    Drain,
    Embed,
    Failed,
    FinishReason,
    FromFront,
    FromWorker,
    Ready,
    SamplingParams,
    Shutdown,
    Submit,
    Tokens,
)
from tests.doubles.model import NullModel

READY = Ready("null", True, 4096, 300, 16, 0, 0, 0)


class Front:
    """The front's end of the socket. It reads only when the test asks for a message."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._stream = connection.makefile("rb")

    def send(self, message: FromFront) -> None:
        self.socket.sendall(frame(message))

    def hear(self) -> FromWorker | None:
        header = self._stream.read(LENGTH_BYTES)
        return decode_from_worker(self._stream.read(payload_bytes(header))) if header else None

    def close(self) -> None:
        self._stream.close()
        self.socket.close()


@pytest.fixture
def lost() -> threading.Event:
    return threading.Event()


@pytest.fixture
def pair(lost):
    """Yield the front's end of the socket, the worker's channel, and a worker whose loop runs in a thread."""
    near, far = socket.socketpair()
    near.settimeout(30)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    channel = WorkerChannel(far, on_lost=lost.set)
    model = NullModel(StepLimits(vocab_size=64, max_context=100_000, max_tokens=64, max_seqs=8, groups=(GroupLimits(8000),)))
    worker = Worker(LoadedModel(READY, step_model=model), channel)
    thread = threading.Thread(target=lambda: (worker.run(), channel.close()))
    thread.start()
    front = Front(near)
    yield front, channel, worker
    front.close()
    thread.join(60)
    assert not thread.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("the condition was not reached in time")


def test_a_front_that_does_not_read_pauses_the_engine_and_is_still_heard(pair) -> None:
    front, channel, worker = pair
    many = SamplingParams(max_tokens=5000, temperature=0.0)
    front.send(Submit("kept", (1,), many))
    front.send(Submit("aborted", (2,), many))
    wait_until(lambda: not channel.has_room)
    time.sleep(0.05)
    scheduler = worker._engine.scheduler
    steps = worker._engine.timing.num_steps
    front.send(Abort("aborted"))
    wait_until(lambda: [seq.request.submit.request_id for seq in scheduler.running] == ["kept"])
    assert worker._engine.timing.num_steps <= steps + 2
    assert channel._outbox.qsize() <= OUTBOX_MESSAGES + 8
    tokens = {"kept": 0, "aborted": 0}
    ends = {}
    while "kept" not in ends:
        message = front.hear()
        for event in message.events if isinstance(message, Tokens) else ():
            tokens[event.request_id] += len(event.token_ids)
            if event.finish_reason is not None:
                ends[event.request_id] = event.finish_reason
    assert tokens["kept"] == 5000 > tokens["aborted"]
    assert ends == {"kept": FinishReason.LENGTH, "aborted": FinishReason.ABORT}
    front.send(Shutdown())


class LoggedChannel:
    """A fake channel. All messages to the worker are there from the start; messages from the worker are discarded. `order` lists messages
    and steps in the order in which they are handled."""

    def __init__(self, *messages: FromFront) -> None:
        self.has_room, self.order, self._messages = True, list[str](), list(messages)
        self.inbox = self

    def get(self, timeout: float | None = None) -> FromFront:
        return self.get_nowait()

    def get_nowait(self) -> FromFront:
        if not self._messages:
            raise queue.Empty
        self.order.append("message")
        return self._messages.pop(0)

    def send(self, message: FromWorker) -> None:
        pass


class LoggedModel(NullModel):
    def __init__(self, order: list[str]) -> None:
        super().__init__(StepLimits(vocab_size=64, max_context=100, max_tokens=64, max_seqs=16, groups=(GroupLimits(800),)))
        self.order = order

    def run(self, batch: StepBatch) -> Logits:
        self.order.append("step")
        return super().run(batch)


def test_a_burst_of_requests_does_not_hold_up_running_ones() -> None:
    """The worker handles messages only for a limited time before each step; with this test's clock, that is two messages. Without the
    limit, a burst of 128 requests delayed a running stream by 100 ms."""
    submits = [Submit(str(i), (1,), SamplingParams(max_tokens=50)) for i in range(8)]
    channel, times = LoggedChannel(*submits, Drain()), itertools.count(step=RECEIVE_S * 0.6)
    model = LoadedModel(READY, step_model=LoggedModel(channel.order), overlap=False)
    Worker(model, channel, clock=lambda: next(times)).run()
    runs = [len(list(run)) for kind, run in itertools.groupby(channel.order) if kind == "message"]
    assert sum(runs) == 9 and max(runs) == 2


def test_a_worker_does_not_wait_after_its_last_statistics(monkeypatch) -> None:
    """After the last embedding, a step only sends the statistics. Then nothing is left to wait for, and the next request would wait in
    vain."""
    slept: list[float] = []
    monkeypatch.setattr("server.engine.worker.time", SimpleNamespace(sleep=slept.append, monotonic=time.monotonic))
    limits = StepLimits(64, max_context=100, max_tokens=64, max_seqs=16, groups=(GroupLimits(800),), embedding_size=8)
    channel = LoggedChannel(Embed("a", (1, 2)))
    worker = Worker(LoadedModel(READY, step_model=NullModel(limits)), channel)
    worker._receive()
    channel._messages.append(Drain())
    worker.run()
    assert slept == []


def test_drain_refuses_finishes_and_ends(pair) -> None:
    front, _, _ = pair
    front.send(Submit("running", (1,), SamplingParams(max_tokens=200)))
    front.send(Drain())
    front.send(Submit("late", (1,), SamplingParams(max_tokens=2)))
    front.send(Embed("late too", (1,)))
    heard = []
    while (message := front.hear()) is not None:
        heard.append(message)
    codes = {message.request_id: message.code for message in heard if isinstance(message, Failed)}
    assert codes == {"late": "shutting_down", "late too": "shutting_down"}
    events = [event for message in heard if isinstance(message, Tokens) for event in message.events]
    assert sum(len(event.token_ids) for event in events) == 200


def test_a_front_that_is_gone_is_noticed(pair, lost) -> None:
    front, channel, _ = pair
    front.socket.shutdown(socket.SHUT_RDWR)
    assert lost.wait(60)
    channel.inbox.put(Shutdown())


def test_nonsense_on_the_socket_loses_the_front(pair, lost, capfd) -> None:
    front, _, _ = pair
    front.socket.sendall((3).to_bytes(4, "little") + b"\xc1\xc1\xc1")
    assert lost.wait(60)
    front.socket.shutdown(socket.SHUT_RDWR)
    pair[1].inbox.put(Shutdown())


def test_a_message_has_a_largest_size() -> None:
    with pytest.raises(ChannelError, match="expected at most"):
        payload_bytes(b"\xff\xff\xff\xff")


def test_a_model_settles_when_the_worker_is_idle_after_its_steps(monkeypatch) -> None:
    """The worker settles its model when it has been idle for a moment after steps, because settling would delay requests. Before the first
    request there is nothing to settle."""
    monkeypatch.setattr("server.engine.worker.REST_S", 0.0)
    near, far = socket.socketpair()
    channel, settled = WorkerChannel(far, on_lost=lambda: None), threading.Semaphore(0)
    step_model = NullModel(StepLimits(vocab_size=64, max_context=1000, max_tokens=64, max_seqs=8, groups=(GroupLimits(80),)))
    worker = Worker(LoadedModel(READY, step_model=step_model, settle=settled.release), channel)
    front = Front(near)
    thread = threading.Thread(target=lambda: (worker.run(), channel.close()))
    thread.start()
    for name in "rs":
        while worker._is_cold:  # it has been idle, before the first request
            time.sleep(0.001)
        assert not settled.acquire(blocking=False)
        front.send(Submit(name, (1,), SamplingParams(max_tokens=50, temperature=0.0)))
        assert settled.acquire(timeout=60)
    front.send(Drain())
    while front.hear() is not None:
        pass
    thread.join(60)
    front.close()


def test_a_worker_on_a_gpu_reports_on_it_whether_it_works_or_not() -> None:
    """A worker reports every few seconds, also while it waits for requests. On a CPU it never does."""
    near, far = socket.socketpair()
    channel = WorkerChannel(far, on_lost=lambda: None)
    seconds, numbers = itertools.count(), itertools.count(1)
    usage = CardUsage("cuda:0", "a GPU", 80, 30)
    model = LoadedModel(
        msgspec.structs.replace(READY, card=usage),
        step_model=NullModel(StepLimits(vocab_size=64, max_context=1000, max_tokens=64, max_seqs=8, groups=(GroupLimits(80),))),
        card_usage=lambda: dataclasses.replace(usage, num_graph_launches=next(numbers)),
    )
    worker = Worker(model, channel, clock=lambda: float(next(seconds)))
    thread = threading.Thread(target=lambda: (worker.run(), channel.close()))
    thread.start()
    front = Front(near)

    def next_report() -> Card:
        while not isinstance(message := front.hear(), Card):
            assert message is not None
        return message

    front.send(Abort("nothing"))  # wakes the worker, whose clock advances at each look
    front.send(Submit("r", (1,), SamplingParams(max_tokens=50, temperature=0.0)))
    assert [next_report().usage.num_graph_launches for _ in range(2)] == [1, 2]
    front.send(Shutdown())
    while front.hear() is not None:
        pass
    thread.join(60)
    front.close()
    assert not thread.is_alive()
