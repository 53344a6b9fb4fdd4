"""Families with several kinds of layers: which layers have states, the head sizes of each layer, and layers that share keys and values."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compiler.frontend.cache_groups import groups_of
from compiler.frontend.config import Activation, AltUp, Heads, Latent, LayerInputs, QueryGrowth
from compiler.frontend.errors import ConfigError
from compiler.frontend.registry import load_config, parse_config, weights_of
from compiler.frontend.rope import ProportionalScaling, Rope
from compiler.ir.dtypes import DType
from deploy.bench.synthetic import RandomWeights
from tests.compiler.frontend.test_config import small

HYBRID = {"num_hidden_layers": 4, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}


def test_a_hybrid_has_states_in_all_layers_but_each_fourth() -> None:
    assert parse_config(small("qwen3_next", **HYBRID)).stateful == {0, 1, 2}
    assert parse_config(small("qwen3_next", **HYBRID, full_attention_interval=2)).stateful == {0, 2}
    kinds = ["full_attention", "linear_attention"] * 2
    assert parse_config(small("qwen3_next", **HYBRID, layer_types=kinds)).stateful == {1, 3}


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("linear_num_key_heads", 5, r"a divisor of linear_num_value_heads \(32\)"),
        ("layer_types", ["linear_attention"] * 4, "at least one layer of type full_attention"),
        ("layer_types", ["sliding_attention"] * 4, "a list of 4 entries, each linear_attention or full_attention"),
        ("attn_output_gate", False, "true"),
        ("mamba_ssm_dtype", "bfloat16", "float32"),
        ("hidden_act", "gelu", "silu"),
    ],
)
def test_what_a_hybrid_does_not_have_is_refused_by_name(field: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} of .* expected {expected}"):
        parse_config(small("qwen3_next", **HYBRID, **{field: value}))


GEMMA4 = {"num_hidden_layers": 12, "num_attention_heads": 8}


def test_gemma_4_has_two_kinds_of_heads() -> None:
    config = parse_config(small("gemma4_text", **GEMMA4))
    assert config.windows == (*(512,) * 5, None) * 2
    assert (config.heads_of_layer(0), config.heads_of_layer(5)) == (Heads(4, 256), Heads(4, 512))
    assert config.rope == Rope(1e6, 512, ProportionalScaling(64, 1.0)) and config.local_rope == Rope(1e4, 256)
    assert (config.keeping, config.values_from_keys) == (tuple(range(12)), frozenset())
    assert config.layer_inputs == LayerInputs(256, 262_144)
    groups = groups_of(config, DType.BF16, 4096)
    assert [(group.layers, group.window) for group in groups] == [((5, 11), None), (tuple(sorted({*range(11)} - {5})), 512)]
    assert [group.bytes_per_page for group in groups] == [2 * 2 * 4 * 16 * 512 * 2, 10 * 2 * 4 * 16 * 256 * 2]
    short = groups_of(config, DType.BF16, 512)  # the windows cover this short context, but head sizes differ, so there are still two groups
    assert [(group.window, group.head_dim) for group in short] == [(None, 256), (None, 512)]
    joint = parse_config(small("gemma4_text", **GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=2))
    assert joint.heads_of_layer(5) == Heads(2, 512) and joint.values_from_keys == {5, 11}


def test_late_layers_of_gemma_4_read_what_earlier_ones_keep() -> None:
    config = parse_config(small("gemma4_text", **GEMMA4, num_kv_shared_layers=3, use_double_wide_mlp=True))
    assert config.kv_sources == (*range(9), 8, 8, 5) and config.keeping == tuple(range(9))
    assert config.intermediate_sizes == (128,) * 9 + (256,) * 3
    source = RandomWeights({f"model.layers.{n}.self_attn.{kind}.weight": (1,) for n in (8, 10) for kind in ("q_proj", "k_proj", "v_norm")})
    read = weights_of(config, source).tensors.keys()
    assert source.tensors.keys() - read == {"model.layers.10.self_attn.k_proj.weight", "model.layers.10.self_attn.v_norm.weight"}
    with pytest.raises(ConfigError, match=r"num_kv_shared_layers of .* is 7, expected a number that leaves one layer of each kind"):
        parse_config(small("gemma4_text", **GEMMA4, num_kv_shared_layers=7))


def test_a_unified_gemma_4_has_no_inputs_per_layer() -> None:
    flat = small("gemma4_unified_text", **GEMMA4)
    config = parse_config({"model_type": "gemma4_unified", "text_config": flat, "audio_config": {"novel": 1}})
    assert config == parse_config(flat)
    assert (config.layer_inputs, config.windows[0], config.max_context) == (None, 1024, 262_144)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("use_bidirectional_attention", "all", "vision or null, because attention between text tokens is causal"),
        ("num_global_key_value_heads", 3, r"a divisor of num_attention_heads \(8\)"),
    ],
)
def test_what_gemma_4_does_not_have_is_refused_by_name(field: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} of .* expected {expected}"):
        parse_config(small("gemma4_text", **GEMMA4, **{field: value}))


def gemma3n(**changes: Any) -> dict[str, Any]:
    return small("gemma3n_text", num_hidden_layers=20, num_attention_heads=8, num_kv_shared_layers=10, **changes)


def test_gemma_3n_has_the_defaults_of_transformers() -> None:
    config = parse_config(gemma3n())
    assert config.windows == (*(512,) * 4, None) * 4 and config.kv_sources == (*range(10), *(*(8,) * 4, 9) * 2)
    assert (config.rope, config.local_rope) == (Rope(1e6, 256), Rope(1e4, 256))
    assert (config.layer_inputs, config.altup) == (LayerInputs(256, 262_144), AltUp(4, 64))
    assert (config.sparsities, config.intermediate_sizes) == ((0.95,) * 10 + (0.0,) * 10, (128,) * 20)
    assert (config.logit_softcap, config.attention_scale, config.tie_word_embeddings) == (30.0, 1.0, True)
    few = parse_config(small("gemma3n_text", num_hidden_layers=5, num_attention_heads=8, num_kv_shared_layers=0))
    assert (few.sparsities, few.kv_sources) == ((0.0,) * 5, ())


def test_gemma_3n_states_numbers_per_layer() -> None:
    sizes, shares = [64] * 19 + [32], [0.5, *[0] * 19]
    config = parse_config(gemma3n(intermediate_size=sizes, activation_sparsity_pattern=shares, laurel_rank=8, altup_num_inputs=3))
    assert (config.intermediate_sizes, config.sparsities, config.altup) == (tuple(sizes), (0.5, *(0.0,) * 19), AltUp(3, 8))


def test_a_gemma_3n_within_a_multimodal_model_is_the_same() -> None:
    whole = {"model_type": "gemma3n", "text_config": gemma3n(), "audio_config": {"novel": 1}, "vision_config": {"novel": 1}}
    assert parse_config(whole) == parse_config(gemma3n())


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("altup_active_idx", 1, "0"),
        ("altup_correct_scale", False, "true"),
        ("altup_num_inputs", 1, "an integer from 2 to 64"),
        ("intermediate_size", [64] * 19, "a positive integer or a list of 20 positive integers"),
        ("intermediate_size", "64", "a positive integer or a list of 20 positive integers"),
        ("activation_sparsity_pattern", 0.5, "a list of 20 numbers of at least 0 and less than 1"),
        ("activation_sparsity_pattern", [1.0] * 20, "a list of 20 numbers of at least 0 and less than 1"),
        ("num_kv_shared_layers", 16, "a number that leaves one layer of each kind"),
        ("hidden_size_per_layer_input", 0, "an integer from 1 to"),
    ],
)
def test_what_gemma_3n_does_not_have_is_refused_by_name(field: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} of .* expected {expected}"):
        parse_config({**gemma3n(), field: value})


def granite4(**changes: Any) -> dict[str, Any]:
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 32, "num_experts_per_tok": 2, "layer_types": ["mamba", "attention", "mamba"]}
    return small("granitemoehybrid", **{**mamba, **changes})


def test_granite_4_has_states_where_its_layers_say_so() -> None:
    config = parse_config(granite4())
    assert config.recurrence is not None and (config.recurrence.layers, config.recurrence.size) == ({0, 2}, 32)
    assert config.rope is None and config.mixture is not None and config.mixture.size == 128
    assert config.intermediate_size == 1024  # size of the dense MLP that every token passes through
    named_anew = parse_config(granite4(layer_types=["linear_attention", "full_attention", "linear_attention"], mamba_d_head="auto"))
    assert named_anew == config
    dense = parse_config(
        granite4(layer_types=["attention"] * 3, num_local_experts=0, num_experts_per_tok=0, position_embedding_type="rope")
    )
    assert (dense.recurrence, dense.mixture, dense.rope) == (None, None, Rope(10000.0, 16))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("mamba_n_groups", 3, r"a divisor of mamba_n_heads \(4\)"),
        ("mamba_d_head", 16, r"128 elements divided by mamba_n_heads \(4\)"),
        ("time_step_limit", [0.0, 0.1], r"\[0.0, Infinity\]: limits of the step size are not supported"),
        ("layer_types", ["mamba"] * 3, "at least one attention layer"),
        ("layer_types", ["conv"] * 3, "a list of 3 entries, each mamba or linear_attention or attention or full_attention"),
        ("position_embedding_type", "alibi", "nope or rope"),
        ("normalization_function", "layernorm", "rmsnorm"),
        ("hidden_act", "gelu", "silu"),
    ],
)
def test_what_granite_4_does_not_have_is_refused_by_name(field: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} of .* expected {expected}"):
        parse_config(granite4(**{field: value}))


def nemotron_h(**changes: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": 5, "hybrid_override_pattern": "ME*-M", "num_key_value_heads": 2}
    return small("nemotron_h", **{**sizes, **changes})


def test_a_layer_of_nemotron_h_is_of_one_kind() -> None:
    config = parse_config(nemotron_h())
    assert (config.stateful, config.keeping, config.rope, config.activation) == ({0, 4}, (2,), None, Activation.RELU2)
    assert config.mixture is not None and (config.mixture.dense_layers, config.mixture.shared_size) == ({3}, 7688)
    assert [group.layers for group in groups_of(config, DType.BF16, 4096)] == [(2,), (0, 4)]
    kinds = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]
    assert parse_config(nemotron_h(hybrid_override_pattern=None, layers_block_type=kinds)) == config
    dense = parse_config(nemotron_h(hybrid_override_pattern="M-*-M", n_routed_experts=8, moe_latent_size=16))
    assert (dense.mixture, dense.keeping) == (None, (2,))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hybrid_override_pattern": "MX*-M"}, "hybrid_override_pattern of .* expected letters among M [*] - E"),
        ({"hybrid_override_pattern": "MEM-M"}, "hybrid_override_pattern of .* expected at least one attention layer"),
        ({"layer_types": ["mamba"] * 5}, "layer_types of .* expected at least one attention layer"),
        ({"layer_types": ["conv"] * 5}, "layer_types of .* expected a list of mamba, attention, mlp, moe"),
        ({"num_hidden_layers": 4}, "num_hidden_layers of .* is 4, expected 5, the length of the list of layer kinds"),
        ({"n_groups": 3}, r"n_groups of .* expected a divisor of mamba_num_heads \(128\)"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act of .* expected silu"),
        ({"sliding_window": 128}, "sliding_window of .* expected null, as in all models"),
        ({"time_step_limit": [0.1, 1.0]}, r"time_step_limit of .* expected \[0.0, Infinity\]"),
    ],
)
def test_what_nemotron_h_does_not_have_is_refused_by_name(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_config(nemotron_h(**changes))


def falcon_h1(**changes: Any) -> dict[str, Any]:
    return small("falcon_h1", **{"mamba_n_heads": 4, "mamba_d_ssm": 48, "num_key_value_heads": 2, **changes})


def test_each_layer_of_falcon_h1_has_keys_and_a_state() -> None:
    config = parse_config(falcon_h1(key_multiplier=0.5, ssm_multipliers=[1.0, 2.0, 3.0, 4.0, 5.0]))
    assert config.keeping == (0, 1, 2) and config.stateful == {0, 1, 2}
    assert [group.layers for group in groups_of(config, DType.BF16, 4096)] == [(0, 1, 2), (0, 1, 2)]
    assert config.attention_scale == 0.125
    assert config.recurrence is not None and (config.recurrence.size, config.recurrence.factors) == (12, (1.0, 2.0, 3.0, 4.0, 5.0))
    expanded = parse_config(falcon_h1(mamba_d_ssm=None)).recurrence
    assert expanded is not None and expanded.values == 2 * 64


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("ssm_multipliers", [1.0], "a list of 5 positive numbers"),
        ("mamba_use_mlp", False, "true, as in all models"),
        ("hidden_act", "gelu", "silu"),
    ],
)
def test_what_falcon_h1_does_not_have_is_refused_by_name(field: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} of .* expected {expected}"):
        parse_config(falcon_h1(**{field: value}))


def test_lfm2_has_experts_behind_its_first_layers() -> None:
    config = parse_config(small("lfm2_moe", num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"], num_dense_layers=2))
    assert config.mixture is not None and (config.mixture.dense_layers, config.mixture.num_experts) == ({0, 1}, 32)
    assert (config.stateful, config.intermediate_size) == ({0, 2}, 128)  # lfm2_moe uses intermediate_size unchanged, while lfm2 rounds it
    with pytest.raises(ConfigError, match=r"use_expert_bias of .* expected true, as in all models"):
        parse_config(small("lfm2_moe", use_expert_bias=False))


def glm_flash(**changes: Any) -> dict[str, Any]:
    return small("glm4_moe_lite", **{"num_attention_heads": 2, "hidden_size": 32, **changes})


def test_pages_of_glm_flash_hold_latents() -> None:
    """A page of GLM-4.7-Flash stores one latent head per token, however many query heads read it. The latent is stored once: it is the
    value, and the beginning of the key."""
    config = parse_config(glm_flash())
    assert config.latent == Latent(512, 768, 192, 64, 256)
    (group,) = groups_of(config, DType.BF16, 4096)
    assert (group.num_kv_heads, group.head_dim, config.attention_scale) == (1, 512 + 64, 256**-0.5)
    assert (group.value_size, group.bytes_per_page) == (512, 16 * (512 + 64) * 2 * len(group.layers))
    assert config.rope == Rope(10000.0, 64, interleaved=True)
    assert config.mixture is not None and config.mixture.dense_layers == {0}
    whole = parse_config(glm_flash(q_lora_rank=None, mlp_layer_types=["dense", "dense", "sparse"], num_nextn_predict_layers=1))
    assert whole.latent is not None and whole.latent.query_rank is None
    assert whole.mixture is not None and (whole.mixture.dense_layers, whole.unused) == ({0, 1}, ("*layers.3.*",))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("partial_rotary_factor", 0.5, "1, because partial rotation is not supported"),
        ("mlp_layer_types", ["dense"], "a list of 3 entries, each dense or sparse"),
        ("topk_method", "greedy", "noaux_tc"),
        ("qk_head_dim", 128, r"256: qk_nope_head_dim \+ qk_rope_head_dim"),
    ],
)
def test_what_glm_flash_does_not_have_is_refused_by_name(field: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} of .* expected {expected}"):
        parse_config(glm_flash(**{field: value}))


def test_gemma_4_may_state_sizes_by_the_numbers_of_layers() -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_attention_heads": 4, "attention_k_eq_v": True}
    named = parse_config(small("gemma4_text", **kinds, global_head_dim=96, num_global_key_value_heads=2))
    numbered = {"01": {"head_dim": 96, "num_key_value_heads": 2}, "02": {"head_dim": 96, "num_key_value_heads": 2}}
    assert parse_config(small("gemma4_text", **kinds, per_layer_config=numbered)) == named
    for wrong in ({"01": {"head_dim": 96}}, {**numbered, "02": {"head_dim": 64}}, {"01": {"rope": 1}, "02": {"rope": 1}}, [1]):
        with pytest.raises(ConfigError, match=r"per_layer_config of .* expected equal objects of head_dim .* for the layers 1, 2"):
            parse_config(small("gemma4_text", **kinds, per_layer_config=wrong))


def test_infinity_may_be_written_as_an_object(tmp_path: Path) -> None:
    values = falcon_h1(time_step_limit=[0.0, {"__float__": "Infinity"}])
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert load_config(tmp_path) == parse_config(falcon_h1(time_step_limit=[0.0, math.inf]))


def llama4(**changes: Any) -> dict[str, Any]:
    return small("llama4_text", **{"num_hidden_layers": 4, "num_attention_heads": 8, **changes})


def test_llama_4_has_the_defaults_of_transformers() -> None:
    config = parse_config(llama4())
    assert (config.unrotated, config.windows, config.chunked) == ({3}, (8192, 8192, 8192, None), True)
    assert (config.rope, config.query_growth) == (Rope(5e5, 128, interleaved=True), QueryGrowth(0.1, 8192, ahead=1))
    assert (config.head_norms, config.norm_eps, config.num_kv_heads, config.max_context) == (True, 1e-5, 8, 131_072)
    assert config.intermediate_size == 16384 and config.mixture is not None
    assert (config.mixture.num_experts, config.mixture.size, config.mixture.shared_size) == (16, 128, 128)
    assert config.mixture.dense_layers == frozenset() and config.mixture.scales_inputs


def test_llama_4_states_its_kinds_of_layers() -> None:
    def dense(**changes: Any) -> frozenset[int]:
        found = parse_config(llama4(**changes)).mixture
        assert found is not None
        return found.dense_layers

    assert dense(interleave_moe_layer_step=2) == {0, 2}
    assert dense(interleave_moe_layer_step=2, moe_layers=[0]) == {1, 2, 3}
    assert parse_config(llama4(no_rope_layers=[])) == parse_config(llama4())
    assert parse_config(llama4(no_rope_layers=[0, 1, 1, 1])).windows == (None, 8192, 8192, 8192)
    assert parse_config(llama4(attention_chunk_size=None)).windows == (None,) * 4
    kinds = ["full_attention", "chunked_attention"] * 2
    assert parse_config(llama4(layer_types=kinds, attention_chunk_size=64)).windows == (None, 64) * 2
    assert parse_config(llama4(attn_temperature_tuning=4)) == parse_config(llama4())  # of files that have a number instead of a flag
    assert parse_config(llama4(attn_temperature_tuning=False)).query_growth is None


def test_a_llama_4_within_a_multimodal_model_is_the_same() -> None:
    encoder = {"hidden_size": 1408, "intermediate_size": 5632, "num_attention_heads": 16, "vision_output_dim": 4096}
    whole = parse_config({"model_type": "llama4", "text_config": llama4(), "vision_config": encoder, "image_token_index": 7})
    assert replace(whole, vision=None) == parse_config(llama4())


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("attention_chunk_size", 8200, "a multiple of 16, the tokens of a page of keys"),
        ("attn_temperature_tuning", "on", "true or false"),
        ("num_experts_per_tok", 2, "1, as in all models of the family"),
        ("moe_layers", [4], "a list of layers from 0 to 3"),
        ("layer_types", ["sliding_attention"] * 4, "a list of 4 entries, each chunked_attention or full_attention"),
        ("no_rope_layers", [1, 2, 1, 1], "a list of 4 entries, each 0 or 1"),
        ("no_rope_layers", False, "a list of 4 entries, each 0 or 1"),
    ],
)
def test_what_llama_4_does_not_have_is_refused_by_name(field: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} of .* expected {expected}"):
        parse_config(llama4(**{field: value}))


def test_layers_with_chunks_free_pages_of_earlier_chunks() -> None:
    """A chunk has no more tokens than a window of its size, so the cache treats it as a window."""
    config = parse_config(llama4(attention_chunk_size=64))
    assert [(group.layers, group.window) for group in groups_of(config, DType.BF16, 128)] == [((3,), None), ((0, 1, 2), 64)]
    assert [(group.layers, group.window) for group in groups_of(config, DType.BF16, 64)] == [((0, 1, 2, 3), None)]


def test_the_head_of_lfm2_vl_is_that_of_the_outer_model() -> None:
    text = small("lfm2", num_key_value_heads=2, tie_embedding=True)
    assert parse_config({"model_type": "lfm2_vl", "text_config": text}) == parse_config(text)
    for name in ("tie_word_embeddings", "tie_embedding"):
        assert not parse_config({"model_type": "lfm2_vl", "text_config": text, name: False}).tie_word_embeddings
    with pytest.raises(ConfigError, match=r"model_type of text_config of config.json is 'lfm2_moe', expected lfm2"):
        parse_config({"model_type": "lfm2_vl", "text_config": {**text, "model_type": "lfm2_moe"}})
