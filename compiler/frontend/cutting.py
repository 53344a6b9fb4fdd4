"""How a vision model's images are cut into crops, as the file of its image processor says."""

from __future__ import annotations

from math import isqrt
from pathlib import Path
from typing import assert_never

from msgspec.structs import replace

from compiler.frontend.errors import ConfigError
from compiler.frontend.fields import Fields, read_json
from compiler.frontend.vision import MOST_PATCHES, Cutting, Tower, Vision
from runtime.files import is_there
from runtime.fits import Canvas, Capped, Centre, Filled, Fit, Free, Grid, Mixed, Naflex, Stretched, Tiles

FILE, LATER_FILE = "preprocessor_config.json", "processor_config.json"  # newer versions of transformers write one file for all processors
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # numbers of filters in Pillow
MOST_CROPS_PER_EDGE = 16
HALF = (0.5,) * 3
CLIP_MEAN, CLIP_DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Ways of cutting (runtime/fits.py), with the values that transformers uses where the file of a model's image processor states none.
TILES = Cutting(Tiles(longest_edge=4 * 364), LANCZOS, 1 / 255, HALF, HALF)
STRETCHED = Cutting(Stretched(), BILINEAR, 1 / 255, HALF, HALF)
GRID = Cutting(Grid(most_crops=12), BICUBIC, 1 / 255, CLIP_MEAN, CLIP_DEVIATION)
CENTRE = Cutting(Centre(), BICUBIC, 1 / 255, CLIP_MEAN, CLIP_DEVIATION)
FREE = Cutting(Free(least_pixels=56 * 56, most_pixels=28 * 28 * 1280), BICUBIC, 1 / 255, CLIP_MEAN, CLIP_DEVIATION)
GLM = Cutting(Free(least_pixels=112 * 112, most_pixels=28 * 28 * 15_000, enlarges_edges=True), BICUBIC, 1 / 255, CLIP_MEAN, CLIP_DEVIATION)
NAFLEX = Cutting(Naflex(256), BILINEAR, 1 / 255, HALF, HALF)
CANVAS = Cutting(Canvas(most_crops=16), BILINEAR, 1 / 255, HALF, HALF)
FILLED = Cutting(Filled(0), BICUBIC, 1 / 255, HALF, HALF)
CAPPED = Cutting(Capped(1024), BICUBIC, 1 / 255, CLIP_MEAN, CLIP_DEVIATION)
MIXED_TOKENS = 64, 256  # smallest and largest number of tokens of an image that is not cut into tiles
# An image is cut into tiles if it has more pixels than this factor times the most pixels to which an uncut image is scaled.
MIXED_TOLERANCE = 2.0
MIXED = Cutting(
    Mixed(least_pixels=0, most_pixels=0, splits=True, least_crops=2, most_crops=10, tile_edge=512, unsplit_pixels=0),
    *(BILINEAR, 1 / 255, HALF, HALF),
)
FILLED_TOKENS = 280  # largest number of tokens of an image
MOST_GRID_CROPS = 64
OTHERS = ("do_pan_and_scan", "do_pad")  # steps of image processors, off by default, that would change the crops


def has_processor(folder: Path) -> bool:
    """Return whether a folder has a file that describes the image processor. Raise ConfigError if such a file cannot be read."""
    return _fields_of(folder) is not None


def read_cutting(folder: Path, vision: Vision) -> Cutting:
    """Return how images become crops: by the way of cutting in `vision.cutting`, with the numbers that the image processor's file states.
    Raise ConfigError if there is no such file, or if it states a way of cutting that is not supported."""
    fields, known = _fields_of(folder), vision.cutting
    if fields is None:
        raise ConfigError(f"{folder} has no {FILE}, by which images are cut; download it together with the other files of the model")
    fit = _read_fit(fields, vision, known.fit)
    # With Filled, the encoder normalises pixels instead of the image processor. So the file must say that the image processor does not, and
    # the file's mean and deviation are ignored.
    fields.require(do_rescale=True, do_normalize=not isinstance(fit, Filled), do_convert_rgb=True)
    if not isinstance(fit, Mixed):  # files of LFM2-VL say `do_resize: false`, but its processor resizes images anyway
        fields.require(do_resize=True)
    is_stated = not isinstance(fit, Filled)
    return Cutting(
        fit,
        _filter(fields, known),
        fields.number("rescale_factor", known.rescale),
        fields.numbers("image_mean", 3) if is_stated and "image_mean" in fields else known.mean,
        fields.numbers("image_std", 3) if is_stated and "image_std" in fields else known.deviation,
    )


def _read_fit(fields: Fields, vision: Vision, known: Fit) -> Fit:
    match known:
        case Tiles():
            return _tiles(fields, vision, known)
        case Grid():
            return _grid(fields, vision, known)
        case Canvas():
            return _canvas(fields, vision, known)
        case Stretched() | Centre():
            return _whole(fields, vision)
        case Mixed():
            return _mixed(fields, vision, known)
        case Free():
            return _free(fields, vision, known)
        case Capped():
            return _capped(fields, vision, known)
        case Filled():
            return _filled(fields, vision)
        case Naflex():
            return _naflex(fields, vision, known)
        case _:
            assert_never(known)


def _tiles(fields: Fields, vision: Vision, known: Tiles) -> Tiles:
    """Read to how many pixels the longer edge of an image is scaled, and whether images are cut into tiles."""
    crop_size = vision.crop_size
    longest_edge = fields.fields("size", {"longest_edge": known.longest_edge}).integer("longest_edge", minimum=2)
    if longest_edge > MOST_CROPS_PER_EDGE * crop_size:
        raise fields.error("size", f"a longest_edge of at most {MOST_CROPS_PER_EDGE} crops of {crop_size} pixels")
    fields.fields("max_image_size", {"longest_edge": crop_size}).require_equal("longest_edge", crop_size, "image_size in config.json")
    fields.require_equal("resample", LANCZOS, "the Lanczos filter")
    return Tiles(longest_edge=longest_edge, splits=fields.flag("do_image_splitting", True))


def _grid(fields: Fields, vision: Vision, known: Grid) -> Grid:
    """Read how an image becomes a grid of crops. `crop_to_patches` is not read: a file may say `crop_to_patches: false`, but this applies
    only if the image processor is used alone. The model's processor, which calls the image processor, cuts images anyway."""
    fields.require_equal("min_patches", 1, "the only smallest number of crops that is supported")
    fields.require(use_thumbnail=True)
    _require_crop_size(fields, vision)
    return Grid(most_crops=fields.integer("max_patches", known.most_crops, maximum=MOST_GRID_CROPS))


def _canvas(fields: Fields, vision: Vision, known: Canvas) -> Canvas:
    """Read how many crops a canvas has at most, and whether an image that is smaller than a canvas is enlarged."""
    _require_crop_size(fields, vision)
    most = fields.integer("max_patches", known.most_crops, maximum=MOST_GRID_CROPS)
    return Canvas(most_crops=most, enlarges=fields.flag("resize_to_max_canvas", False))


def _require_crop_size(fields: Fields, vision: Vision) -> None:
    """Raise ConfigError if the file states another size of crops than config.json."""
    if fields.raw("size", size := {"height": vision.crop_size, "width": vision.crop_size}) != size:
        raise fields.error("size", f"{size}, as image_size in config.json")


def _free(fields: Fields, vision: Vision, known: Free) -> Free:
    """Read the smallest and the largest number of pixels to which an image is scaled. The largest number is lowered to the pixels of
    MOST_PATCHES patches, the limit of one call of the encoder. Raise ConfigError if even the smallest number exceeds this limit."""
    size = fields.fields("size", {"shortest_edge": known.least_pixels, "longest_edge": known.most_pixels})
    least = fields.integer("min_pixels", size.integer("shortest_edge"))
    most = fields.integer("max_pixels", size.integer("longest_edge"))
    fields.require_equal("patch_size", vision.patch_size, "patch_size in config.json")
    fields.require_equal("merge_size", vision.merge, "spatial_merge_size in config.json")
    fields.require_equal("temporal_patch_size", vision.num_frames, "temporal_patch_size in config.json")
    if vision.tower is Tower.GLM4V:  # the processor of GLM-4.1V counts the pixels of all frames of an image
        least, most = -(-least // vision.num_frames), most // vision.num_frames
    able = MOST_PATCHES * vision.patch_size**2
    fit = replace(known, least_pixels=least, most_pixels=min(most, able))
    if least > fit.most_pixels or _num_patches(vision, fit) > MOST_PATCHES:
        name, where = ("min_pixels", fields) if "min_pixels" in fields else ("shortest_edge", size)
        raise where.error(name, f"fewer pixels: one call of the encoder takes {able}, also if an image is much longer than wide")
    return fit


def _num_patches(vision: Vision, fit: Fit) -> int:
    """Return the largest number of patches of a crop."""
    return fit.most_squares(vision.crop_size) * vision.num_patches


def _capped(fields: Fields, vision: Vision, known: Capped) -> Capped:
    """Read how long the longer edge of an image may be. The length is lowered to the edge of the largest square image of at most
    MOST_PATCHES patches, the limit of one call of the encoder."""
    size = fields.fields("size", {"longest_edge": known.longest_edge})
    for name in size.values.keys() - {"longest_edge"}:
        if name in size:
            raise fields.error("size", "an object with longest_edge only")
    patch = fields.raw("patch_size", vision.patch_size)
    if patch not in (vision.patch_size, {"height": vision.patch_size, "width": vision.patch_size}):
        raise fields.error("patch_size", f"{vision.patch_size}, as in config.json")
    able = isqrt(MOST_PATCHES) // vision.merge * vision.crop_size
    return Capped(min(size.integer("longest_edge"), able))


def _filled(fields: Fields, vision: Vision) -> Filled:
    """Read how many tokens an image has at most."""
    fields.require_equal("patch_size", vision.patch_size, "patch_size in config.json")
    fields.require_equal("pooling_kernel_size", vision.merge, "pooling_kernel_size in config.json")
    able = min(MOST_PATCHES // vision.merge**2, vision.table_edge // vision.merge)  # an image may be a single row of tokens
    most = fields.integer("max_soft_tokens", min(FILLED_TOKENS, able), maximum=able)
    return Filled(most * vision.crop_size**2)


def _naflex(fields: Fields, vision: Vision, known: Naflex) -> Naflex:
    """Read how many patches an image has at most."""
    fields.require_equal("patch_size", vision.patch_size, "patch_size in config.json")
    return Naflex(fields.integer("max_num_patches", known.squares, maximum=MOST_PATCHES))


def _mixed(fields: Fields, vision: Vision, known: Mixed) -> Mixed:
    """Read the smallest and the largest number of tokens to which an image is scaled, and how a large image is cut into tiles."""
    least, most = MIXED_TOKENS
    fields.require_equal("encoder_patch_size", vision.patch_size, "patch_size in config.json")
    fields.require_equal("downsample_factor", vision.merge, "downsample_factor in config.json")
    most_pixels = fields.integer("max_image_tokens", most) * vision.crop_size**2
    splits = fields.flag("do_image_splitting", True)
    # A grid of one tile is not supported: for such a grid, the processor scales a large image to a single square.
    least_crops = fields.integer("min_tiles", known.least_crops, minimum=2 if splits else 1)
    fit = Mixed(
        least_pixels=fields.integer("min_image_tokens", least) * vision.crop_size**2,
        most_pixels=most_pixels,
        splits=splits,
        least_crops=least_crops,
        most_crops=fields.integer("max_tiles", known.most_crops, minimum=least_crops, maximum=MOST_GRID_CROPS),
        shows_whole=fields.flag("use_thumbnail", True),
        tile_edge=fields.integer("tile_size", known.tile_edge) if splits else 0,
        unsplit_pixels=int(most_pixels * fields.number("max_pixels_tolerance", MIXED_TOLERANCE)),
    )
    if fit.tile_edge % vision.crop_size:
        raise fields.error("tile_size", f"a multiple of {vision.crop_size}, the pixels of an edge of a token")
    if fit.least_pixels > most_pixels or _num_patches(vision, fit) > MOST_PATCHES:
        name = "tile_size" if fit.tile_edge**2 > MOST_PATCHES * vision.patch_size**2 else "max_image_tokens"
        raise fields.error(name, f"a number with which an image has at most {MOST_PATCHES} patches, and at least min_image_tokens")
    return fit


def _filter(fields: Fields, known: Cutting) -> int:
    filter: int = fields.integer("resample", known.filter)
    if filter not in (LANCZOS, BILINEAR, BICUBIC):
        raise fields.error("resample", f"{LANCZOS}, {BILINEAR} or {BICUBIC}, the number of a filter")
    return filter


def _whole(fields: Fields, vision: Vision) -> Stretched | Centre:
    """Read whether an image is stretched to one crop, or its centre becomes the crop."""
    fields.require(**dict.fromkeys(OTHERS, False))
    edge = vision.crop_size
    fields.require_equal("image_seq_length", vision.num_rows, "the tokens of an image in config.json")
    of_clip = fields.text("image_processor_type", "").startswith("CLIP")
    is_centred = fields.flag("do_center_crop", of_clip)
    size = fields.raw("size", edge)
    wanted = ({"shortest_edge": edge}, edge) if is_centred or of_clip else ({"height": edge, "width": edge}, edge)
    if size not in wanted:
        raise fields.error("size", f"{wanted[0]}, as image_size in config.json is {edge}")
    if is_centred and fields.raw("crop_size", edge) not in (edge, {"height": edge, "width": edge}):
        raise fields.error("crop_size", f"{edge}, as image_size in config.json")
    if of_clip and not is_centred:
        raise fields.error("do_center_crop", "true, so that crops are squares")
    return Centre() if is_centred else Stretched()


def _fields_of(folder: Path) -> Fields | None:
    """Return the fields of the image processor: those of FILE, or else those in `image_processor` of LATER_FILE. Return None if there are
    none: a LATER_FILE of older versions of transformers has no `image_processor`."""
    if is_there(folder / FILE):
        return Fields(read_json(folder / FILE), FILE)
    if is_there(folder / LATER_FILE) and (found := Fields(read_json(folder / LATER_FILE), LATER_FILE)).raw("image_processor"):
        return found.fields("image_processor")
    return None
