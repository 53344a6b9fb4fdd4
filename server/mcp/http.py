"""Speak MCP over streamable HTTP: each message is a POST, and its answer is JSON or a stream of events."""

from __future__ import annotations

import base64
import http.client
import re
import socket
import ssl
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from server.mcp.addresses import resolve
from server.mcp.attempt import Attempt
from server.mcp.errors import McpError, McpLost, McpRefused, McpStatus
from server.mcp.sse import EventReader
from server.mcp.transport import Hear
from server.mcp.wire import MAX_MESSAGE_BYTES, MODERN, Message, Request, Traffic, notification, read_messages, reply_to, result_of

PIECE_BYTES = 1 << 16
CLOSE_S = 5.0  # time to tell the server that a session or a request has ended, or to answer a request of the server
CONNECT_S = 10.0  # time to connect to one address of the server
MAX_CONTINUATIONS = 100  # most requests that continue one interrupted stream
SESSION = "mcp-session-id"
SENTINEL = re.compile(r"=\?base64\?.*\?=", re.DOTALL)  # the form of a header's value in Base64
PLAIN = re.compile(r"[!-~]([\t -~]*[!-~])?")  # values that a header can carry as they are
# headers that this client sets itself, so that configured ones of these names are left out
OWN_HEADERS = ("host", "content-length", "content-type", "accept", "connection", "transfer-encoding", "mcp-protocol-version", SESSION)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an MCP server listens, and the headers that every request to it has. Headers may be secret, so messages never show them."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    may_be_private: bool = False  # the server's address may be one of this machine or of a private network


class HttpTransport:
    """A transport to a server that listens at an address."""

    keeps_open = False

    def __init__(self, name: str, place: Place, hear: Hear) -> None:
        """`hear` is called with each notification of the server. Raise McpLost if the address has no valid port."""
        self.version = MODERN
        self.hear = hear
        self._name = name
        self._place = place
        self._session: str | None = None  # id of the session with a server of an earlier version; None: there is no session
        parts = urlsplit(place.url)
        self._is_tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        try:
            self._port = parts.port or (443 if self._is_tls else 80)
        except ValueError:
            raise McpLost(f"MCP server {name!r} has a port outside 1 to 65535") from None
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    @property
    def is_modern(self) -> bool:
        """Whether requests are of the newest version, which has no sessions."""
        return self.version == MODERN

    def exchange(self, request: Request, attempt: Attempt) -> Mapping[str, Any]:
        """Send a request and return its result. Raise McpError if there is no result. If the server is of an earlier version, continue an
        interrupted stream with further requests; if no answer comes, tell the server that the request is cancelled."""
        headers = {**request.headers, **(self._names(request) if self.is_modern else {})}
        try:
            with self._sent("POST", request.encode(), headers, attempt) as response:
                found, reader = self._answer(response, request, attempt, EventReader(self._name))
            for _ in range(MAX_CONTINUATIONS):
                if found is not None or self.is_modern or not reader.last_id:
                    break
                attempt.pause(reader.retry_ms / 1000)
                with self._sent("GET", None, {"last-event-id": reader.last_id}, attempt) as response:
                    found, reader = self._answer(response, request, attempt, reader)
            if found is None:
                lost = McpLost(f"MCP server {self._name!r} ended its answer before the result")
                # an attempt that ends shuts the connection, which may look like the end of the answer
                raise attempt.fault(self._name) if attempt.has_ended else lost
        except BaseException as error:
            if not (self.is_modern or isinstance(error, McpRefused | McpStatus)):
                self._cancel(request)
            raise
        return result_of(found, self._name)

    def notify(self, message: bytes, attempt: Attempt) -> None:
        """Send a message that has no answer. Raise McpError if the server does not accept the message, or if the attempt ends before the
        server answers."""
        with self._sent("POST", message, {}, attempt) as response:
            if response.status >= 300:
                raise self._bad_status(response)

    def close(self) -> None:
        """End the session, if there is one. Errors are ignored."""
        if self._session is not None:
            with suppress(McpError), self._sent("DELETE", None, {}, Attempt(CLOSE_S)):
                pass
            self._session = None

    # --- one request -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _sent(self, method: str, body: bytes | None, headers: Mapping[str, str], attempt: Attempt) -> Generator[http.client.HTTPResponse]:
        """Send a request and yield its response. The connection ends with the attempt. Keep the first session id that a server of an
        earlier version names, for further requests. Raise McpError if the server cannot be reached or breaks off the connection, or if the
        attempt ends."""
        connection = self._connection(attempt)
        sock = connection.sock
        assert sock is not None
        timer = threading.Timer(attempt.remaining_s, _shut, [sock])
        timer.daemon = True
        timer.start()
        try:
            with attempt.stopping(lambda: _shut(sock)):
                connection.request(method, self._path, body, {**self._headers(), **headers})
                response = connection.getresponse()
                if session := response.headers.get(SESSION):
                    self._session = session if self._session is None and not self.is_modern else self._session
                yield response
        except (OSError, http.client.HTTPException, ValueError) as error:
            if attempt.has_ended:
                raise attempt.fault(self._name) from error
            raise McpLost(f"MCP server {self._name!r} broke off the connection ({type(error).__name__})") from error
        finally:
            timer.cancel()
            connection.close()

    def _connection(self, attempt: Attempt) -> http.client.HTTPConnection:
        """Return a new connection to the first address of the host that accepts one. Raise McpError if no address does, or if the attempt
        has ended."""
        addresses = resolve(self._host, self._port, self._name, attempt, may_be_private=self._place.may_be_private)
        fault: OSError | None = None
        for address in addresses:
            if attempt.has_ended:
                break
            try:
                sock = self._opened(address, attempt)
            except OSError as error:
                fault = error
                continue
            connection = http.client.HTTPConnection(self._host, self._port)
            connection.sock = sock
            return connection
        if attempt.has_ended:
            raise attempt.fault(self._name)
        raise McpLost(f"MCP server {self._name!r} cannot be reached at {self._host} port {self._port}: {fault}")

    def _opened(self, address: str, attempt: Attempt) -> socket.socket:
        """Return a connection to an address, after the handshake of TLS if the URL asks for TLS. Raise OSError if connecting or the
        handshake fails or takes longer than CONNECT_S, or if the attempt ends."""
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            sock.settimeout(min(CONNECT_S, attempt.remaining_s))
            with attempt.stopping(partial(_shut, sock)):
                sock.connect((address, self._port))
            if self._is_tls:
                context = ssl.create_default_context()
                sock = context.wrap_socket(sock, server_hostname=self._host, do_handshake_on_connect=False)
                sock.settimeout(min(CONNECT_S, attempt.remaining_s))
                with attempt.stopping(partial(_shut, sock)):
                    sock.do_handshake()
            sock.settimeout(attempt.remaining_s)
        except BaseException:
            sock.close()
            raise
        return sock

    def _headers(self) -> dict[str, str]:
        """Return the headers of every request by their names in lower case: the configured ones, except OWN_HEADERS, and those that this
        client sets itself."""
        configured = {name.lower(): value for name, value in self._place.headers.items() if name.lower() not in OWN_HEADERS}
        told = {SESSION: self._session} if self._session is not None else {}
        return {
            "user-agent": "relaxserve",
            **configured,
            "content-type": "application/json",
            "accept": "application/json, text/event-stream",
            "mcp-protocol-version": self.version,
            **told,
        }

    def _names(self, request: Request) -> dict[str, str]:
        """Return the headers that repeat parts of the body, which servers of the newest version expect."""
        name = request.params.get("name")
        return {"mcp-method": request.method, **({"mcp-name": header_value(name)} if isinstance(name, str) else {})}

    def _answer(
        self, response: http.client.HTTPResponse, request: Request, attempt: Attempt, reader: EventReader
    ) -> tuple[Message | None, EventReader]:
        """Read a response up to the answer to `request`, and return the answer and the reader of events. The answer is None if a stream of
        events ends before the answer. Raise McpError if the response is neither such a stream nor JSON with the answer. If the HTTP status
        is no success, any error of JSON-RPC counts as the answer, whatever its id."""
        kind = response.headers.get_content_type()
        if kind == "text/event-stream" and response.status == 200:
            return self._streamed(response, request, attempt, reader), reader
        body = self._whole(response)
        if kind == "application/json" and body.strip():
            with suppress(McpLost) if response.status >= 300 else nullcontext():
                for message in read_messages(body, self._name):
                    if message.get("id") == request.id or (response.status >= 300 and "error" in message):
                        return message, reader
        if response.status >= 300:
            raise self._bad_status(response)
        raise McpLost(f"MCP server {self._name!r} answered with {kind:.60}; expected JSON with the answer, or a stream of events")

    def _streamed(self, response: http.client.HTTPResponse, request: Request, attempt: Attempt, reader: EventReader) -> Message | None:
        """Read a stream of events up to the answer to `request`. Return None if the stream ends before the answer. Answer the server's own
        requests, and pass its notifications to `hear`. Raise McpError if the stream is not valid or too large, or if the attempt has
        ended."""
        traffic = Traffic(self._name)
        while piece := response.read1(PIECE_BYTES):
            traffic.count(len(piece), 0)
            for data in reader.push(piece):
                for message in read_messages(data, self._name):
                    traffic.count(0)
                    if "method" in message and "id" in message:
                        self._reply(message, attempt)
                    elif "method" in message:
                        self.hear(message)
                    elif message.get("id") == request.id:
                        return message
        if attempt.has_ended:  # this attempt shut the connection itself, which looks like the end of the stream
            raise attempt.fault(self._name)
        return None

    def _whole(self, response: http.client.HTTPResponse) -> bytes:
        """Read the whole body. Raise McpLost if the body is too large."""
        body = bytearray()
        while piece := response.read1(PIECE_BYTES):
            body += piece
            if len(body) > MAX_MESSAGE_BYTES:
                raise McpLost(f"MCP server {self._name!r} sent more than {MAX_MESSAGE_BYTES >> 20} MiB")
        return bytes(body)

    def _bad_status(self, response: http.client.HTTPResponse) -> McpStatus:
        """Return the error for a status that is no success."""
        status = response.status
        meaning = {401: "it needs authorization", 403: "it refuses this authorization", 404: "there is nothing at its address"}
        why = meaning.get(status, response.reason[:80])
        if 300 <= status < 400:
            why = "redirects are not followed; give the address that it leads to"
        return McpStatus(f"MCP server {self._name!r} answered with status {status}: {why}", status)

    def _reply(self, message: Message, attempt: Attempt) -> None:
        """Answer a request of the server. Errors are ignored."""
        with suppress(McpError):
            self.notify(reply_to(message), attempt.within(CLOSE_S))

    def _cancel(self, request: Request) -> None:
        """Tell a server of an earlier version that a request is cancelled. Newer servers see that the connection ends. Errors are
        ignored."""
        with suppress(McpError):
            self.notify(notification("notifications/cancelled", {"requestId": request.id}), Attempt(CLOSE_S))


def header_value(text: str) -> str:
    """Return a value that a header can carry: the text itself, or its Base64 form."""
    if PLAIN.fullmatch(text) and not SENTINEL.fullmatch(text):
        return text
    return f"=?base64?{base64.b64encode(text.encode()).decode()}?="


def header_fault(headers: Mapping[str, str]) -> str:
    """Return what is wrong with the first header that cannot be sent, or "" if all can be sent. Values may be secret, so no value is
    shown."""
    for name, value in headers.items():
        if not (name.isascii() and name.isprintable() and " " not in name and ":" not in name and name):
            return f"has {name!r:.60}, which is no name of a header"
        if not (value.isascii() and value.isprintable()):
            return f"has a value for {name:.60} that no header can carry"
    return ""


def _shut(sock: socket.socket) -> None:
    """End a connection on which another thread waits. The `shutdown` of an SSLSocket would first remove the encryption: the other thread
    could then fail at the handshake with an AttributeError, or send a request as plain text."""
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
