"""The benchmark of speech: its passages, the file it writes for whisper.cpp, and how it counts errors and processor time."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.frontend.ct2 import Ct2Whisper
from runtime.spectrogram import RATE
from tests.lab.peers.ggml_whisper import MAGIC, ggml_name, write_ggml
from tests.lab.serving.speech import MOST_FURTHER_ERRORS, accuracies, processor_s
from tests.lab.serving.spoken import MOST_S, in_noise, passages
from tests.real.speech.errors import errors, words_of

GOLDEN = Path(__file__).parents[2] / "golden" / "whisper"


def test_two_thousand_words_show_the_goal() -> None:
    num_words = sum(len(words_of(passage.text)) for passage in passages())
    assert num_words >= 2000 and num_words * MOST_FURTHER_ERRORS >= 4
    assert len({passage.seed for passage in passages()}) == len(passages())
    assert not any(letter.isdigit() for passage in passages() for letter in passage.text), "engines write numbers in several ways"


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng: apt install espeak-ng")
def test_passages_are_spoken_alike_and_fit_a_window() -> None:
    noisy = next(passage for passage in passages() if passage.noise_db is not None)
    samples = noisy.samples()
    assert np.array_equal(samples, noisy.samples()) and 10 * RATE < len(samples) < MOST_S * RATE


def test_noise_lies_below_the_speech_by_so_much() -> None:
    speech = (0.1 * np.sin(np.arange(4 * RATE))).astype(np.float32)
    noise = in_noise(speech, 12.0, 1) - speech
    assert 10 * np.log10(np.mean(speech**2) / np.mean(noise**2)) == pytest.approx(12.0, abs=0.01)


@pytest.mark.parametrize(("found", "count"), [("A b, c!", 0), ("a c", 1), ("a b b c", 1), ("x b c", 1), ("", 3)])
def test_errors_are_words_replaced_left_out_or_inserted(found: str, count: int) -> None:
    assert errors(found, "a b c") == count


def test_a_form_is_judged_by_its_further_errors() -> None:
    texts = ["one two three four five"] * 2
    told = {"auto": ["one two three four six", "one two"], "f32": ["one two three four five", "one two"], "peer": texts}
    figures = {figure.name: figure for figure in accuracies(told, "auto", texts)}
    assert [figures[f"{name}: wrong words"].value for name in told] == [4, 3, 0]
    further = figures["auto: further wrong words, of all words"]
    assert further.value == 0.1 and not further.reached


def test_processor_time_counts_children_that_have_ended() -> None:
    before = processor_s(os.getpid())
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    assert processor_s(os.getpid()) - before >= 0.4


def test_the_file_for_whisper_cpp_has_all_tensors(tmp_path: Path) -> None:
    write_ggml(tmp_path / "model.bin", GOLDEN)
    data, source = (tmp_path / "model.bin").read_bytes(), Ct2Whisper(GOLDEN / "model.bin")
    magic, vocab_size, frames, size, *_ = struct.unpack_from("<12i", data)
    assert (magic, vocab_size, frames, size) == (MAGIC, 60, 24, 32)
    rows, columns = struct.unpack_from("<2i", data, 48)
    at = 56 + 4 * rows * columns
    (num_texts,) = struct.unpack_from("<i", data, at)
    at += 4
    for _ in range(num_texts):
        at += 4 + struct.unpack_from("<i", data, at)[0]
    found: dict[str, Any] = {}
    while at < len(data):
        rank, length, kind = struct.unpack_from("<3i", data, at)
        shape = struct.unpack_from(f"<{rank}i", data, at + 12)[::-1]
        at += 12 + 4 * rank + length
        found[data[at - length : at].decode()] = values = np.frombuffer(data, ("<f4", "<f2")[kind], int(np.prod(shape)), at).reshape(shape)
        at += values.nbytes
    for name in source.tensors:
        stored, values = found.pop(ggml_name(name.removeprefix("model."))), np.asarray(source.read(name), np.float32)
        assert np.allclose(stored.reshape(values.shape), values, atol=2e-3), name
    assert not found and num_texts == 50


def test_names_are_those_of_the_authors() -> None:
    assert ggml_name("decoder.layers.3.encoder_attn.q_proj.weight") == "decoder.blocks.3.cross_attn.query.weight"
    assert ggml_name("encoder.layers.0.self_attn_layer_norm.bias") == "encoder.blocks.0.attn_ln.bias"
    assert ggml_name("encoder.layer_norm.bias") == "encoder.ln_post.bias"
    assert ggml_name("encoder.conv1.weight") == "encoder.conv1.weight"
