"""The layers of a model divided into stages: which models can be divided, where, and that stages compute the bits of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.frontend.decoder import PART
from compiler.frontend.registry import load_config, weights_of
from compiler.frontend.splitting import CannotSplit, bytes_of_layers, require_splittable, split
from compiler.frontend.weights import open_safetensors

GOLDEN = Path(__file__).parents[2] / "golden" / "models"

# The cases cover grouped heads, tied embeddings, soft caps with windows, quantised weights, experts, sinks, states, latents, and chunks.
QUICK = [("llama", "bf16"), ("gemma2", "f32"), ("qwen3_next", "int8")]
SLOW = [("llama", "int8"), ("llama", "fp8"), ("qwen3_moe", "f32"), ("gpt_oss", "int8"), ("falcon_h1", "int8"), ("deepseek_v2", "int8")]
SLOW += [("llama4", "bf16"), ("granitemoehybrid", "bf16"), ("lfm2", "f32"), ("llama-bias-tied", "f32")]
CASES = [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else [], id="-".join(case)) for case in (*QUICK, *SLOW)]


class Stages:
    """A model whose layers are computed by several programs, each with pages of its own."""

    def __init__(self, causal: Callable[..., Any], case: tuple[str, str], cuts: list[int], seed: int) -> None:
        ranges = [range(*ends) for ends in pairwise(cuts)]
        entries = [PART] * (len(ranges) - 1) + ["step"]
        models = [causal(*case, entry, layers=layers) for entry, layers in zip(entries, ranges, strict=True)]
        self._stages = [model.start(seed=seed) for model in models]

    def feed(self, pieces: dict[str, Any]) -> dict[str, Any]:
        stream, rows = None, dict[str, Any]()
        for stage in self._stages:
            rows = stage.feed(pieces, stream)
            stream = np.concatenate(list(rows.values()))
        return rows


@pytest.mark.parametrize("case", CASES)
def test_stages_compute_the_bits_of_the_whole_model(case: tuple[str, str], causal: Callable[..., Any]) -> None:
    whole = causal(*case)
    text = np.concatenate([whole.golden["prompt"], whole.golden["continuation"]])
    cut = max(1, whole.config.num_layers // 2)
    stages, sequences = Stages(causal, case, [0, cut, whole.config.num_layers], seed=5), whole.start()
    for low, high in pairwise([0, 30, 31, len(text)]):
        pieces = {"a": text[low:high], "b": text[:5]}
        expected, found = sequences.feed(pieces), stages.feed(pieces)
        for name in pieces:
            np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.parametrize("case", [("llama", "bf16"), pytest.param(("gemma2", "f32"), marks=pytest.mark.slow), ("qwen3_next", "int8")])
def test_the_last_stage_may_have_no_layers(case: tuple[str, str], causal: Callable[..., Any]) -> None:
    whole = causal(*case)
    text, num = whole.golden["prompt"], whole.config.num_layers
    stages, sequences = Stages(causal, case, [0, num, num], seed=5), whole.start()
    for low, high in pairwise([0, 9, 10]):
        pieces = {"a": text[low:high], "b": text[:5]}
        expected, found = sequences.feed(pieces), stages.feed(pieces)
        for name in pieces:
            np.testing.assert_array_equal(found[name], expected[name])


def test_a_middle_stage_has_neither_embedding_nor_head(causal: Callable[..., Any]) -> None:
    model = causal("gemma2", "f32", PART, layers=range(1, 2))
    names = {param.name for param in model.executable.meta.functions[PART].params}
    assert not any("embed_tokens" in name or "layers.0." in name for name in names)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("bert", "is an encoder"),
        ("gemma3n", "embeds each token once per layer"),
        ("../vision_models/llava", "sees images"),
        ("llama-classes", "has a classification head"),
        ("gemma4", "embeds each token once per layer|reads the keys"),
    ],
)
def test_models_that_have_no_stages_are_refused_by_name(case: str, why: str) -> None:
    with pytest.raises(CannotSplit, match=f"the model ({why}), so it cannot be computed in stages"):
        require_splittable(load_config(GOLDEN / case), 2)


def test_there_are_no_more_stages_than_layers() -> None:
    config = load_config(GOLDEN / "llama")
    require_splittable(config, config.num_layers)
    with pytest.raises(CannotSplit, match=f"{config.num_layers + 1} stages; the model has {config.num_layers} layers"):
        require_splittable(config, config.num_layers + 1)


@pytest.mark.parametrize("case", ["llama", "gemma2", "llama-bias-tied"])
def test_all_bytes_belong_to_a_layer(case: str) -> None:
    """The bytes of all layers add up to those of all tensors. A tied embedding is counted twice, because two stages have it."""
    config = load_config(GOLDEN / case)
    tensors = weights_of(config, open_safetensors(GOLDEN / case)).tensors
    embedding = sum(info.num_bytes for name, info in tensors.items() if "embed_tokens" in name)
    twice = embedding if config.tie_word_embeddings else 0
    assert sum(bytes_of_layers(config, tensors)) == sum(info.num_bytes for info in tensors.values()) + twice


def test_the_fullest_stage_is_as_empty_as_possible() -> None:
    assert split([1] * 6, [1, 1]) == (range(3), range(3, 6))
    assert split([5, 1, 1, 1, 5], [1, 1]) in ((range(2), range(2, 5)), (range(3), range(3, 5)))
    assert split([1] * 10, [3, 1]) == (range(8), range(8, 10))
    assert split([1] * 3, [1, 1, 1]) == (range(1), range(1, 2), range(2, 3))
    assert split([1, 1], [1, 0]) == (range(1), range(1, 2)), "each stage has a layer, even without room"
