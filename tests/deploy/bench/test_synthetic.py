"""The synthetic fp8 checkpoint of a mixture: its experts are matrices of 8-bit floats, and its router is not quantised."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from compiler.ir.dtypes import DType
from deploy.bench.synthetic import fp8_model, synthetic_config


def test_experts_are_floats_of_eight_bits_with_scales() -> None:
    config = synthetic_config("30b-a3b", layers=1)
    assert config.mixture is not None
    config = replace(config, hidden_size=256, vocab_size=64, mixture=replace(config.mixture, num_experts=3, size=128))
    source, up = fp8_model(config), "model.layers.0.mlp.experts.up_proj.weight"
    numbers, scales = source.read(f"{up}.e4m3"), source.read(f"{up}.scale")
    assert (numbers.dtype, numbers.shape, scales.shape) == (DType.E4M3.numpy, (3, 128, 256), (3, 128, 2))
    assert np.abs(numbers.astype(np.float32)).max() == DType.E4M3.ends[1]
    assert source.tensors["model.layers.0.mlp.gate.weight"].dtype == DType.BF16.numpy
