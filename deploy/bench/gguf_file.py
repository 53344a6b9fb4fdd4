"""Write a model of the Llama family as a GGUF file: for engines that read no other format, and to measure weights in the formats of such
files. The file has only the required metadata. Prompts are token ids, so the vocabulary only has a name for each token."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.config import ModelConfig
from compiler.frontend.gguf.dequantize import FORMATS, Format
from compiler.frontend.gguf.file import ARRAY, BOOL, DEFAULT_ALIGNMENT, MAGIC, NUMBERS, STRING
from compiler.frontend.gguf.model import COMMON_LAYER_NAMES, NAMES
from compiler.frontend.weights import WeightSource
from server.settings import SettingsError

U32, I32, F32 = 4, 5, 6  # type codes of values in the metadata
NORMAL = 1  # type of a token that is plain text
Q4_K_M = "Q4_K_M"  # a mixture of Q4_K and Q6_K
CODES = {format.name: code for code, format in FORMATS.items()}

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor to write."""

    name: str  # its name in the file
    source: str  # its name in the source of the weights
    format: Format  # its format in the file
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) // self.format.block_values * self.format.block_bytes


def write_gguf(path: Path, config: ModelConfig, weights: WeightSource, products: str) -> None:
    """Write the file. `products` is the format of the weights of matrix products: BF16, Q8_0, Q4_0 or Q4_K_M. With Q4_0, the head is stored
    in Q8_0, because our own programs also keep the head in 8 bits. Embeddings are stored in Q4_K with Q4_K_M, otherwise in BF16. Vectors
    are stored in F32. Raise SettingsError for a model of another family than Llama."""
    if config.family != "llama":
        raise SettingsError(f"synthetic models of the family {config.family} are not written as GGUF files; choose another --quantize")
    entries = [_entry(name, info.shape, products, config.num_layers) for name, info in weights.tensors.items()]
    metadata = _metadata(config)
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack("<IQQ", 3, len(entries), len(metadata)))
        for key, (code, value) in metadata.items():
            file.write(_text(key) + struct.pack("<I", code) + _value(code, value))
        offset = 0
        for e in entries:
            file.write(_text(e.name) + struct.pack(f"<I{len(e.shape)}Q", len(e.shape), *e.shape[::-1]))
            file.write(struct.pack("<IQ", CODES[e.format.name], offset))
            offset += -(-e.num_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
        for e in entries:
            _align(file)
            tensor = weights.read(e.source)
            if (num_heads := _heads(e.name, config)) is not None:
                tensor = _pairs_beside_each_other(tensor, num_heads)
            file.write(_encoded(tensor, e.format).data)
        _align(file)


def _metadata(c: ModelConfig) -> dict[str, tuple[int, Any]]:
    """Return the metadata of the file: the type code and the value of each key."""
    assert c.rope is not None, c
    numbers = {
        "block_count": c.num_layers,
        "context_length": c.max_context,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "rope.dimension_count": c.head_dim,
        "vocab_size": c.vocab_size,
    }
    fractions = {"attention.layer_norm_rms_epsilon": c.norm_eps, "rope.freq_base": c.rope.theta}
    return {
        "general.architecture": (STRING, "llama"),
        "tokenizer.ggml.model": (STRING, "llama"),
        "tokenizer.ggml.add_space_prefix": (BOOL, False),  # so that "w3w4" is two tokens
        "tokenizer.ggml.tokens": (ARRAY, (STRING, [f"w{token}" for token in range(c.vocab_size)])),
        "tokenizer.ggml.scores": (ARRAY, (F32, [0.0] * c.vocab_size)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [NORMAL] * c.vocab_size)),
        **{f"llama.{key}": (U32, value) for key, value in numbers.items()},
        **{f"llama.{key}": (F32, value) for key, value in fractions.items()},
    }


def _entry(source: str, shape: tuple[int, ...], products: str, num_layers: int) -> _Entry:
    """Return how a tensor is stored in the file. `source` is its name in the source of the weights."""
    stem, _, kind = source.rpartition(".")
    name = f"{_own_stem(stem)}.{kind}"
    if len(shape) == 1:
        held = "F32"
    elif products == Q4_K_M:
        held = "Q6_K" if _has_more_bits(name, num_layers) else "Q4_K"
    elif name.startswith("token_embd"):
        held = "BF16"
    elif name.startswith("output") and products == "Q4_0":
        held = "Q8_0"
    else:
        held = products
    return _Entry(name, source, FORMATS[CODES[held]], shape)


def _has_more_bits(name: str, num_layers: int) -> bool:
    """Return whether llama-quantize gives a tensor Q6_K in Q4_K_M: the head, and the projections of values and the outputs of MLPs in the
    first and the last eighth of the layers and in every third layer between."""
    if name.startswith("output"):
        return True
    if ".attn_v." not in name and ".ffn_down." not in name:
        return False
    layer, eighth = int(name.split(".")[1]), num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _own_stem(stem: str) -> str:
    """Return the name in GGUF files of a tensor without its last part, such as blk.0.attn_q for model.layers.0.self_attn.q_proj."""
    for own, hub in NAMES.items():
        if hub == stem:
            return own
    layer, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{next(own for own, hub in COMMON_LAYER_NAMES.items() if hub == rest)}"


def _heads(name: str, config: ModelConfig) -> int | None:
    """Return the number of heads of a projection of queries or keys, whose vectors are rotated. Return None for other tensors."""
    for part, num_heads in ((".attn_q.", config.num_heads), (".attn_k.", config.num_kv_heads)):
        if part in name:
            return num_heads
    return None


def _pairs_beside_each_other(tensor: Array, num_heads: int) -> Array:
    """Reorder the rows of each head for rotary pairs. In safetensors files the first elements of all pairs precede the second elements; in
    this family's GGUF files the elements of a pair are adjacent."""
    return tensor.reshape(num_heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)


# --- formats -----------------------------------------------------------------------------------------------------------


def _encoded(tensor: Array, format: Format) -> Array:
    """Return the bytes of a tensor in a format of GGUF."""
    if format.dtype is not None:
        return np.ascontiguousarray(tensor.astype(format.dtype)).reshape(-1).view(np.uint8)
    blocks = tensor.astype(np.float32).reshape(-1, format.block_values)
    return {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k, "Q6_K": _q6_k}[format.name](blocks)


def _q8_0(blocks: Array) -> Array:
    """Encode blocks of 32 values, each with a scale of 16 bits and values of 8 bits."""
    scales = np.abs(blocks).max(axis=1, keepdims=True) / 127
    numbers = blocks * _inverse(scales)
    rounded = np.copysign((np.floor(2 * np.abs(numbers)) + 1) // 2, numbers)  # round half away from zero
    return _behind_scales(scales, rounded.astype(np.int8).view(np.uint8))


def _q4_0(blocks: Array) -> Array:
    """Encode blocks of 32 values, each with a scale of 16 bits and values of 4 bits."""
    scales, quants = q4_0(blocks)
    return _behind_scales(scales, quants[:, :16] | quants[:, 16:] << 4)


def q4_0(blocks: Array) -> tuple[Array, Array]:
    """Return the 16-bit scale of each block, and its values as integers from 0 to 15, where 8 represents zero. The value of the largest
    magnitude is represented by 0, which stands for -8 times the scale, so a scale may be negative."""
    scales = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1) / -8
    quants = np.minimum(blocks * _inverse(scales) + 8.5, 15).astype(np.uint8)
    return scales.astype("<f2"), quants


def _q4_k(blocks: Array) -> Array:
    """Encode blocks of eight groups of 32 values of 4 bits. Each group has a scale and a minimum of six bits each. All scales of a block
    are in units of one f16, and all minima in units of another."""
    groups = blocks.reshape(-1, 8, 32)
    least, most = np.minimum(groups.min(2), 0), groups.max(2)
    (unit, scales), (least_unit, minima) = (_in_units(x, 63) for x in ((most - least) / 15, -least))
    step, low = unit * scales, least_unit * minima
    quants = np.clip(np.rint((groups + low[..., None]) * _inverse(step)[..., None]), 0, 15).astype(np.uint8)
    packed = np.concatenate(
        (scales[:, :4] | scales[:, 4:] >> 4 << 6, minima[:, :4] | minima[:, 4:] >> 4 << 6, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4),
        1,
    )
    halves = quants.reshape(-1, 4, 2, 32)
    return np.concatenate((_f16(unit), _f16(least_unit), packed, (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(-1, 128)), axis=1)


def _q6_k(blocks: Array) -> Array:
    """Encode blocks of sixteen groups of 16 values of 6 bits. Each group has a scale of eight bits, in units of an f16 per block."""
    groups = blocks.reshape(-1, 16, 16)
    unit, scales = _in_units(np.abs(groups).max(2) / 31, 127)
    quants = np.clip(np.rint(groups * _inverse(unit * scales)[..., None]) + 32, 0, 63).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (quants[:, :, :2] & 15 | (quants[:, :, 2:] & 15) << 4).reshape(-1, 128)
    high = np.bitwise_or.reduce([quants[:, :, part] >> 4 << 2 * part for part in range(4)]).reshape(-1, 64)
    return np.concatenate((low, high, scales, _f16(unit)), axis=1)


def _in_units(numbers: Array, most: int) -> tuple[Array, Array]:
    """Return a unit per block, rounded to 16 bits, and the numbers in this unit as integers from 0 to `most`."""
    unit = (numbers.max(1, keepdims=True) / most).astype("<f2").astype(np.float32)
    return unit, np.clip(np.rint(numbers * _inverse(unit)), 0, most).astype(np.uint8)


def _f16(numbers: Array) -> Array:
    """Return the bytes of numbers as 16-bit floats."""
    return numbers.astype("<f2").view(np.uint8)


def _inverse(scales: Array) -> Array:
    """Return 1 / scale, or 0 where the scale is 0."""
    return np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)


def _behind_scales(scales: Array, quants: Array) -> Array:
    """Return the bytes of each block's 16-bit scale with the bytes of its values behind them."""
    return np.concatenate((scales.astype("<f2").view(np.uint8), quants), axis=1)


# --- encoding ----------------------------------------------------------------------------------------------------------


def _value(code: int, value: Any) -> bytes:
    """Encode a value of the metadata. `code` is its type code. An array is a pair of the type code of its elements and these elements."""
    if code == STRING:
        return _text(value)
    if code == ARRAY:
        kind, elements = value
        return struct.pack("<IQ", kind, len(elements)) + b"".join(_value(kind, element) for element in elements)
    return np.array(value, NUMBERS[code]).tobytes()


def _text(value: str) -> bytes:
    """Encode a text of the metadata: its length in bytes, then its bytes."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _align(file: BinaryIO) -> None:
    """Write zeros up to the next multiple of the alignment."""
    file.write(bytes(-file.tell() % DEFAULT_ALIGNMENT))
