"""Images are decoded in a process of their own, and what cannot be decoded is refused with the reason."""

from __future__ import annotations

import asyncio
import base64
import struct
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image, ImageOps

from runtime.fits import Free, Tiles
from server.errors import ApiError
from server.images.cutting import Plan
from server.images.decoder import ImageDecoder, Picture
from server.images.decoding import _opened
from tests.server.images.files import FORMATS, NOWHERE, data_url, encoded, image

PLAN = Plan(16, 1, Tiles(longest_edge=32), filter=1)
MOST = 1_000_000


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    yield ImageDecoder(MOST, 1 << 30, NOWHERE)


def decoded(decoder: ImageDecoder, url: str, plan: Plan = PLAN) -> Picture:
    return asyncio.run(ImageDecoder.decode(decoder, url, plan, "url"))


def fault(decoder: ImageDecoder, url: str, plan: Plan = PLAN) -> str:
    with pytest.raises(ApiError) as caught:
        decoded(decoder, url, plan)
    assert (caught.value.kind.code, caught.value.param) == ("invalid_image", "url")
    return caught.value.message


@pytest.mark.parametrize("format", FORMATS)
def test_every_format(decoder: ImageDecoder, format: str) -> None:
    picture = decoded(decoder, data_url(encoded(image(), format), "image/whatever"))
    assert (picture.rows, picture.columns, len(picture.crops)) == (2, 2, 5)
    assert {len(crop.pixels) for crop in picture.crops} == {16 * 16 * 3}
    assert len({crop.digest for crop in picture.crops}) == 5


def test_the_same_pixels_have_the_same_digest_in_any_lossless_format(decoder: ImageDecoder) -> None:
    found = [decoded(decoder, data_url(file)) for file in (encoded(image()), encoded(image(), "WEBP", lossless=True))]
    assert found[0] == found[1]
    other = decoded(decoder, data_url(encoded(image(seed=1))))
    assert not {crop.digest for crop in other.crops} & {crop.digest for crop in found[0].crops}


def whole(picture: Picture) -> np.ndarray:
    return np.frombuffer(picture.crops[-1].pixels, np.uint8).reshape(16, 16, 3)


def test_transparent_places_are_white(decoder: ImageDecoder) -> None:
    for mode, colour in (("RGBA", (200, 0, 0, 0)), ("LA", (9, 0))):
        assert (whole(decoded(decoder, data_url(encoded(Image.new(mode, (20, 20), colour))))) == 255).all()
    assert (whole(decoded(decoder, data_url(encoded(Image.new("I;16", (20, 20), 300), transparency=300)))) == 255).all()


@pytest.mark.parametrize(("mode", "expected"), [("1", 255), ("L", 255), ("P", 0), ("I;16", 255)])
def test_images_of_other_modes(decoder: ImageDecoder, mode: str, expected: int) -> None:
    given = Image.new(mode, (20, 20), 65535 if mode == "I;16" else 255 if mode != "P" else 0)
    assert (whole(decoded(decoder, data_url(encoded(given)))) == expected).all()


@pytest.mark.parametrize("transparent", [None, 300])
def test_of_16_bits_the_higher_byte_counts(transparent: int | None) -> None:
    """A 16-bit grey value is decoded to its upper byte. It is transparent only if all 16 bits are those of the transparent value."""
    values = np.arange(65_536, dtype=np.uint16).reshape(256, 256)
    options = {} if transparent is None else {"transparency": transparent}
    found = np.asarray(_opened(encoded(Image.fromarray(values), **options), MOST))
    expected = np.where(values == transparent, 255, values >> 8)
    np.testing.assert_array_equal(found, np.repeat(expected[..., None], 3, axis=2))


def test_the_first_frame_counts(decoder: ImageDecoder) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    for format in ("GIF", "WEBP", "PNG"):
        file = encoded(frames[0], format, save_all=True, append_images=frames[1:])
        red, _, blue = whole(decoded(decoder, data_url(file)))[8, 8]
        assert red > 200 and blue < 60, format


def test_images_are_turned_upright(decoder: ImageDecoder) -> None:
    given, exif = image(48, 24), Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned = decoded(decoder, data_url(encoded(given, "PNG", exif=exif)))
    assert (turned.rows, turned.columns) == (2, 1)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_damaged_tag_does_not_hide_the_orientation(format: str, orientation: int) -> None:
    """The tag with the camera's maker is a fraction here instead of a text."""
    maker, turn = struct.pack("<HHII", 0x010F, 5, 1, 38), struct.pack("<HHIHH", 0x0112, 3, 1, orientation, 0)
    exif = b"Exif\0\0II*\0\x08\0\0\0\x02\0" + maker + turn + struct.pack("<III", 0, 1, 1)
    whole = Image.Exif()
    whole[0x0112] = orientation
    damaged, expected = (_opened(encoded(image(48, 24), format, exif=one), MOST) for one in (exif, whole))
    plain = _opened(encoded(image(48, 24), format), MOST)
    assert (np.asarray(damaged) == np.asarray(expected)).all()
    assert (np.asarray(damaged) == np.asarray(ImageOps.exif_transpose(_with(plain, orientation)))).all()


def _with(given: Image.Image, orientation: int) -> Image.Image:
    given.getexif()[0x0112] = orientation
    return given


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize(
    "exif", [b"no TIFF", b"II*\0\x08\0\0\0\x05\0\x12\x01\x03", b"II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x03\0\0\0ab\0\0\0\0\0\0"]
)
def test_damaged_metadata_are_ignored(decoder: ImageDecoder, format: str, exif: bytes) -> None:
    given = image(48, 24)
    found = decoded(decoder, data_url(encoded(given, format, exif=b"Exif\0\0" + exif)))
    assert (whole(found) == whole(decoded(decoder, data_url(encoded(given, format))))).all()


@pytest.mark.parametrize("url", ["http://a/b.png", "HTTPS://a/b.png"])
def test_nothing_is_fetched_unless_the_operator_allows_it(decoder: ImageDecoder, url: str) -> None:
    assert "cannot be fetched: this server fetches no images from 'a', port" in fault(decoder, url)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "/etc/passwd", "", "x" * 1000, "ftp:a", "data"])
def test_only_data_urls_are_read(decoder: ImageDecoder, url: str) -> None:
    assert "expected a data: URL, or http(s) from a host of image_hosts" in fault(decoder, url)


@pytest.mark.parametrize("url", ["data:image/png,abc", "data:", "data:image/png;base64", "data:" + "x" * 300 + ";base64,aGk="])
def test_data_urls_of_other_forms_are_refused(decoder: ImageDecoder, url: str) -> None:
    assert "expected data:image/png;base64,DATA" in fault(decoder, url)


def test_base64_may_be_in_lines(decoder: ImageDecoder) -> None:
    file = encoded(image())
    lines = base64.encodebytes(file).decode()
    for text in (lines, lines.replace("\n", "\r\n")):
        assert decoded(decoder, f"data:image/png;base64,{text}").crops == decoded(decoder, data_url(file)).crops


@pytest.mark.parametrize("text", ["####", "aGk=aGk=", "é", "a Gk="])
def test_text_that_is_not_base64_is_refused(decoder: ImageDecoder, text: str) -> None:
    assert "not base64" in fault(decoder, f"data:image/png;base64,{text}")


def test_files_of_other_formats_are_refused(decoder: ImageDecoder) -> None:
    bmp = encoded(image(), "BMP")
    assert "begins with b'BM" in fault(decoder, data_url(bmp))
    assert "begins with b''" in fault(decoder, "data:image/png;base64,")
    assert "begins with b'<svg'" in fault(decoder, data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"))
    assert "begins with b'RIFF'" in fault(decoder, data_url(b"RIFF\x00\x00\x00\x00WAVEfmt "))


@pytest.mark.parametrize("format", FORMATS)
def test_truncated_files_are_refused(decoder: ImageDecoder, format: str) -> None:
    file = encoded(image(300, 200), format)
    assert "damaged" in fault(decoder, data_url(file[: len(file) // 2]))


def bomb(width: int, height: int) -> bytes:
    """Return a small PNG that declares a huge size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1 << 20))) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(1001, 1000), (65_535, 65_535), (2**31 - 1, 1), (1, 2**31 - 1)])
def test_huge_sizes_are_refused_before_a_pixel_is_decoded(decoder: ImageDecoder, size: tuple[int, int]) -> None:
    assert f"it has {size[0]} x {size[1]} pixels; expected at most 1000000 (max_image_pixels)" in fault(decoder, data_url(bomb(*size)))


def test_images_of_any_size_are_one_crop_unless_they_are_too_long(decoder: ImageDecoder) -> None:
    plan = Plan(16, 1, Free(least_pixels=256, most_pixels=100 * 256), filter=3)
    (crop,) = decoded(decoder, data_url(encoded(image(100, 40))), plan).crops
    assert (crop.rows, crop.columns, len(crop.pixels)) == (2, 6, 12 * 16 * 16 * 3)
    assert "it has 402 x 2 pixels; expected edges of which none is 200" in fault(decoder, data_url(encoded(image(402, 2))), plan)


def test_crops_with_the_same_bytes_in_other_rows_are_different(decoder: ImageDecoder) -> None:
    plan = Plan(16, 1, Free(least_pixels=256, most_pixels=100 * 256), filter=3)
    wide, high = (decoded(decoder, data_url(encoded(Image.new("RGB", size, "red"))), plan).crops[0] for size in ((32, 16), (16, 32)))
    assert wide.pixels == high.pixels and wide.digest != high.digest


def test_a_bomb_of_text_is_refused(decoder: ImageDecoder) -> None:
    text = zlib.compress(b"a" * (100 << 20))
    chunk = b"zTXt" + b"name\0\0" + text
    file = encoded(image())
    whole = file[:33] + struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) + file[33:]
    assert "damaged" in fault(decoder, f"data:image/png;base64,{base64.b64encode(whole).decode()}")


def test_pixels_that_requests_hold_are_limited() -> None:
    decoder, url = ImageDecoder(MOST, 2 * 5 * 16 * 16 * 3, NOWHERE), data_url(encoded(image()))
    held = [decoded(decoder, url), decoded(decoder, url)]
    with pytest.raises(ApiError, match="max_held_image_bytes") as caught:
        decoded(decoder, url)
    assert caught.value.kind.status == 503
    held.pop()
    assert decoder.held.num_bytes == 5 * 16 * 16 * 3
    decoded(decoder, url)
    held.clear()
    assert decoder.held.num_bytes == 0


def test_pixels_of_images_that_are_decoded_at_once_are_limited() -> None:
    """An image is decoded only if there is room for its pixels, and kept only if there is still room afterwards."""
    decoder, url = ImageDecoder(MOST, 2 * 5 * 16 * 16 * 3, NOWHERE), data_url(encoded(image()))

    async def run() -> None:
        found = await asyncio.gather(*(decoder.decode(url, PLAN, "a") for _ in range(12)), return_exceptions=True)
        refused = [one for one in found if isinstance(one, ApiError)]
        assert len(refused) == 10 and {one.kind.code for one in refused} == {"image_not_decoded"}
        assert decoder.held.num_bytes == 2 * 5 * 16 * 16 * 3

    asyncio.run(run())
