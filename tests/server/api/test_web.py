"""Models that the server publishes for browsers: access to their files, range requests, and a new export when a model changes."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from runtime import own_folder
from runtime.web import page_files
from server.interfaces import LoadError
from server.messages import ErrorCode
from server.models.state import ModelSpec

KEY = "a-key-of-a-client"
WEIGHTS = bytes(range(256)) * 40


async def export(spec: ModelSpec, folder: Path) -> None:
    (folder / "program.json").write_text(f'{{"model": "{spec.name}"}}')
    (folder / "weights-0.bin").write_bytes(WEIGHTS)


def published(serve, export=export, **options):
    """Start a server that publishes its model, and wait until the export has succeeded or failed."""
    server = serve(export=export, publish=("null",), **options)
    asyncio.run_coroutine_threadsafe(_settled(server.registry.publications), server.loop).result(60)
    return server


async def _settled(publications):
    while not all(one.files or one.error for one in publications._current.values()):
        await asyncio.sleep(0.01)


async def _removed(publications):
    """Wait until the folders of ended publications are removed."""
    while len(publications._tasks) > len(publications._current):
        await asyncio.sleep(0.01)


def test_nothing_is_published_unless_it_is_asked_for(serve):
    client = serve(export=export).http()
    response = client.get("/web/null/program.json")
    assert response.status_code == 404 and "--publish MODEL" in response.json()["error"]["message"]
    assert client.get("/web/null/").status_code == 404
    assert "web" not in client.get("/v1/models/null").json()


def test_a_published_model_is_a_page_and_files(serve):
    client = published(serve).http()
    assert client.get("/v1/models/null").json()["web"] == "/web/null/"
    assert client.get("/web/null/").content == page_files()["chat.html"]
    assert client.get("/web/null/program.json").json() == {"model": "null"}
    kinds = {file: client.get(f"/web/null/{file}").headers["content-type"] for file in ("", "engine.mjs", "chat.css", "weights-0.bin")}
    assert [kind.partition(";")[0] for kind in kinds.values()] == ["text/html", "text/javascript", "text/css", "application/octet-stream"]


@pytest.mark.parametrize("file", ["", "worker.mjs", "program.json", "weights-0.bin"])
def test_every_answer_isolates_the_page_and_lets_it_run_its_own_scripts_alone(serve, file):
    headers = published(serve).http().get(f"/web/null/{file}").headers
    assert headers["cross-origin-opener-policy"] == headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cross-origin-embedder-policy"] == "require-corp"
    policy = {name: set(sources) for name, *sources in (part.split() for part in headers["content-security-policy"].split(";"))}
    assert policy["script-src"] == {"'self'", "'wasm-unsafe-eval'"}
    for name in ("worker-src", "style-src", "connect-src"):
        assert policy[name] == {"'self'"}
    for name in ("default-src", "base-uri", "form-action", "frame-ancestors"):
        assert policy[name] == {"'none'"}
    assert policy["require-trusted-types-for"] == {"'script'"}


def test_parts_and_known_files_have_the_same_policy(serve):
    client = published(serve).http()
    whole = client.get("/web/null/weights-0.bin").headers
    for asked, status in ({"range": "bytes=0-9"}, 206), ({"if-none-match": whole["etag"]}, 304):
        found = client.get("/web/null/weights-0.bin", headers=asked)
        assert found.status_code == status
        for name in ("content-security-policy", "cross-origin-embedder-policy", "cross-origin-resource-policy", "cache-control", "etag"):
            assert found.headers[name] == whole[name]


def test_the_page_needs_no_key_and_the_model_does(serve):
    client = published(serve, api_keys=[KEY]).http()
    assert [client.get(f"/web/null/{file}").status_code for file in ("", "chat.html", "vendor/jinja.mjs", "chat.css")] == [200] * 4
    for file in ("program.json", "weights-0.bin", "absent"):
        assert client.get(f"/web/null/{file}").status_code == 401
    assert client.get("/web/null/weights-0.bin", headers={"authorization": f"Bearer {KEY}"}).content == WEIGHTS


def test_a_page_of_another_site_gets_no_weights(serve):
    response = published(serve).http().get("/web/null/weights-0.bin", headers={"origin": "https://elsewhere.example"})
    assert response.json()["error"]["code"] == "origin_not_allowed"


def test_parts_of_a_file_are_sent_while_it_is_the_same(serve):
    client = published(serve).http()
    whole = client.get("/web/null/weights-0.bin")
    etag = whole.headers["etag"]
    part = client.get("/web/null/weights-0.bin", headers={"range": "bytes=1000-", "if-range": etag})
    assert (part.status_code, part.content, part.headers["etag"]) == (206, WEIGHTS[1000:], etag)
    assert part.headers["content-range"] == f"bytes 1000-{len(WEIGHTS) - 1}/{len(WEIGHTS)}"
    other = client.get("/web/null/weights-0.bin", headers={"range": "bytes=1000-", "if-range": '"another"'})
    assert (other.status_code, other.content) == (200, WEIGHTS)
    last = client.get("/web/null/weights-0.bin", headers={"range": "bytes=-7"})
    assert (last.status_code, last.content) == (206, WEIGHTS[-7:])
    weak = client.get("/web/null/weights-0.bin", headers={"if-none-match": f'"another", W/{etag}'})
    assert weak.status_code == 304
    for file in ("weights-0.bin", "chat.mjs"):
        known = client.get(f"/web/null/{file}").headers["etag"]
        again = client.get(f"/web/null/{file}", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
    assert client.get("/web/null/weights-0.bin", headers={"range": f"bytes={len(WEIGHTS)}-"}).status_code == 416


@pytest.mark.parametrize("path", ["absent.bin", "absent.mjs", "%2e%2e/%2e%2e/api/web.py", "%2e%2e/x.json", "__init__.py", "vendor/", "x/"])
def test_only_files_of_the_export_and_of_the_page_are_served(serve, path):
    assert published(serve).http().get(f"/web/null/{path}").status_code == 404


def test_a_model_that_cannot_be_exported_says_why(serve):
    async def refuse(_spec: ModelSpec, _folder: Path) -> None:
        raise LoadError(ErrorCode.LOAD_REFUSED, "null keeps a state per sequence")

    client = published(serve, refuse).http()
    response = client.get("/web/null/program.json")
    assert response.status_code == 500 and "null keeps a state per sequence" in response.json()["error"]["message"]
    assert "web" not in client.get("/v1/models/null").json()


def test_a_browser_that_comes_before_the_export_is_told_to_wait(serve):
    async def wait(_spec: ModelSpec, _folder: Path) -> None:
        await asyncio.Event().wait()

    response = serve(export=wait, publish=("null",)).http().get("/web/null/program.json")
    assert response.status_code == 503 and "not exported yet" in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) > 0


def test_an_unloaded_model_leaves_no_files(serve, tmp_path):
    server = published(serve)
    assert len(list((tmp_path / "web").iterdir())) == 1
    client = server.http()
    client.delete("/admin/models/null").raise_for_status()
    asyncio.run_coroutine_threadsafe(_removed(server.registry.publications), server.loop).result(60)
    assert list((tmp_path / "web").iterdir()) == []
    response = client.get("/web/null/program.json")
    assert response.status_code == 503 and "not loaded yet" in response.json()["error"]["message"]


def test_exports_of_killed_servers_are_removed_and_those_of_others_stay(serve, tmp_path):
    server = published(serve)
    [ours] = (tmp_path / "web").iterdir()
    abandoned = tmp_path / "web" / "abandoned"
    abandoned.mkdir()
    (abandoned / "weights-1.bin").write_bytes(b"0")
    os.utime(abandoned, (0, 0))
    published(serve)
    assert not abandoned.exists() and ours.exists() and len(list((tmp_path / "web").iterdir())) == 2
    assert server.http().get("/web/null/weights-0.bin").content == WEIGHTS


def test_removing_what_killed_servers_left_delays_nothing(serve, tmp_path, monkeypatch):
    (tmp_path / "web" / "abandoned").mkdir(mode=0o700, parents=True)
    removing = threading.Event()
    monkeypatch.setattr(own_folder, "_remove_left", lambda _folder, is_own: removing.wait(60))
    server = serve(export=export, publish=("null",))
    client = server.http()
    assert "not exported yet" in client.get("/web/null/program.json").json()["error"]["message"]
    client.delete("/admin/models/null").raise_for_status()
    assert "not loaded yet" in client.get("/web/null/program.json").json()["error"]["message"]
    removing.set()
    asyncio.run_coroutine_threadsafe(_removed(server.registry.publications), server.loop).result(60)
    assert [path.name for path in (tmp_path / "web").iterdir()] == ["abandoned"]
