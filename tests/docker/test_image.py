"""The Dockerfile installs the right packages, and the image is small and works on every architecture. docker/check.sh builds the image
itself, without a container engine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, PackagePath, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "cpu.Dockerfile").read_text()
BASE_BYTES = 125_000_000  # unpacked size of the base image python:3.12-slim-bookworm
LIMIT_BYTES = 450_000_000
LIBRARIES = {"llvmlite": "libllvmlite.so", "tokenizers": "tokenizers.abi3.so", "hf-xet": "hf_xet.abi3.so"}  # large ones, by package
REMOVED = (".pyi", ".a", ".pxd")  # suffixes of files that the Dockerfile removes


def installed() -> set[str]:
    """Return the names of all packages that `pip install` in the Dockerfile installs."""
    found: set[str] = set()
    extras = re.search(r"^ARG EXTRAS=([\w,]+)$", DOCKERFILE, re.MULTILINE)
    assert extras is not None
    queue = [("relaxserve", extra) for extra in extras[1].split(",")]
    while queue:
        name, extra = queue.pop()
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:
            pytest.skip(f"{name}, which is in the image, is not installed here")
        for requirement in map(Requirement, requires):
            needed = canonicalize_name(requirement.name)
            if (requirement.marker is None or requirement.marker.evaluate({"extra": extra})) and needed not in found:
                found.add(needed)
                queue.append((needed, ""))
    return found


def is_removed(file: PackagePath) -> bool:
    return "tests" in file.parts[:-1] or file.suffix in REMOVED or ("include" in file.parts[:-1] and file.suffix == ".h")


def test_what_is_installed_leaves_the_image_below_450_mb(stripped: dict[str, Path]) -> None:
    assert "-type d -name tests -prune" in DOCKERFILE and all(f"-name '*{suffix}' -delete" in DOCKERFILE for suffix in REMOVED)
    assert "-path '*/include/*.h' -delete" in DOCKERFILE
    own = (path for top in ("server", "compiler", "runtime", "deploy") for path in (ROOT / top).rglob("*"))
    # Besides bytecode, a checkout may have kept code of dataclasses beside it; an image has none, because it is read-only.
    own = (path for path in own if path.parent.name != "__pycache__" or path.suffix == ".pyc")
    num_bytes = sum(path.stat().st_size for path in own if path.is_file())
    for name in installed():
        # The Dockerfile removes the folders `tests` of packages, and files for type checkers and C compilers.
        files = [file for file in distribution(name).files or () if not is_removed(file)]
        paths = [Path(str(file.locate())) for file in files]
        paths = [stripped.get(path.name, path) for path in paths]
        num_bytes += sum(path.stat().st_size for path in paths if path.is_file())
    assert BASE_BYTES + num_bytes < LIMIT_BYTES


@pytest.fixture(scope="module")
def stripped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return copies of large libraries by name, stripped with the command of the Dockerfile."""
    strip = shutil.which("strip")
    if strip is None:
        pytest.skip("strip is not installed (Debian: apt install binutils)")
    names = " -o ".join(f"-name {name}" for name in LIBRARIES.values())
    assert f"\\( {names} \\) -exec strip --strip-unneeded {{}} +" in DOCKERFILE
    folder, found = tmp_path_factory.mktemp("stripped"), dict[str, Path]()
    for package, name in LIBRARIES.items():
        (original,) = (Path(str(file.locate())) for file in distribution(package).files or () if file.name == name)
        found[name] = folder / name
        subprocess.run([strip, "--strip-unneeded", "-o", found[name], original], check=True)
    return found


def test_a_stripped_llvm_loads(stripped: dict[str, Path]) -> None:
    program = f"import ctypes; print(ctypes.CDLL({str(stripped['libllvmlite.so'])!r}).LLVMPY_AddSymbol is not None)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "True\n"


@pytest.mark.parametrize("package", ["tokenizers", "hf-xet"])
def test_a_stripped_module_loads(package: str, stripped: dict[str, Path]) -> None:
    library = stripped[LIBRARIES[package]]
    name = library.name.partition(".")[0]
    program = (
        f"import importlib.util as u; s = u.spec_from_file_location({name!r}, {str(library)!r}); print(u.module_from_spec(s).__name__)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == f"{name}\n"


def test_the_environment_of_the_image_has_no_pip_and_no_tests_of_others() -> None:
    _, final = DOCKERFILE.rsplit("FROM ", 1)
    assert "venv --without-pip /opt/relaxserve" in DOCKERFILE and "pip" not in final
    assert "-name tests -prune" in DOCKERFILE


def test_nothing_in_the_image_names_an_architecture() -> None:
    commands = "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#"))
    assert re.findall(r"amd64|arm64|x86_64|aarch64", commands) == []


def test_the_health_check_is_a_module_of_ours() -> None:
    """A folder `deploy` in the working directory is not imported instead."""
    found = re.search(r"^HEALTHCHECK .* CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found is not None and json.loads(found[1]) == ["python3", "-I", "-m", "deploy.health"]
