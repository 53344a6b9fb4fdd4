"""A decode step of an 8B model: the number of kernels that it launches, and the bytes that it reads."""

from __future__ import annotations

from functools import cache
from math import prod

import pytest

from compiler.driver import Options, plan
from compiler.frontend.decoder import ENTRY, StepBounds, build_step
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.numerics import Numerics
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Var
from compiler.ir.graph.function import BlockKind, Function
from compiler.ir.graph.values import Launch
from compiler.ir.loops.visit import statements
from compiler.ir.module import IRModule
from compiler.ir.types import TensorType
from compiler.machine.target import get
from deploy.bench.synthetic import dtypes_of, shapes_of, synthetic_config
from runtime.cache_groups import PAGE_SIZE
from tests.lab.planned import Sizes, planned_bytes

CONTEXT = 1024
LAYER_KERNELS = 7  # norm; q k v with rope and append; attention; output projection; norm; gate and up; down
MORE_KERNELS = {"sm_90a": 1}  # attention of long runs, which a decode step does not have (decision 0149)


@cache
def built(format: str, layers: int) -> IRModule:
    config = synthetic_config("8b-shape", layers=layers)
    bounds, form = StepBounds(64, 64, CONTEXT), WeightFormat.parse(format)
    return build_step(config, dtypes_of(config), bounds, DType.BF16, form, numerics=Numerics.on(get("sm_80")))


@cache
def planned(format: str, layers: int, target: str) -> IRModule:
    return plan(built(format, layers), Options(get(target))).module


def launches(function: Function) -> list[Launch]:
    return [b.value for b in function.body.bindings if isinstance(b.value, Launch)]


@pytest.mark.parametrize(
    ("format", "target"), [("bf16", "sm_80"), ("int8", "sm_80"), ("int4-128", "sm_80"), ("bf16", "sm_90a"), ("int4-128", "sm_90a")]
)
def test_a_layer_launches_few_kernels_and_a_step_is_one_graph(format: str, target: str) -> None:
    def count(module: IRModule) -> int:
        return sum(len(statements(module.prim(launch.func).body)) for launch in launches(module.graph(ENTRY)))

    assert count(planned(format, 2, target)) - count(planned(format, 1, target)) <= LAYER_KERNELS + MORE_KERNELS.get(target, 0)
    kinds = [block.kind for block in planned(format, 2, target).graph(ENTRY).body.blocks]
    assert kinds.count(BlockKind.CAPTURED) == 1


@pytest.mark.parametrize(("format", "bits"), [("bf16", 16), ("int8", 8 + 32 / 4096), ("int4-128", 4 + 16 / 128)])
def test_a_step_reads_each_weight_once_and_little_beside_them(format: str, bits: float) -> None:
    """The prepared weights of a layer occupy at most 2 % more bytes than its matrices with `bits` bits per weight. `bits` assumes one scale
    per 4096 weights; longer channels need fewer scales, so the weights may occupy slightly fewer bytes."""
    with_one, with_two = (planned(format, layers, "sm_80").graph(ENTRY) for layers in (1, 2))

    def num_bytes(function: Function) -> float:
        types = [w.type for w in function.weights]
        return sum(prod(d.const for d in t.shape) * t.dtype.num_bytes for t in types if isinstance(t, TensorType) and t.shape and t.dtype)

    shapes = {n: s for n, s in shapes_of(synthetic_config("8b-shape", layers=1)).items() if "layers.0." in n and len(s) == 2}
    least = sum(map(prod, shapes.values())) * bits / 8
    assert least * 0.99 < num_bytes(with_two) - num_bytes(with_one) < least * 1.02
    read = [a for launch in launches(with_two) for a in launch.args if isinstance(a, Var) and a in with_two.weights]
    assert len(read) == len(set(read)) == len(with_two.weights)


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize(("format", "bits"), [("bf16", 16), ("int8", 8 + 32 / 4096), ("int4-128", 4 + 16 / 128)])
def test_a_step_reads_weights_keys_values_and_activations_and_nothing_else(format: str, bits: float, tokens: int) -> None:
    """The bytes that a step reads equal the sizes of its weights, keys, values and activations, within 2 %. Activations are the inputs
    of each kernel of a layer: the residual stream and queries in f32, other rows in bf16."""
    c = synthetic_config("8b-shape", layers=2)
    sizes = Sizes({"t": tokens, "s": tokens, "r": tokens, "p": CONTEXT // PAGE_SIZE, "pages": 1 << 20}, tokens, CONTEXT)
    found = sum(planned_bytes(built(format, 2), ENTRY, get("sm_80"), sizes).values())
    head_bits = max(bits, 8 + 32 / 4096)  # the output head has at least 8 bits: with 4 bits, logits would be too inexact
    matrices = {name: prod(shape) for name, shape in shapes_of(c).items() if len(shape) == 2 and "embed" not in name}
    weights = sum(count * (head_bits if "head" in name else bits) / 8 for name, count in matrices.items())
    kv = c.num_layers * tokens * CONTEXT * 2 * c.num_kv_heads * c.head_dim * 2
    h, f = c.hidden_size, c.intermediate_size
    stream = 4 * (4 * h)  # bytes of the residual stream per token: two norms and two additions read it in f32
    rows = 2 * (2 * h) + 2 * f  # bytes of bf16 rows per token: inputs of q k v, of gate and up, and of down
    queries = 4 * h + 2 * h  # bytes per token: attention reads queries in f32, and the output projection reads attention's result in bf16
    activations = tokens * (c.num_layers * (stream + rows + queries) + 14 * h)
    assert abs(found / (weights + kv + activations) - 1) < 0.02
