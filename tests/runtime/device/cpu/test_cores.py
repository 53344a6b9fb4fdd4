from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtime.device.cpu.cores import available_cores, cpu_quota


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_quota_of_version_2_is_the_least_of_all_enclosing_groups(tmp_path: Path) -> None:
    write(tmp_path / "membership", "0::/outer/inner\n")
    write(tmp_path / "outer/inner/cpu.max", "max 100000\n")
    assert cpu_quota(tmp_path, tmp_path / "membership") is None
    write(tmp_path / "outer/cpu.max", "150000 100000\n")
    assert cpu_quota(tmp_path, tmp_path / "membership") == 1.5


def test_quota_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "membership", "4:memory:/x\n2:cpu,cpuacct:/group\n")
    write(tmp_path / "cpu/group/cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "cpu/group/cpu.cfs_period_us", "100000\n")
    assert cpu_quota(tmp_path, tmp_path / "membership") is None
    write(tmp_path / "cpu/group/cpu.cfs_quota_us", "300000\n")
    assert cpu_quota(tmp_path, tmp_path / "membership") == 3.0


def test_a_small_quota_leaves_one_core(tmp_path: Path) -> None:
    write(tmp_path / "membership", "0::/\n")
    write(tmp_path / "cpu.max", "20000 100000\n")
    assert len(available_cores(tmp_path, tmp_path / "membership")) == 1


def test_without_control_groups_all_cores_of_the_process_count() -> None:
    given = "import os; print(sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else list(range(os.cpu_count() or 1)))"
    ours = "from pathlib import Path; from runtime.device.cpu.cores import available_cores as a; print(list(a(Path('-'), Path('-'))))"
    said = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for code in (given, ours)]
    assert said[0] == said[1] != ""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_a_pinned_thread_still_sees_what_the_process_has() -> None:
    cores = available_cores()
    found: list[tuple[int, ...]] = []

    def work() -> None:
        os.sched_setaffinity(0, {cores[-1]})
        found.append(available_cores())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [cores]
