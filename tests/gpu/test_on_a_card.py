"""`pytest -m gpu` runs tests on a real card. Without a card it skips them with a reason."""

from __future__ import annotations

import subprocess
import sys

from tests.gpu.driver.library import ROOT
from tests.gpu.fixtures import needs_pycuda

MARKED = "tests/runtime/device/cuda/test_attention.py"


def said(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@needs_pycuda
def test_without_a_card_tests_are_skipped_with_the_reason() -> None:
    """Without a real card, `pytest -m gpu` skips its tests with the reason; it does not run them on the software GPU."""
    reason = said("-c", "from tests.gpu.fixtures import missing_card; print(missing_card())").strip()
    report = said("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", MARKED)
    assert "1 passed" in report if not reason else "1 skipped" in report and f"-m gpu runs on a card: {reason}" in report
