"""Compute the number of tokens of a clip from its number of hops (of 10 ms). The compiler plans that many rows, and the server writes that
many tokens into a prompt."""

from __future__ import annotations


def tokens_of(num_hops: int, frames_each: int, piece_hops: int) -> int:
    """Return the number of tokens of a clip. Two hops make a frame, and `frames_each` frames make a token. Frames at the end that do not
    fill a token make none. If the encoder reads pieces of `piece_hops` hops separately (0: it does not), each piece has its own tokens, and
    frames at the end of a piece that do not fill a token make one."""
    if not piece_hops:
        return (num_hops + 1) // 2 // frames_each
    whole, rest = divmod(num_hops, piece_hops)
    return whole * -(-piece_hops // (2 * frames_each)) + -(-rest // (2 * frames_each))
