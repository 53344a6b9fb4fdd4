from __future__ import annotations

import pytest

from compiler.target import host
from runtime.device import host as host_module
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


@pytest.mark.parametrize("allowed", [True, False])
def test_tiles_that_the_system_does_not_give_are_missing(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    """The processor has them and says so; using them would end the process all the same."""
    monkeypatch.setattr(host_module.llvm, "get_host_cpu_features", lambda: {"avx2": True, "fma": False, "amx-tile": True})
    monkeypatch.setattr(host_module, "matrix_tiles_allowed", lambda: allowed)
    assert host_module.features() == ({"avx2", "amx-tile"} if allowed else {"avx2"})
    if not allowed:
        with pytest.raises(IncompatibleExecutable, match="needs amx-tile, which this machine lacks"):
            check_target(f"{ARCH}:+avx2,+amx-tile")
