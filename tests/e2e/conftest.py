from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.conftest import DemoServer

if TYPE_CHECKING:
    import openai


@pytest.fixture(scope="module")
def client(server: DemoServer) -> Iterator[openai.OpenAI]:
    import openai  # a day with a card runs tests of this folder on a machine without the package

    transport = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60, http_client=transport) as client:
        yield client
