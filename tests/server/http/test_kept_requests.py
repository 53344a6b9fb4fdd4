"""The file that stores requests and answers, for `relaxserve replay`."""

from __future__ import annotations

import gzip
import json
import os
import resource
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from server.http.kept_requests import Exchange, KeptRequests
from server.http.record import RequestRecord
from server.settings import ServerSettings, SettingsError

SECRET = "sk-secret"


def lines(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the lines of the file, once there are `count`."""
    end_s = time.monotonic() + 60
    while len(found := path.read_text().splitlines()) < count:
        assert time.monotonic() < end_s, found
        time.sleep(0.01)
    return [json.loads(line) for line in found]


def test_nothing_is_kept_by_default() -> None:
    assert ServerSettings().keep_requests is None


def test_requests_and_answers_are_kept_without_keys(serve: Any, tmp_path: Path) -> None:
    place = tmp_path / "requests.jsonl"
    server = serve(keep_requests=place, api_keys=(SECRET,))
    http = server.http(headers={"authorization": f"Bearer {SECRET}"})
    body = {"messages": [{"role": "user", "content": "naïve 問"}], "temperature": 0}
    whole = http.post("/v1/chat/completions", json=body)
    streamed = http.post("/v1/chat/completions", json={**body, "stream": True})
    http.get("/v1/models")
    assert http.post("/v1/chat/completions", json={"messages": []}).status_code == 400
    first, second = lines(place, 2)
    assert (first["path"], first["status"], first["complete"], first["model"]) == ("/v1/chat/completions", 200, True, "null")
    assert json.loads(first["request"]) == body and json.loads(first["answer"]) == whole.json()
    assert second["answer"] == streamed.text and second["complete"]
    assert first["system_fingerprint"] == whole.json()["system_fingerprint"]
    assert SECRET not in place.read_text()
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert len(place.read_text().splitlines()) == 2, "no model answered the others"


def test_an_answer_without_a_request_is_not_held() -> None:
    """A session over a WebSocket has no body that could be repeated, and its answer may be long."""
    exchange = Exchange()
    exchange.add(b"x" * 1000, more=True)
    assert not exchange.answer and not exchange.is_kept
    exchange.body = b"{}"
    exchange.add(b"y", more=False)
    assert exchange.answer == [b"y"] and exchange.is_kept


def test_a_compressed_answer_is_kept_in_plain(serve: Any, tmp_path: Path, answering: Any) -> None:
    place = tmp_path / "requests.jsonl"
    server = serve(keep_requests=place, script=replace(answering("x" * 70_000), max_context=1 << 17))
    answer = server.http(headers={"accept-encoding": "gzip"}).post(
        "/v1/completions", json={"prompt": "hi", "max_tokens": 80_000, "temperature": 0}
    )
    assert answer.headers.get("content-encoding") == "gzip"
    (kept,) = lines(place, 1)
    assert json.loads(kept["answer"]) == answer.json()


def test_a_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"keep_requests is '.*': Is a directory; name a file that can be written"):
        KeptRequests(tmp_path, ())


def test_only_requests_of_a_model_or_key_are_kept(serve: Any, tmp_path: Path) -> None:
    """The administration changes what is kept, from one request to the next."""
    place = tmp_path / "requests.jsonl"
    admin, other = "admin-0123456789", "other-0123456789"
    keys = {"api_keys": (f"{SECRET} group=website", other), "admin_keys": (admin,)}
    server = serve(keep_requests=place, keep_requests_of=(), **keys)

    def ask(key: str, path: str = "/v1/completions", **body: Any) -> Any:
        return server.http(headers={"authorization": f"Bearer {key}"}).request("PUT" if "/admin" in path else "POST", path, json=body)

    ask(SECRET, prompt="kept by nobody")
    for number, (of, key) in enumerate(((["key=web*"], SECRET), (["model=nul?"], other)), 1):
        assert ask(admin, "/admin/kept_requests", of=of).json() == {"of": of}
        ask(SECRET if number == 1 else other, prompt=f"question {number}")
        if number == 1:
            ask(other, prompt="of another key")
        assert json.loads(lines(place, number)[-1]["request"])["prompt"] == f"question {number}" and key
    assert ask(admin, "/admin/kept_requests", of=["model=none", "key=none"]).status_code == 200
    ask(SECRET, prompt="kept by nobody")
    assert ask(SECRET, "/admin/kept_requests", of=[]).status_code == 403
    refused = ask(admin, "/admin/kept_requests", of=["everything"])
    assert refused.status_code == 400 and "of[0]" in refused.json()["error"]["message"]
    server.stop()
    assert "kept by nobody" not in place.read_text() and len(lines(place, 2)) == 2


def test_without_a_file_nothing_can_be_kept(serve: Any) -> None:
    refused = serve().http().put("/admin/kept_requests", json={"of": ["model=*"]})
    assert refused.status_code == 501 and "--keep-requests FILE" in refused.json()["error"]["message"]


def test_a_wrong_choice_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="keep_requests_of has 'all'; expected model=PATTERN or key=PATTERN"):
        ServerSettings(keep_requests=tmp_path / "x", keep_requests_of=("all",))


def test_a_request_that_began_before_is_not_kept(serve: Any, tmp_path: Path, answering: Any) -> None:
    """The beginning of its answer is gone."""
    place = tmp_path / "requests.jsonl"
    server = serve(keep_requests=place, keep_requests_of=(), script=answering("x" * 50, interval_s=0.02))
    with server.http().stream("POST", "/v1/completions", json={"prompt": "first", "max_tokens": 50, "stream": True}) as answer:
        parts = answer.iter_lines()
        assert next(parts)
        assert server.http().put("/admin/kept_requests", json={"of": ["model=*"]}).status_code == 200
        assert "data: [DONE]" in list(parts)
    server.complete(prompt="second", max_tokens=1)
    (kept,) = lines(place, 1)
    assert json.loads(kept["request"])["prompt"] == "second"


def test_an_answer_that_cannot_be_read_costs_one_line(tmp_path: Path) -> None:
    place = tmp_path / "requests.jsonl"
    kept = KeptRequests(place, ("model=*",))
    for data in (b"no gzip", gzip.compress(b"{}")):
        exchange = Exchange()
        exchange.body, exchange.is_compressed = b"{}", True
        exchange.add(data, more=False)
        kept.keep(RequestRecord("id", model="null"), exchange)
    kept.close()
    (line,) = lines(place, 1)
    assert line["answer"] == "{}"


def test_requests_that_wait_for_a_slow_disk_take_limited_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def slow(record: RequestRecord, _exchange: Exchange) -> str:
        assert goes_on.wait(60)
        return json.dumps({"request_id": record.request_id})

    monkeypatch.setattr("server.http.kept_requests._line", slow)
    monkeypatch.setattr("server.http.kept_requests.MOST_WAITING_BYTES", 100)
    place = tmp_path / "requests.jsonl"
    kept = KeptRequests(place, ("model=*",))

    def keep(name: str) -> None:
        exchange = Exchange()
        exchange.body = b"1" * 20
        exchange.add(b"2" * 30, more=False)
        kept.keep(RequestRecord(name, model="null"), exchange)

    for name in ("first", "second", "lost"):
        keep(name)
    goes_on.set()
    lines(place, 2)
    while kept.num_waiting_bytes:
        time.sleep(0.01)
    keep("third")
    kept.close()
    assert [line["request_id"] for line in lines(place, 3)] == ["first", "second", "third"]


def test_a_line_for_which_the_disk_has_too_little_room_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`relaxserve replay` would lose the next line with it."""
    place = tmp_path / "requests.jsonl"
    kept = KeptRequests(place, ("model=*",))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def sized(record: RequestRecord, _exchange: Exchange) -> str:
        most = 50_000 if record.request_id == "long" else limits[0]  # the kernel writes the beginning of the long line, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        return json.dumps({"request_id": record.request_id, "answer": "x" * (100_000 if record.request_id == "long" else 1)})

    monkeypatch.setattr("server.http.kept_requests._line", sized)
    try:
        for name in ("first", "long", "last"):
            exchange = Exchange()
            exchange.body = b"{}"
            kept.keep(RequestRecord(name, model="null"), exchange)
        kept.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [line["request_id"] for line in lines(place, 2)] == ["first", "last"]


def test_a_torn_line_costs_no_other(tmp_path: Path) -> None:
    """A server that is killed may have written a part of a line."""
    place = tmp_path / "requests.jsonl"
    torn = '{"time": "2026-01-01T00:00:00Z", "request": "na\u00ef'.encode()[:-1]  # ends within a character
    for before, found in ((torn, torn + b"\n"), (b"{}\n", b"{}\n"), (b"", b"")):
        place.write_bytes(before)
        KeptRequests(place, ()).close()
        assert place.read_bytes() == found


def test_requests_may_be_kept_in_a_pipe(tmp_path: Path) -> None:
    """Opening a pipe to read would take its data, or wait for a writer."""
    os.mkfifo(place := tmp_path / "pipe")
    reader = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    try:
        KeptRequests(place, ()).close()
        assert os.read(reader, 10) == b""
    finally:
        os.close(reader)
