"""The gateway around every endpoint: it gives a request its id, checks access and limits, counts metrics, and encodes errors that nothing
else has handled."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.context import Caller
from server.errors import (
    BODY_TOO_LARGE,
    CLIENT_CLOSED,
    INTERNAL,
    REQUEST_TIMEOUT,
    SHUTTING_DOWN,
    ApiError,
    ErrorShape,
)
from server.http.answer_framing import SWITCHING, UPGRADED
from server.http.auth import FORM, INWARD, METRICS_PATHS, Access, Guard, Passed
from server.http.connections import HEALTH_PATHS
from server.http.content_encoding import decoder
from server.http.json_scan import JsonScan
from server.http.kept_requests import Exchange, KeptRequests
from server.http.keys import KeyLimits
from server.http.proxies import PREFIX, Proxies
from server.http.rates import KeyUse, Rates
from server.http.record import REQUEST_ID, RequestRecord, Watcher, write_line
from server.metrics import Metrics
from server.open_values import HEADER, OPEN, given
from server.peers.named import GIVER, named
from server.peers.named import HEADER as GIVER_HEADER
from server.settings import ServerSettings

log = logging.getLogger(__name__)

QUIET = frozenset({*HEALTH_PATHS, *METRICS_PATHS})  # paths that are requested every few seconds
UPLOADS = frozenset({"/v1/files", "/v1/audio/transcriptions", "/v1/audio/translations"})  # their endpoints read the body of a POST
VALID_ID = re.compile(r"[\x21-\x7e]{1,128}")  # ids that are safe in a header and in a log


class Gateway:
    """The ASGI application around all others."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        guard: Guard,
        metrics: Metrics,
        error_shapes: Mapping[str, ErrorShape],
        watchers: Sequence[Watcher] = (),
        kept: KeptRequests | None = None,
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        """`error_shapes`: how errors are encoded below each path. `watchers` are called when a request has ended. `kept` stores requests
        and answers; None: nothing is stored. While `is_leaving` returns true, each answer closes its connection, unless it becomes a
        WebSocket, so that clients send their next request elsewhere."""
        self._app = app
        self._settings = settings
        self._guard = guard
        self._metrics = metrics
        self._error_shapes = error_shapes
        self._watchers = watchers
        self._kept = kept
        self._rates = Rates(guard.key_digests)
        self._is_leaving = is_leaving
        self._proxies = Proxies(settings.proxy_networks, settings.root_path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request of HTTP, and pass anything else on unchanged. The `Caller` in the scope tells the endpoint about the sender of
        the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status = time.monotonic(), 0
        headers = Headers(scope=scope)
        peer, path = (scope.get("client") or ("",))[0], scope["path"]
        scheme = self._proxies.scheme(peer, scope["scheme"], headers.get("x-forwarded-proto", ""))
        scope = {**scope, "path": self._proxies.path(path), PREFIX: self._proxies.prefix(path), "scheme": scheme}
        asked = headers.get("x-request-id", "")
        request_id = asked if VALID_ID.fullmatch(asked) else f"req-{secrets.token_hex(12)}"
        REQUEST_ID.set(request_id)  # safe to set: every request runs in its own task
        record = RequestRecord(request_id, scope["method"], scope["path"], began_s, headers.get("traceparent", ""))
        record.is_probe = record.path in QUIET
        record.client = self._proxies.client(peer, ",".join(headers.getlist("x-forwarded-for")))
        expects = headers.get("if-match", "").strip().strip('"')
        values = given(headers.get(HEADER, ""), self._settings.ingress_key)
        OPEN.set(values)
        GIVER.set(named(headers.get(GIVER_HEADER, ""), self._settings.ingress_key))
        exchange = Exchange() if self._kept is not None and self._kept.of else None
        use: KeyUse | None = None  # what the key has used of its rates; None: the key has no rates
        has_begun = False

        async def send_with_headers(message: Message) -> None:
            """Send a part of the answer, with the gateway's headers, and add it to the exchange if requests are stored."""
            nonlocal status
            if exchange is not None and message["type"] == "http.response.body":
                exchange.add(message.get("body", b""), more=message.get("more_body", False))
            if message["type"] == "http.response.start":
                status = message["status"]
                if exchange is not None:
                    exchange.is_compressed = Headers(raw=message["headers"]).get("content-encoding") == "gzip"
                added = MutableHeaders(scope=message)
                added["x-request-id"] = request_id
                added["request-id"] = request_id  # the name that Anthropic's clients read
                added["openai-processing-ms"] = str(round((time.monotonic() - began_s) * 1000))
                added["x-content-type-options"] = "nosniff"
                added.update({} if use is None else use.headers())
                if values is not None:
                    # tells the ingress that the values it sent were used, and that models with this fingerprint can continue the answer
                    added[HEADER] = record.fingerprint
                if self._is_leaving() and status != SWITCHING:
                    added["connection"] = "close"
            await send(message)

        root = next((root for root in self._error_shapes if scope["path"] == root or scope["path"].startswith(f"{root}/")), None)
        if root is not None:
            scope["relaxserve.error_shape"] = self._error_shapes[root]
        try:
            try:
                inward: Passed | None = scope.get(INWARD)
                passed = inward or self._guard.check(scope["method"], scope["path"], headers)
                limits = passed.limits if inward is None else self._guard.limits_of(inward)
                is_socket = scope.get(UPGRADED, False)
                counts = scope["method"] == "POST" or is_socket
                if inward is None and counts and (use := self._rates.of(passed.key_digest, limits)) is not None:
                    use.begin()
                    has_begun, record.charge = True, use.charge
                # Open paths use no body. Reading a body costs time, and clients without a key must not be able to cause this cost.
                is_upload = is_socket or (scope["method"] == "POST" and scope["path"] in UPLOADS)
                body = b"" if passed.access is Access.OPEN or is_upload else await self._read_body(headers, receive)
                record.received_s = time.monotonic()
                if exchange is not None:
                    exchange.body = body
                record.key = passed.key_name
                scope["relaxserve.caller"] = Caller(
                    request_id,
                    passed.key_digest,
                    passed.access,
                    began_s,
                    len(body),
                    record,
                    passed.tenant,
                    passed.is_admin,
                    inward is not None,
                    limits,
                    expects,
                    lambda: self._readmit(passed, record),
                    receive,
                )
                if headers.get("content-type", "").startswith(FORM):
                    # no endpoint takes such a form, but `curl -d` declares one whatever it sends; without a type, the body is read as JSON
                    scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
                sends = send_with_headers
                if scope["method"] == "HEAD":
                    scope["method"], sends = "GET", _head_only(send_with_headers)
                await self._app(scope, receive if is_upload else _replay(body, receive), sends)
            except ApiError as error:
                if status:
                    raise  # too late for an error response; the stream has sent its own error
                await error_response(error, scope)(scope, receive, send_with_headers)
            except asyncio.CancelledError:
                if not status:  # the server stops before this answer is ready
                    error = ApiError(SHUTTING_DOWN, "the server stops, and the answer was not ready in time")
                    await error_response(error, scope)(scope, receive, send_with_headers)
                # The error is not raised again, because that would log a traceback whenever the server stops.
            except Exception:
                log.exception("request %s failed", request_id)
                if status:
                    raise
                error = ApiError(INTERNAL, f"the server failed on this request; its log has the cause under {request_id}")
                await error_response(error, scope)(scope, receive, send_with_headers)
        finally:
            if use is not None and has_begun:
                use.end()
            record.ended_s = time.monotonic()
            record.status = status or CLIENT_CLOSED.status
            record.handler = getattr(scope.get("route"), "path", "none")  # the route's pattern, not the path, which clients choose
            if not record.is_probe:  # a server that is not ready answers probes with 503, which is no error
                self._metrics.http.labels(record.handler, record.method, f"{record.status // 100}xx").inc()
                self._metrics.http_s.labels(record.handler, record.method).observe(record.ended_s - began_s)
            write_line(record)
            if self._kept is not None and exchange is not None:
                self._kept.keep(record, exchange)
            for watcher in self._watchers:
                watcher(record)

    def _readmit(self, passed: Passed, record: RequestRecord) -> KeyLimits:
        """Count a part of a request against the rates of its key. Return the key's present limits. Raise ApiError if the key no longer
        exists or exceeds a rate."""
        limits = self._guard.limits_now(passed)
        use = self._rates.of(passed.key_digest, limits)
        record.charge = None if use is None else use.charge
        if use is not None:
            use.take()
        return limits

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        """Read the whole body, for an endpoint that needs the body before it can begin; endpoints of UPLOADS read their bodies themselves.
        Limit the size of the body, the number and the nesting of its values, and the time until it has arrived. Raise ApiError if a limit
        is exceeded, if the body cannot be decompressed, or if the client leaves."""
        limit, declared = self._settings.max_body_bytes, headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise ApiError(BODY_TOO_LARGE, f"the body is larger than {limit} bytes")
        body, scan, decode, num_received = bytearray(), JsonScan(), decoder(headers.get("content-encoding", "")), 0
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(CLIENT_CLOSED, "the client closed the connection before it had sent the whole body")
                    num_received += len(message.get("body", b""))
                    is_last = not message.get("more_body", False)
                    if is_last and not num_received:
                        return b""  # there is no body, so there is nothing to decompress
                    for num_taken, piece in enumerate(decode(message.get("body", b""), is_last)):
                        if num_taken:
                            await asyncio.sleep(0)
                        if max(num_received, len(body) + len(piece)) > limit:
                            raise ApiError(BODY_TOO_LARGE, f"the body is larger than {limit} bytes")
                        scan.feed(piece)
                        body += piece
                    if is_last:
                        return bytes(body)
        except TimeoutError:
            raise ApiError(REQUEST_TIMEOUT, f"the body did not arrive within {self._settings.body_timeout_s:g} s") from None


def _head_only(send: Send) -> Send:
    """Return a `send` for a HEAD request. The returned `send` passes on only the head of the answer that GET would get, and then ends the
    answer. From then on, `receive` returns a disconnect, so that a streaming endpoint stops."""

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_head


def error_response(error: ApiError, scope: Scope) -> Response:
    """Return the response with an error, in the shape of the API to which the request belongs."""
    shape: ErrorShape = scope.get("relaxserve.error_shape", ApiError.body)
    return Response(shape(error), error.kind.status, error.response_headers(), "application/json")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns the body, which was already read, and then the client's next message, a disconnect."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
