"""Write the answer to one or more prompts in OpenAI's shapes: a stream of chunks, or one object."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from server.api.answer.generate import Generation, Job, Step, TokenEntry, Usage
from server.api.answer.logprobs import Columns, LogprobWriter, count_logprobs
from server.api.answer.merge import merged
from server.api.answer.respond import in_pieces
from server.api.answer.shapes import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs
from server.api.openai.frame import ChunkFrame, envelope
from server.api.request.prepare import off_loop
from server.api.request.schema import CompletionBody
from server.api.request.texts import NOTHING_AROUND, one_by_one
from server.interfaces import Tokenizer
from server.messages import TokenLogprob
from server.models.model import Loaded, Model
from server.text.detokenize import Detokenizer, StopRules
from server.text.pairs import TextTemplate

encode = msgspec.json.encode


@dataclass(slots=True)
class _Choice:
    """The state of one choice while it is generated. If the answer is streamed, only `index`, `finish` and `stop_reason` are set, because
    chunks send everything else."""

    index: int  # index among the choices of all prompts
    text: list[str] = field(default_factory=list)
    logprobs: Columns = field(default_factory=Columns)
    sum_logprobs: float = 0.0  # sum of the tokens' log-probabilities, by whose mean the best choices are found
    num_logprobs: int = 0  # number of summands of `sum_logprobs`
    token_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | int | None = None

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of the tokens; 0 if there are none."""
        return self.sum_logprobs / max(1, self.num_logprobs)


@dataclass(slots=True)
class _Prompt:
    """A prompt to echo: its text, and its tokens."""

    ids: Sequence[int]
    text: str
    starts: Sequence[int]  # index in `text` at which each token's text begins

    @classmethod
    def of(cls, job: Job, tokenizer: Tokenizer, around: TextTemplate) -> _Prompt:
        """Return a job's prompt. Its text has the special tokens that are also shown in the answer, but not those `around` the text, which
        the client did not write. If the prompt ends within a character, the character belongs to the answer."""
        ids, detokenizer = job.submit.prompt_ids, Detokenizer(tokenizer, StopRules(), job.shown)
        begin, end = around.text_in(ids)
        text = detokenizer.push(ids[begin:end])
        return cls(ids, text, [0] * begin + detokenizer.token_starts + [len(text)] * (len(ids) - end))


def _echoed(body: CompletionBody, jobs: Sequence[Job], tokenizer: Tokenizer) -> list[_Prompt]:
    """Return the prompts to echo. The tokenizer has put special tokens around a prompt that is a text, unless the request forbids this."""
    around = NOTHING_AROUND if body.add_special_tokens is False else tokenizer.text_template
    parts = one_by_one(body.prompt)
    return [_Prompt.of(job, tokenizer, around if isinstance(part, str) else NOTHING_AROUND) for job, part in zip(jobs, parts, strict=True)]


class CompletionAnswer:
    """An answer to all prompts, as chunks or as a whole."""

    def __init__(self, body: CompletionBody, jobs: Sequence[Job], generations: Sequence[Generation], model: Model, loaded: Loaded) -> None:
        self._body = body
        self._generations = generations
        self._per_prompt = jobs[0].submit.num_choices
        self._prompts = _echoed(body, jobs, loaded.tokenizer) if body.echo else []
        self._prompt_ids = [job.submit.prompt_ids for job in jobs]
        self._prompt_logprobs: dict[int, tuple[TokenLogprob | None, ...]] = {}
        # The log-probabilities of each prompt, encoded once for all its choices: in OpenAI's shape for an echoed prompt, and in vLLM's
        # shape.
        self._echoes: dict[int, Columns] = {}
        self._ranked: dict[int, PromptLogprobs] = {}
        self._choices = [_Choice(index) for index in range(len(jobs) * self._per_prompt)]
        self._writer = LogprobWriter(loaded.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._envelope = envelope("text_completion", "cmpl", body, model, loaded)

    @property
    def usage(self) -> Usage:
        """The counts of all prompts together. If `max_tokens` is 0, the tokens that were sampled do not count, since they are not shown."""
        parts = [generation.usage for generation in self._generations]
        return Usage(
            sum(usage.prompt_tokens for usage in parts),
            sum(usage.completion_tokens for usage in parts) if self._body.max_tokens != 0 else 0,
            sum(usage.cached_tokens for usage in parts),
        )

    async def whole(self) -> list[bytes]:
        """Generate the answer, and return it as pieces of JSON."""
        size = sum(map(len, self._prompt_ids)) * (self._per_prompt if self._body.echo else 1)
        async with aclosing(merged(self._generations, self._per_prompt)) as steps:
            async for step in steps:
                choice = self._choices[step.choice]
                self._take(choice, step)
                choice.text.append(step.text)
                choice.token_ids += step.token_ids
                choice.sum_logprobs += sum(entry.logprob.logprob for entry in step.entries)
                choice.num_logprobs += len(step.entries)
                if (logprobs := self._logprobs(step.choice, step.entries)) is not None:
                    choice.logprobs.add(logprobs)
                size += len(step.token_ids) + count_logprobs(step.prompt_logprobs)
        return await off_loop(size, self._pieces)

    def _pieces(self) -> list[bytes]:
        """Return the whole answer as pieces of JSON."""
        answer: Completion = {**self._envelope, "choices": [], "usage": self.usage.describe()}
        return in_pieces(answer, "choices", (encode(self._describe(index, choice)) for index, choice in enumerate(self._best())))

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Generate the answer, and yield its chunks as JSON."""
        frame = ChunkFrame(self._envelope, self._body, lambda: self.usage)
        head = frame.head
        opened: set[int] = set()
        async with aclosing(self._steps_behind_prompts()) as steps:
            async for step in steps:
                choice = self._choices[step.choice]
                self._take(choice, step)
                tail = frame.tail
                if step.choice not in opened:
                    opened.add(step.choice)
                    if self._prompts or self._body.prompt_logprobs is not None or self._body.return_token_ids:
                        yield head + await off_loop(count_logprobs(step.prompt_logprobs), lambda step=step: self._opening(step)) + tail
                if step.text and choice.finish is None and not step.entries and not self._body.return_token_ids:
                    yield b'%b{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}%b' % (
                        head,
                        step.choice,
                        encode(step.text),
                        tail,
                    )
                elif step.text or step.entries or choice.finish is not None or self._body.return_token_ids:
                    yield head + self._chunk(choice, step) + tail
        for chunk in frame.last_chunks:
            yield chunk

    async def _steps_behind_prompts(self) -> AsyncGenerator[Step, None]:
        """Yield the steps. If the answer has log-probabilities of prompts, hold back the steps of each prompt until the step with its
        log-probabilities arrives. That is the first step of the prompt's first choice, but steps of its other choices may arrive
        earlier."""
        held: dict[int, list[Step]] = {}
        if self._body.prompt_logprobs is not None or (self._prompts and self._body.logprobs is not None):
            held = {index: [] for index in range(len(self._prompt_ids))}
        async with aclosing(merged(self._generations, self._per_prompt)) as steps:
            async for step in steps:
                prompt_index = step.choice // self._per_prompt
                if step.prompt_logprobs:
                    yield step
                    for waiting in held.pop(prompt_index, ()):
                        yield waiting
                elif prompt_index in held:
                    held[prompt_index].append(step)
                else:
                    yield step

    def _take(self, choice: _Choice, step: Step) -> None:
        """Store the prompt's log-probabilities and the finish reason of the choice, if the step has them."""
        if step.prompt_logprobs:
            self._prompt_logprobs[step.choice // self._per_prompt] = step.prompt_logprobs
        if step.finish is not None:
            choice.finish = step.finish
            choice.stop_reason = step.stop_reason

    def _best(self) -> list[_Choice]:
        """Return `n` choices of each prompt: if more were generated (`best_of`), those with the highest mean log-probability."""
        wanted, best = self._body.n or 1, list[_Choice]()
        for first in range(0, len(self._choices), self._per_prompt):
            group = self._choices[first : first + self._per_prompt]
            best += sorted(group, key=lambda choice: -choice.mean_logprob)[:wanted] if wanted < len(group) else group
        return best

    def _opening(self, step: Step) -> bytes:
        """Return the entry of `choices` in a choice's first chunk. It has the data about the prompt that the request asks for, and no text
        of the model."""
        prompt_index = step.choice // self._per_prompt
        opening: CompletionChoice = {
            "index": step.choice,
            "text": self._prompts[prompt_index].text if self._prompts else "",
            "logprobs": None if (echo := self._echo(prompt_index)) is None else echo.whole(),
            "finish_reason": None,
        }
        if self._body.prompt_logprobs is not None:
            opening["prompt_logprobs"] = self._ranked_prompt(prompt_index)
        if self._body.return_token_ids:
            opening["prompt_token_ids"] = self._prompt_ids[prompt_index]
        return encode(opening)

    def _chunk(self, choice: _Choice, step: Step) -> bytes:
        """Return the entry of `choices` in a step's chunk. If `max_tokens` is 0, the entry has no text and no tokens."""
        silent = self._body.max_tokens == 0
        chunk: CompletionChoice = {
            "index": step.choice,
            "text": "" if silent else step.text,
            "logprobs": self._logprobs(step.choice, step.entries) if step.entries else None,
            "finish_reason": choice.finish,
        }
        if choice.finish is not None:
            chunk["stop_reason"] = choice.stop_reason
        if self._body.return_token_ids:
            chunk["token_ids"] = () if silent else step.token_ids
        return encode(chunk)

    def _describe(self, index: int, choice: _Choice) -> CompletionChoice:
        """Return a whole choice. Its text follows the echoed prompt, if there is one. `index` is the choice's index in the answer."""
        prompt_index = choice.index // self._per_prompt
        silent = self._body.max_tokens == 0
        text = "" if silent else "".join(choice.text)
        logprobs = choice.logprobs
        if self._prompts:
            text = self._prompts[prompt_index].text + text
            if (echo := self._echo(prompt_index)) is not None:
                logprobs = logprobs.behind(echo)
        described: CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": None if self._body.logprobs is None else logprobs.whole(),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if self._body.prompt_logprobs is not None:
            described["prompt_logprobs"] = self._ranked_prompt(prompt_index)
        if self._body.return_token_ids:
            described["prompt_token_ids"] = self._prompt_ids[prompt_index]
            described["token_ids"] = [] if silent else choice.token_ids
        return described

    def _logprobs(self, choice: int, entries: Sequence[TokenEntry]) -> CompletionLogprobs | None:
        """Return log-probabilities of tokens of a choice, or None if they are not requested. If `max_tokens` is 0, the lists are empty."""
        if self._body.logprobs is None:
            return None
        shift = len(self._prompts[choice // self._per_prompt].text) if self._prompts else 0
        return self._writer.completion(() if self._body.max_tokens == 0 else entries, shift=shift)

    def _ranked_prompt(self, prompt_index: int) -> PromptLogprobs:
        """Return the log-probabilities of a prompt in vLLM's shape. They must have arrived. Only the first call encodes them. A stream
        makes this call on a thread if there are many log-probabilities."""
        if prompt_index not in self._ranked:
            self._ranked[prompt_index] = self._writer.prompt(self._prompt_logprobs.get(prompt_index, ()))
        return self._ranked[prompt_index]

    def _echo(self, prompt_index: int) -> Columns | None:
        """Return the log-probabilities of an echoed prompt, or None if they are not requested or have not arrived."""
        read = self._prompt_logprobs.get(prompt_index)
        if self._body.logprobs is None or read is None or not self._prompts:
            return None
        if prompt_index not in self._echoes:
            prompt = self._prompts[prompt_index]
            self._echoes[prompt_index] = self._writer.echo(prompt.ids, prompt.starts, read)
        return self._echoes[prompt_index]
