from __future__ import annotations

from pathlib import Path

from runtime.device.cpu.system_memory import SystemMemory, system_memory

TOTAL, AVAILABLE = 1000 << 10, 800 << 10


def write(path: Path, **files: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)


def found(folder: Path) -> SystemMemory:
    """Return the memory that a process of the group /outer/inner finds."""
    write(folder, meminfo="MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    800 kB\n")
    write(folder, membership=(folder / "version").read_text() if (folder / "version").exists() else "0::/outer/inner\n")
    return system_memory(folder / "meminfo", folder, folder / "membership")


def test_the_control_group_bounds_the_memory(tmp_path: Path) -> None:
    assert found(tmp_path) == SystemMemory(TOTAL, AVAILABLE, None)
    write(tmp_path, memory__max="max\n", memory__current="1024\n")
    assert found(tmp_path) == SystemMemory(TOTAL, AVAILABLE, None)
    write(tmp_path, memory__max="2048\n")
    assert found(tmp_path) == SystemMemory(TOTAL, 1024, 2048)


def test_the_least_room_of_all_enclosing_groups_counts(tmp_path: Path) -> None:
    write(tmp_path / "outer/inner", memory__max="4096\n", memory__current="1024\n")
    assert found(tmp_path) == SystemMemory(TOTAL, 3072, 4096)
    write(tmp_path / "outer", memory__max="8192\n", memory__current="8000\n")
    assert found(tmp_path) == SystemMemory(TOTAL, 192, 4096)


def test_files_that_the_system_can_read_again_take_no_memory(tmp_path: Path) -> None:
    """A checkpoint that was read or downloaded in a container fills the memory of its group with pages of its files. They make way."""
    stat = "anon 300\nfile 700\nshmem 200\ninactive_anon 100\ninactive_file 400\nactive_file 100\n"
    write(tmp_path, memory__max="2048\n", memory__current="1024\n", memory__stat=stat)
    assert found(tmp_path).available_bytes == 1024 + 500


def test_version_1_of_control_groups(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("4:cpu,cpuacct:/other\n3:memory:/outer/inner\n")
    inner = tmp_path / "memory/outer/inner"
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 40\ntotal_active_file 2\n"
    write(inner, memory__limit_in_bytes=f"{(1 << 63) - 4096}\n", memory__usage_in_bytes="1000\n", memory__stat=stat)
    assert found(tmp_path) == SystemMemory(TOTAL, AVAILABLE, None), "version 1 has no word for no limit"
    write(inner, memory__limit_in_bytes="3000\n")
    assert found(tmp_path) == SystemMemory(TOTAL, 2042, 3000)
