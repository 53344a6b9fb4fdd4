"""Shares of what a card can do, printed as JSON, a line as soon as a result is known:

    python -m tests.lab.gpu_day.shares copies         the bandwidth of copies
    python -m tests.lab.gpu_day.shares product        a product: whether a row has the same bits in a batch as alone, and the rate
    python -m tests.lab.gpu_day.shares shape FORMAT   steps of the 8B shape with few layers, and the time of each kernel

The bandwidth of copies counts the bytes that are read and those that are written.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compiler.bind import bind_values
from compiler.driver import Options, compile_module
from compiler.frontend.config import ModelConfig
from compiler.frontend.decoder import ENTRY, StepBounds
from compiler.ir.dtypes import DType
from compiler.ir.text.parser import parse
from compiler.machine.target import Target, of_gpu
from deploy.bench.compute.case import Case
from deploy.bench.compute.model import Model
from deploy.bench.synthetic import llama_config, synthetic_config
from runtime.cache_groups import PAGE_SIZE
from runtime.device.cuda.card import capability_of
from runtime.session import Session
from tests.lab.gpu_day.steps import FORMATS, LAYERS
from tests.lab.planned import Sizes, planned_bytes

COUNTS = (1, 8, 9, 40, 64, 65, 130)  # numbers of rows, chosen so that tiles of every height are used
ADD = "func main(x: f32[n]) -> object where n in 0..9 { dataflow { y = exp(x) } return y }"
WHOLE_LAYERS = 32  # number of layers of the 8B shape


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes of a run."""

    config: ModelConfig
    copied_bytes: int
    product: tuple[int, int, int]  # rows, columns, k
    cases: tuple[Case, ...]  # a prefill first: its logits depend on no earlier keys, so those of peers are comparable
    rounds: int

    @property
    def bounds(self) -> StepBounds:
        tokens, sequences, contexts = zip(*self.cases, strict=True)
        return StepBounds(max(tokens), max(sequences), max(contexts) + PAGE_SIZE)


SMALL = Extent(llama_config(128, 1, 2, 1, 64, 128, 256), 1 << 20, (65, 64, 64), (Case(16, 1, 16), Case(2, 2, 24)), 1)


def extent(*, is_small: bool) -> Extent:
    if is_small:
        return SMALL
    cases = Case(2048, 1, 2048), Case(1, 1, 1024), Case(8, 8, 1024), Case(64, 64, 1024)
    return Extent(synthetic_config("8b-shape", layers=LAYERS), 4 << 30, (8192, 8192, 8192), cases, 20)


@dataclass(frozen=True, slots=True)
class Card:
    extent: Extent
    target: Target

    @classmethod
    def of(cls, extent: Extent) -> Card:
        return cls(extent, of_gpu("host", capability_of(0)))

    def model(self, form: str) -> Model:
        return Model(self.extent.config, form, None, target=self.target, device="cuda", bounds=self.extent.bounds)

    def copies(self) -> float:
        """Return the bytes per second that a copy reads and writes together."""
        session, _ = self._session(ADD)
        device, count = session.device, self.extent.copied_bytes // 4
        one, other = (device.empty((count,), np.dtype(np.float32)) for _ in range(2))
        word = device.empty((1,), np.dtype(np.float32))

        def copy() -> None:
            device.copy(other, one)
            device.download(word)  # blocks until the copy has ended

        return 2 * self.extent.copied_bytes / best_s(copy, self.extent.rounds)

    def product(self) -> dict[str, Any]:
        """Compare the rows of a batch with the same rows alone, for random operands and for sums that cancel, and measure the rate."""
        rows, columns, k = self.extent.product
        given, block = f"x: bf16[n, {k}], weight w: bf16[{columns}, {k}]", '{ dataflow { y = linear(x, w, out_dtype="f32") } return y }'
        session, executable = self._session(f"func main({given}) -> object where n in 0..{rows} {block}")
        rng = np.random.default_rng(0)
        x, w = (rng.standard_normal(shape, np.float32).astype(DType.BF16.numpy) for shape in ((rows, k), (columns, k)))
        cancelling = x.copy()
        cancelling[:, 1::2] = -cancelling[:, ::2]
        bind_values(session, executable, "main", {"w": w})
        differ: list[str] = []
        for name, operand in {"random": x, "cancelling": cancelling}.items():
            whole = session.call("main", operand)
            counts = [n for n in COUNTS if n <= rows]
            differ += [f"{name} {n}" for n in counts if not np.array_equal(session.call("main", operand[:n]), whole[:n])]
        uploaded = session.device.upload(x)
        seconds = self.device_s(session, lambda: session.call("main", uploaded, views=True))
        return {"product": f"{rows} x {columns} x {k}", "flops": 2 * rows * columns * k / seconds, "counts_that_differ": differ}

    def steps(self, form: str) -> Iterator[dict[str, Any]]:
        """Yield the figures of each step: its time by the card's clock, and that of each kernel."""
        bytes_per_s = self.copies()
        began_s = time.perf_counter()
        model = self.model(form)
        weight_bytes = sum(array.nbytes for array in model.weights.values())
        yield {"copies_bytes_per_s": bytes_per_s, "bound_s": time.perf_counter() - began_s, "weight_bytes": weight_bytes}
        for case in self.extent.cases:
            run, planned = model.prepared(*case), sum(self._planned(model, case).values())
            logits = np.asarray(model.session.download(first_of(run())))
            seconds = self.device_s(model.session, run)
            with model.session.profile() as profile:
                run()
            repeated = repeated_share(profile.count, profile.seconds, self.extent.config.num_layers)
            whole_s = seconds * (1 + repeated * (WHOLE_LAYERS / self.extent.config.num_layers - 1))
            yield {
                "step": str(case),
                "seconds": seconds,
                "tokens_per_s": case.tokens / seconds,
                f"tokens_per_s_of_{WHOLE_LAYERS}_layers": case.tokens / whole_s,
                "planned_bytes": planned,
                "share_of_copies": planned / bytes_per_s / seconds,
                "share_outside_kernels": 1 - profile.total_s / seconds,
                "is_finite": bool(np.isfinite(logits.astype(np.float32)).all()),
                "kernels": [{"kernel": name, "launches": profile.count[name], "seconds": s} for name, s in profile.seconds.items()],
            }

    def device_s(self, session: Session, run: Callable[[], Any]) -> float:
        """Return the shortest time of a run, measured by the card's clock."""
        times: list[float] = []
        for _ in range(self.extent.rounds + 1):  # the first run captures graphs
            session.device.download(first_of(run()))
            before = session.device.busy_s
            session.device.download(first_of(run()))
            times.append(session.device.busy_s - before)
        return min(times)

    def _session(self, text: str) -> tuple[Session, Any]:
        executable = compile_module(parse(text), Options(self.target))
        return Session(executable), executable

    def _planned(self, model: Model, case: Case) -> dict[str, int]:
        rows = case.sequences
        variables = {"t": case.tokens, "s": rows, "r": rows, "p": -(-case.context // PAGE_SIZE), "pages": model.pages}
        return planned_bytes(model.module, ENTRY, self.target, Sizes(variables, rows, case.context))


def repeated_share(count: Mapping[str, int], seconds: Mapping[str, float], layers: int) -> float:
    """Return the share of a step's time in kernels that run in every layer."""
    return sum(s for name, s in seconds.items() if count[name] % layers == 0) / sum(seconds.values())


def first_of(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def best_s(run: Callable[[], None], rounds: int) -> float:
    times: list[float] = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.gpu_day.shares", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("copies", "product", "shape"))
    parser.add_argument("format", nargs="?", default=FORMATS[0], help="how the weights of the shape are held")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a model of a card in software")
    options = parser.parse_args(argv)
    card = Card.of(extent(is_small=options.small))
    if options.what == "shape":
        for figures in card.steps(options.format):
            print(json.dumps(figures), flush=True)
    elif options.what == "product":
        found = card.product()
        print(json.dumps(found))
        raise SystemExit(f"rows differ in batches: {', '.join(found['counts_that_differ'])}" if found["counts_that_differ"] else 0)
    else:
        print(json.dumps({"copies_bytes_per_s": card.copies()}))


if __name__ == "__main__":
    main()
