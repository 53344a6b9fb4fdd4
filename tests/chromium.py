"""Fixtures: a headless Chromium for the whole test run, and an empty page for each test. Tests that use them are skipped if Chromium is
missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.chromium import NAMES, Chromium, Page, installed


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
    """Yield an empty page. After the test, the page must have no faults."""
    page = chromium.empty_page()
    yield page
    page.expect_no_faults()
    chromium.empty(page)
