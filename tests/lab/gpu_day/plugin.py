"""A plugin of pytest for the steps of a day with a card. A run in which no test passed has failed, since tests that find no card or no
pycuda are skipped; --may-skip allows it, for tests of several cards. With --one-case, only one case of each test function runs."""

from __future__ import annotations

import pytest


class Passed:
    """Counts the tests that pass."""

    def __init__(self) -> None:
        self.count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += report.when == "call" and report.passed

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        option = session.config.option
        if exitstatus == pytest.ExitCode.OK and not self.count and not option.collectonly and not option.may_skip:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--may-skip", action="store_true", help="a run whose tests are all skipped has not failed")
    parser.addoption("--one-case", action="store_true", help="run one case of each test function")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Passed())


@pytest.hookimpl(trylast=True)  # after pytest has deselected tests by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--one-case"):
        first: dict[str, pytest.Item] = {}
        for item in items:
            first.setdefault(item.nodeid.partition("[")[0], item)
        items[:] = first.values()
