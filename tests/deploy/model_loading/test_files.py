"""What the tensors of a checkpoint say about a model beside its config.json."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compiler.frontend.decoder import BOTH
from deploy.model_loading.files import open_files
from deploy.model_loading.modes import mode_of
from server.messages import Load
from tests.conftest import ROOT

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tied_with(head: Any, folder: Path) -> bool:
    """Return whether the program of a model whose file says that its embeddings are tied has no head beside this one."""
    shutil.copytree(ROOT / "tests/golden/models/llama-bias-tied", folder, dirs_exist_ok=True)
    path = folder / "model.safetensors"
    save_file({**load_file(path), **({} if head is None else {HEAD: head})}, path)
    files = open_files(folder)
    names = [weight.name for weight in mode_of(files, Load("m", str(folder))).module().graph(BOTH).weights]
    assert TABLE in names and (HEAD in names) is not files.config.tie_word_embeddings
    return files.config.tie_word_embeddings


def test_a_head_that_differs_from_tied_embeddings_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.model_loading.files.ROWS", 64)
    table = load_file(ROOT / "tests/golden/models/llama-bias-tied/model.safetensors")[TABLE].astype(np.float32)
    assert len(table) % 64  # the last rows that are compared are fewer
    assert tied_with(None, tmp_path) and tied_with(table, tmp_path)
    for row in (0, len(table) - 1):
        head = table.copy()
        head[row, -1] += 1
        assert not tied_with(head, tmp_path)
    assert tied_with(table[:-1], tmp_path)  # a head of another size is not that of this model
