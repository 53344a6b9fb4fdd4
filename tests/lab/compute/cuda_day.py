"""`python -m tests.lab cuda-day`: run all measurements and tests that need a GPU, and write one JSON file.

The parts run in this order:

    1. a description of the GPU
    2. its copy bandwidth
    3. matrix products: whether a row has the same bits in a batch as alone, and the rate as a share of the peak
    4. steps of a model, with the time of each kernel and the time for copying the same number of bytes
    5. the same steps by peers that are installed: PyTorch, eager and compiled, and vLLM
    6. the tests marked `gpu`, and some of them under compute-sanitizer if it is installed

If a part fails, its error is written to the file, and the next part runs. The file is written after each part, so that an interrupted run
keeps its results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.bind import bind_values
from compiler.driver import Options, compile_module
from compiler.frontend.config import ModelConfig
from compiler.frontend.decoder import ENTRY
from compiler.ir.dtypes import DType
from compiler.ir.text.parser import parse
from compiler.machine.target import Target, of_gpu
from deploy.bench.compute.case import Case, Work
from deploy.bench.compute.model import Model
from deploy.bench.limits import Limits
from deploy.bench.synthetic import llama_config, synthetic_config
from runtime.cache_groups import PAGE_SIZE
from runtime.device.cuda.card import capability_of
from runtime.device.registry import number_of
from runtime.session import Session
from server.settings import SettingsError
from tests.lab.card_peer import CARD_PEERS
from tests.lab.compute.model import CardSubject, measure_on_card
from tests.lab.planned import Sizes, planned_bytes

ROOT = Path(__file__).resolve().parents[3]
COUNTS = (1, 8, 9, 40, 64, 65, 130)  # numbers of rows, chosen so that tiles of every height are used
MARKED = "gpu and not slow"  # value of pytest's option -m, which runs tests on the real card
SANITIZED = "tests/runtime/device/cuda/test_products.py"  # tests of small kernels; each kernel has asynchronous copies in flight
TOOLS = ("memcheck", "racecheck")


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes of a run. A quick run is small enough for a GPU simulated in software."""

    config: ModelConfig
    copied_bytes: int
    product: tuple[int, int, int]  # rows, columns, k
    cases: tuple[Case, ...]  # a prefill first: its logits depend on no earlier keys, so those of peers are comparable
    rounds: int
    tests: bool


WHOLE = Extent(
    synthetic_config("8b-shape"),
    4 << 30,
    (8192, 8192, 8192),
    (Case(2048, 1, 2048), Case(1, 1, 1024), Case(8, 8, 1024), Case(32, 32, 1024)),
    20,
    tests=True,
)
QUICK = Extent(
    llama_config(64, 1, 2, 1, 32, 128, 256), 1 << 20, (80, 128, 64), (Case(16, 1, 16), Case(1, 1, 40), Case(4, 4, 24)), 1, tests=False
)


@dataclass(frozen=True, slots=True)
class Visit:
    device: str
    target: Target
    extent: Extent
    found: dict[str, Any]  # results so far, by name of the part
    python: str = sys.executable  # interpreter that has the peers
    logits: list[NDArray[Any]] = field(default_factory=list[NDArray[Any]])  # of the first case
    works: dict[Case, Work] = field(default_factory=dict[Case, Work])

    def session(self, text: str) -> tuple[Session, Any]:
        executable = compile_module(parse(text), Options(self.target))
        return Session(executable, device_number=number_of(self.device)), executable

    # --- parts -------------------------------------------------------------------------------------------------------

    def card(self) -> dict[str, Any]:
        session, _ = self.session("func main(x: f32[n]) -> object where n in 0..9 { dataflow { y = exp(x) } return y }")
        capability = ".".join(map(str, capability_of(number_of(self.device))))
        return {"compute_capability": capability, "target": self.target.name, "free_bytes": session.device.limits.free_bytes}

    def copies(self) -> dict[str, float]:
        """Measure the bandwidth of copies, which counts the bytes that are read and those that are written."""
        session, _ = self.session("func main(x: f32[n]) -> object where n in 0..9 { dataflow { y = exp(x) } return y }")
        device, count = session.device, self.extent.copied_bytes // 4
        one, other = (device.empty((count,), np.dtype(np.float32)) for _ in range(2))
        word = device.empty((1,), np.dtype(np.float32))

        def copy() -> None:
            device.copy(other, one)
            device.download(word)  # blocks until the copy has ended

        return {"bytes_per_s": 2 * self.extent.copied_bytes / _best_s(copy, self.extent.rounds)}

    def products(self) -> dict[str, Any]:
        """Check that a row has the same bits in a batch as alone, for random operands and for sums that cancel, and measure the rate."""
        rows, columns, k = self.extent.product
        params, block = f"x: bf16[n, {k}], weight w: bf16[{columns}, {k}]", '{ dataflow { y = linear(x, w, out_dtype="f32") } return y }'
        text = f"func main({params}) -> object where n in 0..{rows} {block}"
        session, executable = self.session(text)
        rng = np.random.default_rng(0)
        x, w = (rng.standard_normal(shape, np.float32).astype(DType.BF16.numpy) for shape in ((rows, k), (columns, k)))
        cancelling = x.copy()
        cancelling[:, 1::2] = -cancelling[:, ::2]
        bind_values(session, executable, "main", {"w": w})
        differ: list[str] = []
        for name, given in {"random": x, "cancelling": cancelling}.items():
            whole = session.call("main", given)
            differ += [f"{name} {n}" for n in COUNTS if n <= rows and not np.array_equal(session.call("main", given[:n]), whole[:n])]
        uploaded = session.device.upload(x)
        seconds = self._device_s(session, lambda: session.call("main", uploaded, views=True))
        return {"counts": COUNTS, "differ": differ, "flops": 2 * rows * columns * k / seconds}

    def steps(self) -> list[dict[str, Any]]:
        model = Model(self.extent.config, "bf16", None, target=self.target)
        bytes_per_s = self.found.get("copies", {}).get("bytes_per_s")
        rows: list[dict[str, Any]] = []
        for case in self.extent.cases:
            run, planned = model.prepared(*case), sum(self._planned(model, case).values())
            seconds = self._device_s(model.session, run)
            self.works[case] = model.work(case)
            if not self.logits:
                self.logits.append(np.array(model.session.download(run())))
            with model.session.profile() as profile:
                run()
            share = planned / bytes_per_s / seconds if bytes_per_s else None
            kernels = {name: {"launches": profile.count[name], "seconds": s} for name, s in profile.seconds.items()}
            row = {"case": str(case), "tokens_per_s": case.tokens / seconds, "seconds": seconds, "planned_bytes": planned}
            rows.append({**row, "share_of_copies": share, "seconds_of_kernels": profile.total_s, "kernels": kernels})
        return rows

    def _planned(self, model: Model, case: Case) -> dict[str, int]:
        rows = case.sequences
        pages = -(-case.context // PAGE_SIZE)
        variables = {"t": case.tokens, "s": rows, "r": rows, "p": pages, "pages": model.pages}
        return planned_bytes(model.module, ENTRY, self.target, Sizes(variables, rows, case.context))

    def peers(self) -> dict[str, Any]:
        """Return each peer's results, or why it was left out."""
        limits = Limits(self.found["copies"]["bytes_per_s"], self.found["products"]["flops"])
        subject = CardSubject(self.extent.config, self.works, self.logits[0], limits, self.device, self.python)
        return {
            kind: {"left_out": str(compared)} if isinstance(compared, SettingsError) else asdict(compared)
            for kind, compared in measure_on_card(list(CARD_PEERS), subject)
        }

    def tests(self) -> dict[str, Any]:
        """Return the last line of pytest's output: for the tests marked `gpu`, and for some tests under each tool of compute-sanitizer."""
        if not self.extent.tests:
            return {"left_out": "by --quick"}
        found: dict[str, Any] = {MARKED: _last_line([sys.executable, "-m", "pytest", "-q", "-m", MARKED, "-p", "no:cacheprovider"])}
        sanitizer = shutil.which("compute-sanitizer")
        for tool in TOOLS if sanitizer else ():
            command = [
                str(sanitizer),
                "--tool",
                tool,
                "--error-exitcode",
                "9",
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-m",
                MARKED,
                SANITIZED,
            ]
            found[tool] = _last_line(command)
        return found | ({} if sanitizer else {"left_out": "compute-sanitizer is not installed"})

    def _device_s(self, session: Session, run: Callable[[], Any]) -> float:
        """Return the shortest time of a run, measured by the card's clock."""
        least: list[float] = []
        for _ in range(self.extent.rounds + 1):  # the first run captures graphs
            session.device.download(_tensor(run()))
            before = session.device.busy_s
            session.device.download(_tensor(run()))
            least.append(session.device.busy_s - before)
        return min(least)


def _tensor(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _best_s(run: Callable[[], None], rounds: int) -> float:
    times: list[float] = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def _last_line(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    return f"{lines[-1]} (status {done.returncode})"


def visit(device: str, extent: Extent, file: Path, python: str = sys.executable) -> dict[str, Any]:
    """Run all parts. Return the results, which are also written to the file."""
    found: dict[str, Any] = {}
    here = Visit(device, of_gpu("host", capability_of(number_of(device))), extent, found, python)
    for part in (here.card, here.copies, here.products, here.steps, here.peers, here.tests):
        started = time.perf_counter()
        try:
            found[part.__name__] = part()
        except Exception as error:  # later parts may still succeed, and access to a GPU is often limited
            found[part.__name__] = {"error": f"{type(error).__name__}: {error}"}
        found.setdefault("seconds", {})[part.__name__] = time.perf_counter() - started
        file.write_text(json.dumps(found, indent=1, default=str) + "\n")
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lab cuda-day", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and no tests, for a software model of a GPU")
    parser.add_argument("--device", default="cuda", help="cuda, or cuda:N")
    parser.add_argument("--out", type=Path, default=Path("cuda-day.json"), help="file to write")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has PyTorch and vLLM; default: this one")
    options = parser.parse_args(argv)
    visit(options.device, QUICK if options.quick else WHOLE, options.out, options.peer_python)
    print(options.out.read_text(), end="")


if __name__ == "__main__":
    main()
