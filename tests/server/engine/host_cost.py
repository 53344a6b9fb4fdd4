"""What a step costs besides the device: `python tests/server/engine/host_cost.py [streams] [vocabulary] [temperature]`.

The model returns the same logits at once, so all the time there is, is the engine's. Prints microseconds per step of decoding.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from runtime.step import StepBatch, StepLimits
from server.engine.loop import Engine
from server.messages import SamplingParams, Submit

NUM_STEPS = 300


class InstantModel:
    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self._logits = np.random.default_rng(0).normal(0, 3, (limits.max_seqs, limits.vocab_size)).astype(np.float32)

    def run(self, batch: StepBatch) -> np.ndarray:
        return self._logits[: len(batch.logit_rows)]

    def copy_page(self, source: int, target: int) -> None:
        raise AssertionError("nothing is shared here")


def main(num_streams: int = 64, vocab_size: int = 151_936, temperature: float = 0.0) -> None:
    limits = StepLimits(vocab_size, 4096, 512, num_streams, num_streams * 40 + 1)
    engine = Engine(InstantModel(limits), lambda message: None)
    for i in range(num_streams):
        prompt = tuple(np.random.default_rng(i).integers(0, vocab_size, 128).tolist())
        params = SamplingParams(max_tokens=NUM_STEPS + 100, temperature=temperature, ignore_eos=True, seed=i)
        engine.submit(Submit(str(i), prompt, params))
    while engine.scheduler.num_waiting or len(engine.scheduler.queue):
        engine.step()
    spent: dict[str, float] = {}
    for owner, name in (
        (engine.scheduler, "schedule"),
        (engine._batches, "build"),
        (engine._sampler, "sample"),
        (engine, "_publish"),
    ):
        timed(owner, name, spent)
    began = time.perf_counter()
    for _ in range(NUM_STEPS):
        engine.step()
    spent["step"] = time.perf_counter() - began
    figures = "  ".join(f"{name.strip('_')} {total / NUM_STEPS * 1e6:.0f}" for name, total in spent.items())
    print(f"{num_streams} streams, vocabulary {vocab_size}, temperature {temperature:g}: {figures} us")


def timed(owner: object, name: str, spent: dict[str, float]) -> None:
    inner = getattr(owner, name)

    def wrapped(*args: object) -> object:
        began = time.perf_counter()
        try:
            return inner(*args)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - began

    setattr(owner, name, wrapped)


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:3]), *(float(a) for a in sys.argv[3:4]))
