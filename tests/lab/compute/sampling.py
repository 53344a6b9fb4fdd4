"""`python -m tests.lab sampling`: the time to draw the tokens of one step, for various sampling parameters of the requests.

There are two kinds of logits: `flat` (normal with deviation 1, as from a model with random weights) and `peaked` (by Zipf's law in random
order, as from a trained model). Each row has a prompt and 100 drawn tokens, as in the engine. The figure is the time of the kernels; the
note gives the whole time: building arrays from the requests, the call, and building tokens and log-probabilities from its results.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from compiler.driver import compile_module
from compiler.frontend.sampler import SAMPLE_ENTRY, build_sampler
from deploy.bench.measure import Figure, report
from runtime.sampling import SampleBatch, Sampled
from runtime.session import Session
from server.constraints.rules import Bans, Rules
from server.engine.sampler import RowState, Sampler
from server.engine.step_model import GroupLimits, Logits, StepLimits
from server.messages import SamplingParams
from tests.doubles.model import NullModel
from tests.lab.timing import best_s

VOCAB, ROWS = 152_000, 32
GOAL_MS = 4.0
NUM_PROMPT, NUM_DRAWN = 500, 100
KINDS = {
    "greedy": SamplingParams(1, temperature=0.0),
    "temperature": SamplingParams(1, temperature=0.8),
    "top_k": SamplingParams(1, top_k=50),
    "top_p": SamplingParams(1, top_p=0.9),
    "typical_p": SamplingParams(1, typical_p=0.9),
    "penalties": SamplingParams(1, repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1),
    "log-probabilities": SamplingParams(1, logprobs=5),
    "everything": SamplingParams(
        1,
        min_tokens=NUM_DRAWN + 1,
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        min_p=0.02,
        typical_p=0.95,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        logit_bias=((7, 2.0), (9, -100.0)),
        banned_token_ids=(3, 4),
        stop_token_ids=(5,),
        logprobs=5,
    ),
}


class Drawing(NullModel):
    """A model that consists only of a sampler. It stores the arguments of its last call."""

    def __init__(self, session: Session) -> None:
        super().__init__(StepLimits(VOCAB, max_context=16, max_tokens=ROWS, max_seqs=ROWS, groups=(GroupLimits(2),)))
        self.session = session
        self.batch: SampleBatch | None = None

    def sample(self, logits: Logits, batch: SampleBatch) -> Sampled:
        self.batch = batch
        return Sampled.of(self.session.call(SAMPLE_ENTRY, logits, *batch.arrays))


def flat(rng: np.random.Generator) -> NDArray[np.float32]:
    return rng.normal(0, 1, (ROWS, VOCAB)).astype(np.float32)


def peaked(rng: np.random.Generator) -> NDArray[np.float32]:
    law = -1.3 * np.log(np.arange(1, VOCAB + 1))
    return np.stack([rng.permutation(law) for _ in range(ROWS)]).astype(np.float32)


def rows_of(params: SamplingParams, rng: np.random.Generator) -> list[RowState]:
    rows: list[RowState] = []
    for choice in range(ROWS):
        row = RowState(params, choice, tuple(rng.integers(0, VOCAB, NUM_PROMPT).tolist()))
        for token_id in rng.integers(0, VOCAB, NUM_DRAWN).tolist():
            row.advance(token_id)
        rows.append(row)
    return rows


def measure(threads: int | None) -> list[Figure]:
    session = Session(compile_module(build_sampler(VOCAB, ROWS)), device_threads=threads)
    model = Drawing(session)
    sampler = Sampler(model)
    figures: list[Figure] = []
    for name, params in KINDS.items():
        rng = np.random.default_rng(0)
        rows = rows_of(params, rng)
        masks = [Rules(Bans(params, frozenset(params.stop_token_ids), VOCAB)).mask()] * ROWS
        for kind in (flat, peaked):
            logits = kind(rng)
            whole_s = best_s(lambda logits=logits, rows=rows, masks=masks: sampler.sample(Logits(logits), rows, masks))
            assert model.batch is not None
            arrays = model.batch.arrays
            kernel_s = best_s(lambda logits=logits, arrays=arrays: session.call(SAMPLE_ENTRY, logits, *arrays))
            note = f"{whole_s * 1e3:.2f} ms from requests to tokens"
            figures.append(Figure(f"{name}, {kind.__name__}", kernel_s * 1e3, "ms", GOAL_MS, note=note))
    session.close()
    return figures


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab sampling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, help="by default all cores")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    report(measure(options.threads), as_json=options.json)


if __name__ == "__main__":
    main()
