"""API keys and tokens are removed from the environment but still reach the code that needs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.model_loading.locate import locate
from deploy.model_loading.tokenizer import load_tokenizer
from deploy.secrets import hub_token, take_secrets
from deploy.serve import load_of
from server.interfaces import LoadError
from server.models.state import ModelSpec
from tests.conftest import descendants_of

PROGRAM = """
import os, pathlib, subprocess, sys
from deploy.secrets import take_secrets
taken = take_secrets(os.environ)
shown = pathlib.Path("/proc/self/environ").read_bytes() + subprocess.run(["env"], capture_output=True).stdout
print(sorted(taken.items()), "of value" in str(dict(os.environ)), b"secret " in shown, b"of value" in shown)
"""


def test_secrets_leave_the_environment_and_what_the_kernel_shows_of_it() -> None:
    """Variables whose names end in a word such as KEYS, TOKEN, PASSWORD or SECRET are removed from the environment, and from what /proc
    shows of it. A variable with such a word elsewhere in its name is kept."""
    kept = {"HF_TOKEN_PATH": "of value", "KEYBOARD": "of value"}
    secrets = {"RELAXSERVE_API_KEYS": "secret 1", "HF_TOKEN": "secret 2", "DB_PASSWORD": "secret 3", "my_secret": "secret 4"}
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env={**kept, **secrets}, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == f"{sorted(secrets.items())} True False True"


def test_the_hub_s_token_is_found_under_either_name() -> None:
    assert hub_token({"HUGGING_FACE_HUB_TOKEN": "old", "HF_TOKEN": "new"}) == "new"
    assert hub_token({"HUGGING_FACE_HUB_TOKEN": "old", "HF_TOKEN": ""}) == "old"
    assert hub_token(take_secrets({})) is None


def test_a_download_has_the_token_that_the_environment_has_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads use the hub's token although it was removed from the environment. The front keeps the token to download the tokenizer, and
    sends it to the worker in the load message."""
    hub = pytest.importorskip("deploy.model_loading.hub")
    seen: list[str | None] = []

    def refused(*_: Any, token: str | None, **__: Any) -> None:
        seen.append(token)
        raise OSError("no network in tests")

    monkeypatch.setattr(hub, "snapshot_download", refused)
    load = load_of(ModelSpec("m", "org/m"), "secret")
    with pytest.raises(LoadError, match="no network"):
        locate(load.source, hub_token=load.hub_token)
    with pytest.raises(LoadError, match="no network"):
        load_tokenizer("org/m", "secret")
    assert set(seen) == {"secret"}


@pytest.mark.xdist_group("demo server")
def test_no_process_of_a_server_shows_a_secret(demo_server: Any) -> None:
    """The front is started with an API key and a hub token in its environment. Nevertheless /proc shows a secret for no process of the
    server."""
    pids = [demo_server.pid, *descendants_of(demo_server.pid)]
    assert len(pids) >= 2, "front and worker"
    for pid in pids:
        assert b"secret-of" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert b"secret-of" not in Path(f"/proc/{pid}/cmdline").read_bytes()
