"""Writes the golden files of bitsandbytes: matrices of 4-bit codes as the library stores them, and the f32 values that it decodes.

    gold/bin/pip install torch==2.13.0 bitsandbytes==0.50.2 safetensors
    gold/bin/python tests/golden/make_bitsandbytes.py

The layout is that of `make_quantized.py`. The weights are f32, so that the library does not round the values that it decodes.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "quantized"
OUTPUTS, INPUTS, NESTED_INPUTS = 8, 128, 2112  # nested scales are more than 256, which share a scale of their own
# As `transformers` writes it into config.json.
CONFIG = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
    "_load_in_4bit": True,
    "_load_in_8bit": False,
}


def write(name: str, kind: str, *, nested: bool) -> None:
    weight = torch.randn(OUTPUTS, NESTED_INPUTS if nested else INPUTS)
    codes, state = quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
    tensors = {"m.weight": codes, **{f"m.weight.{part}": value for part, value in state.as_dict(packed=True).items()}}
    tensors["expected"] = dequantize_4bit(codes, state)
    config = {**CONFIG, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    save_file({key: value.contiguous() for key, value in tensors.items()}, FOLDER / name, {"quantization_config": json.dumps(config)})


if __name__ == "__main__":
    torch.manual_seed(0)
    write("bitsandbytes_nf4.safetensors", "nf4", nested=False)
    write("bitsandbytes_nf4_nested.safetensors", "nf4", nested=True)
    write("bitsandbytes_fp4.safetensors", "fp4", nested=False)
