"""The program `see` of a vision model, which turns crops of images into rows. The step reads the rows in place of the embeddings of image
tokens. A row depends only on its own crop. In a model that embeds images, a row is the vector of an image.

`squares.py` has the program for crops of one size, and `any_size.py` that for crops of any size.
"""

from __future__ import annotations

from compiler.frontend.config import ModelConfig
from compiler.frontend.gemma4_tower import Gemma4
from compiler.frontend.layers.nn import Net
from compiler.frontend.layers.tower import COLOURS
from compiler.frontend.pixtral_tower import Pixtral
from compiler.frontend.qwen_towers import Glm4v, Qwen2, Qwen2_5, Qwen3
from compiler.frontend.siglip2_tower import Siglip2
from compiler.frontend.squares import Squares
from compiler.frontend.vision import MOST_PATCHES, Tower, Vision
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Var
from compiler.ir.types import tensor

ENTRY = "see"
ENCODERS = {  # encoders of crops of any size
    Tower.QWEN2: Qwen2,
    Tower.QWEN2_5: Qwen2_5,
    Tower.OMNI: Qwen2_5,
    Tower.QWEN3: Qwen3,
    Tower.PIXTRAL: Pixtral,
    Tower.SIGLIP2: Siglip2,
    Tower.GEMMA4: Gemma4,
    Tower.GLM4V: Glm4v,
}
TAPS = 4  # number of vectors of the table of positions from which the position vector of a patch is interpolated


def most_crops(vision: Vision) -> int:
    """Return the largest number of crops in one call of the program. If crops have one size, all crops of a call must have at most
    MOST_PATCHES patches together, unless a single crop has more."""
    return vision.at_once if vision.any_size else max(1, min(vision.at_once, MOST_PATCHES // vision.num_patches))


def add_seeing(net: Net, config: ModelConfig) -> None:
    """Add the program `see` to the module that `net` builds."""
    vision, size = config.vision, config.hidden_size if config.is_causal else config.embedding.size_of(config.hidden_size)
    assert vision is not None
    n, i32 = DimVar("n", 1, most_crops(vision)), DType.I32
    if not vision.any_size:
        starts = Var("starts", tensor((n + 1,), i32))
        pixels = Var("pixels", tensor((n, vision.crop_size, vision.crop_size * COLOURS), DType.U8))
        crop_ids = Var("crop_ids", tensor((n * vision.num_places,), i32))
        with net.function(ENTRY, (pixels, crop_ids, starts)):
            net.builder.returns(Squares(net, vision, Dim.of(n), crop_ids, starts).rows(pixels, size))
        return
    squares = DimVar("squares", 1, vision.most_squares)
    each = vision.num_patches
    places = squares * each
    patches = Var("patches", tensor((squares, each, vision.patch_size**2 * COLOURS), DType.U8))
    points = Var("points", tensor((squares, each, 2), i32))
    crops = Var("crop_ids", tensor((places,), i32)), Var("ends", tensor((n,), i32))
    windows: tuple[Var, ...] = ()
    taps: tuple[Var, ...] = ()
    if vision.window:
        w = DimVar("w", 1, vision.most_squares)
        windows = Var("window_ids", tensor((places,), i32)), Var("window_ends", tensor((w,), i32))
    if vision.scales_table:
        taps = (Var("shares", tensor((places, vision.table_edge**2), DType.F32)),)
    elif vision.tower is Tower.QWEN3:
        taps = Var("taps", tensor((places, TAPS), i32)), Var("shares", tensor((places, TAPS), DType.F32))
    with net.function(ENTRY, (patches, points, *crops, *windows, *taps)):
        encoder = ENCODERS[vision.tower](net, vision, Dim.of(squares), crops, windows, taps)
        net.builder.returns(encoder.rows(patches, points, config))
