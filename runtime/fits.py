"""Define the ways in which an image becomes crops, the parts that a model sees. The compiler reads from a model's files which way it needs,
and the server cuts images in this way.

In some ways a crop is a square of a fixed size. In the others it has any size: its edges are multiples of the edge of a square, which is
the part of an image that becomes one token.
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import ClassVar, Self

import msgspec
from msgspec.structs import replace

MOST_RATIO = 200  # largest ratio of the longer edge to the shorter one of an image that keeps its proportions
LOW_EDGE = 16  # with detail `low`, an image that keeps its proportions has at most LOW_EDGE * LOW_EDGE squares


class Way(msgspec.Struct, frozen=True, tag=True):
    """A way in which an image becomes crops. The parameter `edge` of its methods is the number of pixels of an edge of a crop; if crops
    have any size, of an edge of a square."""

    any_size: ClassVar[bool] = False  # whether crops have any size

    def most_squares(self, edge: int) -> int:
        """Return the largest number of squares of which a crop consists."""
        return 1

    def low(self, edge: int) -> Self:
        """Return the way in which an image becomes crops if the request has `detail: low`."""
        return self


class Stretched(Way, frozen=True, tag=True):
    """Both edges of the image become those of one crop."""


class Centre(Way, frozen=True, tag=True):
    """The image is scaled so that its shorter edge becomes that of a crop. The middle of the scaled image is the crop."""


class _Split(Way, frozen=True, tag=True):
    """A way in which an image becomes several crops and a small one of the whole image, or only the latter."""

    splits: bool = True  # whether the image becomes several crops and a small one of the whole; False: only the whole

    def low(self, edge: int) -> Self:
        return replace(self, splits=False)


class Tiles(_Split, frozen=True, tag=True, kw_only=True):
    """The image is scaled to a multiple of a crop's edge and cut into crops; a last crop shows the whole image."""

    longest_edge: int  # pixels of the longer edge to which the image is scaled


class Grid(_Split, frozen=True, tag=True, kw_only=True):
    """Like Tiles, but the image is scaled to the number of rows and columns of crops that fits its proportions best."""

    most_crops: int  # largest number of crops besides that of the whole image


class Canvas(_Split, frozen=True, tag=True, kw_only=True):
    """The image keeps its proportions on a black canvas, which is cut into a grid of crops; a last crop shows the whole image."""

    most_crops: int  # largest number of crops besides that of the whole image
    enlarges: bool = False  # whether an image that is smaller than a canvas is enlarged, on the canvas on which it becomes largest


class Capped(Way, frozen=True, tag=True):
    """An image with a longer edge than allowed is reduced, and then both edges are rounded up to multiples of a square's edge."""

    any_size: ClassVar[bool] = True
    longest_edge: int

    def most_squares(self, edge: int) -> int:
        return ceil(self.longest_edge / edge) ** 2

    def low(self, edge: int) -> Self:
        return replace(self, longest_edge=min(self.longest_edge, LOW_EDGE * edge))


class Filled(Way, frozen=True, tag=True):
    """Both edges become multiples of a square's edge, for as many squares as allowed in about these proportions."""

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
    """Both edges of the image become multiples of a square's edge, and nearly keep their proportions."""

    any_size: ClassVar[bool] = True
    least_pixels: int  # an image with fewer pixels is enlarged
    most_pixels: int  # an image with more pixels is reduced
    enlarges_edges: bool = False  # whether an image whose shorter edge is shorter than a square's edge is first enlarged to this edge

    def most_squares(self, edge: int) -> int:
        least, most = (pixels / edge**2 for pixels in (self.least_pixels, self.most_pixels))
        # Edges are rounded up in an image that is enlarged, and to at least one square in one that is reduced.
        enlarged = least + sqrt(least * MOST_RATIO) + sqrt(least / MOST_RATIO) + 1
        return int(max(most, sqrt(most * MOST_RATIO), enlarged))

    def low(self, edge: int) -> Self:
        most = min(self.most_pixels, (LOW_EDGE * edge) ** 2)
        return replace(self, least_pixels=min(self.least_pixels, most), most_pixels=most)


class Mixed(Free, frozen=True, tag=True, kw_only=True):
    """Like Free, but a large image is also cut into a grid of square crops, which precede the crop of the whole image."""

    splits: bool  # whether a large image is cut; False: each image becomes one crop
    least_crops: int  # least number of crops of a large image besides that of the whole
    most_crops: int  # largest number of crops of a large image besides that of the whole
    shows_whole: bool = True  # whether the crop of the whole follows those of a large image
    tile_edge: int  # pixels of an edge of the crops of a large image
    unsplit_pixels: int  # an image with more pixels, when its edges are rounded to squares, is a large one

    def most_squares(self, edge: int) -> int:
        return max(Free.most_squares(self, edge), (self.tile_edge // edge) ** 2)

    def low(self, edge: int) -> Self:
        return replace(self, splits=False)


Fit = Tiles | Grid | Canvas | Stretched | Centre | Free | Capped | Filled | Naflex | Mixed
