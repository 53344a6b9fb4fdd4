"""POST /internal/pages: give pages of a prefix cache to another server of the fleet, which proves that it knows the same secret."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from server.api.answer.respond import while_connected
from server.api.context import Context, caller
from server.api.routes import new_router
from server.errors import DEADLINE_EXCEEDED, FINGERPRINT_MISMATCH, INVALID_API_KEY, INVALID_VALUE, QUEUE_FULL, ApiError
from server.http.auth import Access
from server.interfaces import RequestError
from server.messages import IDLE, GivePages, SamplingParams, Submit
from server.models.model import Loaded
from server.peers.wire import MOST_GIVINGS, PATH, PROOF_HEADER, Ask, Proofs, decode_ask, digest_of, encode_offer
from server.secret_file import read_secret

log = logging.getLogger(__name__)

MOST_GIVING_S = 600.0  # longest time that a stream of pages may take, whatever limit the other server names
AHEAD_BYTES = 16 << 20  # most bytes of pages that wait in this process to be sent to one other server; one frame may wait whatever its size


def router(context: Context) -> APIRouter:
    routes = new_router("Operation")
    file = context.settings.peer_secret_file
    if file is None:
        return routes
    proofs, places = Proofs(read_secret(file, "peer_secret_file")), asyncio.Semaphore(MOST_GIVINGS)

    @routes.post(PATH, include_in_schema=False)
    async def give(request: Request) -> Response:
        """Send those pages of a prompt that this server holds and the other server lacks. If the body, which is an `Ask`, has the prompt's
        tokens, compute the prompt first. Raise ApiError if the ask has no valid proof or is invalid, if no model of this server matches it,
        while this server answers MOST_GIVINGS other asks, if the model's queue is full, or if the prompt cannot be computed while the other
        server waits."""
        body = await request.body()
        digest = request.headers.get(PROOF_HEADER, "").partition(" ")[0]
        if caller(request).access is not Access.PEER or digest != digest_of(body):
            raise ApiError(INVALID_API_KEY, f"{PROOF_HEADER} proves another body than the one that was sent")
        ask = _ask_in(body)
        loaded = _model_of(context, ask)
        if ask.num_tokens > (most := (loaded.worker.ready or loaded.ready).max_context):
            raise ApiError(INVALID_VALUE, f"digests has the pages of {ask.num_tokens} tokens; expected at most max_context, {most}")
        if places.locked():
            raise ApiError(QUEUE_FULL, f"this server gives pages to {MOST_GIVINGS} other requests; compute the prompt")
        arrived_s = caller(request).arrived_s
        if ask.prompt_ids:
            await while_connected(request, _compute(loaded, ask))
            if (took_s := time.monotonic() - arrived_s) >= ask.limit_s:
                text = f"the prompt was computed after {took_s:.3g} s; expected at most limit_s, {ask.limit_s:g} s: start more such servers"
                raise ApiError(DEADLINE_EXCEEDED, text)
        return _Pages(_frames(loaded, ask, proofs, places), arrived_s + ask.limit_s)

    return routes


class _Pages(StreamingResponse):
    """A stream of frames. The stream ends when the other server no longer waits for pages, and at the latest after MOST_GIVING_S. Otherwise
    a server that does not read its stream would count among MOST_GIVINGS forever."""

    def __init__(self, frames: AsyncGenerator[bytes, None], end_s: float) -> None:
        """`end_s`: the time of the monotonic clock until which the other server waits."""
        super().__init__(frames, media_type="application/octet-stream")
        self._frames = frames
        self._limit_s = min(end_s - time.monotonic(), MOST_GIVING_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, and end it once its time is over."""
        try:
            async with aclosing(self._frames), asyncio.timeout(self._limit_s):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            log.warning("a server that asked for pages has not read all of them within %.3g s; their stream ends", self._limit_s)


def _ask_in(body: bytes) -> Ask:
    """Return the ask in a body. Raise ApiError if the ask is not valid, or if its time is too far in the past or the future."""
    try:
        ask = decode_ask(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(INVALID_VALUE, f"the body is no ask for pages: {error}") from error
    if fault := ask.fault(time.time()):
        raise ApiError(INVALID_VALUE, fault)
    if ask.prompt_ids and len(ask.prompt_ids) != 4 * ask.num_tokens:
        raise ApiError(INVALID_VALUE, f"prompt_ids has {len(ask.prompt_ids)} bytes; expected 4 for each of {ask.num_tokens} tokens")
    return ask


def _model_of(context: Context, ask: Ask) -> Loaded:
    """Return the model with the fingerprint and the page sizes that the other server asks for. Raise ApiError if no such model serves or if
    such a model sleeps."""
    found: list[str] = []
    for model in context.registry.models():
        if model.loaded is not None and model.is_serving and not model.is_sleeping:
            ready = model.loaded.worker.ready or model.loaded.ready
            sizes = tuple(group.page_bytes for group in ready.cache_groups)
            if ready.fingerprint == ask.fingerprint and sizes == ask.page_bytes:
                return model.loaded
            found.append(f"{model.spec.name} ({ready.fingerprint}, pages of {'+'.join(map(str, sizes))} bytes)")
    wanted = f"{ask.fingerprint!r:.80} with pages of {'+'.join(map(str, ask.page_bytes[:16]))} bytes"
    raise ApiError(FINGERPRINT_MISMATCH, f"no model here is {wanted}; here are {', '.join(found) or 'none'}: give both servers one model")


async def _compute(loaded: Loaded, ask: Ask) -> None:
    """Compute the prompt and one token, so that the prompt's pages are in the cache. Raise ApiError if the queue is full, or if the prompt
    cannot be computed."""
    prompt_ids = tuple(np.frombuffer(ask.prompt_ids, "<i4").tolist())
    lease = loaded.admission.admit(1, len(prompt_ids), is_idle=ask.priority == IDLE)
    submit = Submit(
        f"pages-{secrets.token_hex(12)}",
        prompt_ids,
        SamplingParams(max_tokens=1, temperature=0.0),
        priority=ask.priority,
        fairness_key=ask.fairness_key,
        cache_salt=ask.cache_salt,
        deadline=time.monotonic() + ask.limit_s,
    )
    try:
        async with aclosing(loaded.worker.generate(submit)) as events:
            async for _ in events:
                lease.prefilled()
    except RequestError as error:
        raise ApiError(INVALID_VALUE, f"the prompt cannot be computed here: {error.message}") from error
    finally:
        lease.release()


async def _frames(loaded: Loaded, ask: Ask, proofs: Proofs, places: asyncio.Semaphore) -> AsyncGenerator[bytes, None]:
    """Yield the frames with the offer (which pages follow) and with the pages. Each frame has a proof. Wait for one of `places` before
    asking the worker for pages."""
    num_frames = max(1, AHEAD_BYTES // ask.most_frame_bytes)
    asked = GivePages(f"pages-{secrets.token_hex(12)}", ask.digests, ask.num_held, num_frames)
    number = 0
    async with places, aclosing(loaded.worker.give(asked)) as answers:
        async for given in answers:
            payload = given.data if given.offer is None else encode_offer(given.offer)
            if payload:
                yield await asyncio.to_thread(proofs.frame, ask.nonce, number, payload)
                number += 1
