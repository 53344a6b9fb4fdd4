"""Audio files in every format that the server reads."""

from __future__ import annotations

import io
import wave

import av
import numpy as np
from numpy.typing import NDArray

# How FFmpeg calls the format and the codec.
KINDS = {
    "MP3": ("mp3", "libmp3lame"),
    "FLAC": ("flac", "flac"),
    "Ogg Opus": ("ogg", "libopus"),
    "Ogg Vorbis": ("ogg", "vorbis"),  # this encoder is experimental, and knows stereo only
    "M4A": ("ipod", "aac"),
    "M4A ALAC": ("ipod", "alac"),
    "WebM": ("webm", "libopus"),
}
LOSSLESS = ("FLAC", "M4A ALAC")


def tone(rate: int, hertz: float = 440.0, seconds: float = 0.25) -> NDArray[np.float32]:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)).astype(np.float32)


def wav(samples: NDArray[np.float32], rate: int, *, sample_bytes: int = 2, channels: int = 1) -> bytes:
    values = np.repeat(samples, channels).astype(np.float64)
    if sample_bytes == 1:
        data = (np.rint(values * 127) + 128).astype(np.uint8).tobytes()
    else:
        wide = np.rint(values * ((1 << 8 * sample_bytes - 1) - 1)).astype("<i4")
        data = wide.view(np.uint8).reshape(-1, 4)[:, :sample_bytes].tobytes()
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(sample_bytes)
        file.setframerate(rate)
        file.writeframes(data)
    return out.getvalue()


def encoded(samples: NDArray[np.float32], rate: int, kind: str, *, layout: str = "mono", codec: str = "", bit_rate: int = 0) -> bytes:
    format, usual = KINDS[kind]
    layout = "stereo" if usual == "vorbis" else layout
    out = io.BytesIO()
    with av.open(out, "w", format=format) as container:
        stream = container.add_stream(codec or usual, rate=rate, layout=layout, options={"strict": "experimental"})
        if bit_rate:
            stream.bit_rate = bit_rate
        values = np.repeat(np.rint(samples * 32767).astype(np.int16), 2 if layout == "stereo" else 1)
        frame = av.AudioFrame.from_ndarray(values[None], format="s16", layout=layout)
        frame.sample_rate = rate
        for packets in (stream.encode(frame), stream.encode(None)):
            container.mux(packets)
    return out.getvalue()
