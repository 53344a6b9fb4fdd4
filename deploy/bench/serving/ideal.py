"""The ideal of a load: the time that the model alone, without an engine, needs for the same tokens in the best order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from deploy.model_loading.costs import step_of
from deploy.model_loading.serving import CompiledModel
from server.engine.step_model import StepBatch

NUM_PROMPT = NUM_NEW = 128  # tokens in each client's prompt; new tokens of each client


@dataclass(frozen=True, slots=True)
class Took:
    prompts_s: float
    decoding_s: float
    processor_s: float  # CPU time of all threads, which other load on the machine does not increase

    @property
    def wall_s(self) -> float:
        return self.prompts_s + self.decoding_s


@dataclass(frozen=True, slots=True)
class Ideal:
    model: CompiledModel

    def run(self, num_clients: int) -> Took:
        """Time all prompts, in steps as large as possible, and then steps with one token of each client."""
        limits = self.model.limits
        together = max(1, min(num_clients, limits.max_tokens // NUM_PROMPT))
        counts = [min(together, num_clients - first) for first in range(0, num_clients, together)]
        prompts = [step_of(limits, num_seqs=count, num_each=NUM_PROMPT, context=NUM_PROMPT) for count in counts]
        contexts = range(NUM_PROMPT + 1, NUM_PROMPT + NUM_NEW)
        tokens = [step_of(limits, num_seqs=num_clients, num_each=1, context=context) for context in contexts]
        processor_s = -time.process_time()
        prompts_s, decoding_s = self._seconds(prompts), self._seconds(tokens)
        return Took(prompts_s, decoding_s, processor_s + time.process_time())

    def _seconds(self, batches: Sequence[StepBatch]) -> float:
        began_s = time.perf_counter()
        for batch in batches:
            self.model.download(self.model.run(batch))
        return time.perf_counter() - began_s


def mean_took(several: Sequence[Took]) -> Took:
    return Took(*(fmean(getattr(took, field.name) for took in several) for field in fields(Took)))
