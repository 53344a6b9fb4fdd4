from __future__ import annotations

from pathlib import Path

from runtime.device.cpu.system_memory import system_memory


def test_the_control_group_bounds_the_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    800 kB\n")
    assert system_memory(meminfo, tmp_path).available_bytes == 800 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1024\n")
    assert system_memory(meminfo, tmp_path).limit_bytes is None
    (tmp_path / "memory.max").write_text("2048\n")
    assert system_memory(meminfo, tmp_path).available_bytes == 1024
