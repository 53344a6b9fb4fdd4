"""The wheel is built and installed. It contains the right files, and it works although other installed packages have the same names as
ours."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.conftest import ROOT, CommandLine

TOPS = ("server", "compiler", "runtime", "deploy")
OF_HOSTS = ("deploy/compose.yaml", *(f"deploy/{name}/" for name in ("grafana", "kubernetes", "nginx", "prometheus", "systemd")))
MODULES = {str(path.relative_to(ROOT)) for top in TOPS for path in (ROOT / top).rglob("*.py")}


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for top in TOPS:
        shutil.copytree(ROOT / top, source / top, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps"]
    subprocess.run([*pip, "-w", folder, source], check=True, stdout=subprocess.DEVNULL)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def contents(wheel_file: Path) -> set[str]:
    with zipfile.ZipFile(wheel_file) as archive:
        return set(archive.namelist())


def test_the_wheel_has_all_modules_of_the_product_and_nothing_of_the_tests(contents: set[str]) -> None:
    assert {"/".join(path.split("/")[:3]) for path in MODULES - contents} == {"deploy/entry/relaxserve"}
    assert {"relaxserve/__init__.py", "relaxserve/__main__.py"} <= contents, "the entry package"
    assert [path for path in contents if path.startswith("tests/")] == []


def test_the_wheel_imports_nothing_that_it_leaves_out(contents: set[str]) -> None:
    absent = {path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in MODULES - contents} | {"tests"}
    ours = sorted(MODULES & contents)
    assert [(path, name) for path in ours for name in imported(ROOT / path) if name in absent] == []


def imported(path: Path) -> list[str]:
    """Return the names of all modules that a file imports. Names imported from a module are included, because they may be modules too."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(module)):
                names += [module, module.partition(".")[0], *(f"{module}.{alias.name}" for alias in node.names)]
            case _:
                pass
    return names


def test_the_wheel_has_the_files_that_are_no_code(contents: set[str]) -> None:
    """The wheel contains each file of the packages that is not Python, except those that configure other programs."""
    files = {path.relative_to(ROOT).as_posix() for top in TOPS for path in (ROOT / top).rglob("*") if path.is_file()}
    data = {path for path in files if "/__pycache__/" not in path and not path.endswith(".py") and not path.startswith(OF_HOSTS)}
    assert len(data) > 70 and sorted(data - contents) == []


# --- the installed wheel -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installation(wheel_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a new virtual environment in which the wheel is installed. The wheel's dependencies are those of the environment that runs the
    tests."""
    folder = tmp_path_factory.mktemp("installation") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel_file], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (dependencies,) = {Path(path) for path in sys.path if path.endswith("site-packages") and path.startswith(sys.prefix)}
    (packages / "dependencies.pth").write_text(
        f"{dependencies}\n"
    )  # Python does not read .pth files in that folder, so this checkout is not on the path
    return folder


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Return a working directory that contains a package for each of our top-level names. Importing such a package ends the process."""
    for top in TOPS:
        (tmp_path / top).mkdir()
        (tmp_path / top / "__init__.py").write_text(f"raise SystemExit('the {top} of somebody else')\n")
    return tmp_path


@pytest.mark.parametrize("start", ["relaxserve", "python -m relaxserve"])
def test_the_demo_is_served_amid_packages_of_the_same_names(
    start: str, installation: Path, hostile: Path, command_line: CommandLine
) -> None:
    """The demo model can be served from a working directory that contains packages with our names. The request has a schema, so the test
    also covers the constraint process, which the worker starts."""
    with serving(start, installation, hostile, command_line) as url:
        schema = {
            "type": "object",
            "properties": {"n": {"type": "integer", "maximum": 99}},
            "required": ["n"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        question = {"messages": [{"role": "user", "content": "How many legs does a spider have?"}], "response_format": form}
        request = Request(f"{url}/v1/chat/completions", json.dumps(question).encode(), {"content-type": "application/json"})
        with urlopen(request, timeout=120) as answer:
            content = json.load(answer)["choices"][0]["message"]["content"]
        assert isinstance(json.loads(content)["n"], int)


@contextmanager
def serving(start: str, installation: Path, folder: Path, command_line: CommandLine) -> Iterator[str]:
    environment = {**command_line.environment, "PATH": f"{installation / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    command = [*start.split(), "serve", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = ""
        try:
            while (found := re.search(r"relaxserve at (http://[\w.:]+):", said)) is None:
                line = server.stderr.readline()
                said += line
                assert line, said
            yield found[1]
        finally:
            server.terminate()
            server.communicate(timeout=60)


def test_a_file_that_another_package_has_overwritten_is_named(installation: Path, tmp_path: Path) -> None:
    copy = tmp_path / "venv"
    shutil.copytree(installation, copy, symlinks=True)
    (packages,) = (copy / "lib").glob("python*/site-packages")
    (packages / "server" / "app.py").write_text("# of somebody else\n")
    ran = subprocess.run([copy / "bin" / "python", "-m", "relaxserve", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "server/app.py is not the file that relaxserve installed: another package has overwritten it" in ran.stderr
    assert "in a checkout, install relaxserve by itself (pipx install .," in ran.stderr, "no package index has it"
    worker = [copy / "bin" / "python", "-P", packages / "runtime" / "launch.py", "deploy.worker", "0"]
    assert "server/app.py" in subprocess.run(worker, cwd=tmp_path, capture_output=True, text=True).stderr


def test_a_package_that_was_imported_before_is_named(installation: Path, hostile: Path) -> None:
    (hostile / "server" / "__init__.py").write_text("")
    program = "import sys; sys.path.insert(0, '.'); import server, relaxserve; relaxserve.main()"
    ran = subprocess.run([installation / "bin" / "python", "-c", program], cwd=hostile, capture_output=True, text=True)
    assert ran.returncode == 1 and "the package 'server' was imported from" in ran.stderr
