"""POST /v1/audio/transcriptions and /v1/audio/translations: write down speech, or translate it into English."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request, Response

from server.api.answer.respond import json_answer, response_headers, while_connected
from server.api.answer.sse import EventStream, Framing
from server.api.context import Context, caller
from server.api.request.uploads import limited, sized
from server.api.routes import gives, new_router
from server.api.speech import transcribe
from server.api.speech.form import FILE, SpeechForm, read_form
from server.api.speech.prepare import request_of, run_of
from server.api.speech.shapes import (
    Transcript,
    TranscriptDelta,
    TranscriptDone,
    TranscriptLogprob,
    VerboseTranscript,
    delta,
    done,
    logprobs_of,
    short,
    verbose,
)
from server.audio.decoder import AudioDecoder
from server.audio.recording import Recording
from server.errors import NOT_A_SPEECH_MODEL, ApiError
from server.http.multipart import Form
from server.interfaces import Tokenizer
from server.speech.transcript import Segment, srt, text_of, vtt

EVENTS = Framing(end=b"")
AS_TEXT = {  # format of an answer that is plain text -> its media type, and the function that writes it
    "text": ("text/plain", lambda segments: text_of(segments) + "\n"),
    "srt": ("application/x-subrip", srt),
    "vtt": ("text/vtt", vtt),
}


@dataclass(frozen=True, slots=True)
class _Speech:
    """The recording of a request, with the values of its form and the request that all its windows share."""

    asked: SpeechForm
    request: transcribe.Request
    recording: Recording
    run: transcribe.Run
    tokenizer: Tokenizer

    async def segments(self) -> list[Segment]:
        """Transcribe, and return all segments."""
        return [segment async for segment in transcribe.segments_of(self.request, self.recording, self.run)]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Transcribe, and yield the events."""
        found: list[Segment] = []
        async for segment in transcribe.segments_of(self.request, self.recording, self.run):
            found.append(segment)
            said = delta(segment.text if len(found) > 1 else segment.text.lstrip())
            if self.asked.tells_logprobs:
                said["logprobs"] = self._logprobs([segment])
            yield msgspec.json.encode(said)
        yield msgspec.json.encode(done(self.transcript(found)))

    def transcript(self, segments: Sequence[Segment]) -> Transcript | VerboseTranscript:
        """Return the whole transcript as JSON: the long form for verbose_json, the short form for any other format."""
        asked, duration_s = self.asked, self.recording.duration_s
        if asked.format == "verbose_json":
            return verbose(segments, duration_s, self.request.task, self.request.language or "en", asked.times)
        found = short(segments, duration_s)
        if asked.tells_logprobs:
            found["logprobs"] = self._logprobs(segments)
        return found

    def _logprobs(self, segments: Sequence[Segment]) -> list[TranscriptLogprob]:
        """Return the log-probabilities of the tokens of segments."""
        return logprobs_of(segments, self.tokenizer, self.request.tokens.end)


def router(context: Context) -> APIRouter:
    routes, settings = new_router("OpenAI"), context.settings
    decoder = AudioDecoder(settings.max_audio_s, context.held_audio)

    async def answer(request: Request, task: str) -> Response:
        """Transcribe the recording in a form, or translate it if `task` is "translate", and return the response. Raise ApiError if the form
        or the recording is not valid, or if the model does not transcribe speech."""
        data = bytearray()
        form = Form(request.headers.get("content-type", ""), sized(data.extend, settings, "max_audio_bytes"))
        await form.read(limited(request, settings, "max_audio_bytes"), FILE)
        asked = read_form(form, strict=settings.strict, translates=task == "translate")
        model, loaded = context.serve(request, asked.model)
        if loaded.speech is None:
            raise ApiError(NOT_A_SPEECH_MODEL, f"model {model.spec.name!r} does not transcribe speech", param="model")
        recording = await while_connected(request, decoder.decode(bytes(data), loaded.ready.num_mels))
        data.clear()  # free the file's bytes, because a transcription may run for long
        who = caller(request)
        run = run_of(loaded, context.metrics_of(model.spec.name), who)
        wanted = await request_of(asked, task, loaded, loaded.speech, who)
        if wanted.language is None and wanted.tokens.languages:
            wanted = await while_connected(request, transcribe.with_language(wanted, recording, run))
        speech, headers = _Speech(asked, wanted, recording, run, loaded.tokenizer), response_headers(loaded, list(asked.ignored))
        if asked.stream:
            return EventStream(speech.events(), headers, heartbeat_s=settings.heartbeat_s, framing=EVENTS)
        return _written(speech, await while_connected(request, speech.segments()), headers)

    @routes.post("/v1/audio/transcriptions", responses=gives(Transcript, VerboseTranscript, event=TranscriptDelta, done=False))
    async def transcriptions(request: Request) -> Response:
        """Write down speech. The body is a form with `file` and, for example, `model`, `language`, `prompt` and `response_format`."""
        return await answer(request, "transcribe")

    @routes.post("/v1/audio/translations", responses=gives(Transcript, VerboseTranscript, event=TranscriptDone, done=False))
    async def translations(request: Request) -> Response:
        """Translate speech into English. The body is a form like that of transcriptions, without `language`."""
        return await answer(request, "translate")

    return routes


def _written(speech: _Speech, segments: Sequence[Segment], headers: dict[str, str]) -> Response:
    """Return the response with a whole transcript."""
    if speech.asked.format not in AS_TEXT:
        return json_answer(speech.transcript(segments), headers=headers)
    media_type, write = AS_TEXT[speech.asked.format]
    return Response(write(segments), 200, headers, f"{media_type}; charset=utf-8")
