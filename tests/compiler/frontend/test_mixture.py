"""If a checkpoint has separate tensors for each expert, a layer's tensors of one projection are joined into one tensor. The configuration's
fields for mixtures of experts are read, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from compiler.frontend.errors import ConfigError, DamagedFile
from compiler.frontend.families import gpt_oss, qwen3_5_moe, qwen3_vl_moe
from compiler.frontend.joint import Joint
from compiler.frontend.mixture import ExpertNames, joint_experts, without
from compiler.frontend.quantized.held import HeldWeights, forms_of
from compiler.frontend.quantized.mxfp4 import Mxfp4
from compiler.frontend.quantized.source import QuantizedWeights, methods_of
from compiler.frontend.registry import parse_config
from compiler.frontend.weights import Tensor, TensorInfo, open_safetensors
from compiler.ops.tables import INTERPRET

MODELS = Path(__file__).parents[2] / "golden" / "models"
NAMES = ExpertNames()


class Held:
    """A weight source that records which tensors are read and which are released."""

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
    """Joined experts are ordered by number and not alphabetically: expert 10 comes after expert 9."""
    source = Held({**experts(*reversed(range(11))), "model.norm.weight": np.ones(3, np.float32)})
    joint = joint_experts(source, NAMES)
    name = "model.layers.3.mlp.experts.gate_proj.weight"
    assert {n: info.shape for n, info in joint.tensors.items()} == {name: (11, 2, 3), "model.norm.weight": (3,)}
    assert joint.tensors[name].num_bytes == 11 * 24
    np.testing.assert_array_equal(joint.read(name)[:, 0, 0], np.arange(11))
    assert joint.digest() == "held"


def test_an_expert_is_released_before_the_next_is_read() -> None:
    """While experts are joined, memory holds the joined tensor and one expert at a time."""
    source = Held(experts(0, 1))
    joint_experts(source, NAMES).read("model.layers.3.mlp.experts.gate_proj.weight")
    first, second = experts(0, 1)
    assert source.seen == [("read", first), ("release", first), ("read", second), ("release", second)]


def test_experts_that_are_not_complete_stay_apart() -> None:
    """If an expert is missing or has another shape, no tensor of the mixture is joined, so that the error about missing tensors can name
    this expert."""
    gap, odd = Held(experts(0, 1, 3)), Held({**experts(0), "model.layers.3.mlp.experts.1.gate_proj.weight": np.ones((2, 2), np.float32)})
    assert joint_experts(gap, NAMES) is gap
    assert joint_experts(odd, NAMES) is odd
    assert joint_experts(gap, None) is gap
    assert isinstance(joint_experts(Held(experts(0)), NAMES), Joint)


GPT_OSS = "model.layers.1.mlp.experts"


def stacked(transposed: bool) -> dict[str, Tensor]:
    """Return the stacked tensors of two experts, each with three gate rows, three up rows and two inputs. `transposed` says whether inputs
    come before outputs, as in quantised files."""
    both = np.arange(2 * 6 * 2, dtype=np.float32).reshape(2, 6, 2)
    down = -np.arange(2 * 2 * 3, dtype=np.float32).reshape(2, 2, 3)
    ending = "" if transposed else ".weight"
    return {
        f"{GPT_OSS}.gate_up_proj{ending}": both.swapaxes(1, 2).copy() if transposed else both,
        f"{GPT_OSS}.gate_up_proj_bias": both[..., 0] + 0.5,
        f"{GPT_OSS}.down_proj{ending}": down.swapaxes(1, 2).copy() if transposed else down,
        f"{GPT_OSS}.down_proj_bias": down[..., 0] - 0.5,
    }


@pytest.mark.parametrize("transposed", [False, True])
def test_gates_and_ups_in_one_tensor_are_parted(transposed: bool) -> None:
    held = Held({**stacked(transposed), "model.norm.weight": np.ones(3, np.float32)})
    source = joint_experts(held, gpt_oss.NAMES)
    found = {name: source.read(name) for name in source.tensors}
    both = np.arange(24, dtype=np.float32).reshape(2, 6, 2)
    expected = {
        f"{GPT_OSS}.gate_proj.weight": both[:, ::2],
        f"{GPT_OSS}.gate_proj.bias": both[:, ::2, 0] + 0.5,
        f"{GPT_OSS}.up_proj.weight": both[:, 1::2],
        f"{GPT_OSS}.up_proj.bias": both[:, 1::2, 0] + 0.5,
        f"{GPT_OSS}.down_proj.weight": -np.arange(12, dtype=np.float32).reshape(2, 2, 3),
        f"{GPT_OSS}.down_proj.bias": -np.arange(12, dtype=np.float32).reshape(2, 2, 3)[..., 0] - 0.5,
        "model.norm.weight": np.ones(3, np.float32),
    }
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
        info = source.tensors[name]
        assert (info.shape, info.dtype, info.num_bytes) == (array.shape, array.dtype, array.nbytes)
    source.release(f"{GPT_OSS}.up_proj.bias")
    assert held.seen[-1] == ("release", f"{GPT_OSS}.gate_up_proj_bias")


def test_gates_and_ups_in_halves_of_one_tensor_are_parted() -> None:
    both, down = np.arange(24, dtype=np.float32).reshape(2, 6, 2), np.ones((2, 2, 3), np.float32)
    held = Held({f"{GPT_OSS}.gate_up_proj": both, f"{GPT_OSS}.down_proj": down})
    source = joint_experts(held, qwen3_5_moe.NAMES)
    expected = {"gate_proj": both[:, :3], "up_proj": both[:, 3:], "down_proj": down}
    assert source.tensors.keys() == {f"{GPT_OSS}.{name}.weight" for name in expected}
    for name, array in expected.items():
        np.testing.assert_array_equal(source.read(f"{GPT_OSS}.{name}.weight"), array)
        assert source.tensors[f"{GPT_OSS}.{name}.weight"].num_bytes == array.nbytes


def test_a_stacked_tensor_is_read_once_for_its_parts() -> None:
    """A stacked tensor is read once for all parts that it is split into, because reading may involve decoding. A later load reads the
    tensor again."""
    held = Held({f"{GPT_OSS}.gate_up_proj": np.ones((2, 6, 2), np.float32), f"{GPT_OSS}.down_proj": np.ones((2, 2, 3), np.float32)})
    source = joint_experts(held, qwen3_5_moe.NAMES)
    for num_reads in (1, 2):
        for part in ("gate_proj", "up_proj", "down_proj"):
            source.read(f"{GPT_OSS}.{part}.weight")
            source.release(f"{GPT_OSS}.{part}.weight")
        for stored in ("gate_up_proj", "down_proj"):
            assert held.seen.count(("read", f"{GPT_OSS}.{stored}")) == num_reads


def test_stacked_experts_of_another_shape_stay_what_they_are() -> None:
    """Stacked experts of an unexpected shape are not split, so that the error about tensors can name the stacked tensor."""
    odd = {f"{GPT_OSS}.gate_up_proj": np.ones((2, 2, 5), np.float32), f"{GPT_OSS}.down_proj": np.ones((4, 5), np.float32)}
    assert joint_experts(Held(odd), gpt_oss.NAMES).tensors.keys() == odd.keys()


@pytest.mark.parametrize("names", [qwen3_5_moe.NAMES, qwen3_vl_moe.FAMILY.experts], ids=["qwen3_5_moe", "qwen3_vl_moe"])
def test_files_stack_experts_or_have_a_tensor_for_each(names: ExpertNames) -> None:
    """Published models stack the experts; quantised versions have a tensor for each part of each expert."""
    rng, at = np.random.default_rng(0), "model.layers.0.mlp.experts"
    gate, up, down = (rng.standard_normal(shape, np.float32) for shape in ((2, 3, 4), (2, 3, 4), (2, 4, 3)))
    both = np.concatenate([gate, up], 1)
    stacked = {"gate_up_proj": both.swapaxes(1, 2), "down_proj": down.swapaxes(1, 2)} if names.inputs_first else {}
    stacked = {f"{at}.{part}": value for part, value in (stacked or {"gate_up_proj": both, "down_proj": down}).items()}
    apart = {
        f"{at}.{number}.{part}_proj.weight": value[number]
        for part, value in (("gate", gate), ("up", up), ("down", down))
        for number in range(2)
    }
    for arrays in (stacked, apart):
        source = joint_experts(Held(arrays), names)
        for part, value in (("gate", gate), ("up", up), ("down", down)):
            np.testing.assert_array_equal(source.read(f"{at}.{part}_proj.weight"), value)


def test_experts_in_mxfp4_are_those_that_were_written(tmp_path: Path) -> None:
    """MXFP4 tensors decode to the numbers that the standard defines, for all 16 codes and for scales from 2^-7 to 2^2."""
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = np.random.default_rng(0).integers(0, 16, (2, 6, 2, 32), np.uint8)  # [experts, out, blocks, inputs of a block]
    scales = np.random.default_rng(1).integers(120, 130, (2, 6, 2), np.uint8)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    name = f"{GPT_OSS}.gate_up_proj"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, tmp_path / "model.safetensors")
    methods = methods_of({"quantization_config": {"quant_method": "mxfp4"}})
    assert methods
    source = joint_experts(QuantizedWeights(open_safetensors(tmp_path), methods), gpt_oss.NAMES)
    values = (numbers[codes] * 2.0 ** (scales[..., None].astype(int) - 127)).reshape(2, 6, 64)
    np.testing.assert_array_equal(source.read(f"{GPT_OSS}.gate_proj.weight"), values[:, ::2])
    np.testing.assert_array_equal(source.read(f"{GPT_OSS}.up_proj.weight"), values[:, 1::2])
    held = joint_experts(HeldWeights(QuantizedWeights(open_safetensors(tmp_path), methods)), gpt_oss.NAMES)
    assert forms_of(held.tensors).keys() == source.tensors.keys()
    for matrix in source.tensors:
        parts = [held.read(f"{matrix}.{part}") for part in ("e2m1", "scale")]
        attrs = {"bits": 4, "group": 32, "shifted": False, "dtype": "f32", "kind": "e2m1"}
        np.testing.assert_array_equal(INTERPRET["dequantize"](*parts, **attrs), source.read(matrix))


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    blocks, scales = np.zeros((1, 2, 1, 16), np.uint8), np.array([[[127], [255]]], np.uint8)
    save_file({"m_blocks": blocks, "m_scales": scales}, tmp_path / "model.safetensors")
    with pytest.raises(DamagedFile, match=r"'m\.weight': its scales hold 255, which stands for NaN; expected at most 254"):
        QuantizedWeights(open_safetensors(tmp_path), (Mxfp4(),)).read("m.weight")


def config(name: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads((MODELS / name / "config.json").read_text()), **changes}


def test_which_layers_are_dense() -> None:
    found = parse_config(config("qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])).mixture
    assert found is not None and found.dense_layers == {0, 2, 3, 4}


def test_newer_files_have_another_name_for_the_number_of_experts() -> None:
    values = config("qwen3_moe")
    renamed = {**{name: value for name, value in values.items() if name != "num_experts"}, "num_local_experts": values["num_experts"]}
    assert parse_config(renamed) == parse_config(values)


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
    found = parse_config(config("glm4_moe", num_hidden_layers=2, num_nextn_predict_layers=9))
    source = without(Held({**tensors, "model.norm.weight": np.ones(2, np.float32)}), found.unused)
    assert list(source.tensors) == [*list(tensors)[:2], "model.norm.weight"]
    assert parse_config(config("glm4_moe")).unused == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, r"n_group of config.json is 3, expected a divisor of n_routed_experts \(8\)"),
        ({"topk_group": 1}, r"topk_group of config.json is 1, expected groups with at least num_experts_per_tok \(3\) experts together"),
    ],
)
def test_groups_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(config("glm4_moe", **changes))
