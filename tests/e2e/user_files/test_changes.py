"""Files that change while they are served."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from deploy.model_loading.locate import identity_of
from tests.deploy.gguf_files import write_gguf
from tests.e2e.user_files.bring import answers_as, bring, save_tensors, tensors_of, write_folder

PROMPT = np.arange(1, 20, dtype=np.int32)


@pytest.mark.parametrize("cached", [True, False])
def test_a_replaced_file_changes_the_next_load_and_not_the_one_that_serves(
    cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cached:
        monkeypatch.setenv("RELAXSERVE_NO_CACHE", "1")
    folder = write_folder(tmp_path / "model")
    serving, identity = answers_as(folder, "llama"), identity_of(str(folder))
    before = serving.logits(PROMPT)
    tensors = tensors_of(folder)
    save_tensors(tmp_path, {**tensors, "model.norm.weight": 2 * tensors["model.norm.weight"]}, "new.safetensors")
    os.replace(tmp_path / "new.safetensors", folder / "model.safetensors")
    assert identity_of(str(folder)) != identity
    np.testing.assert_array_equal(serving.logits(PROMPT), before)
    assert np.abs(bring(folder).logits(PROMPT) - before).max() > 0.1


def test_a_removed_file_is_served_until_it_is_loaded_again(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    serving = answers_as(tmp_path / "m.gguf", "qwen2")
    before = serving.logits(PROMPT)
    (tmp_path / "m.gguf").unlink()
    np.testing.assert_array_equal(serving.logits(PROMPT), before)


def test_a_file_of_the_same_size_and_time_is_another_file(tmp_path: Path) -> None:
    """A file that `cp -p` or `rsync` puts in place of another one may have its size and its time. It is read anew nevertheless."""
    folder = write_folder(tmp_path / "model")
    tensors = tensors_of(folder)
    save_tensors(folder, tensors)
    before, state = bring(folder).logits(PROMPT), (folder / "model.safetensors").stat()
    save_tensors(folder, {name: np.flip(tensor, 0).copy() for name, tensor in tensors.items()})
    os.utime(folder / "model.safetensors", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert (folder / "model.safetensors").stat().st_size == state.st_size
    assert np.abs(bring(folder).logits(PROMPT) - before).max() > 0.1
