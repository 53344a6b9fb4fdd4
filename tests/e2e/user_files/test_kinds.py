"""Kinds of models: what each serves, and quantised checkpoints, which compute with the values that they encode, or are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.frontend.reranker import QWEN3
from deploy.model_loading.known import begin
from deploy.model_loading.servable import Servable
from deploy.model_loading.stages import advance
from server.messages import Load
from tests.compiler.frontend.quantized_files import awq, gptq
from tests.e2e.user_files.bring import bring, change_json, refused, save_tensors, tensors_of, write_folder

GENERATES, COSINE = "chat and completions", ("embeddings", "rerank and score by cosine")
PAIRS = "rerank and score of pairs of texts"


@pytest.mark.parametrize(
    ("case", "serves"),
    [
        ("llama", (GENERATES,)),
        ("qwen3_moe", (GENERATES,)),
        ("bert", COSINE),
        ("modernbert", COSINE),
        ("qwen3-embedding", COSINE),
        ("embeddinggemma", COSINE),
        ("llama_bidirec", COSINE),
        ("bert-classes", ("classify",)),
        ("llama-classes", ("classify",)),
        ("xlm-roberta-reranker", ("classify", PAIRS)),
    ],
)
def test_what_a_model_serves_follows_from_its_files(case: str, serves: tuple[str, ...], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", case)
    assert advance(begin(Load("m", str(folder), "f32", max_batch=2)), Servable).serves == serves


def test_a_generator_with_the_template_of_a_reranker_scores_pairs(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "qwen3", architectures=["Qwen3ForCausalLM"])
    (folder / "chat_template.jinja").write_text(QWEN3.before)
    change_json(folder / "config.json", classifier_from_token=["w5", "w9"], is_original_qwen3_reranker=True)
    assert advance(begin(Load("m", str(folder), "f32", max_batch=2)), Servable).serves == ("classify", PAIRS)


# --- quantised checkpoints ----------------------------------------------------------------------------------------------

GROUPS = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}}
FLOATS = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}
STATED: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": GROUPS}},
}


def in_integers(method: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[dict[str, Any], Any]:
    """Return the tensors of a matrix in the layout of a method, and the values that they encode."""
    outputs, inputs = shape
    if method == "compressed-tensors":
        numbers, scale = rng.integers(-127, 128, shape).astype(np.int8), (rng.random((outputs, 1)) / 256).astype(np.float32)
        return {"weight": numbers, "weight_scale": scale}, numbers * scale
    numbers = rng.integers(0, 16, (inputs, outputs))
    zeros = rng.integers(4, 12, (-(-inputs // 32), outputs)) if method == "awq" else np.full((-(-inputs // 32), outputs), 8)
    scales, groups = rng.random(zeros.shape).astype(np.float16) / 16, np.arange(inputs) // 32
    values = np.ascontiguousarray((scales.astype(np.float32)[groups] * (numbers - zeros[groups])).T.astype(np.float32))
    return awq(numbers, zeros, scales) if method == "awq" else gptq(numbers, zeros, scales, 4), values


@pytest.mark.parametrize("method", list(STATED))
def test_a_quantised_checkpoint_answers_as_its_values_do(method: str, tmp_path: Path) -> None:
    plain, stored = (
        write_folder(tmp_path / "plain", "qwen3"),
        write_folder(tmp_path / "stored", "qwen3", quantization_config=STATED[method]),
    )
    values, parts, rng = dict[str, Any](), dict[str, Any](), np.random.default_rng(0)
    for name, tensor in tensors_of(plain).items():
        if not name.endswith("proj.weight") or tensor.shape[1] % 32 or tensor.shape[0] % 8:
            values[name] = parts[name] = tensor
            continue
        held, values[name] = in_integers(method, tensor.shape, rng)
        parts |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in held.items()}
    assert len(parts) > len(values), "no matrix was quantised"
    save_tensors(plain, values)
    save_tensors(stored, parts)
    prompt = np.arange(1, 20, dtype=np.int32)
    np.testing.assert_array_equal(bring(stored).logits(prompt), bring(plain).logits(prompt))


@pytest.mark.parametrize("method", ["hqq", "quanto", "torchao", "exl2", "eetq", "aqlm"])
def test_another_method_is_refused_by_name(method: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", quantization_config={"quant_method": method, "bits": 4})
    refused(folder, rf"the weights are quantised by {method}; known are auto-round, awq, .* without quantisation and with --quantize")


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({**STATED["gptq"], "bits": 5}, "bits of quantization_config of config.json is 5"),
        ({**STATED["awq"], "version": "gemv"}, "version of quantization_config of config.json is 'gemv'"),
        ({"group_size": 64, "bits": 4}, "the weights are quantised by MLX; take the model's original checkpoint or a GGUF file"),
    ],
    ids=["bits", "version", "mlx"],
)
def test_a_variant_that_is_not_read_is_refused(stated: dict[str, Any], said: str, tmp_path: Path) -> None:
    refused(write_folder(tmp_path / "model", quantization_config=stated), said)


def test_a_quantised_checkpoint_that_lacks_scales_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", quantization_config=STATED["compressed-tensors"])
    tensors, name = tensors_of(folder), "model.layers.0.mlp.up_proj.weight"
    save_tensors(folder, {**tensors, name: np.ones(tensors[name].shape, np.int8)})
    refused(folder, r"Tensors 1 of integers, which need scales and a quantization_config: model\.layers\.0\.mlp\.up_proj\.weight")


def test_floats_of_eight_bits_need_no_other_files(tmp_path: Path) -> None:
    stated = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": FLOATS}}
    folder = write_folder(tmp_path / "model", quantization_config=stated)
    import ml_dtypes

    tensors = dict[str, Any]()
    for name, tensor in tensors_of(folder).items():
        tensors[name] = tensor
        if name.endswith("proj.weight"):
            tensors[name] = (tensor * 16).astype(ml_dtypes.float8_e4m3fn)
            tensors[name.removesuffix(".weight") + ".weight_scale"] = np.full((len(tensor), 1), 1 / 16, np.float32)
    save_tensors(folder, tensors)
    assert np.isfinite(bring(folder).logits([1, 2, 3])).all()
