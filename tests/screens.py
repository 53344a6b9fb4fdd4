"""Run a test of a terminal or a browser once more if it fails, and name it at the end of the run.

What such a test sees is drawn by programs that are not ours, at the pace of a busy machine. A fault of ours fails again. No other test
gets a second run: an answer that is wrong once is wrong.
"""

from __future__ import annotations

import pytest
from _pytest.runner import runtestprotocol

from tests import terminal

FIRST_FAILURE = "first_failure"


def looks_at_a_screen(item: pytest.Item) -> bool:
    module = item.getparent(pytest.Module)
    uses_terminal = module is not None and getattr(module.obj, "terminal", None) is terminal.terminal
    return uses_terminal or "chromium" in getattr(item, "fixturenames", ())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not looks_at_a_screen(item):
        return None
    where = {"nodeid": item.nodeid, "location": item.location}
    item.ihook.pytest_runtest_logstart(**where)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    failure = next((report for report in reports if report.failed), None)
    if failure is not None:
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        reports[0].user_properties.append((FIRST_FAILURE, failure.longreprtext))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(**where)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports(""):
        for name, text in report.user_properties:
            if name == FIRST_FAILURE:
                terminalreporter.write_line(f"{report.nodeid} failed, and then ran again:\n{text}", yellow=True)
