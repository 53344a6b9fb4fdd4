"""Sessions of coding agents are accepted as they come, and from the second turn on almost the whole prompt is in the prefix cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deploy import demo
from server.messages import Load
from server.models.state import ModelSpec
from server.workers.supervisor import Supervisor
from tests.conftest import BIN, ROOT, greeting
from tests.doubles.process import NullConfig, null_source
from tests.doubles.worker import ByteTokenizer
from tests.server.agent_sessions import AGENTS, Request, Session, usage_of

LONG = 30_000  # tokens of a first prompt
CONTEXT = 131_072
SOURCE = null_source(NullConfig(script=tuple(b"Done. "), max_context=CONTEXT, num_pages=4 * CONTEXT // 16))


def make_worker(spec: ModelSpec, progress) -> Supervisor:
    return Supervisor([sys.executable, "-m", "tests.doubles.process"], Load(spec.name, SOURCE, max_batch=spec.max_batch), progress=progress)


def answer_to(client: httpx.Client, request: Request, max_tokens: int = 6) -> tuple[int, int, str]:
    """Return the number of prompt tokens, how many of them were cached, and the header that says where the prefix ended."""
    limit = {"max_tokens": max_tokens} if "messages" in request.body else {"max_output_tokens": max_tokens}
    answer = client.post(request.path, json={**request.body, **limit}, headers=request.headers)
    assert answer.status_code == 200, answer.text
    return *usage_of(answer.text), answer.headers.get("x-prefix-ends", "")


def check(client: httpx.Client, sessions: list[Session]) -> None:
    """Run one turn of each session, then the next turn of each, as if several users took turns. Require that from the second turn on at
    least 95 % of each prompt is cached."""
    for turn, requests in enumerate(zip(*sessions, strict=True)):
        for request in requests:
            num_prompt, num_cached, ends = answer_to(client, request)
            assert not turn or (num_cached >= 0.95 * num_prompt and not ends), (turn, num_prompt, num_cached, ends)


@pytest.mark.parametrize("num_tokens", [3000, pytest.param(LONG, marks=pytest.mark.slow)])
def test_from_the_second_turn_on_prompts_are_cached(serve, num_tokens: int) -> None:
    """20 sessions, of which 4 run at a time. The model computes nothing; the server, the scheduler and the page pool are real."""
    client = serve(make_worker=make_worker, tokenizer=ByteTokenizer()).http()
    made = [make(seed, num_tokens, 3, "null") for seed in range(10) for make in AGENTS.values()]
    for first in range(0, len(made), 4):
        check(client, made[first : first + 4])


def test_a_missed_prefix_names_the_part_that_differs(serve) -> None:
    server = serve(make_worker=make_worker, tokenizer=ByteTokenizer(), keep_agent_hashes=True)
    client = server.http()
    first, second, third = AGENTS["claude-code"](1, 6000, 3, "null")
    assert answer_to(client, first)[2] == ""
    num_prompt, num_cached, ends = answer_to(client, second)
    billing = first.body["system"][0]["text"]
    assert num_cached < 0.7 * num_prompt, "only the tools, which this template writes first, and the begin of the line"
    assert ends.startswith("system[0], character ") and 0 <= int(ends.rpartition(" ")[2]) - billing.index("cch=") - 4 < 6
    third.body["tools"][4]["description"] = "another"
    assert answer_to(client, third)[2] == "tools[4]"


@pytest.fixture(scope="module")
def long_demo(tmp_path_factory: pytest.TempPathFactory, cache_folder: Path) -> Iterator[httpx.Client]:
    """Serve the demo model with a longer context in its configuration and no options."""
    folder = tmp_path_factory.mktemp("models") / "long"
    shutil.copytree(demo.MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    command = [BIN / "relaxserve", "serve", str(folder), "--port", "0"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("RELAXSERVE_")}
    with subprocess.Popen(
        command, cwd=ROOT, env={**own, "RELAXSERVE_CACHE": str(cache_folder)}, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            url, _ = greeting(server)
            with httpx.Client(base_url=url, timeout=600, verify=False) as client:
                yield client
        finally:
            server.terminate()
            server.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
def test_a_long_session_with_a_compiled_model(long_demo: httpx.Client, agent: str) -> None:
    assert long_demo.get("/v1/models").json()["data"][0]["max_model_len"] == CONTEXT
    check(long_demo, [AGENTS[agent](1, 3 * LONG, 3, "long")])
