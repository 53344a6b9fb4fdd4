"""APIs beside OpenAI's on the served demo model, in plain HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.xdist_group("demo server")


@pytest.fixture(scope="module")
def client(demo_server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo_server.url, timeout=120, verify=False) as client:
        yield client


def test_the_vector_of_each_token_is_that_of_the_text_up_to_it(client):
    """Bit for bit, though the tokens of a long text take several steps and those of a text share one."""
    ids = client.post("/tokenize", json={"prompt": "The fox went home. " * 30}).json()["tokens"]
    rows = client.post("/pooling", json={"input": ids, "task": "token_embed"}).json()["data"][0]["data"]
    assert len(rows) == len(ids) > 64
    for end in (1, 2, 40, 65, len(ids)):
        whole = client.post("/v1/embeddings", json={"input": ids[:end]}).json()["data"][0]["embedding"]
        assert rows[end - 1] == whole
