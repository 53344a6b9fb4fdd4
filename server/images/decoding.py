"""Decode one image, as a job in a process of `server.isolated`. The size that the file declares is checked before its pixels are
decoded."""

from __future__ import annotations

import io
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from runtime.extras import installing
from runtime.fits import Tiles
from server.images.cutting import Plan, crops_of
from server.images.sizes import CuttingFault
from server.isolated.files import NotBase64, bytes_of
from server.messages import Crop

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = {"PNG": b"\x89PNG\r\n\x1a\n", "JPEG": b"\xff\xd8\xff", "GIF": b"GIF8", "WEBP": b"RIFF"}  # formats, and how their files begin
MODULES = (  # modules that Pillow may need for these formats; they are imported early, because a call can open no files
    *("PngImagePlugin", "JpegImagePlugin", "MpoImagePlugin", "GifImagePlugin", "WebPImagePlugin", "TiffImagePlugin"),
    *("ImageFile", "ImageChops", "ImageColor", "ImageMath", "ImagePalette", "ImageSequence", "ImageFilter"),
)
ORIENTATION = 0x0112  # EXIF tag of the orientation. No other tag is decoded, because others may be damaged
TURNS = {  # Pillow's names of the transpositions that make an image upright, by its EXIF orientation
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
REMEDY = f"images need a package that is not installed; the operator can add it: {installing('media')}"


def begins_image(data: bytes) -> bool:
    """Return whether a file begins like one of the formats that are read. WebP and WAV files begin with the same bytes, and differ from
    byte 8 on."""
    return any(data.startswith(start) for start in FORMATS.values()) and data[8:12] != b"WAVE"


class ImageFault(ValueError):
    """Raised for an image that cannot be decoded. The message is for the client."""


class File(msgspec.Struct, frozen=True):
    """The work of a call: an image to decode and to cut."""

    text: str  # the file in base64
    plan: Plan
    data: bytes = b""  # the file; empty: it is in `text`


class Outcome(msgspec.Struct, frozen=True):
    """The result of a call: an image in crops, or why there is none."""

    rows: int = 0  # rows and columns of the grid of crops; 0: there is no grid
    columns: int = 0
    crops: tuple[Crop, ...] = ()
    fault: str = ""  # why the image cannot be decoded; empty: it was decoded


class Decoding:
    """Decodes images of at most `most_pixels` pixels."""

    prepare_s = 30.0
    call_s = 20.0
    call_bytes = 1 << 30

    def __init__(self, most_pixels: int) -> None:
        self._most_pixels = most_pixels

    def prepare(self) -> None:
        """Load the modules and libraries that a call may need, if Pillow is installed."""
        with suppress(ImportError):
            for name in MODULES:
                import_module(f"PIL.{name}")
            for format in FORMATS:  # the first file of a format loads its library
                _example(format)

    def warm(self) -> None:
        """Decode an image once, so that the first call is not slower."""
        with suppress(ImportError):
            crops_of(_opened(_example("PNG"), self._most_pixels), Plan(8, 1, Tiles(longest_edge=16), filter=1))

    def run(self, work: bytes) -> bytes:
        """Decode the image of a call. Return the Outcome as MessagePack."""
        file = msgspec.msgpack.decode(work, type=File)
        try:
            grid, crops = crops_of(_opened(file.data or bytes_of(file.text), self._most_pixels), file.plan)
        except (ImageFault, CuttingFault, NotBase64) as error:
            return msgspec.msgpack.encode(Outcome(fault=str(error)))
        return msgspec.msgpack.encode(Outcome(grid.rows, grid.columns, tuple(crops)))


def _opened(data: bytes, most_pixels: int) -> Image:
    """Return the first frame of an image in RGB, upright. Transparent places are white. Raise ImageFault if the image cannot be decoded or
    is too large, or if Pillow is not installed."""
    if not begins_image(data):
        raise ImageFault(f"it begins with {data[:4]!r}; expected a file of {', '.join(FORMATS)}")
    try:
        from PIL import Image
    except ImportError:
        raise ImageFault(REMEDY) from None
    Image.MAX_IMAGE_PIXELS = None  # the size is checked here
    try:
        image = Image.open(io.BytesIO(data), formats=[*FORMATS])
        width, height = image.size
        if width < 1 or height < 1:
            raise ImageFault(f"it has {width} x {height} pixels; expected at least one")
        if width * height > most_pixels:
            raise ImageFault(f"it has {width} x {height} pixels; expected at most {most_pixels} (max_image_pixels)")
        image.load()
        return _opaque(_upright(image))
    except (MemoryError, ImageFault):
        raise
    except Exception as error:  # decoders raise errors of any kind for damaged files
        raise ImageFault(f"it is damaged ({type(error).__name__}: {error})"[:300]) from None


def _upright(image: Image) -> Image:
    """Return an image turned according to its metadata. As in browsers, do not turn it if the metadata are damaged or have no
    orientation."""
    from PIL import Image as images

    try:
        turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:  # Pillow raises errors of any kind for damaged metadata
        return image
    return image if turn is None else image.transpose(images.Transpose[turn])


def _opaque(image: Image) -> Image:
    """Return an image in RGB, on white where it is transparent."""
    from PIL import Image as images

    if image.mode.startswith("I;16"):
        image = _of_bytes(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    colours = image.convert("RGBA")
    return images.alpha_composite(images.new("RGBA", colours.size, "white"), colours).convert("RGB")


def _of_bytes(image: Image) -> Image:
    """Convert a grey image from 16 bits per pixel to 8. Take the higher byte, as browsers do, and as Pillow does for colours."""
    from PIL import ImageMath

    wide = image.convert("I")
    grey, transparent = wide.point(lambda value: value * (1 / 256)).convert("L"), image.info.get("transparency")
    grey.info.pop("transparency", None)
    if transparent is not None:
        grey.putalpha(ImageMath.lambda_eval(lambda args: args["convert"]((args["wide"] != transparent) * 255, "L"), wide=wide))
    return grey


def _example(format: str) -> bytes:
    """Return a small file of a format, and decode it once."""
    images: Any = import_module("PIL.Image")
    out = io.BytesIO()
    images.new("RGB", (9, 5), "red").save(out, format)
    images.open(io.BytesIO(out.getvalue()), formats=[format]).load()
    return out.getvalue()
