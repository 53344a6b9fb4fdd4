"""The server process of a replica."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("zmq", reason="needs pyzmq (the extra ray)")

from deploy.replicas.passed_log import PassedLog
from deploy.replicas.process import FOLDER, ServerEnded, ServerProcess, StagePlaces, _in_stages
from deploy.settings import ModelSpec, gather
from runtime.own_folder import OwnFolder
from server.settings import SettingsError
from tests.conftest import ROOT
from tests.process_states import is_running

OWNER = """
import time
from deploy.replicas.process import ServerProcess
server = ServerProcess(["demo"], {}, address="127.0.0.1")
print(server.pid, flush=True)
time.sleep(600)
"""


def test_a_server_starts_answers_and_stops() -> None:
    server = ServerProcess(["demo=d"], {"max_body_bytes": 5000}, address="10.0.0.1")  # without keys, other machines do not reach it
    server.wait_until_ready()
    assert server.url.startswith("http://127.0.0.1:")
    assert b'"d"' in server.ask("/v1/models")
    assert server.num_requests() == 0
    assert server.pages_share() == 0.0
    server.stop()
    assert server.has_ended


@pytest.mark.parametrize(("given", "found"), [(None, "3"), ("1", "1")])
def test_models_compute_with_the_threads_of_the_replica(given: str | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """RELAXSERVE_THREADS in the environment of the cluster takes precedence."""
    if given is None:
        monkeypatch.delenv("RELAXSERVE_THREADS", raising=False)
    else:
        monkeypatch.setenv("RELAXSERVE_THREADS", given)
    server = ServerProcess(["demo"], {}, address="127.0.0.1", num_threads=3)
    try:
        server.wait_until_ready()
        assert f"RELAXSERVE_THREADS={found}".encode() in Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
    finally:
        server.stop()


def test_a_server_ends_with_its_owner() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert is_running(pid)
        owner.kill()
    end_s = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not is_running(pid)


def test_an_owner_that_has_ended_starts_nothing() -> None:
    bound = ROOT / "deploy" / "bound.py"
    found = subprocess.run([sys.executable, bound, "1", sys.executable, "-c", "print('started')"], capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stdout == ""
    assert "has ended" in found.stderr


def test_wrong_settings_are_refused_before_a_process_starts() -> None:
    with pytest.raises(SettingsError, match="unknown_setting"):
        ServerProcess(["demo"], {"unknown_setting": 1}, address="127.0.0.1")


def test_a_model_in_stages_keeps_its_names(tmp_path: Path) -> None:
    """A model has the same name and aliases in stages as without. One alias of a file is its name with the ending."""
    (file := tmp_path / "tiny-Q4_K_M.gguf").touch()
    (secret := tmp_path / "secret").write_text("a secret of some length")
    config = tmp_path / "relaxserve.yaml"

    def parsed(entry: str | dict[str, Any]) -> ModelSpec:
        config.write_text(yaml.safe_dump({"models": [entry], "stage_secret_file": str(secret)}))
        return gather({}, {}, config=config)[1][0]

    for entry in (str(file), f"{file}=other", {"source": str(file), "aliases": ["a"]}):
        whole, divided = parsed(entry), parsed(_in_stages(entry, StagePlaces(("10.0.0.2:7070",), secret.read_text())))
        assert (divided.name, divided.aliases) == (whole.name, whole.aliases)
        assert [*divided.stages] == ["10.0.0.2:7070", "local"]
    assert "tiny-Q4_K_M.gguf" in parsed(_in_stages(str(file), StagePlaces(("10.0.0.2:7070",), ""))).aliases


def test_a_server_that_ends_early_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = ServerProcess([f"{tmp_path}=empty"], {}, address="127.0.0.1")
    with pytest.raises(ServerEnded, match=r"(?s)exit status 1\): .*config\.json"):  # `serve status` shows the message
        server.wait_until_ready()
    assert not server._folder.path.exists()
    assert "config.json" in capfd.readouterr().err, "the log of the engine has it, too"


def test_a_server_has_stopped_when_its_last_lines_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    awaited = threading.Event()
    pass_on = PassedLog._pass_on

    def late(log: PassedLog) -> None:
        awaited.wait()
        pass_on(log)

    def wait(log: PassedLog) -> None:
        awaited.set()
        log._thread.join()

    monkeypatch.setattr(PassedLog, "_pass_on", late)
    monkeypatch.setattr(PassedLog, "wait", wait)
    server = ServerProcess([f"{tmp_path}=empty"], {}, address="127.0.0.1")
    server._process.wait()
    server.stop()
    found = capfd.readouterr().err
    awaited.set()
    assert "config.json" in found


def test_folders_of_owners_that_were_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In containers that share the folder, another owner may have the same process id."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (left := tmp_path / f"{FOLDER}{os.getpid()}-x").mkdir()
    os.utime(left, (0, 0))
    with OwnFolder(tmp_path, FOLDER) as kept:
        with pytest.raises(SettingsError):
            ServerProcess(["demo"], {"unknown_setting": 1}, address="127.0.0.1")
        assert [*tmp_path.iterdir()] == [kept.path]


@pytest.mark.parametrize(
    ("broken", "model"), [("deploy.replicas.process._free_port", "demo"), ("subprocess.Popen", "demo"), ("", "no/such/model:")]
)
def test_a_server_that_cannot_start_leaves_no_secret(broken: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if broken:
        monkeypatch.setattr(broken, fail)
    with pytest.raises((OSError, SettingsError)):
        ServerProcess([model], {}, address="127.0.0.1", stages=StagePlaces(("10.0.0.1:7000",), "secret of the stages"))
    assert not [*tmp_path.iterdir()]


def test_a_log_that_cannot_be_written_for_a_while_is_passed_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(StringIO):
        def write(self, text: str) -> int:
            if text == "second\n":
                raise OSError(errno.ENOSPC, "the disk is full")
            return super().write(text)

    monkeypatch.setattr(sys, "stderr", disk := FullDisk())
    log = PassedLog(StringIO("first\nsecond\nthird\n"))
    assert log.last_lines() == "first\nsecond\nthird"
    assert disk.getvalue() == "first\nthird\n"


def test_a_log_is_remembered_without_a_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has none if it was closed before the start. If the thread ended, the server could not write its log either."""
    monkeypatch.setattr(sys, "stderr", None)
    assert PassedLog(StringIO("first\nsecond\n")).last_lines() == "first\nsecond"


def test_a_server_that_is_silent_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process takes no SIGTERM."""
    server = ServerProcess(["demo"], {}, address="127.0.0.1")
    server.wait_until_ready()
    server.require_answer()
    os.kill(server.pid, signal.SIGSTOP)
    monkeypatch.setattr("deploy.replicas.process.ASK_S", 0.5)
    with pytest.raises(OSError, match="timed out"):
        server.require_answer()
    server.stop()
    assert server.has_ended


def test_a_server_that_takes_no_signal_is_killed_after_a_time() -> None:
    server = ServerProcess(["demo"], {}, address="127.0.0.1")
    os.kill(server.pid, signal.SIGSTOP)
    server.stop(0.1)
    assert server.has_ended


def test_a_server_takes_no_signals_for_the_group_of_its_owner() -> None:
    server = ServerProcess(["demo"], {}, address="127.0.0.1")
    try:
        assert os.getpgid(server.pid) == server.pid
    finally:
        server.stop()


def test_a_killed_server_is_noticed() -> None:
    server = ServerProcess(["demo"], {}, address="127.0.0.1")
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    with pytest.raises(ServerEnded, match="killed by SIGKILL"):
        server.require()
    server.clean()
