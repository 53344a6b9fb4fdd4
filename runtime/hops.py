"""Compute the number of tokens of a clip from its number of hops (a hop is 10 ms). The compiler plans this number of rows, and the server
writes this number of tokens into a prompt."""

from __future__ import annotations


def tokens_of(num_hops: int, frames_each: int, piece_hops: int) -> int:
    """Return the number of tokens of a clip. Two hops, or a single one at the end, make a frame, and `frames_each` frames make a token.
    Frames at the end that do not fill a token are dropped. If `piece_hops` is not 0, the encoder reads pieces of this number of hops
    separately: each piece has its own tokens, and frames at the end of a piece that do not fill a token still make one."""
    if not piece_hops:
        return (num_hops + 1) // 2 // frames_each
    whole, rest = divmod(num_hops, piece_hops)
    return whole * -(-piece_hops // (2 * frames_each)) + -(-rest // (2 * frames_each))
