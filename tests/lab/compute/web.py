"""`python -m tests.lab web`: exports for browsers in Node, compared with the peak of Node's engine and with native code on one thread. If
Chromium is installed, it also measures the time from the browser's cache to the demo's first token. With `--peer`, it measures only the
export beside another engine with the same 4-bit weights, in Chromium.

The peak is measured by multiply-adds of registers, compiled by the same back end. The f32 product has 64 rows and 512 x 512 weights.
Decoding is for one sequence with 128 tokens and 4-bit weights. All programs run in turn, because the speed of a shared machine changes from
second to second. A peer and the export run in one page, each with one thread: 128 tokens of prefill, and 8 decoded tokens after them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from compiler.backends.wasm.codegen.module import memory_flags
from compiler.driver import Options, compile_module
from compiler.frontend.config import ModelConfig
from compiler.frontend.layers.nn import Net, WeightFormat
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Var
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.types import tensor
from compiler.machine.target import get
from deploy import demo
from deploy.bench.checkpoint import write_checkpoint
from deploy.bench.compute.model import Model
from deploy.bench.limits import multiplying
from deploy.bench.measure import Figure, report
from deploy.bench.synthetic import RandomWeights, synthetic_config
from deploy.cli.sources import load_of
from deploy.export.web import export_web
from deploy.export.weights import write_block
from deploy.model_loading.known import begin
from deploy.model_loading.servable import Servable
from deploy.model_loading.stages import advance
from runtime.flat_program import flat_program
from tests.lab.browser import CONTEXT as PROMPT_CONTEXT
from tests.lab.browser import DEMO, EXPORT, PEERS, check_peer, compare, first_token_s, open_tab, write_peer
from tests.lab.chromium import installed
from tests.lab.node import Node
from tests.lab.timing import by_turns

ROWS, SIZE = 64, 512
CONTEXT = 128
ROUNDS = 12  # rounds of measurement
REPEATS, TOKENS = 20, 4  # products and tokens per round; the message that starts a round takes a tenth of a millisecond
PEER_ROUNDS = 2
PEER_GOALS = {"prefill": 2.0, "decode": 1.3}
TARGET = get("wasm-relaxed")
NATIVE = "x86-64-v3"


def write_kernel(folder: Path, module: IRModule, entry: str, shapes: list[list[int]], weights: Mapping[str, tuple[int, ...]]) -> None:
    """Write a program without a model in the format that node.mjs reads."""
    executable = compile_module(module, Options(TARGET))
    flat = flat_program(executable, entry)
    folder.mkdir()
    (folder / "kernel.wasm").write_bytes(executable.object_code)
    described = {"program": flat, "entry": entry, "shapes": shapes, "memory_flags": memory_flags(executable.object_code)}
    (folder / "kernel.json").write_bytes(msgspec.json.encode(described))
    write_block(folder / "weights.bin", flat, executable, RandomWeights(weights))


def product() -> IRModule:
    net = Net({"w.weight": DType.BF16}, WeightFormat(32))  # the dtype of random weights; they are multiplied as f32
    x = Var("x", tensor((ROWS, SIZE), DType.F32))
    with net.function("product", (x,)):
        net.builder.returns(net.linear(x, "w", SIZE, SIZE))
    return net.builder.finish()


def write_peak(folder: Path) -> float:
    """Write the program that measures the peak. Return the number of operations of one run."""
    text, steps, operations, args = multiplying("f32", TARGET)
    text = text.replace("steps: shape[n]", "steps: i32[n]")  # the inputs of an export must be tensors
    write_kernel(folder, parse(text), "main", [list(np.shape(args[0])), [steps]], {})
    return operations


def measure(config: ModelConfig, folder: Path) -> list[Figure]:
    node = Node()
    model = None
    try:
        operations = write_peak(folder / "peak")
        write_kernel(folder / "product", product(), "product", [[ROWS, SIZE]], {"w.weight": (SIZE, SIZE)})
        node.open("peak", folder / "peak")
        for threads in (1, 2):
            node.open(f"product on {threads}", folder / "product", threads=threads)
        checkpoint = folder / "checkpoint"
        checkpoint.mkdir()
        write_checkpoint(config, checkpoint)
        load = load_of(str(checkpoint), quantize="int4-32", max_context=2 * CONTEXT, max_batch=1, kv_dtype="bf16")
        export_web(advance(begin(load), Servable), "synthetic", folder / "model", levels=[TARGET.name])
        node.open("decode", folder / "model")
        runs: dict[str, Callable[[], object]] = {"peak": lambda: node.run("peak", REPEATS), "decode": lambda: node.run("decode", TOKENS)}
        for threads in (1, 2):
            runs[f"product on {threads}"] = lambda name=f"product on {threads}": node.run(name, REPEATS)
        if get(NATIVE).can_run_here:
            model = Model(config, "int4-32", 1, target=get(NATIVE))
            decode = model.prepared(1, 1, CONTEXT)
            runs["native decode"] = lambda: [decode() for _ in range(TOKENS)]
        return figures(by_turns(runs, rounds=ROUNDS), operations, sum(_sizes(folder / "model").values()))
    finally:
        node.close()
        if model is not None:
            model.session.close()


def figures(times: Mapping[str, list[float]], operations: float, num_bytes: int) -> list[Figure]:
    """Compute the figures from the shortest time of each program."""
    best = {name: min(found) for name, found in times.items()}
    peak = REPEATS * operations / best["peak"]
    one, two = (REPEATS * 2 * ROWS * SIZE * SIZE / best[f"product on {threads}"] for threads in (1, 2))
    rates = f"{one / 1e9:.1f} of {peak / 1e9:.1f} GFLOP/s"
    found = [
        Figure("f32 product over the measured peak", one / peak, "x", 0.70, True, rates),
        Figure("two threads over one", two / one, "x", 1.7, True, f"{two / 1e9:.1f} GFLOP/s"),
        Figure("module, runtime and program", num_bytes / 1000, "KB", 400, note="what a browser loads beside weights and vocabulary"),
    ]
    if "native decode" in best:
        ratio = best["native decode"] / best["decode"]
        note = f"{TOKENS / best['decode']:.1f} of {TOKENS / best['native decode']:.1f} tokens per second"
        found.append(Figure(f"int4 decode over one native thread ({NATIVE})", ratio, "x", 0.80, True, note))
    return found


def measure_first_token(folder: Path) -> list[Figure]:
    """Measure the demo in Chromium, if it is installed."""
    if installed() is None:
        return []
    load = load_of(demo.NAME, quantize="int4-32", max_batch=1, kv_dtype="bf16")
    (folder / DEMO).mkdir()
    export_web(advance(begin(load), Servable), demo.NAME, folder / DEMO, levels=[TARGET.name])
    return [Figure("from the browser's cache to the demo's first token", first_token_s(folder), "s", 0.5)]


def measure_peer(config: ModelConfig, folder: Path, peer: str, modules: Path) -> list[Figure]:
    check_peer(peer, modules)
    write_checkpoint(config, folder)
    load = load_of(str(folder), quantize="int4-32", max_context=PROMPT_CONTEXT, max_batch=1, kv_dtype="bf16")
    (folder / EXPORT).mkdir()
    export_web(advance(begin(load), Servable), "synthetic", folder / EXPORT, levels=[TARGET.name])
    write_peer(peer, modules, folder, config)
    with open_tab(folder) as tab:
        found = compare(tab, peer, PEER_ROUNDS)
    return [peer_figure(kind, found[kind], peer, goal) for kind, goal in PEER_GOALS.items()]


def peer_figure(kind: str, times: Mapping[str, list[float]], peer: str, goal: float) -> Figure:
    ours, theirs = (1 / min(times[name]) for name in ("relaxserve", peer))
    rates = f"relaxserve {ours:.1f}, {peer} {theirs:.1f} tokens per second, one thread"
    return Figure(f"{kind} over {peer}", ours / theirs, "x", goal, True, rates)


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir() if file.suffix in (".wasm", ".mjs") or file.name == "program.json"}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab web", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--synthetic", default="0.5b", help="shape of the model that decodes")
    parser.add_argument("--layers", type=int, help="number of layers; that of the shape by default")
    parser.add_argument("--peer", choices=list(PEERS), help="measure only this engine, in Chromium")
    parser.add_argument("--node-modules", type=Path, default=Path("node_modules"), help="folder in which npm installed the peer")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    config = synthetic_config(options.synthetic, layers=options.layers)
    with tempfile.TemporaryDirectory(prefix="relaxserve-bench-") as folder:
        if options.peer:
            found = measure_peer(config, Path(folder), options.peer, options.node_modules)
        else:
            found = [*measure(config, Path(folder)), *measure_first_token(Path(folder))]
    report(found, as_json=options.json)


if __name__ == "__main__":
    main()
