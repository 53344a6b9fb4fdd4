"""What all tests share: golden files, and how much of the generated programs a run covers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

GOLDEN = Path(__file__).parent / "golden"

# `pytest --hypothesis-profile=full` explores; a plain run repeats the same examples, so that it fails for a reason in the tree.
settings.register_profile("quick", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("full", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what is computed to the golden files instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("paper/x.ir", text)`: the text is what the file below tests/golden holds."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing; pytest --update-golden writes it"
        assert text == path.read_text(), f"{path} differs; pytest --update-golden accepts what is computed"

    return check
