"""Where the server expects a file, the path may lead to a FIFO, a device or a folder. Then the server reports an error at once or replaces
the path; it never blocks."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compiler.frontend.errors import ModelError
from deploy import demo
from deploy.model_loading.files import open_files
from deploy.model_loading.locate import locate
from deploy.model_loading.tokenizer import load_tokenizer
from deploy.quality.text import read_text
from deploy.settings import read_config
from server.http.auth import Guard
from server.interfaces import LoadError
from server.models.state import StateError, read_state
from server.settings import ServerSettings, SettingsError


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """Fail a test that blocks, for example on reading a FIFO."""

    def give_up(*_: object) -> None:
        raise TimeoutError("it waits for a FIFO")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(100)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


Make = Callable[[Path], None]
KINDS = pytest.mark.parametrize("make", [fifo, device, folder])


@KINDS
def test_in_place_of_the_server_s_own_files(make: Make, tmp_path: Path) -> None:
    make(path := tmp_path / "it")
    with pytest.raises(StateError, match="state file"):
        read_state(path)
    with pytest.raises(SettingsError, match="configuration"):
        read_config(path)
    with pytest.raises(SettingsError, match="key file"):
        Guard(ServerSettings(api_key_file=path))


@KINDS
def test_in_place_of_a_text_to_calibrate_on(make: Make, tmp_path: Path) -> None:
    make(path := tmp_path / "it")
    with pytest.raises(LoadError, match=r"the text .*it cannot be read"):
        read_text(path)


def test_a_configuration_may_come_from_what_the_shell_has_opened(tmp_path: Path) -> None:
    """The configuration can be read from a file descriptor that the shell has opened, as in `--config <(envsubst < models.yaml)`."""
    reading, writing = os.pipe()
    os.write(writing, b"port: 7")
    os.close(writing)
    assert read_config(Path(f"/dev/fd/{reading}")) == ({"port": 7}, [])
    os.close(reading)


FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]


@KINDS
@pytest.mark.parametrize("name", FILES)
def test_in_place_of_a_model_s_files(make: Make, name: str, tmp_path: Path) -> None:
    for file in demo.MODEL.iterdir():
        if file.name != name and file.suffix in (".json", ".safetensors", ".jinja"):
            shutil.copy(file, tmp_path)
    make(tmp_path / name)
    with pytest.raises((LoadError, ModelError)):
        open_files(locate(str(tmp_path)))
        load_tokenizer(str(tmp_path))


def test_a_state_file_that_is_gone_from_behind_its_link_is_not_empty(tmp_path: Path) -> None:
    """Such as one on a drive that is mounted too late: the server would start without its models, and then forget them."""
    (state := tmp_path / "state.json").symlink_to(tmp_path / "drive" / "state.json")
    with pytest.raises(StateError, match=r"it is a link to .*drive/state\.json, which does not exist"):
        read_state(state)
    assert not read_state(tmp_path / "absent.json").models
