"""A small Whisper computes what CTranslate2 and faster-whisper compute (`make_whisper.py`), with the same bits in every batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from compiler.bind import bind_weights
from compiler.driver import compile_module
from compiler.frontend.alignment import read_heads
from compiler.frontend.cache_groups import groups_of
from compiler.frontend.ct2 import Ct2Whisper
from compiler.frontend.decoder import BOTH, StepBounds, build_step
from compiler.frontend.errors import ConfigError, DamagedFile, ModelError
from compiler.frontend.hearing import ENTRY as HEAR
from compiler.frontend.layers.audio import FILTERS, tables
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.registry import parse_config, weights_of
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.graph.function import Body, Function
from deploy.model_loading.files import ModelFiles, dtypes_of, open_files
from runtime.cache_groups import HeardGroup
from runtime.executable import DTYPES
from runtime.session import Session
from runtime.spectrogram import AROUND, BEFORE
from runtime.step_arguments import step_arguments
from server.audio.loudest import loudest_energy
from server.speech.words import _starts
from tests.golden.make_whisper import ALIASES, variables, written

GOLDEN = Path(__file__).parents[2] / "golden" / "whisper"
BOUNDS = StepBounds(max_tokens=64, max_seqs=64, max_context=32)
NUM_PAGES = 9
F32, COARSE = WeightFormat(32), WeightFormat.parse("int8-fast")
ARRAYS = dict(np.load(GOLDEN / "golden.npz"))
END = 50
PROMPT, CONTINUATION = (ARRAYS[name].tolist() for name in ("prompt", "continuation"))
Call = Callable[..., Any]


@dataclass
class Listener:
    """A model whose caches contain NaN until something is written. Each sequence has pages of its own."""

    files: ModelFiles
    call: Call
    format: WeightFormat = F32
    caches: list[NDArray[Any]] = field(init=False)
    heard: list[NDArray[Any]] = field(init=False)  # the caches of audio
    lengths: dict[int, int] = field(default_factory=dict[int, int])
    attention: dict[int, NDArray[np.float32]] = field(default_factory=dict[int, NDArray[np.float32]])  # [tokens, heads * frames], last step

    def __post_init__(self) -> None:
        coarse = self.format.coarse_rows
        self.groups = groups_of(self.files.config, pages_of(self.format), BOUNDS.max_context, coarse=coarse)
        arrays = [array for group in self.groups for array in group.arrays(3 * NUM_PAGES)]
        self.caches = [np.full(shape, 99 if dtype == "i8" else np.nan, DTYPES[dtype]) for shape, dtype in arrays]
        self.heard = self.caches[-2:] if coarse else self.caches[-1:]

    def hear(self, name: int, samples: NDArray[np.float32], *, loudest: float | None = None, num_hops: int = 48) -> NDArray[np.float32]:
        """Encode samples and return the result. As in the golden, silence follows the samples within the window, and the window's
        reflection lies before and after it. The recording ends after `num_hops` hops of the window."""
        group = self.groups[-1]
        assert isinstance(group, HeardGroup)
        slots = np.arange(group.num_frames, dtype=np.int32) + (1 + name) * group.num_parts * 16
        window = np.pad(samples, (0, 320 * group.num_frames - len(samples)))
        around = np.pad(window, (BEFORE, AROUND - BEFORE), "reflect")
        energy = np.float32(loudest_energy(around, 80) if loudest is None else loudest)
        sounding = np.arange(2 * group.num_frames) < num_hops
        return self.call(HEAR, around, energy.reshape(1, 1), sounding.astype(np.float32)[:, None], slots, *self.heard)

    def feed(self, pieces: dict[int, Sequence[int]]) -> dict[int, NDArray[np.float32]]:
        """Append tokens to sequences in one step, and return their logits."""
        names, counts = list(pieces), [len(piece) for piece in pieces.values()]
        starts = [self.lengths.get(name, 0) for name in names]
        self.lengths |= {name: start + count for name, start, count in zip(names, starts, counts, strict=True)}
        tokens = np.concatenate([*pieces.values()]).astype(np.int32)
        positions = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]).astype(np.int32)
        seq_ids = np.repeat(np.arange(len(names), dtype=np.int32), counts)
        own = np.array([[1 + 2 * name, 2 + 2 * name] for name in names], np.int32)
        places = [own, np.array([[1 + name] for name in names], np.int32)]
        slots = [own[seq_ids, positions // 16] * 16 + positions % 16, np.zeros_like(positions)]
        query_starts = np.cumsum([0, *counts]).astype(np.int32)
        step = step_arguments(self.groups, tokens, positions, query_starts, seq_ids, slots, places)
        every = np.arange(len(tokens), dtype=np.int32)
        logits, attention = self.call(BOTH, *step, every, every, *self.caches)
        self.attention = dict(zip(names, np.split(attention, query_starts[1:-1]), strict=True))
        return dict(zip(names, np.split(logits, query_starts[1:-1]), strict=True))


def pages_of(format: WeightFormat) -> DType:
    return DType.F32 if format is F32 else DType.BF16


def built(files: ModelFiles, format: WeightFormat = F32) -> Any:
    return build_step(files.config, dtypes_of(files.weights), BOUNDS, pages_of(format), format, entry=BOTH)


def interpreted(files: ModelFiles) -> Listener:
    """Return a model that the interpreter runs. The interpreter changes no argument, so a function that returns the cache is added."""
    module = built(files)
    hear = module.graph(HEAR)
    cache = hear.body.bindings[-1].var  # the last binding appends to the cache
    kept = Function(hear.params, Body(hear.body.blocks, cache), cache.type, hear.pure, hear.num_inputs)
    module = module.update({"kept": kept})

    def call(entry: str, *args: Any) -> Any:
        weights = [files.weights.read(param.name) for param in module.graph(entry).weights]
        if entry == HEAR:
            np.copyto(args[-1], Interpreter(module).call("kept", *args, *weights))
        return Interpreter(module).call(entry, *args, *weights)

    return Listener(files, call)


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return open_files(GOLDEN)


@pytest.fixture(scope="module")
def session(files: ModelFiles) -> Session:
    return session_of(files, F32)


@pytest.fixture(scope="module")
def coarse(files: ModelFiles) -> Session:
    return session_of(files, COARSE)


def session_of(files: ModelFiles, format: WeightFormat) -> Session:
    executable = compile_module(built(files, format))
    session = Session(executable, device_threads=2)
    for entry in (BOTH, HEAR):
        bind_weights(session, executable, entry, files.weights)
    return session


def require_golden(listener: Listener) -> None:
    encoded = listener.hear(0, ARRAYS["samples"])
    assert np.abs(encoded - ARRAYS["encoded"]).max() < 1e-4
    rows = listener.feed({0: [*PROMPT, *CONTINUATION[:-1]]})[0][len(PROMPT) - 1 :]
    assert np.abs(rows - ARRAYS["logits"]).max() < 2e-4
    assert rows.argmax(axis=1).tolist() == CONTINUATION


def require_aligned(listener: Listener) -> None:
    """Require that the tokens of a text begin at the frames that CTranslate2 finds."""
    listener.hear(0, ARRAYS["samples"])
    text = ARRAYS["text"].tolist()
    listener.feed({0: [*PROMPT, *text, END]})
    attention = listener.attention[0].reshape(len(PROMPT) + len(text) + 1, -1, 24)
    np.testing.assert_allclose(attention.sum(axis=2), 1, rtol=1e-5)
    assert _starts(attention, len(text) + 1).tolist() == ARRAYS["first_frames"].tolist()


def test_the_interpreter_aligns_text_as_ctranslate2_does(files: ModelFiles) -> None:
    require_aligned(interpreted(files))


def test_compiled_code_aligns_text_as_ctranslate2_does(files: ModelFiles, session: Session) -> None:
    require_aligned(Listener(files, session.call))


def test_files_name_the_heads_that_follow_the_speech(tmp_path: Path) -> None:
    assert read_heads(GOLDEN, 2, 2) == ((0, 0),)
    assert read_heads(tmp_path, 4, 2) == ((2, 0), (2, 1), (3, 0), (3, 1))
    for heads in ([], [[0]], [[0, 2]], [[4, 2]], [[0, -1]], [[0, True]], [[0, 0], [0, 0]], "all", [3]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"alignment_heads": heads}))
        with pytest.raises(ConfigError, match=r"alignment_heads is .*; expected pairs of a layer and a head below 2"):
            read_heads(tmp_path, 4, 2)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"generation_config.json is \[\], expected an object"):
        read_heads(tmp_path, 4, 2)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").symlink_to(tmp_path / "lost")
    with pytest.raises(ConfigError, match="lost, which does not exist"):
        read_heads(tmp_path, 4, 2)


def test_heads_of_layers_that_were_distilled_away_do_not_count(tmp_path: Path) -> None:
    """kotoba-whisper-bilingual has 2 of the 32 layers of the decoder of Whisper large-v3, and the list of heads of large-v3."""
    heads = [[7, 0], [10, 17], [12, 18], [13, 12], [16, 1], [17, 14], [19, 11], [21, 4], [24, 1], [25, 6]]
    for stated in (heads, [[1, 3], *heads]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"alignment_heads": stated}))
        assert read_heads(tmp_path, 2, 20) == tuple((1, head) for head in range(20))
        assert read_heads(tmp_path, 32, 20) == tuple(sorted(map(tuple, stated)))


def test_the_interpreter_computes_what_ctranslate2_computes(files: ModelFiles) -> None:
    require_golden(interpreted(files))


def test_compiled_code_computes_what_ctranslate2_computes(files: ModelFiles, session: Session) -> None:
    require_golden(Listener(files, session.call))


def test_integers_of_8_bits_hear_and_align_almost_the_same(files: ModelFiles, session: Session, coarse: Session) -> None:
    """In the served form, products, the encoder's attention and the pages of audio are as coarse as 8 bits."""
    listener, exact = Listener(files, coarse.call, COARSE), Listener(files, session.call)
    exact.hear(0, ARRAYS["samples"])
    encoded = listener.hear(0, ARRAYS["samples"])
    assert 1e-3 < np.abs(encoded - ARRAYS["encoded"]).max() < 0.1
    rows, wanted = (one.feed({0: [*PROMPT, *CONTINUATION[:-1]]})[0] for one in (listener, exact))
    assert 1e-3 < np.abs(rows - wanted).max() < 0.2
    np.testing.assert_allclose(listener.attention[0], exact.attention[0], atol=0.01)


@pytest.mark.parametrize("format", [F32, COARSE], ids=["f32", "int8-fast"])
def test_a_sequence_has_the_same_bits_beside_other_audio_and_in_chunks(
    files: ModelFiles, format: WeightFormat, request: pytest.FixtureRequest
) -> None:
    session: Session = request.getfixturevalue("session" if format is F32 else "coarse")
    alone, together = Listener(files, session.call, format), Listener(files, session.call, format)
    tokens = [*PROMPT, *CONTINUATION]
    alone.hear(0, ARRAYS["samples"])
    expected, attention = alone.feed({0: tokens})[0], alone.attention[0]
    others = [np.random.default_rng(seed).standard_normal(5000).astype(np.float32) * 0.1 for seed in range(2)]
    for name, samples in enumerate((ARRAYS["samples"], *others)):
        together.hear(name, samples)
    first = together.feed({1: PROMPT, 0: tokens[:3], 2: PROMPT[:2]})[0]
    seen, rest = [together.attention[0]], []
    for token in tokens[3:]:
        rest.append(together.feed({2: [token], 0: [token], 1: [5]})[0])
        seen.append(together.attention[0])
    np.testing.assert_array_equal(np.concatenate([first, *rest]), expected)
    np.testing.assert_array_equal(np.concatenate(seen), attention)


def test_other_audio_gives_other_logits(files: ModelFiles, session: Session) -> None:
    listener = Listener(files, session.call)
    listener.hear(0, ARRAYS["samples"])
    listener.hear(1, ARRAYS["samples"][::-1].copy())
    rows = listener.feed({0: PROMPT, 1: PROMPT})
    assert np.abs(rows[0] - rows[1]).max() > 0.01


def test_a_quiet_window_is_heard_against_the_loudest_energy_of_the_recording(files: ModelFiles, session: Session) -> None:
    """In a recording with much louder parts, all of a quiet window lies below the floor, so it sounds like silence."""
    listener, quiet = Listener(files, session.call), np.float32(1e-5) * ARRAYS["samples"]
    loud = loudest_energy(np.pad(ARRAYS["samples"], (BEFORE, AROUND - BEFORE)), 80)
    heard, silence = (listener.hear(0, samples, loudest=loud) for samples in (quiet, 0 * quiet))
    alone = listener.hear(0, quiet)
    np.testing.assert_array_equal(heard, silence)
    assert np.abs(heard - alone).max() > 0.01


def test_nothing_is_heard_after_the_end_of_the_recording(files: ModelFiles, session: Session) -> None:
    """Hops after the end are zeros of the spectrogram, whatever the samples are. Silence within the recording is not."""
    listener, samples = Listener(files, session.call), ARRAYS["samples"][:4000]
    noise = np.random.default_rng(0).standard_normal(3000).astype(np.float32)
    cut, noisy = (listener.hear(0, one, loudest=1.0, num_hops=23) for one in (samples, np.append(samples, noise)))
    silent = listener.hear(0, samples, loudest=1.0)
    np.testing.assert_array_equal(cut, noisy)
    assert np.abs(cut - silent).max() > 0.01


def test_files_of_transformers_are_the_same_model(files: ModelFiles, tmp_path: Path) -> None:
    model = Ct2Whisper(GOLDEN / "model.bin")
    save_file({name: np.ascontiguousarray(model.read(name)) for name in model.tensors}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model.fields()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"alignment_heads": [[0, 0]]}))
    other = open_files(tmp_path)
    assert other.config == files.config
    assert other.weights.tensors.keys() == files.weights.tensors.keys()
    require_golden(interpreted(other))


@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.02), ("int16", 2e-4), ("float16", 2e-3)])
def test_variables_of_every_type_are_decoded(tmp_path: Path, dtype: str, most: float) -> None:
    found = variables()
    for name, value in list(found.items()):
        if name.endswith("weight") and value.ndim == 2:
            if dtype == "float16":
                found[name] = value.astype(np.float16)
                continue
            limit = np.iinfo(dtype).max if dtype == "int8" else 1 << 10
            scale = limit / np.abs(value).max(axis=1) if dtype == "int8" else np.float32(limit / np.abs(value).max() * 16)
            each = np.asarray(scale, np.float32)
            found[name] = np.rint(value * (each[:, None] if each.ndim else each)).astype(dtype)
            found[f"{name}_scale"] = each
    (tmp_path / "model.bin").write_bytes(written(found, ALIASES))
    decoded, exact = Ct2Whisper(tmp_path / "model.bin"), Ct2Whisper(GOLDEN / "model.bin")
    for name in ("model.decoder.layers.1.self_attn.v_proj.weight", "model.decoder.layers.0.encoder_attn.v_proj.weight"):
        value, expected = decoded.read(name).astype(np.float32), exact.read(name)
        assert value.shape == expected.shape
        assert 0 < np.abs(value - expected).max() < most


def test_filters_are_those_of_librosa() -> None:
    """The mel filters are those of librosa.filters.mel(sr=16000, n_fft=400, n_mels=80). The test compares the first filter and the sums of
    some others."""
    config = parse_config({"model_type": "whisper", **Ct2Whisper(GOLDEN / "model.bin").fields()})
    assert config.hearing is not None
    filters = tables(config.hearing.num_mels)[FILTERS]
    assert filters.shape == (80, 201)
    np.testing.assert_allclose(filters[0, :3], [0.0, 0.02486259, 0.0], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda data: data[:-5000], DamagedFile, "ends after"),
        (lambda data: b"\x05" + data[1:], DamagedFile, "has version 5, expected 6"),
        (lambda data: data.replace(b"WhisperSpec", b"TransfoSpec"), ConfigError, "only WhisperSpec is supported"),
        (lambda data: data.replace(b"encoder/conv1/bias", b"encoder/conv3/bias"), DamagedFile, "no variable encoder/conv1/bias"),
        (lambda data: data[:4], DamagedFile, "ends after 4 bytes"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, change: Callable[[bytes], bytes], error: type[ModelError], text: str) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(change((GOLDEN / "model.bin").read_bytes()))
    with pytest.raises(error, match=text):
        Ct2Whisper(path)


def test_files_cut_anywhere_are_refused(tmp_path: Path) -> None:
    data, path = (GOLDEN / "model.bin").read_bytes(), tmp_path / "model.bin"
    for end in range(1, len(data), 997):
        path.write_bytes(data[:end])
        with pytest.raises(ModelError):
            Ct2Whisper(path)


def test_configurations_that_compute_something_else_are_refused() -> None:
    fields = Ct2Whisper(GOLDEN / "model.bin").fields()
    for change in ({"scale_embedding": True}, {"activation_function": "relu"}, {"decoder_attention_heads": 5}, {"novel": 1}):
        with pytest.raises(ConfigError, match=next(iter(change))):
            parse_config({**fields, **change})


def test_the_tables_belong_to_the_weights(files: ModelFiles) -> None:
    weights = weights_of(files.config, Ct2Whisper(GOLDEN / "model.bin"))
    assert weights.read(FILTERS).shape == weights.tensors[FILTERS].shape == (80, 201)
