"""Tensors of single experts as one tensor of all, and what a configuration says of a mixture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.frontend.errors import ConfigError
from compiler.frontend.mixture import ExpertNames, JointExperts, joint_experts, without_layers
from compiler.frontend.registry import parse_config
from compiler.frontend.weights import Tensor, TensorInfo

MODELS = Path(__file__).parents[2] / "golden" / "models"
NAMES = ExpertNames()


class Held:
    """A source that notes what is read and released."""

    def __init__(self, arrays: Mapping[str, Tensor]) -> None:
        self.arrays, self.seen = arrays, list[tuple[str, str]]()
        self.tensors = {name: TensorInfo(a.shape, a.dtype, a.nbytes) for name, a in arrays.items()}

    def read(self, name: str) -> Tensor:
        self.seen.append(("read", name))
        return self.arrays[name]

    def release(self, name: str) -> None:
        self.seen.append(("release", name))

    def digest(self) -> str:
        return "held"


def experts(*numbers: int, part: str = "gate_proj") -> dict[str, Tensor]:
    return {f"model.layers.3.mlp.experts.{n}.{part}.weight": np.full((2, 3), n, np.float32) for n in numbers}


def test_experts_stand_as_one_tensor_by_their_numbers() -> None:
    """By their numbers: 10 comes after 9."""
    source = Held({**experts(*reversed(range(11))), "model.norm.weight": np.ones(3, np.float32)})
    joint = joint_experts(source, NAMES)
    name = "model.layers.3.mlp.experts.gate_proj.weight"
    assert {n: info.shape for n, info in joint.tensors.items()} == {name: (11, 2, 3), "model.norm.weight": (3,)}
    assert joint.tensors[name].num_bytes == 11 * 24
    np.testing.assert_array_equal(joint.read(name)[:, 0, 0], np.arange(11))
    assert joint.digest() == "held"


def test_an_expert_is_released_before_the_next_is_read() -> None:
    """Memory holds the joint tensor and one expert at a time."""
    source = Held(experts(0, 1))
    joint_experts(source, NAMES).read("model.layers.3.mlp.experts.gate_proj.weight")
    first, second = experts(0, 1)
    assert source.seen == [("read", first), ("release", first), ("read", second), ("release", second)]


def test_experts_that_are_not_complete_stay_apart() -> None:
    """The accounting then names the tensors."""
    gap, odd = Held(experts(0, 1, 3)), Held({**experts(0), "model.layers.3.mlp.experts.1.gate_proj.weight": np.ones((2, 2), np.float32)})
    assert joint_experts(gap, NAMES) is gap
    assert joint_experts(odd, NAMES) is odd
    assert joint_experts(gap, None) is gap
    assert isinstance(joint_experts(Held(experts(0)), NAMES), JointExperts)


def config(name: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads((MODELS / name / "config.json").read_text()), **changes}


def test_which_layers_are_dense() -> None:
    found = parse_config(config("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])).mixture
    assert found is not None and found.dense_layers == {0, 2, 3, 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok of config.json is 9, expected an integer from 1 to 8"),
        ({"mlp_only_layers": "first"}, "mlp_only_layers of config.json is 'first', expected a list of the numbers of layers"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(config("qwen3_moe", **changes))


def test_layers_that_predict_further_tokens_are_left_out() -> None:
    tensors = {f"model.layers.{n}.mlp.down_proj.weight": np.ones((2, 2), np.float32) for n in (0, 1, 2, 10)}
    source = without_layers(Held({**tensors, "model.norm.weight": np.ones(2, np.float32)}), 2)
    assert list(source.tensors) == [*list(tensors)[:2], "model.norm.weight"]
    assert parse_config(config("glm4_moe", num_nextn_predict_layers=1)).num_unused_layers == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, r"n_group of config.json is 3, expected a divisor of n_routed_experts \(8\)"),
        ({"topk_group": 1}, r"topk_group of config.json is 1, expected enough groups for num_experts_per_tok \(3\)"),
    ],
)
def test_groups_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(config("glm4_moe", **changes))
