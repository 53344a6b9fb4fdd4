"""Mutated files of images and audio: changed, missing and inserted bytes, the beginning of one file before the end of another, headers that
declare absurd sizes, rates and lengths, and many frames. Check sums are right again where a decoder would otherwise stop at them."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image

from tests.server.audio.files import KINDS, tone, wav
from tests.server.audio.files import encoded as encoded_audio
from tests.server.images.files import encoded, image

ABSURD = (0, 1, 2, 3, 7, 255, 256, 1000, 4095, 16_383, 65_535, 65_536, 1_000_000, 2**31 - 1, 2**31, 2**32 - 1)
RATE = 48_000
Rewrite = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True, slots=True)
class Mutated:
    name: str  # the file and the kind of mutation
    data: bytes


def mutated(files: Mapping[str, bytes], rng: random.Random) -> Mutated:
    """Return one of the files with one kind of mutation."""
    name = rng.choice([*files])
    data, kind = files[name], rng.choice(("damaged", "cut", "spliced", "absurd", "absurd", "repeated"))
    match kind:
        case "damaged":
            found = damaged(data, rng)
        case "cut":
            found = data[: rng.randrange(1, len(data))]
        case "spliced":
            found = data[: rng.randrange(len(data))] + (other := files[rng.choice([*files])])[rng.randrange(len(other)) :]
        case "absurd":
            found = absurd(data, rng)
        case _:
            found = repeated(data, rng)
    return Mutated(f"{name}, {kind}", found or b"\0")


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return the file with some bytes changed, left out, repeated or inserted, most of them near its beginning."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        at = rng.randrange(min(len(out), rng.choice((64, 512, len(out)))))
        size = rng.choice((1, 2, 4, 8, 200))
        match rng.randrange(5):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at : at + size] = rng.choice((b"\0", b"\xff", b"\x7f")) * size
            case 2:
                del out[at : at + size]
            case 3:
                out[at:at] = out[at : at + size]
            case _:
                out[at : at + size] = rng.randbytes(size)
        out = out or bytearray(b"\0")
    return bytes(out[: rng.randrange(1, len(out) + 1)] if rng.random() < 0.2 else out)


def repeated(data: bytes, rng: random.Random) -> bytes:
    """Return the file with a part of it many times: frames, pages, packets or chunks, if the part happens to be one."""
    begin = rng.randrange(len(data))
    size = rng.choice((1, 8, 64, 1024, len(data)))
    part = data[begin : begin + size]
    return data[:begin] + part * min(rng.choice((2, 100, 5000)), 200_000 // len(part)) + data[begin:]


def absurd(data: bytes, rng: random.Random) -> bytes:
    """Return the file with other numbers in its header."""
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return _absurd_png(data, rng)
    if data[:3] == b"\xff\xd8\xff":
        return _absurd_jpeg(data, rng)
    if data[:4] == b"GIF8":
        frame = data.find(b"\x2c", 13)
        return _with(data, rng.choice([at for at in (6, 8, frame + 5, frame + 7) if at + 2 <= len(data)]), "<H", rng)
    if data[8:12] == b"WEBP":
        chunk = data[12:16]
        at = {b"VP8 ": (26, 28), b"VP8L": (21,), b"VP8X": (24, 27)}[chunk]
        return _with(data, rng.choice(at), "<I" if chunk == b"VP8L" else "<H", rng)
    if data[8:12] == b"WAVE":
        return _with(data, *rng.choice(((20, "<H"), (22, "<H"), (24, "<I"), (24, "<I"), (32, "<H"), (34, "<H"), (40, "<I"))), rng)
    if data[:4] == b"fLaC":
        return _with(data, rng.choice((8, 10, 18, 19, 20, 21, 22)), rng.choice((">H", ">I")), rng)
    if data[:4] == b"OggS":
        return _summed(_with(data, rng.randrange(36, 46), rng.choice(("<B", "<H", "<I")), rng))
    if data[4:8] == b"ftyp":
        return _within(data, BOXES, ">I", rng)
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return _within(data, ELEMENTS, ">B", rng)
    return _absurd_mp3(data, rng)


# The parts of M4A and of WebM that have the rate, the channels, the codec, the length and the sizes of packets.
BOXES = (b"mvhd", b"mdhd", b"tkhd", b"stts", b"stsz", b"stsc", b"stco", b"mp4a", b"alac", b"esds")
ELEMENTS = (b"\xb5", b"\x9f", b"\x44\x89", b"\x2a\xd7\xb1", b"\x62\x64", b"\x63\xa2")


def _with(data: bytes, at: int, form: str, rng: random.Random) -> bytes:
    """Return the file with an absurd number at a place."""
    size = struct.calcsize(form)
    number = rng.choice((*ABSURD, rng.randrange(1 << 8 * size))) % (1 << 8 * size)
    return data[:at] + struct.pack(form, number) + data[at + size :]


def _within(data: bytes, names: tuple[bytes, ...], form: str, rng: random.Random) -> bytes:
    """Return the file with an absurd number after one of the names."""
    places = [at + len(name) for name in names if (at := data.find(name)) >= 0]
    at = rng.choice(places) + rng.randrange(1, 24)
    return _with(data, at, form, rng) if at + 4 <= len(data) else damaged(data, rng)


def _absurd_png(data: bytes, rng: random.Random) -> bytes:
    header = _with(data[12:29], rng.choice((4, 8)), ">I", rng)
    if rng.random() < 0.3:
        header = header[:12] + bytes([rng.choice((1, 2, 4, 8, 16, 255)), rng.choice((0, 2, 3, 4, 6, 9))]) + header[14:16] + b"\1"
    return data[:12] + header[:17] + zlib.crc32(header[:17]).to_bytes(4, "big") + data[33:]


def _absurd_jpeg(data: bytes, rng: random.Random) -> bytes:
    starts = [at for kind in (b"\xff\xc0", b"\xff\xc2") if (at := data.find(kind)) >= 0]
    return _with(data, starts[0] + rng.choice((5, 7)), ">H", rng) if starts else damaged(data, rng)


def _absurd_mp3(data: bytes, rng: random.Random) -> bytes:
    """Return the file with other layers, rates or channels in some of its frames, each of which begins with eleven ones."""
    out = bytearray(data)
    for at in range(len(data) - 4):
        if data[at] == 0xFF and data[at + 1] & 0xE0 == 0xE0 and rng.random() < 0.3:
            out[at + rng.randrange(1, 4)] ^= 1 << rng.randrange(5)
    return bytes(out)


def _summed(data: bytes) -> bytes:
    """Return a file of Ogg with the right check sum in its first page."""
    num = data[26]
    size = 27 + num + sum(data[27 : 27 + num])
    total = 0
    for byte in data[:22] + bytes(4) + data[26:size]:
        total ^= byte << 24
        for _ in range(8):
            total = (total << 1 ^ (0x04C11DB7 if total & 1 << 31 else 0)) & 0xFFFFFFFF
    return data[:22] + total.to_bytes(4, "little") + data[26:]


def images() -> dict[str, bytes]:
    """Return images in all formats that the server reads, some with many frames, a palette, transparency or a turned camera."""
    whole, frames = image(), [image(seed=seed) for seed in range(40)]
    turned = Image.Exif()
    turned[0x0112] = 6
    with_alpha = Image.fromarray(np.dstack([np.asarray(whole), np.full((48, 64), 99, np.uint8)]))
    many = {"save_all": True, "append_images": frames, "duration": 20}
    return {
        "PNG": encoded(whole),
        "PNG with alpha": encoded(with_alpha),
        "PNG with a palette": encoded(whole.quantize(16)),
        "PNG of 16 bits": encoded(Image.fromarray(np.arange(48 * 64, dtype=np.uint16).reshape(48, 64) * 20)),
        "PNG with frames": encoded(whole, "PNG", **many),
        "JPEG": encoded(whole, "JPEG"),
        "JPEG in scans": encoded(whole, "JPEG", progressive=True),
        "JPEG that is turned": encoded(whole, "JPEG", exif=turned),
        "JPEG of four inks": encoded(whole.convert("CMYK"), "JPEG"),
        "WebP": encoded(whole, "WEBP"),
        "WebP without loss": encoded(whole, "WEBP", lossless=True),
        "WebP with frames": encoded(whole, "WEBP", **many),
        "GIF": encoded(whole, "GIF"),
        "GIF with frames": encoded(whole, "GIF", **many),
    }


def recordings() -> dict[str, bytes]:
    """Return recordings in all formats that the server reads."""
    sound = tone(RATE, seconds=0.3)
    waves = {f"WAV of {size} bytes": wav(sound, RATE, sample_bytes=size) for size in (1, 2, 3, 4)}
    return {**waves, "WAV of two channels": wav(sound, 16_000, channels=2), **{kind: encoded_audio(sound, RATE, kind) for kind in KINDS}}


def bomb(format: str, edge: int) -> bytes:
    """Return a small file of an image that has `edge` times `edge` pixels of one colour, all of which are there."""
    out = BytesIO()
    Image.new("L" if format != "WEBP" else "RGB", (edge, edge)).save(out, format)
    return out.getvalue()
