"""Say how many tokens the hops of a clip have. The compiler plans rows by it, and the server writes as many tokens into a prompt."""

from __future__ import annotations


def tokens_of(num_hops: int, frames_each: int, piece_hops: int) -> int:
    """Return the number of tokens of a clip. Two hops are a frame, and `frames_each` frames a token. A rest that fills no token has none.
    If an encoder reads pieces of `piece_hops` hops apart from each other, each piece has its own tokens, and a rest of it has one."""
    if not piece_hops:
        return (num_hops + 1) // 2 // frames_each
    whole, rest = divmod(num_hops, piece_hops)
    return whole * -(-piece_hops // (2 * frames_each)) + -(-rest // (2 * frames_each))
