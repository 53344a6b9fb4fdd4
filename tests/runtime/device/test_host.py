from __future__ import annotations

import pytest

from compiler.target import host
from runtime.device.host import ARCH, check_target
from runtime.errors import IncompatibleExecutable


def test_this_machine_runs_what_is_compiled_for_it() -> None:
    check_target(host().key)
    check_target(f"{ARCH}:")


def test_another_machine_and_missing_features_are_named() -> None:
    with pytest.raises(IncompatibleExecutable, match=f"is for vax, this machine is {ARCH}; compile the program here"):
        check_target("vax:")
    with pytest.raises(IncompatibleExecutable, match="needs warp-drive, which this machine lacks"):
        check_target(f"{host().key},+warp-drive")
