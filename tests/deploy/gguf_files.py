"""GGUF files for tests."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np

from compiler.frontend.weights import open_safetensors

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
VOCAB = ["a", "b", "ab", *(f"w{id}" for id in range(3, 160))]


def write_gguf(path: Path, *, merges: bool = True, chat_template: str = "") -> None:
    """The golden Qwen2 as llama.cpp's converter would write it, in f32 and with a tokenizer inside."""
    values, source = json.loads((GOLDEN / "qwen2" / "config.json").read_text()), open_safetensors(GOLDEN / "qwen2")
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_rope_freq_base(values["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCAB)
    writer.add_token_types([1] * len(VOCAB))
    if chat_template:
        writer.add_chat_template(chat_template)
    if merges:
        writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, values["num_hidden_layers"])
    for name in source.tensors:
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        writer.add_tensor(own, source.read(name).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
