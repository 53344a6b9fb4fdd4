"""Models that people download have fields in their config.json that no golden model has: settings of training scripts, former names, and
settings of code outside transformers. `published.json` has a config.json per line, by the name of its model. All of them are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compiler.frontend.config import Activation
from compiler.frontend.errors import ConfigError
from compiler.frontend.fields import read_json
from compiler.frontend.quantized.source import methods_of
from compiler.frontend.registry import FAMILIES, parse_config

PUBLISHED: dict[str, dict[str, Any]] = read_json(Path(__file__).with_name("published.json"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read(name: str) -> None:
    config = parse_config(PUBLISHED[name])
    assert config.num_layers > 0 and config.max_context >= 512
    assert bool(methods_of(PUBLISHED[name])) == ("quantization_config" in PUBLISHED[name])


def test_the_list_covers_what_people_download() -> None:
    assert len(PUBLISHED) >= 70
    assert len({config["model_type"] for config in PUBLISHED.values()}) >= 44
    assert all(config["model_type"] in FAMILIES for config in PUBLISHED.values())
    assert json.dumps(PUBLISHED).count("quantization_config") >= 3


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Qwen3-Coder-30B", {"use_qk_norm": False}, "use_qk_norm of config.json is False, expected true"),
        ("Hunyuan-0.5B", {"use_cla": True}, "use_cla of config.json is True, expected false"),
        ("Hunyuan-0.5B", {"norm_type": "layer"}, "norm_type of config.json is 'layer', expected rms"),
        ("LFM2-1.2B", {"theta": 10000.0}, "theta of config.json is 10000.0, expected 1000000.0, the value of rope_theta"),
        ("falcon3-1b", {"activation": "gelu"}, "activation: 'gelu'"),
        ("gemma-2-2b", {"sliding_window_size": 2048}, "sliding_window_size of config.json is 2048, expected 4096, the value of"),
        ("phi-2", {"rotary_dim": 16}, "rotary_dim of config.json is 16, expected 32, the value of head_dim"),
        ("Nemotron-Nano-9B-v2", {"time_step_limit": [0.0, 3e38]}, r"time_step_limit of .* expected \[0.0, Infinity\]"),
        ("Nemotron-Nano-9B-v2", {"time_step_limit": [0.1, 1e308]}, r"time_step_limit of .* expected \[0.0, Infinity\]"),
        ("Qwen2.5-7B-1M", {"dual_chunk_attention_config": {"chunk_size": 8, "local_size": 8}}, "local_size of .* is 8, expected less than"),
    ],
)
def test_another_value_of_such_a_field_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**PUBLISHED[name], **changes})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma-2-2b", {"sliding_window_size": 4096}),  # the 9B and 27B models
        ("phi-2", {"rotary_dim": 32}),
        ("Nemotron-Nano-9B-v2", {"time_step_limit": [0.0, 1e308]}),  # Nemotron 3 Ultra
    ],
)
def test_a_field_that_repeats_what_others_say_changes_nothing(name: str, changes: dict[str, Any]) -> None:
    assert parse_config({**PUBLISHED[name], **changes}) == parse_config(PUBLISHED[name])


def test_the_former_names_of_fields_count() -> None:
    lfm2 = {key: value for key, value in PUBLISHED["LFM2-1.2B"].items() if key != "rope_theta"}
    assert (rope := parse_config({**lfm2, "theta": 5000.0}).rope) is not None and rope.theta == 5000.0
    nemotron = {key: value for key, value in PUBLISHED["Nemotron-Nano-9B-v2"].items() if key != "head_dim"}
    assert parse_config({**nemotron, "attention_head_dim": 64}).head_dim == 64


def test_yarn_multiplies_the_usual_factor_by_attn_factor() -> None:
    """DeepSeek-R1-0528-Qwen3-8B states the inverse of the usual factor, so rotations are not scaled."""
    rope = parse_config(PUBLISHED["DeepSeek-R1-0528-Qwen3-8B"]).rope
    assert rope is not None and rope.frequencies(131072)[1] == pytest.approx(1.0)


def test_dual_chunk_attention_limits_the_context_to_one_chunk() -> None:
    assert parse_config(PUBLISHED["Qwen2.5-7B-1M"]).max_context == 262_144 - 8192


@pytest.mark.parametrize(
    ("name", "rows", "places", "num_layers"),
    [
        *(("gemma-3-4b-it", 256, 4096, 27), ("gemma-3-12b-unsloth", 256, 4096, 27), ("llava-1.5-7b", 576, 577, 23)),
        *(("Qwen2-VL-2B", 1, 4, 32), ("Qwen2.5-VL-3B", 1, 4, 32), ("Qwen3-VL-2B", 1, 4, 24), ("Qwen3-VL-30B-A3B", 1, 4, 27)),
    ],
)
def test_published_models_see_as_their_papers_say(name: str, rows: int, places: int, num_layers: int) -> None:
    vision = parse_config(PUBLISHED[name]).vision
    assert vision is not None
    assert (vision.num_rows, vision.num_places, vision.num_layers) == (rows, places, num_layers)


@pytest.mark.parametrize("name", [name for name, config in PUBLISHED.items() if config["model_type"].startswith("gemma")])
def test_no_gemma_has_another_activation(name: str) -> None:
    """Every Gemma uses the GELU that is computed by tanh, although the files of some models do not state it."""
    assert parse_config(PUBLISHED[name]).activation is Activation.GELU_TANH
