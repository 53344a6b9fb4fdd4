"""Anthropic's batches, measured by the typed models of its client, which are validated strictly here."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types.messages import DeletedMessageBatch, MessageBatch, MessageBatchIndividualResponse
from anthropic.types.messages.batch_create_params import BatchCreateParams, Request
from pydantic import TypeAdapter

from tests.doubles.worker import NullScript

PATH = "/v1/messages/batches"
HI = {"model": "null", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
BATCH, RESULT, DELETED = TypeAdapter(MessageBatch), TypeAdapter(MessageBatchIndividualResponse), TypeAdapter(DeletedMessageBatch)
NO_EFFECT = {"user_profile_id": "u", "workspace_id": "w"}  # sent by habit


def read(http: Any, method: str, path: str, **options: Any) -> MessageBatch:
    answer = http.request(method, path, **options)
    assert answer.status_code == 200, answer.text
    return BATCH.validate_json(answer.content, strict=True)


def ended(http: Any, batch_id: str) -> MessageBatch:
    end_s = time.monotonic() + 60
    while (found := read(http, "GET", f"{PATH}/{batch_id}")).processing_status != "ended":
        assert time.monotonic() < end_s, found
        time.sleep(0.02)
    return found


def results_of(http: Any, batch_id: str) -> dict[str, MessageBatchIndividualResponse]:
    lines = http.get(f"{PATH}/{batch_id}/results").text.splitlines()
    found = [RESULT.validate_json(line, strict=True) for line in lines]
    return {one.custom_id: one for one in found}


def test_every_field_of_the_client_is_known(serve: Any, tmp_path: Path) -> None:
    assert set(BatchCreateParams.__annotations__) == {"requests", *NO_EFFECT}
    assert set(Request.__annotations__) == {"custom_id", "params"}
    http = serve(batch_dir=tmp_path / "batches").http()
    answer = http.post(PATH, json={"requests": [{"custom_id": "a", "params": HI}], **NO_EFFECT})
    assert answer.status_code == 200 and "x-ignored-params" not in answer.headers


def test_a_batch_and_its_results_have_the_client_s_types(serve: Any, tmp_path: Path) -> None:
    http = serve(batch_dir=tmp_path / "batches").http()
    params = {"good": HI, "bad value": {**HI, "temperature": 5000}, "no model": {**HI, "model": "nosuch"}}
    asked = [{"custom_id": name, "params": each} for name, each in params.items()]
    made = read(http, "POST", PATH, json={"requests": asked})
    done = ended(http, made.id)
    assert (
        done.results_url
        and done.ended_at
        and done.request_counts.model_dump(exclude={"processing"})
        == {
            "succeeded": 1,
            "errored": 2,
            "canceled": 0,
            "expired": 0,
        }
    )
    results = results_of(http, made.id)
    assert {name: one.result.type for name, one in results.items()} == {"good": "succeeded", "bad value": "errored", "no model": "errored"}
    kinds = {name: one.result.error.error.type for name, one in results.items() if one.result.type == "errored"}
    assert kinds == {"bad value": "invalid_request_error", "no model": "not_found_error"}
    listed = http.get(PATH).json()
    assert set(listed) == {"data", "has_more", "first_id", "last_id"}
    for entry in listed["data"]:
        BATCH.validate_json(json.dumps(entry), strict=True)
    DELETED.validate_json(http.request("DELETE", f"{PATH}/{made.id}").content, strict=True)


def test_what_was_cancelled_has_the_client_s_types(serve: Any, tmp_path: Path) -> None:
    http = serve(batch_dir=tmp_path / "batches", script=NullScript(interval_s=5.0)).http()
    made = read(http, "POST", PATH, json={"requests": [{"custom_id": str(n), "params": HI} for n in range(3)]})
    cancelled = read(http, "POST", f"{PATH}/{made.id}/cancel")
    assert cancelled.cancel_initiated_at
    assert ended(http, made.id).request_counts.canceled == 3
    assert {one.result.type for one in results_of(http, made.id).values()} == {"canceled"}


@pytest.mark.parametrize("body", [{"requests": []}, {}, {"requests": [{"custom_id": "a"}]}])
def test_what_is_wrong_has_the_vendor_s_error(serve: Any, tmp_path: Path, body: dict[str, Any]) -> None:
    answer = serve(batch_dir=tmp_path / "batches").http().post(PATH, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_lists_are_read_in_both_directions(serve: Any, tmp_path: Path) -> None:
    server = serve(batch_dir=tmp_path / "batches", script=NullScript(interval_s=5.0))
    client = anthropic.Anthropic(base_url=server.url, api_key="unused", http_client=anthropic.DefaultHttpxClient(verify=False))
    asked = [{"custom_id": "a", "params": HI}]
    made = {read(server.http(), "POST", PATH, json={"requests": asked}).id for _ in range(5)}
    ids = [batch.id for batch in client.messages.batches.list(limit=2)]
    assert set(ids) == made and len(ids) == 5
    assert [batch.id for batch in client.messages.batches.list(limit=2, after_id=ids[0])] == ids[1:]
    backwards = list(client.messages.batches.list(limit=2, before_id=ids[4]))
    assert [batch.id for batch in backwards] == [ids[2], ids[3], ids[0], ids[1]], "each page is in order"
    for name in ("after_id", "before_id"):
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.batches.list(**{name: "nonsense"})
        assert caught.value.body["error"]["param"] == name
    client.close()


@pytest.mark.parametrize(("params", "param"), [({**HI, "stream": True}, "requests[1].params.stream"), ({**HI, "model": 5}, "requests[1]")])
def test_a_request_that_cannot_run_is_refused_by_name(serve: Any, tmp_path: Path, params: dict[str, Any], param: str) -> None:
    """The answer about a batch has no place for what is wrong with a request that did not begin."""
    folder = tmp_path / "batches"
    http = serve(batch_dir=folder).http()
    answer = http.post(PATH, json={"requests": [{"custom_id": "a", "params": HI}, {"custom_id": "b", "params": params}]})
    assert (answer.status_code, answer.json().get("error", {}).get("param")) == (400, param), answer.text
    assert not list((folder / "files").iterdir())


def test_a_request_that_is_too_long_as_a_line_is_refused_by_name(serve: Any, tmp_path: Path) -> None:
    body = json.dumps({"requests": [{"custom_id": "a", "params": HI}]}, separators=(",", ":"))
    http = serve(batch_dir=tmp_path / "batches", max_body_bytes=len(body)).http()
    answer = http.post(PATH, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "requests[0]: the line is longer than" in answer.json()["error"]["message"]
