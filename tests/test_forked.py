"""Tests find the command `relaxserve` whether it is installed or not, and wait for a server for a limited time."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.conftest import BIN, greeting
from tests.forked import ForkServer, commands


def test_a_command_runs_the_checkout_where_none_is_installed(tmp_path: Path) -> None:
    assert commands(BIN) == BIN
    command = commands(tmp_path) / "relaxserve"
    alone = subprocess.run([command, "--version"], capture_output=True, text=True)
    with closing(ForkServer(command)) as forks:
        forked = forks.run(["--version"], {"PATH": "/usr/bin:/bin"}, timeout_s=120)
    assert alone.returncode == forked.returncode == 0, alone.stderr + forked.stderr
    assert alone.stdout == forked.stdout != ""


def test_a_server_that_says_nothing_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stderr=subprocess.PIPE, text=True) as silent:
        with pytest.raises(AssertionError, match=r"or was not ready within 0\.1 s"):
            greeting(silent, timeout_s=0.1)
        assert silent.wait(60) < 0
