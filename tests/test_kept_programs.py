"""The cache folder of a test run begins with the programs of earlier runs, of which the oldest are removed."""

from __future__ import annotations

import os
from pathlib import Path

from runtime import sealed
from tests.kept_programs import FOLDER, PARTS, kept_programs, trim


def test_runs_share_programs_and_nothing_else(tmp_path: Path) -> None:
    for run in ("first", "first", "second"):  # two processes share the folder of the first run
        with kept_programs(tmp_path / run, tmp_path / "kept"):
            (tmp_path / run / "executables" / run).touch()
            (tmp_path / run / "weights").mkdir(exist_ok=True)
    assert {path.name for path in (tmp_path / "second" / "executables").iterdir()} == {"first", "second"}
    assert {path.name for path in (tmp_path / "kept").iterdir()} == set(PARTS)
    for part in PARTS:
        sealed.require_private(tmp_path / "second" / part)


def test_what_was_used_least_recently_goes_first(tmp_path: Path) -> None:
    """The programs that were used least recently are removed first. Each use touches a program; its sidecar counts as being of the same
    age."""
    (tmp_path / "executables").mkdir()
    for name, age in {"0a.rsx": 0, "0a.json": 9, "1b.rsx": 1, "1b.json": 9, "2c.rsx": 2, "2c.json": 9, ".key": 9}.items():
        path = tmp_path / "executables" / name
        path.write_bytes(bytes(100))
        os.utime(path, (1000 - age, 1000 - age))
    trim(tmp_path, 400)
    assert {path.name for path in (tmp_path / "executables").iterdir()} == {"0a.rsx", "0a.json", "1b.rsx", "1b.json", ".key"}


def test_this_run_begins_with_them(cache_folder: Path) -> None:
    assert (cache_folder / PARTS[0]).resolve() == FOLDER / PARTS[0]
