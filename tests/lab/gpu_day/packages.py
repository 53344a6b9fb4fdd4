"""Which packages a machine with a card is expected to have, and which must be carried to it. Both are pinned as in constraints.txt."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Iterable, Mapping

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.gpu.driver.library import ROOT

NAMES = """
annotated-doc anyio certifi click execnet filelock fsspec h11 hf-xet httpcore httpx huggingface-hub hypothesis idna iniconfig jinja2
llvmlite markdown-it-py markupsafe mdurl ml-dtypes numpy packaging pip pluggy prometheus-client pygments pytest pytest-xdist pyyaml
regex requests rich safetensors setuptools shellingham sortedcontainers tokenizers tqdm typer typing-extensions urllib3 wheel
"""
PRESENT = frozenset(NAMES.split())  # a machine with PyTorch, JAX and Triton has them
OF_TESTS = ("pytest", "pytest-xdist", "hypothesis", "httpx", "packaging")
OF_PYCUDA = ("mako", "pytools")  # packages that pycuda imports; pycuda itself is built from its source
OF_PIP = ("setuptools",)  # builds pycuda from its source
# Values of the environment markers of requirements (PEP 508) on the machine with the card.
MACHINE: Mapping[str, str] = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
}


def carried() -> set[str]:
    """Return the packages that the server and its tests need and that the machine lacks."""
    return closure(needed(), PRESENT) - PRESENT


def expected() -> set[str]:
    """Return those packages of the machine that the server and its tests need, with all that they need themselves."""
    return closure(needed(), frozenset()) - carried()


def needed() -> list[str]:
    dependencies: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [*dependencies, *OF_TESTS, *OF_PYCUDA, *OF_PIP]


def closure(names: Iterable[str], without: frozenset[str]) -> set[str]:
    """Return the packages with all that they require, as this environment knows it. Do not look into packages of `without`."""
    found: set[str] = set()
    asked: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement(name) for name in names]
    while left:
        requirement = left.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in asked:
            continue
        asked.add((name, extras))
        found.add(name)
        if name not in without:
            left += [inner for text in importlib.metadata.requires(name) or () if applies(inner := Requirement(text), extras)]
    return found


def applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**MACHINE, "extra": extra}) for extra in {"", *extras})


def pinned(names: Iterable[str]) -> str:
    """Return the lines of constraints.txt for the packages, with their hashes."""
    pins = {pin[1]: pin[0] for pin in re.finditer(r"^(\S+)==(?:.*\\\n)*.*\n", (ROOT / "constraints.txt").read_text(), re.MULTILINE)}
    missing = sorted(set(names) - pins.keys())
    assert not missing, f"constraints.txt pins no version of {', '.join(missing)}"
    return "".join(pins[name] for name in sorted(names))
