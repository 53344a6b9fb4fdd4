"""Small models that hear audio in conversations compute what transformers computes (`make_listening.py`), with the same bits in every
batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.bind import bind_values
from compiler.driver import compile_module
from compiler.frontend.audio import Listening
from compiler.frontend.cache_groups import groups_of
from compiler.frontend.decoder import BOTH, StepBounds, build_step
from compiler.frontend.errors import ConfigError
from compiler.frontend.layers.audio import tables
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.listening import ENTRY as LISTEN
from compiler.frontend.registry import parse_config
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.types import TensorType
from deploy.model_loading.files import ModelFiles, dtypes_of, open_files
from deploy.model_loading.listening import heard
from runtime.session import Session
from runtime.step_arguments import step_arguments
from server.audio.clips import clips_of
from server.messages import Clip
from server.messages import Listening as Heard
from tests.compiler.frontend.calls import bound_session, interpreted_call
from tests.golden.listening import CONVERSATIONS, LENGTHS, SUBJECTS, Subject

BOUNDS = StepBounds(max_tokens=256, max_seqs=64, max_context=512)
F32 = WeightFormat(32)
NUM_PAGES = 1 + BOUNDS.max_context // 16
Call = Callable[..., Any]


@dataclass(frozen=True)
class Hearer:
    """A program of a small model, and how it is called."""

    subject: Subject
    files: ModelFiles
    call: Call

    @property
    def listening(self) -> Listening:
        assert self.files.config.listening is not None
        return self.files.config.listening

    def clips(self, numbers: Sequence[int]) -> list[Clip]:
        """Return the clips of recordings of the golden, as the server cuts them."""
        own = self.listening
        given = Heard(own.audio_token, own.num_mels, own.num_hops, own.merge, own.ends, own.most_windows)
        sounds = (self.subject.sound(number).astype(np.float32) / 32_768 for number in numbers)
        return [clip for sound in sounds for clip in clips_of(sound, given)]

    def rows(self, clips: Sequence[Clip]) -> NDArray[np.float32]:
        """Return the rows of clips, [rows, size]."""
        none = np.empty((0, self.files.config.hidden_size), np.float32)
        return np.concatenate([none, *(heard(self.listening, clip, self.call) for clip in clips)])

    def stepped(self, ids: Sequence[int], rows: NDArray[np.float32], *, chunk: int) -> NDArray[np.float32]:
        """Return the logits of all tokens of a sequence that is computed in chunks. `rows` are read in the places of audio tokens."""
        groups = groups_of(self.files.config, DType.F32, BOUNDS.max_context)
        caches = [np.full(shape, np.nan, np.float32) for group in groups for shape, _ in group.arrays(NUM_PAGES)]
        table = np.arange(1, NUM_PAGES, dtype=np.int32)[None]
        found: list[NDArray[np.float32]] = []
        places = np.flatnonzero(np.array(ids) == self.subject.audio)[: len(rows)]
        for start in range(0, len(ids), chunk):
            stop = min(start + chunk, len(ids))
            tokens = np.array(ids[start:stop], np.int32)
            positions = np.arange(start, stop, dtype=np.int32)
            slots = table[0, positions // 16] * 16 + positions % 16
            ends = np.array([0, len(tokens)], np.int32)
            step = step_arguments(groups, tokens, positions, ends, np.zeros_like(positions), [slots] * len(groups), [table] * len(groups))
            mine = (places >= start) & (places < stop)
            every = np.arange(len(tokens), dtype=np.int32)
            for part in np.split(every, range(BOUNDS.max_seqs, len(every), BOUNDS.max_seqs)):
                at, none = (places[mine] - start).astype(np.int32), np.empty(0, np.int32)
                found.append(self.call(BOTH, *step, part, none, at, rows[mine], *caches)[0])
        return np.concatenate(found)


def built(files: ModelFiles) -> Any:
    return build_step(files.config, dtypes_of(files.weights), BOUNDS, DType.F32, F32, entry=BOTH)


@cache
def interpreted(name: str) -> Hearer:
    files = open_files(SUBJECTS[name].folder)
    return Hearer(SUBJECTS[name], files, interpreted_call(built(files), files.weights))


@cache
def compiled(name: str) -> Hearer:
    files = open_files(SUBJECTS[name].folder)
    return Hearer(SUBJECTS[name], files, bound_session(built(files), files.weights, (BOTH, LISTEN)).call)


@pytest.fixture(params=SUBJECTS)
def hearer(request: pytest.FixtureRequest) -> Hearer:
    return compiled(request.param)


@pytest.fixture(params=[interpreted, compiled])
def either(request: pytest.FixtureRequest, hearer: Hearer) -> Hearer:
    return request.param(hearer.subject.name)


@pytest.mark.parametrize("number", range(len(LENGTHS)))
def test_rows_of_recordings_are_those_of_transformers(either: Hearer, number: int) -> None:
    """The encoder gives as many rows as in transformers, and nearly the same ones. Silence after a recording, the end of a window, and the
    loudest sound have an effect on them."""
    wanted = either.subject.arrays[f"rows_{number}"]
    found = either.rows(either.clips([number]))
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < 2e-4


def conversation(hearer: Hearer, number: int) -> tuple[list[int], list[Clip]]:
    """Return the tokens of a conversation with its continuation, and its clips."""
    arrays = hearer.subject.arrays
    ids = [*arrays[f"prompt_{number}"].tolist(), *arrays[f"continuation_{number}"].tolist()]
    return ids, hearer.clips(CONVERSATIONS[number][1])


@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_compiled_code_answers_what_transformers_answers(hearer: Hearer, number: int) -> None:
    (ids, clips), arrays = conversation(hearer, number), hearer.subject.arrays
    num_prompt = len(arrays[f"prompt_{number}"])
    logits = hearer.stepped(ids[:-1], hearer.rows(clips), chunk=256)[num_prompt - 1 :]
    assert np.abs(logits - arrays[f"logits_{number}"]).max() < 5e-4
    assert logits.argmax(axis=1).tolist() == arrays[f"continuation_{number}"].tolist()


@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_audio_in_chunks_has_the_same_bits(hearer: Hearer, chunk: int) -> None:
    ids, clips = conversation(hearer, 1)
    rows = hearer.rows(clips)
    np.testing.assert_array_equal(hearer.stepped(ids, rows, chunk=chunk), hearer.stepped(ids, rows, chunk=256))


def test_a_clip_has_the_same_rows_after_others(hearer: Hearer) -> None:
    clips = hearer.clips(range(len(LENGTHS)))
    together, alone = hearer.rows(clips), [hearer.rows([clip]) for clip in reversed(clips)]
    np.testing.assert_array_equal(np.concatenate(alone[::-1]), together)


REAL = {
    "qwen2_audio": {"d_model": 128, "encoder_attention_heads": 2, "encoder_ffn_dim": 512, "max_source_positions": 1500},
    "voxtral": {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512, "max_source_positions": 1500},
}


@pytest.mark.parametrize("name", REAL)
def test_windows_of_the_size_of_real_models(name: str) -> None:
    """With windows of 30 s and heads of 64 elements, as in real models, the compiled encoder computes what the interpreter computes."""
    given, weights_of = SUBJECTS[name].config, dtypes_of(open_files(SUBJECTS[name].folder).weights)
    config = parse_config({**given, "audio_config": {**given["audio_config"], **REAL[name]}})
    listening = config.listening
    assert listening is not None
    module = build_step(config, weights_of, BOUNDS, DType.F32, F32, entry=BOTH)
    random = np.random.default_rng(0)
    weights: dict[str, NDArray[np.float32]] = {}
    for weight in module.graph(LISTEN).weights:
        assert isinstance(weight.type, TensorType) and weight.type.shape is not None
        mean = 1.0 if "norm" in weight.name and weight.name.endswith("weight") else 0.0
        drawn = random.normal(mean, 0.05, [dim.const for dim in weight.type.shape]).astype(np.float32)
        weights[weight.name] = tables(listening.num_mels).get(weight.name, drawn)
    executable = compile_module(module)
    session = Session(executable, device_threads=2)
    bind_values(session, executable, LISTEN, weights)
    interpreter = Interpreter(module)
    heard_as = Heard(1, listening.num_mels, listening.num_hops, listening.merge, listening.ends, listening.most_windows)
    sound = random.normal(0, 0.1, 16_000 * 30).astype(np.float32)
    for samples in (sound, sound[:20_011]):
        (clip,) = clips_of(samples, heard_as)
        found = heard(listening, clip, session.call)
        wanted = heard(listening, clip, lambda entry, *args: interpreter.call(entry, *args, *weights.values()))
        assert len(found) == clip.num_tokens
        assert np.abs(found - wanted).max() < 2e-4


def test_a_model_without_ears_has_no_inputs_for_audio() -> None:
    files = open_files(SUBJECTS["voxtral"].folder)
    deaf = replace(files.config, listening=None)
    module = build_step(deaf, dtypes_of(files.weights), BOUNDS, DType.F32, F32, entry=BOTH)
    assert LISTEN not in module.graph_functions
    assert not any(param.name.startswith("seen") for param in module.graph(BOTH).params)


@pytest.mark.parametrize(
    ("name", "outer", "inner", "text"),
    [
        ("qwen2_audio", {}, {"encoder_attention_heads": 5}, "encoder_attention_heads .* a divisor of d_model"),
        ("qwen2_audio", {}, {"scale_embedding": True}, "scale_embedding .* expected false"),
        ("qwen2_audio", {}, {"activation_function": "relu"}, "activation_function .* expected gelu"),
        ("qwen2_audio", {}, {"max_source_positions": 99}, "max_source_positions .* a multiple of 2"),
        ("qwen2_audio", {"audio_token_index": 10_000}, {}, "audio_token_index .* below"),
        ("qwen2_audio", {}, {"num_experts": 4}, "audio_config.num_experts"),
        ("qwen2_audio", {"text_config": {**SUBJECTS["qwen2_audio"].config["text_config"], "use_mrope": True}}, {}, "text_config.use_mrope"),
        ("voxtral", {}, {"intermediate_size": 100}, "intermediate_size .* a multiple of hidden_size"),
        ("voxtral", {"audio_token_id": None}, {}, "has no audio_token_id"),
        ("voxtral", {"projector_hidden_act": "sine"}, {}, "projector_hidden_act"),
    ],
)
def test_configurations_that_are_not_understood(name: str, outer: dict[str, Any], inner: dict[str, Any], text: str) -> None:
    given = SUBJECTS[name].config
    with pytest.raises(ConfigError, match=text):
        parse_config({**given, **outer, "audio_config": {**given["audio_config"], **inner}})
