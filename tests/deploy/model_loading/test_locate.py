"""The source of a model becomes a local folder: a path is used as it is, and a model of the hub is downloaded."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub.errors import DryRunError
from typer.testing import CliRunner

from deploy import catalogue, demo, library
from deploy.catalogue import Entry
from deploy.cli.commands import app
from deploy.library import Downloads
from deploy.model_loading import hub, origins, packages
from deploy.model_loading.locate import files_of_model, identity_of, locate, weigh
from server.interfaces import LoadError
from server.models.library import Pulled
from server.models.state import ModelSpec
from tests.disk import room_for
from tests.process_states import is_running

COMMIT = "a" * 40
FILES = {
    "config.json": b"{}",
    "1_Pooling/config.json": b"{}",
    "model-00001-of-00002.safetensors": bytes(25_000_000),
    "chat_template.jinja": b"x",
    "pytorch_model.bin": b"x",
    "consolidated.safetensors": b"x",
    "original/params.json": b"{}",
    "onnx/model.onnx": b"x",
    "model-q4.gguf": b"xx",
    "model.gguf": b"x",
    "large/model-large-00001-of-00002.gguf": b"1",
    "large/model-large-00002-of-00002.gguf": b"22",
    "mmproj-q4.gguf": b"x",
}
ETAGS: dict[str, str] = {}  # the digests that the hub declares for files; other files have their names as tags
SERVED = {"config.json", "1_Pooling/config.json", "model-00001-of-00002.safetensors", "chat_template.jinja"}


class Hub(BaseHTTPRequestHandler):
    """A fake hub that answers the requests of a download."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        if name in FILES:
            body = FILES[name]
        elif path.startswith("/api/models/org/name/tree/"):
            body = json.dumps([{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in FILES.items()]).encode()
        elif path.startswith("/api/models/org/name"):
            body = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}).encode()
        else:
            body = b"{}"
        self.send_response(200 if body != b"{}" or name else 404)
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("etag", f'"{ETAGS.get(name, name) or path}"')
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(hub, "snapshot_download", partial(hub.snapshot_download, endpoint=url, cache_dir=tmp_path / "hub", token=False))
        monkeypatch.setattr(hub, "scan_cache_dir", partial(hub.scan_cache_dir, tmp_path / "hub"))
        monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield url
        server.shutdown()


def test_a_path_needs_no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "deploy.model_loading.hub", None)
    assert locate(str(tmp_path)) == tmp_path
    with pytest.raises(LoadError, match=r"'org/name' is not a path on this machine, .* install '\.\[hub\]'"):
        locate("org/name")


def test_a_path_that_is_gone_is_no_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A path that does not exist is refused, and the hub is not asked for it. An old state file may contain such a path."""
    monkeypatch.setattr(hub, "download", lambda *_: pytest.fail("the hub was asked"))
    with pytest.raises(LoadError, match="gone' does not exist") as caught:
        locate(str(tmp_path / "gone"))
    assert caught.value.code == "invalid_source"


def test_a_path_in_the_home_of_nobody_is_gone() -> None:
    source = "~no-such-user/model"
    with pytest.raises(LoadError, match="'~no-such-user/model' does not exist") as caught:
        locate(source)
    assert caught.value.code == "invalid_source"
    assert identity_of(source) == "" and weigh(ModelSpec("m", source)) == 0


def test_weights_weigh_as_many_bits_as_the_form_says(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1600))
    forms = {"auto": 1600, "auto-fast": 1600, "f32": 3200, "int8": 800, "int4-32": 400, "4bit": 500, "4.6": 460, "6.5": 650, "nan": 1600}
    assert {form: weigh(ModelSpec("m", str(tmp_path), quantize=form)) for form in forms} == forms


def test_what_is_downloaded_is_what_is_served_and_is_watched(endpoint: str) -> None:
    told: list[float] = []
    folder = locate("org/name", told.append)
    found = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert found == SERVED and (folder / "model-00001-of-00002.safetensors").stat().st_size == 25_000_000
    assert len(told) >= 3 and told == sorted(set(told)) and told[-1] == 1.0  # the download reports progress after every 10 MiB
    told.clear()
    assert locate("org/name", told.append) == folder and not told, "a complete download reports no progress"


@pytest.mark.parametrize("file", ["model-q4.gguf", "q4", "Q4"])
def test_one_file_of_many_is_downloaded_and_served(endpoint: str, file: str) -> None:
    told: list[float] = []
    path = locate(f"org/name:{file}", told.append)
    assert path.name == "model-q4.gguf" and path.read_bytes() == b"xx" and told == [1.0]
    assert [found.name for found in path.parent.iterdir()] == ["model-q4.gguf"]
    assert identity_of(f"org/name:{file}") == COMMIT


def test_an_abbreviation_is_a_word_of_its_own(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many repositories have a file in F16 and one in BF16."""
    for name in ("m-F16.gguf", "m-BF16.gguf", "Q8_0.gguf"):
        monkeypatch.setitem(FILES, name, b"x")
    assert [locate(f"org/name:{form}").name for form in ("F16", "f16", "bf16", "q8_0")] == ["m-F16.gguf"] * 2 + ["m-BF16.gguf", "Q8_0.gguf"]
    assert hub.remove("org/name:F16") == 1 and {held.source for held in hub.held()} == {"org/name:m-BF16.gguf", "org/name:Q8_0.gguf"}


@pytest.mark.parametrize("file", ["large", "LARGE", "model-large-00001-of-00002.gguf", "model-large-00002-of-00002.gguf"])
def test_a_split_file_is_downloaded_and_removed_as_a_whole(endpoint: str, file: str) -> None:
    path = locate(f"org/name:{file}")
    assert path.name == "model-large-00001-of-00002.gguf"
    assert [found.name for found in files_of_model(path)] == [path.name, "model-large-00002-of-00002.gguf"]
    (held,) = hub.held()
    assert (held.source, held.num_bytes) == ("org/name:model-large-00001-of-00002.gguf", 3)
    assert hub.remove(f"org/name:{file}") == 3 and hub.held() == []


def test_a_folder_with_one_model_and_its_image_encoder(tmp_path: Path) -> None:
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf"):
        (tmp_path / name).write_bytes(b"1")
    assert locate(str(tmp_path)) == tmp_path / "m-00001-of-00002.gguf"
    before = identity_of(str(tmp_path / "m-00001-of-00002.gguf"))
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"22")
    assert identity_of(str(tmp_path / "m-00001-of-00002.gguf")) != before
    (tmp_path / "other.gguf").write_bytes(b"1")
    with pytest.raises(LoadError, match=r"has several models: m-00001-of-00002\.gguf, other\.gguf; name one of the files"):
        locate(str(tmp_path))


@pytest.mark.parametrize("file", ["mode", "q8", "model.gguf.gguf"])
def test_a_file_that_is_not_there_is_named(endpoint: str, file: str) -> None:
    with pytest.raises(LoadError, match=r"expected one \.gguf file of org/name"):
        locate(f"org/name:{file}")


def test_a_file_with_another_digest_is_refused_and_comes_again(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub declares the SHA-256 of large files. A file that arrives damaged is removed, so that the next download fetches it again."""
    monkeypatch.setitem(ETAGS, "model-q4.gguf", hashlib.sha256(b"other").hexdigest())
    for _ in range(2):
        with pytest.raises(
            LoadError, match=r"model-q4\.gguf arrived damaged: its SHA-256 is [0-9a-f]{64}; expected [0-9a-f]{64}; try again"
        ):
            locate("org/name:q4")
    monkeypatch.setitem(ETAGS, "model-q4.gguf", hashlib.sha256(FILES["model-q4.gguf"]).hexdigest())
    assert locate("org/name:q4").read_bytes() == FILES["model-q4.gguf"]


def test_nothing_arrives_unverified_although_the_hub_once_did_not_answer(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub does not list its files, and is there again a moment later. What is here is served, and nothing is fetched."""
    monkeypatch.setitem(ETAGS, "model-q4.gguf", hashlib.sha256(b"other").hexdigest())
    get = hub.snapshot_download

    def interrupted(source: str, *, dry_run: bool = False, **options: Any) -> Any:
        if dry_run:
            raise DryRunError("the repository cannot be accessed") from ConnectionError("no route to the hub")
        return get(source, **options)

    with monkeypatch.context() as away:
        away.setattr(hub, "snapshot_download", interrupted)
        with pytest.raises(LoadError, match=r"the hub does not answer \(no route to the hub\)"):
            locate("org/name:q4")
    with pytest.raises(LoadError, match=r"model-q4\.gguf arrived damaged"):
        locate("org/name:q4")


def test_a_file_that_was_not_verified_before_a_kill_is_verified_by_the_next_download(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ETAGS, "model-q4.gguf", hashlib.sha256(b"other").hexdigest())
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(hub, "_require_digest", Mock(side_effect=KeyboardInterrupt))
        locate("org/name:Q4")
    assert not any(file.will_download for file in hub._offered("org/name:Q4", None)), "the file is complete"
    with pytest.raises(LoadError, match=r"model-q4\.gguf arrived damaged"):
        locate("org/name:Q4")
    monkeypatch.setitem(ETAGS, "model-q4.gguf", hashlib.sha256(FILES["model-q4.gguf"]).hexdigest())
    path = locate("org/name:Q4")
    with monkeypatch.context() as verified:
        verified.setattr(hub, "_require_digest", lambda path: pytest.fail(f"{path} is verified again"))
        assert locate("org/name:Q4") == path


def test_a_full_disk_forgets_no_file_that_was_not_verified(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ETAGS, "model-q4.gguf", hashlib.sha256(b"other").hexdigest())
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(hub, "_require_digest", Mock(side_effect=KeyboardInterrupt))
        locate("org/name:Q4")
    with room_for(0), pytest.raises(LoadError):
        locate("org/name:model.gguf")
    with pytest.raises(LoadError, match=r"model-q4\.gguf arrived damaged"):
        locate("org/name:Q4")


KILLED = "import os; from deploy.model_loading import hub; hub.download('org/name:q4', lambda _: os.kill(os.getpid(), 9))"


def test_a_killed_download_fills_no_disk(endpoint: str, tmp_path: Path) -> None:
    """The hub's library never uses the part of a file again, and gives each download a file of its own."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(tmp_path / "hub")}

    def killed() -> list[Path]:
        ended = subprocess.run([sys.executable, "-c", KILLED], env=environment, cwd=Path(__file__).parents[3], check=False)
        assert ended.returncode == -signal.SIGKILL
        return [*(tmp_path / "hub").rglob("*.incomplete")]

    (first,) = killed()
    (second,) = killed()
    assert first != second
    second.write_bytes(b"xx")  # the killed process had not written them yet
    assert hub.remove("org/name:q4") == 2 and not second.exists() and hub.remove("org/name:q4") == 0
    (part,) = killed()
    with (tmp_path / "hub" / ".locks" / "models--org--name" / "model-q4.gguf.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as if another process were downloading it
        assert hub.remove("org/name") == 0 and part.exists()
    assert locate("org/name:q4").read_bytes() == b"xx" and not part.exists()


def test_what_was_pulled_is_listed_and_goes(endpoint: str) -> None:
    """Pulled models are listed and can be removed. Removing a single file keeps the other files of its repository."""
    locate("org/name")
    locate("org/name:q4")
    whole, file = sorted(hub.held(), key=lambda one: one.source)
    assert (whole.source, file.source) == ("org/name", "org/name:model-q4.gguf")
    assert whole.num_bytes > 25_000_000 and file.num_bytes == 2 and whole.used_s > 0
    assert hub.remove("org/name:q8") == hub.remove("org/other") == 0
    assert hub.remove("org/name:Q4") == 2 and [one.source for one in hub.held()] == ["org/name"]
    assert hub.remove("org/name") == whole.num_bytes and hub.held() == []


def test_commands_pull_list_and_remove(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)  # for the process that downloads
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))

    def said(*words: str, status: int = 0) -> str:
        result = CliRunner().invoke(app, words, prog_name="relaxserve")
        assert result.exit_code == status, result.output
        return result.output

    assert "model-q4.gguf" in said("pull", "org/name:q4")
    assert "org/name:model-q4.gguf" in said("ls") and json.loads(said("ls", "--json"))[0]["bytes"] == 2
    assert "gave back 2 B" in said("rm", "org/name:q4")
    assert "these models are: none" in said("rm", "org/name:q4", status=2)


def test_a_short_name_is_here_once_its_file_is(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue abbreviates names of files, and writes them in another case than the hub."""
    sources = {"four": "org/name:Q4", "large": "org/name:large", "whole": "org/name", "other": "org/other"}
    monkeypatch.setattr(catalogue, "ENTRIES", tuple(Entry(name, "", "MIT", source) for name, source in sources.items()))
    monkeypatch.setattr(packages, "ENTRIES", ())
    here = lambda: {one["name"] for one in json.loads(CliRunner().invoke(app, ["ls", "--available", "--json"]).output) if one["here"]}  # noqa: E731
    assert here() == set()
    for name in ("four", "large", "whole"):
        locate(sources[name])
    assert here() == {"four", "large", "whole"}
    hub.remove("org/name:q4")
    assert here() == {"large", "whole"}


def test_the_server_pulls_in_a_process_of_its_own(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server pulls models in a separate process and reports progress. It continues an interrupted download, and removes a model on
    request."""
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))

    async def scenario() -> None:
        downloads = Downloads()
        async with aclosing(downloads.pull("org/name")) as parts:
            first = await anext(parts)
        assert first == Pulled(total := sum(len(FILES[name]) for name in SERVED), 0)
        told = [part async for part in downloads.pull("org/name")]
        assert told[-1].completed_bytes == told[-1].total_bytes <= total and len(told) > 2
        assert [part async for part in downloads.pull("org/name")] == [Pulled(0, 0), Pulled(0, 0)]
        assert [one.source for one in await downloads.stored()] == ["org/name"]
        assert await downloads.remove("org/name") >= 25_000_000 and await downloads.remove("org/name") == 0
        with pytest.raises(LoadError, match="its download failed"):
            await anext(part async for part in downloads.pull("org/none") if part.completed_bytes)

    asyncio.run(scenario())


@pytest.mark.parametrize("source", ["org/name:q4", "smollm2"])
def test_what_may_not_be_removed_is_told(source: str, endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cache of the hub may belong to another user, or be mounted to be read only."""
    locate("org/name:q4")
    monkeypatch.setattr(packages, "path_of", lambda _entry: tmp_path / "smollm2.gguf")
    (tmp_path / "smollm2.gguf").touch()
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=PermissionError(13, "Permission denied", "/the/file")))
    with pytest.raises(LoadError, match=f"'{source}' cannot be removed from this machine: .*Permission denied: '/the/file'"):
        origins.remove(source)


def test_a_stopped_download_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of a download may start others, such as pip. None of them goes on after a stop."""
    begun = "import subprocess, time; print('{\"total\": %d}' % subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    monkeypatch.setattr(library, "COMMAND", (sys.executable, "-c", begun))

    async def stopped() -> int:
        async with aclosing(Downloads().pull("smollm2")) as parts:
            return (await anext(parts)).total_bytes

    pid = asyncio.run(stopped())
    until = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < until, "the process of the download still runs"
        time.sleep(0.01)


def test_what_is_here_is_served_without_the_hub(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = locate("org/name")
    monkeypatch.setattr(hub, "snapshot_download", partial(hub.snapshot_download, endpoint="http://127.0.0.1:1"))
    assert locate("org/name") == folder


def test_a_failed_download_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(source: str, **_: Any) -> str:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(LoadError, match="its download failed: no route to the hub"):
        locate("org/name")


def test_without_a_network_the_reason_is_a_line(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "snapshot_download", partial(hub.snapshot_download, endpoint="http://127.0.0.1:1"))
    with pytest.raises(LoadError) as caught:
        locate("org/never")
    assert "its download failed: the hub does not answer (" in caught.value.message and "\n" not in caught.value.message


def test_the_built_in_model_is_found_wherever_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in model is found by its name. It is also found by the path that it had before an upgrade moved it, which a state file may
    contain. A different folder called demo is not mistaken for it."""
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert locate("demo") == demo.MODEL
    assert locate("/usr/lib/python3.11/site-packages/deploy/demo/model") == demo.MODEL
    (other := tmp_path / "deploy" / "demo" / "model").mkdir(parents=True)
    assert locate(str(other)) == other
    with pytest.raises(LoadError, match="does not exist"):
        locate("/usr/lib/demo/model")


# --- the identity of a source's files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"22"),
        lambda folder: os.replace(folder / "new", folder / "model.safetensors"),
        lambda folder: (folder / "1_Pooling" / "config.json").write_text("{ }"),
        lambda folder: (folder / "chat_template.jinja").touch(),
        lambda folder: (folder / "config.json").unlink(),
    ],
    ids=["written over", "replaced", "below", "new", "removed"],
)
def test_changed_files_have_another_identity(change: Callable[[Path], object], tmp_path: Path) -> None:
    """If the files of a source change, the identity of the source changes too, even if size and modification time stay the same."""
    (tmp_path / "1_Pooling").mkdir()
    for name in ("model.safetensors", "new", "config.json", "1_Pooling/config.json"):
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (0, 0))
    before = identity_of(str(tmp_path))
    (tmp_path / "README.md").touch()
    (tmp_path / ".cache").mkdir()
    assert before and identity_of(str(tmp_path)) == before
    change(tmp_path)
    if (tmp_path / "model.safetensors").exists():
        os.utime(tmp_path / "model.safetensors", (0, 0))
    assert identity_of(str(tmp_path)) != before


def test_a_file_and_the_built_in_model_have_an_identity(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"1")
    before = identity_of(str(tmp_path / "m.gguf"))
    (tmp_path / "m.gguf").write_bytes(b"22")
    assert "" != identity_of(str(tmp_path / "m.gguf")) != before
    assert identity_of("demo") == identity_of("demo") != ""
    assert identity_of(str(tmp_path / "gone")) == ""


def test_the_identity_of_a_hub_id_is_its_revision(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity_of("org/name") == COMMIT
    monkeypatch.setattr(hub, "snapshot_download", partial(hub.snapshot_download, endpoint="http://127.0.0.1:1"))
    assert identity_of("org/other") == "", "the identity is unknown without the hub"
