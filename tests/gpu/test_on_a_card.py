"""`pytest -m gpu` runs tests on a real card. Without a card it skips them with a reason."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gpu.driver.library import ROOT
from tests.gpu.fixtures import needs_pycuda

MARKED = "tests/runtime/device/cuda/test_attention.py"
FOLDERS = (
    "tests/deploy/test_cuda_families.py",
    "tests/runtime/device/cuda",
    "tests/compiler/frontend/test_on_gpu.py",
    "tests/e2e/test_gpu_bits.py",
    "tests/deploy/test_cuda.py",
)


def said(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@needs_pycuda
@pytest.mark.parametrize("marked", ["gpu", "gpu and not slow"])
def test_without_a_card_tests_are_skipped_with_the_reason(marked: str) -> None:
    """Without a real card, `pytest -m gpu` skips its tests with the reason; it does not run them on the software GPU."""
    reason = said("-c", "from tests.gpu.fixtures import missing_card; print(missing_card())").strip()
    report = said("-m", "pytest", "-q", "-m", marked, "-p", "no:cacheprovider", MARKED)
    assert "1 passed" in report if not reason else "1 skipped" in report and f"-m gpu runs on a card: {reason}" in report


def test_the_tests_for_a_card_span_kernels_families_requests_and_kills() -> None:
    """`pytest -m gpu` selects the same tests that `make test` runs on the software GPU, except those of this GPU itself, of its settings
    and of its faults."""
    listed = said("-m", "pytest", "-q", "-m", "gpu and not slow", "--collect-only", "-p", "no:cacheprovider", *FOLDERS)
    for name in (
        "test_products.py",
        "test_tensor_attention.py",
        "test_sampling.py",
        "test_on_gpu.py::test_logits_and_the_next_token_are_those_of_transformers[llama]",
        "test_gpu_bits.py::test_in_a_batch[64]",
        "test_cuda.py::test_a_chat_completion_is_that_of_the_cpu",
        "test_cuda_families.py::test_a_killed_worker_s_answer_goes_on_with_the_same_bits",
    ):
        assert name in listed, name
    assert "test_sabotage.py" not in listed
