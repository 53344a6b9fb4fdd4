"""Transcribe files with a peer. `tests/lab/serving/speech.py` starts this module with the interpreter that has the peer's package, so only
NumPy and the peer itself are imported.

    python -m tests.lab.peers.speech ENGINE MODEL THREADS

Each line of the input is {"way": "in turn" | "as a batch", "files": [...]}: WAV files of 16,000 samples of 16 bits per second. Each line
of the output has the texts, and the seconds that passed and that processors spent. All engines decode greedily, as relaxserve does.
"""

from __future__ import annotations

import json
import sys
import time
import wave
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

LANGUAGE, RATE = "en", 16_000
Samples = Any
Way = Callable[[Sequence[Samples]], list[str]]


def faster_whisper(model: str, threads: int) -> Mapping[str, Way]:
    """Return two ways to transcribe files: in turn, and as a batch. For a batch, the files are joined to one recording, and each file is
    one window of it, so it must have at most 30 s."""
    package = import_module("faster_whisper")
    whisper = package.WhisperModel(model, device="cpu", compute_type="int8", cpu_threads=threads)
    batched = package.BatchedInferencePipeline(whisper)

    def in_turn(files: Sequence[Samples]) -> list[str]:
        found = (whisper.transcribe(samples, language=LANGUAGE, beam_size=1)[0] for samples in files)
        return ["".join(segment.text for segment in segments).strip() for segments in found]

    def as_batch(files: Sequence[Samples]) -> list[str]:
        ends = np.cumsum([len(samples) for samples in files])
        clips = [{"start": (end - len(samples)) / RATE, "end": end / RATE} for samples, end in zip(files, ends, strict=True)]
        options = {"language": LANGUAGE, "beam_size": 1, "batch_size": len(files), "clip_timestamps": clips, "without_timestamps": True}
        segments, _ = batched.transcribe(np.concatenate(files), **options)
        texts = [""] * len(files)
        for segment in segments:
            texts[int(np.searchsorted(ends, (segment.start + 0.01) * RATE, side="right"))] += segment.text
        return [text.strip() for text in texts]

    return {"in turn": in_turn, "as a batch": as_batch}


def whisper_cpp(model: str, threads: int) -> Mapping[str, Way]:
    """Return the only way to transcribe files: in turn, because whisper.cpp has no batches of files."""
    package = import_module("pywhispercpp.model")
    quiet = {"print_progress": False, "print_realtime": False, "redirect_whispercpp_logs_to": None}
    whisper = package.Model(model, n_threads=threads, params_sampling_strategy=0, **quiet)

    def in_turn(files: Sequence[Samples]) -> list[str]:
        found = (whisper.transcribe(samples, language=LANGUAGE, greedy={"best_of": 1}) for samples in files)
        return [" ".join(segment.text.strip() for segment in segments) for segments in found]

    return {"in turn": in_turn}


ENGINES = {"faster-whisper": faster_whisper, "whisper.cpp": whisper_cpp}


def samples_of(path: str) -> Samples:
    with wave.open(path) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def main() -> None:
    engine, model, threads = sys.argv[1:]
    ways = ENGINES[engine](model, int(threads))
    print(json.dumps({"ways": [*ways]}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began_s, spent_s = time.perf_counter(), time.process_time()
        texts = ways[asked["way"]]([samples_of(path) for path in asked["files"]])
        times = {"wall_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - spent_s}
        print(json.dumps({"texts": texts, **times}), flush=True)


if __name__ == "__main__":
    main()
