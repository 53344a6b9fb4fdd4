"""Define the ways in which an image becomes crops, the parts that a model sees. The compiler reads from a model's files which way the model
needs, and the server cuts images in this way.

In some ways a crop is a square of a fixed size. In the other ways a crop has any size: its edges are multiples of the edge of a square,
the part of an image that becomes one token.
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import ClassVar, Self

import msgspec
from msgspec.structs import replace

MOST_RATIO = 200  # largest ratio of the longer edge of an image to the shorter one, for the classes Free and Mixed
LOW_EDGE = 16  # with detail `low`, the classes Capped and Free reduce a larger image to LOW_EDGE * LOW_EDGE squares or fewer


class Way(msgspec.Struct, frozen=True, tag=True):
    """A way in which an image becomes crops. The parameter `edge` of its methods is a number of pixels: the edge of a crop, or the edge of
    a square if crops have any size."""

    any_size: ClassVar[bool] = False  # whether crops have any size

    def most_squares(self, edge: int) -> int:
        """Return the largest number of squares of which a crop consists; 1 if crops have a fixed size, as a crop is then the square."""
        return 1

    def low(self, edge: int) -> Self:
        """Return the way in which an image becomes crops if the request has `detail: low`."""
        return self


class Stretched(Way, frozen=True, tag=True):
    """The image is scaled to the size of one crop, whatever its proportions."""


class Centre(Way, frozen=True, tag=True):
    """The image is scaled until its shorter edge is as long as a crop's edge. The middle of the scaled image is the crop."""


class _Split(Way, frozen=True, tag=True):
    """A way in which an image becomes several crops of its parts, and one crop that shows the whole image in small."""

    splits: bool = True  # False: only the crop of the whole image is made

    def low(self, edge: int) -> Self:
        return replace(self, splits=False)


class Tiles(_Split, frozen=True, tag=True, kw_only=True):
    """The image is scaled until its edges are multiples of a crop's edge, and cut into crops; a last crop shows the whole image."""

    longest_edge: int  # pixels: before the edges become multiples, the longer edge is scaled to this length


class Grid(_Split, frozen=True, tag=True, kw_only=True):
    """Like Tiles, but the image is scaled to the number of rows and columns of crops that fits its proportions best."""

    most_crops: int  # largest number of crops besides the crop of the whole image


class Canvas(_Split, frozen=True, tag=True, kw_only=True):
    """The image keeps its proportions on a black canvas, which is cut into a grid of crops; a last crop shows the whole image."""

    most_crops: int  # largest number of crops besides the crop of the whole image
    # Whether an image that is smaller than a canvas is enlarged to fill it; then the canvas on which the image becomes largest is chosen.
    enlarges: bool = False


class Capped(Way, frozen=True, tag=True):
    """An image whose longer edge exceeds `longest_edge` is reduced; then both edges are rounded up to multiples of a square's edge."""

    any_size: ClassVar[bool] = True
    longest_edge: int  # pixels

    def most_squares(self, edge: int) -> int:
        return ceil(self.longest_edge / edge) ** 2

    def low(self, edge: int) -> Self:
        return replace(self, longest_edge=min(self.longest_edge, LOW_EDGE * edge))


class Filled(Way, frozen=True, tag=True):
    """The image is scaled to `most_pixels`, and both edges are rounded down to multiples of a square's edge."""

    any_size: ClassVar[bool] = True
    most_pixels: int

    def most_squares(self, edge: int) -> int:
        return self.most_pixels // edge**2

    def low(self, edge: int) -> Self:
        return replace(self, most_pixels=max(self.most_pixels // 4, edge**2))


class Naflex(Way, frozen=True, tag=True):
    """Both edges are scaled by one factor and rounded up to multiples of a square's edge. The factor is the largest with which the image
    has at most `squares` squares."""

    any_size: ClassVar[bool] = True
    squares: int

    def most_squares(self, edge: int) -> int:
        return self.squares


class Free(Way, frozen=True, tag=True, kw_only=True):
    """Both edges of the image become multiples of a square's edge, in nearly the same proportions."""

    any_size: ClassVar[bool] = True
    least_pixels: int  # an image with fewer pixels is enlarged
    most_pixels: int  # an image with more pixels is reduced
    enlarges_edges: bool = False  # whether an image whose shorter edge is shorter than a square's is first enlarged until they are equal

    def most_squares(self, edge: int) -> int:
        least, most = (pixels / edge**2 for pixels in (self.least_pixels, self.most_pixels))
        # The edges of an enlarged image are rounded up. Each edge of a reduced image has at least one square.
        enlarged = least + sqrt(least * MOST_RATIO) + sqrt(least / MOST_RATIO) + 1
        return int(max(most, sqrt(most * MOST_RATIO), enlarged))

    def low(self, edge: int) -> Self:
        most = min(self.most_pixels, (LOW_EDGE * edge) ** 2)
        return replace(self, least_pixels=min(self.least_pixels, most), most_pixels=most)


class Mixed(Free, frozen=True, tag=True, kw_only=True):
    """Like Free, but a large image is also cut into a grid of square crops, which precede the crop of the whole image if there is one."""

    splits: bool  # whether a large image is cut; False: each image becomes one crop
    least_crops: int  # least number of crops of the grid
    most_crops: int  # largest number of crops of the grid
    shows_whole: bool = True  # whether the crop of the whole image follows the crops of the grid
    tile_edge: int  # pixels of an edge of the crops of the grid
    unsplit_pixels: int  # an image is large if it has more pixels after its edges are rounded to multiples of a square's edge

    def most_squares(self, edge: int) -> int:
        return max(Free.most_squares(self, edge), (self.tile_edge // edge) ** 2)

    def low(self, edge: int) -> Self:
        return replace(self, splits=False)


Fit = Tiles | Grid | Canvas | Stretched | Centre | Free | Capped | Filled | Naflex | Mixed
