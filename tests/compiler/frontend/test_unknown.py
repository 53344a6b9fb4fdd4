"""The error for an unknown model type names the known family that has the same architecture."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from compiler.frontend.registry import FAMILIES
from compiler.frontend.unknown import remedy
from compiler.frontend.weights import open_safetensors

MODELS = Path(__file__).parents[2] / "golden" / "models"


def write(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard_of", **fields}))
    return folder


YARN = {"rope_type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
WITHOUT_ADVICE = {"gemma3", "mistral3", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl", "qwen3_vl_text", "hunyuan_v1_dense"}
WITHOUT_ADVICE |= {"qwen2_audio", "voxtral", "qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3_omni_moe", "qwen3_omni_moe_thinker"}
WITHOUT_ADVICE |= {"embeddinggemma", "gemma3n", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
WITHOUT_ADVICE |= {
    "clip",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm4v_moe_text",
    "glm4v_text",
    "idefics3",
    "internvl",
    "kimi_k2",
    "lfm2-vl",
    "lfm2_vl",
    "llama4",
    "llama_bidirec",
    "llava",
    "ministral",
    "qwen2_vl",
    "qwen2_vl_text",
    "qwen3_vl_moe",
    "qwen3_vl_moe_text",
    "siglip",
    "siglip2",
    "smolvlm",
    "whisper",
}
ARCHITECTURES = {
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "bert": "BertModel",
    "camembert": "CamembertModel",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "distilbert": "DistilBertModel",
    "electra": "ElectraModel",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone": "ExaoneForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma3n": "Gemma3nForCausalLM",
    "gemma4-experts": "Gemma4ForCausalLM",
    "gemma4_unified": "Gemma4UnifiedForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "helium": "HeliumForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4-text": "Llama4ForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "modernbert": "ModernBertModel",
    "mpnet": "MPNetModel",
    "nemotron": "NemotronForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "nomic_bert": "NomicBertModel",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhiMoEForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "roberta": "RobertaModel",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "xlm-roberta": "XLMRobertaModel",
}


def test_every_advice_has_a_case() -> None:
    """This file has a case for every family that the error may name. test_models.py and test_encoders.py compare the logits of these
    families."""
    assert {config_of(case)["model_type"] for case in ARCHITECTURES} == FAMILIES.keys() - WITHOUT_ADVICE


def config_of(case: str) -> dict[str, Any]:
    return json.loads((MODELS / case / "config.json").read_text())


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_a_known_architecture_under_another_name(case: str, tmp_path: Path) -> None:
    shutil.copy(MODELS / case / "model.safetensors", tmp_path)
    fields = config_of(case)
    write(tmp_path, **{**fields, "architectures": [ARCHITECTURES[case]], "model_type": "unheard_of"})
    assert f"tensors are those of '{fields['model_type']}': set model_type to '{fields['model_type']}' in" in remedy(tmp_path)
    source = open_safetensors(MODELS / case)
    tensors = {name: np.array(source.read(name)) for name in source.tensors}
    save_file({**tensors, "model.layers.0.novel.weight": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    assert remedy(tmp_path) == ""


def test_equal_fields_and_tensors_are_no_proof(tmp_path: Path) -> None:
    """Helium has the fields and tensors of Llama, but its rotary embedding pairs other elements, so the error names no family."""
    shutil.copy(MODELS / "llama" / "model.safetensors", tmp_path)
    fields = config_of("llama")
    assert remedy(write(tmp_path, **{**fields, "architectures": ["HeliumForCausalLM"], "model_type": "unheard_of"})) == ""


def test_fields_that_the_twin_does_not_read_are_no_proof(tmp_path: Path) -> None:
    """Ministral 3 has the tensors of Mistral, but its configuration has one more nested field, which changes the computation. While that
    field is present, the error names no family."""
    shutil.copy(MODELS / "ministral3" / "model.safetensors", tmp_path)
    fields = {**config_of("ministral3"), "architectures": ["MistralForCausalLM"], "model_type": "unheard_of"}
    assert remedy(write(tmp_path, **fields)) == ""
    fields["rope_parameters"] = {name: value for name, value in fields["rope_parameters"].items() if name in YARN}
    assert "those of 'mistral'" in remedy(write(tmp_path, **fields))


def test_no_advice_without_weights(tmp_path: Path) -> None:
    fields = config_of("llama")
    assert remedy(write(tmp_path, **{**fields, "architectures": ["LlamaForCausalLM"], "model_type": "unheard_of"})) == ""


@pytest.mark.parametrize("dtype", [np.uint16, np.uint64, ml_dtypes.float8_e5m2])
def test_no_advice_for_an_element_type_that_no_program_reads(dtype: Any, tmp_path: Path) -> None:
    source = open_safetensors(MODELS / "llama")
    tensors = {name: np.array(source.read(name)) for name in source.tensors}
    save_file({**tensors, "lm_head.weight": np.ones((4, 4), dtype)}, tmp_path / "model.safetensors")
    fields = config_of("llama")
    assert remedy(write(tmp_path, **{**fields, "architectures": ["LlamaForCausalLM"], "model_type": "unheard_of"})) == ""


def test_no_advice_if_two_tensors_would_be_one_parameter(tmp_path: Path) -> None:
    """EXAONE's tensors are renamed to those of Llama. A file that has a tensor under both names is none of EXAONE."""
    source = open_safetensors(MODELS / "exaone")
    tensors = {name: np.array(source.read(name)) for name in source.tensors}
    doubled = {"model.embed_tokens.weight": tensors["transformer.wte.weight"]}
    save_file({**tensors, **doubled}, tmp_path / "model.safetensors")
    fields = {**config_of("exaone"), "architectures": ["ExaoneForCausalLM"], "model_type": "unheard_of"}
    assert remedy(write(tmp_path, **fields)) == ""
