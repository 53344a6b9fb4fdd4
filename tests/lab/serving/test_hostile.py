"""Test the benchmark of the delays that hostile requests and floods cause: with one field of one endpoint on the demo model."""

from __future__ import annotations

import json
import socket

import pytest

from tests.lab.serving import hostile
from tests.lab.serving.floods import flooding
from tests.lab.serving.hostile import NO_FLOOD, NOTHING, Delay, Flooded, figures, flood_figures, main, measure_floods


def test_it_tries_a_field_in_every_shape_beside_a_stream_and_a_probe(capsys: pytest.CaptureFixture[str]):
    """The benchmark sends one field with values of every JSON shape, while a stream and health probes run. tests/server/test_delays.py
    tests the other fields."""
    name = "POST /detokenize tokens"
    main(["--json", "--kind", "fields", "--only", name, "--rounds", "1"])
    found = {figure["name"]: figure for figure in json.loads(capsys.readouterr().out)}
    assert set(found) == {"without requests", "worst of all fields", name}
    assert all(figure["value"] > 0 for figure in found.values())
    assert found["worst of all fields"]["value"] == found[name]["value"]
    assert "8 requests, status 200, 400" in found[name]["note"]


def test_the_worst_delay_is_that_of_any_field():
    found = {name: Delay(ms, 1.0, "own limit", 1, frozenset({200})) for name, ms in ((NOTHING, 90.0), ("a", 2.0), ("b", 7.0), ("c", 3.0))}
    assert [(figure.name, figure.value) for figure in figures(found)] == [
        (NOTHING, 90.0),
        ("a", 2.0),
        ("b", 7.0),
        ("c", 3.0),
        ("worst of all fields", 7.0),
    ]


def test_a_shape_beyond_a_goal_is_sent_again(monkeypatch: pytest.MonkeyPatch):
    rounds = iter(
        [
            {
                NO_FLOOD: Flooded(1, 2, 3),
                "slow drips": Flooded(10, 10, 10),
                "trailers": Flooded(101, 10, 10),
                "pipelines": Flooded(10, 51, 0),
            },
            {NO_FLOOD: Flooded(9, 9, 9), "trailers": Flooded(20, 30, 10), "pipelines": Flooded(10, 60, 0)},
            {NO_FLOOD: Flooded(1, 1, 1), "pipelines": Flooded(10, 52, 0)},
        ]
    )
    asked: list[list[str]] = []
    monkeypatch.setattr(hostile, "_flood_round", lambda _address, _front, _seconds, names: asked.append(names) or next(rounds))
    found = measure_floods(("", 0), 0, 1, "no shape", 3)
    assert asked == [[NO_FLOOD], [NO_FLOOD, "trailers", "pipelines"], [NO_FLOOD, "pipelines"]]
    assert found["trailers"] == Flooded(20, 30, 10, 2)
    assert found["pipelines"] == Flooded(10, 51, 0, 3)
    assert found[NO_FLOOD] == Flooded(9, 9, 9, 3)
    assert [f.value for f in flood_figures({"trailers": found["trailers"]})] == [20, 30, 10]


def test_a_flood_ends_although_the_server_reads_nothing():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        flooding(listener.getsockname(), "pipelines of GET /", num_connections=2),
        listener.accept()[0] as taken,
    ):
        assert taken.recv(1, socket.MSG_PEEK)
