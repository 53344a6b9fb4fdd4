"""The vocabularies of real files, written as models without tokenizer.json have them, give the same ids."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from compiler.frontend.gguf.file import GgufFile
from compiler.frontend.vocabulary.pieces import CONTROL, USER_DEFINED
from deploy.model_loading.tokenizer import load_tokenizer
from tests.real.conftest import file_of
from tests.real.test_tokenizers import GOLDEN

CLASSES = {"smollm2": "GPT2Tokenizer", "qwen2.5-coder-1.5b": "Qwen2Tokenizer", "gemma-3-270m": "GemmaTokenizer"}
PLAIN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}


def write_vocabulary(folder: Path, model: str) -> None:
    metadata = GgufFile(file_of(model)).metadata
    own: dict[str, Any] = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()}
    tokens, kinds = list(own["tokens"]), [int(kind) for kind in own["token_type"]]
    (folder / "config.json").write_text("{}")
    config: dict[str, Any] = {"tokenizer_class": CLASSES[model]}
    if own["model"] == "llama":
        pieces = zip(tokens, own["scores"], kinds, strict=True)
        written = [field(1, field(1, text) + field(2, float(score)) + field(3, kind)) for text, score, kind in pieces]
        training = field(2, field(3, 2) + field(40, own["unknown_token_id"]) + field(41, own["bos_token_id"]))
        (folder / "tokenizer.model").write_bytes(b"".join(written) + training + field(3, field(3, 0) + field(4, 0)))
    else:
        special = [id for id, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)]
        added = {str(id): {"content": tokens[id], "special": kinds[id] == CONTROL, **PLAIN} for id in special}
        config["added_tokens_decoder"] = added
        (folder / "vocab.json").write_text(json.dumps({text: id for id, text in enumerate(tokens)}, ensure_ascii=False))
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *own["merges"], ""]))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def field(number: int, value: int | float | str | bytes) -> bytes:
    """Write a field in the wire format of Protocol Buffers."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + varint(value >> 7)


@pytest.mark.parametrize("model", list(CLASSES))
def test_a_real_vocabulary_in_another_format_gives_the_same_ids(model: str, tmp_path: Path) -> None:
    write_vocabulary(tmp_path, model)
    tokenizer = load_tokenizer(str(tmp_path))
    found = [tokenizer.encode(text, False) for text in GOLDEN["strings"]]
    different = [pair for pair in zip(GOLDEN["strings"], found, GOLDEN["ids"][model], strict=True) if pair[1] != pair[2]]
    assert len(found) == 300 and different == []
