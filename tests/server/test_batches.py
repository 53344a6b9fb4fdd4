"""Files and batches, through the clients of OpenAI and Anthropic, on a server whose model computes nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anthropic
import openai
import pytest

from runtime.whole_files import locked_file
from server.batches.lines import MAX_LINES, Line
from server.batches.records import BatchRecord, FileRecord, Status, new_id, now
from server.batches.runner import Run, Runner
from server.batches.service import _own
from server.batches.store import Store, Upload
from server.errors import MODEL_NOT_FOUND, ApiError
from tests.disk import room_for
from tests.doubles.worker import NullScript
from tests.unreadable import make_unreadable

Body = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "batches"


def chat_line(number: int, **fields: object) -> Body:
    body = {"model": "null", "messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 8, **fields}
    return {"custom_id": f"line {number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def jsonl(lines: Sequence[object]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def begin(client: openai.OpenAI, lines: Sequence[object] | bytes, endpoint: Any = "/v1/chat/completions") -> openai.types.Batch:
    data = lines if isinstance(lines, bytes) else jsonl(lines)
    file = client.files.create(file=("questions.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"for": "a test"})


def ended(client: openai.OpenAI, batch: openai.types.Batch) -> openai.types.Batch:
    return until(lambda: client.batches.retrieve(batch.id), lambda found: found.status in ("completed", "failed", "expired", "cancelled"))


def until(look: Callable[[], Any], is_reached: Callable[[Any], object]) -> Any:
    end_s = time.monotonic() + 60
    while not is_reached(found := look()):
        assert time.monotonic() < end_s, found
        time.sleep(0.02)
    return found


def lines_of(client: openai.OpenAI, file_id: str | None) -> dict[str, Body]:
    if file_id is None:
        return {}
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    by_id = {line["custom_id"]: line for line in found}
    assert len(by_id) == len(found), "a request was answered twice"
    return by_id


def test_a_batch_gives_the_answers_of_live_requests(serve, folder) -> None:
    server = serve(batch_dir=folder)
    client = server.openai()
    asked = [chat_line(number, seed=1) for number in range(100)] + [chat_line(100, temperature=-1)]
    batch = ended(client, begin(client, asked))
    assert (batch.status, batch.endpoint, batch.metadata) == ("completed", "/v1/chat/completions", {"for": "a test"})
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 101, "completed": 100, "failed": 1}
    answers, errors = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert set(answers) == {f"line {number}" for number in range(100)}
    live = client.chat.completions.create(**asked[7]["body"])
    found = answers["line 7"]["response"]
    assert found["status_code"] == 200
    assert answers["line 7"]["error"] is None
    assert found["body"]["choices"] == live.model_dump(mode="json", exclude_unset=True)["choices"]
    assert errors["line 100"]["response"]["status_code"] == 400
    assert "temperature" in errors["line 100"]["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 4}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
        ("/v1/embeddings", {"input": ["one", "two"]}),
    ],
)
def test_each_endpoint_runs_in_a_batch(serve, folder, endpoint: str, body: Body) -> None:
    script = NullScript(embedding_size=4) if endpoint.endswith("embeddings") else NullScript()
    client = serve(batch_dir=folder, script=script).openai()
    line = {"custom_id": "one", "method": "POST", "url": endpoint, "body": {"model": "null", **body}}
    batch = ended(client, begin(client, [line], endpoint))
    assert lines_of(client, batch.output_file_id)["one"]["response"]["body"]["object"], lines_of(client, batch.error_file_id)


def test_messages_run_in_anthropics_shape(serve, folder) -> None:
    server = serve(batch_dir=folder)
    client = anthropic.Anthropic(
        base_url=server.url, api_key="unused", max_retries=0, http_client=anthropic.DefaultHttpxClient(verify=False)
    )
    params: Any = {"model": "null", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
    bad: Any = {**params, "max_tokens": -1}
    batch = client.messages.batches.create(requests=[{"custom_id": "good", "params": params}, {"custom_id": "bad", "params": bad}])
    assert batch.id.startswith("msgbatch_")
    batch = until(lambda: client.messages.batches.retrieve(batch.id), lambda found: found.processing_status == "ended")
    assert batch.request_counts.model_dump() == {"processing": 0, "succeeded": 1, "errored": 1, "canceled": 0, "expired": 0}
    results = {result.custom_id: result.result for result in client.messages.batches.results(batch.id)}
    assert results["good"].type == "succeeded"
    assert results["good"].message.content == client.messages.create(**params).content
    assert results["bad"].type == "errored"
    assert results["bad"].error.error.type == "invalid_request_error"
    assert [found.id for found in client.messages.batches.list()] == [batch.id]
    with pytest.raises(anthropic.BadRequestError, match="limit is 0"):
        client.messages.batches.list(before_id=batch.id, limit=0)
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    assert not list(client.messages.batches.list())
    client.close()


def test_a_cancelled_batch_keeps_its_answers(serve, folder) -> None:
    client = serve(batch_dir=folder, script=NullScript(interval_s=0.02)).openai()
    batch = begin(client, [chat_line(number) for number in range(2000)])
    until(lambda: client.batches.retrieve(batch.id), lambda found: found.request_counts.completed)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    answers, errors = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert answers
    assert len(answers) + len(errors) == 2000
    assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError, match="cancelled already"):
        client.batches.cancel(batch.id)


def test_a_restarted_server_continues(serve, folder) -> None:
    """A stop in the middle loses no line and repeats none. A torn last line, as a killed server leaves it, is computed again."""
    first = serve(batch_dir=folder, script=NullScript(interval_s=0.01), drain_s=0.0)
    batch = begin(first.openai(), [chat_line(number) for number in range(400)])
    until(lambda: first.openai().batches.retrieve(batch.id), lambda found: found.request_counts.completed > 20)
    first.stop()
    record = json.loads((folder / "batches" / f"{batch.id}.json").read_text())
    output = folder / "files" / f"{record['output_file_id']}.data"
    whole = output.read_bytes()
    output.write_bytes(whole[:-7])
    client = serve(batch_dir=folder).openai()
    batch = ended(client, client.batches.retrieve(batch.id))
    assert batch.status == "completed"
    assert len(lines_of(client, batch.output_file_id)) == 400
    assert client.files.content(batch.output_file_id or "").content.startswith(whole[: whole[:-1].rindex(b"\n") + 1])


def test_an_expired_batch_says_which_requests_did_not_run(serve, folder, monkeypatch) -> None:
    monkeypatch.setattr("server.batches.service.WINDOW_S", 1)
    client = serve(batch_dir=folder, script=NullScript(interval_s=0.5)).openai()
    batch = ended(client, begin(client, [chat_line(number) for number in range(300)]))
    assert batch.status == "expired"
    errors = lines_of(client, batch.error_file_id)
    assert {line["error"]["code"] for line in errors.values() if line["error"]} == {"batch_expired"}
    assert len(errors) + len(lines_of(client, batch.output_file_id)) == 300


GOOD = chat_line(0)


@pytest.mark.parametrize(
    ("data", "code", "line"),
    [
        (b"", "empty_file", None),
        (b"\n\n", "empty_file", None),
        (b"not JSON\n", "invalid_json_line", 1),
        (b"\xff\xfe\n", "invalid_json_line", 1),
        (b"[" * 5000 + b"\n", "invalid_json_line", 1),
        (jsonl([GOOD, {"custom_id": "x"}]), "invalid_json_line", 2),
        (jsonl([{**GOOD, "body": 3}]), "invalid_json_line", 1),
        (jsonl([GOOD, GOOD]), "duplicate_custom_id", 2),
        (jsonl([{**GOOD, "custom_id": ""}]), "invalid_custom_id", 1),
        (jsonl([{**GOOD, "method": "GET"}]), "invalid_method", 1),
        (jsonl([{**GOOD, "url": "/admin/models"}]), "mismatched_url", 1),
        (jsonl([chat_line(1, stream=True)]), "streaming_unsupported", 1),
        (jsonl([chat_line(1, user="x" * 70_000)]), "line_too_long", 1),
        (b'{"a":1}\n' * (MAX_LINES + 1), "invalid_json_line", 1),
    ],
    ids=count(),
)
def test_rubbish_fails_by_name(serve, folder, data: bytes, code: str, line: int | None) -> None:
    client = serve(batch_dir=folder, max_body_bytes=1 << 16).openai()
    batch = ended(client, begin(client, data))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data
    fault = batch.errors.data[0]
    assert (fault.code, fault.line) == (code, line)
    assert batch.output_file_id is None


def test_answers_of_a_batch_do_not_come_later(serve, folder) -> None:
    """A background response is no answer, and the batch would begin all of them at once."""
    client = serve(batch_dir=folder).openai()
    body: dict[str, Any] = {"model": "null", "input": "hi", "background": True}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
    batch = ended(client, begin(client, [line], "/v1/responses"))
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data
    assert (batch.errors.data[0].code, batch.errors.data[0].param) == ("background_unsupported", "body.background")
    body["background"] = False
    assert ended(client, begin(client, [line], "/v1/responses")).request_counts.completed == 1


def test_too_many_lines_are_refused(tmp_path) -> None:
    from server.batches.lines import check

    lines = (json.dumps(chat_line(number)).encode() for number in range(MAX_LINES + 1))
    _, faults = check(lines, "/v1/chat/completions", 1 << 20)
    assert [fault.code for fault in faults] == ["too_many_lines"]


def test_files_are_stored_listed_and_deleted(serve, folder) -> None:
    client = serve(batch_dir=folder, max_file_bytes=100_000).openai()
    data = bytes(range(256)) * 200 + b"\r\n--boundary\r\n"
    made = client.files.create(
        file=('a "name" \u00e4.bin', data), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (made.bytes, made.purpose, made.expires_at) == (len(data), "user_data", made.created_at + 3600)
    assert client.files.content(made.id).content == data
    second = client.files.create(file=("b.jsonl", b"{}\n"), purpose="batch")
    assert [file.id for file in client.files.list(limit=1)] == [second.id, made.id] or {f.id for f in client.files.list()} == {
        second.id,
        made.id,
    }
    assert [file.id for file in client.files.list(purpose="batch")] == [second.id]
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match="no file of yours"):
        client.files.retrieve(made.id)
    with pytest.raises(openai.APIStatusError, match="larger than 100000 bytes"):
        client.files.create(file=("big", b"x" * 200_000), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="purpose is 'nonsense'"):
        client.files.create(file=("c", b"x"), purpose="nonsense")  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="seconds"):
        client.files.create(file=("c", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 1})
    with pytest.raises(openai.BadRequestError, match="seconds"):
        expiry: Any = {"anchor": "created_at", "seconds": "0" * 8 + "36001"}
        client.files.create(file=("c", b"x"), purpose="batch", expires_after=expiry)
    assert {path.stem for path in (folder / "files").glob("*.data")} == {second.id}, "refused uploads leave nothing"


def test_a_file_may_have_all_of_its_bytes(serve, folder) -> None:
    """The limit counts the bytes of the file, without those of the other fields."""
    client = serve(batch_dir=folder, max_file_bytes=1000).openai()
    assert client.files.create(file=("whole", b"x" * 1000), purpose="batch").bytes == 1000
    with pytest.raises(openai.APIStatusError, match="larger than 1000 bytes"):
        client.files.create(file=("more", b"x" * 1001), purpose="batch")


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        ("application/json", b"{}", "expected multipart/form-data with a boundary"),
        ("multipart/form-data", b"--x--\r\n", "expected multipart/form-data with a boundary"),
        ("multipart/form-data; boundary=x", b"--x\r\n", "ends before its last boundary"),
        ("multipart/form-data; boundary=x", b"y" * 5000, "does not begin with its boundary"),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\nv\r\n--x--", "a part has no name"),
        ("multipart/form-data; boundary=x", b"--x\r\n" + b"h" * 5000, "headers of more than 4096 bytes"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + b"v" * 70_000,
            "more than 65536 bytes; expected at most as many",
        ),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n' * 40 + b"--x--",
            "more than 32 fields",
        ),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--',
            "file is absent",
        ),
    ],
    ids=count(),
)
def test_forms_that_cannot_be_read_are_refused(serve, folder, kind: str, body: bytes, says: str) -> None:
    server = serve(batch_dir=folder)
    answer = server.http().post("/v1/files", content=body, headers={"content-type": kind})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert not list((folder / "files").iterdir())


def test_no_request_waits_for_the_disk_of_an_upload(serve, folder, monkeypatch) -> None:
    """The kernel stops whoever writes faster than the disk takes it, and an upload may have 200 MB."""
    begin_upload, threads = Upload.__init__, list[int]()

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: threads.append(threading.get_ident()) or call(*given)

    def opened(self: Upload, store: Store, file_id: str) -> None:
        begin_upload(self, store, file_id)
        file: Any = self._file
        self._file = cast("Any", SimpleNamespace(write=noted(file.write), close=noted(file.close)))

    monkeypatch.setattr(Upload, "__init__", noted(opened))
    server = serve(batch_dir=folder)
    file = server.openai().files.create(file=("questions.jsonl", b"z" * (1 << 20)), purpose="batch")
    assert file.bytes == 1 << 20 == (folder / "files" / f"{file.id}.data").stat().st_size
    assert len(threads) > 2 and server.thread.ident not in threads
    threads.clear()
    params = {"model": "null", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    made = server.http().post("/v1/messages/batches", json={"requests": [{"custom_id": "a", "params": params}]})
    assert made.status_code == 200 and len(threads) == 3 and server.thread.ident not in threads


def test_no_request_waits_while_files_are_removed(serve, folder, monkeypatch) -> None:
    """Removing a file of 200 MB takes long."""
    server = serve(batch_dir=folder)
    client, http = server.openai(), server.http()
    params = {"model": "null", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    batch = http.post("/v1/messages/batches", json={"requests": [{"custom_id": "a", "params": params}]}).json()
    until(lambda: http.get(f"/v1/messages/batches/{batch['id']}").json(), lambda found: found["processing_status"] == "ended")
    file = client.files.create(file=("questions.jsonl", b"z"), purpose="batch")
    remove, threads = Path.unlink, list[int]()

    def noted(path: Path, *, missing_ok: bool = False) -> None:
        threads.append(threading.get_ident())
        remove(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", noted)
    assert client.files.delete(file.id).deleted
    assert http.delete(f"/v1/messages/batches/{batch['id']}").status_code == 200
    monkeypatch.undo()
    assert len(threads) > 4 and server.thread.ident not in threads
    assert not list((folder / "files").iterdir()) and not list((folder / "batches").iterdir())


def test_no_batch_begins_with_a_file_that_a_thread_removes(serve, folder, monkeypatch) -> None:
    """Its requests would be gone. If the disk refuses to remove the file, it is there again."""
    client = serve(batch_dir=folder).openai()
    file = client.files.create(file=("questions.jsonl", jsonl([chat_line(1)])), purpose="batch")
    removing, go_on = threading.Event(), threading.Event()

    def refuse(_store: Store, _file_id: str) -> None:
        removing.set()
        assert go_on.wait(60)
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Store, "delete_file", refuse)
    with ThreadPoolExecutor(1) as pool:
        deleted = pool.submit(client.files.delete, file.id)
        assert removing.wait(60)
        try:
            with pytest.raises(openai.NotFoundError):
                begin_with(client, file.id)
        finally:
            go_on.set()
        with pytest.raises(openai.InternalServerError):
            deleted.result()
    monkeypatch.undo()
    assert client.files.retrieve(file.id).id == file.id
    assert client.files.delete(file.id).deleted and not list((folder / "files").iterdir())


def test_a_file_that_is_deleted_twice_is_counted_once(tmp_path, monkeypatch) -> None:
    store = Store(tmp_path, 1000)
    upload = store.new_upload()
    upload.add(b"x" * 900)
    kept = upload.finish(lambda file_id, size: FileRecord(file_id, "", "f", "batch", size, 0))
    stat = Path.stat

    def delete_meanwhile(path: Path, **given: Any) -> Any:
        found = stat(path, **given)
        if path == store.data(kept.id):
            monkeypatch.undo()
            store.delete_file(kept.id)
        return found

    monkeypatch.setattr(Path, "stat", delete_meanwhile)
    store.delete_file(kept.id)
    assert store.num_bytes == 0


def test_an_interrupted_upload_leaves_nothing(serve, folder) -> None:
    server = serve(batch_dir=folder)
    head = b"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: multipart/form-data; boundary=x\r\ncontent-length: 100000\r\n\r\n"
    sock = server.connect()
    sock.sendall(head + b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"z" * 5000)
    until(lambda: list((folder / "files").iterdir()), bool)
    sock.close()
    until(lambda: list((folder / "files").iterdir()), lambda found: not found)


def test_tenants_do_not_see_each_other(serve, folder) -> None:
    server = serve(batch_dir=folder, api_keys=("first key", "second key"))
    one, other = server.openai(api_key="first key"), server.openai(api_key="second key")
    batch = ended(one, begin(one, [chat_line(1)]))
    assert batch.output_file_id is not None
    assert not other.files.list().data
    assert not other.batches.list().data
    for look in (
        lambda: other.batches.retrieve(batch.id),
        lambda: other.files.content(batch.output_file_id or ""),
        lambda: other.files.delete(batch.input_file_id),
        lambda: begin_with(other, batch.input_file_id),
    ):
        with pytest.raises(openai.NotFoundError):
            look()
    with pytest.raises(openai.AuthenticationError):
        server.openai(api_key="no key").files.list()


def begin_with(client: openai.OpenAI, file_id: str) -> openai.types.Batch:
    return client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")


def test_a_file_in_use_is_kept(serve, folder) -> None:
    client = serve(batch_dir=folder, script=NullScript(interval_s=0.5)).openai()
    batch = begin(client, [chat_line(number) for number in range(500)])
    with pytest.raises(openai.ConflictError, match="uses the file"):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)
    ended(client, batch)
    assert client.files.delete(batch.input_file_id).deleted


def test_a_batch_takes_no_place_of_others(serve, folder) -> None:
    """A batch fills the model, and a live request is neither refused nor kept waiting by the front."""
    server = serve(batch_dir=folder, script=NullScript(interval_s=0.2), max_queued_requests=0)
    client = server.openai()
    batch = begin(client, [chat_line(number) for number in range(500)])
    until(lambda: len(server.worker.submits), lambda found: found >= 4)
    assert {submit.priority for submit in server.worker.submits} == {1 << 31}
    assert server.chat(model="null", max_tokens=1).status_code == 200
    client.batches.cancel(batch.id)


def test_a_batch_fills_a_model_that_was_loaded_again_with_a_larger_batch(serve, folder, tmp_path) -> None:
    (tmp_path / "models" / "a").mkdir(parents=True)
    server = serve(batch_dir=folder, initial=(), scripts={"a": NullScript(interval_s=0.05)})
    client, admin = server.openai(), server.http()
    for most in (1, 3):
        assert admin.post("/admin/models", json={"source": "a", "max_batch": most, "wait": True}).status_code == 200
        batch = begin(client, [chat_line(number, model="a") for number in range(6)])
        assert ended(client, batch).request_counts.completed == 6
        assert max(server.workers["a"].num_running) == most
        admin.delete("/admin/models/a")


def test_a_server_without_a_folder_says_so(serve, folder) -> None:
    with pytest.raises(openai.InternalServerError, match="without a folder for files"):
        serve().openai().files.list()
    serve(batch_dir=folder)
    with pytest.raises(openai.InternalServerError, match="another server uses it"):
        serve(batch_dir=folder).openai().files.list()


def test_an_upload_that_ends_while_it_is_finished_leaves_nothing(tmp_path) -> None:
    """The task of a stopping server may be cancelled while a thread still keeps the file."""
    store = Store(tmp_path, 1000)
    upload = store.new_upload()
    upload.add(b"x" * 900)
    upload.abandon()
    with pytest.raises(ValueError, match="was abandoned"):
        upload.finish(lambda file_id, size: FileRecord(file_id, "", "f", "batch", size, 0))
    assert not store.files and store.num_bytes == 0 and not list((tmp_path / "files").iterdir())


def test_no_upload_waits_for_a_record_on_its_way_to_the_disk(tmp_path, monkeypatch) -> None:
    """The event loop adds the pieces of an upload, so they must not wait while a thread writes the record of another file."""
    store = Store(tmp_path, 1000)
    upload, replace = store.new_upload(), os.replace

    def add_meanwhile(fresh: str, path: Path) -> None:
        adding = threading.Thread(target=upload.add, args=(b"x",), daemon=True)
        adding.start()
        adding.join(60)
        assert not adding.is_alive(), "it waits for the record"
        replace(fresh, path)

    monkeypatch.setattr(os, "replace", add_meanwhile)
    store.keep(FileRecord("file-" + "0" * 24, "", "f", "batch", 0, 0))
    assert upload.num_bytes == 1
    upload.abandon()


def test_the_store_has_a_limit(tmp_path) -> None:
    store = Store(tmp_path, 1000)
    upload = store.new_upload()
    upload.add(b"x" * 900)
    kept = upload.finish(lambda file_id, size: FileRecord(file_id, "", "f", "batch", size, 0, expires_at=1))
    another = store.new_upload()
    with pytest.raises(ApiError, match="of 1000"):
        another.add(b"x" * 200)
    another.abandon()
    assert store.num_bytes == 900
    assert Store(tmp_path, 1000).files.keys() == {kept.id}
    old = BatchRecord("batch_" + "0" * 24, "", "", "/v1/completions", kept.id, kept.id, kept.id, 0, 0)
    old.reach(Status.FAILED)
    old.times[Status.FAILED] = 1
    store.save(old)
    store.sweep(0)
    assert not store.files
    assert not store.batches
    assert store.num_bytes == 0


@pytest.mark.parametrize("part", ["files", "batches"])
def test_records_that_cannot_be_listed_cost_no_data(tmp_path, monkeypatch, part: str) -> None:
    """Otherwise the answers that a running batch has written would count as data of nobody, and would be removed."""
    store = Store(tmp_path, 1000)
    upload = store.new_upload()
    upload.finish(lambda file_id, size: FileRecord(file_id, "", "f", "batch", size, 0))
    output = new_id("file-")
    store.save(BatchRecord("batch_" + "0" * 24, "", "", "/v1/completions", upload.id, output, new_id("file-"), 0, 0))
    store.append(output, b"answer\n")
    make_unreadable(monkeypatch, tmp_path / part)
    with pytest.raises(PermissionError):
        Store(tmp_path, 1000)
    assert store.data(output).read_bytes() == b"answer\n" and store.data(upload.id).exists()


@pytest.mark.parametrize("part", ["files", "batches"])
def test_a_start_removes_the_records_that_killed_servers_have_begun(tmp_path, part: str) -> None:
    Store(tmp_path, 1000)
    os.close(locked_file(tmp_path / part / "one.json")[0])
    Store(tmp_path, 1000)
    assert not [*(tmp_path / part).iterdir()]


def test_an_end_is_written_before_it_is_seen(tmp_path, monkeypatch) -> None:
    """A client that sees the end of a batch may delete it at once, and it must not be written again afterwards."""
    store = Store(tmp_path, 1000)
    record = BatchRecord("batch_" + "0" * 24, "", "", "/v1/completions", "file-a", "file-b", "file-c", 0, 0)
    store.save(record)
    seen: list[bool] = []
    write = store._write
    monkeypatch.setattr(store, "_write", lambda part, written: (seen.append(record.has_ended), write(part, written)))
    store.end(record, Status.COMPLETED)
    assert seen == [False]
    assert record.has_ended
    assert Store(tmp_path, 1000).batches[record.id].status is Status.COMPLETED


def record_of(input_id: str, **fields: Any) -> BatchRecord:
    ids = (new_id("batch_"), "", "", "/v1/chat/completions", input_id, new_id("file-"), new_id("file-"))
    return BatchRecord(*ids, 0, 1 << 40, **fields)


def test_a_file_that_a_batch_uses_does_not_expire(tmp_path) -> None:
    """A batch reads its input again after a restart, and at its end for the requests that have no answer."""
    store = Store(tmp_path, 1000)
    upload = store.new_upload()
    upload.add(b"{}\n")
    file = upload.finish(lambda file_id, size: FileRecord(file_id, "", "f", "batch", size, 0, expires_at=1))
    batch = record_of(file.id)
    store.save(batch)
    store.sweep(0)
    assert list(store.lines(file.id)) == [b"{}\n"]
    with pytest.raises(ApiError, match="no file of yours"):
        store.file(file.id, "")  # no further batch begins with it
    store.end(batch, Status.COMPLETED)
    store.sweep(0)
    assert not store.files and not list(store.lines(file.id))


def test_the_requests_of_an_anthropic_batch_go_with_it(tmp_path) -> None:
    """No list shows the file with these requests, so no client can delete it."""
    store = Store(tmp_path, 1000)

    def stored(**fields: Any) -> BatchRecord:
        upload = store.new_upload()
        upload.add(b"{}\n")
        file = upload.finish(lambda file_id, size: FileRecord(file_id, "", "requests.jsonl", "requests", size, 0))
        return record_of(file.id, status=Status.COMPLETED, **fields)

    store.save(stored(times={Status.COMPLETED: 1}))
    kept, lost = stored(times={Status.COMPLETED: now()}), stored()
    store.save(kept)
    store.sweep(0)
    assert store.batches.keys() == {kept.id}
    assert store.files.keys() == {kept.input_file_id, lost.input_file_id}
    again = Store(tmp_path, 1000)
    assert again.files.keys() == {kept.input_file_id}, "a server was killed before it made the batch"
    assert again.num_bytes == 3


def test_a_refused_anthropic_batch_leaves_nothing(serve, folder, monkeypatch) -> None:
    monkeypatch.setattr("server.batches.service.MAX_RUNNING", 0)
    body = {"requests": [{"custom_id": "a", "params": chat_line(0)["body"]}]}
    answer = serve(batch_dir=folder).http().post("/v1/messages/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "store_full")
    assert not list((folder / "files").iterdir())


def test_a_batch_goes_on_after_an_error_of_the_disk(serve, folder, monkeypatch) -> None:
    failures = iter(range(2))

    def append(store: Store, file_id: str, line: bytes, whole: Any = Store.append) -> None:
        if next(failures, None) is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(store, file_id, line)

    monkeypatch.setattr(Store, "append", append)
    monkeypatch.setattr("server.batches.runner.AGAIN_S", 0.05, raising=False)
    client = serve(batch_dir=folder).openai()
    batch = ended(client, begin(client, [chat_line(number) for number in range(3)]))
    assert (batch.status, len(lines_of(client, batch.output_file_id))) == ("completed", 3)


def test_a_batch_that_waits_after_an_error_can_be_cancelled(serve, folder, monkeypatch) -> None:
    def append(_store: Store, _file_id: str, _line: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "append", append)
        server = serve(batch_dir=folder)
        client = server.openai()
        batch = begin(client, [chat_line(number) for number in range(3)])
        until(lambda: len(server.worker.submits), lambda found: found and not server.worker.running)
        time.sleep(0.2)  # on a slower machine, the batch is cancelled before its error, and the test checks less
    client.batches.cancel(batch.id)
    assert ended(client, batch).status == "cancelled"


def test_a_batch_stops_although_the_disk_refuses_the_record_of_its_cancellation(serve, folder, monkeypatch) -> None:
    """The second cancellation answers that the batch is being cancelled, so it must be true."""
    refused: list[str] = []

    def save(store: Store, record: BatchRecord, whole: Any = Store.save) -> None:
        if record.status is Status.CANCELLING and not refused:
            refused.append(record.id)
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(store, record)

    monkeypatch.setattr(Store, "save", save)
    client = serve(batch_dir=folder, script=NullScript(interval_s=0.02)).openai()
    batch = begin(client, [chat_line(number) for number in range(300)])
    until(lambda: client.batches.retrieve(batch.id), lambda found: found.request_counts.completed)
    with pytest.raises(openai.InternalServerError):
        client.batches.cancel(batch.id)
    assert refused == [batch.id]
    batch = ended(client, batch)
    assert (batch.status, batch.request_counts.failed > 0) == ("cancelled", True)


def test_an_upload_that_a_full_disk_refuses_leaves_nothing(tmp_path) -> None:
    class Full:
        def write(self, _data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            self.write(b"")

    store = Store(tmp_path, 1000)
    upload = store.new_upload()
    upload._file.close()
    upload._file = Full()  # type: ignore[assignment]
    upload.add(b"x" * 900)
    with pytest.raises(OSError, match="No space"):
        upload.write()
    upload.abandon()
    assert store.num_bytes == 0
    assert not list((tmp_path / "files").iterdir())


def test_a_faulty_file_runs_no_line_if_the_disk_refuses_the_end(serve, folder, monkeypatch) -> None:
    failures = iter(range(1))

    def end(store: Store, record: BatchRecord, status: Status, whole: Any = Store.end) -> None:
        if next(failures, None) is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(store, record, status)

    monkeypatch.setattr(Store, "end", end)
    monkeypatch.setattr("server.batches.runner.AGAIN_S", 0.05)
    server = serve(batch_dir=folder)
    client = server.openai()
    batch = ended(client, begin(client, [chat_line(0), {**chat_line(1), "method": "GET"}]))
    assert batch.status == "failed"
    assert not server.worker.submits


def test_a_line_for_which_the_disk_has_too_little_room_leaves_no_part(tmp_path) -> None:
    """A part of a line at the end of an output file would be published as an answer."""
    store, file_id = Store(tmp_path, 1000), new_id("file-")
    store.append(file_id, b"x" * 599 + b"\n")
    with room_for(1000), pytest.raises(OSError, match="File too large"):  # there is room for 400 bytes of the next line
        store.append(file_id, b"y" * 599 + b"\n")
    assert list(store.lines(file_id)) == [b"x" * 599 + b"\n"]
    assert store.num_bytes == 600


def test_a_server_that_stops_during_an_error_of_the_disk_ends_its_batches(tmp_path, monkeypatch) -> None:
    """Before Python 3.13, a TaskGroup drops a cancellation that arrives while it ends because of an error."""

    class NoModels:
        def serve(self, model: str) -> None:
            raise ApiError(MODEL_NOT_FOUND, model)

    async def check() -> None:
        store, has_begun, is_ending, may_end = Store(tmp_path, 100_000), asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def answer(_runner: Runner, _run: object, line: Line, _slots: object) -> None:
            if line.custom_id == "line 0":
                await has_begun.wait()
                raise OSError(errno.ENOSPC, "No space left on device")
            has_begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                is_ending.set()
                await may_end.wait()

        monkeypatch.setattr(Runner, "_answer", answer)
        upload = store.new_upload()
        upload.add(jsonl([chat_line(0), chat_line(1)]))
        file = upload.finish(lambda file_id, size: FileRecord(file_id, "", "f", "batch", size, 0))
        runner = Runner(store, NoModels(), None, max_line_bytes=1000, keep_s=0)  # type: ignore[arg-type]
        runner.start(record_of(file.id))
        await asyncio.wait_for(is_ending.wait(), 20)
        closing = asyncio.create_task(runner.close())
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait_for(closing, 20)

    asyncio.run(check())


@pytest.mark.parametrize("num_iterations", range(12))
def test_a_failed_batch_gives_all_slots_back(num_iterations: int, tmp_path, monkeypatch) -> None:
    """Otherwise other batches for the model would wait for them for ever. The error comes at different moments of the next line: while the
    batch waits for a slot, when it has just got one, or before the line's task has begun."""

    async def check() -> None:
        slots = asyncio.Semaphore(2)

        async def call(_runner: Runner, _run: Run, line: Line) -> None:
            if line.custom_id == "line 0":
                for _ in range(num_iterations):
                    await asyncio.sleep(0)
                raise OSError(errno.ENOSPC, "No space left on device")
            await asyncio.Event().wait()

        monkeypatch.setattr(Runner, "_call", call)
        monkeypatch.setattr(Runner, "_slots_of", lambda *_: slots)
        store = Store(tmp_path, 100_000)
        upload = store.new_upload()
        upload.add(jsonl([chat_line(number) for number in range(3)]))
        file = upload.finish(lambda file_id, size: FileRecord(file_id, "", "f", "batch", size, 0))
        runner = Runner(store, None, None, max_line_bytes=1000, keep_s=0)  # type: ignore[arg-type]
        with pytest.raises(ExceptionGroup):
            await runner._answer_all(Run(record_of(file.id)), set())
        for _ in range(2):
            assert not slots.locked()
            await slots.acquire()

    asyncio.run(check())


def test_no_other_server_is_blamed_for_a_file_system_without_locks(tmp_path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("server.batches.service.fcntl.flock", refuse)
    with pytest.raises(OSError, match="No locks available"):
        _own(tmp_path)


def test_a_batch_can_be_described_while_a_thread_ends_it(tmp_path) -> None:
    runner = Runner(Store(tmp_path, 1000), None, None, max_line_bytes=1000, keep_s=0)  # type: ignore[arg-type]
    record = record_of(new_id("file-"))
    record.reach(Status.IN_PROGRESS)
    described = iter(record.times.items())
    assert next(described)[0] is Status.IN_PROGRESS
    runner._finish(record)
    assert [*described] == [] and [*record.times][1:] == [Status.FINALIZING, Status.COMPLETED]


def test_the_sweeper_goes_on_after_an_error_of_the_disk(serve, folder, monkeypatch) -> None:
    sweeps: list[Store] = []

    def sweep(store: Store, _keep_s: int) -> None:
        sweeps.append(store)
        if len(sweeps) == 1:
            raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Store, "sweep", sweep)
    monkeypatch.setattr("server.batches.service.SWEEP_S", 0.01)
    serve(batch_dir=folder)
    until(lambda: len(sweeps), lambda found: found > 1)


def test_what_the_disk_refuses_to_remove_is_removed_later(tmp_path, monkeypatch) -> None:
    store = Store(tmp_path, 1000)
    upload = store.new_upload()
    upload.add(b"{}\n")
    file = upload.finish(lambda file_id, size: FileRecord(file_id, "", "f", "batch", size, 0, expires_at=1))
    batch = record_of(file.id, status=Status.COMPLETED, times={Status.COMPLETED: 1})
    store.save(batch)

    def refuse(_path: Path, **_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        for remove in (lambda: store.delete_file(file.id), lambda: store.delete_batch(batch)):
            with pytest.raises(OSError, match="Read-only"):
                remove()
    store.sweep(0)
    assert not [*(tmp_path / "files").iterdir(), *(tmp_path / "batches").iterdir()]
    assert store.num_bytes == 0


def test_a_file_that_cannot_be_removed_keeps_no_others(tmp_path, monkeypatch) -> None:
    store = Store(tmp_path, 1000)
    files: list[FileRecord] = []
    for _ in range(2):
        upload = store.new_upload()
        upload.add(b"{}\n")
        files.append(upload.finish(lambda file_id, size: FileRecord(file_id, "", "f", "batch", size, 0, expires_at=1)))
    store.save(record_of(new_id("file-"), status=Status.COMPLETED, times={Status.COMPLETED: 1}))

    def unlink(path: Path, whole: Any = Path.unlink, **options: Any) -> None:
        if path.stem == files[0].id:
            raise OSError(errno.EPERM, "Operation not permitted")  # it is immutable
        whole(path, **options)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(OSError, match="not permitted"):
        store.sweep(0)
    assert store.files.keys() == {files[0].id} and not store.batches
