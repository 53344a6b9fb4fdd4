"""GGUF files that the benchmark writes for other inference engines. Our reader reads from them the values that the reference quantisers
compute."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from compiler.frontend.gguf.model import GgufModel
from deploy.bench.gguf_file import CODES, write_gguf
from deploy.bench.synthetic import SHAPES, RandomWeights, llama_config, shapes_of, synthetic_config
from server.settings import SettingsError

CONFIG = llama_config(64, 2, 4, 2, 16, 96, 50)


@pytest.mark.parametrize("products", ["BF16", "Q8_0", "Q4_0"])
def test_a_model_is_read_back(tmp_path: Path, products: str) -> None:
    weights = RandomWeights(shapes_of(CONFIG))
    write_gguf(tmp_path / "model.gguf", CONFIG, weights, products)
    model = GgufModel(tmp_path / "model.gguf")
    assert {name: info.shape for name, info in model.tensors.items()} == weights.shapes
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rope"):
        assert getattr(model.config, field) == getattr(CONFIG, field), field
    for name in weights.shapes:
        written, own = weights.read(name).astype(np.float32), model.read(name).astype(np.float32)
        if written.ndim == 1 or "embed" in name or products == "BF16":
            np.testing.assert_array_equal(own, written, name)
        else:
            kind = gguf.GGMLQuantizationType[products if products != "Q4_0" or name != "lm_head.weight" else "Q8_0"]
            np.testing.assert_array_equal(own, gguf.quants.dequantize(gguf.quants.quantize(written, kind), kind), name)


def test_the_reference_reads_it_too(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", CONFIG, RandomWeights(shapes_of(CONFIG)), "Q4_0")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert {t.name: int(t.tensor_type) for t in reader.tensors}["blk.1.ffn_down.weight"] == CODES["Q4_0"]
    assert len(reader.tensors) == len(shapes_of(CONFIG))
    assert reader.fields["tokenizer.ggml.tokens"].contents()[-1] == f"w{CONFIG.vocab_size - 1}"


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if synthetic_config(shape, layers=1).family != "llama"])
def test_other_families_are_refused(tmp_path: Path, shape: str) -> None:
    config = synthetic_config(shape, layers=1)
    with pytest.raises(SettingsError, match=f"family {config.family} are not written as GGUF files; choose another --quantize"):
        write_gguf(tmp_path / "model.gguf", config, RandomWeights(shapes_of(config)), "Q4_K_M")
    assert not (tmp_path / "model.gguf").exists()
