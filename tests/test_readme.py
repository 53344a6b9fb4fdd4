"""Every command and every snippet of the README is run against one server with the demo model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.xdist_group("demo server")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("RELAXSERVE_")}
    return {**own, "PATH": f"{BIN}:{os.environ['PATH']}", "RELAXSERVE_CACHE": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def banner(environment: dict[str, str]) -> Iterator[str]:
    """What `relaxserve serve` says when it is ready."""
    command = [BIN / "relaxserve", "serve", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = ""
        while "-d '" not in said:
            line = server.stderr.readline()
            assert line, f"the server ended: {said}"
            said += line
        yield said
        server.terminate()
        server.communicate(timeout=60)


@pytest.fixture(scope="module")
def url(banner: str) -> str:
    found = re.search(r"relaxserve at (http://\S+?):? ", banner)
    assert found is not None, banner
    return found[1].rstrip(":")


def run(command: list[str | Path], environment: dict[str, str]) -> str:
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def test_the_readme_has_snippets() -> None:
    assert [language for language, _ in BLOCKS].count("python") >= 3
    assert {language for language, _ in BLOCKS} == {"sh", "python"}


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=[f"{language}-{i}" for i, (language, _) in enumerate(BLOCKS)])
def test_snippet(number: int, url: str, environment: dict[str, str]) -> None:
    language, text = BLOCKS[number]
    text = text.replace("http://127.0.0.1:8000", url)
    command: list[str | Path] = [sys.executable, "-c", text] if language == "python" else ["bash", "-euc", text]
    assert run(command, {**environment, "RELAXSERVE_URL": url}).strip()


def test_the_printed_call_works(banner: str, url: str, environment: dict[str, str]) -> None:
    call = banner[banner.index("try:\n") + len("try:\n") :]
    assert url in call
    assert "Paris" in run(["bash", "-euc", call], environment)


def test_commands_of_make_exist(environment: dict[str, str]) -> None:
    targets = re.findall(r"^    make (\w+)", README, re.MULTILINE)
    assert targets == ["serve", "test"]
    for target in targets:
        assert "pip install" in run(["make", "-n", "-W", "pyproject.toml", target], environment)


def test_continuous_integration_runs_what_the_readme_says() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines[-1] == "exec make test"


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_options_that_are_mentioned_exist(environment: dict[str, str]) -> None:
    for command, options in re.findall(r"^    relaxserve (\w+)((?: .*)?)$", README, re.MULTILINE):
        said = run([BIN / "relaxserve", command, "--help"], {**environment, "COLUMNS": "200"})
        for option in re.findall(r"--[\w-]+", options):
            assert option in said, f"{command} has no {option}"
