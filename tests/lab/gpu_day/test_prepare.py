"""Test what travels to a machine with a card, and the environment that stands in for that machine here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.settings import SettingsError
from tests.lab.gpu_day import prepare, rehearse
from tests.lab.gpu_day.packages import PRESENT, carried, expected, pinned


def test_what_the_machine_lacks_is_carried_and_the_rest_is_expected_there() -> None:
    assert {"fastapi", "pydantic", "pydantic-core", "typing-inspection", "llguidance", "mako"} <= carried()
    assert not carried() & (PRESENT | expected()) and {"numpy", "llvmlite", "pytest", "hypothesis"} <= expected()


def test_every_package_has_its_pin_and_hashes() -> None:
    lines = pinned(["typer", "numpy"]).splitlines()
    assert [line.partition("==")[0] for line in lines if "==" in line] == ["numpy", "typer"]
    assert all("--hash=sha256:" in line for line in lines if "==" not in line) and len(lines) > 4
    with pytest.raises(AssertionError, match="pins no version of no-such-package"):
        pinned(["no-such-package"])


def test_without_a_python_of_the_machine_s_version_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "pythons", lambda: iter(["no-such-python", "false"]))
    with pytest.raises(
        SettingsError, match=r"needs Python 3\.12.*`pyenv install 3\.12` or `uv python install 3\.12`, or name it: GPU_DAY_PYTHON="
    ):
        prepare.found_python()


def test_a_named_python_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_DAY_PYTHON", "/somewhere/python")
    assert next(prepare.pythons()) == "/somewhere/python"


def test_what_travels_are_the_files_of_git_and_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "one.whl").write_text("wheel")
    monkeypatch.setattr(prepare, "CARRIED", tmp_path)
    names = {path.name for path in prepare.travelling()}
    assert {"one.whl", "pyproject.toml", "steps.py"} <= names and "pyvenv.cfg" not in names


def test_the_checkout_can_travel_with_what_the_machine_lacks() -> None:
    num_bytes = prepare.bytes_that_travel(prepare.listed("-c"), prepare.CARRIED_BYTES)
    assert num_bytes > prepare.CARRIED_BYTES + (1 << 20), "git lists the files of the checkout"


def test_a_checkout_that_is_too_large_is_refused_with_its_largest_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = [tmp_path / f"file-{number:02}" for number in range(12)]
    for number, path in enumerate(files):
        path.write_bytes(bytes(10 + number))
    monkeypatch.setattr(prepare, "ROOT", tmp_path)
    monkeypatch.setattr(prepare, "MOST_BYTES", sum(range(10, 22)) + 100)
    assert prepare.bytes_that_travel(files, 100) == prepare.MOST_BYTES
    with pytest.raises(SettingsError, match=r"expected at most .*: ignore or remove .* largest files are file-11 .*, file-10 ") as error:
        prepare.bytes_that_travel(files, 101)
    assert "file-04" in str(error.value) and "file-03" not in str(error.value)


def test_pycuda_is_built_once_for_all_checkouts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second checkout finds the build of the first. Another version of NumPy needs another build, which replaces the old one."""
    builds: list[Path] = []

    def wheel(folder: Path, python: str) -> Path:
        builds.append(folder)
        (folder / "pycuda-1.tar.gz").write_text("source")
        (folder / f"pycuda-1-{len(builds)}.whl").write_text("wheel")
        return folder / f"pycuda-1-{len(builds)}.whl"

    monkeypatch.setattr(prepare, "wheel", wheel)
    monkeypatch.setattr(prepare, "BUILT", tmp_path / "built")
    versions = ["numpy 1", "numpy 1", "numpy 2"]
    for number, (checkout, version) in enumerate(zip(["one", "two", "two"], versions, strict=True)):
        monkeypatch.setattr(prepare, "CARRIED", tmp_path / checkout)
        monkeypatch.setattr(prepare, "pinned", lambda _, version=version: version)
        (tmp_path / checkout / "wheels").mkdir(parents=True, exist_ok=True)
        prepare.build_pycuda("python")
        (found,) = (tmp_path / checkout / "wheels").iterdir()
        assert found.name == f"pycuda-1-{1 if number < 2 else 2}.whl" and (tmp_path / checkout / "pycuda-1.tar.gz").is_file()
    assert len(builds) == 2 and len([*(tmp_path / "built").iterdir()]) == 2


def test_a_build_that_fails_says_why_and_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wheel(folder: Path, python: str) -> Path:
        raise subprocess.CalledProcessError(1, ["pip"], stderr="c++: killed")

    monkeypatch.setattr(prepare, "wheel", wheel)
    monkeypatch.setattr(prepare, "BUILT", tmp_path)
    with pytest.raises(SettingsError, match=r"pycuda cannot be built for Python 3\.12: c\+\+: killed"):
        prepare.build_pycuda("python")
    assert not [*tmp_path.iterdir()]


def test_the_stand_in_for_the_sanitizer_runs_the_command_behind_its_options(tmp_path: Path) -> None:
    rehearse.lay_tools(tmp_path / "tools")
    tool = tmp_path / "tools" / "compute-sanitizer"
    ran = subprocess.run(
        [tool, "--tool", "memcheck", "--error-exitcode", "9", "sh", "-c", "echo ran; exit 3"], capture_output=True, text=True
    )
    assert ran.stdout == "ran\n" and ran.returncode == 3


def test_the_tests_of_the_checkout_come_before_an_installed_package_of_that_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkout, site = tmp_path / "checkout", tmp_path / "site"
    for folder, name in ((checkout, "ours"), (site, "theirs")):
        (folder / "tests").mkdir(parents=True)
        (folder / "tests" / f"{name}.py").write_text("")
    (site / "tests" / "__init__.py").write_text("")
    monkeypatch.setattr(prepare, "FIRST", checkout / ".gpu" / "first")

    def finds_ours(*paths: Path) -> bool:
        variables = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        return not subprocess.run(
            [sys.executable, "-S", "-c", "import tests.ours"], cwd=checkout, env=variables, capture_output=True
        ).returncode

    assert not finds_ours(site), "Python prefers the installed package"
    prepare.lay_tests()
    assert finds_ours(prepare.FIRST, site)


def test_a_second_rehearsal_leaves_the_folder_of_the_first_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "LOCK", tmp_path / "venv" / "rehearsal.lock")
    refused = pytest.raises(SettingsError, match=r"another `make gpu-day` uses \S+rehearsal; .*wait for its end, or stop it")
    with rehearse.alone(), refused, rehearse.alone():
        pass
    with rehearse.alone():
        pass


def test_what_rehearsals_keep_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / rehearse.KEPT / "cache" / "program"
    for path in (kept, tmp_path / "checkout" / "file"):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"1234")
    monkeypatch.setattr(rehearse, "MOST_KEPT_BYTES", 4)
    rehearse.clear(tmp_path)
    assert kept.exists() and [*tmp_path.iterdir()] == [tmp_path / rehearse.KEPT]
    monkeypatch.setattr(rehearse, "MOST_KEPT_BYTES", 3)
    rehearse.clear(tmp_path)
    assert not [*tmp_path.iterdir()]
