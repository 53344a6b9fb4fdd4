"""The page reads the size of an image file from its header, and refuses images that are too large before it decodes them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from PIL import Image

from tests.node import run_node
from tests.server.images.files import encoded, image

RUNTIME = Path(__file__).parents[3] / "runtime" / "web"
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"

SIZES = """
import { readFileSync, readdirSync } from 'node:fs';
import { pathToFileURL } from 'node:url';
const [runtime, folder] = process.argv.slice(1), { declaredSize } = await import(pathToFileURL(`${runtime}/sizes.mjs`));
const sizes = readdirSync(folder).sort().map((name) => declaredSize(new Uint8Array(readFileSync(`${folder}/${name}`))));
console.log(JSON.stringify(sizes.map((size) => size && [size.width, size.height])));
"""
REFUSED = """
import { pathToFileURL } from 'node:url';
const [runtime, given, size] = process.argv.slice(1), { pixelsOf } = await import(pathToFileURL(`${runtime}/images.mjs`));
globalThis.createImageBitmap = () => { throw new Error('it is decoded'); };
const [width, height] = JSON.parse(size);
const images = [new Blob([Buffer.from(given, 'hex')]), { width, height, data: new Uint8ClampedArray(0) }];
console.log(JSON.stringify(await Promise.all(images.map((image) => pixelsOf(image).catch((error) => error.message)))));
"""


def sizes_of(files: list[bytes], folder: Path) -> list[list[int] | None]:
    for number, file in enumerate(files):
        (folder / f"{number:05}").write_bytes(file)
    return json.loads(run_node(SIZES, RUNTIME, folder))


def test_files_declare_their_size(tmp_path: Path) -> None:
    """In each format, every kind of header gives the size of the stored picture, whichever way it has to be turned."""
    colours, exif = image(301, 67), Image.Exif()
    exif[0x0112] = 6
    glass = colours.convert("RGBA")
    glass.putalpha(9)
    files = [
        encoded(colours),
        encoded(colours, "GIF"),
        encoded(colours, "JPEG"),
        encoded(colours, "JPEG", progressive=True, exif=exif, comment=b"\xff\xc0" * 9_000),
        encoded(colours, "JPEG", icc_profile=bytes(200_000)),
        encoded(colours, "JPEG", restart_marker_blocks=1).replace(b"\xff\xc0", b"\xff\xff\xff\xc0", 1),  # filled up
        encoded(colours, "WEBP"),
        encoded(colours, "WEBP", lossless=True),
        encoded(glass, "WEBP", exif=exif),
        encoded(colours, "WEBP", save_all=True, append_images=[image(301, 67, 2)]),
    ]
    kinds = {file[12:16] for file in files if file.startswith(b"RIFF")}
    assert kinds == {b"VP8 ", b"VP8L", b"VP8X"}
    assert sizes_of(files, tmp_path) == [[301, 67]] * len(files)


def test_sizes_may_have_all_bits(tmp_path: Path) -> None:
    files = [
        (PNG + struct.pack(">II", 2**31 - 1, 7), [2**31 - 1, 7]),
        (b"GIF89a" + struct.pack("<HH", 65_535, 258), [65_535, 258]),
        (b"\xff\xd8\xff\xc2\0\x11\x08" + struct.pack(">HH", 258, 65_535), [65_535, 258]),
        (b"RIFF\0\0\0\0WEBPVP8 " + bytes(10) + struct.pack("<HH", 0xC000 | 16_383, 258), [16_383, 258]),
        (b"RIFF\0\0\0\0WEBPVP8L\0\0\0\0\x2f" + struct.pack("<I", 0xF0000000 | 16_383 << 14 | 257), [258, 16_384]),
        (b"RIFF\0\0\0\0WEBPVP8X" + bytes(8) + b"\xff\xff\xff\1\2\3", [2**24, 0x030201 + 1]),
    ]
    assert sizes_of([file for file, _ in files], tmp_path) == [size for _, size in files]


def test_files_without_a_size_have_none(tmp_path: Path) -> None:
    """Damaged and truncated files, and those of other formats, declare no size and raise no error."""
    whole = [(encoded(image(), "PNG"), 24), (encoded(image(), "GIF"), 10), (encoded(image(), "JPEG"), 100), (encoded(image(), "WEBP"), 30)]
    files = [file[:length] for file, header in whole for length in range(header)]
    files += [encoded(image(), "BMP"), b"<svg/>", b"RIFF\0\0\0\0WAVEfmt " + bytes(20), b"RIFF\0\0\0\0WEBPVP9 " + bytes(20)]
    files += [
        b"\xff\xd8\xff\xc4\0\0" + bytes(99),
        b"\xff\xd8" + b"\xff" * 99,
        b"\xff\xd8" + b"\xff\xd0" * 99,
        b"\xff\xd8\xff\xe0\0\1\xff\xc0",
    ]
    assert sizes_of(files, tmp_path) == [None] * len(files)


@pytest.mark.parametrize(
    ("width", "height", "said"),
    [
        (40_001, 1_000, "expected at most 40000000: make it smaller"),
        (65_536, 1, "expected edges of at most 65535: make it shorter"),
        (1, 40_000_000, "expected edges of at most 65535: make it shorter"),
        (0, 5, "expected at least one"),
    ],
)
def test_images_that_are_too_large_are_refused_before_they_are_decoded(width: int, height: int, said: str) -> None:
    file = PNG + struct.pack(">II", width, height)
    assert (
        json.loads(run_node(REFUSED, RUNTIME, file.hex(), json.dumps([width, height]))) == [f"it has {width} x {height} pixels; {said}"] * 2
    )
