"""Prepare a visit to a machine with a card that can fetch nothing: fill the folder .gpu, which travels with the checkout.

    wheels/             the packages that the machine lacks, and pycuda built against NVIDIA's headers
    pycuda-*.tar.gz     the source of pycuda, from which the machine builds it if the wheel does not work there
    first/tests         a package that leads to the tests of the checkout: without it, Python would prefer any package of this name that is
                        installed on the machine, since the folder tests is no package
    commit              the commit of the checkout

Here, a virtual environment with the packages that the machine has stands in for the machine. Fetched packages are kept for the next time.
The build of pycuda is kept in the user's cache, so that other checkouts use it, too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from runtime.flags import xdg_folder
from server.settings import SettingsError
from tests.gpu.build_pycuda import HEADERS, pip, wheel
from tests.gpu.driver.library import ROOT
from tests.lab.gpu_day.day import CARRIED, FIRST, SAID_BYTES
from tests.lab.gpu_day.packages import carried, expected, pinned
from tests.lab.reporting.record import commit_name

VERSION = "3.12"  # the machine's Python
NAMED = "GPU_DAY_PYTHON"  # environment variable with the path of an interpreter of that version
BARE = ROOT / ".venv" / f"bare-{VERSION}"
BUILT = xdg_folder("XDG_CACHE_HOME", ".cache") / "relaxserve-lab"  # builds that all checkouts of a user share
MOST_BYTES = 64 << 20  # checkout and .gpu together
CARRIED_BYTES = 11 << 20  # .gpu alone; it has 10.4 MiB
NAMED_FILES = 8  # files that the error names if too much would travel
CHECK = ("--require-hashes", "--only-binary", ":all:", "--no-deps")
PACKAGE = """from pathlib import Path

__path__ = [str(Path(__file__).parents[3] / "tests")]
"""
MISSING = (
    f"make gpu-day needs Python {VERSION}, the version of the machine with the card: PATH, pyenv and uv have none; "
    f"install one with `pyenv install {VERSION}` or `uv python install {VERSION}`, or name it: {NAMED}=PATH make gpu-day"
)


def prepare() -> str:
    """Fill the folder. Return the interpreter of the environment that stands in for the machine."""
    python = bare_python()
    fetch_wheels(python)
    build_pycuda(python)
    lay_tests()
    (CARRIED / "commit").write_text(commit_name() + "\n")
    carried_bytes = sum(path.stat().st_size for path in CARRIED.rglob("*") if path.is_file())
    if carried_bytes > CARRIED_BYTES:
        raise SettingsError(
            f"{CARRIED.name} has {carried_bytes >> 10:,} KiB; expected at most {CARRIED_BYTES >> 10:,} KiB, for which a test of the "
            "checkout keeps room: raise CARRIED_BYTES in tests/lab/gpu_day/prepare.py"
        )
    num_bytes = bytes_that_travel(listed("-co", "--exclude-standard"), carried_bytes)
    print(f"{CARRIED.name} is ready; with the checkout {num_bytes >> 20} MiB travel", flush=True)
    return python


def lay_tests() -> None:
    package = FIRST / "tests"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(PACKAGE)


def travelling() -> list[Path]:
    """Return the files that travel: those that git lists, and .gpu."""
    return [path for path in (*listed("-co", "--exclude-standard"), *CARRIED.rglob("*")) if path.is_file()]


def listed(*options: str) -> list[Path]:
    """Return the files of the checkout that `git ls-files` lists."""
    names = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", *options], capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def bytes_that_travel(checkout: Iterable[Path], carried_bytes: int) -> int:
    """Return the bytes of the files of the checkout and of .gpu. Raise SettingsError if there are too many."""
    sizes = {path: path.stat().st_size for path in checkout}
    num_bytes = sum(sizes.values()) + carried_bytes
    if num_bytes > MOST_BYTES:
        largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:NAMED_FILES]
        raise SettingsError(
            f"checkout and .gpu have {num_bytes / 2**20:.1f} MiB; expected at most {MOST_BYTES / 2**20:.1f} MiB, because more does not "
            "travel to the machine with the card: ignore or remove what is not needed, and draw the weights of small models from a seed "
            "(tests/golden/drawn.py); the largest files are "
            + ", ".join(f"{os.path.relpath(path, ROOT)} ({sizes[path] / 2**20:.1f} MiB)" for path in largest)
        )
    return num_bytes


def pythons() -> Iterator[str]:
    """Yield the interpreters that may be of the right version."""
    if named := os.environ.get(NAMED):
        yield named
    yield f"python{VERSION}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    uv = Path.home() / ".local/share/uv/python"
    for folder, pattern in ((pyenv, f"{VERSION}*/bin/python"), (uv, f"cpython-{VERSION}*/bin/python{VERSION}")):
        yield from map(str, sorted(folder.glob(pattern)))


def found_python() -> str:
    ask = f"import sys, venv; raise SystemExit('.'.join(map(str, sys.version_info[:2])) != '{VERSION}')"
    for python in pythons():
        if (path := shutil.which(python)) and not subprocess.run([path, "-c", ask], capture_output=True).returncode:
            return path
    raise SettingsError(MISSING)


def bare_python() -> str:
    """Return the interpreter of an environment with just the packages that the machine has."""
    python, pins, kept = BARE / "bin" / "python", pinned(expected()), BARE / "pins.txt"
    if not kept.is_file() or kept.read_text() != pins:
        print(f"making {BARE.relative_to(ROOT)}", flush=True)
        subprocess.run([found_python(), "-m", "venv", "--clear", BARE], check=True)
        install_pins(pins, python, "install")
        kept.write_text(pins)
    return str(python)


def fetch_wheels(python: str) -> None:
    wheels, pins, kept = CARRIED / "wheels", pinned(carried()), CARRIED / "pins.txt"
    if not kept.is_file() or kept.read_text() != pins:
        print("fetching the packages that the machine lacks", flush=True)
        shutil.rmtree(wheels, ignore_errors=True)
        wheels.mkdir(parents=True)
        install_pins(pins, Path(python), "download", "-d", str(wheels))
        kept.write_text(pins)


def install_pins(pins: str, python: Path, *command: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(pins)
        file.flush()
        pip(*command, *CHECK, "-r", file.name, python=str(python))


def build_pycuda(python: str) -> None:
    """Copy pycuda's wheel and source to .gpu, in place of other versions. Build them if no checkout of this user has built them yet."""
    kept = built_folder()
    if not kept.is_dir():
        print("building pycuda for that Python, once: a minute or two", flush=True)
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as name:
            whole = Path(name, "whole")
            whole.mkdir()
            try:
                built = wheel(Path(name), python)
            except subprocess.CalledProcessError as error:
                raise SettingsError(f"pycuda cannot be built for Python {VERSION}: {error.stderr.strip()[-SAID_BYTES:]}") from None
            for file in (built, *Path(name).glob("pycuda-*.tar.gz")):
                shutil.copy(file, whole)
            try:
                whole.rename(kept)
            except OSError:
                if not kept.is_dir():  # else another checkout has built it at the same time
                    raise
    for pattern, folder in (("pycuda-*.whl", CARRIED / "wheels"), ("pycuda-*.tar.gz", CARRIED)):
        for old in folder.glob(pattern):
            old.unlink()
        for file in kept.glob(pattern):
            shutil.copy(file, folder)


def built_folder() -> Path:
    """Return the folder of pycuda's build: a build depends on the versions of pycuda, NumPy, NVIDIA's headers and Python."""
    versions = pinned(["pycuda", "numpy", "setuptools", *HEADERS]) + VERSION
    return BUILT / f"pycuda-{hashlib.sha256(versions.encode()).hexdigest()[:16]}"
