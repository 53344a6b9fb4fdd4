"""The loader compares the tensors that a model needs with those in its files. A single error lists all differences."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from compiler.frontend.accounting import Accounting
from compiler.frontend.errors import WeightMismatch
from compiler.frontend.weights import open_safetensors

TENSORS = {
    "a.weight": np.zeros((5, 7), np.float32),
    "a.bias": np.zeros(3, np.float32),
    "scalar": np.array(2.5, np.float16),
    "empty": np.zeros((0, 4), np.float32),
    "ids": np.arange(6, dtype=np.int64).reshape(1, 2, 3),
}


def test_accounting_lists_all_that_is_wrong(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = open_safetensors(tmp_path)

    complete = Accounting(source)
    for name, tensor in TENSORS.items():
        complete.take(name, tensor.shape)
    complete.check()

    wrong = Accounting(source)
    wrong.take("a.weight", (7, 5))
    wrong.take("b.weight", (2,))
    wrong.ignore("scalar", "*.bias")
    with pytest.raises(WeightMismatch) as caught:
        wrong.check()
    message = str(caught.value)
    assert "1 missing: b.weight [2]" in message
    assert "1 of another shape: a.weight is [5, 7], expected [7, 5]" in message
    assert "2 not part of the model: empty, ids" in message


def test_accounting_shortens_long_lists(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    accounting = Accounting(open_safetensors(tmp_path))
    for layer in range(100):
        accounting.take(f"layer.{layer}", (1,))
    with pytest.raises(WeightMismatch, match=r"100 missing: .*layer\.19 \[1\], and 80 more"):
        accounting.check()
