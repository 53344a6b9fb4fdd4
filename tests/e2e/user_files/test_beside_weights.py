"""Models are loaded with what files beside the weights say: chat templates, recommended sampling, the tokens that end an answer, the
scaling of positions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import pytest

from compiler.frontend.gguf.model import GgufModel
from compiler.frontend.registry import load_config
from compiler.frontend.rope import LinearScaling
from deploy.model_loading.tokenizer import load_tokenizer
from server.models.model import sampling_of
from tests.deploy.gguf_files import VOCAB
from tests.e2e.user_files.bring import bring, change_json, refused, write_folder
from tests.golden.gguf_models import convert

# --- chat templates -----------------------------------------------------------------------------------------------------

PLAIN, TOOLS = "plain:{{ messages[0].content }}", "tools:{{ tools[0].function.name }}"
NAMED = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS}, {"name": "rag", "template": "rag"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def a_text(folder: Path) -> None:
    change_json(folder / "tokenizer_config.json", chat_template=PLAIN)


def a_list(folder: Path) -> None:
    change_json(folder / "tokenizer_config.json", chat_template=NAMED)


def of_a_processor(folder: Path) -> None:
    change_json(folder / "chat_template.json", chat_template=PLAIN)


def a_file(folder: Path) -> None:
    change_json(folder / "tokenizer_config.json", chat_template="an older template")
    (folder / "chat_template.jinja").write_text(PLAIN)


def two_files(folder: Path) -> None:
    a_file(folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)


def rendered(source: Path, tools: list[Mapping[str, Any]] | None) -> str:
    template = load_tokenizer(str(source)).chat_template
    assert template is not None
    return template.render([{"role": "user", "content": "hi"}], tools)


@pytest.mark.parametrize("place", [a_text, a_list, of_a_processor, a_file, two_files])
def test_a_chat_template_is_found_in_each_of_its_places(place: Callable[[Path], None], tmp_path: Path) -> None:
    place(folder := write_folder(tmp_path / "model"))
    assert rendered(folder, None) == "plain:hi"
    assert rendered(folder, [TOOL]) == ("tools:add" if place in (a_list, two_files) else "plain:hi")


def test_the_templates_of_a_gguf_file_are_found(tmp_path: Path) -> None:
    write_file(tmp_path / "m.gguf", lambda writer: writer.add_chat_template(NAMED))
    assert (rendered(tmp_path / "m.gguf", None), rendered(tmp_path / "m.gguf", [TOOL])) == ("plain:hi", "tools:add")


def test_a_model_without_a_template_is_loaded(tmp_path: Path) -> None:
    assert bring(write_folder(tmp_path / "model")).tokenizer.chat_template is None


def test_a_broken_template_is_refused(tmp_path: Path) -> None:
    (write_folder(tmp_path / "model") / "chat_template.jinja").write_text("{% for x in %}")
    refused(tmp_path / "model", "the chat template is broken: .*; correct it, or remove it to serve the model without one")


# --- recommended sampling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recommended", "applied"),
    [
        ({}, {"temperature": 1.0, "top_p": 1.0}),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"temperature": 0, "do_sample": True}, {"temperature": 0}),
        ({"do_sample": False, "temperature": 1.0}, {"temperature": 0.0}),
        ({"temperature": None, "top_p": None, "top_k": None}, {"temperature": 1.0, "top_p": 1.0}),
        ({"repetition_penalty": 1.05, "min_p": 0.1}, {"repetition_penalty": 1.05, "min_p": 0.1}),
        ({"num_beams": 4, "max_length": 20, "transformers_version": "5.1"}, {"temperature": 1.0}),
    ],
)
def test_recommended_sampling_is_applied(recommended: dict[str, Any], applied: dict[str, float], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    defaults = load_tokenizer(str(folder)).generation_defaults
    assert applied.items() <= sampling_of(defaults).items(), asdict(defaults)


@pytest.mark.parametrize(
    ("recommended", "said"),
    [
        ({"temperature": "0.7"}, "temperature in generation_config.json is '0.7', expected a number from 0 to 100"),
        ({"top_p": 1.5}, "top_p in generation_config.json is 1.5, expected a number from 0 to 1"),
        ({"top_k": 0.5}, "top_k in generation_config.json is 0.5, expected a non-negative integer"),
        ({"repetition_penalty": 0}, "repetition_penalty in generation_config.json is 0, expected a number from 0.01 to 100"),
        ({"temperature": float("nan")}, "temperature in generation_config.json is nan, expected a number from 0 to 100"),
        ({"min_p": float("inf")}, "min_p in generation_config.json is inf, expected a number from 0 to 1"),
        ({"eos_token_id": "</s>"}, "eos_token_id in generation_config.json is '</s>', expected a token id or a list of them"),
        ([1], "generation_config.json holds a list, expected an object"),
    ],
)
def test_a_recommendation_that_is_none_is_refused(recommended: object, said: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    refused(folder, said)


# --- the tokens that end an answer ----------------------------------------------------------------------------------------


def test_every_end_token_of_a_folder_ends_an_answer(tmp_path: Path) -> None:
    """The tokenizer, generation_config.json and config.json each name end tokens, and all of them count."""
    folder = write_folder(tmp_path / "model", eos_token_id=[5, 6])
    change_json(folder / "tokenizer_config.json", eos_token=VOCAB[3])
    change_json(folder / "generation_config.json", eos_token_id=[4, 5])
    brought = bring(folder)
    assert brought.loaded.eos_ids == brought.tokenizer.eos_ids == (3, 4, 5, 6)


TURNS = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("tokens", "template", "eot", "ends"),
    [
        ((), "", None, (2,)),
        ((), "", 7, (2, 7)),
        (("<|im_end|>",), TURNS, None, (2, 3)),
        (("<|im_end|>",), "", None, (2,)),
        (("<|im_end|>",), TURNS, 7, (2, 7)),
        (("<|end|>", "<|return|>"), "{{ '<|end|>' }}", None, (2,)),
    ],
    ids=["end", "turn stated", "turn in the template", "no template", "both", "harmony"],
)
def test_every_end_token_of_a_gguf_file_ends_an_answer(
    tokens: tuple[str, ...], template: str, eot: int | None, ends: tuple[int, ...], tmp_path: Path
) -> None:
    """Many files state only the token that ends a text. Then an answer also ends where the chat template ends a turn."""

    def fill(writer: gguf.GGUFWriter) -> None:
        if template:
            writer.add_chat_template(template)
        if eot is not None:
            writer.add_eot_token_id(eot)

    write_file(tmp_path / "m.gguf", fill, tokens=tokens)
    brought = bring(tmp_path / "m.gguf")
    assert brought.loaded.eos_ids == brought.tokenizer.eos_ids == ends


# --- the scaling of positions -------------------------------------------------------------------------------------------

ORIGINAL = {"original_max_position_embeddings": 64}
LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"type": "linear", "factor": 4.0},
        {"rope_type": "linear", "factor": 4},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
        {"rope_type": "longrope", **LISTS, **ORIGINAL},
        {"type": "su", **LISTS, **ORIGINAL},
        {"type": "mrope", "mrope_section": [2, 3, 3]},
    ],
    ids=lambda scaling: str(scaling.get("rope_type", scaling.get("type"))),
)
def test_every_scaling_of_positions_is_loaded(scaling: dict[str, Any], tmp_path: Path) -> None:
    brought = bring(write_folder(tmp_path / "model", rope_scaling=scaling))
    assert brought.logits([1, 2, 3]).shape == (128,)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        (
            {"rope_type": "ntk-by-parts", "factor": 2.0},
            "rope_type of rope_scaling of config.json is 'ntk-by-parts', expected one of default",
        ),
        ({"rope_type": "linear"}, "rope_scaling of config.json has no factor, expected a positive number"),
        ({"rope_type": "linear", "factor": "4"}, "factor of rope_scaling of config.json is '4', expected a positive number"),
        ({"rope_type": "longrope", **ORIGINAL}, "rope_scaling of config.json has no short_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "betas": 3}, "betas"),
    ],
)
def test_another_scaling_of_positions_is_refused(scaling: dict[str, Any], said: str, tmp_path: Path) -> None:
    refused(write_folder(tmp_path / "model", rope_scaling=scaling), said)


def test_a_gguf_file_may_state_a_linear_scaling_as_older_files_do(tmp_path: Path) -> None:
    for name, key in (("new", None), ("old", "llama.rope.scale_linear")):
        convert("llama", "llama", tmp_path / f"{name}.gguf", lambda writer, key=key: _linear(writer, key))
        rope = GgufModel(tmp_path / f"{name}.gguf").config.rope
        assert rope is not None and rope.scaling == LinearScaling(4.0)
    plain = load_config(Path(__file__).parents[2] / "golden" / "models" / "llama").rope
    convert("llama", "llama", tmp_path / "one.gguf", lambda writer: writer.add_float32("llama.rope.scale_linear", 1.0))
    assert GgufModel(tmp_path / "one.gguf").config.rope == plain


def _linear(writer: gguf.GGUFWriter, key: str | None) -> None:
    if key is not None:
        writer.add_float32(key, 4.0)
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def write_file(path: Path, fill: Callable[[gguf.GGUFWriter], object], tokens: tuple[str, ...] = ()) -> None:
    """Write the golden Qwen2 to a GGUF file whose vocabulary has these tokens from id 3 on."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        words = [*VOCAB[:3], *tokens, *VOCAB[3 + len(tokens) :]]
        writer.add_token_list(words)
        writer.add_token_types([3 if word in tokens else 1 for word in words])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(2)
        fill(writer)

    convert("qwen2", "qwen2", path, add)
