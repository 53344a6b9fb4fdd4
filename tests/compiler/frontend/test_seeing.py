"""Small vision models compute what transformers computes (`make_vision.py`), with the same bits in every batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.bind import bind_values
from compiler.driver import compile_module
from compiler.frontend.cache_groups import groups_of
from compiler.frontend.decoder import BOTH, StepBounds, build_step
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.registry import parse_config
from compiler.frontend.seeing import ENTRY as SEE
from compiler.frontend.seeing import most_crops
from compiler.frontend.vision import Vision
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.types import TensorType
from deploy.model_loading.files import ModelFiles, dtypes_of, open_files
from deploy.model_loading.patches import encoded, together
from deploy.model_loading.seeing import seeing_limits
from runtime.fits import Filled
from runtime.session import Session
from runtime.step_arguments import step_arguments
from server.engine.axes import axes_of
from server.engine.intake import placed_excerpts
from server.messages import Crop, SamplingParams, Submit
from tests.compiler.frontend.calls import Call, bound_session, interpreted_call
from tests.compiler.frontend.test_models import kinds_of_calls
from tests.golden.crops import crops_of
from tests.golden.media import SIZES
from tests.golden.vision import SUBJECTS
from tests.golden.vision_subject import CONVERSATIONS, Subject

BOUNDS = StepBounds(max_tokens=256, max_seqs=64, max_context=512)
F32 = WeightFormat(32)
MOST_SQUARES = 160
NUM_PAGES = 1 + BOUNDS.max_context // 16
IDEFICS3 = SUBJECTS["idefics3"]
CONFIG = IDEFICS3.config
# The interpreter runs every model, and servers compile most families (tests/e2e/test_families_that_see.py). Here `make test` compiles
# models that together contain every kind of call; `make test-slow` compiles all.
COMPILED = {"idefics3", "gemma3", "gemma4", "glm4v_moe", "lfm2_vl", "llama4", "qwen2_vl"}


@dataclass(frozen=True)
class Looker:
    """A program of a small model, and how it is called."""

    subject: Subject
    files: ModelFiles
    call: Call

    @property
    def vision(self) -> Vision:
        assert self.files.config.vision is not None
        return self.files.config.vision

    def seen(self, crops: Sequence[Crop]) -> NDArray[np.float32]:
        """Return the rows of crops, [rows, size]."""
        if not crops:
            return np.empty((0, self.files.config.hidden_size * self.vision.num_depths), np.float32)
        return seen(self.call, self.vision, crops)

    def stepped(self, ids: Sequence[int], crops: Sequence[Crop], rows: NDArray[np.float32], *, chunk: int) -> NDArray[np.float32]:
        """Return the logits of all tokens of a sequence that is computed in chunks. `rows` are those of the crops, which are read in the
        places of image tokens."""
        groups = groups_of(self.files.config, DType.F32, BOUNDS.max_context)
        caches = [np.full(shape, np.nan, np.float32) for group in groups for shape, _ in group.arrays(NUM_PAGES)]
        table = np.arange(1, NUM_PAGES, dtype=np.int32)[None]
        found: list[NDArray[np.float32]] = []
        places = np.flatnonzero(np.array(ids) == self.subject.image)[: len(rows)]
        counts = [crop.num_tokens for crop in crops]
        lasts = np.repeat(places[np.cumsum(counts, dtype=int) - 1], counts)  # position of the last token of each place's image
        limits = seeing_limits(self.vision, self.files.config)
        placed = placed_excerpts(Submit("", tuple(ids[: 1 + max([-1, *places])]), SamplingParams(1), excerpts=tuple(crops)), (limits,))
        start = 0
        while start < len(ids):
            stop = min(start + chunk, len(ids))
            if self.vision.both_ways:  # no chunk ends within an image
                stop = max([stop, *(lasts[(places >= start) & (places < stop)] + 1)])
            tokens = np.array(ids[start:stop], np.int32)
            positions = np.arange(start, stop, dtype=np.int32)
            slots = table[0, positions // 16] * 16 + positions % 16
            ends = np.array([0, len(tokens)], np.int32)
            step = step_arguments(groups, tokens, positions, ends, np.zeros_like(positions), [slots] * len(groups), [table] * len(groups))
            mine = (places >= start) & (places < stop)
            every = np.arange(len(tokens), dtype=np.int32)
            for part in np.split(every, range(BOUNDS.max_seqs, len(every), BOUNDS.max_seqs)):
                at, none = (places[mine] - start).astype(np.int32), np.empty(0, np.int32)
                own = (lasts[mine].astype(np.int32),) if self.vision.both_ways else ()
                own = (*own, axes_of(placed, start, stop)) if self.vision.three_axes else own
                found.append(self.call(BOTH, *step, part, none, at, rows[mine], *own, *caches)[0])
            start = stop
        return np.concatenate(found)


def seen(call: Call, vision: Vision, crops: Sequence[Crop]) -> NDArray[np.float32]:
    return np.concatenate([rows for some in together(vision, crops) for rows in encoded(vision, some, call)])


def built(files: ModelFiles) -> Any:
    return build_step(files.config, dtypes_of(files.weights), BOUNDS, DType.F32, F32, entry=BOTH)


@cache
def interpreted(name: str) -> Looker:
    files = open_files(SUBJECTS[name].folder)
    return Looker(SUBJECTS[name], files, interpreted_call(built(files), files.weights))


@cache
def compiled(name: str) -> Looker:
    files = open_files(SUBJECTS[name].folder)
    return Looker(SUBJECTS[name], files, bound_session(built(files), files.weights, (BOTH, SEE)).call)


@pytest.fixture(params=[pytest.param(name, marks=() if name in COMPILED else pytest.mark.slow) for name in SUBJECTS])
def looker(request: pytest.FixtureRequest) -> Looker:
    return compiled(request.param)


@pytest.fixture(params=SUBJECTS)
def interpreted_looker(request: pytest.FixtureRequest) -> Looker:
    return interpreted(request.param)


@pytest.fixture
def files() -> ModelFiles:
    return open_files(IDEFICS3.folder)


def test_compiled_models_make_every_kind_of_call() -> None:
    kinds = {name: kinds_of_calls(built(open_files(subject.folder))) for name, subject in SUBJECTS.items()}
    every = set[Any]().union(*(kinds[name] for name in COMPILED))
    for name, found in kinds.items():
        assert found <= every, f"{name} makes a call of a kind that no compiled model makes"


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_rows_of_crops_are_those_of_transformers(looker: Looker, number: int) -> None:
    check_rows(looker, number)


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_interpreted_rows_of_crops_are_those_of_transformers(interpreted_looker: Looker, number: int) -> None:
    check_rows(interpreted_looker, number)


def check_rows(looker: Looker, number: int) -> None:
    subject = looker.subject
    assert np.abs(looker.seen(crops_of(subject, [number])) - subject.arrays[f"rows_{number}"]).max() < 2e-4


def conversation(subject: Subject, number: int) -> tuple[list[int], list[Crop]]:
    """Return the tokens of a conversation with its continuation, and its crops."""
    arrays = subject.arrays
    ids = [*arrays[f"prompt_{number}"].tolist(), *arrays[f"continuation_{number}"].tolist()]
    return ids, crops_of(subject, CONVERSATIONS[number][1])


@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_compiled_code_answers_what_transformers_answers(looker: Looker, number: int) -> None:
    (ids, crops), arrays = conversation(looker.subject, number), looker.subject.arrays
    num_prompt = len(arrays[f"prompt_{number}"])
    logits = looker.stepped(ids[:-1], crops, looker.seen(crops), chunk=256)[num_prompt - 1 :]
    assert np.abs(logits - arrays[f"logits_{number}"]).max() < 5e-4
    assert logits.argmax(axis=1).tolist() == arrays[f"continuation_{number}"].tolist()


def test_a_crop_has_the_same_rows_beside_others(looker: Looker) -> None:
    crops = crops_of(looker.subject, range(len(SIZES)))
    together = looker.seen(crops)
    ends = np.cumsum([crop.num_tokens for crop in crops])
    for crop, rows in zip(crops, np.split(together, ends[:-1]), strict=True):
        np.testing.assert_array_equal(looker.seen([crop]), rows)


@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_an_image_in_chunks_has_the_same_bits(looker: Looker, chunk: int) -> None:
    ids, crops = conversation(looker.subject, 1)
    rows = looker.seen(crops)
    np.testing.assert_array_equal(looker.stepped(ids, crops, rows, chunk=chunk), looker.stepped(ids, crops, rows, chunk=256))


@pytest.mark.parametrize("name", ["qwen2_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_text_has_the_same_bits_as_in_a_model_that_reads_only_text(name: str) -> None:
    looker = compiled(name)
    blind = replace(looker.files, config=replace(looker.files.config, vision=None))
    session = bound_session(built(blind), blind.weights, (BOTH,))
    num_caches = sum(len(list(group.arrays(NUM_PAGES))) for group in groups_of(blind.config, DType.F32, BOUNDS.max_context))

    def call(entry: str, *args: Any) -> Any:
        *others, _at, _rows, _axes = args[:-num_caches]
        return session.call(entry, *others, *args[-num_caches:])

    ids, crops = conversation(looker.subject, 2)
    assert not crops
    logits = looker.stepped(ids, [], looker.seen([]), chunk=256)
    np.testing.assert_array_equal(replace(looker, call=call).stepped(ids, [], looker.seen([]), chunk=256), logits)


def test_few_large_crops_are_encoded_at_once() -> None:
    inner = {**SUBJECTS["gemma3"].config["vision_config"], "image_size": 896, "patch_size": 14}
    large = parse_config({**SUBJECTS["gemma3"].config, "vision_config": inner, "mm_tokens_per_image": 4}).vision
    small = parse_config(SUBJECTS["gemma3"].config).vision
    assert large is not None and small is not None
    assert (most_crops(large), most_crops(small)) == (1, 4)


REAL = {
    # 27 x 27 patches and heads of 72 elements, as in SmolVLM-2.2B, fill no tile of attention or of products
    "idefics3": {"hidden_size": 144, "num_attention_heads": 2, "intermediate_size": 304, "image_size": 378, "patch_size": 14},
    "qwen2_vl": {"embed_dim": 160, "num_heads": 2, "patch_size": 14},
    "qwen2_5_vl": {"hidden_size": 160, "num_heads": 2, "intermediate_size": 342, "patch_size": 14, "window_size": 112},
    "qwen3_vl": {"hidden_size": 144, "num_heads": 2, "intermediate_size": 538, "patch_size": 16, "num_position_embeddings": 2304},
    "gemma4": {"hidden_size": 144, "num_attention_heads": 2, "head_dim": 72, "num_key_value_heads": 2, "intermediate_size": 538}
    | {"patch_size": 16, "pooling_kernel_size": 3, "use_clipped_linears": False, "standardize": True},
    "lfm2_vl": {"hidden_size": 144, "num_attention_heads": 2, "intermediate_size": 538, "patch_size": 16, "num_patches": 256},
    "glm4v": {"hidden_size": 256, "num_heads": 2, "intermediate_size": 342, "patch_size": 14, "image_size": 336},
    "llama4": {"hidden_size": 176, "num_attention_heads": 2, "intermediate_size": 704, "image_size": 336, "patch_size": 14},
    "mistral3": {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "intermediate_size": 512, "patch_size": 14},
}
SHAPES = {"idefics3": [(9, 9), (9, 9)], "llama4": [(12, 12), (12, 12)]}  # rows and columns of the tokens of crops
ODD_SHAPES = [(9, 13), (1, 7), (5, 2)]  # of models whose crops have any size


@pytest.mark.parametrize("name", REAL)
def test_crops_of_the_size_of_real_models(name: str) -> None:
    """The compiled encoder computes what the interpreter computes for patches, heads and matrices of the sizes of real models, and for
    windows that are not full."""
    given, weights_of = SUBJECTS[name].config, dtypes_of(open_files(SUBJECTS[name].folder).weights)
    scale = {"scale_factor": 3} if name == "idefics3" else {}
    config = parse_config({**given, **scale, "vision_config": {**given["vision_config"], **REAL[name]}})
    vision = config.vision
    assert vision is not None
    if vision.any_size:
        fit = Filled(MOST_SQUARES * vision.crop_size**2)
        config = replace(config, vision=(vision := replace(vision, cutting=replace(vision.cutting, fit=fit))))
    module = build_step(config, weights_of, BOUNDS, DType.F32, F32, entry=BOTH)
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
    edge = vision.crop_size // (vision.patches_per_edge // vision.merge)  # pixels of an edge of a token
    crops = [
        Crop.of(random.integers(0, 256, rows * edge * columns * edge * 3, dtype=np.uint8).tobytes(), rows, columns)
        for rows, columns in SHAPES.get(name, ODD_SHAPES)
    ]
    found = seen(session.call, vision, crops)
    assert np.abs(found - seen(lambda entry, *args: interpreter.call(entry, *args, *weights.values()), vision, crops)).max() < 2e-4
    np.testing.assert_array_equal(seen(session.call, vision, crops[1:]), found[crops[0].num_tokens :])


def test_a_model_without_vision_has_no_inputs_for_images(files: ModelFiles) -> None:
    blind = replace(files.config, vision=None)
    module = build_step(blind, dtypes_of(files.weights), BOUNDS, DType.F32, F32, entry=BOTH)
    assert SEE not in module.graph_functions
    assert not any(param.name.startswith("seen") for param in module.graph(BOTH).params)
