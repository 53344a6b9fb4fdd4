"""Make the clips of speech, and the texts and times of words that faster-whisper gives for them in f32 at temperature 0.

    apt-get install espeak-ng flite sox; python -m tests.real.speech.make clips
    pip install faster-whisper msgspec ml_dtypes; python -m tests.real.speech.make texts MODELS

The second command needs an environment of its own, which has no other packages of the server. It keeps what is stored. MODELS is the
folder with the models, as `relaxserve pull` stores them: ~/.cache/relaxserve/models, or .venv/real/models after `make test-real`. The clips
`novel-*` are not made: they are recordings of LibriVox, which are in the public domain.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from server.audio.decoding import decoded
from server.audio.wav import open_wav
from tests.real.speech.clips import CLIPS, FOLDER, MODELS, TEXTS, Clip, long_file, samples_of
from tests.server.audio.files import encoded

BIT_RATE = 24_000
LEAST_LOGPROB = -0.95
FLITE = ("slt", "rms", "awb")  # voices of flite, which speaks English; all others are espeak-ng's


def make_clip(clip: Clip) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spoken, wanted = f"{folder}/spoken.wav", f"{folder}/wanted.wav"
        if clip.voice in FLITE:
            subprocess.run(["flite", "-voice", clip.voice, "-t", clip.text, "-o", spoken], check=True)
        else:
            subprocess.run(
                ["espeak-ng", "-v", clip.voice, "-s", "150" if clip.language == "en" else "130", "-w", spoken, clip.text], check=True
            )
        subprocess.run(["sox", spoken, "-r", "48000", "-c", "1", "-b", "16", wanted, "gain", "-n", "-3", "pad", "0.3", "0.5"], check=True)
        store_clip(clip.name, Path(wanted))


def store_clip(name: str, path: Path) -> None:
    """Store a WAV file of 48 kHz as a clip."""
    (samples,) = open_wav(path.read_bytes()).blocks
    (FOLDER / f"{name}.opus").write_bytes(encoded(samples, 48_000, "Ogg Opus", bit_rate=BIT_RATE))


def transcribed(model: Any, samples: Any, language: str, *, words: bool) -> dict[str, Any]:
    """Transcribe at temperature 0. Refuse speech that relaxserve would transcribe again at a higher temperature."""
    segments = [*model.transcribe(samples, language=language, beam_size=1, temperature=0.0, word_timestamps=words)[0]]
    if any(segment.avg_logprob < LEAST_LOGPROB for segment in segments):
        raise SystemExit(f"{[segment.text for segment in segments]} is improbable; choose another sentence or voice")
    found: dict[str, Any] = {
        "text": "".join(segment.text for segment in segments).strip(),
        "segments": [[round(segment.start, 2), round(segment.end, 2)] for segment in segments],
    }
    if words:
        found["words"] = [[word.word.strip(), round(word.start, 2), round(word.end, 2)] for segment in segments for word in segment.words]
    return found


def make_texts(models: Path) -> None:
    from faster_whisper import WhisperModel

    stored: dict[str, Any] = json.loads(TEXTS.read_text()) if TEXTS.exists() else {}
    long = decoded(long_file(), 600.0)
    for name, languages in MODELS.items():
        model = WhisperModel(str(models / name), device="cpu", compute_type="float32", cpu_threads=1)
        own, before = dict[str, Any](), stored.get(name, {})
        for clip in (clip for clip in CLIPS if clip.language in languages):
            own[clip.name] = before.get(clip.name) or transcribed(model, samples_of(clip), clip.language, words=True)
        own["long"] = before.get("long") or transcribed(model, long, "en", words=False)
        own["long, words"] = before.get("long, words") or transcribed(model, long, "en", words=True)
        stored[name] = own
    TEXTS.write_text(json.dumps(stored, indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "clips":
        for clip in CLIPS:
            if clip.voice:
                make_clip(clip)
    else:
        make_texts(Path(sys.argv[2]))
