"""Quantised checkpoints decode to the values that the reference library of their quantisation method computes."""

from __future__ import annotations

import json
from math import gcd
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from compiler.frontend.errors import ConfigError, DamagedFile
from compiler.frontend.quantized.awq import Awq
from compiler.frontend.quantized.fp8 import Scaled
from compiler.frontend.quantized.held import Form, HeldWeights, Offset, forms_of
from compiler.frontend.quantized.source import QuantizedWeights, methods_beside, methods_of
from compiler.frontend.weights import open_safetensors
from compiler.ir.dtypes import DType
from compiler.ir.numbers import FLOATS_OF_CODES, SPLIT, SPLIT_STEP, Kind
from compiler.ops.tables import INTERPRET
from tests.compiler.frontend.quantized_files import awq, bitsandbytes, gptq

GOLDEN = Path(__file__).parents[2] / "golden" / "quantized"
RNG = np.random.default_rng(0)
INPUTS, OUTPUTS, GROUPS = 64, 32, 2
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def opened(path: Path, config: dict[str, Any]) -> QuantizedWeights:
    methods = methods_of({"quantization_config": config})
    assert methods
    return QuantizedWeights(open_safetensors(path), methods)


def written(folder: Path, config: dict[str, Any], parts: dict[str, Any], **others: Any) -> QuantizedWeights:
    path = folder / "model.safetensors"
    save_file({**{f"a.b.{part}": value for part, value in parts.items()}, **others}, path)
    return opened(path, config)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.safetensors")), ids=lambda path: path.stem)
def test_values_are_those_of_the_reference(path: Path) -> None:
    with safe_open(path, "np") as file:
        config = json.loads(file.metadata()["quantization_config"])
    source = opened(path, config)
    (name,) = source.tensors.keys() - {"expected"}
    values, info = source.read(name), source.tensors[name]
    assert name in ("m", "m.weight") and (info.shape, info.dtype) == (values.shape, values.dtype) and values.dtype == np.float32
    np.testing.assert_array_equal(values, source.read("expected"))


def decoded(source: QuantizedWeights, name: str) -> Any:
    """Return the values that a program computes from the stored integers of a tensor."""
    held, form = HeldWeights(source), source.forms[name]
    assert forms_of(held.tensors)[name] == form and name not in held.tensors
    parts = [held.read(f"{name}.{part}") for part in form.parts]
    for part, value in zip(form.parts, parts, strict=True):
        info = held.tensors[f"{name}.{part}"]
        assert (value.shape, value.dtype) == (info.shape, info.dtype)
    attrs = {"bits": form.bits, "group": form.group, "shifted": form.offset is Offset.SHIFT, "dtype": "f32", "kind": form.kind}
    values = INTERPRET["dequantize"](*parts[: len(form.numbers)], **attrs)
    return values[:, np.argsort(parts[-1])] if form.ordered else values


INTEGERS = sorted(path for pattern in ("int*", "*[xv]fp4*") for path in GOLDEN.glob(f"{pattern}.safetensors"))


@pytest.mark.parametrize("path", INTEGERS, ids=lambda path: path.stem)
def test_what_a_program_holds_are_the_values_of_the_reference(path: Path) -> None:
    with safe_open(path, "np") as file:
        config = json.loads(file.metadata()["quantization_config"])
    source = opened(path, config)
    np.testing.assert_array_equal(decoded(source, "m.weight"), source.read("expected"))


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("bitsandbytes*.safetensors")), ids=lambda path: path.stem)
def test_codes_of_floats_are_held_as_two_numbers(path: Path) -> None:
    """The sum of both numbers is the float of the code but for a rounding, which is smaller than that of bf16."""
    with safe_open(path, "np") as file:
        config = json.loads(file.metadata()["quantization_config"])
    source, kind = opened(path, config), Kind(config["bnb_4bit_quant_type"])
    larger, form = decoded(source, "m.weight"), source.forms["m.weight"]
    held = HeldWeights(source)
    codes, scale = held.read(f"m.weight.{kind}"), held.read("m.weight.scale") / SPLIT_STEP
    rest = INTERPRET["dequantize"](codes, scale, bits=4, group=64, shifted=False, dtype="f32", kind=SPLIT[kind].rest)
    expected = source.read("expected")
    most = np.abs(expected).max(1, keepdims=True) * (4e-5 if kind is Kind.NF4 else 2e-7)
    assert form == Form(4, 64, DType.F32, kind=kind) and (np.abs(larger + rest - expected) <= most).all()
    assert not (np.abs(larger - expected) <= most).all()


def test_parts_of_a_matrix_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program reads the codes of the matrices that it stacks before their scales. All parts of a matrix are made at once, and made again
    only if one is read a second time."""
    source = opened(GOLDEN / "int4_group.safetensors", COMPRESSED)
    made, parts = [], source.parts
    monkeypatch.setattr(source, "parts", lambda name: made.append(name) or parts(name))
    held = HeldWeights(source)
    first = [held.read(f"m.weight.{part}") for part in ("q", "scale")]
    assert made == ["m.weight"]
    np.testing.assert_array_equal(held.read("m.weight.scale"), first[1])
    assert made == ["m.weight"] * 2


def with_codes(**changes: Any) -> dict[str, Any]:
    """Return a matrix [4, 128] as bitsandbytes stores it, with some of its parts or fields of its quant_state changed."""
    codes, absmax = RNG.integers(0, 16, (4, 128)).astype(np.uint8), RNG.random((4, 2), np.float32)
    fields = {name: value for name, value in changes.items() if name in ("blocksize", "shape", "nested_blocksize", "nested_offset")}
    return {**bitsandbytes(codes, absmax, "nf4", **fields), **{f"weight.{name}": v for name, v in changes.items() if name not in fields}}


NESTED = {
    "nested_blocksize": 256,
    "nested_absmax": np.ones(1, np.float32),
    "nested_quant_map": np.linspace(-1, 1, 256, dtype=np.float32),
}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def test_groups_across_rows_are_held_as_values(tmp_path: Path) -> None:
    codes, absmax = RNG.integers(0, 16, (4, 96)).astype(np.uint8), RNG.random((6,), np.float32)
    source = written(tmp_path, NF4, bitsandbytes(codes, absmax, "nf4"))
    assert not source.forms and source.tensors["a.b.weight"].shape == (4, 96)
    expected = FLOATS_OF_CODES[Kind.NF4][codes].reshape(6, 64) * absmax[:, None]
    np.testing.assert_array_equal(source.read("a.b.weight"), expected.reshape(4, 96))


def test_codes_may_be_stored_as_numbers_of_another_type(tmp_path: Path) -> None:
    parts = with_codes()
    expected = written(tmp_path, NF4, parts).read("a.b.weight")
    parts["weight"] = parts["weight"].reshape(-1).view(np.float32)
    np.testing.assert_array_equal(written(tmp_path, NF4, parts).read("a.b.weight"), expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shape": [4, 126]}, r"its weight has 256 bytes, expected 252 for \[4, 126\] codes of 4 bits"),
        ({"shape": [512]}, r"shape of its quant_state is \[512\], expected two positive integers"),
        ({"blocksize": 0}, "blocksize of its quant_state is 0, expected an integer from 1"),
        ({"blocksize": 32}, r"its absmax|its weight.absmax is float32 \[8\], expected \[16\]"),
        ({"nested_blocksize": 256}, "its scales are not nested, expected what its quant_state says"),
        ({"nested_offset": "0"}, "nested_offset of its quant_state is '0', expected a number"),
        ({"nested_offset": 10**400}, "nested_offset of its quant_state is 1000.*, expected a number"),
        ({"nested_offset": float("nan")}, "nested_offset of its quant_state is nan, expected a number"),
        ({"quant_state.bitsandbytes__nf4": np.frombuffer(b"[" * 4000, np.uint8)}, "its quant_state is b'.*, expected JSON"),
        ({**NESTED, "absmax": np.full(8, 300, np.uint16)}, "its weight.absmax has 16 bytes, expected 8: one for each group"),
        ({"quant_state.bitsandbytes__nf4": np.frombuffer(b"{]", np.uint8)}, "its quant_state is b'{]', expected JSON"),
        ({"quant_state.bitsandbytes__nf4": np.zeros(5000, np.uint8)}, "its quant_state is None, expected an object"),
        ({"quant_map": np.zeros(16, np.float32)}, "its weight.quant_map is .*, expected the floats of nf4"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_no_matrix_of_codes_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedFile, match=said):
        written(tmp_path, NF4, with_codes(**changes)).read("a.b.weight")


def test_every_scale_of_mxfp4_is_held_exactly(tmp_path: Path) -> None:
    """Scales are powers of two from 2^-127 to 2^127, of which the least are subnormal in f32 and in bf16."""
    scales = np.arange(255, dtype=np.uint8).reshape(1, 255, 1)
    blocks = np.full((1, 255, 1, 16), 0x71, np.uint8)  # 0.5 and 6
    save_file({"m_blocks": blocks, "m_scales": scales}, tmp_path / "model.safetensors")
    source = opened(tmp_path / "model.safetensors", {"quant_method": "mxfp4"})
    with np.errstate(over="ignore"):
        expected = np.array([0.5, 6], np.float32) * np.ldexp(1.0, np.arange(-127, 128))[:, None].astype(np.float64)
        expected = np.tile(expected.astype(np.float32), 16)[None]
        np.testing.assert_array_equal(source.read("m.weight"), expected)
        np.testing.assert_array_equal(decoded(source, "m.weight"), expected)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*fp8*.safetensors")), ids=lambda path: path.stem)
def test_floats_of_eight_bits_are_held_as_they_are(path: Path) -> None:
    with safe_open(path, "np") as file:
        source = opened(path, json.loads(file.metadata()["quantization_config"]))
    held = HeldWeights(source)
    assert held.tensors["m.weight.e4m3"].num_bytes == np.prod(source.tensors["m.weight"].shape)
    np.testing.assert_array_equal(held.read("m.weight.e4m3"), source.parts("m.weight")["e4m3"])
    np.testing.assert_array_equal(decoded(source, "m.weight"), source.read("expected"))


FP8 = {"quant_method": "fp8", "weight_block_size": [16, 32]}


@pytest.mark.parametrize("shape", [(40, 80), (32, 32), (1, 64), (16, 24)])
@pytest.mark.parametrize("scale", [np.float32, np.float16, DType.BF16.numpy], ids=str)
def test_blocks_of_floats_that_are_not_whole(shape: tuple[int, int], scale: Any, tmp_path: Path) -> None:
    rows, columns = shape
    weight = RNG.integers(0, 127, shape).astype(np.uint8).view(DType.E4M3.numpy)
    scales = RNG.random((-(-rows // 16), -(-columns // 32))).astype(scale)
    source = written(tmp_path, FP8, {"weight": weight, "weight_scale_inv": scales})
    assert source.forms["a.b.weight"].group == (gcd(32, columns) if columns > 32 else columns)
    np.testing.assert_array_equal(decoded(source, "a.b.weight"), source.read("a.b.weight"))


def test_floats_with_more_exponents_are_held_as_values(tmp_path: Path) -> None:
    weight = np.ones((16, 32), ml_dtypes.float8_e5m2)
    assert not written(tmp_path, FP8, {"weight": weight, "weight_scale_inv": np.ones((1, 1), np.float32)}).forms


def test_floats_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    weight = np.zeros((16, 32), DType.E4M3.numpy)
    weight[3, 5] = np.nan
    source = written(tmp_path, FP8, {"weight": weight, "weight_scale_inv": np.ones((1, 1), np.float32)})
    with pytest.raises(DamagedFile, match=r"tensor 'a.b.weight': its weight holds NaN, expected numbers"):
        source.parts("a.b.weight")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("stated", [False, True])
def test_gptq_is_held_as_integers(bits: int, kind: str, symmetric: bool, ordered: bool, stated: bool, tmp_path: Path) -> None:
    """GPTQ weights stay integers. Whether they have zero points and an order of columns is read from the tensors, even if the configuration
    says otherwise."""
    numbers, zeros, scales = drawn(bits)
    if symmetric:
        zeros = np.full_like(zeros, 1 << bits - 1)
    groups = np.arange(INPUTS) // 32
    if ordered:
        groups = RNG.permutation(groups)
    parts = gptq(numbers, zeros, scales, bits, zero_offset=kind == "gptq", groups=groups)
    source = written(tmp_path, {**GPTQ, "bits": bits, "checkpoint_format": kind, "sym": stated, "desc_act": stated}, parts)
    form = source.forms["a.b.weight"]
    assert (form.offset, form.ordered) == (Offset.NONE if symmetric else Offset.ZERO, ordered)
    expected = scales.astype(np.float32)[groups] * (numbers - zeros[groups])
    np.testing.assert_array_equal(decoded(source, "a.b.weight"), expected.T.astype(np.float32))
    np.testing.assert_array_equal(decoded(source, "a.b.weight"), source.read("a.b.weight"))


def test_groups_of_different_sizes_are_held_as_values(tmp_path: Path) -> None:
    groups = np.arange(INPUTS) // 33
    assert not written(tmp_path, GPTQ, gptq(*drawn(4), 4, groups=groups)).forms


@pytest.mark.parametrize(
    "config",
    [
        {**GPTQ, "group_size": 20},
        {**GPTQ, "group_size": -1, "dynamic": {"+:b": {"group_size": 20}}},
        {"quant_method": "auto-round", "bits": 4, "group_size": 20, "packing_format": "auto_round:auto_gptq"},
        {"quant_method": "auto-round", "bits": 4, "group_size": None, "extra_config": {"a.b": {"group_size": 20}}},
    ],
    ids=["gptq", "gptq-dynamic", "auto-round", "auto-round-extra"],
)
@pytest.mark.parametrize("inputs", [48, 56])
@pytest.mark.parametrize("stated", [False, True])
def test_the_last_group_may_be_shorter(config: dict[str, Any], inputs: int, stated: bool, tmp_path: Path) -> None:
    """AutoRound quantises matrices whose number of inputs the size of a group does not divide, and writes no g_idx. The three groups of 48
    inputs must not be taken for groups of 16."""
    numbers, scales = RNG.integers(0, 16, (inputs, OUTPUTS)), RNG.random((3, OUTPUTS)).astype(np.float16)
    groups = np.arange(inputs) // 20
    source = written(tmp_path, config, gptq(numbers, np.full(scales.shape, 8), scales, 4, groups=groups if stated else None))
    expected = scales.astype(np.float32)[groups] * (numbers - 8)
    np.testing.assert_array_equal(source.read("a.b.weight"), expected.T.astype(np.float32))
    assert not source.forms


@pytest.mark.parametrize("inputs", [32, 64])
def test_groups_that_may_be_longer_than_the_matrix_are_one_group(inputs: int, tmp_path: Path) -> None:
    numbers, scales = RNG.integers(0, 16, (inputs, OUTPUTS)), RNG.random((1, OUTPUTS)).astype(np.float16)
    config = {**GPTQ, "group_size": 128, "dynamic": {"+:b": {"group_size": 64}}}
    source = written(tmp_path, config, gptq(numbers, np.full(scales.shape, 8), scales, 4))
    assert source.forms["a.b.weight"].group == inputs
    np.testing.assert_array_equal(source.read("a.b.weight"), (scales.astype(np.float32) * (numbers - 8)).T.astype(np.float32))


def test_sizes_of_groups_that_do_not_decide_are_refused(tmp_path: Path) -> None:
    numbers, scales = RNG.integers(0, 16, (48, OUTPUTS)), RNG.random((3, OUTPUTS)).astype(np.float16)
    parts = gptq(numbers, np.full(scales.shape, 8), scales, 4)
    assert written(tmp_path, {**GPTQ, "group_size": 7}, parts).forms["a.b.weight"].group == 16
    with pytest.raises(DamagedFile, match="those of 3 groups of 16 or 20 inputs"):
        written(tmp_path, {**GPTQ, "group_size": 20, "dynamic": {"+:b": {"group_size": 16}}}, parts)
    numbers = RNG.integers(0, 16, (56, OUTPUTS))
    with pytest.raises(DamagedFile, match="expected a number of groups that divides 56 inputs, or groups of 7"):
        written(tmp_path, {**GPTQ, "group_size": 7}, gptq(numbers, np.full(scales.shape, 8), scales, 4))


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_packed_integers_are_held_by_group(zero_points: bool, ordered: bool, tmp_path: Path) -> None:
    numbers, zeros, scales = drawn(4)
    groups = np.arange(INPUTS) // 32
    if ordered:
        groups = RNG.permutation(groups)
    words = gptq(numbers, zeros, scales, 4, zero_offset=0)
    parts = {
        "weight_packed": np.ascontiguousarray(words["qweight"].T),
        "weight_scale": np.ascontiguousarray(scales.T),
        "weight_shape": np.array([OUTPUTS, INPUTS]),
        "weight_g_idx": groups.astype(np.int32),
    }
    if zero_points:
        parts["weight_zero_point"] = np.ascontiguousarray(words["qzeros"].T)
    source = written(tmp_path, COMPRESSED, parts)
    assert source.forms["a.b.weight"].ordered == ordered
    expected = scales.astype(np.float32)[groups] * (numbers - (zeros[groups] if zero_points else 8))
    np.testing.assert_array_equal(decoded(source, "a.b.weight"), expected.T.astype(np.float32))
    np.testing.assert_array_equal(decoded(source, "a.b.weight"), source.read("a.b.weight"))


def test_awq_is_held_as_integers(tmp_path: Path) -> None:
    source = written(tmp_path, AWQ, awq(*drawn(4)), **{"a.embed.weight": np.ones(3, np.float32)})
    np.testing.assert_array_equal(decoded(source, "a.b.weight"), source.read("a.b.weight"))
    held = HeldWeights(source)
    assert held.digest() == source.digest() and set(held.read("a.embed.weight")) == {1}
    held.release("a.b.weight.q")
    held.release("a.embed.weight")


def drawn(bits: int) -> tuple[Any, Any, Any]:
    numbers = RNG.integers(0, 1 << bits, (INPUTS, OUTPUTS))
    zeros = RNG.integers(1, 1 << bits, (GROUPS, OUTPUTS))
    return numbers, zeros, RNG.random((GROUPS, OUTPUTS)).astype(np.float16)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("kind", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("reordered", [False, True])
def test_gptq(bits: int, kind: str, reordered: bool, tmp_path: Path) -> None:
    numbers, zeros, scales = drawn(bits)
    groups = RNG.integers(0, GROUPS, INPUTS) if reordered else np.repeat(np.arange(GROUPS), INPUTS // GROUPS)
    parts = gptq(numbers, zeros, scales, bits, zero_offset=kind == "gptq", groups=groups if reordered else None)
    source = written(tmp_path, {**GPTQ, "bits": bits, "checkpoint_format": kind}, parts, norm=np.ones(3, np.float32))
    assert set(source.tensors) == {"a.b.weight", "norm"}
    expected = scales.astype(np.float32)[groups] * (numbers - zeros[groups])
    np.testing.assert_array_equal(source.read("a.b.weight"), expected.T.astype(np.float32))
    np.testing.assert_array_equal(source.read("norm"), 1)


def test_awq(tmp_path: Path) -> None:
    numbers, zeros, scales = drawn(4)
    source = written(tmp_path, AWQ, awq(numbers, zeros, scales))
    groups = np.repeat(np.arange(GROUPS), INPUTS // GROUPS)
    expected = scales.astype(np.float32)[groups] * (numbers - zeros[groups])
    np.testing.assert_array_equal(source.read("a.b.weight"), expected.T.astype(np.float32))
    source.release("a.b.weight")
    assert source.tensors["a.b.weight"].num_bytes == numbers.size // 2 + zeros.size // 2 + scales.nbytes


INT4 = {"weights": {"num_bits": 4, "type": "int"}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": INT4}}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "packing_format": "auto_round:auto_gptq"}


def test_scales_for_cached_keys_and_activations_are_left_out(tmp_path: Path) -> None:
    """Keys, values and activations are stored in other types than the checkpoint proposes."""
    parts = {"weight": np.ones((16, 32), DType.E4M3.numpy), "weight_scale": np.ones((1,), np.float32)}
    scheme = {"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8, "type": "float", "dynamic": False}}
    config = {
        **COMPRESSED,
        "format": "float-quantized",
        "config_groups": {"group_0": scheme},
        "kv_cache_scheme": {"num_bits": 8},
        "provider": "auto-round",
    }
    one = np.ones(1, np.float32)
    scales = {"a.b.input_scale": one, "a.k_scale": one, "a.v_scale": one, "a.k_proj.k_scale": one, "a.v_proj.v_scale": one}
    assert written(tmp_path, config, parts, **scales).tensors.keys() == {"a.b.weight"}
    results = {"a.b.output_scale": one, "a.b.output_zero_point": one}
    assert written(tmp_path, config, parts, **results).tensors.keys() == {"a.b.weight"}
    static = {"weight": parts["weight"], "weight_scale_inv": np.ones((), np.float32)}
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    source = written(tmp_path, config, static, **{"a.b.activation_scale": one})
    assert source.tensors.keys() == {"a.b.weight"} and source.forms["a.b.weight"].group == 32


def test_only_the_cache_may_be_quantised(tmp_path: Path) -> None:
    """compressed-tensors then states that the weights are dense, and the file has scales of keys and values beside them."""
    config = {**COMPRESSED, "format": "dense", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    one = np.ones(1, np.float32)
    source = written(tmp_path, config, {"weight": np.ones((16, 32), np.float32)}, **{"a.k_scale": one, "a.v_scale": one})
    assert source.tensors.keys() == {"a.b.weight"} and not source.forms


def nvfp4(scale_name: str) -> dict[str, Any]:
    """Return the parts of a matrix in the format of Model Optimizer or of compressed-tensors, with the same values."""
    packed = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scales = (np.arange(32).reshape(16, 2) + 1).astype(DType.E4M3.numpy)
    if scale_name == "weight_scale_2":
        return {"weight": packed, "weight_scale": scales, scale_name: np.array(0.25, np.float32), "input_scale": np.ones((), np.float32)}
    return {
        "weight_packed": packed,
        "weight_scale": scales,
        scale_name: np.array([4], np.float32),
        "input_global_scale": np.ones(1, np.float32),
    }


def test_model_optimizer_multiplies_by_the_factor_by_which_others_divide(tmp_path: Path) -> None:
    values = []
    for name, config in (
        ("weight_scale_2", {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8}}),
        ("weight_global_scale", {"quant_method": "compressed-tensors", **NVFP4_SCHEME}),
    ):
        source = written(tmp_path, config, nvfp4(name))
        assert source.tensors.keys() == {"a.b.weight"} and source.forms["a.b.weight"] == Form(4, 16, DType.F32, kind=Kind.E2M1)
        np.testing.assert_array_equal(decoded(source, "a.b.weight"), source.read("a.b.weight"))
        values.append(source.read("a.b.weight"))
    np.testing.assert_array_equal(*values)
    assert values[0][15, 31] == -6 * 32 * 0.25  # byte 255 is twice -6


NVFP4_SCHEME: dict[str, Any] = {
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
}


def test_matrices_of_one_checkpoint_may_have_different_formats(tmp_path: Path) -> None:
    """Publishers may store experts in 4 bits and attention in 8 bits, so each matrix has a form of its own."""
    fp8 = {"a.c.weight": np.ones((16, 32), DType.E4M3.numpy), "a.c.weight_scale": np.ones((16, 1), np.float32)}
    source = written(tmp_path, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, nvfp4("weight_scale_2"), **fp8)
    assert {name: form.kind for name, form in source.forms.items()} == {"a.b.weight": Kind.E2M1, "a.c.weight": Kind.E4M3}
    groups = {
        "group_0": {"weights": {"num_bits": 8, "type": "float"}, "format": "float-quantized"},
        "group_1": {**INT4, "format": "pack-quantized"},
        "group_2": {**NVFP4_SCHEME["config_groups"]["group_0"], "format": "nvfp4-pack-quantized"},
        "group_3": {"weights": None},
    }
    packed, scales = np.zeros((16, 4), np.int32), np.ones((16, 1), np.float32)
    int4 = {"a.d.weight_packed": packed, "a.d.weight_scale": scales, "a.d.weight_shape": np.array([16, 32], np.int64)}
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    source = written(tmp_path, config, nvfp4("weight_global_scale"), **fp8, **int4)
    kinds = {name: (form.kind, form.bits) for name, form in source.forms.items()}
    assert kinds == {"a.b.weight": (Kind.E2M1, 4), "a.c.weight": (Kind.E4M3, 8), "a.d.weight": (Kind.INT, 4)}
    assert source.tensors.keys() == kinds.keys()


@pytest.mark.parametrize(
    "config",
    [
        {**GPTQ, "dynamic": {"lm_head": {"bits": 8}, r"-:.*gate": {}, ".*v_proj": {"group_size": 32}}},
        {**AUTO_ROUND, "extra_config": {"a.c": {"bits": 8}, "a.gate": {"bits": 16, "data_type": "float"}}},
    ],
    ids=["gptq", "auto-round"],
)
def test_the_bits_of_each_matrix_follow_from_its_tensors(config: dict[str, Any], tmp_path: Path) -> None:
    four, eight = (gptq(*drawn(bits), bits) for bits in (4, 8))
    source = written(tmp_path, config, four, **{f"a.c.{part}": value for part, value in eight.items()})
    assert {name: form.bits for name, form in source.forms.items()} == {"a.b.weight": 4, "a.c.weight": 8}
    assert {info.shape for info in source.tensors.values()} == {(OUTPUTS, INPUTS)}
    for name in source.forms:
        np.testing.assert_array_equal(decoded(source, name), source.read(name))


def test_auto_round_may_pack_like_awq(tmp_path: Path) -> None:
    parts = awq(*drawn(4))
    found = written(tmp_path, {**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, parts).read("a.b.weight")
    np.testing.assert_array_equal(found, written(tmp_path, AWQ, parts).read("a.b.weight"))


def test_auto_round_may_export_awq(tmp_path: Path) -> None:
    """AutoRound writes the method "awq" and its own settings beside the fields of AutoAWQ."""
    parts = awq(*drawn(4))
    own = {
        "autoround_version": "0.16.1",
        "data_type": "int",
        "provider": "auto-round",
        "to_quant_block_names": "model.layers",
        "iters": 200,
    }
    found = written(tmp_path, {**AWQ, **own}, parts).read("a.b.weight")
    np.testing.assert_array_equal(found, written(tmp_path, AWQ, parts).read("a.b.weight"))


@pytest.mark.parametrize(
    ("stated", "zero_offset"),
    [
        ({"packing_format": "auto_round"}, 0),
        ({"packing_format": "auto_round:auto_gptq"}, 1),
        ({"packing_format": "auto_round:gptq", "backend": "auto"}, 1),
        ({"backend": "autoround:exllamav2"}, 0),  # older files state the kernel in place of the packing
        ({"backend": "auto_round:gptq:exllamav2"}, 1),
        ({}, 1),
    ],
)
def test_auto_round_stores_zero_points_as_they_are_in_its_own_packing(tmp_path: Path, stated: dict[str, str], zero_offset: int) -> None:
    numbers, zeros, scales = drawn(4)
    config = {"quant_method": "intel/auto-round", "bits": 4, "group_size": 32, "sym": False, **stated}
    source = written(tmp_path, config, gptq(numbers, zeros, scales, 4, zero_offset=zero_offset))
    groups = np.repeat(np.arange(GROUPS), INPUTS // GROUPS)
    expected = scales.astype(np.float32)[groups] * (numbers - zeros[groups])
    np.testing.assert_array_equal(source.read("a.b.weight"), expected.T.astype(np.float32))
    np.testing.assert_array_equal(decoded(source, "a.b.weight"), source.read("a.b.weight"))


def test_older_files_of_auto_round_may_be_packed_as_awq_does() -> None:
    found = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "backend": "auto_round:awq"}
    assert methods_of({"quantization_config": found}) == (Awq(),)


def test_configurations_that_transformers_5_writes_are_read() -> None:
    fp8 = {"quant_method": "fp8", "modules_to_not_convert": None, "modules_to_convert": None, "activation_scheme": "dynamic"}
    fp8 |= {"weight_block_size": [128, 128], "dequantize": False, "scale_fmt": "float", "expert_dtype": "fp8"}
    assert methods_of({"quantization_config": fp8}) == (Scaled("weight_scale_inv", (128, 128)),)
    awq = {**AWQ, "damp_percent": 0.1, "desc_act": False, "act_group_aware": True, "sym": True, "true_sequential": True, "meta": None}
    awq |= {
        "format": "gemm",
        "checkpoint_format": "gemm",
        "pack_dtype": "int32",
        "lm_head": False,
        "backend": "auto",
        "batch_size": 1,
        "cache_block_outputs": True,
    }
    assert methods_of({"quantization_config": awq}) == methods_of({"quantization_config": AWQ})


def test_older_files_of_model_optimizer_state_the_format_beside_the_configuration(tmp_path: Path) -> None:
    assert methods_beside(tmp_path, {}) == ()
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": []}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated))
    assert methods_beside(tmp_path, {}) == (Scaled("weight_scale"),)
    (tmp_path / "hf_quant_config.json").unlink()
    (tmp_path / "hf_quant_config.json").symlink_to(tmp_path / "lost")
    with pytest.raises(ConfigError, match="lost, which does not exist"):
        methods_beside(tmp_path, {})


def test_the_first_configurations_of_model_optimizer_do_not_name_the_method() -> None:
    stated = {"quant_algo": "FP8", "kv_cache_scheme": "FP8", "producer": {"name": "modelopt", "version": "0.31.0"}, "ignore": ["lm_head"]}
    assert methods_of({"quantization_config": stated}) == (Scaled("weight_scale"),)


def scheme(kind: str, **weights: Any) -> dict[str, Any]:
    """Return the configuration of compressed-tensors whose matrices have 8 bits."""
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": {"weights": {"num_bits": 8, **weights}}}}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"quant_method": "hqq"},
            "quantised by hqq; known are auto-round, awq, bitsandbytes, compressed-tensors.* or without quantisation",
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit of .* is True, expected false: .*NF4, FP4"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type of .* is 'nf3', expected nf4 or fp4"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype of .* is 'fp4', expected fp8"),
        ({**AWQ, "format": "gemv"}, "format of .* is 'gemv', expected gemm; weights packed for gemv have another order"),
        ({**GPTQ, "bits": 3}, "bits of quantization_config of config.json is 3, expected 2, 4 or 8, .* with --quantize"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "expected gptq or gptq_v2"),
        ({**GPTQ, "dynamic": {"lm_head": {"bits": 3}}}, "expected 2, 4 or 8, but the file names 4, 3"),
        ({**GPTQ, "pack_dtype": "int8"}, "pack_dtype of .* is 'int8', expected int32: .* Pack the model again"),
        ({**GPTQ, "dynamic": ["lm_head"]}, "expected an object of settings by pattern"),
        (
            {**AUTO_ROUND, "packing_format": "auto_round:fp8"},
            "packing_format of .* expected auto_round, auto_round:auto_gptq, or auto_round:auto_awq",
        ),
        ({**AUTO_ROUND, "data_type": "mx_fp"}, "data_type of .* expected int. Take the model in another"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
            "quant_algo of .* is 'W4A16_AWQ', expected FP8, NVFP4 or MIXED_PRECISION. Take the model in another",
        ),
        ({"group_size": 64, "bits": 4, "mode": "affine"}, "quantised by MLX; take the model's original checkpoint or a GGUF file"),
        ({**AWQ, "version": "gemv"}, "weights packed for gemv have another order"),
        ({**AWQ, "rotation": 7}, "has unsupported fields: rotation 7"),
        ({**AWQ, "autoround_version": "0.16.1", "data_type": "mx_fp"}, "data_type of .* expected int. Take the model in another"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "expected two positive integers"),
        ({**COMPRESSED, "config_groups": {}}, "an object of schemes"),
        (
            {**COMPRESSED, "format": "nvfp4-pack-quantized"},
            "group_0 of config_groups has the format 'nvfp4-pack-quantized' of int4, expected",
        ),
        (
            {**COMPRESSED, "config_groups": {"a": INT4, "b": {"weights": {"num_bits": 8, "type": "int"}}}},
            "the same number of bits .* or without quantisation and with --quantize",
        ),
        (scheme("pack-quantized", type="int", strategy="tensor"), "strategy of weights .* is 'tensor', expected group or channel. Take"),
        (scheme("int-quantized", type="int", strategy="tensor"), "strategy of weights .* is 'tensor', expected group or channel. Take"),
        (scheme("naive-quantized", type="float", strategy="group"), "is 'group', expected tensor or channel or block. Take"),
        (scheme("mxfp8-quantized", type="float", strategy="group"), "'mxfp8-quantized' of float8, expected .* with --quantize"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"r": {}}}}, "transform_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_nothing_honours_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        methods_of({"quantization_config": config})


def test_parts_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    numbers, zeros, scales = drawn(4)
    good = gptq(numbers, zeros, scales, 4, groups=np.arange(INPUTS) // 32)
    for part, value, said in (
        ("qzeros", None, "has no 'a.b.qzeros' beside it"),
        ("scales", scales[:, 1:], r"its scales is float16 \[2, 31\], expected \[2, 32\]"),
        ("scales", np.ones((7, OUTPUTS), np.float16), r"its qzeros is int32 \[2, 4\], expected \[7, 4\]"),
        ("qzeros", good["qzeros"].astype(np.int64), "its qzeros is int64"),
        ("g_idx", good["g_idx"][1:], "its g_idx is int32"),
        ("g_idx", good["g_idx"] + 1, r"'a\.b\.weight': its g_idx names groups 1 to 2, expected 0 to 1"),
    ):
        parts = {name: found for name, found in {**good, part: value}.items() if found is not None}
        with pytest.raises(DamagedFile, match=said):
            written(tmp_path, GPTQ, parts)
