"""Every command and every snippet of the README works. They run on one server with the demo model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from compiler.frontend.family import DecoderFamily
from compiler.frontend.registry import FAMILIES, GGUF_FAMILIES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MODELS = (ROOT / "docs" / "models.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.xdist_group("demo server")


def test_the_readme_has_snippets() -> None:
    assert [language for language, _ in BLOCKS].count("python") >= 2
    assert len(README.splitlines()) < 250
    assert {language for language, _ in BLOCKS} == {"sh", "python"}


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=[f"{language}-{i}" for i, (language, _) in enumerate(BLOCKS)])
def test_snippet(number: int, demo_server: Any) -> None:
    language, text = BLOCKS[number]
    text = text.replace("http://127.0.0.1:8000", demo_server.url)
    command = [sys.executable, "-c", text] if language == "python" else ["bash", "-euc", text]
    assert demo_server.run(*command).strip()


def test_the_call_that_show_prints_works(demo_server: Any) -> None:
    _, _, call = demo_server.run("relaxserve", "show", "demo").rpartition("\ncurl ")
    call = f"curl {call}"
    assert demo_server.url in call
    assert "Paris" in demo_server.run("bash", "-euc", call)


def test_commands_of_make_exist(demo_server: Any) -> None:
    targets = re.findall(r"^    make (\w+)", README, re.MULTILINE)
    assert targets == ["serve", "test"]
    for target in targets:
        assert "pip install" in demo_server.run("make", "-n", "-W", "pyproject.toml", target)


def test_continuous_integration_runs_what_the_readme_says() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[-1] == "exec make test"


def test_a_part_of_the_tests_runs_as_on_the_least_cpu() -> None:
    """`make test` runs a part of the tests a second time, with code for the oldest supported CPU. Tests marked `slow` run only in `make
    test-slow`."""
    test, slow = (planned_by_make(target) for target in ("test", "test-slow"))
    assert re.search(r"^code=.* && RELAXSERVE_TARGET=(x86-64-v3|aarch64-neon) .*/pytest ", test, re.MULTILINE)
    assert "slow" not in test and '-m "slow or hypothesis"' in slow
    named = re.findall(r"(tests/[\w/.]+)", test)
    assert named and [path for path in named if not (ROOT / path).exists()] == []


def planned_by_make(target: str) -> str:
    """Return the commands that `make` would run for a target. Variables of an outer `make`, which may have started these tests, have no
    effect."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(["make", "-n", target, "ARGS="], cwd=ROOT, env=plain, capture_output=True, text=True, check=True).stdout


def test_the_table_of_families_is_that_of_the_registry() -> None:
    def names(found: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in sorted(found))

    decoders = {name for name, family in FAMILIES.items() if isinstance(family, DecoderFamily)}
    assert f"| decoder | {names(decoders)} |\n| encoder | {names(FAMILIES.keys() - decoders)} |\n" in MODELS
    assert f"GGUF files of these architectures: {names(GGUF_FAMILIES)}." in " ".join(MODELS.split())
