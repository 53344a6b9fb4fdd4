"""The images of requests are seen as finely as their clients ask, and decoded only as long as the clients are there."""

from __future__ import annotations

import json
import socket
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from openai.types.chat.chat_completion_content_part_image_param import ImageURL

from runtime.fits import Stretched, Tiles
from server.messages import Vision
from tests.doubles.worker import ByteTokenizer
from tests.server.images.files import data_url, encoded, image

SEEING = Vision(16, edge_tokens=1, image_token=258, fit=Tiles(longest_edge=32), filter=1)
EMBEDDING = Vision(8, edge_tokens=1, image_token=-1, fit=Stretched(), filter=2, num_places=17)
PATIENCE_S = 30.0  # much less than the fetch of an image may take in this test


def chat(url: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def message(url: str) -> dict[str, Any]:
    return {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}]}


def response(url: str) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions/render", chat),
        ("/v1/messages", message),
        ("/v1/messages/count_tokens", message),
        ("/v1/responses", response),
        ("/v1/responses/input_tokens", response),
        ("/tokenize", chat),
        ("/v1/embeddings", chat),
    ],
)
def test_a_fetch_ends_when_the_client_leaves(serve, answering, path: str, body: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as host:
        host.settimeout(PATIENCE_S)
        address = f"127.0.0.1:{host.getsockname()[1]}"
        fields = {"embedding_size": 8, "generates": False, "vision": EMBEDDING} if path == "/v1/embeddings" else {"vision": SEEING}
        server = serve(
            script=answering("", **fields),
            tokenizer=ByteTokenizer(specials=["[IMAGE]"]),
            image_hosts=(f"private+{address}",),
            image_fetch_s=600.0,
        )
        client = server.connect()
        data = json.dumps(body(f"http://{address}/image.png")).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)
        fetching, _ = host.accept()
        with fetching:
            fetching.settimeout(PATIENCE_S)
            assert fetching.recv(1 << 16).startswith(b"GET /image.png")
            client.close()
            assert not fetching.recv(1), "the server has closed the connection to the host"


def test_every_detail_of_an_image_that_the_client_knows_is_taken(serve, answering) -> None:
    server = serve(script=answering("A square.", vision=msgspec.structs.replace(SEEING, image_token=256)))
    known = get_args(get_type_hints(ImageURL)["detail"])
    assert "original" in known
    for detail in known:
        asked = chat(data_url(encoded(image())))
        asked["messages"][0]["content"][0]["image_url"]["detail"] = detail
        answer = server.http().post("/v1/chat/completions", json=asked)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "body", "truncates"),
    [("/v1/chat/completions", chat, {"truncate_prompt_tokens": -1}), ("/v1/responses", response, {"truncation": "auto"})],
)
def test_a_conversation_with_an_image_that_fits_needs_no_truncation(serve, answering, path: str, body: Any, truncates: Any) -> None:
    """Agents ask for truncation in every request."""
    server = serve(script=answering("A square.", vision=msgspec.structs.replace(SEEING, image_token=256)))
    given = body(data_url(encoded(image(20, 20))))
    for asked in (given, {**given, **truncates}):
        assert server.http().post(path, json=asked).status_code == 200
    whole, same = server.worker.submits
    assert same.prompt_ids == whole.prompt_ids and same.excerpts == whole.excerpts
    (turn,) = given["messages" if "messages" in given else "input"]
    turn["content"].append({"type": "text" if "messages" in given else "input_text", "text": "x" * 5000})
    assert server.http().post(path, json={**given, **truncates}).json()["error"]["code"] == "context_length_exceeded"
