"""The settings of models that hear audio in conversations: the encoder and the connector that turn a recording into rows. The decoder
reads a row in place of a token embedding."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from runtime.hops import tokens_of

if TYPE_CHECKING:
    from compiler.frontend.config import Activation


class Joining(StrEnum):
    """How neighbouring frames become a row of the size of token embeddings."""

    MEAN = "mean"  # their mean is normalised, and projected by one matrix (Qwen2-Audio, Qwen2.5-Omni)
    PERCEPTRON = "perceptron"  # two matrices with an activation between them project each frame to a row (Qwen3-Omni)
    JOINED = "joined"  # they follow each other in one vector, which two matrices with an activation between them project (Voxtral)


@dataclass(frozen=True, slots=True)
class Listening:
    """The encoder of audio, and the connector that turns its results into rows. A recording is encoded in windows."""

    num_mels: int
    num_positions: int  # frames of 20 ms in a window; if windows consist of pieces, the longer frames of a piece
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    merge: int  # frames of 20 ms that become one row; if windows consist of pieces: that make up a longer frame, which becomes one row
    joining: Joining
    audio_token: int  # token whose embeddings the rows replace
    connector_activation: Activation | None = None
    # Whether frames after the end of a recording give no rows, and no frame of the recording attends to them; otherwise the model hears
    # silence up to the end of the window.
    ends: bool = False
    most_windows: int = 0  # maximum number of windows of a recording, whose rest is ignored; 0: any number
    # Whether the encoder reads zeros after the end of a recording; otherwise it reads the spectrogram of silence there, which is not zero.
    is_cut: bool = False
    # Hops of a piece, which three convolutions read apart from other pieces of its window; 0: two convolutions read the window as a whole.
    piece_hops: int = 0
    num_pieces: int = 0  # pieces of a window
    channels: int = 0  # channels of the results of these three convolutions
    # Whether a recording's reflection follows it, and only its whole hops are heard; otherwise silence follows it, and completes a hop.
    reflects: bool = False
    sinusoids: bool = False  # whether vectors of positions are sines and cosines, which no checkpoint has; otherwise they are learned

    @property
    def num_hops(self) -> int:
        """The number of hops of 10 ms in a window. Without pieces, the second convolution makes one frame of two hops."""
        return self.piece_hops * self.num_pieces or 2 * self.num_positions

    @property
    def most_rows(self) -> int:
        """The number of rows, and so of tokens, of a whole window."""
        return tokens_of(self.num_hops, self.merge, self.piece_hops)

    @property
    def num_frames(self) -> int:
        """The number of vectors that a layer computes for a whole window."""
        return self.most_rows if self.piece_hops else self.num_positions

    def sounding_of(self, num_hops: int) -> int:
        """Return the number of hops of a window after which the encoder reads zeros, if `num_hops` of its hops are heard."""
        return num_hops if self.is_cut else self.num_hops

    def frames_of(self, num_hops: int) -> int:
        """Return the number of frames of a window to which its frames attend, if `num_hops` of its hops are heard. This holds for windows
        without pieces."""
        return (num_hops + 1) // 2
