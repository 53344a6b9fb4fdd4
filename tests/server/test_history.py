"""The history of metrics: what it keeps, what it forgets, and how it is told."""

from __future__ import annotations

import asyncio
import threading

from prometheus_client.samples import Sample

from server import history
from server.history import Change, History


class Metrics:
    """Gauges of models that a test sets, and a clock."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.now_s = 0.0
        self.history = History(
            lambda: [Sample("running", {"model_name": name}, value) for name, value in self.values.items()],
            measure=lambda: asyncio.sleep(0),
            clock=lambda: self.now_s,
        )

    def after(self, seconds: float, **values: float) -> None:
        self.now_s += seconds
        self.values = values
        self.history.take()

    @property
    def told(self) -> list[tuple[float, dict[str, float | None]]]:
        return [
            (one.time_s, {dict(labels)["model_name"]: value for (_, labels), value in one.values.items()}) for one in self.history.samples()
        ]

    @property
    def whole(self) -> list[dict[str, float | None]]:
        """The values of every sample, as a client rebuilds them."""
        now: dict[str, float | None] = {}
        found = []
        for _, changed in self.told:
            now = {name: value for name, value in (now | changed).items() if value is not None}
            found.append(now)
        return found


def test_a_sample_has_what_has_changed():
    metrics = Metrics()
    assert metrics.told == []
    metrics.after(0, a=1)
    metrics.after(5, a=1, b=2)
    metrics.after(5, b=3)
    assert metrics.told == [(0, {"a": 1}), (5, {"b": 2}), (10, {"b": 3, "a": None})]
    assert metrics.whole == [{"a": 1}, {"a": 1, "b": 2}, {"b": 3}]


def test_an_hour_is_kept_and_its_first_sample_is_whole():
    metrics = Metrics()
    metrics.after(0, a=1, b=1)
    for at in range(1, 800):
        metrics.after(5, **{"a": 1, "c": at} if at > 2 else {"a": 1, "b": 1})
    assert len(metrics.told) == 721 and metrics.told[-1][0] - metrics.told[0][0] == 3600
    assert metrics.whole[0] == {"a": 1, "c": 79}, "b ended before the hour began"
    assert metrics.whole[-1] == {"a": 1, "c": 799}


def test_the_number_of_values_is_bounded(monkeypatch):
    monkeypatch.setattr(history, "MOST_VALUES", 100)
    metrics = Metrics()
    for at in range(100):
        metrics.after(5, **{f"m{name}": at for name in range(20)})
    assert len(metrics.told) == 5 and metrics.whole[0]["m0"] == 95
    metrics.after(5, **{f"m{name}": 0 for name in range(200)})
    assert len(metrics.told) == 1 and len(metrics.whole[0]) == 200, "the last sample stays"


def test_a_sample_that_cannot_be_taken_ends_no_history(monkeypatch, caplog):
    """An error of one sample ended the task without a word, and the console drew no more."""
    monkeypatch.setattr(history, "INTERVAL_S", 0.0)
    faults = [None, OSError("no descriptor"), OSError("no descriptor"), None, OSError("no descriptor")]

    async def run() -> int:
        done = asyncio.Event()

        async def measure() -> None:
            if not faults:
                done.set()
            elif (fault := faults.pop(0)) is not None:
                raise fault

        kept = History(list, measure)
        task = asyncio.create_task(kept.run())
        await asyncio.wait([task, waiting := asyncio.create_task(done.wait())], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)
        task.cancel(), waiting.cancel()
        return len(kept.samples())

    assert asyncio.run(run()) >= 3
    assert caplog.text.count("the history of metrics lacks a sample") == 2, "each cause is told once, until a sample is taken again"


def test_the_server_tells_its_history(serve):
    server = serve()
    server.chat(model="null")
    server.loop.call_soon_threadsafe(server.registry.metrics.of, "null")
    report = server.http().get("/admin/history").json()
    names = {one["name"] for one in report["series"]}
    assert report["object"] == "history" and report["interval_s"] == 5 and report["samples"]
    assert {
        "vllm:num_requests_running",
        "vllm:generation_tokens_total",
        "relaxserve:prompt_tokens_left",
        "relaxserve:worker_resident_bytes",
    } <= names
    first = report["samples"][0]
    assert set(first["values"]) <= {str(at) for at in range(len(report["series"]))}
    assert not [name for name in names if name.startswith("http_")]


def test_a_client_may_not_read_the_history(serve):
    http = serve(api_keys=["a-key-of-a-client"], admin_keys=["a-key-of-an-admin"]).http()
    assert http.get("/admin/history", headers={"authorization": "Bearer a-key-of-a-client"}).status_code == 403


def test_a_long_history_is_written_on_another_thread(serve, monkeypatch):
    """Other requests go on meanwhile."""
    server, threads = serve(), set()

    class Watched(dict):
        def items(self):
            threads.add(threading.current_thread())
            return super().items()

    change = Change(1.0, Watched({("running", ()): 1.0}))
    monkeypatch.setattr(History, "samples", lambda _history: [change])
    assert server.http().get("/admin/history").json()["samples"] == [{"time": 1.0, "values": {"0": 1.0}}]
    assert threads and server.thread not in threads
