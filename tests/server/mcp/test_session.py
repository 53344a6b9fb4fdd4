"""The MCP client: versions, tools, calls, and servers that behave badly. Each test names the transports for which it holds."""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from server import mcp
from server.mcp.attempt import Attempt
from server.mcp.errors import McpError, McpLost, McpRefused, McpStatus, McpStopped
from server.mcp.http import HttpTransport, Place, header_value
from server.mcp.session import Session
from server.mcp.stdio import StdioTransport
from server.mcp.tools import McpTool, ToolResult
from server.mcp.wire import Request
from tests.doubles.mcp_server import Behaviour, serving, tool

PATIENT_S = 60.0
NAMES = [
    "add", "echo", "fail", "media", "structured", "wait", "ask", "die", "rubbish", "flood", "deep", "large", "grow",
]  # fmt: skip
Open = Callable[..., Session]


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def over_stdio(opened: ExitStack) -> Open:
    def start(*words: str) -> Session:
        command = [sys.executable, "-m", "tests.doubles.mcp_server", *words]
        session = Session("local", lambda hear: StdioTransport("local", command, {"PYTHONPATH": ".", "EXTRA": "1"}, hear))
        opened.callback(session.close)
        return session

    return start


@pytest.fixture
def over_http(opened: ExitStack) -> Callable[[Behaviour], Session]:
    def start(behaviour: Behaviour, **headers: str) -> Session:
        url = opened.enter_context(serving(behaviour))
        session = Session("remote", partial(HttpTransport, "remote", Place(url, headers, may_be_private=True)))
        opened.callback(session.close)
        return session

    return start


@pytest.fixture(params=["stdio modern", "stdio legacy", "http modern", "http legacy", "events modern", "events legacy"])
def session(request: pytest.FixtureRequest, over_stdio: Open, over_http: Callable[[Behaviour], Session]) -> Session:
    transport, era = request.param.split()
    return over_stdio(era) if transport == "stdio" else over_http(Behaviour(era, as_events=transport == "events"))


def called(session: Session, name: str, timeout_s: float = PATIENT_S, **arguments: Any) -> ToolResult:
    return session.call(McpTool(name, "", {}), arguments, Attempt(timeout_s))


def test_tools_are_listed_in_pages_and_called(session: Session) -> None:
    tools = session.tools(Attempt(PATIENT_S))
    assert [one.name for one in tools] == NAMES  # the tool without a schema is left out
    assert tools[0].is_read_only and not tools[1].is_read_only
    assert called(session, "add", a=2, b=3) == ToolResult("5")
    assert called(session, "fail") == ToolResult("it does not work", is_error=True)
    with pytest.raises(McpRefused, match="no tool other"):
        called(session, "other")


def test_content_that_is_no_text_is_named(session: Session) -> None:
    expected = "two media\n[image: image/png, 3 bytes]\n[resource notes: file:///notes]\ninside\n[content of type 'hologram']"
    assert called(session, "media").text == expected
    assert called(session, "structured").text == '{"degrees": 20}'
    assert called(session, "ask") == ToolResult("the tool asks for elicitation/create, which this client does not answer", is_error=True)


@pytest.mark.parametrize(
    ("name", "told"), [("rubbish", "not JSON|expected JSON"), ("deep", "nested in more than"), ("large", "more than 4 MiB")]
)
def test_rubbish_costs_one_call(session: Session, name: str, told: str) -> None:
    with pytest.raises(McpLost, match=told):
        called(session, name)
    assert called(session, "add", a=1, b=1).text == "2"


def test_a_call_ends_at_its_deadline_and_is_cancelled(session: Session) -> None:
    assert called(session, "add", a=1, b=1).text == "2"
    with pytest.raises(McpStopped, match=r"did not answer within 0\.5 s"):
        called(session, "wait", timeout_s=0.5)
    assert called(session, "add", a=1, b=2).text == "3"


def test_any_thread_can_cancel_a_call(session: Session) -> None:
    called(session, "add", a=1, b=1)
    attempt = Attempt(PATIENT_S)
    threading.Timer(0.3, attempt.cancel).start()
    with pytest.raises(McpStopped, match="was cancelled"):
        session.call(McpTool("wait", "", {}), {}, attempt)


@pytest.mark.parametrize("era", ["modern", "legacy"])
@pytest.mark.parametrize("kind", ["stdio", "events"])
def test_floods_end_the_call(over_stdio: Open, over_http: Any, era: str, kind: str) -> None:
    session = over_stdio(era) if kind == "stdio" else over_http(Behaviour(era, as_events=True))
    with pytest.raises(McpLost, match="sent more than 10000 messages"):
        called(session, "flood")
    assert called(session, "add", a=1, b=1).text == "2"


@pytest.mark.parametrize("era", ["modern", "legacy"])
def test_a_process_that_dies_costs_one_call(over_stdio: Open, era: str) -> None:
    session = over_stdio(era)
    with pytest.raises(McpLost, match="has ended; it said: ready to serve"):
        called(session, "die")
    assert called(session, "add", a=1, b=1).text == "2"


def test_a_silent_server_is_an_earlier_one(over_stdio: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.mcp.session.PROBE_S", 0.5)
    assert called(over_stdio("legacy", "silent"), "add", a=1, b=1).text == "2"


def test_a_later_version_may_start_slowly(over_stdio: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client takes the server for one of an earlier version, until the server refuses the handshake."""
    monkeypatch.setattr("server.mcp.session.PROBE_S", 0.5)
    session = over_stdio("modern", "slow")
    assert called(session, "add", a=1, b=1).text == "2"
    assert session.tools(Attempt(PATIENT_S)) and called(session, "grow").text == "grown"


def test_progress_is_reported(over_stdio: Open, over_http: Any) -> None:
    for session in (over_stdio("modern"), over_stdio("legacy"), over_http(Behaviour(as_events=True))):
        heard: list[Any] = []
        session.call(McpTool("add", "", {}), {"a": 1, "b": 1}, Attempt(PATIENT_S, heard.append))
        assert [(one["progress"], one["total"]) for one in heard] == [(1, 2)]


def test_a_notification_that_cannot_be_heard_costs_one_call(over_stdio: Open) -> None:
    def fail(_: Any) -> None:
        raise ZeroDivisionError

    session = over_stdio("modern")
    with pytest.raises(McpLost, match="cannot be read: ZeroDivisionError"):
        session.call(McpTool("add", "", {}), {"a": 1, "b": 1}, Attempt(PATIENT_S, fail))
    assert called(session, "add", a=1, b=1).text == "2"


def test_changed_tools_are_listed_again(session: Session) -> None:
    before = session.tools(Attempt(PATIENT_S))
    called(session, "grow")
    after = session.tools(Attempt(PATIENT_S))
    assert len(after) == len(before) + 1 and after[0].name.startswith("grown")


def test_a_list_is_kept_as_long_as_the_server_says(over_http: Any) -> None:
    behaviour = Behaviour(ttl_ms=3_600_000)
    session = over_http(behaviour)
    first = session.tools(Attempt(PATIENT_S))
    num_seen = len(behaviour.seen)
    assert session.tools(Attempt(PATIENT_S)) == first and len(behaviour.seen) == num_seen


class Scripted:
    """A transport whose server answers each method by a script: it returns the next result, or raises the next error."""

    keeps_open = True
    version = ""

    def __init__(self, hear: Callable[[Any], None], scripts: dict[str, list[Any]]) -> None:
        self.hear = hear
        self._scripts = scripts

    def exchange(self, request: Request, attempt: Attempt) -> Any:
        answer = self._scripts[request.method].pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def notify(self, message: bytes, attempt: Attempt) -> None:
        self._scripts["notified"].append(json.loads(message)["method"])

    def close(self) -> None:
        self._scripts["notified"].append("closed")


FAULTS = [McpRefused("busy", -32000), McpStopped("late"), KeyboardInterrupt(), {"tools": 5}]
DISCOVERED = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {"listChanged": True}}}


@pytest.mark.parametrize("fault", FAULTS, ids=["refused", "late", "interrupted", "no list"])
def test_a_list_that_fails_leaves_no_old_one_behind(fault: Any) -> None:
    """The server has said that its tools have changed, so the earlier list is wrong."""
    lists = [{"tools": [tool("a")]}, fault, {"tools": [tool("b")]}]
    hears: list[Any] = []

    def connect(hear: Any) -> Scripted:
        hears.append(hear)
        return Scripted(hear, {"server/discover": [DISCOVERED], "tools/list": lists, "notified": []})

    session = Session("x", connect)
    assert [one.name for one in session.tools(Attempt(PATIENT_S))] == ["a"]
    hears[-1]({"method": "notifications/tools/list_changed"})
    with pytest.raises((McpError, KeyboardInterrupt)):
        session.tools(Attempt(PATIENT_S))
    assert [one.name for one in session.tools(Attempt(PATIENT_S))] == ["b"]


@pytest.mark.parametrize("interrupted", ["server/discover", "initialize"])
def test_a_connection_whose_beginning_is_interrupted_is_not_used(interrupted: str) -> None:
    """Ctrl-C ends a call while the session agrees on a version. The next call begins anew, with another process."""
    scripts: dict[str, list[Any]] = {
        "server/discover": [McpRefused("unknown", -32601)],
        "initialize": [{"protocolVersion": "2025-11-25"}],
        "tools/call": [{"content": [{"type": "text", "text": "done"}]}],
        "notified": [],
    }
    scripts[interrupted].insert(0, KeyboardInterrupt())
    scripts["server/discover"].append(McpRefused("unknown", -32601))
    session = Session("x", lambda hear: Scripted(hear, scripts))
    with pytest.raises(KeyboardInterrupt):
        called(session, "any")
    assert called(session, "any").text == "done"
    assert scripts["notified"] == ["closed", "notifications/initialized"]


def test_a_server_that_was_silent_once_may_refuse_the_handshake() -> None:
    """The first beginning is interrupted after the server has left a request without an answer. At the second, the server is not silent, so
    that it counts as one of an earlier version."""
    scripts: dict[str, list[Any]] = {
        "server/discover": [McpStopped("late"), McpRefused("unknown", -32601), DISCOVERED],
        "initialize": [KeyboardInterrupt(), McpRefused("not allowed", -32600)],
        "tools/call": [],
        "notified": [],
    }
    session = Session("x", lambda hear: Scripted(hear, scripts))
    with pytest.raises(KeyboardInterrupt):
        called(session, "any")
    with pytest.raises(McpRefused, match="not allowed"):
        called(session, "any")


@pytest.mark.parametrize("ttl_ms", [10**400, -1, "soon"], ids=["huge", "negative", "a word"])
def test_a_strange_time_of_a_list_is_no_fault(over_http: Any, ttl_ms: Any) -> None:
    session = over_http(Behaviour(ttl_ms=ttl_ms))
    assert session.tools(Attempt(PATIENT_S)) == session.tools(Attempt(PATIENT_S))


def test_the_headers_repeat_the_body(over_http: Any) -> None:
    behaviour = Behaviour()
    session = over_http(behaviour, authorization="Bearer secret", host="elsewhere")
    echo = next(one for one in session.tools(Attempt(PATIENT_S)) if one.name == "echo")
    assert session.call(echo, {"text": "grüß"}, Attempt(PATIENT_S)).text == "grüß"
    sent = behaviour.headers[-1]
    assert (sent["mcp-method"], sent["mcp-name"], sent["mcp-protocol-version"]) == ("tools/call", "echo", "2026-07-28")
    assert (sent["mcp-param-text"], sent["authorization"]) == ("=?base64?Z3LDvMOf?=", "Bearer secret")
    assert sent["host"].startswith("127.0.0.1:")


def test_a_configured_header_is_sent_once(over_http: Any) -> None:
    behaviour = Behaviour()
    called(over_http(behaviour, **{"User-Agent": "mine", "AUTHORIZATION": "old", "authorization": "new"}), "add", a=1, b=1)
    for sent in behaviour.headers:
        assert (sent["user-agent"], sent["authorization"]) == ("mine", "new")
    called(over_http(behaviour), "add", a=1, b=1)
    assert behaviour.headers[-1]["user-agent"] == "relaxserve"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("us-west1", "us-west1"),
        ("Hello, 世界", "=?base64?SGVsbG8sIOS4lueVjA==?="),
        (" padded ", "=?base64?IHBhZGRlZCA=?="),
        ("line1\nline2", "=?base64?bGluZTEKbGluZTI=?="),
        ("=?base64?literal?=", "=?base64?PT9iYXNlNjQ/bGl0ZXJhbD89?="),
    ],
)
def test_values_of_headers_are_encoded_as_the_specification_shows(text: str, value: str) -> None:
    assert header_value(text) == value


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "number", "x-mcp-header": "A"}}},
        {"type": "object", "properties": {"a": {"type": "string", "x-mcp-header": ""}}},
        {"type": "object", "properties": {"a": {"type": "string", "x-mcp-header": "A"}, "b": {"type": "string", "x-mcp-header": "a"}}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string", "x-mcp-header": "A"}}}},
    ],
)
def test_tools_with_invalid_headers_are_left_out(over_http: Any, schema: Any) -> None:
    session = over_http(Behaviour(tools=[tool("good"), {"name": "bad", "inputSchema": schema}]))
    assert [one.name for one in session.tools(Attempt(PATIENT_S))] == ["good"]


def test_a_forgotten_session_begins_again(over_http: Any) -> None:
    behaviour = Behaviour("legacy")
    session = over_http(behaviour)
    assert called(session, "add", a=1, b=1).text == "2"
    behaviour.sessions.clear()
    assert called(session, "add", a=1, b=2).text == "3"
    session.close()
    assert not behaviour.sessions


def test_a_stream_that_ends_early_is_continued(over_http: Any) -> None:
    assert called(over_http(Behaviour("legacy", as_events=True, cuts_streams=True)), "add", a=1, b=1).text == "continued"
    with pytest.raises(McpLost, match="before the result"):
        called(over_http(Behaviour("modern", as_events=True, cuts_streams=True)), "add", a=1, b=1)


def test_a_cancelled_call_continues_no_stream(over_http: Any) -> None:
    session, attempt = over_http(Behaviour("legacy", as_events=True, cuts_streams=True, retry_ms=50_000)), Attempt(PATIENT_S)
    session.tools(Attempt(PATIENT_S))
    threading.Timer(0.3, attempt.cancel).start()
    began_s = time.monotonic()
    with pytest.raises(McpStopped, match="was cancelled"):
        session.call(McpTool("add", "", {}), {"a": 1, "b": 1}, attempt)
    assert time.monotonic() - began_s < 30


@pytest.mark.parametrize("as_events", [False, True])
def test_cancellation_reaches_the_server(over_http: Any, as_events: bool) -> None:
    behaviour = Behaviour("legacy", as_events=as_events)
    session = over_http(behaviour)
    with pytest.raises(McpStopped):
        called(session, "wait", timeout_s=1.0)
    assert behaviour.cancelled.wait(5)
    told = [one for one in behaviour.seen if one.get("method") == "notifications/cancelled"]
    assert told[0]["params"]["requestId"] == next(one["id"] for one in behaviour.seen if one.get("method") == "tools/call")


def test_a_server_without_a_common_version_is_refused(over_http: Any, over_stdio: Open) -> None:
    for session in (over_http(Behaviour("future")), over_stdio("future")):
        with pytest.raises(McpRefused):
            session.tools(Attempt(PATIENT_S))


@pytest.mark.parametrize(("behaviour", "told"), [
    (Behaviour(status=401), "status 401: it needs authorization"),
    (Behaviour(status=500), "status 500"),
    (Behaviour(redirect="http://127.0.0.1:1/elsewhere"), "redirects are not followed"),
])  # fmt: skip
def test_refusals_are_named(over_http: Any, behaviour: Behaviour, told: str) -> None:
    with pytest.raises(McpStatus, match=told):
        over_http(behaviour).tools(Attempt(PATIENT_S))


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(McpLost, match="does not start: /no/such/program: No such file"):
        Session("x", lambda hear: StdioTransport("x", ["/no/such/program"], {}, hear)).tools(Attempt(PATIENT_S))
    nothing = Session("x", partial(HttpTransport, "x", Place("http://127.0.0.1:1/mcp", may_be_private=True)))
    with pytest.raises(McpLost, match="cannot be reached at 127"):
        nothing.tools(Attempt(PATIENT_S))


@pytest.mark.parametrize("accepts", [False, True], ids=["connect", "handshake"])
def test_a_cancelled_call_waits_for_no_connection(accepts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full backlog leaves a connection without an answer, and a server that is silent one without the handshake of TLS."""
    monkeypatch.setattr(mcp.http, "CONNECT_S", 60.0)
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(0 if accepts else 4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        place = Place(f"https://127.0.0.1:{listening.getsockname()[1]}/mcp", may_be_private=True)
        session, attempt = Session("x", partial(HttpTransport, "x", place)), Attempt(PATIENT_S)
        threading.Timer(0.3, attempt.cancel).start()
        began_s = time.monotonic()
        with pytest.raises(McpStopped, match="was cancelled"):
            session.tools(attempt)
        assert time.monotonic() - began_s < 30


def test_a_call_that_is_cancelled_just_before_the_handshake_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, make = Attempt(PATIENT_S), ssl.create_default_context

    def cancelled() -> ssl.SSLContext:
        attempt.cancel()
        return make()

    monkeypatch.setattr(ssl, "create_default_context", cancelled)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = Place(f"https://127.0.0.1:{listening.getsockname()[1]}/mcp", may_be_private=True)
        with pytest.raises(McpStopped, match="was cancelled"):
            Session("x", partial(HttpTransport, "x", place)).tools(attempt)


def test_a_process_gets_few_variables(over_stdio: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAXSERVE_ADMIN_KEYS", "secret")
    command = [sys.executable, "-c", "import os, sys; sys.exit(sorted(set(os.environ) - {'LC_CTYPE'}))"]
    session = Session("x", lambda hear: StdioTransport("x", command, {"EXTRA": "1"}, hear))
    with pytest.raises(McpLost) as caught:
        session.tools(Attempt(PATIENT_S))
    assert "EXTRA" in str(caught.value) and "RELAXSERVE" not in str(caught.value)


def test_a_process_ends_with_its_session(over_stdio: Open) -> None:
    session = over_stdio("modern")
    called(session, "add", a=1, b=1)
    transport: Any = session._transport
    began_s = time.monotonic()
    session.close()
    assert transport._process.returncode == 0 and time.monotonic() - began_s < 10
