"""The browser of a test run, and an empty page with its own storage. Both skip without Chromium."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deploy.bench.chromium import NAMES, Chromium, Page, installed


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = installed()
    if program is None:
        pytest.skip(f"needs Chromium: none of {', '.join(NAMES)} is installed")
    browser = Chromium(program, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def page(chromium: Chromium) -> Iterator[Page]:
    """Yield an empty page. The test fails if the page has faults at the end."""
    page = chromium.empty_page()
    yield page
    page.expect_no_faults()
    chromium.empty(page)
