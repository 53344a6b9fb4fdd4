"""Decoders divided over ranks: which rows of which tensors a rank has, and which models and numbers of ranks are refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compiler.frontend.config import ModelConfig
from compiler.frontend.decoder import BOTH, StepBounds, build_step
from compiler.frontend.ranks import CannotDivide, RankWeights, of_rank, require_divisible, shapes_of
from compiler.frontend.registry import load_config
from compiler.frontend.weights import TensorInfo, open_safetensors
from compiler.ir.dtypes import DType
from compiler.ops.ranks import ALL_GATHER, RANK_EMBEDDING
from tests.conftest import GOLDEN

MODELS = GOLDEN / "models"


def config_of(name: str) -> ModelConfig:
    return load_config(MODELS / name)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_parts_of_all_ranks_are_the_whole(name: str, count: int) -> None:
    """The parts of a tensor, joined in the order of the ranks, are the tensor. Several ranks may have the same part, such as the keys and
    values of one head."""
    source, config = open_safetensors(MODELS / name), config_of(name)
    dtypes = {tensor: DType.from_numpy(np.dtype(info.dtype)) for tensor, info in source.tensors.items()}
    module = build_step(config, dtypes, StepBounds(16, 4, 64), DType.F32, entry=BOTH, ranks=count)
    shapes = shapes_of(module)
    assert set(shapes) == set(source.tensors)
    ranks = [RankWeights(source, shapes, rank, count) for rank in range(count)]
    for tensor, shape in shapes.items():
        parts = [rank.read(tensor) for rank in ranks]
        assert {part.shape for part in parts} == {shape} == {rank.tensors[tensor].shape for rank in ranks}
        whole, num_parts = source.read(tensor), source.tensors[tensor].shape[0] // shape[0]
        if num_parts == 1:
            assert all(np.array_equal(part, whole) for part in parts)
        else:
            np.testing.assert_array_equal(np.concatenate(parts[:: count // num_parts]), whole)
            assert all(np.array_equal(parts[i], parts[i - i % (count // num_parts)]) for i in range(count))


def test_ranks_store_their_packed_weights_in_files_of_their_own() -> None:
    """The digests of both ranks and of the whole model differ in their first 32 characters, which the name of such a file contains."""
    source = open_safetensors(MODELS / "llama")
    digests = {RankWeights(source, {}, rank, 2).digest()[:32] for rank in range(2)} | {source.digest()[:32]}
    assert len(digests) == 3


def test_a_rank_gathers_four_times_a_layer_and_sums_over_no_rank() -> None:
    source, config = open_safetensors(MODELS / "llama"), config_of("llama")
    dtypes = {tensor: DType.from_numpy(np.dtype(info.dtype)) for tensor, info in source.tensors.items()}
    module = build_step(config, dtypes, StepBounds(16, 4, 64), DType.F32, ranks=2)
    called = [getattr(binding.value, "op", None) for f in module.graph_functions.values() for binding in f.body.bindings]
    assert called.count(ALL_GATHER) == 4 * config.num_layers + 1 and called.count(RANK_EMBEDDING) == 1


def test_a_rank_has_its_part_of_heads_and_columns() -> None:
    whole = config_of("llama")
    part = of_rank(whole, 4)
    assert (part.num_heads, part.num_kv_heads, part.intermediate_size) == (1, 1, whole.intermediate_size // 4)
    assert (part.hidden_size, part.vocab_size, part.head_dim) == (whole.hidden_size, whole.vocab_size, whole.head_dim)
    assert of_rank(whole, 1) is whole


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert", "is an encoder"),
        ("gpt_oss", "is of the family gpt_oss, whose layers have no such division yet"),
        ("qwen2-classes", "has a classification head"),
        ("../listening_models/voxtral", "hears audio in conversations"),
    ],
)
def test_models_that_have_no_division_are_named(name: str, expected: str) -> None:
    with pytest.raises(CannotDivide, match=f"the model {expected}.*leave tensor_parallel out"):
        require_divisible(config_of(name), 2)


@pytest.mark.parametrize(
    ("changed", "count", "expected"),
    [
        ({}, 3, "4 attention heads, and tensor_parallel is 3: choose a divisor of 4"),
        (
            {"num_kv_heads": 3, "num_heads": 12},
            2,
            "3 heads of keys and values, and tensor_parallel is 2: choose a divisor or a multiple of 3",
        ),
        ({"intermediate_size": 57}, 2, r"57 columns of an MLP \(intermediate_size\), and tensor_parallel is 2: choose a divisor of 57"),
        ({"vocab_size": 129}, 2, "129 tokens in its vocabulary"),
    ],
)
def test_sizes_that_cannot_be_divided_are_named(changed: dict[str, int], count: int, expected: str) -> None:
    with pytest.raises(CannotDivide, match=expected):
        require_divisible(replace(config_of("llama"), **changed), count)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((64,), (24,)), ((64, 8), (32, 4)), ((64,), (16,)), ((0, 8), (32, 8)), ((16, 8), (32, 8)), ((), (32, 8)), ((64,), ()), ((64,), (0,))],
)
def test_a_tensor_of_an_unexpected_shape_is_named(shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    source: Any = SimpleNamespace(tensors={"w": TensorInfo(shape, np.dtype(np.float32), 4 * math.prod(shape))})
    expected = f"tensor 'w' is {list(shape)}, which cannot be cut into {list(wanted)} for 2 ranks"
    with pytest.raises(CannotDivide, match=re.escape(expected)):
        RankWeights(source, {"w": wanted}, 0, 2)
