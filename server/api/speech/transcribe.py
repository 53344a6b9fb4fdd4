"""Transcribe a recording of any length window by window, as Whisper's authors do. A window begins where the last complete segment ended.
The engine transcribes a window in one request. If the transcript repeats itself or is improbable, the window is transcribed again, at a
higher temperature.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from runtime.spectrogram import HOP, RATE
from server.api.answer.generate import Generation, Job
from server.audio.recording import Recording
from server.errors import of_request
from server.interfaces import RequestError
from server.messages import Audio, Embed, Embedding, SamplingParams, Stamps, Submit, TokenLogprob
from server.speech.placing import Part, end_of_speech, placed
from server.speech.tokens import MOST_BEFORE, STAMP_S, SpeechTokens
from server.speech.transcript import Segment, compression_of
from server.speech.words import TimedWords, timed_words
from server.text.detokenize import StopRules

STAMP_HOPS = 2  # hops, each of HOP samples, from one time stamp to the next
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # tried one after the other
# A transcript whose compression exceeds the first limit repeats itself. A transcript whose mean log-probability is below the second limit
# is improbable. A window whose probability of silence exceeds the third limit has no speech, if its transcript is also improbable.
MOST_COMPRESSION, LEAST_LOGPROB, MOST_SILENCE = 2.4, -1.0, 0.6
MOST_FIRST_S = 1.0  # the first segment of a window begins within this time
FORGETFUL = 0.5  # text drawn at a higher temperature than this is not given to the next window as context
MOST_TOKENS = 224  # largest number of tokens of a window's transcript
TOP = 20  # number of most probable tokens, among which the token of silence is looked up

Run = Callable[[Job], Generation]
Align = Callable[[Embed], Awaitable[Embedding]]


@dataclass(frozen=True, slots=True)
class Request:
    """The parts of a request that all windows of a recording share."""

    tokens: SpeechTokens
    submit: Submit  # without the audio and the prompt of a window
    decode: Callable[[Sequence[int]], str]
    num_hops: int  # number of hops in a window
    most_context: int  # most tokens of a sequence
    language: str | None  # None: not known yet
    task: str  # transcribe or translate
    prompt_ids: tuple[int, ...]  # tokens of the text that precedes the speech
    align: Align | None = None  # returns the attention of tokens to the audio; None: no times of words are wanted
    temperatures: tuple[float, ...] = TEMPERATURES


@dataclass(slots=True)
class _Attempt:
    """A transcript of a window, drawn at one temperature."""

    token_ids: list[int]
    logprobs: list[float]  # of the tokens
    temperature: float
    mean_logprob: float
    silence: float  # probability that the window has no speech
    text: str
    compression: float = field(init=False)  # a high ratio shows that the text repeats itself

    def __post_init__(self) -> None:
        self.compression = compression_of(self.text.strip())

    @property
    def is_silent(self) -> bool:
        """Whether the window probably has no speech."""
        return self.silence > MOST_SILENCE and self.mean_logprob < LEAST_LOGPROB

    @property
    def is_good(self) -> bool:
        """Whether no other temperature need be tried."""
        return self.is_silent or (self.compression <= MOST_COMPRESSION and self.mean_logprob >= LEAST_LOGPROB)


async def segments_of(request: Request, recording: Recording, run: Run) -> AsyncGenerator[Segment, None]:
    """Transcribe a recording, and yield its segments in order, without those that have no text or no duration. `run` generates the answer
    to a job. Raise ApiError if a generation fails."""
    seek, spoken_s, earlier = 0, 0.0, list(request.prompt_ids)
    while seek < recording.num_hops:
        size, offset_s = min(request.num_hops, recording.num_hops - seek), seek * HOP / RATE
        audio = recording.piece(seek, size)
        best = await _transcribed(request, audio, earlier, run)
        if best.is_silent:
            seek += size
            continue
        cut = _cut(request.tokens, best.token_ids, size, offset_s)
        parts, following = cut.parts, seek + cut.num_hops
        if request.align is not None:
            parts = placed(parts, await _words(request, request.align, audio, size, parts), offset_s, spoken_s)
            spoken_s = end_of_speech(parts)
            if not cut.is_whole and spoken_s > offset_s:
                following = max(seek + 1, round(spoken_s * RATE / HOP))
        num_seen = 0
        for part in parts:
            logprobs = tuple(best.logprobs[num_seen : num_seen + len(part.token_ids)])
            num_seen += len(part.token_ids)
            text = request.decode([token for token in part.token_ids if token < request.tokens.end])
            if text.strip() and part.end_s > part.start_s:
                earlier += part.token_ids  # including the stamps, as Whisper's authors do
                facts = best.temperature, best.mean_logprob, best.compression, best.silence
                yield Segment(seek, part.start_s, part.end_s, text, part.token_ids, *facts, part.words, logprobs)
        if best.temperature > FORGETFUL:
            earlier = []
        seek = following


async def with_language(request: Request, recording: Recording, run: Run) -> Request:
    """Return the request with the language that is most probable at the beginning of the recording. `run` starts the job that finds the
    language."""
    codes = {token_id: code for code, token_id in request.tokens.languages.items()}
    params = SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=tuple(codes))
    audio = recording.piece(0, min(request.num_hops, recording.num_hops))
    job = _job(request, [request.tokens.start], params, audio)
    drawn, _, _ = await _drawn(run(job))
    return replace(request, language=codes[drawn[0]])


@dataclass(frozen=True, slots=True)
class _Cut:
    """A window that is cut into segments."""

    parts: Sequence[Part]
    num_hops: int  # hops from this window to the next one
    is_whole: bool  # no speech follows the last stamp


def _cut(tokens: SpeechTokens, token_ids: Sequence[int], size: int, offset_s: float) -> _Cut:
    """Cut the tokens of a window of `size` hops, which begins at `offset_s`, at its pairs of time stamps. Without pairs, the window is one
    segment. Otherwise, leave out the tokens after the last pair, where the next window then begins, unless they are a complete segment."""
    first = tokens.first_stamp

    def part(start: int, end: int, own: Sequence[int]) -> Part:
        """Return the segment with the tokens `own`, from the time stamp `start` to the time stamp `end`."""
        start_s, end_s = (offset_s + stamp * STAMP_S for stamp in (start, end))
        return Part(start_s, end_s, tuple(own), sum(token < tokens.end for token in own))

    are_stamps = [token >= first for token in token_ids]
    ends = [i for i in range(1, len(token_ids)) if are_stamps[i - 1] and are_stamps[i]]
    is_whole = are_stamps[-2:] == [False, True]
    if not ends:
        stamps = [token - first for token in token_ids if token >= first]
        return _Cut([part(0, stamps[-1] if stamps and stamps[-1] else size // STAMP_HOPS, token_ids)], size, is_whole)
    if is_whole:
        ends.append(len(token_ids))
    pieces = [token_ids[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    last = pieces[-1][-1] - first
    return _Cut(
        [part(piece[0] - first, piece[-1] - first, piece) for piece in pieces], size if is_whole else last * STAMP_HOPS or size, is_whole
    )


async def _transcribed(request: Request, audio: Audio, earlier: list[int], run: Run) -> _Attempt:
    """Transcribe a window at one temperature after another, until a transcript is good. `earlier` has the tokens of the text before the
    window."""
    tokens = request.tokens
    most_before = min(MOST_BEFORE, request.most_context // 2 - 1)
    prompt = tokens.prompt(request.language, request.task, earlier[-most_before:])
    stamps = Stamps(tokens.first_stamp, tokens.end, round(MOST_FIRST_S / STAMP_S))
    attempts: list[_Attempt] = []
    for temperature in request.temperatures:
        params = SamplingParams(
            max_tokens=min(MOST_TOKENS, request.most_context - len(prompt)),
            temperature=temperature,
            banned_token_ids=tokens.banned,
            stop_token_ids=(tokens.end,),
            stamps=stamps,
            seed=request.submit.params.seed,
            logprobs=TOP if not tokens.languages else 0,
            prompt_logprobs=TOP if tokens.languages else None,
        )
        token_ids, logprobs, asked = await _drawn(run(_job(request, prompt, params, audio)))
        row = asked[prompt.index(tokens.start) + 1] if asked else logprobs[0] if logprobs else None
        mean = sum(entry.logprob for entry in logprobs) / (len(logprobs) or 1)
        text = request.decode([token for token in token_ids if token < tokens.end])
        each = [entry.logprob for entry in logprobs]
        attempts.append(_Attempt(token_ids, each, temperature, mean, _share(row, tokens.silence), text))
        if attempts[-1].is_good:
            return attempts[-1]
    # If no attempt is good, take the most probable of those that do not repeat themselves or, if all do, of all. Its temperature becomes
    # the last one that was tried, so that its text is not given to the next window if high temperatures were needed.
    best = max(attempts, key=lambda attempt: (attempt.compression <= MOST_COMPRESSION, attempt.mean_logprob))
    return replace(best, temperature=request.temperatures[-1])


async def _words(request: Request, align: Align, audio: Audio, size: int, parts: Sequence[Part]) -> TimedWords:
    """Return the words of the segments of a window of `size` hops, with times counted from the window's beginning. Return no words if the
    segments have no text. Raise ApiError if the worker fails."""
    tokens, common = request.tokens, request.submit
    start = tokens.prompt(request.language, request.task, [])
    texts = [token for part in parts for token in part.token_ids if token < tokens.end][: request.most_context - len(start) - 2]
    if not texts:
        return TimedWords()
    prompt = (*start, tokens.no_stamps, *texts, tokens.end)
    embed = Embed(
        secrets.token_hex(12),
        prompt,
        normalize=False,
        fairness_key=common.fairness_key,
        per_token=True,
        cache_salt=common.cache_salt,
        priority=common.priority,
        audio=audio,
    )
    try:
        embedding = await align(embed)
    except RequestError as error:
        raise of_request(error) from error
    attention = np.frombuffer(embedding.vector, "<f4").reshape(len(prompt), -1, request.num_hops // STAMP_HOPS)
    frames = attention[:, :, : max(size // STAMP_HOPS, 1)]
    return await asyncio.to_thread(timed_words, frames, texts, request.decode, request.language or "en")


def _share(row: TokenLogprob | None, token_id: int) -> float:
    """Return the probability of a token at the position of `row`, or 0 if `row` does not list the token."""
    if row is None:
        return 0.0
    found = dict(row.top) | {row.token_id: row.logprob}
    return math.exp(found[token_id]) if token_id in found else 0.0


def _job(request: Request, prompt: Sequence[int], params: SamplingParams, audio: Audio) -> Job:
    """Return the job for a prompt with the audio of a window."""
    own = {"request_id": secrets.token_hex(12), "prompt_ids": tuple(prompt), "params": params, "audio": audio}
    return Job(msgspec.structs.replace(request.submit, **own), StopRules())


async def _drawn(generation: Generation) -> tuple[list[int], list[TokenLogprob], tuple[TokenLogprob | None, ...]]:
    """Return the tokens of an answer without the stop token, the log-probabilities of these tokens, and those of the tokens of the prompt,
    which are empty if the job does not ask for them."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    of_prompt: tuple[TokenLogprob | None, ...] = ()
    async with aclosing(generation.steps()) as steps:
        async for step in steps:
            token_ids += step.token_ids
            logprobs += [entry.logprob for entry in step.entries]
            of_prompt = of_prompt or step.prompt_logprobs
            if step.stop_reason is not None:
                token_ids.pop()  # the stop token, which has no entry
    return token_ids, logprobs, of_prompt
