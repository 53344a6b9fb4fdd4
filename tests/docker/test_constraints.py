"""Each file that pip installs has a hash in constraints.txt: every call of pip demands it, and a changed file is refused."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import zipfile
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
ENTRY = re.compile(r"^([\w.-]+)==([\w.]+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n", re.MULTILINE)
SCRIPTS = [
    ROOT / "Makefile",
    ROOT / ".ci" / "run",
    *sorted((ROOT / "docker").glob("*.sh")),
    *sorted((ROOT / "docker").glob("*.Dockerfile")),
]
MAKEFILE = SCRIPTS[0].read_text()


def test_each_pin_has_hashes() -> None:
    assert ENTRY.sub("", CONSTRAINTS) == ""
    names = [canonicalize_name(entry[1]) for entry in ENTRY.finditer(CONSTRAINTS)]
    assert len(set(names)) == len(names)
    assert {"pip", "setuptools", "uv", "pip-audit", "numpy"} <= set(names)


EXTRAS = ["hub", "otel", "fleet", "ray", "media", "test", "clients", "reach", "cuda"]


def requirements(extras: list[str]) -> list[str]:
    return runpy.run_path(str(ROOT / "docker" / "requirements.py"))["requirements"](extras)


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_all_dependencies_are_pinned(python: str, machine: str) -> None:
    pins = {canonicalize_name(entry[1]): entry[2] for entry in ENTRY.finditer(CONSTRAINTS)}
    asked = [(Requirement(text), "") for text in requirements(EXTRAS)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while asked:
        requirement, extra = asked.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        values = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine, "extra": extra}
        if (requirement.marker is not None and not requirement.marker.evaluate(values)) or (name, extras) in seen:
            continue
        seen.add((name, extras))
        assert name in pins, f"{requirement} is not pinned"
        assert requirement.specifier.contains(pins[name], prereleases=True), f"{requirement} is pinned at {pins[name]}"
        try:
            needed = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # a package of an extra that is not installed here; pip then names what is not pinned
        asked += [(Requirement(text), one) for text in needed for one in ("", *extras)]


def test_an_unknown_extra_is_refused() -> None:
    with pytest.raises(SystemExit, match="the extra is 'hubs'; expected one of clients, cuda, dynamo, fleet, hub, "):
        requirements(["hubs"])


def test_a_requirement_is_one_word_for_the_shell() -> None:
    assert [text for text in requirements(EXTRAS) if text.split() != [text]] == []


def calls(path: Path) -> list[str]:
    """Return the commands of a file that let pip install, download or build, with the variables of the file in place."""
    text = re.sub(r"^\s*(#|echo ).*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    given = dict(re.findall(r"^(\w+) *:?= *(.*)$", text, re.MULTILINE)) | dict(re.findall(r'\b(CHECK)="([^"]*)"', text))
    for _ in range(3):
        text = re.sub(r"\$\(?(\w+)\)?", lambda found: given.get(found[1], found[0]), text)
    commands = re.split(r"&&|\|\||\n", text)
    return [command for command in commands if re.search(r"\bpip\b.*\b(install|download|wheel)\b", command)]


def test_each_call_of_pip_demands_hashes() -> None:
    """The exception is the project's own wheel, which has no hash. When pip installs it, pip neither looks for nor installs anything
    else."""
    found = {path.name: calls(path) for path in SCRIPTS}
    assert {name: len(commands) for name, commands in found.items() if commands} == {
        "Makefile": 12,
        "aarch64.sh": 1,
        "cpu.Dockerfile": 5,
        "cuda.Dockerfile": 4,
    }
    for name, commands in found.items():
        for command in commands:
            own = "--no-index" in command and "--no-deps" in command
            assert own or "--require-hashes" in command, f"{name}: {command}"
            assert own or "-r " in command or ("--only-binary :all:" in command and "-c constraints.txt" in command), f"{name}: {command}"


def test_each_call_of_pip_in_the_build_of_pycuda_demands_hashes() -> None:
    source = (ROOT / "tests" / "gpu" / "build_pycuda.py").read_text()
    lines = [line for line in source.splitlines() if re.match(r"    pip\(", line)]
    assert len(lines) == 5
    assert [line for line in lines if "*CHECK" not in line and not ("--no-index" in line and "--no-deps" in line)] == []


def test_pip_itself_is_current_and_checked() -> None:
    """`make setup` first replaces the pip that Python brings."""
    planned = subprocess.run(["make", "-n", "-B", "setup"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    first = next(line for line in planned.splitlines() if "pip install" in line)
    extract, install = first.split(" && ")
    assert install.endswith("--require-hashes -r .venv/pip.txt")
    pip = subprocess.run(["sh", "-c", extract.partition(">")[0]], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"pip==\d{2}[\d.]+( \\\n    --hash=sha256:\w{64})+\n", pip)


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """Write a wheel of a made-up package. Return its path."""
    wheel = tmp_path / "wheels" / "made_up-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("made_up.py", "")
        file.writestr("made_up-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
        file.writestr("made_up-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("made_up-1.0.dist-info/RECORD", "")
    return wheel


def install(wheel: Path, constraint: str) -> Any:
    """Run pip with the options of the Makefile in a folder whose constraints.txt has this line."""
    options = re.search(r"^CHECK *:= (.*)$", MAKEFILE, re.MULTILINE)
    assert options is not None
    folder = wheel.parents[1]
    (folder / "constraints.txt").write_text(constraint)
    offline = ["--no-index", "--find-links", wheel.parent, "--target", folder / "installed", "made-up"]
    return subprocess.run(
        [sys.executable, "-m", "pip", "install", *shlex.split(options[1]), *offline], cwd=folder, capture_output=True, text=True
    )


def test_pip_accepts_the_file_of_the_hash(made_up: Path) -> None:
    ended = install(made_up, f"made-up==1.0 --hash=sha256:{sha256(made_up.read_bytes()).hexdigest()}\n")
    assert ended.returncode == 0, f"{ended.stderr}\nAfter a change of constraints.txt, `make setup` renews pip."


def test_pip_refuses_a_changed_file(made_up: Path) -> None:
    digest = sha256(made_up.read_bytes()).hexdigest()
    with zipfile.ZipFile(made_up, "a") as file:
        file.writestr("planted.py", "")
    ended = install(made_up, f"made-up==1.0 --hash=sha256:{digest}\n")
    assert ended.returncode != 0 and "DO NOT MATCH THE HASHES" in ended.stderr
    assert not (made_up.parents[1] / "installed").exists()


def test_pip_refuses_a_package_without_hash(made_up: Path) -> None:
    ended = install(made_up, "made-up==1.0\n")
    assert ended.returncode != 0 and "In --require-hashes mode, all requirements must" in ended.stderr
