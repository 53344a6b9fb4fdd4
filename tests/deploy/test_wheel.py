"""What the wheel contains: all that serving imports, and nothing of how the demo model was made or what benchmarks compare with."""

from __future__ import annotations

import ast
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOPS = ("server", "compiler", "runtime", "deploy")
MODULES = [path.relative_to(ROOT) for top in TOPS for path in sorted((ROOT / top).rglob("*.py"))]


@pytest.fixture(scope="module")
def packaging() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


@pytest.fixture(scope="module")
def wheel(packaging: dict[str, Any]) -> set[Path]:
    """The Python files of the packages that setuptools finds: those that a pattern includes and none excludes."""
    find = packaging["packages"]["find"]

    def matches(package: str, patterns: list[str]) -> bool:
        return any(fnmatchcase(package, pattern) for pattern in patterns)

    packages = {path: ".".join(path.parent.parts) for path in MODULES}
    return {path for path, package in packages.items() if matches(package, find["include"]) and not matches(package, find["exclude"])}


def test_the_wheel_leaves_out_training_exams_and_peers_alone(wheel: set[Path]) -> None:
    left_out = {path.parts[:3] for path in MODULES if path not in wheel}
    assert left_out == {("deploy", "demo", "training"), ("deploy", "bench", "peers")}
    assert not {path.stem for path in wheel} & {"train", "exam", "evaluate", "corpus", "openvino", "llama_cpp"}


def test_the_wheel_imports_nothing_that_it_leaves_out(wheel: set[Path]) -> None:
    absent = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in MODULES if path not in wheel}
    assert [(str(path), name) for path in sorted(wheel) for name in imported(path) if name in absent] == []


def imported(path: Path) -> list[str]:
    """The names of modules, and of what is imported from them, which may be modules too."""
    names: list[str] = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        match node:
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(module)):
                names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
            case _:
                pass
    return names


def test_the_wheel_has_the_files_that_are_no_code(packaging: dict[str, Any], wheel: set[Path]) -> None:
    """Pages of the console, native code of the thread team, and the demo model."""
    data = packaging["package-data"]
    found = {
        file.relative_to(ROOT)
        for folder in {path.parent for path in wheel}
        for pattern in data["*"]
        for file in (ROOT / folder).glob(pattern)
    }
    assert {".html", ".ll"} <= {file.suffix for file in found}
    model = {file.name for pattern in data["deploy.demo"] for file in (ROOT / "deploy" / "demo").glob(pattern)}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= model
