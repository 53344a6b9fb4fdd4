"""Small models that read images and audio compute what transformers computes (`make_omni.py`), with the same bits in every chunk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from compiler.bind import bind_values
from compiler.driver import compile_module
from compiler.frontend.accounting import require_weights
from compiler.frontend.cache_groups import groups_of
from compiler.frontend.config import ModelConfig
from compiler.frontend.decoder import BOTH, UNUSED, StepBounds, build_step
from compiler.frontend.errors import ConfigError
from compiler.frontend.layers.audio import tables
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.listening import ENTRY as LISTEN
from compiler.frontend.registry import parse_config
from compiler.frontend.seeing import ENTRY as SEE
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.types import TensorType
from deploy.model_loading.description import listening_of
from deploy.model_loading.files import ModelFiles, dtypes_of, open_files
from deploy.model_loading.listening import heard, listening_limits
from deploy.model_loading.patches import encoded
from deploy.model_loading.seeing import seeing_limits
from runtime.session import Session
from runtime.step_arguments import step_arguments
from server.audio.clips import clips_of
from server.engine.axes import axes_of
from server.engine.intake import placed_excerpts
from server.messages import Clip, Crop, Excerpt, SamplingParams, Submit
from server.messages import Listening as Heard
from tests.compiler.frontend.calls import Call, bound_session, interpreted_call
from tests.golden.media import SIZES
from tests.golden.omni import AUDIO, CONVERSATIONS, IMAGE, NUM_SOUNDS, SUBJECTS, Subject

BOUNDS = StepBounds(max_tokens=512, max_seqs=64, max_context=512)
F32 = WeightFormat(32)
NUM_PAGES = 1 + BOUNDS.max_context // 16
OMNI = SUBJECTS["qwen2_5_omni"]
THINKER = OMNI.config["thinker_config"]


@dataclass(frozen=True)
class Reader:
    """A program of a small model, and how it is called."""

    subject: Subject
    files: ModelFiles
    call: Call

    @property
    def config(self) -> ModelConfig:
        return self.files.config

    def crop(self, number: int) -> Crop:
        pixels = self.subject.arrays[f"crops_{number}"]
        rows, columns, _ = (edge // self.subject.square for edge in pixels.shape)
        return Crop.of(pixels.tobytes(), rows, columns)

    def clips(self, number: int) -> tuple[Clip, ...]:
        """Return the clips of a recording of the golden, as the server cuts them."""
        return clips_of(self.subject.sound(number).astype(np.float32) / 32_768, heard_as(self.config))

    def rows(self, excerpts: Sequence[Excerpt]) -> NDArray[np.float32]:
        """Return the rows of crops and clips, [rows, size]."""
        vision, listening = self.config.vision, self.config.listening
        size = self.config.hidden_size * (1 if vision is None else vision.num_depths)
        found = [np.empty((0, size), np.float32)]
        for one in excerpts:
            if isinstance(one, Crop):
                assert vision is not None
                found += encoded(vision, [one], self.call)
            else:
                assert listening is not None
                found.append(heard(listening, one, self.call, size))
        return np.concatenate(found)

    def stepped(self, ids: Sequence[int], excerpts: Sequence[Excerpt], num_prompt: int, *, chunk: int) -> NDArray[np.float32]:
        """Return the logits of all tokens of a sequence that is computed in chunks, and whose prompt has these excerpts."""
        groups = groups_of(self.config, DType.F32, BOUNDS.max_context)
        caches = [np.full(shape, np.nan, np.float32) for group in groups for shape, _ in group.arrays(NUM_PAGES)]
        table = np.arange(1, NUM_PAGES, dtype=np.int32)[None]
        vision, listening = self.config.vision, self.config.listening
        assert listening is not None
        limits = [listening_limits(listening, self.config), *([] if vision is None else [seeing_limits(vision, self.config)])]
        placed = placed_excerpts(Submit("", tuple(ids[:num_prompt]), SamplingParams(1), excerpts=tuple(excerpts)), limits)
        places = np.array([at for one in placed for at in range(one.start, one.stop)], int)
        rows, found = self.rows(excerpts), list[NDArray[np.float32]]()
        for start in range(0, len(ids), chunk):
            stop = min(start + chunk, len(ids))
            tokens, positions = np.array(ids[start:stop], np.int32), np.arange(start, stop, dtype=np.int32)
            slots = table[0, positions // 16] * 16 + positions % 16
            ends = np.array([0, len(tokens)], np.int32)
            step = step_arguments(groups, tokens, positions, ends, np.zeros_like(positions), [slots] * len(groups), [table] * len(groups))
            axes = () if vision is None else (axes_of(placed, start, stop),)
            mine = (places >= start) & (places < stop)
            at, none = (places[mine] - start).astype(np.int32), np.empty(0, np.int32)
            for part in np.split(np.arange(len(tokens), dtype=np.int32), range(BOUNDS.max_seqs, len(tokens), BOUNDS.max_seqs)):
                found.append(self.call(BOTH, *step, part, none, at, rows[mine], *axes, *caches)[0])
        return np.concatenate(found)


def heard_as(config: ModelConfig) -> Heard:
    found = listening_of(config.listening)
    assert found is not None
    return found


def built(files: ModelFiles) -> Any:
    return build_step(files.config, dtypes_of(files.weights), BOUNDS, DType.F32, F32, entry=BOTH)


@cache
def interpreted(name: str) -> Reader:
    files = open_files(SUBJECTS[name].folder)
    return Reader(SUBJECTS[name], files, interpreted_call(built(files), files.weights))


@cache
def compiled(name: str) -> Reader:
    files = open_files(SUBJECTS[name].folder)
    return Reader(SUBJECTS[name], files, bound_session(built(files), files.weights, (BOTH, SEE, LISTEN)).call)


@pytest.fixture(params=SUBJECTS)
def reader(request: pytest.FixtureRequest) -> Reader:
    return compiled(request.param)


@pytest.fixture(params=[interpreted, compiled])
def either(request: pytest.FixtureRequest, reader: Reader) -> Reader:
    make: Callable[[str], Reader] = request.param
    return make(reader.subject.name)


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_rows_of_images_are_those_of_transformers(either: Reader, number: int) -> None:
    wanted = either.subject.arrays[f"seen_{number}"]
    found = either.rows([either.crop(number)])
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < 2e-4


@pytest.mark.parametrize("number", range(NUM_SOUNDS))
def test_rows_of_recordings_are_those_of_transformers(either: Reader, number: int) -> None:
    """The encoder gives as many rows as in transformers, and nearly the same ones. The begin and the end of a window, and of a recording,
    have an effect on them."""
    wanted = either.subject.arrays[f"heard_{number}"]
    found, others = np.split(either.rows(either.clips(number)), [wanted.shape[1]], axis=1)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < 2e-4
    assert not others.any()  # the decoder would add these columns to audio tokens, as it adds those of images


def conversation(reader: Reader, number: int) -> tuple[list[int], list[Excerpt]]:
    """Return the tokens of a conversation with its continuation, and its crops and clips in order."""
    arrays = reader.subject.arrays
    ids = [*arrays[f"prompt_{number}"].tolist(), *arrays[f"continuation_{number}"].tolist()]
    of_kind: dict[str, Callable[[Any], Sequence[Excerpt]]] = {IMAGE: lambda value: (reader.crop(value),), AUDIO: reader.clips}
    return ids, list(chain.from_iterable(of_kind[kind](value) for kind, value in CONVERSATIONS[number] if kind in of_kind))


@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_compiled_code_answers_what_transformers_answers(reader: Reader, number: int) -> None:
    (ids, excerpts), arrays = conversation(reader, number), reader.subject.arrays
    num_prompt = len(arrays[f"prompt_{number}"])
    logits = reader.stepped(ids[:-1], excerpts, num_prompt, chunk=512)[num_prompt - 1 :]
    assert np.abs(logits - arrays[f"logits_{number}"]).max() < 5e-4
    assert logits.argmax(axis=1).tolist() == arrays[f"continuation_{number}"].tolist()


@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_chunks_that_cut_images_and_audio_have_the_same_bits(reader: Reader, chunk: int) -> None:
    ids, excerpts = conversation(reader, 1)
    num_prompt = len(reader.subject.arrays["prompt_1"])
    whole = reader.stepped(ids, excerpts, num_prompt, chunk=512)
    np.testing.assert_array_equal(reader.stepped(ids, excerpts, num_prompt, chunk=chunk), whole)


@pytest.mark.parametrize(
    "names",
    [
        {"thinker.": ""},  # the thinker alone
        {"thinker.model.": "model.language_model.", "thinker.lm_head.": "lm_head.", "thinker.": "model."},  # as transformers 5 names it
    ],
    ids=["alone", "transformers"],
)
def test_other_layouts_of_the_same_model_have_the_same_bits(tmp_path: Path, reader: Reader, names: dict[str, str]) -> None:
    subject = reader.subject
    for file in subject.folder.glob("*.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(subject.config["thinker_config"]))
    tensors = {name: tensor for name, tensor in load_file(subject.folder / "model.safetensors").items() if name.startswith("thinker.")}
    before = {name: next(part for part in names if name.startswith(part)) for name in tensors}
    save_file({names[before[name]] + name.removeprefix(before[name]): of for name, of in tensors.items()}, tmp_path / "model.safetensors")
    files = open_files(tmp_path)
    require_weights(built(files), files.weights, UNUSED)
    assert files.config == replace(reader.config, left_out=()), "a thinker alone has no parts that speak"
    other = Reader(subject, files, bound_session(built(files), files.weights, (BOTH, SEE, LISTEN)).call)
    ids, excerpts = conversation(reader, 0)
    num_prompt = len(subject.arrays["prompt_0"])
    np.testing.assert_array_equal(*(one.stepped(ids, excerpts, num_prompt, chunk=512) for one in (other, reader)))


def test_parts_that_speak_are_left_out(reader: Reader) -> None:
    spoken = {"qwen2_5_omni": ("talker", "token2wav"), "qwen3_omni_moe": ("talker", "code2wav")}[reader.subject.name]
    assert reader.config.left_out == spoken
    assert not any(name.startswith(spoken) for name in reader.files.weights.tensors)
    stored = load_file(reader.subject.folder / "model.safetensors")
    assert all(any(name.startswith(part) for name in stored) for part in spoken)


def test_a_folder_without_the_image_processor_hears_and_reads(tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        shutil.copy(OMNI.folder / file, tmp_path)
    files, arrays = open_files(tmp_path), OMNI.arrays
    assert files.config.vision is None
    blind = Reader(OMNI, files, bound_session(built(files), files.weights, (BOTH, LISTEN)).call)
    ids, excerpts = conversation(blind, 2)
    num_prompt = len(arrays["prompt_2"])
    logits = blind.stepped(ids[:-1], excerpts, num_prompt, chunk=512)[num_prompt - 1 :]
    assert logits.argmax(axis=1).tolist() == arrays["continuation_2"].tolist()


REAL = {"qwen2_5_omni": [50, 50, 21], "qwen3_omni_moe": [63]}  # tokens of the clips of a recording


@pytest.mark.parametrize("name", REAL)
def test_windows_of_the_size_of_real_models(name: str) -> None:
    """The compiled encoder computes what the interpreter computes, with heads of 64 elements. The last window is not full, and has odd
    numbers of hops and of frames."""
    subject = SUBJECTS[name]
    thinker = subject.config["thinker_config"]
    audio = {**thinker["audio_config"], "d_model": 128, "encoder_attention_heads": 2, "encoder_ffn_dim": 512}
    audio |= {"n_window_infer": 800, "downsample_hidden_size": 80} if name == "qwen3_omni_moe" else {}
    config = parse_config({**thinker, "audio_config": audio})
    listening = config.listening
    assert listening is not None
    module = build_step(config, dtypes_of(open_files(subject.folder).weights), BOUNDS, DType.F32, F32, entry=BOTH)
    random, fixed = np.random.default_rng(0), tables(listening.num_mels, listening)
    weights: dict[str, NDArray[np.float32]] = {}
    for weight in module.graph(LISTEN).weights:
        assert isinstance(weight.type, TensorType) and weight.type.shape is not None
        mean = 1.0 if "norm" in weight.name and weight.name.endswith("weight") else 0.0
        drawn = random.normal(mean, 0.05, [dim.const for dim in weight.type.shape]).astype(np.float32)
        weights[weight.name] = fixed.get(weight.name, drawn)
    executable = compile_module(module)
    session = Session(executable, device_threads=2)
    bind_values(session, executable, LISTEN, weights)
    interpreter = Interpreter(module)
    clips = clips_of(random.normal(0, 0.1, 77_600).astype(np.float32), heard_as(config))
    assert [clip.num_tokens for clip in clips] == REAL[name] and clips[-1].num_hops % 2
    for clip in clips:
        found = heard(listening, clip, session.call)
        wanted = heard(listening, clip, lambda entry, *args: interpreter.call(entry, *args, *weights.values()))
        assert np.abs(found - wanted).max() < 2e-4


def test_fields_of_published_files_that_change_nothing_are_understood() -> None:
    vision = {"embed_dim": 48, "in_channels": 3, "in_chans": 3, "init_std": 0.02, "spatial_patch_size": 8}
    audio = {"add_cross_attention": False, "encoder_layerdrop": 0.0, "init_std": 0.02, "is_encoder_decoder": False, "num_hidden_layers": 2}
    outer = {"ignore_index": -100, "init_std": 0.02, "user_token_id": 872, "vision_token_id": 5}
    parts = {"vision_config": {**THINKER["vision_config"], **vision}, "audio_config": {**THINKER["audio_config"], **audio}}
    thinker = {**THINKER, **outer, **parts}
    config = parse_config({**OMNI.config, "enable_talker": True, "thinker_config": thinker})
    assert parse_config(thinker) == parse_config(THINKER) == replace(config, left_out=())


def test_the_number_of_positions_that_qwen3_omni_does_not_read_may_be_any() -> None:
    thinker = SUBJECTS["qwen3_omni_moe"].config["thinker_config"]
    odd = {**thinker, "audio_config": {**thinker["audio_config"], "max_source_positions": 1501}}
    assert parse_config(odd) == parse_config(thinker)


@pytest.mark.parametrize(
    ("part", "changes", "text"),
    [
        ("", {"audio_token_index": 10_000}, "audio_token_index .* below"),
        ("", {"image_token_index": 10_000}, "image_token_index .* below"),
        ("text_config", {"model_type": "qwen2"}, "model_type .* expected 'qwen2_5_omni_text'"),
        ("text_config", {"num_experts": 4}, "text_config.num_experts"),
        ("vision_config", {"out_hidden_size": 32}, "out_hidden_size .* expected 64"),
        ("vision_config", {"window_size": 5}, "window_size .* at least 16"),
        ("audio_config", {"output_dim": 32}, "output_dim .* expected 64"),
        ("audio_config", {"n_window": 99}, "n_window .* a multiple of 2"),
        ("audio_config", {"n_window": 1501}, "n_window .* to 1500"),
        ("audio_config", {"scale_embedding": True}, "scale_embedding .* expected false"),
        ("audio_config", {"d_model": 45, "encoder_attention_heads": 3}, "d_model .* an even number"),
    ],
)
def test_configurations_that_are_not_understood(part: str, changes: dict[str, Any], text: str) -> None:
    thinker = {**THINKER, **({part: {**THINKER[part], **changes}} if part else changes)}
    for config in (thinker, {**OMNI.config, "thinker_config": thinker}):
        with pytest.raises(ConfigError, match=text):
            parse_config(config)


@pytest.mark.parametrize(
    ("part", "changes", "text"),
    [
        ("", {"audio_token_id": 10_000}, "audio_token_id .* below"),
        ("text_config", {"model_type": "qwen3_moe"}, "model_type .* expected 'qwen3_omni_moe_text'"),
        ("vision_config", {"out_hidden_size": 32}, "out_hidden_size .* expected 64"),
        ("audio_config", {"n_window": 40}, "n_window .* expected 50"),
        ("audio_config", {"n_window_infer": 250}, "n_window_infer .* a multiple of 100"),
        ("audio_config", {"output_dim": 32}, "output_dim .* expected 64"),
    ],
)
def test_configurations_of_qwen3_omni_that_are_not_understood(part: str, changes: dict[str, Any], text: str) -> None:
    thinker = SUBJECTS["qwen3_omni_moe"].config["thinker_config"]
    thinker = {**thinker, **({part: {**thinker[part], **changes}} if part else changes)}
    with pytest.raises(ConfigError, match=text):
        parse_config(thinker)
