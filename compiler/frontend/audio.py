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

    MEAN = "mean"  # the mean of the frames is normalised, and projected by one matrix (Qwen2-Audio, Qwen2.5-Omni)
    PERCEPTRON = "perceptron"  # two matrices with an activation between them project each frame to a row (Qwen3-Omni)
    JOINED = "joined"  # the frames are joined to one vector, which two matrices with an activation between them project (Voxtral)


@dataclass(frozen=True, slots=True)
class Listening:
    """The encoder of audio, and the connector that turns its results into rows. A recording is encoded in windows."""

    num_mels: int
    num_positions: int  # number of frames of 20 ms in a window; if windows consist of pieces: number of longer frames in a piece
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    merge: int  # number of frames of 20 ms that become one row; if windows consist of pieces, they form one longer frame first
    joining: Joining
    audio_token: int  # token whose embeddings the rows replace
    connector_activation: Activation | None = None
    # Whether frames after the end of a recording give no rows, and no frame of the recording attends to them; otherwise the model hears
    # silence up to the end of the window.
    ends: bool = False
    most_windows: int = 0  # number of windows after which the rest of a recording is ignored; 0: nothing is ignored
    # Whether the encoder reads zeros after the end of a recording; otherwise it reads the spectrogram of silence there, which is not zero.
    is_cut: bool = False
    # Number of hops of a piece. Three convolutions read each piece of a window separately. 0: two convolutions read the whole window.
    piece_hops: int = 0
    num_pieces: int = 0  # number of pieces in a window
    channels: int = 0  # number of channels of the results of the three convolutions over a piece
    # Whether a recording is followed by its reflection, and an incomplete last hop is dropped; otherwise silence follows the recording and
    # completes the last hop.
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
        """Return after how many hops of a window the encoder reads zeros, if the recording fills the first `num_hops` hops."""
        return num_hops if self.is_cut else self.num_hops

    def frames_of(self, num_hops: int) -> int:
        """Return how many frames of a window belong to the recording, if it fills the first `num_hops` hops. These frames attend only to
        each other. Call this only for windows without pieces."""
        return (num_hops + 1) // 2
