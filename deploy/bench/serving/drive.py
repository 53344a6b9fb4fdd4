"""Drivers of a model: clients that record when each token arrives, for an engine in this process or a server over HTTP."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from deploy.streams import Prompt, Stream
from server.engine.overlap import OverlappedEngine
from server.engine.worker import LoadedModel
from server.messages import Failed, FromWorker, SamplingParams, Submit, Tokens


class Driver(Protocol):
    """Sends prompts to a model."""

    def run(self, prompts: Sequence[Prompt], late: Prompt | None = None) -> list[Stream]:
        """Send the prompts, and return one stream per prompt. `late` is sent once every other stream has decoded some tokens or has ended;
        its stream comes last."""
        ...


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that has this share of the sorted values before it, or the largest value. `values` must not be empty."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(len(ranked) * share))]


class Beside(Protocol):
    """Work, such as `Ideal`, whose steps run in turns with those of the engine, so that changes of the machine's speed affect both."""

    def catch_up(self, num_tokens: int) -> None:
        """Run the next steps of this work as long as all its steps together have at most `num_tokens` tokens. `num_tokens` is the number of
        tokens that the engine has computed since the start of the run or, if there is a late prompt, since that prompt arrived."""
        ...


class InProcess:
    """Drives the engine as a worker does, but without a socket. The arrival time of a token is when the engine publishes it."""

    def __init__(self, loaded: LoadedModel, *, temperature: float) -> None:
        """Start an engine for a model that generates text."""
        assert loaded.step_model is not None
        self.engine = OverlappedEngine(loaded.step_model, self._hear, eos_ids=loaded.eos_ids, pace=loaded.pace)
        self._temperature = temperature
        self._streams: dict[str, Stream] = {}
        self._num_sent = 0
        self._beside_s = 0.0  # seconds spent on `beside` so far

    def run(self, prompts: Sequence[Prompt], late: Prompt | None = None, beside: Beside | None = None) -> list[Stream]:
        """Run the engine until all streams have ended. Times of streams do not include the time of `beside`. If there is a late prompt,
        `beside` begins when this prompt arrives. Raise RuntimeError if a request fails."""
        self._streams = {}
        began_s, num_before = self._now_s(), self.engine.timing.num_tokens
        coming = deque(sorted(prompts, key=lambda prompt: prompt.at_s))
        while coming or late is not None or self.engine.has_work:
            while coming and began_s + coming[0].at_s <= self._now_s():
                prompt = coming.popleft()
                self._submit(prompt, began_s + prompt.at_s)
            if late is not None and not coming and all(stream.admits_late for stream in self._streams.values()):
                self._submit(late, self._now_s())
                late, num_before = None, self.engine.timing.num_tokens
            if not self.engine.has_work:
                time.sleep(max(0.0, began_s + coming[0].at_s - self._now_s()))
                continue
            self.engine.step()
            if beside is not None and late is None:
                self._let(beside, self.engine.timing.num_tokens - num_before)
        self.engine.check_integrity()
        return list(self._streams.values())

    def _let(self, beside: Beside, num_tokens: int) -> None:
        """Let `beside` catch up, and add the time that this takes to `_beside_s`."""
        began_s = time.perf_counter()
        beside.catch_up(num_tokens)
        self._beside_s += time.perf_counter() - began_s

    def _now_s(self) -> float:
        """Return the time of the clock minus the time spent on `beside` so far."""
        return time.perf_counter() - self._beside_s

    def close(self) -> None:
        self.engine.close()

    def _submit(self, prompt: Prompt, began_s: float) -> None:
        self._num_sent += 1
        request_id = str(self._num_sent)
        params = SamplingParams(prompt.num_new, temperature=self._temperature, ignore_eos=True, seed=self._num_sent)
        self._streams[request_id] = Stream(began_s)
        self.engine.submit(Submit(request_id, prompt.ids, params))

    def _hear(self, message: FromWorker) -> None:
        """Record the tokens that the engine publishes. Raise RuntimeError if the engine reports a failed request."""
        now_s = self._now_s()
        if isinstance(message, Failed):
            raise RuntimeError(f"request {message.request_id} failed: {message.message}")
        if isinstance(message, Tokens):
            for event in message.events:
                stream = self._streams[event.request_id]
                if not stream.times_s:
                    stream.num_at_first = len(event.token_ids)
                stream.times_s += [now_s] * len(event.token_ids)
                stream.num_tokens += len(event.token_ids)
                stream.has_ended = event.finish_reason is not None
