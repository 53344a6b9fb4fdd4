"""Read from a request which replica would serve it best, and whether it may be sent twice.

The key chain of a prompt names its beginnings: each key is the digest of the key before it and of the next BLOCK characters. Requests with
a common beginning have common first keys, as with the hashes of pages in the prefix cache. Blocks consist of characters, not tokens,
because the ingress has no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, cast
from urllib.parse import parse_qs

import msgspec

from deploy.ray.body import Body

BLOCK = 256  # characters: about four pages of 16 tokens
MOST_KEYS = 1024
KEY_BYTES = 8

# The fields of a body that become its prompt, in the order in which templates write them. The prompt's pages depend on these fields and on
# the cache salt. A body has one of TURNS.
BEFORE = ("model", "system", "instructions", "tools", "functions")
TURNS = ("messages", "input", "prompt", "contents", "token_ids")
# Fields that name the session of a request, the preferred one first. Requests of a session should go to the same replica.
SESSIONS = ("prompt_cache_key", "session_id", "safety_identifier", "user")

RESPONSES = "/v1/responses"
OF_MODELS = ("/v1/models/", "/v2/models/", "/web/")  # the name of a model follows

# Paths whose requests may be sent again, because they change nothing on the server but counts and stored responses. `read` excludes
# requests that run in the background or call MCP servers.
REPEATABLE = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/render",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/compact",
        "/v1/responses/input_tokens",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v2/embed",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/api/show",
        "/completion",
        "/completions",
        "/infill",
        "/apply-template",
        "/inference/v1/generate",
        "/invocations",
        "/ping",
        "/pooling",
        "/parse_function_call",
        "/separate_reasoning",
        *(f"{root}{name}" for root in ("", "/v1") for name in ("/classify", "/score", "/rerank", "/reranking", "/tokenize", "/detokenize")),
        "/v2/rerank",
    }
)


@dataclass(frozen=True, slots=True)
class Wish:
    """The properties of a request that decide which replica is best for it. Each call that asks for a lease passes the wish to the
    router."""

    keys: tuple[bytes, ...] = ()  # keys of the prompt's beginnings, the shortest first, then the key of the session if there is one
    place: bytes = b""  # `place_of` the replica that must serve the request, because it stores an earlier response; empty: any may
    avoided: frozenset[str] = frozenset()  # replicas that have failed this request
    lost: frozenset[str] = frozenset()  # those of `avoided` that may be gone, so that other requests avoid them, too
    num_blocks: int = 0  # number of keys, from the first on, that stand for blocks of the prompt


@dataclass(frozen=True, slots=True)
class Lease:
    """The address of the server of the replica that gets a request, and another server that may give it pages of its prefix cache."""

    replica: str  # the replica's name
    url: str
    key: str = field(repr=False)  # only with this key does the server accept open values (`server/open_values.py`) and a giver
    giver: str = ""  # address of another server, which has more of the prompt in its cache or is to compute it; empty: there is none
    computes: bool = False  # whether the giver is to compute the prompt first
    num_new: int = 0  # number of blocks of the prompt that no replica is known to have in its cache


@dataclass(frozen=True, slots=True)
class Reading:
    """The facts that the ingress reads from a request: which replica is wanted, which model, and whether the request may be sent twice."""

    wish: Wish = Wish()
    model: str = ""  # the name of the model; empty: the request names none
    repeatable: bool = False  # whether the request may be sent again
    stored: str = ""  # the id of the stored response that the request names; empty: it names none


def read(method: str, path: str, headers: Mapping[str, str], body: Body, query: str = "") -> Reading:
    """Read a request. A body that is wrong is not refused here: the server says what is wrong with it. A request to /v1/responses whose
    body is not decoded may ask to run in the background, so it counts as not repeatable."""
    named = _model_in(path, parse_qs(query))
    stored = path.removeprefix(f"{RESPONSES}/").partition("/")[0] if path.startswith(f"{RESPONSES}/") else ""
    if method in ("GET", "HEAD", "OPTIONS"):
        return Reading(Wish(place=_place_in(stored)), named, repeatable=True, stored=stored)
    fields = body.fields
    model = fields.get("model", fields.get("name") if path.startswith("/api/") else None)
    acts = not body.is_decoded and path == RESPONSES
    acts = (
        acts
        or fields.get("background") is True
        or any(isinstance(tool, dict) and tool.get("type") == "mcp" for tool in _list(fields.get("tools")))
    )
    earlier = fields.get("previous_response_id")
    if path.startswith(RESPONSES) and isinstance(earlier, str):
        stored = earlier
    keys = chain(fields, headers.get("authorization", headers.get("x-api-key", "")))
    num_blocks = len(keys)
    session = headers.get("x-session-id") or next((value for name in SESSIONS if isinstance(value := fields.get(name), str) and value), "")
    if session:
        keys += (blake2b(session.encode(errors="replace"), digest_size=KEY_BYTES, person=b"session").digest(),)
    wish = Wish(keys, _place_in(stored), num_blocks=num_blocks)
    return Reading(wish, model if isinstance(model, str) and model else named, path in REPEATABLE and not acts, stored)


def _model_in(path: str, query: Mapping[str, list[str]]) -> str:
    """Return the name of a model in a path or in its query. Further parts of the path are returned with the name."""
    for root in OF_MODELS:
        if path.startswith(root):
            return path.removeprefix(root)
    return query.get("model", [""])[-1]


def chain(fields: Mapping[str, Any], tenant: str) -> tuple[bytes, ...]:
    """Return the key chain of a request's prompt: a key for each whole block, at most MOST_KEYS. Prompts of different tenants, or with
    different cache salts, have different keys, as their pages have different hashes. The tenant, an API key, may be long, so it is part of
    the first digest and not of the text that is cut into blocks. So is the salt."""
    turns = next((fields[name] for name in TURNS if name in fields), None)
    text = msgspec.json.encode([fields.get(name) for name in BEFORE])
    text += msgspec.json.encode(turns)[: MOST_KEYS * BLOCK]
    keys: list[bytes] = []
    digest = blake2b(msgspec.json.encode([tenant, _salt(fields)]), digest_size=KEY_BYTES).digest()
    for at in range(0, min(len(text), MOST_KEYS * BLOCK) - BLOCK + 1, BLOCK):
        digest = blake2b(digest + text[at : at + BLOCK], digest_size=KEY_BYTES).digest()
        keys.append(digest)
    return tuple(keys)


def _salt(fields: Mapping[str, Any]) -> object:
    """Return the cache salt of a request. A request to `/inference/v1/generate` may also have the salt in its `sampling_params`."""
    salt, params = fields.get("cache_salt"), fields.get("sampling_params")
    return params.get("cache_salt") if salt is None and isinstance(params, dict) else salt


def place_of(replica: str) -> bytes:
    """Return the digest of a replica's name with which all ids begin that its server makes."""
    return blake2b(replica.encode(), digest_size=4).digest()


def _place_in(answer_id: str) -> bytes:
    """Return the replica's place (see `place_of`) in an id such as resp_0123abcd..., or b"" if the id has none."""
    try:
        return bytes.fromhex(answer_id.partition("_")[2][:8])
    except ValueError:
        return b""


def _list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []
