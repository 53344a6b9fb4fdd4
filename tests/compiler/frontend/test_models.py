"""The logits of every causal family are close to those of Hugging Face transformers, and greedy continuations are the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from compiler.frontend.registry import FAMILIES, load_config
from compiler.frontend.weights import open_safetensors
from compiler.ir.dtypes import DType
from compiler.ir.graph.values import Call
from compiler.ir.graph.visit import walk_values
from compiler.ir.module import IRModule
from compiler.machine.products import product_tiles
from compiler.machine.target import host

GOLDEN = Path(__file__).parents[2] / "golden" / "models"
ARRAYS = {folder.name: np.load(folder / "golden.npz").files for folder in sorted(GOLDEN.iterdir())}
NAMES = [name for name, arrays in ARRAYS.items() if "continuation" in arrays]
# The interpreter runs every family. `make test` also compiles these cases, which together contain every kind of call that occurs in any
# case; `make test-slow` compiles all.
QUICK_IN_BF16 = {"llama", "gemma2", "gpt_oss", "qwen3_5"}
QUICK = QUICK_IN_BF16 | {
    "falcon_h1",
    "gemma3n",
    "glm4_moe_lite",
    "llama4",
    "olmo2",
    "phi3-longrope",
    "phimoe",
    "qwen3_moe",
    "qwen3_next",
}
# The models with known bf16 logits. Other golden models lack these, since all families compute with bf16 weights in the same way.
IN_BF16 = [name for name in NAMES if "logits_bf16" in ARRAYS[name]]
# Models whose program does not round where transformers rounds. For DeepSeek V2, transformers computes keys from latents and rounds the
# inputs of that product. Our program computes no keys: it multiplies queries by latents without rounding. The rounding in transformers
# changes one row by 16 % of the largest logit.
ROUNDED_ELSEWHERE = {"deepseek_v2"}


def cases(names: list[str], quick: set[str]) -> list[Any]:
    """Return test parameters with one xdist group per case, so that each model is compiled once. Cases that are not in `quick` are marked
    slow."""
    return [pytest.param(n, marks=[pytest.mark.xdist_group(n), *([] if n in quick else [pytest.mark.slow])]) for n in names]


def largest_error(actual: Any, expected: Any) -> float:
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def mean_error(actual: Any, expected: Any) -> float:
    assert actual.shape == expected.shape
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("case", NAMES)
def test_the_program_means_the_model(case: str, interpreted: Callable[..., Any]) -> None:
    """The interpreted program gives the logits of transformers for a prompt, and the same greedy continuation."""
    model = interpreted(case)
    prompt, continuation = model.golden["prompt"], model.golden["continuation"]
    logits = model.start().feed({"a": np.concatenate([prompt, continuation[:-1]])})["a"]
    assert largest_error(logits[: len(prompt)], model.golden["logits"]) < 2e-4
    np.testing.assert_array_equal(logits[len(prompt) - 1 :].argmax(-1), continuation)


def test_a_tied_head_has_a_bias_of_its_own(tmp_path: Path, interpreted_from: Callable[..., Any]) -> None:
    """A model with tied embeddings gives the logits of one whose head repeats the table, and both add the head's bias."""
    config, source = load_config(GOLDEN / "phi"), open_safetensors(GOLDEN / "phi")
    tied = {name: source.read(name) for name in source.tensors if name != "lm_head.weight"}
    found: list[Any] = []
    for is_tied, tensors in ((True, tied), (False, {**tied, "lm_head.weight": tied["model.embed_tokens.weight"]})):
        save_file(tensors, file := tmp_path / "model.safetensors")
        model = interpreted_from(replace(config, tie_word_embeddings=is_tied), open_safetensors(file))
        found.append(model.feed({"a": [3, 1, 4]})["a"])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-5)
    assert np.abs(tied["lm_head.bias"].astype(np.float32)).max() > 0.01


def kinds_of_calls(module: IRModule) -> set[Any]:
    """Return all kinds of calls in a program: the operator, its number of operands, and the attributes that differ from their defaults."""
    calls = [value for func in module.graph_functions.values() for value in walk_values(func.body) if isinstance(value, Call)]
    return {(c.op.name, len(c.args), frozenset(a for a, value in c.attrs.items() if value != c.op.attributes[a])) for c in calls}


def test_quick_cases_make_every_kind_of_call(interpreted: Callable[..., Any]) -> None:
    quick = set[Any]().union(*(kinds_of_calls(interpreted(name).module) for name in QUICK))
    for name in NAMES:
        assert kinds_of_calls(interpreted(name).module) <= quick, f"{name} makes a call of a kind that no quick case makes"


@pytest.mark.parametrize("case", cases(NAMES, QUICK))
def test_logits_of_a_prompt(case: str, causal: Callable[..., Any]) -> None:
    model = causal(case)
    logits = model.start().feed({"a": model.golden["prompt"]})["a"]
    assert largest_error(logits, model.golden["logits"]) < 2e-4


@pytest.mark.parametrize("case", cases(NAMES, QUICK))
def test_greedy_continuation(case: str, causal: Callable[..., Any]) -> None:
    model = causal(case)
    sequences = model.start()
    found = [int(sequences.feed({"a": model.golden["prompt"]})["a"][-1].argmax())]
    while len(found) < len(model.golden["continuation"]):
        found.append(int(sequences.feed({"a": found[-1:]})["a"][-1].argmax()))
    assert found == model.golden["continuation"].tolist()


@pytest.mark.parametrize("case", cases(IN_BF16, QUICK_IN_BF16))
def test_logits_in_bf16(case: str, causal: Callable[..., Any], interpreted: Callable[..., Any]) -> None:
    """With bf16 weights, logits differ from those in f32 by at most 2 % on average. Single rows may differ more: one row of phi3-longrope
    differs by 5 % of the largest logit, in transformers too. On a machine that rounds where transformers rounds, every row is therefore
    compared with the interpreted program, which rounds rows, and with the bf16 logits of transformers. The average error may exceed that of
    transformers by 4e-3, because another order of summation may round a number in the other direction. For gpt_oss, the bf16 logits of
    transformers differ from f32 by 2.5 %, because rounding changes the choice of experts."""
    model = causal(case, "bf16")
    logits, plain, rounded = model.start().feed({"a": model.golden["prompt"]})["a"], model.golden["logits"], model.golden["logits_bf16"]
    if product_tiles(host()).pairs is None:
        assert mean_error(logits, plain) < 2e-2
        return
    meaning = interpreted(case, "bf16").start().feed({"a": model.golden["prompt"]})["a"]
    assert largest_error(logits, meaning) < 1e-2
    if case in ROUNDED_ELSEWHERE:
        assert mean_error(logits, rounded) < mean_error(rounded, plain)
    else:
        assert largest_error(logits, rounded) < 2e-2
    assert mean_error(logits, plain) < max(2e-2, mean_error(rounded, plain) + 4e-3)
    assert mean_error(logits, plain) > 2e-3  # the error would be smaller if the weights were not rounded


@pytest.mark.parametrize(("kv_dtype", "bound"), [(DType.F16, 2e-3), (DType.BF16, 1.5e-2), (DType.I8, 4e-2)])
def test_logits_over_pages_of_every_form(kv_dtype: DType, bound: float, causal: Callable[..., Any]) -> None:
    """Two steps give the right logits with every element type of KV pages. The size of the arena is constant, which shows that no call
    copies the cache."""
    model = causal("llama", kv_dtype=kv_dtype)
    assert isinstance(model.executable.meta.functions[model.entry].arena_bytes, int)
    sequences, prompt = model.start(), model.golden["prompt"]
    logits = np.concatenate([sequences.feed({"a": part})["a"] for part in (prompt[:5], prompt[5:])])
    assert 0 < mean_error(logits, model.golden["logits"]) < bound


def test_quick_cases_in_bf16_are_there() -> None:
    assert set(IN_BF16) > QUICK_IN_BF16


def test_every_model_type_has_a_case() -> None:
    configs = [json.loads((folder / "config.json").read_text()) for folder in GOLDEN.iterdir()]
    types = {part["model_type"] for config in configs for part in (config, config.get("text_config", config))}
    # The config of these types contains the config of a text model, which has another type; see test_config.py.
    nesting = {"gemma3", "gemma3n", "gemma4_unified"}
    same = {"kimi_k2", "lfm2-vl", "ministral"}  # read as deepseek_v3, lfm2_vl and mistral are; see test_config.py
    heard, seen = (
        {"whisper", "qwen2_audio", "voxtral", "qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3_omni_moe", "qwen3_omni_moe_thinker"},
        {"idefics3", "internvl", "llava", "smolvlm", "clip", "siglip", "siglip2"},
    )  # see test_hearing.py, test_listening.py, test_omni.py, test_seeing.py
    seen |= {"glm4v", "glm46v", "glm4v_text", "glm4v_moe", "glm4v_moe_text"}
    assert types == FAMILIES.keys() - nesting - same - heard - seen - {
        "embeddinggemma"
    }  # the config of embeddinggemma has the model type gemma3_text
