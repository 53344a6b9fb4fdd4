"""Commands, options, settings, metrics and examples that the documents name exist and work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli.bench import modules
from deploy.settings import CONFIG_VARIABLE, KEY_VARIABLE, PREFIX, SETTINGS, URL_VARIABLE, read_config
from runtime.flags import SWITCHES
from tests.lab.__main__ import known

pytestmark = pytest.mark.xdist_group("demo server")

ROOT = Path(__file__).parent.parent
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
BLOCKS = [
    pytest.param(language, text, id=f"{page}-{number}")
    for page, whole in PAGES.items()
    if page.startswith("docs/")
    for number, (language, text) in enumerate(re.findall(r"^```(\w+)\n(.*?)^```$", whole, re.MULTILINE | re.DOTALL))
]
SHELL = [text for whole in PAGES.values() for text in re.findall(r"^```sh\n(.*?)^```$", whole, re.MULTILINE | re.DOTALL)]
# Documents write commands in indented blocks or between backticks. The tests indent shell snippets before they search them for commands.
COMMAND = re.compile(r"(?:^ {4}|`)relaxserve ((?:cache )?[a-z]+)([^`\n|#]*)", re.MULTILINE)
MAKE = re.compile(r"(?:^ {4}|`)make (?:[A-Z]+=\S+ )?([a-z.][\w/.-]*)", re.MULTILINE)
FROM_COMPOSE = {f"{PREFIX}ADMIN_KEY"}


@pytest.mark.parametrize(("language", "text"), [block for block in BLOCKS if block.values[0] == "sh"])
def test_a_shell_snippet_runs(language: str, text: str, demo_server: Any) -> None:
    assert demo_server.run("bash", "-euc", text.replace("http://127.0.0.1:8000", demo_server.url)).strip()


@pytest.mark.parametrize(("language", "text"), [block for block in BLOCKS if block.values[0] == "yaml"])
def test_a_configuration_is_read(language: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(text)
    _, specs = read_config(tmp_path / "models.yaml")
    assert specs


def test_languages_of_snippets_are_those_that_are_tested() -> None:
    """Every language of a snippet in the documents has a test. `test_clients.py` runs Python, and `deploy/export/test_page.py` runs
    JavaScript in a browser. The only JSON snippet shows the format of errors."""
    assert {block.values[0] for block in BLOCKS} <= {"sh", "yaml", "python", "json", "js"}


def test_commands_and_options_exist(demo_server: Any) -> None:
    named: dict[str, set[str]] = {}
    indented = ["    " + line for text in SHELL for line in text.splitlines()]
    for command, rest in COMMAND.findall("\n".join((*PAGES.values(), *indented))):
        if command != "bench":  # each benchmark has its own options
            named.setdefault(command, set()).update(re.findall(r"--[a-z][\w-]*", rest))
    assert len(named) > 15 and sum(map(len, named.values())) > 12
    for command, options in named.items():
        said = demo_server.run("relaxserve", *command.split(), "--help-all" if command == "serve" else "--help", COLUMNS="200")
        assert {option for option in options - {"--help"} if option not in said} == set(), command


def test_benchmarks_exist() -> None:
    for command, benchmarks in {"relaxserve bench": modules(), r"python -m tests\.lab": known()}.items():
        named = set(re.findall(rf"{command} ([a-z][\w-]*)", "\n".join(PAGES.values())))
        assert named and {name.replace("-", "_") for name in named} <= benchmarks.keys()


def test_targets_of_make_exist() -> None:
    named = {target.removeprefix(".venv/") for target in MAKE.findall("\n".join(PAGES.values()))}
    known = set(re.findall(r"^(?:\$\(VENV\)/)?([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert len(named) > 5 and named - known == set()


def test_variables_are_known() -> None:
    known = {PREFIX + setting.name.upper() for setting in SETTINGS} | {switch.variable for switch in SWITCHES}
    known |= {CONFIG_VARIABLE, KEY_VARIABLE, URL_VARIABLE, *FROM_COMPOSE}
    assert set(re.findall(rf"\b{PREFIX}[A-Z][A-Z_]*\b", "\n".join(PAGES.values()))) - known == set()
    assert all(name in (ROOT / "deploy" / "compose.yaml").read_text() for name in FROM_COMPOSE)


def test_metrics_are_those_of_the_server() -> None:
    written = (ROOT / "server" / "metrics.py").read_text()
    named = re.findall(r"`((?:vllm|relaxserve):\w+)`", "\n".join(PAGES.values()))
    assert len(named) > 10 and [name for name in named if f'"{name}"' not in written] == []


def test_every_alert_has_a_row() -> None:
    alerts = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]
    table = PAGES["docs/operations.md"].partition("## Alerts")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == [alert["alert"] for alert in alerts]
