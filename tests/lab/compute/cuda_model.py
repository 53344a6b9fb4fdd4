"""Predict steps on an H100 and an H200, or on older cards, from the machine code that NVIDIA's assembler makes of them. No GPU is needed.

For each kernel, tests/lab/sass/model.py gives its time, and its share of what the card's bandwidth or its tensor cores would allow. With
`--day FILE`, the times that a day with such a card measured are shown beside the predicted ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.frontend.decoder import StepBounds
from deploy.bench.compute.case import Case
from deploy.bench.synthetic import SHAPES, synthetic_config
from runtime.cache_groups import PAGE_SIZE
from tests.lab.sass.facts import LoopFacts, facts_of
from tests.lab.sass.measured import Measured, read_measured
from tests.lab.sass.model import CARDS, CARDS_OF, Card, Prediction, predict
from tests.lab.sass.step import Kernel, SquareCode, StepCode
from tests.lab.sass.tools import ToolMissing

FORMS = ("bf16", "int4-128")
CASES = (Case(1, 1, 1024), Case(64, 64, 1024), Case(2048, 1, 2048))
TARGET = "sm_90a"
SQUARE = 8192  # rows, columns and depth of the product of square matrices
# Goals on an H100, as shares of the limit, by format and case
GOALS = {
    ("bf16", CASES[0]): 0.88,
    ("int4-128", CASES[0]): 0.70,
    ("bf16", CASES[1]): 0.75,
    ("bf16", CASES[2]): 0.70,
    ("int4-128", CASES[2]): 0.70,
}
ATTENTION_GOAL, SQUARE_GOAL = 450e12, 0.85  # operations per second of attention in a prefill; share of the limit


@dataclass(frozen=True, slots=True)
class Step:
    form: str
    case: Case
    card: Card
    kernels: tuple[Prediction, ...]

    @property
    def seconds(self) -> float:
        return sum(k.launched.times * k.seconds for k in self.kernels)

    @property
    def limit_s(self) -> float:
        return sum(k.launched.times * k.limit_s for k in self.kernels)

    @property
    def share(self) -> float:
        return self.limit_s / self.seconds

    @property
    def attention_operations_per_s(self) -> float:
        found = [k for k in self.kernels if "attention" in k.launched.kernel.schedule]
        return sum(k.operations for k in found) / sum(k.seconds for k in found)


def predicted(code: StepCode, form: str, case: Case, card: Card) -> Step:
    return Step(form, case, card, tuple(predict(card, launched, case) for launched in code.launches(case)))


def square(card: Card) -> Prediction:
    return predict(card, SquareCode(SQUARE, TARGET).launch(), Case(SQUARE, 1, SQUARE))


def code_of(shape: str, form: str, cases: Sequence[Case] = CASES, target: str = TARGET) -> StepCode:
    tokens, sequences, contexts = zip(*cases, strict=True)
    return StepCode(synthetic_config(shape), form, target, StepBounds(max(tokens), max(sequences), max(contexts) + PAGE_SIZE))


def hot_loops(kernel: Kernel) -> list[LoopFacts]:
    """Return the facts of the loops that read memory."""
    facts = [facts_of(kernel.listing, loop) for loop in kernel.listing.innermost]
    return [found for found in facts if found.num_loads or found.copies]


def as_json(step: Step) -> dict[str, Any]:
    return {
        "format": step.form,
        "step": str(step.case),
        "card": step.card.name,
        "seconds": step.seconds,
        "share": step.share,
        "kernels": [
            {
                "kernel": k.launched.kernel.name,
                "times": k.launched.times,
                "blocks": k.launched.blocks,
                "registers": k.launched.kernel.usage.registers,
                "shared_bytes": k.launched.kernel.shared_bytes,
                "spilled_bytes": k.launched.kernel.usage.spilled_bytes,
                "blocks_per_multiprocessor": k.resident,
                "cycles_of_a_warp": k.warp,
                "cycles_of_issue": k.issue,
                "bytes_in_flight": k.flight,
                "seconds": k.seconds,
                "share": k.share,
            }
            for k in step.kernels
        ],
    }


def show(step: Step, measured: Measured | None = None) -> None:
    print(f"\n{step.form}, {step.case}, {step.card.name}: {1e3 * step.seconds:.2f} ms, {step.share:.2f} of the limit")
    heads = f"{'times':>6}{'blocks':>8}{'per SM':>7}{'regs':>6}{'trip':>7}{'issue':>7}{'MB in flight':>13}{'us':>8}{'share':>7}"
    print(f"{'kernel':44}{heads}{'measured us':>13}" if measured else f"{'kernel':44}{heads}")
    for k in sorted(step.kernels, key=lambda k: -k.launched.times * k.seconds):
        x, flight = k.launched, f"{k.flight / 1e6:.1f}" if k.flight else ""
        numbers = f"{x.times:6}{x.blocks:8}{k.resident:7}{x.kernel.usage.registers:6}{k.warp:7.0f}{k.issue:7.0f}{flight:>13}"
        found = measured.seconds(step.card.name, step.form, str(step.case), x.kernel.name) if measured else None
        print(f"{x.kernel.name[:43]:44}{numbers}{1e6 * k.seconds:8.2f}{k.share:7.2f}{'' if found is None else f'{1e6 * found:13.2f}'}")


def show_goals(steps: Sequence[Step]) -> None:
    card = CARDS[0]
    print(f"\n{'on an ' + card.name:44}{'predicted':>10}{'goal':>7}")
    for step in (s for s in steps if s.card is card):
        goal = GOALS.get((step.form, step.case))
        print(f"{f'{step.form}, {step.case}':44}{step.share:10.2f}{'' if goal is None else f'{goal:.2f}':>7}")
        if step.case.is_prefill:
            print(f"{'    attention, TFLOP/s':44}{step.attention_operations_per_s / 1e12:10.0f}{ATTENTION_GOAL / 1e12:7.0f}")
    print(f"{f'bf16, product {SQUARE}^3':44}{square(card).share:10.2f}{SQUARE_GOAL:7.2f}")


def show_loops(code: StepCode) -> None:
    heads = f"{'instr.':>8}{'loads':>7}{'in flight':>10}{'waits':>7}{'load-use':>9}{'copies':>7}{'barriers':>9}"
    print(f"\n{'loops that read memory':44}{heads}")
    for kernel in code.kernels.values():
        for f in hot_loops(kernel):
            use = "" if f.load_use is None else f.load_use
            numbers = f"{f.num_instructions:8}{f.num_loads:7}{f.loads_in_flight:10}{f.round_trips:7}{use:>9}{f.copies:7}{f.barriers:9}"
            print(f"{kernel.name[:43]:44}{numbers}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="cuda-model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b-shape", choices=list(SHAPES), help="the shape of the model")
    parser.add_argument("--format", dest="forms", action="append", help=f"how weights are held; default {' and '.join(FORMS)}")
    parser.add_argument("--target", default=TARGET, choices=list(CARDS_OF), help=f"what the cards are; default {TARGET}")
    parser.add_argument("--loops", action="store_true", help="also show the facts of each loop that reads memory")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--day", type=Path, help="day.jsonl of a day with a card: show what it measured beside what is predicted")
    options = parser.parse_args(argv)
    measured = None if options.day is None else read_measured(options.day)
    steps: list[Step] = []
    cards = CARDS_OF[options.target]
    for form in options.forms or FORMS:
        try:
            code = code_of(options.shape, form, target=options.target)
        except ToolMissing as missing:
            raise SystemExit(str(missing)) from None
        for case in CASES:
            steps += [predicted(code, form, case, card) for card in cards]
        if not options.json:
            for step in steps[-len(CASES) * len(cards) :]:
                show(step, measured)
            if options.loops:
                show_loops(code)
    if not options.json:
        if cards is CARDS:
            show_goals(steps)
    else:
        print(json.dumps([as_json(step) for step in steps], indent=1))
