"""A worker that computes nothing and answers with scripted tokens at a chosen pace, for HTTP tests and `tests.lab.serving.http`."""

from __future__ import annotations

import asyncio
import copy
import json
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any, Self

from runtime.cache_groups import PAGE_SIZE
from runtime.device.base import CardUsage
from server.defaults import Defaults
from server.interfaces import LoadError, Outage, ProgressCallback, RequestError
from server.messages import (
    CachePages,
    Embed,
    Embedding,
    ErrorCode,
    Facts,
    FinishReason,
    GivePages,
    Listening,
    PagesGiven,
    Progress,
    QualityLabel,
    Ready,
    Stats,
    Submit,
    TokenEvent,
    TokenLogprob,
    Vision,
)
from server.scoring import ClassScores, PairPrompt
from server.text.pairs import PairTemplate, TextTemplate
from server.text.templates.errors import TemplateError


class NullState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    SLEEPING = "sleeping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class NullDefaults:
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    origin: str | None = None


class NullRenderer:
    """Renders on the event loop, not in a separate process, because a null template is no code from outside."""

    def __init__(self, template: NullTemplate) -> None:
        self._template = template

    async def render(self, *args: Any, **options: Any) -> str:
        return self._template.render(*args, **options)


class NullTemplate:
    """Renders `<|role|>text` per message, with tools and tool calls as JSON lines."""

    source = "{# of the null model #}"

    def __init__(self, source: str = source) -> None:
        self.source = source

    def renderer(self) -> NullRenderer:
        return NullRenderer(self)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        *,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        lines = [f"<tools>{json.dumps(tools)}"] if tools else []
        for message in messages:
            calls = "".join(f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in _list(message.get("tool_calls")))
            lines.append(f"<|{message['role']}|>{_shown(message.get('content'))}{calls}")
        if add_generation_prompt and not continue_final_message:
            lines.append("<|assistant|>" + str((variables or {}).get("opening", "")))
        return "\n".join(lines)


def _shown(content: object) -> str:
    """Return a content as text, in which the first special token stands for an image."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join(part["text"] if part["type"] == "text" else "<s>" for part in _list(content))


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, list) else []


class ByteTokenizer:
    """A tokenizer in which a token below 256 is the byte with that number; special tokens have higher numbers."""

    BOS, EOS = 256, 257

    def __init__(self, specials: Sequence[str] = (), chat: bool = True) -> None:
        self.specials = {258 + index: text for index, text in enumerate(specials)}
        self.vocab_size = 258 + len(self.specials)
        self.eos_ids: tuple[int, ...] = (self.EOS,)
        self.pad_id: int | None = self.EOS
        self.special_ids = frozenset((self.BOS, self.EOS, *self.specials))
        self.special_texts = {self.BOS: b"<s>", self.EOS: b"</s>", **{index: text.encode() for index, text in self.specials.items()}}
        self.max_token_chars = max(map(len, self.special_texts.values()))
        self.chat_template = NullTemplate() if chat else None
        self.generation_defaults = NullDefaults()
        self.defaults = Defaults()

    def with_template(self, source: str) -> Self:
        """Return a tokenizer that shows another template and renders like this one."""
        if "{{" in source and "}}" not in source:
            raise TemplateError("unexpected end of template")
        other = copy.copy(self)
        other.chat_template = NullTemplate(source)
        return other

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = [self.BOS] if add_special_tokens else []
        for special_id, special in self.specials.items():
            if text == special:
                return [*ids, special_id]
        return ids + list(text.encode())

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def count(self, text: str) -> int:
        return len(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        parts = [bytes([i]) if i < 256 else b"" if skip_special_tokens else self.special_texts[i] for i in ids]
        return b"".join(parts).decode(errors="replace")

    @property
    def text_template(self) -> TextTemplate:
        return TextTemplate(before=(self.BOS,))

    @property
    def pair_template(self) -> PairTemplate:
        return PairTemplate(between=(0,), num_first=1)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


NO_FACTS = Facts()


@dataclass
class NullScript:
    """The answers of a NullWorker, and their speed. Tests may change fields while the worker runs."""

    answer: Callable[[Submit, int], Sequence[Sequence[int]]] = field(
        default=lambda _submit, _choice: [[b] for b in b"Hello from the null device."]
    )
    interval_s: float = 0.0  # seconds to wait before each step
    prefill_s: float = 0.0  # seconds to wait before the first step
    load_s: float = 0.0
    load_error: LoadError | None = None
    fail_after: int | None = None  # number of tokens after which the answer ends in a RequestError; with None, it does not
    max_context: int = 4096
    embedding_size: int = 0
    embedding_note: str = ""
    embeds_tokens: bool = True
    normalize: bool = True
    padded_to: int = 0
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    classes: tuple[str, ...] = ()
    class_scores: ClassScores = ClassScores.SOFTMAX
    pair_prompt: PairPrompt | None = None
    generates: bool = True
    stop_token_id: int | None = None  # stop token to report at the end of an answer, or None
    weights_bytes: int = 1 << 20
    kv_cache_bytes: int = 1 << 20
    facts: Facts = NO_FACTS
    label: QualityLabel | None = None
    vision: Vision | None = None
    listening: Listening | None = None
    left_out: tuple[str, ...] = ()
    pages: Iterable[bytes] = ()  # the frames that another server gets which asks for pages


async def _unchanged(_ready: Ready) -> None: ...


class NullWorker:
    """A `server.interfaces.WorkerHandle` that runs in this process."""

    def __init__(self, script: NullScript, progress: ProgressCallback = lambda _progress: None) -> None:
        self.script = script
        self.state: StrEnum = NullState.STARTING
        self.stats: Stats | None = None
        self.card: CardUsage | None = None
        self.restarts = 0
        self.resubmitted = 0
        self.ready: Ready | None = None
        self.ready_s = 0.0
        self.outage: Outage | None = None
        self.before_wake: Callable[[], None] = lambda: None
        self.before_change: Callable[[Ready], Awaitable[None]] = _unchanged
        self.pid: int | None = None  # there is no process
        self.submits: list[Submit] = []
        self.embeds: list[Embed] = []
        # (request, choice) of each aborted answer; a choice of None stands for all remaining choices
        self.aborted: list[tuple[str, int | None]] = []
        self.running: dict[str, set[int]] = {}
        self.num_running: list[int] = []  # the number of requests that ran when each request began, itself included
        self._progress = progress

    async def start(self) -> Ready:
        for stage in ("fetch", "verify", "compile", "pack", "warm-up"):
            self._progress(Progress(stage, 0.5))
            await asyncio.sleep(self.script.load_s / 5)
            self._progress(Progress(stage, 1.0))
        if self.script.load_error is not None:
            self.state = NullState.STOPPED
            raise self.script.load_error
        self.state = NullState.READY
        script = self.script
        num_pages = script.max_context // PAGE_SIZE + 1
        self.ready = Ready(
            signature="null",
            fingerprint="fp_null",
            cache_hit=False,
            max_context=script.max_context,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            weights_bytes=script.weights_bytes,
            arena_bytes=1 << 16,
            kv_cache_bytes=script.kv_cache_bytes,
            cache_groups=(CachePages(num_pages, script.kv_cache_bytes // num_pages, PAGE_SIZE),),
            embedding_size=script.embedding_size,
            embedding_note=script.embedding_note,
            embeds_tokens=script.embeds_tokens,
            generates=script.generates,
            normalize=script.normalize,
            padded_to=script.padded_to,
            prompts=script.prompts,
            default_prompt=script.default_prompt,
            classes=script.classes,
            class_scores=script.class_scores,
            pair_prompt=script.pair_prompt,
            facts=script.facts,
            label=script.label,
            vision=script.vision,
            listening=script.listening,
            left_out=script.left_out,
        )
        return self.ready

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenEvent, None]:
        self.wake()
        script, params = self.script, submit.params
        self.submits.append(submit)
        running = self.running[submit.request_id] = set(range(submit.num_choices))
        self.num_running.append(len(self.running))
        answers = [list(script.answer(submit, choice)) for choice in range(submit.num_choices)]
        emitted = [0] * submit.num_choices
        step = 0
        try:
            if script.prefill_s:
                await asyncio.sleep(script.prefill_s)
            while running:
                if script.interval_s:
                    await asyncio.sleep(script.interval_s)
                for choice in sorted(running):
                    ids = tuple(answers[choice][step]) if step < len(answers[choice]) else ()
                    ids = ids[: params.max_tokens - emitted[choice]]
                    emitted[choice] += len(ids)
                    if script.fail_after is not None and emitted[choice] > script.fail_after:
                        raise RequestError(ErrorCode.GENERATION_FAILED, "the script ends in an error here")
                    reason = self._reason(submit, emitted[choice], done=step + 1 >= len(answers[choice]))
                    if reason is not None:
                        running.discard(choice)
                    yield TokenEvent(
                        submit.request_id,
                        choice,
                        ids,
                        logprobs=() if params.logprobs is None else tuple(_logprob(i, params.logprobs) for i in ids),
                        finish_reason=reason,
                        stop_token_id=script.stop_token_id if reason is FinishReason.STOP else None,
                        prompt_logprobs=_prompt_logprobs(submit) if step == 0 and choice == 0 else (),
                    )
                step += 1
        finally:
            del self.running[submit.request_id]
            if running:
                self.aborted.append((submit.request_id, None))

    def _reason(self, submit: Submit, emitted: int, *, done: bool) -> FinishReason | None:
        if emitted >= submit.params.max_tokens:
            return FinishReason.LENGTH
        if done:
            return FinishReason.STOP
        if submit.deadline is not None and time.monotonic() > submit.deadline:
            return FinishReason.DEADLINE
        return None

    def abort(self, request_id: str, choice: int) -> None:
        self.running.get(request_id, set()).discard(choice)
        self.aborted.append((request_id, choice))

    async def embed(self, embed: Embed) -> Embedding:
        self.wake()
        self.embeds.append(embed)
        await asyncio.sleep(self.script.prefill_s)
        ids = embed.prompt_ids
        whole = sum(ids) if embed.crop is None else sum(embed.crop.pixels)
        sums = accumulate(ids) if embed.per_token else [whole]  # the vector of the last token equals the vector of the whole text
        size = len(self.script.classes) or self.script.embedding_size
        vectors = [_vector(total, size, normalize=embed.normalize) for total in sums]
        return Embedding(embed.request_id, b"".join(vectors), len(ids))

    async def give(self, asked: GivePages) -> AsyncGenerator[PagesGiven, None]:
        for data in self.script.pages:
            yield PagesGiven(asked.request_id, data=data)
        yield PagesGiven(asked.request_id)

    async def sleep(self, *, keep: bool) -> None:
        self.state = NullState.SLEEPING

    def wake(self) -> None:
        if self.state.value == NullState.SLEEPING.value:
            self.before_wake()
            self.state = NullState.READY
            self.ready_s = time.monotonic()

    async def drain(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.running:
                    await asyncio.sleep(0.005)
        await self.stop()

    async def stop(self) -> None:
        self.state = NullState.STOPPED


def _vector(total: int, size: int, *, normalize: bool) -> bytes:
    values = [float(1 + (total * (i + 1)) % 7) for i in range(size)]
    norm = sum(v * v for v in values) ** 0.5 if normalize else 1.0
    return struct.pack(f"<{size}f", *(v / norm for v in values))


def _logprob(token_id: int, num_top: int) -> TokenLogprob:
    top = tuple(((token_id + rank) % 256, -0.5 - rank) for rank in range(num_top))
    return TokenLogprob(token_id, -0.5, 1, top)


def _prompt_logprobs(submit: Submit) -> tuple[TokenLogprob | None, ...]:
    num_top = submit.params.prompt_logprobs
    if num_top is None:
        return ()
    return (None, *(_logprob(i, num_top) for i in submit.prompt_ids[1:]))
