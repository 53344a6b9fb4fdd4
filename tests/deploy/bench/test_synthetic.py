"""The synthetic fp8 checkpoint of a mixture: its experts are matrices of 8-bit floats, and its router is not quantised."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compiler.ir.dtypes import DType
from deploy.bench.synthetic import SHAPES, fp8_model, shapes_of, synthetic_config
from server.settings import SettingsError


def test_experts_are_floats_of_eight_bits_with_scales() -> None:
    config = synthetic_config("30b-a3b", layers=1)
    assert config.mixture is not None
    config = replace(config, hidden_size=256, vocab_size=64, mixture=replace(config.mixture, num_experts=3, size=128))
    source, up = fp8_model(config), "model.layers.0.mlp.experts.up_proj.weight"
    numbers, scales = source.read(f"{up}.e4m3"), source.read(f"{up}.scale")
    assert (numbers.dtype, numbers.shape, scales.shape) == (DType.E4M3.numpy, (3, 128, 256), (3, 128, 2))
    assert np.abs(numbers.astype(np.float32)).max() == DType.E4M3.ends[1]
    assert source.tensors["model.layers.0.mlp.gate.weight"].dtype == DType.BF16.numpy


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "gpt-oss-shape"])
def test_an_fp8_checkpoint_has_the_tensors_of_the_model(shape: str) -> None:
    """The kernel of a convolution also has three axes, but belongs to no expert, and stays as it is."""
    config = synthetic_config(shape, layers=1)
    source = fp8_model(config)
    for name in shapes_of(config):
        held = (f"{name}.q", f"{name}.e4m3")
        assert name in source.tensors or any(one in source.tensors for one in held), name
    for name in source.tensors:
        if "conv1d" in name:
            assert source.read(name).shape == shapes_of(config)[name]


def test_gpt_oss_has_no_fp8_checkpoint() -> None:
    with pytest.raises(SettingsError, match="family gpt_oss have no fp8 weights; choose another --quantize"):
        fp8_model(synthetic_config("gpt-oss-shape", layers=1))
