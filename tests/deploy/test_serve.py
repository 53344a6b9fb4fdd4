"""Tests how `serve` builds the server from its settings and models."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter
from pydantic.warnings import UnsupportedFieldAttributeWarning

from deploy.serve import WORKER, export, ignore_field_warnings, own_state, publications, serve, warn_of_absent_names, warn_of_open_names
from runtime.whole_files import locked_file
from server.models.state import ModelSpec, SavedState, StateError, write_state
from server.settings import ServerSettings, SettingsError
from tests.conftest import ROOT
from tests.server.conftest import serve as null_server

__all__ = ["null_server"]


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("", "Is a directory; name a file"),
        ("file/x", "Not a directory; name a file"),
        ("x" * 251, "File name too long; name a file in"),
    ],
)
def test_a_state_file_that_cannot_be_used_stops_the_start(file: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    async def greet(*_: object) -> bool:
        raise AssertionError("it started")

    with pytest.raises(StateError, match=complaint):
        serve(ServerSettings(port=0, state_file=tmp_path / file), [], greet)


@pytest.mark.parametrize(
    ("given", "partner"),
    [
        ({"keep_requests_of": ("key=website",)}, "keep_requests"),
        ({"kv_events_name": "me"}, "kv_events"),
        ({"kv_events_replay": "tcp://127.0.0.1:*"}, "kv_events"),
        ({"peer_patience_s": 9.0}, "peer_secret_file"),
        ({"peer_rate_bytes": 1 << 30}, "peer_secret_file"),
    ],
)
def test_a_setting_without_the_one_that_it_needs_stops_the_start(given: dict[str, Any], partner: str) -> None:
    """Otherwise an operator would believe that it has an effect, such as that the server keeps requests."""

    async def greet(*_: object) -> bool:
        raise AssertionError("it started")

    with pytest.raises(SettingsError, match=f"{next(iter(given))} is set and {partner} is not; set both"):
        serve(ServerSettings(port=0, **given), [], greet)


GREETS = """
from deploy.serve import serve
from server.settings import ServerSettings

async def greet(*_):
    raise OSError("nobody is there")

serve(ServerSettings(port=0, batch_store_bytes=0), [], greet)
"""


def test_an_error_of_the_greeting_stops_the_server() -> None:
    """Otherwise whoever waits for the greeting would wait for ever."""
    ended = subprocess.run([sys.executable, "-c", GREETS], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and ended.stderr.rstrip().endswith("OSError: nobody is there")


def test_the_application_is_imported_while_workers_load() -> None:
    """Importing FastAPI takes about as long as importing the modules of a worker, so the front does it while workers load."""
    program = "import sys, deploy.serve; sys.exit(sorted({'fastapi', 'uvicorn', 'server.app'} & sys.modules.keys()) or 0)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ended.returncode == 0, f"imported before the loads begin: {ended.stderr}"


SERVES = """
import sys
sys.argv = ["relaxserve", "serve", "--bogus"]
import deploy.cli
deploy.cli._start_worker = lambda: None
deploy.cli.imported()
import deploy.serve, server.app, server.http.server
from server.api import endpoints
endpoints.shapes()
print(*sys.modules)
"""


def test_a_front_does_without_the_packages_that_it_does_not_use() -> None:
    """Each of these packages takes a few hundredths of a second of every start, and megabytes: other processes render templates, and only a
    terminal shows progress bars. `serve` imports no other command."""
    ended = subprocess.run([sys.executable, "-c", SERVES], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    unused = {"jinja2", "rich.progress", "deploy.cli.commands", "deploy.cli.bench", "compiler.driver", "llvmlite"}
    assert "server.app" in ended.stdout.split() and not unused & {*ended.stdout.split()}


@pytest.mark.parametrize("content", [b'{"a":' * 100_000, b'{"x":' + b"[" * 100_000, b'{"models":[{"name":"\xff","source":"b"}]}'])
def test_a_hostile_state_file_stops_the_start(content: bytes, tmp_path: Path) -> None:
    """The error says to repair or to remove the file."""
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(StateError, match="repair it, or remove it"), own_state(tmp_path / "state.json"):
        raise AssertionError("it started")


@pytest.mark.parametrize("room", [0, 100])
def test_a_full_disk_under_the_state_file_stops_the_start(room: int, tmp_path: Path) -> None:
    """A full disk takes an empty file, so names can be created and nothing written. Here a limit on the size of files makes writes fail:
    already that of the lock, or only that of the state."""
    program = """
import resource, sys
from pathlib import Path
from deploy.serve import own_state
from server.models.state import StateError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    with own_state(Path(sys.argv[1])): print("started")
except StateError as error:
    print(error)
"""
    command = [sys.executable, "-c", program, tmp_path / "state.json", str(room)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert "free space" in ended.stdout and "File too large" in ended.stdout
    assert ended.stderr == "" and {path.name for path in tmp_path.iterdir()} <= {"state.json.lock"}


def test_what_killed_servers_left_beside_the_state_file_is_removed(tmp_path: Path) -> None:
    state = tmp_path / ("x" * 250)  # the name of its lock has 5 bytes more
    for _ in range(2):
        os.close(locked_file(state)[0])
    with own_state(state):
        write_state(state, SavedState())
        assert sorted(tmp_path.iterdir()) == [state, tmp_path / f"{state.name}.lock"]


def test_two_servers_do_not_share_a_state_file(tmp_path: Path) -> None:
    """A second server with the same state file is refused, because each server would overwrite the models that the other has recorded."""
    state = tmp_path / "folder" / "state.json"
    complaint = f"used by another server \\(process {os.getpid()}\\); stop that one, or name another"
    with own_state(state), pytest.raises(StateError, match=complaint), own_state(state):
        raise AssertionError("both have it")
    with own_state(state):
        pass  # the first server has released its lock, so this server gets it


def test_the_kernel_frees_the_state_file_of_a_killed_server(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    program = "import sys\nfrom pathlib import Path\nfrom deploy.serve import own_state\n"
    program += "with own_state(Path(sys.argv[1])): print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(StateError, match=f"process {other.pid}"), own_state(state):
            raise AssertionError("both have it")
        other.kill()
    with own_state(state):
        assert not state.exists(), "nothing was written yet"


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        ({"allowed_hosts": ("models.example.org",)}, "as models.example.org may use its models, and load, unload and stop them; set"),
        ({"allowed_hosts": ("models.example.org",), "admin_keys": ("an-admin-key",)}, "as models.example.org may use its models; set"),
        ({"allowed_hosts": ("models.example.org",), "api_keys": ("a-client-key",)}, ""),
        ({"allowed_hosts": ("models.example.org",), "insecure": True}, ""),
        ({}, ""),
    ],
)
def test_a_server_for_others_without_keys_warns(settings: dict[str, Any], warning: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_open_names(ServerSettings(**settings))
    assert warning in caplog.text and bool(caplog.text) is bool(warning)


def test_a_saved_model_to_publish_is_no_mistake(null_server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_state(tmp_path / "state.json", SavedState((ModelSpec("saved", "x"),)))
    given = ModelSpec("given", "y")
    server = null_server(initial=(given,), state_file=tmp_path / "state.json", publish=("saved", "given", "misspelt"))
    warn_of_absent_names(server.registry)
    assert caplog.messages[-1] == "publish names 'misspelt'; no model of that name is loaded from the start"
    assert sum("publish names" in message for message in caplog.messages) == 1


def test_a_worker_imports_nothing_of_the_working_directory(tmp_path: Path) -> None:
    """A worker imports no files from its working directory, even if the files are named like standard modules."""
    (tmp_path / "socket.py").write_text("raise SystemExit('not yours')")
    ended = subprocess.run([*WORKER, "0"], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert "not yours" not in ended.stderr
    # The worker imported the real module `socket`. It fails later, because its file descriptor is not a socket.
    assert "Socket operation on non-socket" in ended.stderr


def test_fields_that_fastapi_makes_warn_nobody() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UnsupportedFieldAttributeWarning):
            TypeAdapter(list[Annotated[int, Field(alias="x")]])
        ignore_field_warnings()
        TypeAdapter(list[Annotated[int, Field(alias="x")]])
        with pytest.raises(UserWarning):
            warnings.warn("another one", UserWarning, stacklevel=1)


PLANS = """
import asyncio, sys
from deploy.serve import _answer_of
from server.messages import Load

planner = "import os, sys, time; print(os.getpid(), file=sys.stderr, flush=True); time.sleep(600)"
asyncio.run(_answer_of("the planner", (sys.executable, "-c", planner), Load("a", "a")))
"""


def test_a_killed_server_leaves_no_process_that_works_for_it() -> None:
    """An export of a large model would go on for minutes, with memory for its weights."""
    with subprocess.Popen([sys.executable, "-c", PLANS], cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        planner = int(server.stderr.readline())
        server.kill()
        ended = select.select([server.stderr], [], [], 20)[0] == [server.stderr]  # the last process that has the other end of the pipe
        if not ended:
            os.kill(planner, signal.SIGKILL)
    assert ended


def test_a_cancelled_call_of_a_process_that_has_just_ended_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise unloading a model while its export ends would be logged as a failure of the disk."""

    class Ended:
        def kill(self) -> None:
            raise ProcessLookupError

        async def communicate(self, _data: bytes) -> None:
            await asyncio.Event().wait()

        async def wait(self) -> int:
            return 0

    async def start(*_: object, **__: object) -> Ended:
        return Ended()

    async def call() -> None:
        exporting = asyncio.create_task(export(ModelSpec("m", "m"), Path("folder")))
        await asyncio.sleep(0.01)
        exporting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exporting

    monkeypatch.setattr("deploy.serve.asyncio.create_subprocess_exec", start)
    asyncio.run(call())


def test_exports_without_a_cache_that_a_killed_server_left_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = (
        "import os, signal, tempfile\nfrom deploy.serve import publications\nfrom server.settings import ServerSettings\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "publications(ServerSettings(publish=('m',)), None, None)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, cwd=ROOT).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    (left / "model.wasm").touch()
    foreign = tmp_path / "relaxserve-web-another"
    foreign.mkdir()
    (tmp_path / "relaxserve-web-link").symlink_to(foreign)
    publications(ServerSettings(publish=("m",)), None, None)
    publications(ServerSettings(publish=("m",)), None, None)
    assert not left.exists() and foreign.exists() and len(list(tmp_path.iterdir())) == 4
