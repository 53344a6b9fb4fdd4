"""Tests find the command `relaxserve` whether it is installed or not."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path

from tests.conftest import BIN
from tests.forked import ForkServer, commands


def test_a_command_runs_the_checkout_where_none_is_installed(tmp_path: Path) -> None:
    assert commands(BIN) == BIN
    command = commands(tmp_path) / "relaxserve"
    alone = subprocess.run([command, "--version"], capture_output=True, text=True)
    with closing(ForkServer(command)) as forks:
        forked = forks.run(["--version"], {"PATH": "/usr/bin:/bin"}, timeout_s=120)
    assert alone.returncode == forked.returncode == 0, alone.stderr + forked.stderr
    assert alone.stdout == forked.stdout != ""
