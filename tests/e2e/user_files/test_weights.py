"""Weights as files have them: tied and untied heads, mixed types, values that are no numbers, contexts longer than memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from compiler.frontend.gguf.file import GgufFile
from deploy.inspection import plan_load
from server.interfaces import LoadError
from server.messages import Load
from tests.deploy.gguf_files import write_gguf
from tests.e2e.user_files.bring import GOLDEN, answers_as, bring, refused, save_tensors, tensors_of, write_folder

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
MATRIX = "model.layers.1.mlp.down_proj.weight"


# --- tied weights -------------------------------------------------------------------------------------------------------


def test_a_tied_model_may_lack_or_have_its_head(tmp_path: Path) -> None:
    """The head of a tied model is its embedding table. A head that differs from it counts, though, as in transformers."""
    folder = write_folder(tmp_path / "model", "qwen2")
    tensors = tensors_of(folder)
    assert HEAD not in tensors
    save_tensors(folder, {**tensors, HEAD: tensors[TABLE]})
    answers_as(folder, "qwen2")
    untied = write_folder(tmp_path / "untied", "qwen2", tie_word_embeddings=False)
    for changed in (folder, untied):
        save_tensors(changed, {**tensors, HEAD: tensors[TABLE][::-1].copy()})
    found, expected = (bring(changed).logits([1, 2, 3]) for changed in (folder, untied))
    np.testing.assert_array_equal(found, expected)


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    tensors = tensors_of(folder)
    head = tensors.pop(HEAD)
    save_tensors(folder, tensors)
    refused(folder, rf"Tensors 1 missing: {HEAD} \[{len(head)}, 64\]")


def test_a_head_without_an_embedding_table_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    tensors = tensors_of(folder)
    save_tensors(folder, {name: tensor for name, tensor in tensors.items() if name != TABLE})
    refused(folder, rf"Tensors 1 missing: {TABLE} ")


# --- types --------------------------------------------------------------------------------------------------------------


def test_tensors_may_have_different_types(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    tensors = tensors_of(folder)
    exact = {name: np.array(tensor.astype(ml_dtypes.bfloat16)) for name, tensor in tensors.items()}
    types = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float64), np.dtype(np.float16))
    kinds = {name: types[number % 4] for number, name in enumerate(sorted(exact))}
    halves = {name: tensor.astype(np.float16).astype(np.float32) for name, tensor in exact.items() if kinds[name] == np.float16}
    plain = {name: halves.get(name, tensor.astype(np.float32)) for name, tensor in exact.items()}
    save_tensors(folder, {name: plain[name].astype(kinds[name]) for name in exact})
    prompt = np.load(GOLDEN / "llama" / "golden.npz")["prompt"]
    mixed = bring(folder).logits(prompt)
    save_tensors(folder, plain)
    np.testing.assert_allclose(mixed, bring(folder).logits(prompt), rtol=1e-5, atol=1e-5)
    assert np.isfinite(bring(folder, quantize="auto").logits(prompt)).all()


def test_matrices_of_integers_without_their_scales_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    tensors = tensors_of(folder)
    save_tensors(folder, {**tensors, MATRIX: np.ones(tensors[MATRIX].shape, np.int8)})
    refused(folder, rf"Tensors 1 of integers, which need scales and a quantization_config: {MATRIX} \(int8\)")


def test_a_type_that_no_program_reads_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    save_tensors(folder, {**tensors_of(folder), "extra": np.ones(3, np.uint16)})
    refused(folder, r"tensor 'extra': NumPy dtype uint16 is not supported; .*; convert the checkpoint, or take another one")


# --- values that are no numbers -----------------------------------------------------------------------------------------


def last_row(tensor: Any, value: float) -> None:
    tensor[-1, 0] = value


def a_column(tensor: Any, value: float) -> None:
    tensor[:, 3] = value


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("damage", [last_row, a_column])
@pytest.mark.parametrize("name", [TABLE, MATRIX, HEAD])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_that_are_no_numbers_are_refused(
    dtype: Any, name: str, damage: Callable[[Any, float], None], value: float, tmp_path: Path
) -> None:
    """A row of a table that the first step does not read must not reach an answer either."""
    folder = write_folder(tmp_path / "model")
    tensors = {own: tensor.astype(dtype) for own, tensor in tensors_of(folder).items()}
    damage(tensors[name], value)
    save_tensors(folder, tensors)
    refused(folder, rf"model: tensor '{name}' has values that are not finite numbers; .*: download the file again")


def test_scales_of_a_gguf_file_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", kind=GGMLQuantizationType.Q8_0)
    content, table = bytearray((tmp_path / "m.gguf").read_bytes()), GgufFile(tmp_path / "m.gguf").tensors["token_embd.weight"]
    last_block = table.start + table.num_bytes - table.format.block_bytes  # a block begins with its scale
    content[last_block : last_block + 2] = np.array([np.nan], np.float16).tobytes()
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(LoadError, match=r"m\.gguf: tensor 'model\.embed_tokens\.weight.*' has values that are not finite numbers"):
        bring(tmp_path / "m.gguf", quantize="auto")


# --- memory -------------------------------------------------------------------------------------------------------------


def test_a_context_that_memory_does_not_hold_is_refused_with_one_that_fits(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", max_position_embeddings=1 << 20)
    asked = Load("m", str(folder), "f32", max_context=1 << 20, max_batch=1, memory_limit_bytes=64 << 20)
    with pytest.raises(LoadError, match=r"the model takes [\d.,]+ MiB: .* of KV cache; 64\.0 MiB are free\. max_context=\d+ fits"):
        plan_load(asked)


def test_a_context_beyond_the_model_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    with pytest.raises(LoadError, match=r"max_context is 4096; model has positions for 256 tokens: lower max_context, or leave it out"):
        bring(folder, max_context=4096)
