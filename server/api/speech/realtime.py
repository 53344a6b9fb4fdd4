"""GET /v1/realtime: transcription over a WebSocket, in the events of OpenAI's transcription sessions.

The client appends samples to a buffer. The client commits the buffer, or the server does where speech ends (`turn_detection`). A committed
buffer is an item. One task transcribes the items of a connection one after another, like files.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
import math
import secrets
import time
from base64 import b64decode
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from server.api.answer.generate import Generation, Job
from server.api.answer.socket import Connection, WebSocket
from server.api.context import Context, caller
from server.api.routes import new_router
from server.api.speech import transcribe
from server.api.speech.form import SpeechForm
from server.api.speech.prepare import request_of
from server.api.speech.realtime_session import RATE, Session, updated
from server.audio.decoder import AudioDecoder
from server.audio.voice import Began, VoiceDetector
from server.audio.wav import pcm_file
from server.errors import (
    AUDIO_BUFFER_EMPTY,
    AUDIO_BUFFER_FULL,
    INTERNAL,
    INVALID_JSON,
    INVALID_VALUE,
    MISSING_FIELD,
    NOT_A_SPEECH_MODEL,
    ApiError,
)
from server.models.model import Loaded, Model
from server.speech.tokens import SpeechTokens

log = logging.getLogger(__name__)

SAMPLE_BYTES = 2
LEAST_MS = 100  # shortest buffer that can be committed
MOST_HELD_BYTES = 512 << 20  # of the audio that all connections hold
MOST_ITEMS = 32  # items of a connection that wait for their transcripts
EVENT = "conversation.item.input_audio_transcription."


@dataclass(frozen=True, slots=True)
class _Item:
    item_id: str
    samples: bytes
    session: Session  # as it was when the item was committed


class _Talk:
    """One connection."""

    def __init__(self, connection: Connection, speech: Speech, model: str | None, talks: set[_Talk]) -> None:
        """`talks` are all connections of the server."""
        self._connection, self._speech, self._talks = connection, speech, talks
        self._session, self._id = Session(model), f"sess_{secrets.token_hex(8)}"
        self._buffer = bytearray()
        self._num_dropped = 0  # bytes of all audio before the buffer
        self._num_waiting = 0  # bytes of the items that wait
        self._items = asyncio.Queue[_Item]()
        self._last_id: str | None = None
        self._next_id = _new_id()
        self._voice = self._new_voice()

    async def serve(self) -> None:
        await self._send("session.created", session=self._session.described(self._id))
        writing = asyncio.create_task(self._transcribe_items())
        self._talks.add(self)
        try:
            async for text in self._connection.texts():
                if writing.done():
                    await writing  # raises what ended it
                await self._handle(text)
        finally:
            self._talks.discard(self)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of audio that the connection holds."""
        return len(self._buffer) + self._num_waiting

    async def _send(self, kind: str, **fields: Any) -> None:
        await self._connection.send_text(msgspec.json.encode({"type": kind, "event_id": f"event_{secrets.token_hex(8)}", **fields}))

    async def _handle(self, text: bytes) -> None:
        event_id = None
        try:
            event = _event_of(text)
            event_id = event.get("event_id")
            await self._apply(event)
        except ApiError as error:
            await self._send("error", error={**_described(error), "event_id": event_id if isinstance(event_id, str) else None})

    async def _apply(self, event: Mapping[str, Any]) -> None:
        match event["type"]:
            case "session.update":
                session = updated(self._session, event)
                self._speech.check(session)
                if session.turns != self._session.turns:
                    self._voice = self._new_voice(session)
                self._session = session
                await self._send("session.updated", session=session.described(self._id))
            case "input_audio_buffer.append":
                await self._append(_audio_of(event))
            case "input_audio_buffer.commit":
                await self._commit(len(self._buffer))
                self._voice = self._new_voice()
            case "input_audio_buffer.clear":
                self._drop(len(self._buffer))
                self._voice = self._new_voice()
                await self._send("input_audio_buffer.cleared")
            case kind:
                known = "session.update, input_audio_buffer.append, input_audio_buffer.commit, input_audio_buffer.clear"
                raise ApiError(INVALID_VALUE, f"type is {kind!r:.80}; expected one of {known}", param="type")

    # the buffer

    def _new_voice(self, session: Session | None = None) -> VoiceDetector | None:
        """Return a detector that begins with what follows the buffer."""
        turns = (session or self._session).turns
        self._voice_begin_ms = _ms(self._num_dropped + len(self._buffer))
        return None if turns is None else VoiceDetector(turns, RATE)

    async def _append(self, data: bytes) -> None:
        most = self._speech.most_bytes
        if sum(talk.num_bytes for talk in self._talks) + len(data) > MOST_HELD_BYTES:
            text = f"the connections of this server hold {MOST_HELD_BYTES >> 20} MiB of audio, which is the most; try again later"
            raise ApiError(AUDIO_BUFFER_FULL, text, param="audio")
        if self.num_bytes + len(data) > most:
            raise ApiError(
                AUDIO_BUFFER_FULL,
                f"audio would bring the buffer and the items without transcripts to more than {most // (RATE * SAMPLE_BYTES)} s; "
                "commit or clear the buffer, and wait for transcripts",
                param="audio",
            )
        self._buffer += data
        voice, session = self._voice, self._session
        if voice is None or session.turns is None:
            return
        for found in voice.feed(data):
            at_ms = self._voice_begin_ms + found.at_ms
            if isinstance(found, Began):
                self._drop(_bytes(at_ms) - self._num_dropped)
                await self._send("input_audio_buffer.speech_started", audio_start_ms=_ms(self._num_dropped), item_id=self._next_id)
            else:
                await self._send("input_audio_buffer.speech_stopped", audio_end_ms=at_ms, item_id=self._next_id)
                await self._commit(_bytes(at_ms) - self._num_dropped)
        if not voice.is_speaking:  # keep only what may belong to the next speech
            self._drop(len(self._buffer) - _bytes(session.turns.prefix_ms + 200))

    def _drop(self, num_bytes: int) -> None:
        num_bytes = max(0, min(num_bytes, len(self._buffer))) // SAMPLE_BYTES * SAMPLE_BYTES
        del self._buffer[:num_bytes]
        self._num_dropped += num_bytes

    async def _commit(self, num_bytes: int) -> None:
        """Make the first bytes of the buffer an item."""
        samples = bytes(self._buffer[: num_bytes // SAMPLE_BYTES * SAMPLE_BYTES])
        if _ms(len(samples)) < LEAST_MS:
            text = f"the buffer has {_ms(len(samples))} ms of audio; expected at least {LEAST_MS} ms"
            raise ApiError(AUDIO_BUFFER_EMPTY, text)
        if self._items.qsize() >= MOST_ITEMS:
            raise ApiError(AUDIO_BUFFER_FULL, f"{MOST_ITEMS} items wait for their transcripts; commit more after the first of them")
        item_id, self._next_id, before = self._next_id, _new_id(), self._last_id
        self._last_id = item_id
        self._drop(len(samples))
        self._num_waiting += len(samples)
        await self._send("input_audio_buffer.committed", item_id=item_id, previous_item_id=before)
        content = [{"type": "input_audio", "transcript": None}]
        item = {"id": item_id, "object": "realtime.item", "type": "message", "status": "completed", "role": "user", "content": content}
        for kind in ("added", "done"):
            await self._send(f"conversation.item.{kind}", item=item, previous_item_id=before)
        self._items.put_nowait(_Item(item_id, samples, self._session))
        self._speech.is_busy = True

    # the items

    async def _transcribe_items(self) -> None:
        while True:
            item = await self._items.get()
            names = {"item_id": item.item_id, "content_index": 0}
            try:
                texts: list[str] = []
                async for text in self._speech.texts(item):
                    texts.append(text if texts else text.lstrip())
                    await self._send(f"{EVENT}delta", delta=texts[-1], **names)
                usage = {"type": "duration", "seconds": math.ceil(len(item.samples) / (RATE * SAMPLE_BYTES))}
                await self._send(f"{EVENT}completed", transcript="".join(texts).strip(), usage=usage, **names)
            except ApiError as error:
                await self._send(f"{EVENT}failed", error=_described(error), **names)
            except Exception:
                log.exception("the transcription of %s failed", item.item_id)
                error = ApiError(INTERNAL, f"the server failed on this item; its log has the cause under {item.item_id}")
                await self._send(f"{EVENT}failed", error=_described(error), **names)
            finally:
                self._num_waiting -= len(item.samples)
                self._speech.is_busy = not self._items.empty()


class Speech:
    """Transcribes the items of one connection."""

    def __init__(self, context: Context, request: Request, decoder: AudioDecoder) -> None:
        self._context, self._request, self._decoder = context, request, decoder
        self.is_busy = False  # an item waits for its transcript
        settings = context.settings
        self.most_bytes = round(min(settings.max_audio_s * RATE * SAMPLE_BYTES, settings.max_audio_bytes))

    def check(self, session: Session) -> None:
        """Raise ApiError unless the session can be served."""
        _, loaded, tokens = self._model(session.model)
        request_of(_form(session), "transcribe", loaded, tokens, caller(self._request))

    def _model(self, name: str | None) -> tuple[Model, Loaded, SpeechTokens]:
        model, loaded = self._context.serve(self._request, name)
        if loaded.speech is None:
            raise ApiError(NOT_A_SPEECH_MODEL, f"model {model.spec.name!r} hears no audio", param="model")
        return model, loaded, loaded.speech

    async def texts(self, item: _Item) -> AsyncGenerator[str, None]:
        """Yield the texts of an item's segments."""
        model, loaded, tokens = self._model(item.session.model)
        who = replace(caller(self._request), arrived_s=time.monotonic())  # later than the connection
        series = self._context.metrics_of(model.spec.name)

        def run(job: Job) -> Generation:
            return Generation(loaded, job, series, who)

        recording = await self._decoder.decode(pcm_file(item.samples, RATE), loaded.ready.num_mels)
        wanted = request_of(_form(item.session), "transcribe", loaded, tokens, who)
        if wanted.language is None and tokens.languages:
            wanted = await transcribe.with_language(wanted, recording, run)
        async for segment in transcribe.segments_of(wanted, recording, run):
            yield segment.text


def router(context: Context) -> APIRouter:
    routes, settings = new_router("OpenAI"), context.settings
    decoder, talks = AudioDecoder(settings.max_audio_s), set[_Talk]()

    @routes.get("/v1/realtime", include_in_schema=False)
    async def realtime(request: Request) -> Response:
        """Transcribe speech while it is spoken. The request becomes a WebSocket."""
        speech, model = Speech(context, request, decoder), request.query_params.get("model") or None

        async def serve(connection: Connection) -> None:
            await _Talk(connection, speech, model, talks).serve()

        socket = WebSocket(
            request, serve, most_bytes=settings.max_body_bytes, is_stopping=lambda: context.registry.closing and not speech.is_busy
        )
        speech.check(Session(model))
        return socket

    return routes


def _form(session: Session) -> SpeechForm:
    return SpeechForm(session.model, session.language, session.prompt, "json", 0.0, True, 0, frozenset({"segment"}), ())


def _event_of(text: bytes) -> Mapping[str, Any]:
    try:
        event = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(INVALID_JSON, f"the event is not valid JSON: {error}") from None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise ApiError(MISSING_FIELD, "the event has no type; expected an object with the text `type`", param="type")
    return event


def _audio_of(event: Mapping[str, Any]) -> bytes:
    try:
        data = b64decode(event.get("audio") or "?", validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ApiError(INVALID_VALUE, f"audio is {event.get('audio')!r:.40}; expected samples in base64", param="audio") from None
    if len(data) % SAMPLE_BYTES:
        raise ApiError(INVALID_VALUE, f"audio has {len(data)} bytes; expected whole samples of {SAMPLE_BYTES} bytes", param="audio")
    return data


def _described(error: ApiError) -> dict[str, Any]:
    return {"type": error.kind.type, "code": error.kind.code, "message": error.message, "param": error.param}


def _new_id() -> str:
    return f"item_{secrets.token_hex(8)}"


def _ms(num_bytes: int) -> int:
    return num_bytes * 1000 // (RATE * SAMPLE_BYTES)


def _bytes(ms: int) -> int:
    return ms * RATE // 1000 * SAMPLE_BYTES
