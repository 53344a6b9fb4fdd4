"""Rounding changes the logits of the Gemma 4 goldens by 16 % because their attention magnifies it, not because an operator is wrong.

Gemma 4 normalises queries and keys and does not scale scores. With random weights, its scores are around 4, the root of the head size;
those of other families are around 1. Rounding rows to bf16 changes a score by up to 2^-9 of its size. With such large scores, a token
attends almost only to one key. If rounding changes which key that is, all later layers get another average of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.driver import Options, compile_module
from compiler.frontend.decoder import ENTRY, build_step
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.registry import load_config, weights_of
from compiler.frontend.weights import open_safetensors
from compiler.ir.dtypes import DType
from compiler.machine.target import get
from tests.compiler.frontend.conftest import BOUNDS, CausalModel, Rows
from tests.compiler.frontend.test_models import GOLDEN, mean_error
from tests.gpu.fixtures import needs_pycuda

# model -> bound on the error if scores are as small as in other families. In a mixture, rounding also changes the choice of experts.
SHORT = {"gemma4": 2e-2, "gemma4-experts": 6e-2}
NOISE = 2.0**-10  # the mean relative error when a number is rounded to bf16


@dataclass
class Changed:
    """A weight source that multiplies the elements of matrices by 1 plus random noise, and the weights of query norms by `queries`."""

    source: Any
    noise: float = 0.0
    queries: float = 1.0
    seed: int = 0

    @property
    def tensors(self) -> Any:
        return self.source.tensors

    def release(self, name: str) -> None:
        self.source.release(name)

    def digest(self) -> str:
        return self.source.digest()

    def read(self, name: str) -> Any:
        weight = np.asarray(self.source.read(name)).astype(np.float32)
        if weight.ndim > 1:
            weight *= 1 + self.noise * np.random.default_rng(self.seed).standard_normal(weight.shape, np.float32)
        return weight * np.float32(self.queries) if "q_norm" in name else weight

    def parts(self, name: str) -> None:
        """Return None, because no tensor is stored in parts."""


@dataclass(frozen=True)
class Golden:
    folder: Path
    format: str
    target: str = "host"

    def logits(self, executable: Any, **changes: Any) -> Rows:
        config, source = load_config(self.folder), weights_of(load_config(self.folder), open_safetensors(self.folder))
        golden = dict(np.load(self.folder / "golden.npz"))
        model = CausalModel(config, Changed(source, **changes), ENTRY, executable, golden)
        return model.start().feed({"a": golden["prompt"]})["a"]

    def compiled(self) -> Any:
        config = load_config(self.folder)
        names = weights_of(config, open_safetensors(self.folder)).tensors
        module = build_step(config, dict.fromkeys(names, DType.F32), BOUNDS, DType.F32, WeightFormat.parse(self.format))
        return compile_module(module, Options(get(self.target)))


def expect_noise(case: str, target: str) -> None:
    exact, rounded = Golden(GOLDEN / case, "f32"), Golden(GOLDEN / case, "bf16", target)
    in_f32, in_bf16 = exact.compiled(), rounded.compiled()
    expected = exact.logits(in_f32)
    noisy = [mean_error(exact.logits(in_f32, noise=NOISE, seed=seed), expected) for seed in range(3)]
    assert mean_error(rounded.logits(in_bf16), expected) < 2 * max(noisy)
    short = mean_error(rounded.logits(in_bf16, queries=1 / 8), exact.logits(in_f32, queries=1 / 8))
    assert short < SHORT[case], "with scores as small as those of other families, rounding moves logits as little as there"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma4", "gemma4-experts"])
def test_rounding_moves_logits_no_more_than_noise_of_its_size(case: str) -> None:
    expect_noise(case, "host")


@needs_pycuda
@pytest.mark.slow
@pytest.mark.usefixtures("software_gpu")
@pytest.mark.parametrize("case", ["gemma4", "gemma4-experts"])
def test_rounding_on_a_gpu_moves_logits_no_more_than_noise_of_its_size(case: str) -> None:
    expect_noise(case, "sm_80")
