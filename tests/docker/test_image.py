"""The Dockerfile installs the right packages, and the image is small and works on every architecture. docker/check.sh builds the image
itself, without a container engine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "cpu.Dockerfile").read_text()
BASE_BYTES = 125_000_000  # unpacked size of the base image python:3.12-slim-bookworm
LIMIT_BYTES = 450_000_000
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


def test_what_is_installed_leaves_the_image_below_450_mb(stripped: Path) -> None:
    assert "-type d -name tests -prune" in DOCKERFILE and all(f"-name '*{suffix}' -delete" in DOCKERFILE for suffix in REMOVED)
    own = (path for top in ("server", "compiler", "runtime", "deploy") for path in (ROOT / top).rglob("*"))
    num_bytes = sum(path.stat().st_size for path in own if path.is_file())
    for name in installed():
        # The Dockerfile removes the folders `tests` of packages, and files for type checkers and C compilers.
        files = [file for file in distribution(name).files or () if "tests" not in file.parts[:-1] and file.suffix not in REMOVED]
        paths = [Path(str(file.locate())) for file in files]
        paths = [stripped if path.name == stripped.name else path for path in paths]
        num_bytes += sum(path.stat().st_size for path in paths if path.is_file())
    assert BASE_BYTES + num_bytes < LIMIT_BYTES


@pytest.fixture(scope="module")
def stripped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a copy of the LLVM library, stripped with the command of the Dockerfile."""
    strip = shutil.which("strip")
    if strip is None:
        pytest.skip("strip is not installed (Debian: apt install binutils)")
    assert "-name libllvmlite.so -exec strip --strip-unneeded" in DOCKERFILE
    library = tmp_path_factory.mktemp("stripped") / "libllvmlite.so"
    (original,) = (Path(str(file.locate())) for file in distribution("llvmlite").files or () if file.name == library.name)
    subprocess.run([strip, "--strip-unneeded", "-o", library, original], check=True)
    return library


def test_a_stripped_llvm_loads(stripped: Path) -> None:
    program = f"import ctypes; print(ctypes.CDLL({str(stripped)!r}).LLVMPY_AddSymbol is not None)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "True\n"


def test_the_image_has_no_pip_and_no_tests_of_others() -> None:
    _, final = DOCKERFILE.rsplit("FROM ", 1)
    assert "venv --without-pip /opt/relaxserve" in DOCKERFILE and "pip" not in final
    assert "-name tests -prune" in DOCKERFILE


def test_nothing_in_the_image_names_an_architecture() -> None:
    commands = "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#"))
    assert re.findall(r"amd64|arm64|x86_64|aarch64", commands) == []
