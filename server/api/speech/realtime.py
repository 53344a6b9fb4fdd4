"""GET /v1/realtime: transcription over a WebSocket, in the events of OpenAI's transcription sessions.

The client appends samples to a buffer. The client commits the buffer, or the server does where speech ends (`turn_detection`). A committed
buffer is an item. One task transcribes the items of a connection one after another, as the server transcribes uploaded files.
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
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from server.api.answer.socket import Connection, SocketLimits, WebSocket
from server.api.context import Context, caller
from server.api.routes import new_router
from server.api.speech import transcribe
from server.api.speech.form import SpeechForm
from server.api.speech.prepare import request_of, run_of
from server.api.speech.realtime_memory import SessionMemory, Share
from server.api.speech.realtime_session import RATE, Session, updated
from server.api.speech.shapes import TranscriptLogprob, logprobs_of
from server.audio.decoder import AudioDecoder
from server.audio.voice import Began, VoiceDetector
from server.audio.wav import pcm_file
from server.errors import (
    AUDIO_BUFFER_EMPTY,
    AUDIO_BUFFER_FULL,
    INTERNAL,
    INVALID_API_KEY,
    INVALID_JSON,
    INVALID_VALUE,
    MISSING_FIELD,
    NOT_A_SPEECH_MODEL,
    ApiError,
)
from server.http.json_scan import PIECE_BYTES, JsonScan
from server.http.websocket import CloseCode, WebSocketError
from server.models.model import Loaded, Model
from server.speech.tokens import SpeechTokens

log = logging.getLogger(__name__)

SAMPLE_BYTES = 2
LEAST_MS = 100  # shortest buffer that can be committed
MOST_ITEMS = 32  # items of a connection that may wait for their transcripts; at this number, the next commit waits, and no event is read
MOST_MESSAGE_BYTES = 1 << 20  # 16 s of audio in base64
MOST_SESSION_S = 3600.0  # after this time, the client must connect again
EVENT = "conversation.item.input_audio_transcription."


@dataclass(frozen=True, slots=True)
class _Item:
    """A committed buffer."""

    item_id: str
    samples: bytes  # 16-bit samples, RATE of them for each second
    session: Session  # the session as it was when the item was committed


class _Talk:
    """One connection: its session, its buffer, and its items."""

    def __init__(self, connection: Connection, speech: Speech, model: str | None, share: Share) -> None:
        """`share` counts the bytes that this connection holds (audio and an incomplete message), and raises ApiError beyond the limit."""
        self._connection, self._speech, self._share = connection, speech, share
        self._session, self._id = Session(model), f"sess_{secrets.token_hex(8)}"
        self._buffer = bytearray()
        self._num_dropped = 0  # bytes of all audio before the buffer
        self._num_waiting = 0  # bytes of the items that wait or are being transcribed
        self._num_unread = 0  # bytes of a message that is incomplete
        self._items = asyncio.Queue[_Item](MOST_ITEMS)  # items that wait for their transcripts
        self._item_ended = asyncio.Event()  # set whenever an item was transcribed, or has failed
        self._last_id: str | None = None  # id of the item that was committed last
        self._next_id = _new_id()
        self._voice: VoiceDetector | None = None  # None: the session detects no turns
        self._voice = self._new_voice()

    async def serve(self) -> None:
        """Handle events and transcribe items until the connection ends. Raise WebSocketError if the connection must be closed."""
        await self._send("session.created", session=self._session.described(self._id))
        tasks = [asyncio.create_task(self._read_events()), asyncio.create_task(self._transcribe_items())]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._share.hold(0)

    async def _read_events(self) -> None:
        """Handle the events of the client until the client leaves. If the server stops or the session has lasted too long, first wait for
        the items that were committed."""
        try:
            async with aclosing(self._connection.texts(self._hold_unread)) as texts:
                async for text in texts:
                    await self._handle(text)
        except WebSocketError as error:
            if error.code is CloseCode.GOING_AWAY:
                await self._items.join()  # committed items still get their transcripts
            raise

    # --- bytes that the connection holds ---

    @property
    def _num_bytes(self) -> int:
        """The bytes that the connection holds."""
        return len(self._buffer) + self._num_waiting + self._num_unread

    def _hold_unread(self, num_bytes: int) -> None:
        """Count the bytes of an incomplete message. Raise WebSocketError if the connection then holds too many bytes."""
        self._num_unread = num_bytes
        try:
            self._share.hold(self._num_bytes)
        except ApiError as error:
            raise WebSocketError(CloseCode.TRY_AGAIN, error.message) from None

    async def _send(self, kind: str, **fields: Any) -> None:
        """Send an event."""
        await self._connection.send_text(msgspec.json.encode({"type": kind, "event_id": f"event_{secrets.token_hex(8)}", **fields}))

    async def _handle(self, text: bytes) -> None:
        """Handle an event. If the event is not accepted, send an error."""
        event_id = None
        try:
            event = await _event_of(text)
            event_id = event.get("event_id")
            await self._apply(event)
        except ApiError as error:
            await self._send("error", error={**_described(error), "event_id": event_id if isinstance(event_id, str) else None})

    async def _apply(self, event: Mapping[str, Any]) -> None:
        """Do what an event asks for. Raise ApiError if the event is not accepted."""
        match event["type"]:
            case "session.update":
                session = updated(self._session, event)
                await self._speech.check(session)
                if session.turns != self._session.turns:
                    self._voice = self._new_voice(session)
                self._session = session
                await self._send("session.updated", session=session.described(self._id))
            case "input_audio_buffer.append":
                await self._append(_audio_of(event))
            case "input_audio_buffer.commit":
                if (ms := _ms(len(self._buffer))) < LEAST_MS:
                    raise ApiError(AUDIO_BUFFER_EMPTY, f"the buffer has {ms} ms of audio; expected at least {LEAST_MS} ms")
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
        """Return a detector for the audio after the buffer, or None if the session detects no turns. `session`: the session that is about
        to replace the present one. The new detector takes over the noise level of the present detector, and counts times from the end of
        the buffer."""
        turns = (session or self._session).turns
        self._voice_begin_ms = _ms(self._num_dropped + len(self._buffer))
        return None if turns is None else VoiceDetector(turns, RATE, self._voice and self._voice.noise_db)

    async def _append(self, data: bytes) -> None:
        """Add samples to the buffer. If the session detects turns, tell the client where speech begins and ends in the samples, commit the
        buffer up to each end of speech, and drop audio that belongs to no speech. First wait while waiting items and the buffer have too
        much audio together. Raise ApiError if the buffer or the memory is full."""
        most = self._speech.most_bytes
        if len(self._buffer) + len(data) > most:
            text = f"audio would bring the buffer to more than {most // (RATE * SAMPLE_BYTES)} s; commit or clear the buffer"
            raise ApiError(AUDIO_BUFFER_FULL, text, param="audio")
        while len(self._buffer) + self._num_waiting + len(data) > most:
            self._item_ended.clear()
            await self._item_ended.wait()
        self._share.hold(self._num_bytes + len(data))
        self._buffer += data
        voice = self._voice
        if voice is None:
            return
        for found in [*voice.feed(data)]:
            at_ms = self._voice_begin_ms + found.at_ms
            if isinstance(found, Began):
                self._drop(_bytes(at_ms) - self._num_dropped)
                await self._send("input_audio_buffer.speech_started", audio_start_ms=_ms(self._num_dropped), item_id=self._next_id)
            else:
                await self._send("input_audio_buffer.speech_stopped", audio_end_ms=at_ms, item_id=self._next_id)
                await self._commit(_bytes(at_ms) - self._num_dropped)
        if not voice.is_speaking:  # keep only the last audio, which may belong to the next speech
            self._drop(len(self._buffer) - _bytes(voice.kept_ms))

    def _drop(self, num_bytes: int) -> None:
        """Remove the first bytes of the buffer, in whole samples. A negative number removes nothing."""
        num_bytes = max(0, min(num_bytes, len(self._buffer))) // SAMPLE_BYTES * SAMPLE_BYTES
        del self._buffer[:num_bytes]
        self._num_dropped += num_bytes
        self._share.hold(self._num_bytes)

    async def _commit(self, num_bytes: int) -> None:
        """Make the first bytes of the buffer an item, and tell the client. If MOST_ITEMS items wait, wait until the transcription of one
        begins."""
        samples = bytes(self._buffer[: num_bytes // SAMPLE_BYTES * SAMPLE_BYTES])
        item_id, self._next_id, before = self._next_id, _new_id(), self._last_id
        self._last_id = item_id
        self._num_waiting += len(samples)
        self._drop(len(samples))
        await self._send("input_audio_buffer.committed", item_id=item_id, previous_item_id=before)
        content = [{"type": "input_audio", "transcript": None}]
        item = {"id": item_id, "object": "realtime.item", "type": "message", "status": "completed", "role": "user", "content": content}
        for kind in ("added", "done"):
            await self._send(f"conversation.item.{kind}", item=item, previous_item_id=before)
        await self._items.put(_Item(item_id, samples, self._session))

    # the items

    async def _transcribe_items(self) -> None:
        """Transcribe the items one after the other, and send their texts, or an error for an item that fails. Raise WebSocketError if the
        key is no longer valid."""
        while True:
            item = await self._items.get()
            names = {"item_id": item.item_id, "content_index": 0}
            try:
                texts: list[str] = []
                all_logprobs: list[TranscriptLogprob] = []
                async with aclosing(self._speech.texts(item)) as found:
                    async for text, logprobs in found:
                        texts.append(text if texts else text.lstrip())
                        all_logprobs += logprobs or ()
                        await self._send(f"{EVENT}delta", delta=texts[-1], logprobs=logprobs, **names)
                usage = {"type": "duration", "seconds": math.ceil(len(item.samples) / (RATE * SAMPLE_BYTES))}
                told = all_logprobs if item.session.tells_logprobs else None
                await self._send(f"{EVENT}completed", transcript="".join(texts).strip(), usage=usage, logprobs=told, **names)
            except ApiError as error:
                if error.kind is INVALID_API_KEY:
                    raise WebSocketError(CloseCode.POLICY, error.message) from None
                await self._send(f"{EVENT}failed", error=_described(error), **names)
            except Exception:
                log.exception("the transcription of %s failed", item.item_id)
                error = ApiError(INTERNAL, f"the server failed on this item; its log has the cause under {item.item_id}")
                await self._send(f"{EVENT}failed", error=_described(error), **names)
            finally:
                self._num_waiting -= len(item.samples)
                self._share.hold(self._num_bytes)
                self._item_ended.set()
                self._items.task_done()


class Speech:
    """Transcribes the items of one connection."""

    def __init__(self, context: Context, request: Request, decoder: AudioDecoder) -> None:
        """`request` is the one that opened the connection."""
        self._context, self._request, self._decoder = context, request, decoder
        settings = context.settings
        self.most_bytes = round(min(settings.max_audio_s * RATE * SAMPLE_BYTES, settings.max_audio_bytes))

    async def check(self, session: Session) -> None:
        """Raise ApiError unless the session can be served. If the server has several models and the session does not name one yet, check
        nothing."""
        try:
            _, loaded, tokens = self._model(session.model)
        except ApiError as error:
            if session.model is None and error.kind is MISSING_FIELD:
                return
            raise
        await request_of(_form(session), "transcribe", loaded, tokens, caller(self._request))

    def _model(self, name: str | None, *, has_begun: bool = False) -> tuple[Model, Loaded, SpeechTokens]:
        """Return the model, its loaded parts and its tokens for speech. Raise ApiError if the model does not transcribe speech."""
        model, loaded = self._context.serve(self._request, name, has_begun=has_begun)
        if loaded.speech is None:
            raise ApiError(NOT_A_SPEECH_MODEL, f"model {model.spec.name!r} does not transcribe speech", param="model")
        return model, loaded, loaded.speech

    async def texts(self, item: _Item) -> AsyncGenerator[tuple[str, list[TranscriptLogprob] | None], None]:
        """Yield the texts of an item's segments, each with the log-probabilities of its tokens, or with None if the session does not ask
        for them. Each item counts as a request toward the rates of the key, and from then on, the limits apply that the key has at this
        time. Raise ApiError if the key may send no more requests, or if the model cannot transcribe the item."""
        who = caller(self._request)
        self._request.scope["relaxserve.caller"] = replace(who, limits=who.readmit())
        model, loaded, tokens = self._model(item.session.model, has_begun=True)
        who = replace(caller(self._request), arrived_s=time.monotonic())  # an item arrives later than its connection
        run = run_of(loaded, self._context.metrics_of(model.spec.name), who)
        recording = await self._decoder.decode(pcm_file(item.samples, RATE), loaded.ready.num_mels)
        wanted = await request_of(_form(item.session), "transcribe", loaded, tokens, who)
        if wanted.language is None and tokens.languages:
            wanted = await transcribe.with_language(wanted, recording, run)
        async with aclosing(transcribe.segments_of(wanted, recording, run)) as segments:
            async for segment in segments:
                yield segment.text, logprobs_of([segment], loaded.tokenizer, tokens.end) if item.session.tells_logprobs else None


def router(context: Context) -> APIRouter:
    routes, settings = new_router("OpenAI"), context.settings
    # Sessions have a decoder of their own, because uploaded files may occupy the decoder of the other endpoints for long.
    decoder, memory = AudioDecoder(settings.max_audio_s, context.held_audio), SessionMemory()
    limits = SocketLimits(min(settings.max_body_bytes, MOST_MESSAGE_BYTES), settings.body_timeout_s, MOST_SESSION_S)

    @routes.get("/v1/realtime", include_in_schema=False)
    async def realtime(request: Request) -> Response:
        """Transcribe speech while it is spoken. The request becomes a WebSocket."""
        speech, model = Speech(context, request, decoder), request.query_params.get("model") or None

        async def serve(connection: Connection) -> None:
            await _Talk(connection, speech, model, Share(memory, caller(request).quota_key)).serve()

        socket = WebSocket(request, serve, limits=limits, is_stopping=lambda: context.registry.closing)
        await speech.check(Session(model))
        return socket

    return routes


def _form(session: Session) -> SpeechForm:
    """Return the settings of a session as those of a form."""
    return SpeechForm(session.model, session.language, session.prompt, "json", 0.0, True, 0, frozenset({"segment"}))


async def _event_of(text: bytes) -> Mapping[str, Any]:
    """Return the event in a message. Raise ApiError if the message is not valid JSON, has too many or too deeply nested values, or is no
    object with a type."""
    scan = JsonScan()
    for at in range(0, len(text), PIECE_BYTES):
        if at:
            await asyncio.sleep(0)
        scan.feed(text[at : at + PIECE_BYTES])
    try:
        event = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(INVALID_JSON, f"the event is not valid JSON: {error}") from None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise ApiError(MISSING_FIELD, "the event has no type; expected an object with the text `type`", param="type")
    return event


def _audio_of(event: Mapping[str, Any]) -> bytes:
    """Return the samples in an event. Raise ApiError if the event has no samples, or if they are not whole samples in base64."""
    try:
        data = b64decode(event.get("audio") or "?", validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ApiError(INVALID_VALUE, f"audio is {event.get('audio')!r:.40}; expected samples in base64", param="audio") from None
    if len(data) % SAMPLE_BYTES:
        raise ApiError(INVALID_VALUE, f"audio has {len(data)} bytes; expected whole samples of {SAMPLE_BYTES} bytes", param="audio")
    return data


def _described(error: ApiError) -> dict[str, Any]:
    """Return an error in the shape that it has in events."""
    return {"type": error.kind.type, "code": error.kind.code, "message": error.message, "param": error.param}


def _new_id() -> str:
    """Return an id for the next item."""
    return f"item_{secrets.token_hex(8)}"


def _ms(num_bytes: int) -> int:
    """Return the duration of samples in milliseconds."""
    return num_bytes * 1000 // (RATE * SAMPLE_BYTES)


def _bytes(ms: int) -> int:
    """Return the number of bytes of samples of this duration."""
    return ms * RATE // 1000 * SAMPLE_BYTES
