"""A decode step of an 8B model: how many kernels it launches, and how many bytes of weights it reads."""

from __future__ import annotations

from functools import cache
from math import prod

import pytest

from compiler.driver import Options, plan
from compiler.frontend.decoder import ENTRY, StepBounds, build_step
from compiler.frontend.layers.nn import WeightFormat
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Var
from compiler.ir.graph.function import BlockKind, Function
from compiler.ir.graph.values import Launch
from compiler.ir.loops.visit import statements
from compiler.ir.module import IRModule
from compiler.ir.types import TensorType
from compiler.machine.target import get
from deploy.bench.synthetic import shapes_of, synthetic_config

LAYER_KERNELS = 7  # norm; q k v, rope and append; attention; output; norm; gate and up; down


@cache
def planned(format: str, layers: int) -> IRModule:
    config = synthetic_config("8b-shape", layers=layers)
    dtypes = dict.fromkeys(shapes_of(config), DType.BF16)
    module = build_step(config, dtypes, StepBounds(64, 64, 1024), DType.BF16, WeightFormat.parse(format))
    return plan(module, Options(get("sm_80"))).module


def launches(function: Function) -> list[Launch]:
    return [b.value for b in function.body.bindings if isinstance(b.value, Launch)]


@pytest.mark.parametrize("format", ["bf16", "int8", "int4-128"])
def test_a_layer_launches_few_kernels_and_a_step_is_one_graph(format: str) -> None:
    def count(module: IRModule) -> int:
        return sum(len(statements(module.prim(launch.func).body)) for launch in launches(module.graph(ENTRY)))

    assert count(planned(format, 2)) - count(planned(format, 1)) <= LAYER_KERNELS
    kinds = [block.kind for block in planned(format, 2).graph(ENTRY).body.blocks]
    assert kinds.count(BlockKind.CAPTURED) == 1


@pytest.mark.parametrize(("format", "bits"), [("bf16", 16), ("int8", 8 + 32 / 4096), ("int4-128", 4 + 16 / 128)])
def test_a_step_reads_each_weight_once_and_little_beside_them(format: str, bits: float) -> None:
    """Within 2 % of what the matrices of a layer must take. Scales of a channel are shorter where channels are longer."""
    with_one, with_two = (planned(format, layers).graph(ENTRY) for layers in (1, 2))

    def num_bytes(function: Function) -> float:
        types = [w.type for w in function.weights]
        return sum(prod(d.const for d in t.shape) * t.dtype.num_bytes for t in types if isinstance(t, TensorType) and t.shape and t.dtype)

    shapes = {n: s for n, s in shapes_of(synthetic_config("8b-shape", layers=1)).items() if "layers.0." in n and len(s) == 2}
    least = sum(map(prod, shapes.values())) * bits / 8
    assert least * 0.99 < num_bytes(with_two) - num_bytes(with_one) < least * 1.02
    read = [a for launch in launches(with_two) for a in launch.args if isinstance(a, Var) and a in with_two.weights]
    assert len(read) == len(set(read)) == len(with_two.weights)
