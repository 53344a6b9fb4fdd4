"""The code of dataclasses is kept between starts, is checked before it is used, and makes the same classes."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import make_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from runtime import generated_code
from runtime.generated_code import DIGEST_BYTES, GeneratedCode
from runtime.launch import PACKAGES
from tests.disk import refuse_renames

ROOT = Path(__file__).parents[2]
IMPORTS = """
import sys
from runtime import generated_code
generated_code.recall("test")
import {module}
print(generated_code._of_process.num_compiled)
generated_code.keep()
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return tmp_path / "__pycache__" / "code"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    vars(dataclasses).pop("exec", None)
    generated_code._of_process = None


def used(path: Path) -> GeneratedCode:
    found = GeneratedCode(path)
    vars(dataclasses)["exec"] = found.exec
    return found


def made(**changes: Any) -> type:
    options = {"frozen": True, "slots": True, "order": True, **changes}
    return make_dataclass("Point", [("x", int), ("y", int, dataclasses.field(default=3))], **options)


def check(point: type) -> None:
    one = point(1)
    assert (one, repr(one), hash(one)) == (point(1, 3), "Point(x=1, y=3)", hash((1, 3))) and one < point(2)
    assert inspect.get_annotations(point.__init__) == {"x": int, "y": int, "return": None}
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.x = 2


def test_a_later_process_compiles_nothing(path: Path) -> None:
    first = used(path)
    check(made())
    assert first.num_compiled > 4
    first.keep()
    assert sorted(path.parent.iterdir()) == [path]
    second = used(path)
    check(made())
    assert second.num_compiled == 0
    second.keep()
    made(order=False, repr=False, frozen=False)
    made(kw_only=True)
    assert second.num_compiled > 0


def test_what_earlier_processes_kept_stays_up_to_a_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used(path), made(), made(kw_only=True)
    for options in ({}, {"kw_only": True}):
        own = used(path)
        made(**options)
        own.keep()
    both = used(path)
    made(), made(kw_only=True)
    assert both.num_compiled == 0
    monkeypatch.setattr(generated_code, "MOST", 3)
    third = used(path)
    make_dataclass("Other", ["z"])
    third.keep()
    fourth = used(path)
    make_dataclass("Other", ["z"])
    assert fourth.num_compiled == 0
    made()
    assert fourth.num_compiled > 0


@pytest.mark.parametrize("at", [0, DIGEST_BYTES, -1])
def test_a_damaged_file_is_not_used_and_is_written_again(path: Path, at: int) -> None:
    first = used(path)
    made()
    first.keep()
    sound = path.read_bytes()
    damaged = bytearray(sound)
    damaged[at] ^= 1
    for content in (damaged, sound[:-1], sound[:10], b""):
        path.write_bytes(content)
        own = used(path)
        check(made())
        assert own.num_compiled == first.num_compiled
        own.keep()
        again = used(path)
        made()
        assert again.num_compiled == 0


def test_nothing_is_written_where_python_writes_no_bytecode(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    own = used(path)
    check(made())
    own.keep()
    assert not path.parent.exists()


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path: Path, path: Path) -> None:
    (tmp_path / "__pycache__").write_text("a file")
    own = used(path)
    check(made())
    own.keep()
    check(made())


def test_a_full_disk_keeps_no_part_of_a_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = used(path)
    made()
    refuse_renames(monkeypatch, errno.ENOSPC, (path.name,))
    own.keep()
    assert [*path.parent.iterdir()] == []


def test_code_that_another_version_kept_is_not_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the file would grow with each version that is installed."""
    first = used(path)
    made()
    monkeypatch.setattr(generated_code, "_installed", lambda: "relaxserve-1.dist-info")
    first.keep()
    monkeypatch.setattr(generated_code, "_installed", lambda: "relaxserve-2.dist-info")
    second = used(path)
    make_dataclass("Other", ["z"])
    second.keep()
    third = used(path)
    make_dataclass("Other", ["z"])
    assert third.num_compiled == 0
    made()
    assert third.num_compiled == first.num_compiled


def started_modules() -> list[str]:
    """List the modules that the server runs as processes of their own."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return sorted({name for file in files for name in re.findall(r'\bcommand\(\s*"([\w.]+\.[\w.]+)"', file.read_text())})


@pytest.mark.parametrize("module", started_modules())
def test_each_process_that_recalls_code_keeps_it(module: str) -> None:
    """Otherwise each start of the process would compile all dataclasses, and keep the code of each in memory."""
    serving = {"deploy.cli": "deploy.serve"}  # the command that replicas run
    assert "generated_code.keep()" in Path(find_spec(serving.get(module, module)).origin).read_text()


def test_the_module_is_as_before_once_the_code_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated_code, "place", lambda process: path.with_name(process))
    generated_code.recall("a")
    assert "exec" in vars(dataclasses)
    check(made())
    generated_code.keep()
    assert "exec" not in vars(dataclasses) and [file.name for file in path.parent.iterdir()] == ["a"]
    check(made())
    generated_code.keep()  # a further call does nothing


def test_a_python_without_bytecode_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> str:
        raise NotImplementedError

    monkeypatch.setattr("importlib.util.cache_from_source", refuse)
    generated_code.recall("a")
    assert "exec" not in vars(dataclasses)
    generated_code.keep()


@pytest.mark.parametrize("module", ["deploy.worker", "server.app"])
def test_imports_of_a_second_start_compile_no_dataclass(module: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", IMPORTS.format(module=module)]
    numbers = [int(subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True).stdout) for _ in range(2)]
    assert numbers[0] > 500 and numbers[1] == 0
