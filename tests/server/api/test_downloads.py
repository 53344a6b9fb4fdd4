"""Downloads under /admin/downloads: what is offered, progress, a stop, the next download that continues, and refusals."""

from __future__ import annotations

import time

import pytest

from server.interfaces import LoadError
from server.messages import ErrorCode
from tests.doubles.library import Shelf


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def http(serve, shelf):
    return serve(library=shelf, allow_hub=True, initial=()).http()


def ended(http, begun: dict) -> dict:
    end = time.monotonic() + 60
    while begun["state"] == "running":
        assert time.monotonic() < end
        time.sleep(0.005)
        begun = http.get(f"/admin/operations/{begun['id']}").json()
    return begun


def test_a_download_is_an_operation(http, shelf):
    assert http.get("/admin/downloads").json() == {
        "object": "list",
        "allowed": True,
        "catalogue": [{"name": "known", "about": "a model with a short name", "licence": "MIT", "here": False}],
        "data": [],
    }
    begun = http.post("/admin/downloads", json={"source": "org/known"})
    assert begun.status_code == 202 and begun.headers["location"] == f"/admin/operations/{begun.json()['id']}"
    done = ended(http, begun.json())
    assert (done["kind"], done["model"], done["state"], done["fraction"]) == ("download", "org/known", "succeeded", 1)
    assert (done["total_bytes"], done["completed_bytes"]) == (300, 300)
    listed = http.get("/admin/downloads").json()
    assert listed["data"] == [{"source": "org/known", "bytes": 300, "used_at": 1.0}] and listed["catalogue"][0]["here"]
    assert http.get("/admin/models").json() == {"object": "list", "data": [], "failed": []}, "a download loads nothing"


def test_a_running_download_is_joined_and_stopped(http, shelf):
    shelf.pause_s = 600.0
    begun, joined = (http.post("/admin/downloads", json={"source": "known"}) for _ in range(2))
    assert (begun.status_code, joined.status_code) == (202, 200)
    first = begun.json()
    assert first["id"] == joined.json()["id"]
    assert http.delete(f"/admin/operations/{first['id']}").json()["state"] == "cancelled"
    assert shelf.num_open == 0 and not shelf.held
    shelf.pause_s = 0.0
    again = http.post("/admin/downloads", json={"source": "known"}).json()
    assert again["id"] != first["id"] and ended(http, again)["state"] == "succeeded"


def test_a_failed_download_says_why(http, shelf):
    shelf.error = LoadError(ErrorCode.FETCH_FAILED, "the hub does not answer")
    done = ended(http, http.post("/admin/downloads", json={"source": "known"}).json())
    assert done["state"] == "failed" and done["error"]["code"] == "fetch_failed" and done["error"]["message"] == "the hub does not answer"
    assert http.get("/admin/models").json()["failed"] == [], "it is no failed load"


def test_a_download_that_ends_unexpectedly_has_failed_and_can_be_repeated(http, shelf):
    shelf.error = OSError(24, "Too many open files")
    failed = ended(http, http.post("/admin/downloads", json={"source": "known"}).json())
    assert failed["state"] == "failed" and failed["error"]["code"] == "fetch_failed"
    assert failed["error"]["message"] == "OSError: [Errno 24] Too many open files"
    shelf.error = None
    assert ended(http, http.post("/admin/downloads", json={"source": "known"}).json())["state"] == "succeeded"


@pytest.mark.parametrize("source", ["unknown", "../known", "/etc/passwd", "org/../name"])
def test_only_names_of_models_are_downloaded(http, source):
    refused = http.post("/admin/downloads", json={"source": source})
    assert refused.status_code == 400 and "expected a name of the catalogue" in refused.json()["error"]["message"]


def test_a_server_without_the_hub_refuses_and_names_the_switch(serve, shelf):
    http = serve(library=shelf, initial=()).http()
    assert http.get("/admin/downloads").json()["allowed"] is False
    refused = http.post("/admin/downloads", json={"source": "known"})
    assert refused.status_code == 400 and refused.json()["error"]["message"].endswith("start it with --allow-hub")
    assert not shelf.held


def test_a_client_may_not_download(serve, shelf):
    http = serve(library=shelf, allow_hub=True, initial=(), api_keys=["a-key-of-a-client"], admin_keys=["a-key-of-an-admin"]).http()
    client = {"authorization": "Bearer a-key-of-a-client"}
    assert http.post("/admin/downloads", json={"source": "known"}, headers=client).status_code == 403
    assert http.get("/admin/downloads", headers=client).status_code == 403
