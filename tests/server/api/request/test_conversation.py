"""Parts that an endpoint does not understand are refused, and the error says what to do instead."""

from __future__ import annotations

from typing import Any

import pytest

from tests.doubles.worker import NullScript

pytestmark = pytest.mark.parametrize("shared_server", [{"script": NullScript(embedding_size=8)}], indirect=True, ids=[""], scope="module")
PATHS = ("/apply-template", "/v1/embeddings", "/pooling")


def refusal(server: Any, path: str, part: dict[str, Any]) -> str:
    answer = server.http().post(path, json={"messages": [{"role": "user", "content": [part]}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_content", "messages[0].content[0].type"), answer.text
    return error["message"]


@pytest.mark.parametrize("path", PATHS)
def test_the_right_type_is_refused_where_only_texts_are_understood(server, path: str) -> None:
    seen = refusal(server, path, {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}})
    assert seen.endswith("has type 'image_url'; no images are understood here; send only texts, or ask a vision model in chat")
    for kind in ("input_audio", "audio_url"):
        heard = refusal(server, path, {"type": kind, kind: {"data": "aGk=", "url": "data:"}})
        assert heard.endswith("no audio is understood here; send only texts, or ask a model that hears in chat")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("kind", "right"), [("input_image", "image_url"), ("image", "image_url"), ("audio", "input_audio")])
def test_a_wrong_type_is_named_with_the_right_one(server, path: str, kind: str, right: str) -> None:
    assert f"of type {right}" in refusal(server, path, {"type": kind})
