from __future__ import annotations

import pytest

from compiler.machine.target import host
from runtime.device.cpu import host as host_module
from runtime.device.cpu.host import ARCH, check_target
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
    """AMX counts as missing if Linux does not allow the process to use it. The processor reports AMX in any case, but an AMX instruction
    would end the process."""
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: {"avx2": True, "fma": False, "amx-tile": True})
    monkeypatch.setattr(host_module, "_told_by_linux", set[str])
    monkeypatch.setattr(host_module, "matrix_tiles_allowed", lambda: allowed)
    assert host_module.features() == ({"avx2", "amx-tile"} if allowed else {"avx2"})
    if not allowed:
        with pytest.raises(IncompatibleExecutable, match="needs amx-tile, which this machine lacks"):
            check_target(f"{ARCH}:+avx2,+amx-tile")


def test_what_linux_tells_of_an_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an Arm processor, the features come from Linux's hwcaps; the cases are a Neoverse V1, a Neoverse N1 and a Cortex-A72. LLVM reads
    /proc/cpuinfo instead, and misses the instructions that multiply bytes."""
    machines = {
        (0xFFFFFFFF, 0x1F201): {"fp-armv8", "neon", "fullfp16", "dotprod", "i8mm", "bf16"},
        (0x10119FFF, 0x0): {"fp-armv8", "neon", "fullfp16", "dotprod"},
        (0x8FF, 0x0): {"fp-armv8", "neon"},
    }
    monkeypatch.setattr(host_module, "ARCH", "aarch64")
    monkeypatch.setattr(host_module.sys, "platform", "linux")
    for words, expected in machines.items():
        monkeypatch.setattr(host_module, "_auxiliary", lambda number, words=words: words[(16, 26).index(number)])
        assert host_module._told_by_linux() == expected  # pyright: ignore[reportPrivateUsage]
