"""Every causal family on a GPU in software: near the numbers of transformers, with the same bits in one step and in several."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from compiler.machine.target import get
from tests.compiler.frontend.test_models import NAMES, mean_error
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda

LEFT_TO_MAKE_TEST = {"llama", "phi3"}  # rotation in whole heads and in parts of one; `make test-slow` takes all
CASES = [pytest.param(name, marks=[] if name in LEFT_TO_MAKE_TEST else pytest.mark.slow) for name in NAMES]


@needs_pycuda
@pytest.mark.parametrize("case", CASES)
def test_logits_are_near_and_the_same_bits_by_chunks(case: str, causal: Callable[..., Any], software_gpu: SoftwareGpu) -> None:
    """Products go to tensor cores, so weights and rows are bf16."""
    model = causal(case, "bf16", target=get("sm_80"))
    prompt = model.golden["prompt"]
    whole = model.start().feed({"a": prompt})["a"]
    assert mean_error(whole, model.golden["logits"]) < 2e-2
    sequences, cuts = model.start(seed=1), [0, 5, len(prompt) - 2, len(prompt) - 1, len(prompt)]
    parts = [sequences.feed({"a": prompt[begin:end]})["a"] for begin, end in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert software_gpu.faults == []
