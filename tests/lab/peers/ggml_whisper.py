"""Write a Whisper model as a GGML file, which whisper.cpp reads.

magic, 11 integers: sizes of the model, and the type of its matrices
mel filters: rows, columns, numbers
vocabulary: how many texts; per text, its length and its bytes
per tensor: rank, length of the name, type, extents from the innermost on, name, numbers
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from compiler.frontend.config import ModelConfig
from compiler.frontend.layers.audio import FILTERS
from deploy.model_loading.files import open_files

MAGIC, F32, F16 = 0x67676D6C, 0, 1
OUTER = {  # names outside of layers, as transformers has them -> as the authors have them
    "decoder.embed_tokens.weight": "decoder.token_embedding.weight",
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
    "encoder.layer_norm": "encoder.ln_post",
    "decoder.layer_norm": "decoder.ln",
}
INNER = (  # parts of names in layers; the longest names first, because they contain the others
    (".layers.", ".blocks."),
    ("encoder_attn_layer_norm", "cross_attn_ln"),
    ("self_attn_layer_norm", "attn_ln"),
    ("final_layer_norm", "mlp_ln"),
    ("encoder_attn", "cross_attn"),
    ("self_attn", "attn"),
    ("q_proj", "query"),
    ("k_proj", "key"),
    ("v_proj", "value"),
    ("out_proj", "out"),
    ("fc1", "mlp.0"),
    ("fc2", "mlp.2"),
)


def write_ggml(path: Path, folder: Path) -> None:
    """Write the model of a folder, with matrices of f16, as whisper.cpp's own files have them."""
    files = open_files(folder)
    with path.open("wb") as out:
        _write_head(out, files.config, files.weights.read(FILTERS), vocabulary_of(folder / "tokenizer.json"))
        for name in files.weights.tensors:
            if name.startswith("model."):
                _write_tensor(out, ggml_name(name.removeprefix("model.")), np.asarray(files.weights.read(name)))


def ggml_name(name: str) -> str:
    if ".layers." in name:
        for own, other in INNER:
            name = name.replace(own, other)
        return name
    found = next((own for own in OUTER if name.startswith(own)), "")
    return OUTER.get(found, "") + name.removeprefix(found)


def vocabulary_of(tokenizer: Path) -> list[bytes]:
    """Return the bytes of all tokens that are not special, by id."""
    fields = json.loads(tokenizer.read_text())
    special = {token["id"] for token in fields["added_tokens"]}
    ids = sorted((token_id, text) for text, token_id in fields["model"]["vocab"].items() if token_id not in special)
    byte_of = _bytes_of_letters()
    return [bytes(byte_of[letter] for letter in text) for _, text in ids]


def _bytes_of_letters() -> dict[str, int]:
    """Map the letters by which a byte-level vocabulary writes bytes to these bytes."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _write_head(out: BinaryIO, config: ModelConfig, filters: Any, vocabulary: list[bytes]) -> None:
    hearing = config.hearing
    assert hearing is not None, config
    encoder = hearing.num_frames, config.hidden_size, hearing.num_heads, hearing.num_layers
    decoder = config.max_context, config.hidden_size, config.num_heads, config.num_layers
    out.write(struct.pack("<12i", MAGIC, config.vocab_size, *encoder, *decoder, hearing.num_mels, F16))
    out.write(struct.pack("<2i", *filters.shape) + filters.astype("<f4").tobytes())
    out.write(struct.pack("<i", len(vocabulary)))
    for text in vocabulary:
        out.write(struct.pack("<i", len(text)) + text)


def _write_tensor(out: BinaryIO, name: str, values: Any) -> None:
    if ".conv" in name and name.endswith("bias"):
        values = values.reshape(-1, 1)
    is_wide = values.ndim < 2 or "positional" in name or name.endswith("bias")
    array = values.astype(np.float32).astype("<f4" if is_wide else "<f2")
    encoded = name.encode()
    out.write(struct.pack("<3i", array.ndim, len(encoded), F32 if is_wide else F16))
    out.write(struct.pack(f"<{array.ndim}i", *reversed(array.shape)) + encoded + array.tobytes())
