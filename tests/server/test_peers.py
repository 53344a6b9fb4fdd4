"""Two servers with real worker processes give each other pages of their prefix caches. The null model answers with other tokens if a page
has other contents than those of its prompt."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import httpx
import pytest

from server.messages import Load, Peering
from server.models.state import ModelSpec
from server.peers.named import HEADER, header_of
from server.workers.supervisor import Supervisor
from tests.doubles.process import NullConfig, null_source

KEY = "0123456789abcdef"
SECRET = "a secret of the fleet"
SOURCE = null_source(NullConfig(vocab_size=256))
ANSWER = {"max_tokens": 24, "temperature": 1.0, "seed": 7, "logprobs": 2}
UNLIMITED = Peering(SECRET, 1e18, 600.0)  # a busy machine must not make a transfer too late


def make_worker(spec: ModelSpec, progress, peering: Peering | None = UNLIMITED) -> Supervisor:
    load = Load(spec.name, SOURCE, max_batch=spec.max_batch, peers=peering)
    return Supervisor([sys.executable, "-m", "tests.doubles.process"], load, progress=progress)


@pytest.fixture
def peer(serve, tmp_path: Path):
    file = tmp_path / "secret"
    file.write_text(SECRET)
    return lambda **options: serve(**{"make_worker": make_worker, "ingress_key": KEY, "peer_secret_file": file, **options})


def prompt(num_tokens: int, first: int = 0) -> list[int]:
    return [(first + i * i) % 256 for i in range(num_tokens)]


def ask(server, ids: list[int], giver=None, **options) -> httpx.Response:
    headers = {} if giver is None else {HEADER: header_of(KEY, giver.url, computes=options.pop("computes", False))}
    return server.http().post("/v1/completions", json={"prompt": ids, **ANSWER, **options}, headers=headers)


def choices(answer: httpx.Response) -> object:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def cached(answer: httpx.Response) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def counted(server, name: str, wanted: float) -> bool:
    """Wait until a counter has a value: workers report at intervals."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        found = re.search(rf"^relaxserve:{name}_total{{[^}}]*}} (\S+)$", server.http().get("/metrics").text, re.MULTILINE)
        if found is not None and float(found[1]) == wanted:
            return True
        time.sleep(0.05)
    return False


def test_a_prompt_that_one_server_computed_is_continued_by_another(peer):
    giver, taker = peer(), peer()
    ids = prompt(500)
    first = ask(giver, ids)
    second = ask(taker, ids, giver)
    assert choices(second) == choices(first)
    assert (cached(first), cached(second)) == (0, 496)
    assert counted(taker, "peer_pages_taken", 31) and counted(giver, "peer_pages_given", 31)
    assert counted(taker, "peer_takes_failed", 0)
    again = ask(taker, [*ids, *prompt(100, 3)], giver)
    assert choices(again) == choices(ask(giver, [*ids, *prompt(100, 3)])) and cached(again) == 496
