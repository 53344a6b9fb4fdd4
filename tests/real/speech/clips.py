"""Clips of speech in three languages: what is said in them, and their samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.spectrogram import RATE
from server.audio.decoding import decoded
from tests.server.audio.files import wav

FOLDER, TEXTS = Path(__file__).parent / "recordings", Path(__file__).parent / "texts.json"
MODELS = {"whisper-tiny.en": ("en",), "whisper-base": ("en", "de", "it")}  # models of the catalogue, and in which languages they are tested
PAUSES_S = (0.4, 1.5, 0.1, 3.0)  # between the clips of the long recording, in turns


@dataclass(frozen=True)
class Clip:
    name: str
    language: str
    voice: str  # of the program that speaks it; empty: a person
    text: str


CLIPS = (
    Clip(
        "novel-1",
        "en",
        "",
        "And Mr. John Dashwood had then leisure to consider how much there might be prudently in his power to do for them.",
    ),
    Clip("novel-2", "en", "", "He was not an ill disposed young man."),
    Clip("novel-3", "en", "", "Unless to be rather cold hearted and rather selfish is to be ill disposed."),
    Clip("novel-4", "en", "", "Had he married a more amiable woman, he might have been made still more respectable than he was."),
    Clip("novel-5", "en", "", "He might even have been made amiable himself."),
    Clip("bakery", "en", "slt", "The bakery on the corner opens at seven, and by half past eight the fresh bread is usually gone."),
    Clip("train", "en", "rms", "The train to Oxford leaves from platform nine. Please keep your ticket until the end of the journey."),
    Clip("weather", "en", "slt", "Tomorrow will be cloudy with light rain in the morning. In the afternoon the sun comes out."),
    Clip("library", "en", "awb", "She borrowed three books from the library: one about birds, one about stars, and one about the sea."),
    Clip("garden", "en", "en-us", "In the garden behind the house, two old apple trees were covered with white flowers."),
    Clip("doctor", "en", "rms", "Doctor Brown will see you on Wednesday, the fourteenth of March, at ten thirty."),
    Clip("morgen", "de", "de+m3", "Guten Morgen, wie geht es Ihnen heute?"),
    Clip("zug", "de", "de+m3", "Der Zug nach Berlin fährt heute um zehn Uhr ab."),
    Clip("wetter", "de", "de+m3", "Morgen wird das Wetter gut, und wir gehen mit den Kindern in den Wald."),
    Clip("giorno", "it", "it+m3", "Buongiorno, come sta oggi?"),
    Clip("treno", "it", "it+m3", "Il treno per Roma parte alle otto di mattina."),
)


def file_of(clip: Clip) -> bytes:
    return (FOLDER / f"{clip.name}.opus").read_bytes()


def samples_of(clip: Clip) -> NDArray[np.float32]:
    return decoded(file_of(clip), 60.0)


def long_file() -> bytes:
    """Return a WAV file of all English clips, with pauses between them. It is longer than two windows."""
    spoken = [samples_of(clip) for clip in CLIPS if clip.language == "en"]
    pauses = [np.zeros(round(RATE * PAUSES_S[number % len(PAUSES_S)]), np.float32) for number in range(len(spoken))]
    return wav(np.concatenate([part for pair in zip(spoken, pauses, strict=True) for part in pair]), RATE)
