"""The advice beside the refusal of an unknown model type."""

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


def write(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard_of", **fields}))
    return folder


CASES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma3": "Gemma3ForCausalLM", "mpnet": "MPNetModel"}


@pytest.mark.parametrize("case", CASES)
def test_a_known_architecture_under_another_name(case: str, tmp_path: Path) -> None:
    shutil.copy(MODELS / case / "model.safetensors", tmp_path)
    fields = json.loads((MODELS / case / "config.json").read_text())
    write(tmp_path, **{**fields, "architectures": [CASES[case]], "model_type": "unheard_of"})
    assert f"tensors are those of '{fields['model_type']}': set model_type to that" in remedy(tmp_path)
    source = open_safetensors(MODELS / case)
    tensors = {name: np.array(source.read(name)) for name in source.tensors}
    save_file({**tensors, "model.layers.0.novel.weight": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    assert remedy(tmp_path) == ""


def test_equal_fields_and_tensors_are_no_proof(tmp_path: Path) -> None:
    """Helium has the fields and tensors of Llama, and rotates other pairs."""
    shutil.copy(MODELS / "llama" / "model.safetensors", tmp_path)
    fields = json.loads((MODELS / "llama" / "config.json").read_text())
    assert remedy(write(tmp_path, **{**fields, "architectures": ["HeliumForCausalLM"], "model_type": "unheard_of"})) == ""


def test_no_advice_without_weights(tmp_path: Path) -> None:
    fields = json.loads((MODELS / "llama" / "config.json").read_text())
    assert remedy(write(tmp_path, **{**fields, "architectures": ["LlamaForCausalLM"], "model_type": "unheard_of"})) == ""
