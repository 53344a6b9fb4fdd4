"""A real fleet in which a prefill replica computes long prompts, and the replicas that answer take its pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from tests.deploy.ray.cluster import Cluster, running_fleet

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (make test-fleet installs it)"),
    pytest.mark.xdist_group("fleet"),
]

LEAST = 1024  # characters


@pytest.fixture(scope="module")
def fleet(cache_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    secret = tmp_path_factory.mktemp("peers") / "secret"
    secret.write_text("a secret of the fleet")
    settings = {"peer_secret_file": str(secret), "peer_rate_bytes": "1000G", "peer_patience_s": 600}
    pool = {
        "models": ["demo"],
        "num_cpus": 0.1,
        "max_replicas": 1,
        "min_replicas": 1,
        "prefill_replicas": 1,
        "prefill_characters": LEAST,
        "settings": settings,
    }
    with running_fleet(cache_folder, {"replicas": pool}, 2) as cluster:
        yield cluster


def counts(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    return {name: float(value) for name, value in re.findall(r"^relaxserve:(\w+)_total\{[^}]*\} (\S+)$", text, re.MULTILINE)}


def test_a_prefill_replica_computes_long_prompts(fleet: Cluster) -> None:
    body = {"model": "demo", "max_tokens": 40, "temperature": 0.8, "seed": 5, "logprobs": 1, "ignore_eos": True}
    answers: list[httpx.Response] = []
    for number in range(30):  # until the ingress has heard of the prefill replica
        prompt = f"Story {number}: " + f"Once upon a time, {number} times. " * (LEAST // 16)
        answers.append(httpx.post(f"{fleet.url}/v1/completions", json={**body, "prompt": prompt}, timeout=600))
        assert answers[-1].status_code == 200, answers[-1].text
        if answers[-1].json()["usage"]["prompt_tokens_details"]["cached_tokens"]:
            break
    else:
        raise AssertionError("no prompt was computed by the prefill replica")
    found = [counts(url) for url in fleet.servers().values()]
    (taker,) = [one for one in found if one["peer_takes"]]
    (giver,) = [one for one in found if not one["peer_takes"]]
    assert taker["peer_takes_failed"] == 0
    alone = httpx.post(f"{fleet.url}/v1/completions", json={**body, "prompt": prompt, "cache_salt": "alone"}, timeout=600)
    assert alone.json()["choices"] == answers[-1].json()["choices"]
    assert giver["prefill_tokens"] > 0
