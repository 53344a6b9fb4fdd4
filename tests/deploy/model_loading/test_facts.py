"""The facts about a model's files: family, number of parameters, type of the weights, bytes on disk."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from deploy import demo
from deploy.model_loading.facts import MIXES, facts_of, values_by_type
from deploy.model_loading.files import open_files
from tests.golden.gguf_models import convert, decoder_tensors

EMBEDDING = "model.embed_tokens.weight"
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def test_the_demo_is_described() -> None:
    facts = facts_of(open_files(demo.MODEL))
    assert (facts.family, facts.format, facts.weight_type, facts.max_context) == ("llama", "safetensors", "BF16", 1024)
    assert facts.num_parameters == pytest.approx(3.5e6, rel=0.01)
    assert facts.file_bytes == (demo.MODEL / "model.safetensors").stat().st_size


@pytest.mark.parametrize(("file_type", "named"), [(15, "Q4_K_M"), (None, "Q8_0"), (999, "Q8_0")])
def test_a_gguf_file_names_its_types(tmp_path: Path, file_type: int | None, named: str) -> None:
    """If the file names no type that is known, the facts name the type of most of its values."""
    add = lambda writer: None if file_type is None else writer.add_file_type(file_type)  # noqa: E731
    path = convert("llama", "llama", tmp_path / "m.gguf", add, kind=Q8_0)
    facts = facts_of(open_files(path))
    assert (facts.format, facts.weight_type, facts.file_bytes) == ("gguf", named, path.stat().st_size)
    assert set(values_by_type(open_files(path))) == {"Q8_0", "F32"}


def test_names_of_mixes_are_those_of_the_reference() -> None:
    assert {name: gguf.LlamaFileType(number).name.removeprefix("ALL_").removeprefix("MOSTLY_") for number, name in MIXES.items()} == {
        name: name for name in MIXES.values()
    }


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_table_that_is_stored_twice_counts_once(tmp_path: Path, is_copy: bool) -> None:
    """Some files store a tied head beside the embedding, rounded to another type. A head of its own counts."""
    table = decoder_tensors("qwen2")[EMBEDDING].astype(np.float32)
    head = table if is_copy else np.random.default_rng(0).standard_normal(table.shape, np.float32) * table.std()

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("output.weight", gguf.quants.quantize(head, Q8_0), raw_dtype=Q8_0)

    tied = facts_of(open_files(convert("qwen2", "qwen2", tmp_path / "tied.gguf"))).num_parameters
    both = facts_of(open_files(convert("qwen2", "qwen2", tmp_path / "both.gguf", add))).num_parameters
    assert both == tied + (0 if is_copy else table.size)
