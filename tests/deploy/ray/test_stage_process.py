"""The process of a machine's stages starts whatever it writes first, and says why it does not start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the extra ray)")

from deploy.ray import stage_process
from deploy.ray.stage_process import StageProcess
from deploy.replicas.process import ServerProcess, StagePlaces
from tests.deploy.ray.streams import comparable, streams, undisturbed
from tests.process_states import is_running

SECRET = "a secret of some length"
LISTENS = "relaxserve stage at 127.0.0.1 port 7\n"


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch):
    """Return a function that replaces the program of the process. In the new program, `err` is standard error."""

    def let(program: str) -> None:
        words = (sys.executable, "-c", f"import os, sys, time\nerr = sys.stderr.buffer\n{program}")
        monkeypatch.setattr(stage_process, "command", lambda _module: words)

    return let


def end(stage: StageProcess) -> None:
    os.kill(stage.pid, signal.SIGKILL)
    stage.wait()


def test_a_server_finds_the_stages_of_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAXSERVE_STAGE_SECRET_FILE", "/nowhere")  # of the cluster, whose stages have another secret
    stage = StageProcess(SECRET, "127.0.0.1", 0, 1)
    server = ServerProcess(["demo"], {}, address="127.0.0.1", num_threads=1, stages=StagePlaces((stage.place,), SECRET))
    try:
        server.wait_until_ready()
        found = [comparable(one) for one in asyncio.run(streams(server.url, 2))]
        stages = json.loads(server.ask("/admin/models/demo"))["stages"]
        assert [one["place"] for one in stages] == [stage.place, "local"]
        assert SECRET not in repr(StagePlaces((stage.place,), SECRET))
    finally:
        server.stop()
        end(stage)
    monkeypatch.delenv("RELAXSERVE_STAGE_SECRET_FILE")
    assert found == undisturbed(2)


def test_it_listens_again_at_the_same_place_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stage = StageProcess(SECRET, "127.0.0.1", 0, 1)
    end(stage)
    again = StageProcess(SECRET, "127.0.0.1", int(stage.place.rpartition(":")[2]), 1)
    end(again)
    assert again.place == stage.place
    assert [*tmp_path.iterdir()] == []


def test_one_that_cannot_listen_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1 port"):
        StageProcess(SECRET, "127.0.0.1", taken.getsockname()[1], 1)


def test_it_gets_the_secret_and_may_warn_before_it_listens(say, capsys: pytest.CaptureFixture[str]) -> None:
    say(f"""
secret = open(sys.argv[sys.argv.index("--secret-file") + 1], "rb").read()
err.write(b"a warning\\nthe secret is " + secret + {f"{chr(10)}{LISTENS}".encode()!r})
err.flush()
time.sleep(600)
""")
    stage = StageProcess(SECRET, "127.0.0.1", 0, 1)
    end(stage)
    assert stage.place == "127.0.0.1:7"
    assert capsys.readouterr().err == f"a warning\nthe secret is {SECRET}\n"


def test_bytes_that_are_no_text_do_not_end_its_log(say, capsys: pytest.CaptureFixture[str]) -> None:
    say(f"err.write({LISTENS!r}.encode() + b'caf\\xe9\\nthe end\\n')")
    stage = StageProcess(SECRET, "127.0.0.1", 0, 1)
    stage.wait()
    stage._log.wait(60)
    assert capsys.readouterr().err == "caf\ufffd\nthe end\n"


def test_one_that_ends_before_it_listens_is_an_error_with_all_its_lines(say) -> None:
    say("err.write(b'first\\nsecond\\n')")
    with pytest.raises(OSError, match="did not start: first\nsecond\n"):
        StageProcess(SECRET, "127.0.0.1", 0, 1)


def test_one_that_runs_when_its_start_fails_is_killed(say, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    def fails(stage: StageProcess) -> str:
        pids.append(stage.pid)
        raise KeyboardInterrupt

    say("time.sleep(600)")
    monkeypatch.setattr(StageProcess, "_wait_for_port", fails)
    with pytest.raises(KeyboardInterrupt):
        StageProcess(SECRET, "127.0.0.1", 0, 1)
    assert not is_running(pids[0])
