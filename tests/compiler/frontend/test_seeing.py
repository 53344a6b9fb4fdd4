"""A small vision model computes what transformers computes (`make_idefics3.py`), with the same bits in every batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.bind import bind_values, bind_weights
from compiler.driver import compile_module
from compiler.frontend.cache_groups import groups_of
from compiler.frontend.config import Vision
from compiler.frontend.cutting import read_cutting
from compiler.frontend.decoder import BOTH, StepBounds, build_step
from compiler.frontend.errors import ConfigError
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.registry import parse_config
from compiler.frontend.seeing import ENTRY as SEE
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.types import TensorType
from deploy.model_loading.files import ModelFiles, dtypes_of, open_files
from runtime.session import Session
from runtime.step_arguments import step_arguments
from tests.golden.make_idefics3 import CONFIG, CONVERSATIONS, IMAGE, PROCESSOR, SIZES

GOLDEN = Path(__file__).parents[2] / "golden" / "idefics3"
ARRAYS = dict(np.load(GOLDEN / "golden.npz"))
BOUNDS = StepBounds(max_tokens=256, max_seqs=64, max_context=256)
F32 = WeightFormat(32)
NUM_PAGES = 1 + BOUNDS.max_context // 16
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return open_files(GOLDEN)


def built(files: ModelFiles) -> Any:
    return build_step(files.config, dtypes_of(files.weights), BOUNDS, DType.F32, F32, entry=BOTH)


@pytest.fixture(scope="module")
def interpreted(files: ModelFiles) -> Call:
    module = built(files)
    interpreter = Interpreter(module)
    return lambda entry, *args: interpreter.call(entry, *args, *(files.weights.read(p.name) for p in module.graph(entry).weights))


@pytest.fixture(scope="module")
def compiled(files: ModelFiles) -> Call:
    executable = compile_module(built(files))
    session = Session(executable, device_threads=2)
    for entry in (BOTH, SEE):
        bind_weights(session, executable, entry, files.weights)
    return session.call


@pytest.fixture(scope="module", params=["interpreted", "compiled"])
def call(request: pytest.FixtureRequest) -> Call:
    return request.getfixturevalue(request.param)


def seen(call: Call, vision: Vision, crops: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the rows of crops, [rows, size], three crops a call."""
    rows: list[NDArray[np.float32]] = []
    for first in range(0, len(crops), 3):
        some = crops[first : first + 3].reshape(-1, vision.crop_size, vision.crop_size * 3)
        starts = np.arange(len(some) + 1, dtype=np.int32) * vision.num_patches
        rows.append(call(SEE, some, np.repeat(np.arange(len(some), dtype=np.int32), vision.num_patches), starts.astype(np.int32)))
    return np.concatenate(rows)


def stepped(call: Call, files: ModelFiles, ids: Sequence[int], rows: NDArray[np.float32], *, chunk: int) -> NDArray[np.float32]:
    """Return the logits of all tokens of a sequence that is computed in chunks. `rows` are read in the places of image tokens."""
    groups = groups_of(files.config, DType.F32, BOUNDS.max_context)
    caches = [np.full(shape, np.nan, np.float32) for group in groups for shape, _ in group.arrays(NUM_PAGES)]
    table = np.arange(1, NUM_PAGES, dtype=np.int32)[None]
    found: list[NDArray[np.float32]] = []
    places = np.flatnonzero(np.array(ids) == IMAGE)[: len(rows)]
    for start in range(0, len(ids), chunk):
        tokens = np.array(ids[start : start + chunk], np.int32)
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        slots = table[0, positions // 16] * 16 + positions % 16
        ends = np.array([0, len(tokens)], np.int32)
        step = step_arguments(groups, tokens, positions, ends, np.zeros_like(positions), [slots], [table])
        mine = (places >= start) & (places < start + chunk)
        every = np.arange(len(tokens), dtype=np.int32)
        for part in np.split(every, range(BOUNDS.max_seqs, len(every), BOUNDS.max_seqs)):
            at, none = (places[mine] - start).astype(np.int32), np.empty(0, np.int32)
            found.append(call(BOTH, *step, part, none, at, rows[mine], *caches)[0])
    return np.concatenate(found)


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_rows_of_crops_are_those_of_transformers(call: Call, files: ModelFiles, number: int) -> None:
    assert files.config.vision is not None
    rows = seen(call, files.config.vision, ARRAYS[f"crops_{number}"])
    assert np.abs(rows - ARRAYS[f"rows_{number}"]).max() < 2e-4


def conversation(number: int) -> tuple[list[int], NDArray[np.uint8]]:
    """Return the tokens of a conversation with its continuation, and its crops."""
    crops = [ARRAYS[f"crops_{image}"] for image in CONVERSATIONS[number][1]]
    ids = [*ARRAYS[f"prompt_{number}"].tolist(), *ARRAYS[f"continuation_{number}"].tolist()]
    return ids, np.concatenate([np.empty((0, 48, 48, 3), np.uint8), *crops])


def rows_of(call: Call, files: ModelFiles, crops: NDArray[np.uint8]) -> NDArray[np.float32]:
    assert files.config.vision is not None
    return seen(call, files.config.vision, crops) if len(crops) else np.empty((0, files.config.hidden_size), np.float32)


@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_compiled_code_answers_what_transformers_answers(compiled: Call, files: ModelFiles, number: int) -> None:
    ids, crops = conversation(number)
    num_prompt = len(ARRAYS[f"prompt_{number}"])
    logits = stepped(compiled, files, ids[:-1], rows_of(compiled, files, crops), chunk=256)[num_prompt - 1 :]
    assert np.abs(logits - ARRAYS[f"logits_{number}"]).max() < 5e-4
    assert logits.argmax(axis=1).tolist() == ARRAYS[f"continuation_{number}"].tolist()


def test_a_crop_has_the_same_rows_beside_others(compiled: Call, files: ModelFiles) -> None:
    assert files.config.vision is not None
    crops = np.concatenate([ARRAYS[f"crops_{number}"] for number in range(len(SIZES))])
    together = seen(compiled, files.config.vision, crops)
    for number, rows in enumerate(np.split(together, len(crops))):
        np.testing.assert_array_equal(seen(compiled, files.config.vision, crops[number : number + 1]), rows)


@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_an_image_in_chunks_has_the_same_bits(compiled: Call, files: ModelFiles, chunk: int) -> None:
    ids, crops = conversation(1)
    rows = rows_of(compiled, files, crops)
    np.testing.assert_array_equal(stepped(compiled, files, ids, rows, chunk=chunk), stepped(compiled, files, ids, rows, chunk=256))


def test_the_file_of_the_processor_is_read(tmp_path: Path) -> None:
    def written(name: str, value: object) -> Path:
        (tmp_path / name).write_text(json.dumps(value))
        return tmp_path

    with pytest.raises(ConfigError, match="has no preprocessor_config"):
        read_cutting(tmp_path, 48)
    later = read_cutting(written("processor_config.json", {"image_processor": PROCESSOR}), 48)
    found = read_cutting(written("preprocessor_config.json", PROCESSOR), 48)
    assert later == found
    assert (found.longest_edge, found.splits, found.mean) == (144, True, (0.5, 0.4, 0.6))
    assert not read_cutting(written("preprocessor_config.json", {**PROCESSOR, "do_image_splitting": False}), 48).splits
    for name, value in (
        ("resample", 3),
        ("do_normalize", False),
        ("max_image_size", {"longest_edge": 32}),
        ("size", {"longest_edge": 1 << 20}),
        ("image_mean", [0.5]),
    ):
        with pytest.raises(ConfigError, match=name.removeprefix("max_image_").removesuffix("_size") if name == "size" else "expected"):
            read_cutting(written("preprocessor_config.json", {**PROCESSOR, name: value}), 48)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("vision_config", "image_size", 50),
        ("vision_config", "num_attention_heads", 5),
        ("vision_config", "num_channels", 1),
        ("text_config", "model_type", "mistral"),
        ("text_config", "qk_layer_norms", True),
    ],
)
def test_configurations_of_other_encoders_are_refused(part: str, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        parse_config({**CONFIG, part: {**CONFIG[part], name: value}})


def test_an_image_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"image_token_id of config\.json is 102, expected a token of the vocabulary, below 102"):
        parse_config({**CONFIG, "image_token_id": 102})


def test_crops_of_the_size_of_real_models(files: ModelFiles) -> None:
    """27 x 27 patches and heads of 72 elements, as in SmolVLM-2.2B, fill no tile of attention or of products."""
    vision = {"hidden_size": 144, "num_attention_heads": 2, "intermediate_size": 304, "image_size": 378, "patch_size": 14}
    config = parse_config({**CONFIG, "scale_factor": 3, "vision_config": {**CONFIG["vision_config"], **vision, "num_hidden_layers": 1}})
    module = build_step(config, dtypes_of(files.weights), BOUNDS, DType.F32, F32, entry=BOTH)
    random = np.random.default_rng(0)
    weights = {
        weight.name: random.normal(1.0 if "norm" in weight.name else 0.0, 0.05, [dim.const for dim in weight.type.shape]).astype(np.float32)
        for weight in module.graph(SEE).weights
        if isinstance(weight.type, TensorType) and weight.type.shape is not None
    }
    executable = compile_module(module)
    session = Session(executable, device_threads=2)
    bind_values(session, executable, SEE, weights)
    interpreter = Interpreter(module)
    assert config.vision is not None
    crops = random.integers(0, 256, (2, 378, 378 * 3), dtype=np.uint8)
    rows = seen(session.call, config.vision, crops)
    assert np.abs(rows - seen(lambda entry, *args: interpreter.call(entry, *args, *weights.values()), config.vision, crops)).max() < 2e-4
    np.testing.assert_array_equal(seen(session.call, config.vision, crops[1:]), rows[len(rows) // 2 :])


def test_a_model_without_vision_has_no_inputs_for_images(files: ModelFiles) -> None:
    blind = replace(files.config, vision=None)
    module = build_step(blind, dtypes_of(files.weights), BOUNDS, DType.F32, F32, entry=BOTH)
    assert SEE not in module.graph_functions
    assert not any(param.name.startswith("seen") for param in module.graph(BOTH).params)
