from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.conftest import DemoServer


@pytest.fixture(scope="module")
def client(server: DemoServer) -> Iterator[openai.OpenAI]:
    transport = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60, http_client=transport) as client:
        yield client
