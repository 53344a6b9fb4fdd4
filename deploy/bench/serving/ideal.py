"""The ideal of a load: the time that the model alone, without an engine, needs for the same tokens in the best order. The ideal of a late
prompt, which arrives while other streams run, is the time of the same prompt alone.

The speed of a shared machine changes within seconds. So the ideal runs in turns with the engine: after each step of the engine, the ideal
catches up with the number of tokens that the engine has computed. Both use the same pages of the KV cache. This makes the engine's answers
meaningless, but steps take as long as with the right keys.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.model_loading.costs import step_of
from deploy.model_loading.serving import CompiledModel
from server.engine.step_model import StepBatch

LENGTH = 128  # tokens in each client's prompt, and new tokens of each client, unless an option says otherwise


@dataclass(slots=True)
class Took:
    """The time that the ideal has taken so far, in seconds."""

    prompts_s: float = 0.0  # time of steps with prompts
    decoding_s: float = 0.0  # time of the steps after them
    processor_s: float = 0.0  # CPU time of all threads, which other load on the machine does not increase
    busy_s: float = 0.0  # seconds in kernels

    @property
    def wall_s(self) -> float:
        return self.prompts_s + self.decoding_s


class Ideal:
    """The steps of an ideal, which `run` or `catch_up` runs: first steps with prompts, then steps with one token of each client."""

    def __init__(self, model: CompiledModel, prompts: Sequence[StepBatch], decoding: Sequence[StepBatch]) -> None:
        """`prompts`: the steps with prompts. `decoding`: the steps after them. None is run yet."""
        self.took = Took()
        self._model = model
        self._num_prompts = len(prompts)  # number of steps with prompts
        self._steps = [*prompts, *decoding]
        self._num_done = self._num_tokens = 0  # numbers of steps and of tokens that are computed

    @staticmethod
    def of_clients(model: CompiledModel, num_clients: int, length: int = LENGTH) -> Ideal:
        """Return the ideal of clients that arrive together, each with a prompt of `length` tokens and as many new tokens. A step with
        prompts has as many whole prompts as fit, at least one."""
        limits = model.limits
        together = max(1, min(num_clients, limits.max_tokens // length))
        counts = [min(together, num_clients - first) for first in range(0, num_clients, together)]
        contexts = range(length + 1, 2 * length)
        return Ideal(
            model,
            [step_of(limits, num_seqs=count, num_each=length, context=length) for count in counts],
            [step_of(limits, num_seqs=num_clients, num_each=1, context=context) for context in contexts],
        )

    @staticmethod
    def of_prompt(model: CompiledModel, num_tokens: int, chunk: int) -> Ideal:
        """Return the ideal of a single prompt that is computed in chunks of `chunk` tokens."""
        ends = [*range(chunk, num_tokens, chunk), num_tokens]
        starts = [0, *ends]
        chunks = zip(starts, ends, strict=False)
        return Ideal(model, [step_of(model.limits, num_seqs=1, num_each=end - start, context=end) for start, end in chunks], [])

    def run(self) -> Took:
        """Run all steps that are left. Return the time of all steps, including those that ran before this call."""
        while self._num_done < len(self._steps):
            self._step()
        return self.took

    def catch_up(self, num_tokens: int) -> None:
        """Run steps as long as all steps so far have at most `num_tokens` tokens together."""
        while self._num_done < len(self._steps) and self._num_tokens + len(self._steps[self._num_done].tokens) <= num_tokens:
            self._step()

    def _step(self) -> None:
        """Run the next step, and add the times that it takes to `took`."""
        batch, took = self._steps[self._num_done], self.took
        took.busy_s -= self._model.busy_s
        took.processor_s -= time.process_time()
        began_s = time.perf_counter()
        self._model.download(self._model.run(batch))
        step_s = time.perf_counter() - began_s
        took.processor_s += time.process_time()
        took.busy_s += self._model.busy_s
        if self._num_done < self._num_prompts:
            took.prompts_s += step_s
        else:
            took.decoding_s += step_s
        self._num_done += 1
        self._num_tokens += len(batch.tokens)
