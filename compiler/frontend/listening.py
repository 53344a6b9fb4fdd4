"""The program `listen` of a model that hears audio in conversations, which turns a window of a recording into rows. The step reads the rows
in place of the embeddings of audio tokens.

    listen(frame_ids[n, m], ends[groups], samples[s], loudest[1, 1], sounding[hops, 1]) -> rows[n, hidden size]

A call computes `n` rows of one window, each from `m` frames. The samples cover the hops of these frames and one further hop, which the last
frame reads beside its own hops. `sounding` has a factor for the spectrogram of each hop: 1 in the window, and 0 for the further hop if it
is after the window. In Qwen2.5-Omni and Qwen3-Omni, `sounding` is also 0 for all hops after the end of the recording. In Qwen2.5-Omni, the
second convolution reads zeros for these hops, too. `loudest` is the largest energy of the whole recording: energies below a fixed fraction
of it are raised to this fraction. Frames of one group attend to each other: `frame_ids` has the group of each frame, and `ends` the index
after the last frame of each group. Frames after the end of a recording are in a group of their own, unless the model reads silence up to
the end of the window. A row depends only on its own window.

In Qwen3-Omni, a call computes `n` whole pieces of a window (`layers/audio_pieces.py`). A piece has `m` frames, and each frame becomes one
row, so there are n * m rows. In such a call, the samples cover no further hop.
"""

from __future__ import annotations

from typing import assert_never

import numpy as np

from compiler.frontend.audio import Joining, Listening
from compiler.frontend.config import ModelConfig
from compiler.frontend.layers.audio import POSITIONS, AudioLayers, log_mel
from compiler.frontend.layers.audio_pieces import Pieces
from compiler.frontend.layers.decoder import plain_activation
from compiler.frontend.layers.nn import Net, WeightFormat, prefix_of
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Constant, Var
from compiler.ir.types import tensor
from compiler.ops.attention.ragged import RAGGED_ATTENTION
from compiler.ops.manipulate import CONCAT
from runtime.spectrogram import AROUND, HOP

ENTRY = "listen"
ENCODERS = ("model.audio_tower.", "audio_tower.")  # beginnings of the names of weights, in newer and in older files
CONNECTORS = ("model.multi_modal_projector.", "multi_modal_projector.", "model.audio_tower.projector.", "audio_tower.projector.")
NEXT = 1  # number of further hops that a call reads after those of its frames


def listens(name: str) -> bool:
    """Return whether the tensor with this name belongs to an encoder of audio in conversations. A connector outside the encoder does not
    count, since connectors of images have the same names."""
    return name.startswith(ENCODERS)


def add_listening(net: Net, config: ModelConfig) -> None:
    """Add the program `listen` to the module that `net` builds."""
    listening = config.listening
    assert listening is not None
    i32, f32 = DType.I32, DType.F32
    if listening.piece_hops:
        pieces = Dim.of(DimVar("n", 1, listening.num_pieces))
        n, num_hops, ids = pieces * listening.num_positions, pieces * listening.piece_hops, (pieces, listening.num_positions)
    else:
        n = Dim.of(DimVar("n", 1, listening.most_rows))
        num_hops, ids = 2 * listening.merge * n + NEXT, (n, listening.merge)
    samples = Var("samples", tensor((HOP * num_hops + AROUND,), f32))
    loudest = Var("loudest", tensor((1, 1), f32))
    sounding = Var("sounding", tensor((num_hops, 1), f32))
    frame_ids = Var("frame_ids", tensor(ids, i32))
    ends = Var("ends", tensor((DimVar("groups", 1, 2),), i32))
    with net.function(ENTRY, (frame_ids, ends, samples, loudest, sounding)):
        spectrogram = log_mel(net, listening.num_mels, num_hops, samples, loudest, sounding)
        net.builder.returns(_rows(net, config, listening, spectrogram, sounding, n, frame_ids, ends))


def _rows(net: Net, config: ModelConfig, listening: Listening, x: Var, sounding: Var, n: Dim, frame_ids: Var, ends: Var) -> Var:
    """Return the rows, [n, hidden size], from the spectrogram `x`: apply the encoder, and then the connector."""
    size, frames = listening.hidden_size, n if listening.piece_hops else listening.merge * n
    encoder, connector = (
        next(filter(None, (prefix_of(net.dtypes, prefix) for prefix in known)), known[0]) for known in (ENCODERS, CONNECTORS)
    )
    # Arithmetic, not reading weights, limits the speed of the encoder, so weights of fewer bits would only cost precision.
    format = WeightFormat(32 if net.format.bits == 32 else 16)
    layers = AudioLayers(
        net, encoder, size, listening.num_heads, listening.intermediate_size, format, POSITIONS if listening.sinusoids else ""
    )
    frame_ids, starts = net.reshape(frame_ids, frames), net.call(CONCAT, Constant(np.zeros(1, np.int32)), ends, axis=0)
    if listening.piece_hops:
        x = Pieces(layers, listening, frames // listening.num_positions).embedded(x)
    else:
        x = layers.embedded(x, listening.num_mels, frames, listening.num_positions, sounding if listening.is_cut else None)
    scale = (size // listening.num_heads) ** -0.5

    def attend(queries: Var, keys: Var, values: Var) -> Var:
        return net.call(RAGGED_ATTENTION, queries, keys, values, frame_ids, starts, scale=scale)

    for number in range(listening.num_layers):
        x = layers.layer(x, number, frames, attend)
    match listening.joining:
        case Joining.MEAN:
            joined = net.reshape(x, n, listening.merge * size)
            parts = [net.slice(joined, 1, part * size, (part + 1) * size) for part in range(listening.merge)]
            total = parts[0]
            for part in parts[1:]:
                total = net.add(total, part)
            mean = layers.normalised(net.scale(total, 1 / listening.merge))
            return net.linear(mean, f"{connector}linear", size, config.hidden_size, bias=True, format=format)
        case Joining.JOINED:
            assert listening.connector_activation is not None
            joined = net.reshape(layers.normalised(x), n, listening.merge * size)
            wide = net.linear(joined, f"{connector}linear_1", listening.merge * size, config.hidden_size, format=format)
            active = plain_activation(net, listening.connector_activation, wide)
            return net.linear(active, f"{connector}linear_2", config.hidden_size, config.hidden_size, format=format)
        case Joining.PERCEPTRON:
            assert listening.connector_activation is not None
            wide = net.linear(layers.normalised(x), f"{connector}linear_1", size, size, bias=True, format=format)
            active = plain_activation(net, listening.connector_activation, wide)
            return net.linear(active, f"{connector}linear_2", size, config.hidden_size, bias=True, format=format)
        case _:
            assert_never(listening.joining)
