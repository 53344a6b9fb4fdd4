"""A taken port is reported with the process that holds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.listening import holder_of, listen
from server.settings import SettingsError

HOLD = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"


def test_a_taken_port_names_its_holder() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        port = int(holder.stdout.readline())
        with pytest.raises(SettingsError) as refused:
            listen("127.0.0.1", port)
        assert f"in use by process {holder.pid} ({sys.executable}" in str(refused.value)
        assert str(refused.value).endswith("; choose another address or port")
        holder.stdin.close()
    assert holder_of(port) == ""


def test_an_own_socket_is_found_too() -> None:
    with listen("127.0.0.1", 0) as socket:
        assert f"process {os.getpid()} " in holder_of(socket.getsockname()[1])


def test_a_file_that_closes_meanwhile_hides_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    real, closed = os.readlink, list[str]()

    def readlink(path: Path) -> str:
        if path.parts[2] == str(os.getpid()) and not closed:
            closed.append(str(path))
            raise FileNotFoundError(path)
        return real(path)

    with listen("127.0.0.1", 0) as socket:
        monkeypatch.setattr("deploy.listening.os.readlink", readlink)
        assert f"process {os.getpid()} " in holder_of(socket.getsockname()[1])
    assert closed


@pytest.mark.parametrize("host", [".foo", "a..b", f"{'a' * 64}.b"])
def test_a_name_that_cannot_be_one_is_refused(host: str) -> None:
    with pytest.raises(SettingsError, match=r"cannot listen on .* port 1: it is no name of a host; choose another address or port"):
        listen(host, 1)


def test_a_name_that_does_not_exist_has_its_own_reason() -> None:
    with pytest.raises(SettingsError, match=r"cannot listen on no\.such\.host\.invalid port 1: .*; choose another"):
        listen("no.such.host.invalid", 1)
