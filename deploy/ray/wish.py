"""Read from a request which replica would serve it best, and whether it may be sent twice.

The key chain of a prompt names its beginnings: each key is the digest of the key before it and of the next BLOCK characters. Requests with
a common beginning have common first keys, as pages of the prefix cache have. Characters stand for tokens: the ingress has no tokenizer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, cast

import msgspec

from server.api.request.uploads import SLOWEST
from server.errors import ApiError
from server.http.json_scan import JsonScan

BLOCK = 256  # characters: about four pages of 16 tokens
MOST_KEYS = 1024
MOST_BODY_BYTES = 64 << 20  # servers have limits of their own
BODY_S = 30.0  # for the arrival of a body, with 1 s more for each SLOWEST bytes of it
KEY_BYTES = 8

# The fields of a body that become its prompt, in the order in which templates write them.
BEFORE = ("model", "system", "instructions", "tools", "functions")
TURNS = ("messages", "input", "prompt", "contents", "token_ids")
SESSIONS = ("prompt_cache_key", "session_id", "safety_identifier", "user")

# Paths whose requests only compute: sending one again changes nothing but the counts.
REPEATABLE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/completion",
    "/completions",
    "/chat/completions",
    "/infill",
    "/inference/v1/generate",
)


class BodyTooLarge(Exception):
    """The body of a request has more bytes than the ingress keeps."""


class BodyTooLate(Exception):
    """The body of a request arrives too slowly, or not at all."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Passed to the router with each lease."""

    keys: tuple[bytes, ...] = ()  # of the prompt's beginnings, the shortest first; the session's key is the last
    place: bytes = b""  # of the replica that must serve it, because it stores an earlier response
    avoided: frozenset[str] = frozenset()  # replicas that have failed this request
    num_blocks: int = 0  # number of keys, from the first on, that stand for blocks of the prompt


@dataclass(frozen=True, slots=True)
class Lease:
    """Where a replica's server is, and another server that may give it pages."""

    replica: str  # the replica's name
    url: str
    key: str = field(repr=False)  # the server accepts open values, and the name of a giver, only with this key
    giver: str = ""  # address of another server, which has more of the prompt in its cache or is to compute it; empty: there is none
    computes: bool = False  # whether the giver is to compute the prompt first
    num_new: int = 0  # number of blocks of the prompt that no replica is known to have in its cache


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of reading a body: which replica is wanted, which model, and whether the request may be sent twice."""

    wish: Wish = Wish()
    model: str = ""
    repeatable: bool = False


async def receive(pieces: AsyncIterable[bytes]) -> tuple[bytes, bool]:
    """Receive a body. Return also whether decoding it is quick. Raise BodyTooLarge if it has more than MOST_BODY_BYTES, and
    BodyTooLate if it does not arrive in time."""
    body, scan, began_s = bytearray(), JsonScan(), asyncio.get_running_loop().time()
    is_quick = True
    try:
        async with asyncio.timeout(BODY_S) as limit:
            async for piece in pieces:
                body += piece
                if len(body) > MOST_BODY_BYTES:
                    raise BodyTooLarge(f"the body is larger than {MOST_BODY_BYTES} bytes")
                limit.reschedule(began_s + BODY_S + len(body) / SLOWEST)
                if is_quick:
                    try:
                        scan.feed(piece)
                    except ApiError:  # the server refuses such JSON with the reason; other bodies, such as audio, may look like it
                        is_quick = False
    except TimeoutError:
        text = f"after {len(body)} bytes, the body is late; expected all of it within {BODY_S:g} s and 1 s more for each {SLOWEST} bytes"
        raise BodyTooLate(f"{text}: send it faster") from None
    return bytes(body), is_quick


def read(method: str, path: str, headers: Mapping[str, str], body: bytes, *, is_quick: bool = True) -> Reading:
    """Read a request. A body that is no JSON object, or that takes long to decode, has no keys; the server says what is wrong with it."""
    if method in ("GET", "HEAD", "OPTIONS"):
        return Reading(
            Wish(place=_place_in(path.removeprefix("/v1/responses/")) if path.startswith("/v1/responses/") else b""), repeatable=True
        )
    try:
        fields = msgspec.json.decode(body) if is_quick else {}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        fields = {}
    if not isinstance(fields, dict):
        fields = {}
    fields = cast("dict[str, Any]", fields)
    model = fields.get("model")
    acts = not is_quick and path == "/v1/responses"
    acts = (
        acts
        or fields.get("background") is True
        or any(isinstance(tool, dict) and tool.get("type") == "mcp" for tool in _list(fields.get("tools")))
    )
    earlier = fields.get("previous_response_id")
    place = _place_in(earlier) if isinstance(earlier, str) else _place_in(path.removeprefix("/v1/responses/"))
    keys = chain(fields, headers.get("authorization", headers.get("x-api-key", "")))
    num_blocks = len(keys)
    session = headers.get("x-session-id") or next((value for name in SESSIONS if isinstance(value := fields.get(name), str) and value), "")
    if session:
        keys += (blake2b(session.encode(errors="replace"), digest_size=KEY_BYTES, person=b"session").digest(),)
    wish = Wish(keys, place if path.startswith("/v1/responses") else b"", num_blocks=num_blocks)
    return Reading(wish, model if isinstance(model, str) else "", path in REPEATABLE and not acts)


def chain(fields: Mapping[str, Any], tenant: str) -> tuple[bytes, ...]:
    """Return the key chain of a request's prompt. Prompts of other tenants have other keys, as their pages have."""
    turns = next((fields[name] for name in TURNS if name in fields), None)
    text = msgspec.json.encode([tenant, *(fields.get(name) for name in BEFORE)])
    text += msgspec.json.encode(turns)[: MOST_KEYS * BLOCK]
    keys: list[bytes] = []
    digest = b""
    for at in range(0, min(len(text), MOST_KEYS * BLOCK) - BLOCK + 1, BLOCK):
        digest = blake2b(digest + text[at : at + BLOCK], digest_size=KEY_BYTES).digest()
        keys.append(digest)
    return tuple(keys)


def place_of(replica: str) -> bytes:
    """Return the digest of a replica's name that begins the ids which its server makes."""
    return blake2b(replica.encode(), digest_size=4).digest()


def _place_in(answer_id: str) -> bytes:
    """Return the place in an id such as resp_0123abcd..."""
    try:
        return bytes.fromhex(answer_id.partition("_")[2][:8])
    except ValueError:
        return b""


def _list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []
