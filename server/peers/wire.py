"""The protocol by which one server asks another for the cache pages of a prompt. Both servers prove that they know a secret.

    taker -> giver    POST /internal/pages: an Ask as JSON; the header `x-relaxserve-peer` has the digest of the body and its proof
    giver -> taker    a stream of frames: an Offer as MessagePack, then the pages that it names

A frame is four little-endian bytes with the length of its payload, a proof, and the payload. A proof is a keyed BLAKE2b hash. The proof of
a frame covers the payload, the nonce of the Ask and the number of the frame, so frames of other answers fail the check. An Ask states when
it was sent, and is refused if that time is too long ago or too far in the future. A page is the bytes that `KVPool.read_page` returns. An
Ask names pages by the digests of `server/engine/scheduling/page_pool.py`. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import merge
from itertools import repeat
from typing import Annotated

import msgspec

from runtime.cache_groups import PAGE_SIZE

PATH = "/internal/pages"
PROOF_HEADER = "x-relaxserve-peer"
DIGEST_BYTES = 16
PROOF_BYTES = 32
NONCE_BYTES = 16
HEAD = struct.Struct(f"<I{PROOF_BYTES}s")
FRAME_BYTES = 256 << 10  # a giver adds pages to a frame until the frame has at least so many bytes
MOST_GIVINGS = 8  # maximum number of requests of other servers to which a server gives pages at a time
SKEW_S = 30.0  # by how much the clocks of two servers may differ
FORM = re.compile(rf"([0-9a-f]{{{2 * PROOF_BYTES}}}) ([0-9a-f]{{{2 * PROOF_BYTES}}})", re.ASCII)

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request of one server (the taker) to another (the giver) for the pages of a prompt that the taker does not hold."""

    fingerprint: str  # fingerprint of the taker's model; the giver's model must have the same one
    page_bytes: tuple[Count, ...]  # size of a page of each cache group
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    digests: bytes  # the digests of the prompt's blocks of PAGE_SIZE tokens, one after the other
    num_held: Count  # number of tokens whose pages the taker holds
    limit_s: Annotated[float, msgspec.Meta(gt=0, le=3600)]  # how long the taker waits
    sent_s: float  # seconds since 1970 by the taker's clock
    prompt_ids: bytes = b""  # tokens as little-endian i32, if the giver is to compute the prompt first
    # with the next three fields, the giver computes the prompt as it would for the taker's request
    cache_salt: str = ""
    fairness_key: str = ""
    priority: int = 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens whose pages are named."""
        return len(self.digests) // DIGEST_BYTES * PAGE_SIZE

    @property
    def most_frame_bytes(self) -> int:
        """The largest frame of an answer: a giver sends a frame as soon as the frame has FRAME_BYTES."""
        return FRAME_BYTES + max(self.page_bytes, default=0)

    def fault(self, now_s: float) -> str:
        """Return why the time at which an ask was sent is not valid: it is too long ago, or too far in the future. Return "" if it is
        valid. Without this check, whoever has recorded an ask could send it again at any time."""
        age_s = now_s - self.sent_s
        if -SKEW_S <= age_s <= self.limit_s + SKEW_S:
            return ""
        most = f"expected at most {self.limit_s + SKEW_S:g} s, or {SKEW_S:g} s in the future"
        return f"sent_s is {self.sent_s:.1f}, which is {age_s:.1f} s ago by this server's clock; {most}: set the clocks of both servers"


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """The giver's answer: which pages follow. The taker needs these pages to continue the prompt after `num_tokens` tokens."""

    num_tokens: Count
    firsts: tuple[Count, ...]  # for each cache group, the index of the first page that follows

    def order(self, page_sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the pages in the order in which they are sent, as pairs of cache group and index. They are ordered by the position of their
        last token, so that the taker can use the beginning of the prompt if the rest does not arrive."""
        groups = [zip(repeat(group), range(self.firsts[group], self.num_tokens // size)) for group, size in enumerate(page_sizes)]
        return merge(*groups, key=lambda page: ((page[1] + 1) * page_sizes[page[0]], page[0]))


class PeerFault(Exception):
    """Raised if the other server has not sent the pages that this server asked for. The message says why."""


@dataclass(frozen=True, slots=True)
class Proofs:
    """Makes and checks the proofs of the messages between servers that have the same secret."""

    secret: str = field(repr=False)

    def head_of(self, body: bytes) -> str:
        """Return the value of PROOF_HEADER for an Ask with this body."""
        digest = digest_of(body)
        return f"{digest} {self._of(b'ask', digest.encode()).hex()}"

    def proves(self, header: str) -> bool:
        """Return whether the sender of an Ask knows the secret. This works before the body is read, because the proof covers the digest of
        the body."""
        found = FORM.fullmatch(header)
        return found is not None and hmac.compare_digest(self._of(b"ask", found[1].encode()).hex(), found[2])

    def frame(self, nonce: bytes, number: int, payload: bytes) -> bytes:
        """Return a frame. `number` is its number in the answer to the Ask with this nonce."""
        return HEAD.pack(len(payload), self._of_frame(nonce, number, payload)) + payload

    def check_frame(self, nonce: bytes, number: int, payload: bytes | bytearray, proof: bytes) -> None:
        """Raise PeerFault if the proof of a frame is wrong."""
        if not hmac.compare_digest(self._of_frame(nonce, number, payload), proof):
            raise PeerFault("it sent a frame whose proof is wrong: the bytes have changed on the way, or it has another secret")

    def _of_frame(self, nonce: bytes, number: int, payload: bytes | bytearray) -> bytes:
        """Return the proof of a frame."""
        return self._of(b"frame", nonce + number.to_bytes(8, "little"), payload)

    def _of(self, role: bytes, *parts: bytes | bytearray) -> bytes:
        """Return the proof of some bytes. `role` says what they are."""
        key = blake2b(self.secret.encode(), digest_size=64, person=b"relaxserve pages").digest()
        proof = blake2b(key=key, digest_size=PROOF_BYTES, person=role)
        for part in parts:
            proof.update(part)
        return proof.digest()


def digest_of(body: bytes) -> str:
    """Return the digest of a body, which its proof covers."""
    return blake2b(body, digest_size=PROOF_BYTES).hexdigest()


def digests_in(data: bytes) -> list[bytes]:
    """Return the digests that an Ask has one after the other. An incomplete digest at the end is left out."""
    return [data[at : at + DIGEST_BYTES] for at in range(0, len(data) - DIGEST_BYTES + 1, DIGEST_BYTES)]


encode_ask = msgspec.json.Encoder().encode
decode_ask = msgspec.json.Decoder(Ask).decode
encode_offer = msgspec.msgpack.Encoder().encode
decode_offer = msgspec.msgpack.Decoder(Offer).decode
