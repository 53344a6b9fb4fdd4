"""Writes the golden files of quantised checkpoints: matrices as reference libraries store them, and the values that the libraries decode
from them.

    gold/bin/pip install torch==2.13.0 transformers compressed-tensors==0.20.0
    gold/bin/python tests/golden/make_quantized.py

`quantized/NAME.safetensors` holds the tensors of one matrix `m`, and the values in `expected`. The file's metadata hold the
quantization_config. Scales are f32, so that the libraries do not round the values that they decode.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FOLDER = Path(__file__).parent / "quantized"
OUTPUTS, INPUTS = 24, 64

SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4_group": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int4_zero_points": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
    "int8_packed": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8_channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8_zero_points": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "fp8_channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
}


def write(name: str, tensors: dict[str, torch.Tensor], expected: torch.Tensor, config: dict[str, Any]) -> None:
    FOLDER.mkdir(exist_ok=True)
    held = {key: value.contiguous() for key, value in {**tensors, "expected": expected.float()}.items()}
    save_file(held, FOLDER / f"{name}.safetensors", {"quantization_config": json.dumps(config)})


def compressed(name: str) -> None:
    form, arguments = SCHEMES[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    compressor = BaseCompressor.get_value_from_registry(form)
    weight = torch.randn(OUTPUTS, INPUTS)
    size = arguments.get("group_size", INPUTS)
    parts = weight.reshape(OUTPUTS, -1, size) if arguments["strategy"] != "tensor" else weight.reshape(1, 1, -1)
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), scheme.weights)
    if arguments["strategy"] == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    state = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    state = {key: value for key, value in state.items() if value is not None}
    if scheme.weights.symmetric:
        state.pop("weight_zero_point", None)
    expected = compressor.decompress(dict(state), scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme.weights.model_dump(mode="json"), "input_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    write(name, {f"m.{key}": value for key, value in state.items()}, expected, config)


def packed_floats(name: str, form: str, group: int) -> None:
    """Write floats of 4 bits. The library decodes to bf16, so the values are computed by its functions in f32."""
    kind = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": group, "strategy": "group" if group == 32 else "tensor_group"}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**kind))
    weight, factor = torch.randn(OUTPUTS, INPUTS), torch.tensor([1000.0]) if group == 16 else None
    largest = weight.reshape(OUTPUTS, -1, group).abs().amax(-1) / 6
    scale = 2 ** largest.log2().ceil() if factor is None else (largest * factor).to(torch.float8_e4m3fn).float()
    state = {"weight": weight, "weight_scale": scale, **({} if factor is None else {"weight_global_scale": factor})}
    compressor = BaseCompressor.get_value_from_registry(form)
    state = compressor.compress(state, scheme)
    numbers = unpack_fp4_from_uint8(state["weight_packed"], OUTPUTS, INPUTS, dtype=torch.float32)
    scales = compressor._decompress_scale(state["weight_scale"], torch.float32)
    expected = dequantize(numbers, scales, args=scheme.weights, global_scale=factor, dtype=torch.float32)
    scheme_json = {"targets": ["Linear"], "weights": scheme.weights.model_dump(mode="json"), "input_activations": None, "format": form}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": scheme_json}, "ignore": ["lm_head"]}
    write(name, {f"m.{key}": value for key, value in state.items()}, expected, config)


def fp8_blocks() -> None:
    weight = torch.randn(OUTPUTS * 6, INPUTS * 4).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-len(weight) // 128), -(-weight.shape[1] // 128)) + 0.5
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    padded = torch.zeros(len(scale) * 128, weight.shape[1])
    padded[: len(weight)] = weight.float()
    read = Fp8Dequantize(None)._dequantize_one(padded.to(torch.float8_e4m3fn), scale)
    write("fp8_blocks", {"m.weight": weight, "m.weight_scale_inv": scale}, read[: len(weight)], config)


def mxfp4() -> None:
    blocks = torch.randint(0, 256, (2, OUTPUTS, INPUTS // 32, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, OUTPUTS, INPUTS // 32), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    write("mxfp4", {"m_blocks": blocks, "m_scales": scales}, expected, {"quant_method": "mxfp4", "modules_to_not_convert": []})


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in SCHEMES:
        compressed(name)
    fp8_blocks()
    mxfp4()
    packed_floats("nvfp4_packed", "nvfp4-pack-quantized", 16)
    packed_floats("mxfp4_packed", "mxfp4-pack-quantized", 32)
