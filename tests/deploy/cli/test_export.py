"""The command `relaxserve export`, run as a user types it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compiler.machine.target import TargetError
from deploy.cli.commands import app
from deploy.export.folder import ExportError, new_folder


def test_a_target_that_is_not_known_is_refused_with_those_that_are(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["export", "demo", "--target", "vax", "-o", str(tmp_path / "out")], prog_name="relaxserve")
    assert isinstance(said.exception, TargetError)
    assert "target is 'vax'; expected web or one of aarch64-linux, riscv64-linux" in str(said.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("target", "prefix", "said"), [("x86-64-v3", "My-Model", "expected a small letter"), ("web", "my", "no C names")])
def test_a_prefix_that_is_no_name_is_refused(target: str, prefix: str, said: str, tmp_path: Path) -> None:
    command = ["export", "demo", "--target", target, "--prefix", prefix, "-o", str(tmp_path / "out")]
    refused = CliRunner().invoke(app, command, prog_name="relaxserve")
    assert refused.exit_code != 0 and said in f"{refused.exception} {refused.output}"
    assert not (tmp_path / "out").exists()


def test_a_shared_library_for_browsers_is_refused(tmp_path: Path) -> None:
    command = ["export", "demo", "--shared", "-o", str(tmp_path / "out")]
    refused = CliRunner().invoke(app, command, prog_name="relaxserve", env={"COLUMNS": "200"})
    assert refused.exit_code != 0 and "--shared is set, but an export for browsers has no C library" in refused.output
    assert not (tmp_path / "out").exists()


def test_embeddings_of_a_c_library_are_refused(tmp_path: Path) -> None:
    command = ["export", "demo", "--target", "x86-64-v3", "--embeddings", "-o", str(tmp_path / "out")]
    refused = CliRunner().invoke(app, command, prog_name="relaxserve", env={"COLUMNS": "200"})
    assert refused.exit_code == 2 and "--embeddings is set, but a C library gives none" in refused.output
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ExportError, match="not empty; name another folder with --output"), new_folder(tmp_path):
        pass
    assert (tmp_path / "mine").read_text() == "precious"
    with new_folder(tmp_path / "a" / "b") as folder:
        assert folder.is_dir()
    assert folder.is_dir()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EFBIG], ids=["full", "with small files only"])
def test_a_disk_without_room_is_told_in_a_line(error: int, tmp_path: Path) -> None:
    """On a card with FAT32, files have at most 4 GiB."""
    message = f"out cannot be written: {os.strerror(error)}; free space there, or name another folder with --output"
    with pytest.raises(ExportError, match=message), new_folder(tmp_path / "out") as folder:
        (folder / "part").mkdir()
        raise OSError(error, os.strerror(error))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the model would be compiled first, and the first file would fail with a traceback. The tests may run as root, whom modes do
    not stop."""
    monkeypatch.setattr(os, "access", lambda path, mode: (Path(path), mode) != (tmp_path, os.W_OK | os.X_OK))
    message = f"{tmp_path} cannot be written by this user; name another folder with --output"
    with pytest.raises(ExportError, match=message), new_folder(tmp_path):
        pytest.fail("the export begins")
    assert tmp_path.is_dir()


@pytest.mark.parametrize("is_new", [True, False])
def test_an_export_that_fails_or_is_interrupted_leaves_nothing(tmp_path: Path, is_new: bool) -> None:
    """So the same command can be given again."""
    folder = tmp_path / "out"
    if not is_new:
        folder.mkdir()
    for fault in (KeyboardInterrupt, OSError):
        with pytest.raises(fault), new_folder(folder):
            (folder / "part").mkdir()
            (folder / "part" / "file").write_text("part")
            (folder / "file").write_text("part")
            raise fault
        assert folder.exists() != is_new and not list(tmp_path.rglob("*file"))
