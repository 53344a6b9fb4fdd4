from __future__ import annotations

from pathlib import Path

from server.errors import BY_CODE, TABLE, as_markdown
from server.messages import ErrorCode

ROOT = Path(__file__).parents[2]


def test_the_page_is_the_table():
    page = ROOT / "docs" / "errors.md"
    assert page.read_text() == as_markdown(), "run: python -m server.errors > docs/errors.md"


def test_codes_are_unique():
    assert len({kind.code for kind in TABLE}) == len(TABLE) > 30


def test_clients_are_not_told_to_repeat_what_cannot_succeed():
    retried = {kind.status for kind in TABLE if kind.retry}
    assert retried <= {408, 429, 503}


def test_what_ends_a_load_or_a_request_is_in_the_table():
    """The table of HTTP errors contains every code with which a load or a request can fail. The type checker ensures that workers send only
    these codes."""
    assert {str(code) for code in ErrorCode} <= BY_CODE.keys()


def test_a_wrong_method_is_told_all_right_ones(server):
    for method, path, allowed in [("OPTIONS", "/admin/cache", "DELETE, GET, HEAD"), ("PATCH", "/admin/models/null", "DELETE, GET, HEAD")]:
        answer = server.http().request(method, path)
        assert answer.status_code == 405 and answer.headers["allow"] == allowed
        assert answer.json()["error"]["message"] == f"{path} does not accept {method}; expected {allowed}"


def test_no_request_waits_until_routes_are_built(server, monkeypatch):
    monkeypatch.setattr("fastapi.routing.get_dependant", None)
    assert server.http().post("/nothing", json={}).status_code == 404
    assert server.http().post("/tokenize", json={"prompt": "a"}).status_code == 200
