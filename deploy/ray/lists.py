"""Answer a request for the list of models: ask one replica of each pool, and merge the lists. A header names the pools whose models are
missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from deploy.ray.passage import Passage
from deploy.ray.refusal import refusal
from server.api.answer.sse import run_until_disconnect
from server.errors import NO_REPLICA, ApiError

log = logging.getLogger(__name__)

LISTS = {"/v1/models": "data", "/api/tags": "models", "/api/ps": "models"}  # the field with the entries, by path
LIST_S = 5.0  # longest wait for the answer of a pool
MISSING = "x-missing-pools"  # header with the names of the pools whose models a list lacks


@dataclass(slots=True)
class _Answer:
    """Collects the answer that a passage sends."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list[tuple[bytes, bytes]])
    body: bytes = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message["headers"]
        else:
            self.body += message.get("body", b"")


class ModelLists(Response):
    """An ASGI response: the entries that the pools list, each once, with the header MISSING if a pool has given no list. If no pool answers
    with status 200, the response is the answer of the first pool that has answered, or a refusal if none has."""

    def __init__(self, path: str, passages: Mapping[str, Passage | None]) -> None:
        """`passages`: by the name of each pool, the passage that sends the request to the pool, or None if the pool has no replica."""
        super().__init__()
        self._path = path
        self._entries = LISTS[path]
        self._passages = {name: passage for name, passage in passages.items() if passage is not None}
        self._without = [name for name, passage in passages.items() if passage is None]
        for passage in self._passages.values():  # ask for lists that are not compressed, because their JSON is merged
            passage.given = Headers(raw=[(name, value) for name, value in passage.given.raw if name != b"accept-encoding"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_disconnect(self._run(scope, receive, send), receive)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask all pools, and send the merged list. If no pool gives a list, send an answer of a pool or a refusal instead."""
        asked = dict(zip(self._passages, await asyncio.gather(*map(_answer, self._passages.values())), strict=True))
        answers = {name: answer for name, answer in asked.items() if answer is not None}
        if not answers:
            await refusal(self._path, ApiError(NO_REPLICA, self._why))(scope, receive, send)
            return
        listed = {name: answer for name, answer in answers.items() if answer.status == 200}
        chosen = next(iter((listed or answers).values()))
        body = merged([answer.body for answer in listed.values()], self._entries) if listed else chosen.body
        headers = [(name, value) for name, value in chosen.headers if name != b"content-length"]
        if listed:
            headers += self._missing([name for name in asked if name not in listed])
        await send({"type": "http.response.start", "status": chosen.status, "headers": [*headers, (b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _missing(self, failed: Sequence[str]) -> list[tuple[bytes, bytes]]:
        """Return the header that names the pools whose models are missing, if there are any: `failed`, and those without a replica."""
        if failed:
            text = "%s lacks the models of %s, from which no list came with status 200 within %g s"
            log.info(text, self._path, ", ".join(failed), LIST_S)
        names = ", ".join(map(quote, [*failed, *self._without]))
        return [(MISSING.encode(), names.encode())] if names else []

    @property
    def _why(self) -> str:
        if self._passages:
            return f"no replica has answered within {LIST_S:g} s; try again later"
        return "no pool has a replica, and a list starts none; a request that names a model starts one"


async def _answer(passage: Passage) -> _Answer | None:
    """Return the answer of a pool, or None if it does not arrive within LIST_S."""
    answer = _Answer()
    try:
        async with asyncio.timeout(LIST_S):
            await passage.run(answer.send)
    except TimeoutError:
        return None
    return answer


def merged(lists: Sequence[bytes], entries: str) -> bytes:
    """Return a list with the entries of all `lists`, each model once. `entries`: the field that has them."""
    decoded: list[dict[str, Any]] = [msgspec.json.decode(one) for one in lists]
    by_name = {entry.get("id", entry.get("name")): entry for one in reversed(decoded) for entry in reversed(one[entries])}
    found = [*reversed(by_name.values())]
    whole = {**decoded[0], entries: found}
    if "first_id" in whole and found:
        whole |= {"first_id": found[0]["id"], "last_id": found[-1]["id"]}
    return msgspec.json.encode(whole)
