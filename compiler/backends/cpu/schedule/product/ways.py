"""Choose how a product is summed: the first way that applies."""

from __future__ import annotations

from compiler.backends.cpu.schedule.product.floats import Floats
from compiler.backends.cpu.schedule.product.groups import Groups
from compiler.backends.cpu.schedule.product.pairs import Pairs
from compiler.backends.cpu.schedule.product.scaled import Scaled, is_scaled
from compiler.backends.cpu.schedule.product.streams import Streams
from compiler.backends.cpu.schedule.product.widened import Widened, is_widened
from compiler.idioms.product import grouped_product_in, product_in
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.write import Kernel
from compiler.machine.formats import ScaledPanels
from compiler.machine.products import ProductTiles


def schedule_product(prim: PrimFunc, tiles: ProductTiles) -> PrimFunc | None:
    """Schedule a product of matrices. Return None for any other nest, and for a product of integers for which the target has no tile."""
    way = _way(prim, tiles)
    if way is None:
        return None
    k = Kernel()
    way.write(k)
    return PrimFunc(prim.params, prim.num_outputs, k.body(), {**prim.attrs, "schedule": way.name})


def _way(prim: PrimFunc, tiles: ProductTiles) -> Floats | Pairs | Scaled | Groups | Widened | None:
    """Return an object of the first way that applies, which writes the loops of the product. Return None if no way applies."""
    if (floats := product_in(prim)) is not None:
        pairs = tiles.pairs
        if pairs is not None and all(pairs.takes(s, floats.row_axis) and pairs.reads(s.columns) for s in floats.sums):
            return Pairs(floats, pairs)
        for tile in tiles.scaled:
            if is_scaled(floats, tile):
                return Scaled(floats, tile)
        return Floats(floats, tiles.floats)
    if (grouped := grouped_product_in(prim)) is not None:
        if tiles.widened is not None and all(is_widened(s, tiles.widened) for s in grouped.sums):
            return Widened(grouped, tiles.widened)
        for tile in tiles.integers:
            if all(tile.reads(s.element) and s.group % tile.depth == 0 for s in grouped.sums):
                in_streams = all(isinstance(s.format, ScaledPanels) for s in grouped.sums)
                return Streams(grouped, tile) if in_streams else Groups(grouped, tile)
    return None
