"""The attacker at socket level finds nothing in the server, and finds defects that are put back."""

from __future__ import annotations

import gc
import os
import time

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.server.attacker import KEY, KINDS, Attacker, Defect
from tests.server.test_floods import turns

MOST_S = 0.03  # CPU time of a turn of the event loop: the server takes 2 ms, and 100 to 300 with the former defect
LONG_S = float(os.environ.get("ATTACK_S", "1800"))
NUM_CONNECTIONS, NUM_PIPELINED = 8, 20_000


def attack_for(server, seed: int, seconds: float, least: int) -> None:
    attacker, end_s = Attacker(server.port, seed), time.monotonic() + seconds
    number = 0
    while number < least or time.monotonic() < end_s:
        attacker.attack()
        number += 1
    assert attacker.num_answers > number / 2
    assert server.http().get("/health/live").status_code == 200
    end_s = time.monotonic() + 60
    while server.server.server_state.tasks and time.monotonic() < end_s:
        time.sleep(0.005)
    assert not server.server.server_state.tasks, "requests of clients that are gone still run"


@pytest.mark.parametrize("seed", range(3))
def test_it_finds_nothing(serve, seed):
    attack_for(serve(api_keys=(KEY,)), seed, 0, least=60)


@pytest.mark.slow
def test_it_finds_nothing_for_long(serve):
    attack_for(serve(api_keys=(KEY,)), time.time_ns(), LONG_S, least=1000)


@pytest.mark.parametrize("shared_server", [{"api_keys": (KEY,)}], indirect=True, ids=[""], scope="module")
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_request_gets_its_answer(shared_server, kind):
    attacker = Attacker(shared_server.port, 1, (kind,))
    for _ in range(4):
        attacker.attack()
    assert attacker.num_answers


def worst_turn_s(server) -> float:
    """Return the CPU time of the longest turn while the attacker pipelines requests."""
    gc.collect()
    with turns(server) as found:
        Attacker(server.port, 1).pipeline(NUM_CONNECTIONS, NUM_PIPELINED)
        end_s = time.monotonic() + 60
        while server.server.server_state.connections and time.monotonic() < end_s:
            time.sleep(0.01)
    assert not server.server.server_state.connections
    return max(found)


def test_pipelines_hold_up_nobody(serve):
    """A connection with many pipelined requests does not occupy the event loop for longer than `MOST_S`."""
    assert worst_turn_s(serve(api_keys=(KEY,))) <= MOST_S


class Former(HttpToolsProtocol):
    """uvicorn's own protocol adds trailers to the headers, and parses all pipelined requests that have arrived."""

    def eof_received(self) -> bool:
        """Answer half-closed clients, as the server always did."""
        if self.cycle is None or self.cycle.response_complete:
            return False
        self.cycle.keep_alive = False
        return True


def test_it_finds_the_former_defects(serve, monkeypatch):
    monkeypatch.setattr("server.http.server.GuardedProtocol", Former)
    server = serve(api_keys=(KEY,))
    attacker = Attacker(server.port, 1, ("key in a trailer",))
    with pytest.raises(Defect, match="key in a trailer: status 200, expected 401"):
        for _ in range(50):
            attacker.attack()
    assert worst_turn_s(server) > MOST_S
