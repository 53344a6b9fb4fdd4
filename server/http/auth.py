"""Control access. On a server with keys, requests to models need an API key, and requests to the administration need an admin key. Requests
of other servers of the fleet need a proof that the sender knows the fleet's secret. Health checks and pages need neither key nor proof."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from server.errors import (
    ADMIN_DISABLED,
    ADMIN_KEY_REQUIRED,
    HOST_NOT_ALLOWED,
    INVALID_API_KEY,
    NOT_FOUND_PATH,
    NOT_JSON,
    ORIGIN_NOT_ALLOWED,
    ApiError,
)
from server.http.connections import HEALTH_PATHS
from server.http.keys import GROUP, NO_MODELS, UNLIMITED, KeyLimits, KeyRing, digest_of, short
from server.peers.wire import PATH, PROOF_HEADER, Proofs
from server.secret_file import read_secret
from server.settings import ServerSettings


class Access(Enum):
    """What a path requires of a request."""

    OPEN = auto()  # nothing
    KEY = auto()  # an API key, on a server with keys
    ADMIN = auto()  # an admin key, on a server with keys
    PEER = auto()  # another server of the fleet, which proves that it knows the secret


# Paths that are not listed need an API key, so a new path is closed until it is opened here.
OPEN_PATHS = frozenset({"/", "/docs", *HEALTH_PATHS})
METRICS_PATHS = ("/metrics", "/load")
OPEN_FILES = "/console/"  # files of the console and of the docs page
WEB_PAGE_SUFFIXES = (".html", ".mjs", ".css")
WEB_PAGES = re.compile(rf"/web/.+(/|{'|'.join(map(re.escape, WEB_PAGE_SUFFIXES))})")  # other files of a published model need a key
ADMIN_PATTERNS = (  # proxies deny these paths, too: `python -m deploy.nginx` writes the patterns into deploy/nginx/nginx.conf
    "/admin(/.*)?",
    "/models(/(load|unload))?",
    "/v1/models/.*/(load|unload)",
    "/v2/repository/.*",
    "/(sleep|wake_up|is_sleeping)",
    "/api/(pull|delete|copy|create)",
)
ADMIN_PATHS = re.compile("|".join(ADMIN_PATTERNS), re.DOTALL)
INWARD = "relaxserve.inward"  # key of the scope of a request that a batch of this server makes; the value is its `Passed`
SOCKET_KEY = "openai-insecure-api-key."  # precedes a key among the protocols of a WebSocket
FORM = "application/x-www-form-urlencoded"  # the type that `curl -d` declares, whatever it sends
# Content types that Ollama's administration also accepts, because Ollama's clients send JSON under these types. Accepting them is safe: an
# HTML form of another origin cannot send JSON under these types, and a browser names the origin of a script's request, which `Guard` checks
# if there are no keys.
UNTYPED = ("", FORM)
EMPTY = "application/octet-stream"  # aiohttp's type of requests without a body


def access_of(path: str, *, open_metrics: bool) -> Access:
    """Return what a path requires. With `open_metrics`, METRICS_PATHS require nothing."""
    if path == PATH:
        return Access.PEER
    if path in OPEN_PATHS or path.startswith(OPEN_FILES) or WEB_PAGES.fullmatch(path) or (path in METRICS_PATHS and open_metrics):
        return Access.OPEN
    return Access.ADMIN if ADMIN_PATHS.fullmatch(path) else Access.KEY


@dataclass(frozen=True, slots=True)
class Passed:
    """The result of the access check of a request."""

    access: Access
    key_digest: str = ""  # identifies the key without revealing it; empty: the request has no key, or needs none
    tenant: str = ""  # requests of one tenant may reuse each other's cached state; empty: the server has no keys
    is_admin: bool = False  # the request may also use the administration
    limits: KeyLimits = UNLIMITED

    @property
    def key_name(self) -> str:
        """Return a name of the key for the log: its group, or else the beginning of its digest."""
        return self.tenant.removeprefix(GROUP) if self.tenant.startswith(GROUP) else self.key_digest[:8]


class Guard:
    """Checks the access of each request against the keys of the settings."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._api = KeyRing(settings.api_keys, settings.api_key_file, "api_keys")
        self._admin = KeyRing(settings.admin_keys, settings.admin_key_file, "admin_keys", takes_limits=False)
        file = settings.peer_secret_file
        self._peers = None if file is None else Proofs(read_secret(file, "peer_secret_file"))
        self._hosts = frozenset({"127.0.0.1", "localhost", "[::1]", settings.host, *map(str.lower, settings.allowed_hosts)})

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> Passed:
        """Check a request, and return the result. Raise ApiError if the path is not printable, if the request lacks the key or the proof
        that the path needs, or if it sends other content than JSON to the administration. On a server without API keys, also raise ApiError
        if a page of another origin, which `cors_origins` does not allow, sent the request and the path is not open, or, unless the server
        is `insecure`, if the request names a host that is neither this server nor one of `allowed_hosts`. The key of a request to an open
        path is not looked up."""
        if not path.isprintable():
            # The router's patterns end in `$`, which accepts a line feed after the path. So a path with a line feed could pass this check
            # as one path and be routed as another.
            raise ApiError(NOT_FOUND_PATH, f"path {path!r:.120} has unprintable characters; see /docs for the paths")
        access = access_of(path, open_metrics=self._settings.open_metrics)
        if access is Access.PEER:
            return self._check_peer(path, headers)
        if not self._api.exists and not self._settings.insecure:
            self._check_host(headers.get("host", ""))
        if not self._api.exists and access is not Access.OPEN:
            self._check_origin(headers)
        key = _bearer(headers.get("authorization", "")) or headers.get("x-api-key", "") or _of_socket(headers)
        if access is Access.OPEN:
            return Passed(access, limits=NO_MODELS if self._api.restricts_models else UNLIMITED)
        known = self._admin.find(key) if self._admin.exists and key else None
        is_admin = known is not None
        if known is None:
            known = self._api.find(key) if self._api.exists and key else None
            if self._api.exists and known is None:
                fault = "is wrong" if key else "is missing"
                raise ApiError(INVALID_API_KEY, f"the API key {fault}", headers={"www-authenticate": "Bearer"})
            if access is Access.ADMIN and self._admin.exists:
                raise ApiError(ADMIN_KEY_REQUIRED, f"{path} needs an admin key")
            if access is Access.ADMIN and self._api.exists:
                raise ApiError(ADMIN_DISABLED, f"{path} needs an admin key, and the server was started without one; set admin_keys")
            if access is Access.ADMIN and self._settings.insecure:
                raise ApiError(
                    ADMIN_DISABLED, f"{path} needs an admin key, and this insecure server was started without one; set admin_keys"
                )
        if access is Access.ADMIN and method in ("POST", "PUT", "PATCH"):
            _check_json(headers, UNTYPED if path.startswith("/api/") else ())
        is_admin = is_admin or not (self._admin.exists or self._api.exists or self._settings.insecure)
        tenant = known.tenant if self._api.exists and known else ""
        return Passed(access, short(digest_of(key)) if key else "", tenant, is_admin, known.limits if known else UNLIMITED)

    def _check_peer(self, path: str, headers: Mapping[str, str]) -> Passed:
        """Return the result for a request of another server of the fleet. Raise ApiError if this server has no secret, or if the request
        does not prove that its sender knows the secret."""
        if self._peers is None:
            raise ApiError(NOT_FOUND_PATH, f"{path} is for servers of a fleet, and this one has no peer_secret_file")
        if not self._peers.proves(headers.get(PROOF_HEADER, "")):
            raise ApiError(
                INVALID_API_KEY, f"{PROOF_HEADER} proves no knowledge of this server's secret; give both the same peer_secret_file"
            )
        return Passed(Access.PEER)

    def key_digests(self) -> set[str]:
        """Return the digests of all API keys, as in `Passed.key_digest`."""
        return self._api.short_digests

    def limits_of(self, passed: Passed) -> KeyLimits:
        """Return the present limits of the key that has passed earlier. If the key no longer exists or is no API key, return the limits
        that it had when it passed."""
        now = self._api.limits_of(passed.key_digest)
        return passed.limits if now is None else now

    def limits_now(self, passed: Passed) -> KeyLimits:
        """Return the present limits of the key that has passed earlier. On a server without API keys, return the limits that the key had
        when it passed. Raise ApiError if the key no longer exists."""
        if not self._api.exists:
            return passed.limits
        for ring in (self._admin, self._api):
            if (limits := ring.limits_of(passed.key_digest)) is not None:
                return limits
        raise ApiError(INVALID_API_KEY, "the API key is no longer valid", headers={"www-authenticate": "Bearer"})

    def _check_host(self, host: str) -> None:
        """Raise ApiError unless the request names as its host this server or one of `allowed_hosts`."""
        name = re.sub(r":\d+$", "", host.lower())
        if name not in self._hosts:
            raise ApiError(
                HOST_NOT_ALLOWED,
                f"host is {host!r:.80}; without keys the server answers only to its own name; set a key, or add the host to allowed_hosts",
            )

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        """Raise ApiError if a page of another origin sent the request, unless `cors_origins` allows that origin. With API keys this check
        is not needed: a browser adds no key by itself."""
        origin, allowed = headers.get("origin"), self._settings.cors_origins
        if origin is None:
            is_foreign, named = headers.get("sec-fetch-site", "").lower() == "cross-site", "another site"
        else:
            is_foreign, named = not _is_own(origin, headers.get("host", "")), f"{origin!r:.80}"
            if origin in allowed or "*" in allowed:
                return
        if is_foreign:
            raise ApiError(
                ORIGIN_NOT_ALLOWED,
                f"a web page of {named} sent the request; without keys the server answers only its own pages; "
                "set a key, or add the origin to cors_origins",
            )


def _is_own(origin: str, host: str) -> bool:
    """Return whether a page's origin is this server, which the request names as `host`. Browsers leave out the port that the scheme
    implies."""
    scheme, _, authority = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme, "")
    return bool(port) and authority.removesuffix(port) == host.lower().removesuffix(port)


def _check_json(headers: Mapping[str, str], also: Sequence[str]) -> None:
    """Raise ApiError unless the content type is JSON, or one of `also`, because a page of another origin may send some other types without
    a CORS preflight. Without a body, the type may be EMPTY, which needs a preflight, or absent. Without body and type, a page of another
    origin needs no preflight, and only `_check_origin` refuses its request."""
    declared = headers.get("content-type", "")
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    kind = declared.partition(";")[0].strip().lower()
    if kind not in ("application/json", *also) and (has_body or (declared and kind != EMPTY)):
        raise ApiError(NOT_JSON, f"content-type is {declared!r:.80}; the administration expects application/json")


def _of_socket(headers: Mapping[str, str]) -> str:
    """Return the key that a page names among the protocols of a WebSocket, because a page can set no other header of a WebSocket. Return an
    empty text if no protocol names a key."""
    names = (name.strip() for name in headers.get("sec-websocket-protocol", "").split(","))
    return next((name.removeprefix(SOCKET_KEY) for name in names if name.startswith(SOCKET_KEY)), "")


def _bearer(authorization: str) -> str:
    """Return the key in the header `authorization`, or an empty text if the header has none."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
