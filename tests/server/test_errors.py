from __future__ import annotations

from pathlib import Path

from server.errors import TABLE, as_markdown


def test_the_page_is_the_table():
    page = Path(__file__).parents[2] / "docs" / "errors.md"
    assert page.read_text() == as_markdown(), "run: python -m server.errors > docs/errors.md"


def test_codes_are_unique():
    assert len({kind.code for kind in TABLE}) == len(TABLE) > 30


def test_clients_are_not_told_to_repeat_what_cannot_succeed():
    retried = {kind.status for kind in TABLE if kind.retry}
    assert retried <= {408, 429, 503}
