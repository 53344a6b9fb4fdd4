"""Write a completion in llama.cpp's shape: a stream of events, in which the last event of each choice describes its end, or one object for
each choice."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired

import msgspec
from typing_extensions import TypedDict

from server.api.answer.generate import Generation, Job, Step, TokenEntry
from server.api.answer.logprobs import LEAST
from server.api.answer.merge import merged
from server.api.llama_cpp.body import LlamaSampling
from server.api.request.prepare import context_of, off_loop
from server.messages import SamplingParams
from server.models.model import Loaded

encode = msgspec.json.encode


class LlamaTimings(TypedDict):
    """Counts of tokens, and times. Names that begin with `cache` are about the cached tokens of the prompt, those with `prompt` about its
    other tokens, and those with `predicted` about the answer."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaToken(TypedDict):
    """A token and its log-probability."""

    id: int
    token: str
    bytes: Sequence[int]
    logprob: NotRequired[float]
    prob: NotRequired[float]  # the token's probability, only with `post_sampling_probs`


class LlamaProbabilities(LlamaToken):
    """A token of the answer, and the most probable tokens in its place: with their probabilities in `top_probs` if the request has
    `post_sampling_probs`, otherwise with their log-probabilities in `top_logprobs`."""

    top_logprobs: NotRequired[Sequence[LlamaToken]]
    top_probs: NotRequired[Sequence[LlamaToken]]


class LlamaPart(TypedDict):
    """An event with text of a choice."""

    index: int  # index among the choices of all prompts
    content: str
    tokens: Sequence[int]
    stop: bool  # True: the last event of the choice
    id_slot: int  # always -1: the answer does not say which slot its request has
    tokens_predicted: int  # number of tokens of the answer so far
    tokens_evaluated: int  # number of tokens of the prompt
    completion_probabilities: NotRequired[Sequence[LlamaProbabilities]]


class LlamaCompletion(LlamaPart):
    """The last event of a choice, or the whole choice."""

    model: str
    prompt: str  # text of the prompt's tokens
    generation_settings: Mapping[str, Any]
    has_new_line: bool  # whether the answer has a line feed
    truncated: bool  # whether the context was full before the answer was complete
    stop_type: Literal["eos", "limit", "word"]  # a stop token, a limit on tokens or time, or a stop string
    stopping_word: str  # the stop string; empty for other types
    tokens_cached: int  # number of tokens of the prompt that were in the prefix cache
    timings: LlamaTimings


@dataclass(slots=True)
class _Choice:
    """The state of one choice while it is generated."""

    index: int  # index among the choices of all prompts
    text: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    probabilities: list[bytes] = field(default_factory=list[bytes])
    num_tokens: int = 0  # number of tokens of the answer, including those that are not shown; 0 if `n_predict` is 0
    has_new_line: bool = False
    first_s: float = 0.0  # time of the monotonic clock at the first step; 0: no step has come
    stop_type: Literal["eos", "limit", "word"] | None = None  # None: the choice is not complete
    stopping_word: str = ""  # the stop string that has ended the choice


class LlamaAnswer:
    """The answer to all prompts of a request, as events or as a whole."""

    def __init__(self, body: LlamaSampling, jobs: Sequence[Job], generations: Sequence[Generation], model: str, loaded: Loaded) -> None:
        self._body = body
        self._jobs = jobs
        self._generations = generations
        self._loaded = loaded
        self._model = model
        self._per_prompt = jobs[0].submit.num_choices  # choices of each prompt
        self._choices = [_Choice(index) for index in range(len(jobs) * self._per_prompt)]
        self._is_silent = body.n_predict == 0  # the one token that is sampled is not shown
        self._limit_s = (body.t_max_predict_ms or 0) / 1000  # 0 or less: no limit
        self._began_s = time.monotonic()

    async def _steps(self) -> AsyncGenerator[Step, None]:
        """Yield the steps of all choices, but skip those of a choice that has ended: when `_take` ends a choice, the worker may have sent
        further steps of this choice already."""
        async with aclosing(merged(self._generations, self._per_prompt)) as steps:
            async for step in steps:
                if self._choices[step.choice].stop_type is None:
                    yield step

    async def whole(self) -> list[bytes]:
        """Generate the answer, and return it as pieces of JSON."""
        async with aclosing(self._steps()) as steps:
            async for step in steps:
                choice, text, token_ids, probabilities = self._take(step)
                choice.text.append(text)
                choice.token_ids += token_ids
                choice.probabilities += probabilities
        return await off_loop(sum(choice.num_tokens + self._num_prompt(choice) for choice in self._choices), self._pieces)

    def _pieces(self) -> list[bytes]:
        """Return one object per choice, in a list if there are several, as pieces of JSON."""
        ended = [self._end(choice) for choice in self._choices]
        if len(ended) == 1:
            return ended
        return [b"[", *(piece for index, one in enumerate(ended) for piece in ([b","] if index else []) + [one]), b"]"]

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Generate the answer, and yield its events."""
        async with aclosing(self._steps()) as steps:
            async for step in steps:
                choice, text, token_ids, probabilities = self._take(step)
                if text or token_ids or probabilities:
                    yield encode(self._part(choice, text, token_ids, probabilities))
                if choice.stop_type is not None:
                    yield await off_loop(self._num_prompt(choice), lambda choice=choice: self._end(choice))  # `_end` decodes the prompt

    def _take(self, step: Step) -> tuple[_Choice, str, Sequence[int], list[bytes]]:
        """Update the step's choice: its counts and, if the step is its last, how the choice ended. Return the choice, and the step's text,
        tokens and probabilities, which the caller sends or stores. If the choice has a line feed and `t_max_predict_ms` has passed since
        its first step, end the choice. Tokens are returned only if the request streams or asks for them; a stop token is left out, since it
        has no text. If `n_predict` is 0, the text, tokens and probabilities are empty, and no token is counted."""
        choice, now_s = self._choices[step.choice], time.monotonic()
        choice.first_s = choice.first_s or now_s
        choice.num_tokens += len(step.token_ids)
        choice.has_new_line = choice.has_new_line or "\n" in step.text
        if step.finish is not None:
            choice.stop_type = "limit" if step.finish == "length" else "word" if isinstance(step.stop_reason, str) else "eos"
            choice.stopping_word = step.stop_reason if isinstance(step.stop_reason, str) else ""
        elif self._limit_s > 0 and choice.has_new_line and now_s - choice.first_s > self._limit_s:
            choice.stop_type = "limit"
            self._generations[step.choice // self._per_prompt].end(step.choice % self._per_prompt, "length")
        if self._is_silent:
            choice.num_tokens = 0
            return choice, "", (), []
        token_ids = step.token_ids
        if isinstance(step.stop_reason, int) and token_ids[-1:] == (step.stop_reason,):
            token_ids = token_ids[:-1]  # the stop token has no text
        shown = token_ids if self._body.return_tokens or self._body.stream else ()
        return choice, step.text, shown, [self._probabilities(entry) for entry in step.entries]

    def _num_prompt(self, choice: _Choice) -> int:
        """Return the number of tokens of the prompt of a choice."""
        return len(self._jobs[choice.index // self._per_prompt].submit.prompt_ids)

    # --- shapes ----------------------------------------------------------------------------------------------------------

    def _part(self, choice: _Choice, text: str, token_ids: Sequence[int], probabilities: list[bytes], *, stop: bool = False) -> LlamaPart:
        """Return an event of a choice. `probabilities` has the encoded probabilities of the event's tokens, which the event has only if the
        request asks for them by `n_probs`. `stop`: the event is the choice's last one."""
        part: LlamaPart = {
            "index": choice.index,
            "content": text,
            "tokens": token_ids,
            "stop": stop,
            "id_slot": -1,
            "tokens_predicted": choice.num_tokens,
            "tokens_evaluated": self._num_prompt(choice),
        }
        if self._body.n_probs and probabilities:
            part["completion_probabilities"] = msgspec.Raw(b"[" + b",".join(probabilities) + b"]")  # type: ignore[typeddict-item]
        return part

    def _end(self, choice: _Choice) -> bytes:
        """Return the last event of a choice as JSON. The event has the whole text unless earlier events have sent the text. If the request
        has `response_fields`, the event has only these fields."""
        job = self._jobs[choice.index // self._per_prompt]
        usage = self._generations[choice.index // self._per_prompt].usage
        context = context_of(self._loaded)
        assert choice.stop_type is not None
        ended: LlamaCompletion = {
            **self._part(choice, "".join(choice.text), choice.token_ids, choice.probabilities, stop=True),
            "model": self._model,
            "prompt": self._loaded.tokenizer.decode(job.submit.prompt_ids, skip_special_tokens=False),
            "generation_settings": settings_of(job, self._body, context),
            "has_new_line": choice.has_new_line,
            "truncated": choice.stop_type == "limit" and self._num_prompt(choice) + choice.num_tokens >= context,
            "stop_type": choice.stop_type,
            "stopping_word": choice.stopping_word,
            "tokens_cached": usage.cached_tokens,
            "timings": self._timings(choice, usage.prompt_tokens, usage.cached_tokens),
        }
        return encode(ended if not self._body.response_fields else _chosen(ended, self._body.response_fields))

    def _timings(self, choice: _Choice, num_prompt: int, num_cached: int) -> LlamaTimings:
        """Return the counts and times of a choice: the prompt's time ends, and the answer's begins, at the first step of the choice. The
        answer's time ends now."""
        first_s = choice.first_s or time.monotonic()
        prompt_ms, predicted_ms = 1000 * (first_s - self._began_s), 1000 * (time.monotonic() - first_s)
        num_read, num_said = num_prompt - num_cached, choice.num_tokens
        return {
            "cache_n": num_cached,
            "prompt_n": num_read,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(1, num_read),
            "prompt_per_second": 1000 * num_read / max(prompt_ms, 1e-3),
            "predicted_n": num_said,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / max(1, num_said),
            "predicted_per_second": 1000 * num_said / max(predicted_ms, 1e-3),
        }

    def _probabilities(self, entry: TokenEntry) -> bytes:
        """Encode a token with the most probable tokens in its place, as LlamaProbabilities describes."""
        found, top = entry.logprob, [self._token(token_id, logprob) for token_id, logprob in entry.logprob.top]
        shape: LlamaProbabilities = {**self._token(found.token_id, found.logprob)}
        shape["top_probs" if self._body.post_sampling_probs else "top_logprobs"] = top
        return encode(shape)

    def _token(self, token_id: int, logprob: float) -> LlamaToken:
        """Return a token with its log-probability, or its probability if the request has `post_sampling_probs`."""
        tokenizer = self._loaded.tokenizer
        raw = tokenizer.token_bytes(token_id) or tokenizer.decode([token_id], skip_special_tokens=False).encode()
        token: LlamaToken = {"id": token_id, "token": raw.decode(errors="replace"), "bytes": list(raw)}
        if self._body.post_sampling_probs:
            token["prob"] = math.exp(logprob)
        else:
            token["logprob"] = max(logprob, LEAST)
        return token


def settings_of(job: Job, body: LlamaSampling, context: int) -> Mapping[str, Any]:
    """Return the settings with which the answer was generated, including defaults. `n_predict` is the request's value, or -1 if the request
    has none. `context` is the largest number of tokens of a sequence."""
    return {
        **sampling_of(job.submit.params),
        "n_ctx": context,
        "n_predict": -1 if body.n_predict is None else body.n_predict,
        "stop": list(job.stops.strings),
        "stream": bool(body.stream),
        "n_probs": body.n_probs or 0,
        "post_sampling_probs": bool(body.post_sampling_probs),
        "grammar": body.grammar or "",
    }


def sampling_of(params: SamplingParams) -> Mapping[str, Any]:
    """Return sampling parameters under llama.cpp's names."""
    return {
        "seed": params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "typical_p": params.typical_p,
        "repeat_last_n": -1,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": [list(pair) for pair in params.logit_bias],
        "max_tokens": params.max_tokens,
        "ignore_eos": params.ignore_eos,
        "n_keep": 0,
    }


def _chosen(answer: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the fields that `paths`, the request's `response_fields`, name. A nested field is named by a path with slashes, and gets that
    path as its key. A path that names no field is skipped."""
    chosen: dict[str, Any] = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            chosen[path] = value
    return chosen
