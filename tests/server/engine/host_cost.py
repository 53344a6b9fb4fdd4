"""Measure the time that the host spends on a step: `python -m tests.server.engine.host_cost [streams] [vocabulary] [temperature] [device
ms]`.

The model sleeps for the given device time and returns constant logits. The program prints the microseconds of each part of a decoding step,
and the share of the step that is not device time, for the plain engine and for the overlapped engine.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from runtime.sampling import Logprobs, SampleBatch, Sampled
from server.engine.loop import Engine
from server.engine.overlap import OverlappedEngine
from server.engine.step_model import GroupLimits, Logits, StepBatch, StepLimits
from server.messages import SamplingParams, Submit

NUM_STEPS = 200


class SleepingModel:
    def __init__(self, limits: StepLimits, device_s: float) -> None:
        self.limits = limits
        self._device_s = device_s
        self._logits = np.random.default_rng(0).normal(0, 3, (limits.max_seqs, limits.vocab_size)).astype(np.float32)

    def run(self, batch: StepBatch) -> Logits:
        if self._device_s:
            time.sleep(self._device_s)
        return Logits(self._logits[: len(batch.logit_rows)])

    def sample(self, logits: Logits, batch: SampleBatch) -> Sampled:
        """Return zeros at once. Sampling is work of the device, and this program measures only the host."""
        nothing = np.zeros(len(batch.rows), np.int32)
        return Sampled(nothing, Logprobs(nothing, nothing, nothing, nothing, nothing))

    def is_encoded(self, key: bytes) -> bool:
        raise AssertionError("the benchmark has no images")

    def copy_page(self, group: int, source: int, target: int) -> None:
        raise AssertionError("the benchmark shares no pages")


def decoding(engine_class: type[Engine], num_streams: int, vocab_size: int, temperature: float, device_s: float) -> Engine:
    """Return an engine in which all requests are decoding: their prompts are already computed."""
    limits = StepLimits(vocab_size, 4096, 512, num_streams, (GroupLimits(num_streams * 40 + 1),))
    engine = engine_class(SleepingModel(limits, device_s), lambda message: None)
    for i in range(num_streams):
        prompt = tuple(np.random.default_rng(i).integers(0, vocab_size, 128).tolist())
        params = SamplingParams(max_tokens=NUM_STEPS + 200, temperature=temperature, ignore_eos=True, seed=i)
        engine.submit(Submit(str(i), prompt, params))
    while len(engine.scheduler.running) < num_streams or len(engine.scheduler.queue):
        engine.step()
    return engine


def main(num_streams: int = 64, vocab_size: int = 151_936, temperature: float = 0.0, device_ms: float = 20.0) -> None:
    engine = decoding(Engine, num_streams, vocab_size, temperature, 0.0)
    spent: dict[str, float] = {}
    parts = {"schedule": engine.scheduler, "build": engine._batches, "draw": engine._sampler, "_publish": engine}
    for name, owner in parts.items():
        timed(owner, name, spent)
    began = time.perf_counter()
    for _ in range(NUM_STEPS):
        engine.step()
    spent["step"] = time.perf_counter() - began
    figures = "  ".join(f"{name.strip('_')} {total / NUM_STEPS * 1e6:.0f}" for name, total in spent.items())
    print(f"{num_streams} streams, vocabulary {vocab_size}, temperature {temperature:g}: {figures} us")
    for engine_class in (Engine, OverlappedEngine):
        engine = decoding(engine_class, num_streams, vocab_size, temperature, device_ms / 1e3)
        before = engine.timing.step_s, engine.timing.kernel_s
        for _ in range(NUM_STEPS // 4):
            engine.step()
        step_s, kernel_s = engine.timing.step_s - before[0], engine.timing.kernel_s - before[1]
        print(f"  {engine_class.__name__}, device {device_ms:g} ms: host share {1 - kernel_s / step_s:.1%}")
        engine.close()


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
    main(*(int(a) for a in sys.argv[1:3]), *(float(a) for a in sys.argv[3:5]))
