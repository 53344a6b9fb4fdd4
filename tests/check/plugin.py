"""A plugin for pytest: show each failure at once, run the given files in their order, stop starting tests at a deadline and name what was
left out, and remember how long each file takes."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path

import pytest

OUT_OF_TIME = "out of time"
SECONDS = Path(".pytest_cache", "seconds.json")  # below the checkout: the seconds that each test file took when it last ran


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--until", type=float, help="time of time.time() after which no further test starts")
    parser.addoption("--ranked", type=Path, help="a file with the paths of test files in the order in which they run")


@pytest.hookimpl(trylast=True)  # after tests/conftest.py has put the longest files first
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if ranked := config.getoption("--ranked"):
        rank = {config.rootpath / path: number for number, path in enumerate(ranked.read_text().splitlines())}
        items.sort(key=lambda item: rank.get(item.path, len(rank)))


@pytest.hookimpl(tryfirst=True)  # before any fixture is set up
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip(OUT_OF_TIME)


def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    return ("left out", "", "LEFT OUT") if report.skipped and OUT_OF_TIME in str(report.longrepr) else None


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that reports, not one of pytest-xdist that runs tests
        config.pluginmanager.register(_Reporter(config), "relaxserve-reporter")


class _Reporter:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._left_out: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = report.nodeid.partition("::")[0]
        self._seconds[path] += report.duration
        if report.skipped and OUT_OF_TIME in str(report.longrepr):
            self._left_out.add(path)
        if report.failed and self._config.getoption("--until") is not None:
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}", red=True)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left_out:
            terminalreporter.write_line(
                f"left out for lack of time ({len(self._left_out)} files): {' '.join(sorted(self._left_out))}", yellow=True
            )

    def pytest_sessionfinish(self) -> None:
        file = self._config.rootpath / SECONDS
        known = seconds_of_files(self._config.rootpath)
        known.update({path: round(seconds, 2) for path, seconds in self._seconds.items() if path not in self._left_out})
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(known, indent=0, sort_keys=True))


def seconds_of_files(root: Path) -> dict[str, float]:
    file = root / SECONDS
    return json.loads(file.read_text()) if file.exists() else {}
