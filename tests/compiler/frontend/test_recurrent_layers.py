"""Recurrent layers: which kernels their steps launch."""

from __future__ import annotations

import pytest

from compiler.backends.cpu.pipeline import pipeline
from compiler.frontend.decoder import ENTRY, StepBounds, build_step
from compiler.frontend.layers.nn import WeightFormat
from compiler.ir.dtypes import DType
from compiler.ir.graph.values import CallTir
from compiler.machine.target import get
from deploy.bench.synthetic import dtypes_of, synthetic_config


@pytest.mark.parametrize("name", ["0.6b-hybrid", "0.6b-mamba"])
def test_a_step_neither_transposes_taps_nor_applies_silu_to_all_columns(name: str) -> None:
    """The taps of the convolution are transposed at load time, and SiLU is part of a kernel that does more."""
    config = synthetic_config(name, layers=8)
    module = build_step(config, dtypes_of(config), StepBounds(64, 4, 128), DType.BF16, WeightFormat.parse("bf16"))
    lifted = pipeline(get("x86-64-v3")).until("lift_weights")(module)
    kernels = {b.value.func for b in lifted.graph(ENTRY).body.bindings if isinstance(b.value, CallTir)}
    assert {"causal_conv", "state_scan"} <= kernels
    assert not any(kernel.startswith("conv_taps") or kernel == "silu" for kernel in kernels)
