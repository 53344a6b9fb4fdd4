"""A host of stages stays open for workers, whatever strangers do."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack

import pytest

from deploy.stages import host, starting
from deploy.stages.host import MOST_STRANGERS, offer
from deploy.stages.starting import start_stage
from server.interfaces import LoadError
from server.stages.messages import Greeting
from server.stages.places import parse_place

SECRET = "a secret of some length"


@pytest.fixture
def address() -> str:
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=offer, args=(listener, SECRET), daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_strangers_do_not_keep_workers_away(address: str) -> None:
    """Connections that send nothing take all places that the host has for unknown peers. A worker that connects gets the place of the
    oldest one."""
    name, port = address.split(":")
    with ExitStack() as held:
        for _ in range(MOST_STRANGERS + 8):
            held.enter_context(socket.create_connection((name, int(port))))
        peer = start_stage(parse_place(address), SECRET, 1)
        assert isinstance(peer.link.receive()[0], Greeting)
        peer.end()


def test_a_worker_that_is_turned_away_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked = list[object]()

        def turn_away() -> None:
            while True:
                try:
                    connection, address = listener.accept()
                except OSError:
                    return
                asked.append(address)
                connection.close()

        threading.Thread(target=turn_away, daemon=True).start()
        with pytest.raises(LoadError, match="was reached, but it ended the connection at once"):
            start_stage(parse_place(f"127.0.0.1:{listener.getsockname()[1]}"), SECRET, 1)
        listener.shutdown(socket.SHUT_RDWR)
    assert len(asked) > 1


def test_a_host_without_threads_goes_on(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, port = address.split(":")
    refused = threading.Event()

    def no_thread(*_arguments: object, **_more: object) -> None:
        refused.set()
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as no_threads:
        no_threads.setattr(host.threading, "Thread", no_thread)
        socket.create_connection((name, int(port))).close()
        assert refused.wait(60)
    peer = start_stage(parse_place(address), SECRET, 1)
    assert isinstance(peer.link.receive()[0], Greeting)
    peer.end()


def test_a_stage_without_a_descriptor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(starting.socket, "socketpair", refuse)
    with pytest.raises(LoadError, match="the process of a stage cannot be started: Too many open files"):
        start_stage(parse_place("local"), "", 1)
