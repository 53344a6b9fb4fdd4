"""Helper that writes GGUF files for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from gguf.constants import PoolingType

from tests.golden.gguf_models import convert

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

    def add_tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(VOCAB)
        writer.add_token_types([1] * len(VOCAB))
        if chat_template:
            writer.add_chat_template(chat_template)
        if merges:
            writer.add_token_merges(["a b"])
        writer.add_eos_token_id(2)
        writer.add_pooling_type(pooling)

    convert(case, case, path, add_tokenizer, **options)
