"""Addresses of MCP servers are told apart: those on the internet, and private ones, which are refused unless the server's entry allows
them."""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
from typing import Any
from unittest.mock import Mock

import pytest

from server.addresses import is_public
from server.mcp.addresses import is_address, resolve
from server.mcp.attempt import Attempt
from server.mcp.errors import McpLost, McpStopped
from server.mcp.servers import Entry

PRIVATE = [
    "127.0.0.1",
    "127.8.9.1",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "255.255.255.255",
    "198.18.0.1",
    "::1",
    "::",
    "fe80::1",
    "fc00::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::1",
    "::127.0.0.1",
    "::a00:1",
    "::ffff:0:7f00:1",
    "64:ff9b:1::7f00:1",
    "fec0::1",
    "5f00::1",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_known_in_all_forms(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_other_addresses_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def test_a_name_that_leads_to_a_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 443)) for address in ("8.8.8.8", "10.0.0.7")]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with pytest.raises(McpLost, match=r"private address 10\.0\.0\.7; allow it in its entry, as NAME=private\+URL"):
        resolve("example.com", 443, "docs", Attempt(60.0), may_be_private=False)
    assert resolve("example.com", 443, "docs", Attempt(60.0), may_be_private=True) == ["8.8.8.8", "10.0.0.7"]


@pytest.mark.parametrize(("timeout_s", "told"), [(0.1, r"did not answer within 0\.1 s"), (60.0, "was cancelled")])
def test_a_slow_name_server_holds_up_no_attempt(timeout_s: float, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_asked, is_over = threading.Event(), threading.Event()

    def resolved(*_: Any, **__: Any) -> list[Any]:
        is_asked.set()
        assert is_over.wait(60)
        return []

    def cancel() -> None:
        assert is_asked.wait(60)
        attempt.cancel()

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    attempt = Attempt(timeout_s)
    if timeout_s > 1:
        threading.Thread(target=cancel).start()
    with pytest.raises(McpStopped, match=told):
        resolve(f"{timeout_s:g}.example.com", 443, "docs", attempt, may_be_private=False)
    assert not is_over.is_set()
    is_over.set()


def test_attempts_share_a_look_up_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    is_over = threading.Event()

    def resolved(host: str, *_: Any, **__: Any) -> list[Any]:
        asked.put(host)
        assert is_over.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 443))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    for _ in range(3):
        with pytest.raises(McpStopped):
            resolve("shared.example.com", 443, "docs", Attempt(0.05), may_be_private=False)
    threading.Timer(0.1, is_over.set).start()
    assert resolve("shared.example.com", 443, "docs", Attempt(60.0), may_be_private=False) == ["8.8.8.8"]
    assert asked.get() == "shared.example.com" and asked.empty()
    assert resolve("shared.example.com", 443, "docs", Attempt(60.0), may_be_private=False) == ["8.8.8.8"]
    assert asked.get() == "shared.example.com", "a name is looked up again once its look-up has ended"


@pytest.mark.parametrize("fault", [socket.gaierror(-2, "unknown"), UnicodeError("a"), MemoryError("b")])
def test_a_look_up_that_fails_ends_the_attempt(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=fault))
    with pytest.raises(McpLost, match=r"fails\.example\.com has no address"):
        resolve("fails.example.com", 443, "docs", Attempt(5.0), may_be_private=False)


@pytest.mark.parametrize(
    ("entry", "may_be_private"),
    [
        ("a=https://example.com/mcp", False),
        ("a=private+https://example.com/mcp", True),
        ("a=http://10.0.0.7:8000/mcp", True),
        ("a=http://[::1]/mcp", True),
        ("a=http://localhost:1/mcp", True),
    ],
)
def test_an_entry_says_whether_its_address_may_be_private(entry: str, may_be_private: bool) -> None:
    assert Entry.of(entry).may_be_private == may_be_private
    assert is_address("10.0.0.7") and not is_address("example.com")
