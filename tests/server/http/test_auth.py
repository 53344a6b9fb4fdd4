"""Tests which paths a client's API key permits, and which paths need an admin key."""

from __future__ import annotations

import os
import re

import httpx
import pytest
from fastapi.routing import APIRoute

from server.app import create_app
from server.errors import ApiError
from server.http.auth import UNTYPED, Access, Guard, _is_own, access_of
from server.http.connections import HEALTH_PATHS
from server.http.keys import UNLIMITED, KeyLimits, KeyRing
from server.models.registry import Registry
from server.settings import ServerSettings, SettingsError
from tests.doubles.worker import ByteTokenizer, NullScript, NullWorker

KEY, ADMIN = "key-0123456789", "admin-0123456789"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def routes() -> list[tuple[str, str]]:
    settings = ServerSettings()
    registry = Registry(settings, lambda _spec, progress: NullWorker(NullScript(), progress), lambda _source: ByteTokenizer())
    app = create_app(settings, registry)
    found = [(method, path) for method, path in all_routes(app.routes)]
    assert ("POST", "/v1/chat/completions") in found
    return found


def all_routes(routes) -> list[tuple[str, str]]:
    return [(method, route.path) for route in routes if isinstance(route, APIRoute) for method in route.methods]


def names(response: httpx.Response, code: str) -> bool:
    """Return whether the response contains this error code. Errors in Ollama's format have no code, so any message counts."""
    error = response.json()["error"]
    return bool(error) if isinstance(error, str) else error["code"] == code


def test_every_path_but_probes_needs_a_key(serve, routes):
    server = serve(api_keys=(KEY,), admin_keys=(ADMIN,))
    client = server.http()
    for method, path in routes:
        url = path.replace("{", "").replace("}", "").replace(":path", "").replace("/console/name", "/console/main.js")
        access = access_of(url, open_metrics=False)
        without = client.request(method, url)
        if access is Access.OPEN:
            assert without.status_code in (200, 503), url
            continue
        assert without.status_code == 401, url
        assert names(without, "invalid_api_key") and without.headers["www-authenticate"] == "Bearer"
        assert client.request(method, url, headers=bearer("wrong-key")).status_code == 401, url
        with_key = client.request(method, url, headers=bearer(KEY))
        assert (with_key.status_code == 403) == (access is Access.ADMIN), url


def test_what_belongs_to_the_administration(routes):
    admin = {path for _, path in routes if access_of(path, open_metrics=False) is Access.ADMIN}
    assert {"/admin/models", "/admin/cache", "/models/load", "/models/unload", "/v2/repository/index"} <= admin
    assert {"/v1/models/{model:path}/load", "/v1/models/{model:path}/unload"} <= admin
    assert "/v1/models" not in admin and "/v1/chat/completions" not in admin
    open_paths = {path for _, path in routes if access_of(path, open_metrics=False) is Access.OPEN}
    assert open_paths == {"/", "/docs", "/console/{name:path}", *HEALTH_PATHS}


def test_keys_open_their_doors(serve):
    server = serve(api_keys=(KEY,), admin_keys=(ADMIN,))
    assert server.http().get("/v1/models", headers=bearer(KEY)).status_code == 200
    assert server.http().get("/v1/models", headers={"x-api-key": KEY}).status_code == 200
    assert server.http().get("/admin/models", headers=bearer(ADMIN)).status_code == 200
    assert server.http().get("/v1/models", headers=bearer(ADMIN)).status_code == 200
    assert server.openai(api_key=KEY).models.list().data[0].id == "null"


def test_without_an_admin_key_nobody_administrates_a_server_with_keys(serve):
    response = serve(api_keys=(KEY,)).http().get("/admin/models", headers=bearer(KEY))
    assert response.status_code == 403 and response.json()["error"]["code"] == "admin_disabled"


def test_metrics_can_be_opened(serve):
    assert serve(api_keys=(KEY,)).http().get("/metrics").status_code == 401
    opened = serve(api_keys=(KEY,), open_metrics=True).http()
    assert opened.get("/metrics").status_code == opened.get("/load").status_code == 200


def test_without_keys_only_the_own_name_is_answered(serve):
    server = serve(allowed_hosts=("My.Box",))
    for host, status in [("evil.example", 403), ("127.0.0.1:1", 200), ("localhost", 200), ("my.box:80", 200), ("MY.BOX", 200), ("", 403)]:
        assert server.http().get("/v1/models", headers={"host": host}).status_code == status, host


def test_key_file_is_read_again_when_it_changes(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# keys\n\n{KEY}\n")
    ring = KeyRing((), file, "api_keys")
    assert ring.find(KEY) and not ring.find("") and not ring.find("# keys")
    file.write_text("another-key\n")
    os.utime(file, ns=(1, 1))
    assert ring.find("another-key") and not ring.find(KEY)


def test_a_running_request_learns_the_present_limits_of_its_key(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{KEY} requests_per_minute=5\nother-0123456789\n")
    guard = Guard(ServerSettings(api_key_file=file, admin_keys=(ADMIN,)))
    passed, admin = (guard.check("GET", "/v1/models", bearer(key)) for key in (KEY, ADMIN))
    assert guard.limits_now(passed) == passed.limits == KeyLimits(requests_per_minute=5)
    file.write_text(f"{KEY} requests_per_minute=50\nother-0123456789\n")
    assert guard.limits_now(passed) == KeyLimits(requests_per_minute=50)
    file.write_text("other-0123456789\n")
    with pytest.raises(ApiError, match="the API key is no longer valid"):
        guard.limits_now(passed)
    assert guard.limits_now(admin) == UNLIMITED
    without = Guard(ServerSettings())
    assert without.limits_now(without.check("GET", "/v1/models", {"host": "localhost"})) == UNLIMITED


def test_a_key_file_that_vanishes_keeps_its_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text(KEY)
    ring = KeyRing((), file, "api_keys")
    file.unlink()
    assert ring.find(KEY)


@pytest.mark.parametrize("lines", [KEY, "another-key"])
def test_each_time_that_a_key_file_vanishes_is_logged_once(tmp_path, caplog, lines):
    file, away = tmp_path / "keys", tmp_path / "away"
    file.write_text(KEY)
    ring = KeyRing((), file, "api_keys")
    for _ in range(2):
        file.rename(away)
        assert ring.find(KEY) and ring.find(KEY)
        away.rename(file)
        if lines != KEY:
            file.write_text(f"{KEY}\n{lines}")
            assert ring.find(lines)
        ring.find(KEY)
    assert caplog.text.count("the keys read before stay valid") == 2


@pytest.mark.parametrize(
    ("key", "complaint"), [("short", "api_keys has a key of 5 characters; expected at least 8"), ("schlüssel", "ASCII")]
)
def test_keys_that_nobody_should_or_could_send_are_refused(key, complaint):
    with pytest.raises(SettingsError, match=complaint):
        KeyRing((key,), None, "api_keys")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("# none\n", "the file has no key; expected one per line"),
        ("short", "a line has a key of 5"),
        (None, "No such file or directory; name a"),
    ],
)
def test_a_key_file_without_good_keys_stops_the_start(text, complaint, tmp_path):
    if text is not None:
        (tmp_path / "keys").write_text(text)
    with pytest.raises(SettingsError, match=f"keys: {complaint}"):
        KeyRing((), tmp_path / "keys", "api_keys")


def test_other_machines_need_a_key():
    with pytest.raises(SettingsError, match="no API key"):
        ServerSettings(host="0.0.0.0")
    ServerSettings(host="0.0.0.0", api_keys=(KEY,))
    ServerSettings(host="0.0.0.0", insecure=True)
    ServerSettings(host="::1")


def test_requests_of_one_key_share_a_fairness_key(serve):
    server = serve(api_keys=(KEY, "other-0123456789"))
    for key in (KEY, KEY, "other-0123456789"):
        server.http(headers=bearer(key)).post("/v1/completions", json={"prompt": "x"})
    first, second, third = (submit.fairness_key for submit in server.worker.submits)
    assert first == second != third and KEY not in first


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/admin/models%0A"),
        ("POST", "/models/load%0A"),
        ("POST", "/v1/models/x/load%0A"),
        ("POST", "/v1/models/x%0Ay/load"),
        ("POST", "/v1/models//load"),
        ("POST", "/v1/models//unload"),
        ("GET", "/admin%2Fmodels"),
        ("GET", "/admin/models/"),
    ],
)
def test_no_spelling_of_an_admin_path_slips_by(serve, method, path):
    """A client's key never opens an admin path, however the path is spelled. One such spelling ends in a line feed: the router's patterns
    end in `$`, which also matches before a final line feed."""
    server = serve(api_keys=(KEY,), admin_keys=(ADMIN,))
    response = server.http(headers=bearer(KEY), follow_redirects=False).request(method, path, json={"model": "x"})
    assert response.status_code in (403, 404), response.text
    if response.status_code == 404:
        assert response.json()["error"]["code"] == "path_not_found"


def test_a_second_lock_holds_when_the_first_is_wrong(serve, monkeypatch):
    monkeypatch.setattr("server.http.auth.ADMIN_PATHS", re.compile("nothing"))
    server = serve(api_keys=(KEY,), admin_keys=(ADMIN,))
    for path in ("/admin/models", "/admin/memory", "/models"):
        response = server.http().get(path, headers=bearer(KEY))
        assert response.status_code == 403 and response.json()["error"]["code"] == "admin_key_required"


FOREIGN = "https://evil.example"


@pytest.mark.parametrize(
    "marks", [{"origin": FOREIGN}, {"origin": "null"}, {"origin": "http://127.0.0.1:1"}, {"sec-fetch-site": "cross-site"}]
)
@pytest.mark.parametrize("insecure", [False, True])
def test_without_keys_a_foreign_page_reaches_no_endpoint(serve, routes, marks, insecure):
    """A server without keys refuses requests of web pages from other origins, with or without a body, except at the open endpoints. So such
    a page cannot unload a model."""
    server = serve(insecure=insecure)
    client = server.http(headers={**marks, "content-type": "text/plain"})
    for method, path in routes:
        url = re.sub(r"{.*?}", "null", path)
        for body in (b"", b'{"model": "null"}'):
            response = client.request(method, url, content=body)
            if access_of(url, open_metrics=False) is not Access.OPEN:
                assert response.status_code == 403, url
                assert method == "HEAD" or names(response, "origin_not_allowed"), url
    assert server.complete().status_code == 200


def test_without_keys_own_pages_and_named_origins_are_answered(serve):
    server = serve(cors_origins=("https://ok.example",))
    for origin in (server.url, "https://ok.example"):
        response = server.http().post("/v1/completions", json={"prompt": "x"}, headers={"origin": origin, "sec-fetch-site": "same-origin"})
        assert response.status_code == 200, response.text
    assert serve(cors_origins=("*",)).http().get("/v1/models", headers={"origin": FOREIGN}).status_code == 200
    assert server.http().get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200, "a link to the console"


def test_pages_of_allowed_origins_read_all_headers(serve):
    """Otherwise a client in a page would not see that it shall not send a load again."""
    answer = serve(cors_origins=("https://ok.example",)).http().get("/v1/models/none", headers={"origin": "https://ok.example"})
    assert answer.headers["x-should-retry"] == "false" and answer.headers["access-control-expose-headers"] == "*"


@pytest.mark.parametrize(
    ("origin", "host", "is_own"),
    [
        ("http://localhost", "localhost:80", True),
        ("http://LOCALHOST:8000", "localhost:8000", True),
        ("https://my.box", "my.box:443", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://localhost:8000", "localhost", False),
        ("https://localhost:80", "localhost", False),
        ("file://localhost", "localhost", False),
        ("null", "null", False),
        ("", "", False),
    ],
)
def test_an_origin_is_our_own_by_name_and_port(origin, host, is_own):
    assert _is_own(origin, host) == is_own


def test_with_keys_any_page_that_has_one_is_answered(serve):
    client = serve(api_keys=(KEY,)).http(headers={**bearer(KEY), "origin": FOREIGN, "sec-fetch-site": "cross-site"})
    assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
def test_a_change_that_is_not_called_json_is_refused(serve, routes, content_type):
    """Every POST and PUT of the admin API checks the content type first and refuses all types except JSON, even for an empty body. Ollama's
    paths also take the types that its clients declare."""
    server = serve(api_keys=(KEY,), admin_keys=(ADMIN,))
    client = server.http(headers={**bearer(ADMIN), "content-type": content_type})
    for method, path in routes:
        url = re.sub(r"{.*?}", "null", path)
        if url.startswith("/api/") and content_type in UNTYPED:
            continue
        if method in ("POST", "PUT") and access_of(url, open_metrics=False) is Access.ADMIN:
            for body in (b"", b'{"model": "null"}') if content_type else (b'{"model": "null"}',):
                response = client.request(method, url, content=body)
                answer = response.json()
                # in Ollama's format, `error` is a string
                code = answer["code"] if isinstance(answer["error"], str) else answer["error"]["code"]
                assert response.status_code == 415 and code == "not_json", url
    assert server.http(headers=bearer(KEY)).get("/v1/models/null").status_code == 200


def test_json_and_no_body_at_all_are_taken_from_an_administrator(serve):
    server = serve()
    json = server.http().post("/models/load", content=b'{"model": "none"}', headers={"content-type": "Application/JSON; charset=utf-8"})
    assert json.json()["error"]["code"] != "not_json"
    assert server.http().post("/v2/repository/index").status_code == 200
    nothing = {"content-type": "application/octet-stream"}  # what aiohttp declares if a request has no body
    assert server.http().post("/v2/repository/index", headers=nothing).status_code == 200
    assert server.http().post("/v2/repository/index", headers=nothing, content=b"{}").status_code == 415
