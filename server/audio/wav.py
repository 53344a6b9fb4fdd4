"""Read WAV files: chunks of RIFF (also RF64), with samples as integers of 8 to 32 bits, as floats, or as codes of telephones (G.711)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from server.audio.sound import AudioError, Sound, floats, mono

PCM, FLOAT, A_LAW, MU_LAW, EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
UNSTATED = 0xFFFFFFFF  # written in place of a length that is in the chunk `ds64`, or that the writer (such as ffmpeg to a pipe) lacked
UNFILLED = 0  # written in place of a length that other writers, such as GStreamer, did not know
MAGIC = (b"RIFF", b"RF64")
BLOCK_FRAMES = 1 << 20  # frames decoded at a time


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a file stores its samples."""

    kind: int  # PCM, FLOAT, A_LAW or MU_LAW
    channels: int
    rate: int  # frames per second; a frame has a sample of each channel
    sample_bytes: int

    @property
    def frame_bytes(self) -> int:
        return self.channels * self.sample_bytes


def is_wav(data: bytes) -> bool:
    """Return whether a file begins like a WAV file."""
    return data[:4] in MAGIC and data[8:12] == b"WAVE"


def pcm_file(samples: bytes, rate: int) -> bytes:
    """Return the WAV file of 16-bit samples of one channel."""
    layout = struct.pack("<HHIIHH", PCM, 1, rate, 2 * rate, 2, 16)
    chunks = b"WAVEfmt " + len(layout).to_bytes(4, "little") + layout + b"data" + len(samples).to_bytes(4, "little") + samples
    return b"RIFF" + len(chunks).to_bytes(4, "little") + chunks


def open_wav(data: bytes) -> Sound:
    """Open a file as a Sound, whose samples are decoded when they are read. Raise AudioError if the file is damaged or its encoding
    unknown."""
    layout, frames = _read(data)
    step = BLOCK_FRAMES * layout.frame_bytes
    blocks = (mono(_samples(layout, frames[at : at + step]), 1) for at in range(0, len(frames), step))
    return Sound(layout.rate, layout.channels, len(frames) / layout.frame_bytes / layout.rate if layout.rate else None, blocks)


def _read(data: bytes) -> tuple[_Layout, memoryview]:
    """Return the layout and the bytes of all whole frames, without decoding them. Raise AudioError if the file has no chunk `data`, no
    format before it, or a format that is damaged or unknown."""
    layout, at, long = None, 12, UNSTATED
    while at + 8 <= len(data):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8
        if name == b"ds64":
            long = int.from_bytes(data[at + 8 : at + 16], "little") or UNSTATED  # 0 if ffmpeg wrote to a pipe
        elif name == b"fmt ":
            layout = _layout(data[at : at + size])
        elif name == b"data":
            if layout is None:
                raise AudioError("its chunk `data` comes before `fmt `; expected the format first")
            size = min(long if size in (UNSTATED, UNFILLED) else size, len(data) - at)  # a recording may be cut off
            return layout, memoryview(data)[at : at + size // layout.frame_bytes * layout.frame_bytes]
        at += size + size % 2
    raise AudioError("it has no chunk `data`; expected samples")


def _samples(layout: _Layout, frames: memoryview) -> NDArray[np.float32]:
    """Return the samples as floats from -1 to 1, [frames, channels]."""
    raw = np.frombuffer(frames, np.uint8)
    if layout.kind in CODES:
        values = CODES[layout.kind][raw]
    elif layout.kind == FLOAT:
        values = floats(raw.view(f"<f{layout.sample_bytes}"))
    elif layout.sample_bytes == 1:
        values = ((raw.astype(np.float32) - 128) / 128).astype(np.float32)
    elif layout.sample_bytes == 3:
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = raw.reshape(-1, 3)
        values = (wide.view("<i4").reshape(-1) / np.float64(1 << 31)).astype(np.float32)
    else:
        values = (raw.view(f"<i{layout.sample_bytes}") / np.float64(1 << 8 * layout.sample_bytes - 1)).astype(np.float32)
    return values.reshape(-1, layout.channels)


def _layout(chunk: bytes) -> _Layout:
    """Return the layout that a chunk `fmt ` describes. Raise AudioError if the chunk is damaged, or if the encoding is unknown."""
    if len(chunk) < 16:
        raise AudioError(f"its chunk `fmt ` has {len(chunk)} bytes; expected 16 or more")
    kind, channels, rate, bits = (int.from_bytes(chunk[a:b], "little") for a, b in ((0, 2), (2, 4), (4, 8), (14, 16)))
    if kind == EXTENSIBLE and len(chunk) >= 26:
        kind = int.from_bytes(chunk[24:26], "little")
    known = {PCM: (8, 16, 24, 32), FLOAT: (32, 64), A_LAW: (8,), MU_LAW: (8,)}
    if kind not in known:
        raise AudioError(
            f"it is a WAV file of encoding {kind}; expected {PCM} (integers), {FLOAT} (floats), {A_LAW} (A-law) or {MU_LAW} (mu-law)"
        )
    if bits not in known[kind]:
        raise AudioError(f"it has samples of {bits} bits; expected {', '.join(map(str, known[kind]))}")
    if channels == 0:
        raise AudioError("it has 0 channels; expected 1 or more")
    return _Layout(kind, channels, rate, bits // 8)


def _telephone_codes(kind: int) -> NDArray[np.float32]:
    """Return the sample, from -1 to 1, of each of the 256 codes. A code has a sign, three bits that say how often the step size is doubled,
    and the index of the step."""
    code = np.arange(256) ^ (0x55 if kind == A_LAW else 0xFF)
    doublings, step = code >> 4 & 7, code & 15
    if kind == A_LAW:
        size = np.where(doublings > 0, (16 * step + 264) << np.maximum(doublings - 1, 0), 16 * step + 8)
        is_negative = code & 128 == 0
    else:
        size = ((8 * step + 132) << doublings) - 132
        is_negative = code & 128 > 0
    return (np.where(is_negative, -size, size) / 32768).astype(np.float32)


CODES = {kind: _telephone_codes(kind) for kind in (A_LAW, MU_LAW)}
