"""OpenAI's files and batches, measured by its OpenAPI document, at each stage of a batch."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from server.batches.records import ENDED
from server.models.state import ModelSpec
from tests.doubles.worker import NullScript
from tests.server.api.vendors.openai_rows import BATCHES
from tests.server.api.vendors.test_openai import DOCUMENT, NUM_REQUESTS, WHOLE, of, properties, require_valid, validator

ENDPOINT = "/v1/chat/completions"
LINE = {"custom_id": "a", "method": "POST", "url": ENDPOINT, "body": {"model": "null", "messages": [{"role": "user", "content": "hi"}]}}


def asked(client: Any, method: str, path: str, stated: str, **request: Any) -> Any:
    """Send a request, and require that its answer is as the document states. `stated` is the path there."""
    response = client.request(method, f"/v1{path}", **request)
    assert response.status_code == 200, response.text
    require_valid(validator(f"{method} {stated}", WHOLE), response.json(), (method, path))
    return response.json()


def uploaded(client: Any, *lines: object, **fields: Any) -> Any:
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return asked(client, "POST", "/files", "/files", files={"file": ("a.jsonl", data)}, data={"purpose": "batch", **fields})


def begun(client: Any, file: Any, **fields: Any) -> Any:
    body = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h", **fields}
    require_valid(validator("POST /batches", "request"), body, body)
    return asked(client, "POST", "/batches", "/batches", json=body)


def ended(client: Any, batch: Any) -> Any:
    end_s = time.monotonic() + 60
    while (found := asked(client, "GET", f"/batches/{batch['id']}", "/batches/{batch_id}"))["status"] not in ENDED:
        assert time.monotonic() < end_s, found
        time.sleep(0.02)
    return found


def test_every_field_of_the_document_has_a_row() -> None:
    assert set(BATCHES) == set(properties(DOCUMENT["endpoints"]["POST /batches"]["request"]))


@pytest.mark.parametrize("line", [LINE, {**LINE, "url": "/v1/embeddings"}, {**LINE, "body": {"model": "nobody"}}])
def test_files_and_batches_are_as_the_document_states_them(serve: Any, tmp_path: Path, line: Any) -> None:
    client = serve(batch_dir=tmp_path / "batches").http()
    file = uploaded(client, line)
    batch = begun(client, file, metadata={"for": "a test"})
    assert batch["metadata"] == {"for": "a test"} and batch["input_file_id"] == file["id"]
    found = ended(client, batch)
    assert found["status"] == ("failed" if line["url"] != ENDPOINT else "completed") and ("errors" in found) == (
        found["status"] == "failed"
    )
    assert asked(client, "GET", "/batches", "/batches")["data"] == [found]
    names = {file["id"], *(found[name] for name in ("output_file_id", "error_file_id") if name in found)}
    assert {one["id"] for one in asked(client, "GET", "/files", "/files")["data"]} == names
    for name in names:
        asked(client, "GET", f"/files/{name}", "/files/{file_id}")
        asked(client, "DELETE", f"/files/{name}", "/files/{file_id}")


def test_a_cancelled_batch_is_as_the_document_states_it(serve: Any, tmp_path: Path) -> None:
    client = serve(batch_dir=tmp_path / "batches", script=NullScript(interval_s=0.02)).http()
    batch = begun(client, uploaded(client, *({**LINE, "custom_id": str(number)} for number in range(500))))
    assert asked(client, "POST", f"/batches/{batch['id']}/cancel", "/batches/{batch_id}/cancel")["status"] in ("cancelling", "cancelled")
    assert ended(client, batch)["status"] == "cancelled"


def test_fields_are_handled_as_their_rows_say(serve: Any, tmp_path: Path) -> None:
    client = serve(batch_dir=tmp_path / "batches").http()
    file = uploaded(client, LINE)
    for name, row in BATCHES.items():
        for value in row.refused:
            body = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h", name: value}
            require_valid(validator("POST /batches", "request"), body, body)
            response = client.post("/v1/batches", json=body)
            assert response.status_code == 400 and response.json()["error"]["param"] == name, response.text
            require_valid(of({"$ref": "#/$defs/ErrorResponse"}), response.json(), body)
        for value in row.accepted:
            begun(client, file, **{name: value})
    kept = client.post(
        "/v1/batches",
        json={
            "input_file_id": file["id"],
            "endpoint": ENDPOINT,
            "completion_window": "24h",
            "output_expires_after": {"anchor": "created_at", "seconds": 3600},
        },
    )
    assert kept.headers["x-ignored-params"] == "output_expires_after"


def test_generated_requests_get_answers_as_the_document_states_them(serve: Any, tmp_path: Path) -> None:
    """Send NUM_REQUESTS valid requests to each endpoint: at first there is nothing to list, at last there are many files and batches."""
    rng = random.Random("files and batches")
    client = serve(batch_dir=tmp_path / "batches", initial=(ModelSpec("null", "null", aliases=("org/other",)),)).http()
    files: list[Any] = []
    batches: list[Any] = []
    for _ in range(NUM_REQUESTS):
        asked(client, "GET", "/files", "/files", params=page(files, 10_000, rng, order=["asc", "desc"]))
        asked(client, "GET", "/files", "/files", params=page([], 10_000, rng, purpose=["batch", "user_data"]))
        asked(client, "GET", "/batches", "/batches", params=page(batches, 100, rng))
        asked(client, "GET", "/models", "/models")
        asked(client, "GET", f"/models/{rng.choice(['null', 'org/other'])}", "/models/{model}")
        files.append(
            uploaded(client, *[LINE] * rng.randint(1, 3), **chosen(rng, purpose=["batch", "user_data"]), **rng.choice([EXPIRY, {}]))
        )
        asked(client, "GET", f"/files/{rng.choice(files)['id']}", "/files/{file_id}")
        fields = {name: row.accepted for name, row in BATCHES.items() if name != "input_file_id"}
        batches.append(begun(client, uploaded(client, LINE), **chosen(rng, **fields)))
        asked(client, "GET", f"/batches/{rng.choice(batches)['id']}", "/batches/{batch_id}")
        stopped = client.post(f"/v1/batches/{batches[-1]['id']}/cancel")
        stated = (
            of({"$ref": "#/$defs/ErrorResponse"}) if stopped.status_code == 409 else validator("POST /batches/{batch_id}/cancel", WHOLE)
        )
        require_valid(stated, stopped.json(), batches[-1])
        found = ended(client, batches[-1])
        gone = [found[name] for name in ("input_file_id", "output_file_id", "error_file_id") if name in found]
        for file_id in gone + ([files.pop(0)["id"]] if len(files) > MOST_FILES else []):
            asked(client, "DELETE", f"/files/{file_id}", "/files/{file_id}")


MOST_FILES = 20  # more would make the lists long, and the test slow
EXPIRY = {"expires_after[anchor]": "created_at", "expires_after[seconds]": 3600}


def page(listed: list[Any], most: int, rng: random.Random, **choices: list[str]) -> dict[str, Any]:
    """Return the parameters of a list."""
    after = {"after": [rng.choice(listed)["id"]]} if listed else {}
    return chosen(rng, limit=[1, 7, most], **after, **choices)


def chosen(rng: random.Random, **choices: Any) -> dict[str, Any]:
    """Return some of the fields, each with one of its values."""
    return {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.6}
