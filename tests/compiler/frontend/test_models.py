"""Every causal family against numbers of Hugging Face transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.frontend.config import FAMILIES
from compiler.frontend.models.registry import CAUSAL, ENCODERS

GOLDEN = Path(__file__).parents[2] / "golden" / "models"
CASES = sorted(folder.name for folder in GOLDEN.iterdir() if "logits" in np.load(folder / "golden.npz").files)
# Stored in more than the 16 bits that weights are held in by default.
WIDE_CASES = ["llama"]


def relative_error(actual: Any, expected: Any) -> float:
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_prompt(case: str, causal: Callable[..., Any]) -> None:
    model = causal(case)
    logits = model.start().feed({"a": model.golden["prompt"]})["a"]
    assert relative_error(logits, model.golden["logits"]) < 2e-4


@pytest.mark.parametrize("case", CASES)
def test_greedy_continuation(case: str, causal: Callable[..., Any]) -> None:
    model = causal(case)
    sequences = model.start()
    found = [int(sequences.feed({"a": model.golden["prompt"]})["a"][-1].argmax())]
    while len(found) < len(model.golden["continuation"]):
        found.append(int(sequences.feed({"a": found[-1:]})["a"][-1].argmax()))
    assert found == model.golden["continuation"].tolist()


@pytest.mark.parametrize("case", WIDE_CASES)
def test_logits_of_weights_rounded_to_bf16(case: str, causal: Callable[..., Any]) -> None:
    model = causal(case, "bf16")
    logits = model.start().feed({"a": model.golden["prompt"]})["a"]
    error = relative_error(logits, model.golden["logits"])
    assert 1e-4 < error < 2e-2  # rounded indeed, and no more than that


def test_every_family_has_a_case_and_a_wiring() -> None:
    types = {json.loads((folder / "config.json").read_text())["model_type"] for folder in GOLDEN.iterdir()}
    assert types == FAMILIES.keys()
    assert {*CAUSAL, *ENCODERS, "xlm-roberta"} == FAMILIES.keys()
