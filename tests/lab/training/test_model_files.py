"""The files in the demo model's folder are consistent with each other, and small."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from deploy.demo import MODEL
from tests.lab.training.rendering import TEMPLATE
from tests.lab.training.vocabulary import CONTEXT, SIZE, configuration

MOST_BYTES = 8_000_000
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def read(name: str) -> dict:
    return json.loads((MODEL / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def test_the_folder_is_small_enough_for_the_package():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= MOST_BYTES


def test_the_folder_has_what_a_loader_looks_for():
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert {path.name for path in MODEL.iterdir()} == expected


def test_the_tensors_are_those_of_the_configuration():
    config = read("config.json")
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    expected = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for layer in range(config["num_hidden_layers"]):
        of_layer = {
            "input_layernorm": [hidden],
            "post_attention_layernorm": [hidden],
            "self_attn.q_proj": [queries, hidden],
            "self_attn.k_proj": [keys, hidden],
            "self_attn.v_proj": [keys, hidden],
            "self_attn.o_proj": [hidden, queries],
            "mlp.gate_proj": [inner, hidden],
            "mlp.up_proj": [inner, hidden],
            "mlp.down_proj": [hidden, inner],
        }
        expected |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    with safe_open(MODEL / "model.safetensors", framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - `file` is not a dictionary
        assert {name: tensor.get_shape() for name, tensor in slices.items()} == expected
        assert {tensor.get_dtype() for tensor in slices.values()} == {"BF16"}
    assert 2e6 <= sum(map(math.prod, expected.values())) <= 6e6


def test_sizes_fit_the_kernels():
    config = read("config.json")
    assert config["head_dim"] in (32, 64)
    assert all(config[name] % 32 == 0 for name in ("vocab_size", "hidden_size", "intermediate_size"))


def test_tokenizer_and_configurations_agree(tokenizer: Tokenizer):
    config, generation, named = read("config.json"), read("generation_config.json"), read("tokenizer_config.json")
    assert tokenizer.get_vocab_size() == config["vocab_size"] == SIZE
    assert config["max_position_embeddings"] == named["model_max_length"] == CONTEXT
    assert config["eos_token_id"] == tokenizer.token_to_id(named["eos_token"])
    assert generation["eos_token_id"] == [tokenizer.token_to_id(named[key]) for key in ("eos_token", "pad_token")]


def test_the_template_in_the_folder_is_the_one_trained_on(tokenizer: Tokenizer):
    assert read("tokenizer_config.json") == configuration(tokenizer)
    assert read("tokenizer_config.json")["chat_template"] == TEMPLATE


@given(text=st.text())
def test_any_text_survives_the_tokenizer(text: str):
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer):
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]


def test_the_marks_of_tool_calls_survive_decoding(tokenizer: Tokenizer):
    for mark in MARKS:
        ids = tokenizer.encode(mark).ids
        assert len(ids) == 1 and tokenizer.decode(ids) == mark
