"""The settings of vision models: how an image is cut into crops, and the encoder and the connector that turn crops into rows. The decoder
reads a row in place of a token embedding. In a model that embeds images, a row is the vector of an image."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from runtime.fits import Fit

if TYPE_CHECKING:
    from compiler.frontend.config import Activation

MOST_PATCHES = 4096  # largest number of patches in a call of `see`, unless one crop has more; a higher limit would only need a larger arena
MOST_CROPS = 4  # largest number of crops in a call of `see`; a higher limit would only need a larger arena
NO_TOKEN = -1  # `Vision.image_token` of a model that embeds images, whose texts have no image tokens


class Tower(StrEnum):
    """The kind of the encoder."""

    SIGLIP = "siglip"
    CLIP = "clip"  # has a class token before the patches, and a norm before the layers
    INTERN = "intern"  # has a class token before the patches, and learned scales of the outputs of attention and MLP
    QWEN2 = "qwen2"  # crops of any size, with RoPE by row and column
    QWEN2_5 = "qwen2_5"  # like QWEN2 with windows, and with the norms and the gated MLP of decoders
    OMNI = "omni"  # like QWEN2_5, with separate matrices for queries, keys and values
    PIXTRAL = "pixtral"  # crops of any size, with the norms and the gated MLP of decoders
    QWEN3 = "qwen3"  # like QWEN2 with a table of positions, and with the results of several layers in a row
    GEMMA4 = "gemma4"  # crops of any size, with a RoPE for each half of a head, and norms before and after attention and MLP
    SIGLIP2 = "siglip2"  # crops of any size, with the layers of SIGLIP, and a table of positions that is scaled to each crop
    GLM4V = "glm4v"  # like QWEN2_5 without windows, with a table of positions as in SIGLIP2, and a convolution over squares at the end
    LLAMA4 = "llama4"  # has a class token after the patches and a norm before the layers, and RoPE by row and column


class Connector(StrEnum):
    """How the results of the encoder become rows of the size of token embeddings."""

    JOINED = "joined"  # the patches of a square follow each other in one row, which one matrix projects (Idefics3)
    AVERAGED = "averaged"  # the mean of the patches of a square is normalised, and projected by one matrix (Gemma 3 and 4)
    # two matrices with an activation between them project each patch (LLaVA), or joined patches after a norm (InternVL)
    PERCEPTRON = "perceptron"
    CLASS = "class"  # one matrix projects the class token, which stands for the whole crop (CLIP)
    ADAPTER = "adapter"  # a perceptron that ends with an activation, and one more matrix, project joined patches (Llama 4)
    PROBE = "probe"  # a learned query attends to all patches, and the result stands for the whole crop (SigLIP)


@dataclass(frozen=True, slots=True)
class Cutting:
    """How an image becomes crops, and how the bytes of their pixels become numbers."""

    fit: Fit
    filter: int  # number of the filter in Pillow by which images are scaled
    rescale: float  # factor that multiplies the bytes of a pixel
    mean: tuple[float, ...]  # per colour: subtracted from the scaled value
    deviation: tuple[float, ...]  # per colour: divides the difference


@dataclass(frozen=True, slots=True)
class Vision:
    """The encoder of images, and the connector that turns its results into rows of the size of token embeddings. In the comments below,
    "with any size" means: if crops may have any size, so that a crop consists of squares of patches."""

    tower: Tower
    crop_size: int  # pixels of an edge of a crop; with any size, of an edge of a square
    patch_size: int  # pixels of an edge of a patch
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: Activation
    norm_eps: float
    connector: Connector
    merge: int  # edge, in patches, of the square of patches that becomes one row
    image_token: int  # token whose embeddings the rows replace, or NO_TOKEN
    cutting: Cutting
    last_norm: bool = True  # whether a norm follows the layers
    qkv_bias: bool = True
    connector_activation: Activation | None = None  # activation between the two matrices of a perceptron
    connector_bias: bool = True
    connector_norm: bool = False  # whether a norm precedes the matrices of a perceptron
    connector_size: int = 0  # size of the vectors between the matrices of a connector; 0: the hidden size of the decoder
    marker: str = ""  # text that the chat template writes for an image; empty: the text of the image token
    around: tuple[str, str] = ("", "")  # texts before and after the tokens of an image that is not cut into tiles
    between: str = ""  # with any size: text of the token between two rows of tokens; empty: there is none
    num_frames: int = 0  # number of frames in the matrix of patches; all are the same image; 0: the matrix has no axis of frames
    theta: float = 10_000.0  # base of RoPE by row and column, in encoders that have it
    window: int = 0  # with any size: edge, in squares, of the windows in which patches attend to each other; 0: there are none
    whole_layers: frozenset[int] = frozenset()  # with windows: layers in which patches attend to all patches of their crop
    # With any size: the number of rows of patches, and of columns, for which there are learned vectors of positions; 0: there are none.
    table_edge: int = 0
    clips: bool = False  # whether the checkpoint has ranges to which inputs and outputs of matrices are clipped
    standardizes: bool = False  # whether averaged patches are shifted and scaled by two vectors of the checkpoint
    # Layers whose results become further vectors in a token's row. The decoder adds these vectors to its residual stream after its first
    # layers (DeepStack).
    deep_layers: tuple[int, ...] = ()
    three_axes: bool = False  # whether the decoder's RoPE also uses the row and the column of an image token
    both_ways: bool = False  # whether the tokens of an image attend to all tokens of this image, also to later ones
    windows_only: bool = False  # with `both_ways`: only in layers with a window
    at_once: int = MOST_CROPS  # largest number of crops in a call of `see`
    is_optional: bool = False  # whether a folder without the file of the image processor is served as a model that only reads text

    @property
    def num_depths(self) -> int:
        """The number of vectors of the decoder's hidden size in a row."""
        return 1 + len(self.deep_layers)

    @property
    def patches_per_edge(self) -> int:
        return self.crop_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """The number of patches of a crop; if crops may have any size, of a square."""
        return self.patches_per_edge**2

    @property
    def num_places(self) -> int:
        """The number of vectors of a crop in the encoder: its patches, and a class token if there is one."""
        return self.num_patches + self.has_class

    @property
    def has_class(self) -> bool:
        return self.tower in (Tower.CLIP, Tower.INTERN, Tower.LLAMA4)

    @property
    def scales_table(self) -> bool:
        """Whether the table of positions is scaled to each crop, so that a patch's position vector is a weighted sum of the whole table."""
        return self.tower in (Tower.SIGLIP2, Tower.GLM4V)

    @property
    def is_whole(self) -> bool:
        """Whether a row stands for a whole crop, as in models that embed images."""
        return self.connector in (Connector.CLASS, Connector.PROBE)

    @property
    def any_size(self) -> bool:
        """Whether crops may have any size; otherwise they are squares with edges of `crop_size` pixels."""
        return self.cutting.fit.any_size

    @property
    def most_squares(self) -> int:
        """The largest number of squares of which a crop consists, 1 unless crops may have any size."""
        return self.cutting.fit.most_squares(self.crop_size)

    @property
    def num_rows(self) -> int:
        """The number of rows, and so of tokens, of a crop; if crops may have any size, of a square."""
        return self.num_patches // self.merge**2
