"""Every causal family against numbers of Hugging Face transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.frontend.registry import FAMILIES
from compiler.ir.dtypes import DType
from compiler.machine.products import product_tiles
from compiler.machine.target import host

GOLDEN = Path(__file__).parents[2] / "golden" / "models"
ARRAYS = {folder.name: np.load(folder / "golden.npz").files for folder in sorted(GOLDEN.iterdir())}
NAMES = [name for name, arrays in ARRAYS.items() if "continuation" in arrays]
CASES = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in NAMES]  # compiled once for all tests of a case
# Weights of bf16 take the same path in every family: quick is one case of each kind of layer, and the one whose logits rounding moves most.
# The tiny models have no logits in bf16.
IN_BF16 = [name for name in NAMES if "logits_bf16" in ARRAYS[name]]
QUICK_IN_BF16 = {"llama", "gemma2", "olmo2", "qwen3_moe", "gpt_oss", "qwen3_5", "phi3-longrope"}
BF16_CASES = [
    pytest.param(name, marks=[pytest.mark.xdist_group(name), *([] if name in QUICK_IN_BF16 else [pytest.mark.slow])]) for name in IN_BF16
]


def largest_error(actual: Any, expected: Any) -> float:
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def mean_error(actual: Any, expected: Any) -> float:
    assert actual.shape == expected.shape
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_prompt(case: str, causal: Callable[..., Any]) -> None:
    model = causal(case)
    logits = model.start().feed({"a": model.golden["prompt"]})["a"]
    assert largest_error(logits, model.golden["logits"]) < 2e-4


@pytest.mark.parametrize("case", CASES)
def test_greedy_continuation(case: str, causal: Callable[..., Any]) -> None:
    model = causal(case)
    sequences = model.start()
    found = [int(sequences.feed({"a": model.golden["prompt"]})["a"][-1].argmax())]
    while len(found) < len(model.golden["continuation"]):
        found.append(int(sequences.feed({"a": found[-1:]})["a"][-1].argmax()))
    assert found == model.golden["continuation"].tolist()


@pytest.mark.parametrize("case", BF16_CASES)
def test_logits_in_bf16(case: str, causal: Callable[..., Any]) -> None:
    """What rounding moves is 2 % of f32 at most. It is a matter of the model: in one row of phi3-longrope it is 5 % of the largest logit,
    in transformers as here. So the logits of all rows are held against transformers with the same roundings, where this machine has them;
    the two differ (by 4e-3 at most) where sums in another order round a number to the other side."""
    model = causal(case, "bf16")
    logits = model.start().feed({"a": model.golden["prompt"]})["a"]
    assert mean_error(logits, model.golden["logits"]) < 2e-2
    if product_tiles(host()).pairs is not None:
        assert largest_error(logits, model.golden["logits_bf16"]) < 2e-2
        assert mean_error(logits, model.golden["logits"]) > 2e-3  # rounded indeed


@pytest.mark.parametrize(("kv_dtype", "bound"), [(DType.F16, 2e-3), (DType.BF16, 1.5e-2), (DType.I8, 4e-2)])
def test_logits_over_pages_of_every_form(kv_dtype: DType, bound: float, causal: Callable[..., Any]) -> None:
    """In two steps. The arena has a size: what a call writes in place nobody copies."""
    model = causal("llama", kv_dtype=kv_dtype)
    assert isinstance(model.executable.meta.functions[model.entry].arena_bytes, int)
    sequences, prompt = model.start(), model.golden["prompt"]
    logits = np.concatenate([sequences.feed({"a": part})["a"] for part in (prompt[:5], prompt[5:])])
    assert 0 < mean_error(logits, model.golden["logits"]) < bound


def test_quick_cases_in_bf16_are_there() -> None:
    assert set(IN_BF16) > QUICK_IN_BF16


def test_every_model_type_has_a_case() -> None:
    configs = [json.loads((folder / "config.json").read_text()) for folder in GOLDEN.iterdir()]
    types = {part["model_type"] for config in configs for part in (config, config.get("text_config", config))}
    nesting = {"gemma3", "gemma4_unified"}  # a text model: test_config.py
    assert types == FAMILIES.keys() - nesting - {"embeddinggemma"}  # which calls itself gemma3_text
