"""Helper that writes GGUF files for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, PoolingType

from compiler.frontend.gguf.dequantize import FORMATS
from tests.golden.gguf_blocks import random_blocks
from tests.golden.gguf_models import convert, write

VOCAB = ["a", "b", "ab", *(f"w{id}" for id in range(3, 160))]


def write_gguf(
    path: Path,
    *,
    merges: bool = True,
    chat_template: str = "",
    pooling: PoolingType = PoolingType.NONE,
    case: str = "qwen2",
    **options: Any,
) -> None:
    """Write a golden model, by default Qwen2, and its tokenizer to a GGUF file."""

    def add(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, merges=merges)
        if chat_template:
            writer.add_chat_template(chat_template)
        writer.add_pooling_type(pooling)

    convert(case, case, path, add, **options)


def add_tokenizer(writer: gguf.GGUFWriter, *, merges: bool = True) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCAB)
    writer.add_token_types([1] * len(VOCAB))
    if merges:
        writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)


HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 256, 512, 4, 2, 2


def write_random(path: Path, kind: GGMLQuantizationType, *, decoded: bool = False) -> None:
    """Write a small Llama whose matrices are random blocks of a format, or the values of these blocks in f32."""
    rng, format = np.random.default_rng(0), FORMATS[kind]
    probe = gguf.quants.dequantize(random_blocks(format, 64, rng).reshape(1, -1), kind)
    size = float(0.05 / probe.std())  # of the floats of blocks, so that values have a standard deviation of 0.05
    kv = HIDDEN // HEADS * KV_HEADS

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(LAYERS)
        writer.add_context_length(256)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        add_tokenizer(writer)
        matrices = {"token_embd": (len(VOCAB), HIDDEN), "output": (len(VOCAB), HIDDEN)}
        for layer in range(LAYERS):
            rows = {"attn_q": HIDDEN, "attn_k": kv, "attn_v": kv, "attn_output": HIDDEN, "ffn_gate": INNER, "ffn_up": INNER}
            matrices |= {f"blk.{layer}.{name}": (count, HIDDEN) for name, count in rows.items()}
            matrices[f"blk.{layer}.ffn_down"] = HIDDEN, INNER
            for name in ("attn_norm", "ffn_norm"):
                writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
        writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
        for name, (count, length) in matrices.items():
            blocks = random_blocks(format, count * length // format.block_values, rng, size).reshape(count, -1)
            if decoded:
                writer.add_tensor(f"{name}.weight", gguf.quants.dequantize(blocks, kind))
            else:
                writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)

    write(path, fill)
