"""What is said of a model type that nobody knows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from compiler.frontend.unknown import remedy
from compiler.frontend.weights import open_safetensors

MODELS = Path(__file__).parents[2] / "golden" / "models"
SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def write(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard_of", **fields}))
    return folder


@pytest.mark.parametrize(
    ("fields", "twin"),
    [
        ({"rope_theta": 1e4, "attention_bias": False, "torch_dtype": "float16"}, "llama"),
        ({"sliding_window": 128}, "mistral' or 'phi3"),
        ({"sliding_window": 9, "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 16}, "gemma2"),
        ({"architectures": ["Qwen2ForCausalLM"], "novel_field": 1}, "qwen2"),
        ({"type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}, "bert' or 'roberta' or 'xlm-roberta"),
    ],
)
def test_without_weights_fields_tell_families_alike(fields: dict[str, Any], twin: str, tmp_path: Path) -> None:
    assert f"are those of '{twin}': if it is wired alike" in remedy(write(tmp_path, **SMALL, **fields))


def test_no_remedy_where_a_field_is_not_understood(tmp_path: Path) -> None:
    assert remedy(write(tmp_path, **SMALL, num_experts=8)) == ""


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "mpnet"])
def test_tensors_decide(case: str, tmp_path: Path) -> None:
    shutil.copy(MODELS / case / "model.safetensors", tmp_path)
    fields = json.loads((MODELS / case / "config.json").read_text())
    write(tmp_path, **{**fields, "model_type": "unheard_of"})
    assert f"tensors are those of '{case}': set model_type to that" in remedy(tmp_path)
    source = open_safetensors(MODELS / case)
    tensors = {name: np.array(source.read(name)) for name in source.tensors}
    save_file({**tensors, "model.layers.0.novel.weight": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    assert remedy(tmp_path) == ""
