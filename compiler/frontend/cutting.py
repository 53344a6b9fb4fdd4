"""How a vision model's images are cut into crops, as the file of its image processor says."""

from __future__ import annotations

from pathlib import Path

from compiler.frontend.config import Cutting
from compiler.frontend.errors import ConfigError
from compiler.frontend.fields import Fields, read_json

FILE, LATER_FILE = "preprocessor_config.json", "processor_config.json"  # newer versions of transformers write one file for all processors
LANCZOS = 1  # number of the filter in Pillow
MOST_CROPS_PER_EDGE = 16
DEFAULT_CUTTING = Cutting(longest_edge=4 * 364, splits=True, rescale=1 / 255, mean=(0.5,) * 3, deviation=(0.5,) * 3)


def read_cutting(folder: Path, crop_size: int) -> Cutting:
    """Return how images become crops with edges of `crop_size` pixels. Raise ConfigError if the server cannot cut images so."""
    fields = _fields_of(folder)
    longest_edge = fields.fields("size", {"longest_edge": DEFAULT_CUTTING.longest_edge}).integer("longest_edge", minimum=2)
    if longest_edge > MOST_CROPS_PER_EDGE * crop_size:
        raise fields.error("size", f"a longest_edge of at most {MOST_CROPS_PER_EDGE} crops of {crop_size} pixels")
    fields.fields("max_image_size", {"longest_edge": crop_size}).require_equal("longest_edge", crop_size, "image_size in config.json")
    fields.require_equal("resample", LANCZOS, "the Lanczos filter")
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not fields.flag(name, True):
            raise fields.error(name, "true")
    return Cutting(
        longest_edge=longest_edge,
        splits=fields.flag("do_image_splitting", True),
        rescale=fields.number("rescale_factor", DEFAULT_CUTTING.rescale),
        mean=fields.numbers("image_mean", 3) if "image_mean" in fields else DEFAULT_CUTTING.mean,
        deviation=fields.numbers("image_std", 3) if "image_std" in fields else DEFAULT_CUTTING.deviation,
    )


def _fields_of(folder: Path) -> Fields:
    if (folder / FILE).is_file():
        return Fields(read_json(folder / FILE), FILE)
    if (folder / LATER_FILE).is_file() and (found := Fields(read_json(folder / LATER_FILE), LATER_FILE)).raw("image_processor"):
        return found.fields("image_processor")
    raise ConfigError(f"{folder} has no {FILE}, by which images are cut; download it together with the other files of the model")
