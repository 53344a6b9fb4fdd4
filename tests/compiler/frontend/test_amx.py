"""The logits of whole models on AMX (or on its emulation in amx_unit.c) are as close to the f32 logits as on other CPUs, and have the same
bits in every batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from compiler.frontend.numerics import Numerics
from compiler.ir.dtypes import DType
from compiler.machine.target import Target


@pytest.mark.parametrize(("case", "format", "error"), [("llama", "bf16", 2e-2), ("llama", "int8", 6e-2), ("qwen3", "int4-32", 0.4)])
def test_a_row_has_the_same_bits_however_it_is_computed(
    causal: Callable[..., Any], amx: Target, matrix_unit: Any, case: str, format: str, error: float
) -> None:
    model, before = causal(case, format, target=amx, kv_dtype=DType.BF16, numerics=Numerics.FAST), matrix_unit.counts
    text = np.concatenate([model.golden["prompt"], model.golden["continuation"]])
    whole = model.start().feed({"a": text})["a"]
    wanted = model.golden["logits"]
    assert np.linalg.norm(whole[: len(wanted)] - wanted) < error * np.linalg.norm(wanted)

    one_by_one = model.start(seed=1, num_threads=2)
    chunked = model.start(seed=2)
    for position in range(6):
        np.testing.assert_array_equal(one_by_one.feed({"a": text[position : position + 1]})["a"][0], whole[position])
    cuts = [0, 1, 8, 24, 40, len(text)]
    chunks = [chunked.feed({"a": text[low:high]})["a"] for low, high in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(chunks), whole)

    batch = {f"s{n}": text[: 1 + 3 * n] for n in range(17)}
    for rows in model.start(seed=3, num_threads=2).feed(batch).values():
        np.testing.assert_array_equal(rows, whole[: len(rows)])
    assert matrix_unit.library is None or (matrix_unit.counts - before)[-1] > 0
