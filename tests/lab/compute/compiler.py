"""`python -m tests.lab compiler`: the cost of compiling and the speed of compiled code. Most figures are compared with a
limit that the same run measures."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from compiler.backends.cpu.pipeline import pipeline
from compiler.cache import Cache
from compiler.codegen.kept import KeptCode
from compiler.driver import Options, compile_module
from compiler.frontend.config import Activation, ModelConfig
from compiler.frontend.decoder import StepBounds, build_step
from compiler.frontend.rope import Rope
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.values import Alloc
from compiler.ir.graph.visit import operands
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.types import TensorType, tensor
from compiler.ops.products.matmul import MATMUL
from compiler.signature import key_of
from deploy.bench.measure import Figure, report
from deploy.bench.synthetic import dtypes_of
from runtime.executable import Executable
from runtime.session import Session
from tests.lab.compute.traffic import bandwidth
from tests.lab.compute.tvm_plan import planned_bytes
from tests.lab.timing import best_s, by_turns

F32 = DType.F32
HIDDEN = 1024
BOUNDS = StepBounds(max_tokens=1024, max_seqs=64, max_context=4096)


def decoder(num_layers: int, bounds: StepBounds = BOUNDS) -> IRModule:
    config = ModelConfig(
        "llama", 32000, HIDDEN, 5632, num_layers, 16, 4, 64, Activation.SILU, 1e-5, 4096, 0.125, (None,) * num_layers, Rope(1e4, 64)
    )
    return build_step(config, dtypes_of(config), bounds, F32)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lab compiler", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--peer", choices=("tvm",), help="measure only the comparison with this peer, an optional package (tvm: apache-tvm)"
    )
    args = parser.parse_args(argv)
    figures: list[Figure] = []
    for part in (
        (memory_over_tvm,) if args.peer else (compile_time, recompile_time, fusion_growth, step_cost, empty_call, bandwidth, matmul, memory)
    ):
        figures += part()
    report(figures, as_json=args.json)


# --- compiling ---------------------------------------------------------------------------------------------------------


def compile_time() -> list[Figure]:
    times = by_turns({str(num): lambda num=num: compile_module(decoder(num)) for num in (28, 80)}, rounds=5)
    pairs = sorted(many / few for few, many in zip(times["28"], times["80"], strict=True))
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder))
        module = decoder(28)
        key = key_of(module, Options().target.key)
        cache.store(key, compile_module(module))
        cached = best_s(lambda: Session(_found(cache, module), device_threads=1).close(), most=5)
    return [
        Figure("compile a step of 28 layers", min(times["28"]), "s", 8.0),
        Figure(
            "compile 80 layers over 28 layers",
            min(times["80"]) / min(times["28"]),
            "x",
            1.2,
            note=f"best of 5 alternating runs; ratios of pairs {pairs[0]:.2f} to {pairs[-1]:.2f}",
        ),
        Figure("open a step of 28 layers from the cache", cached, "s", 0.15, note="look-up, read, load"),
    ]


def recompile_time() -> list[Figure]:
    """Compile for one context, then for twice the context with the code that the first compilation kept. The figure is the CPU time of the
    second compilation divided by that of the first, the median of three such pairs."""
    longer = StepBounds(BOUNDS.max_tokens, BOUNDS.max_seqs, 2 * BOUNDS.max_context)
    ratios: list[float] = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            first = _cpu_s(decoder(28), KeptCode(Path(folder)))
            ratios.append(_cpu_s(decoder(28, longer), KeptCode(Path(folder))) / first)
    note = f"28 layers, context {BOUNDS.max_context} to {longer.max_context}; {min(ratios):.2f} to {max(ratios):.2f}"
    return [Figure("CPU time of compiling for another context over a first compilation", sorted(ratios)[1], "x", 0.5, note=note)]


def _cpu_s(module: IRModule, kept: KeptCode) -> float:
    started = time.process_time()
    compile_module(module, Options(kept=kept))
    return time.process_time() - started


def _found(cache: Cache, module: IRModule) -> Executable:
    found = cache.find(key_of(module, Options().target.key))
    assert found is not None
    return found


def fusion_growth() -> list[Figure]:
    """Measure how compile time grows with the number of operators: in chains of doublings, where each operator reads the previous result
    twice, and in a long chain of `exp`."""
    figures: list[Figure] = []
    for name, operator, counts in (("doublings", "add(x{i}, x{i})", (8, 16, 32, 64)), ("exponentials", "exp(x{i})", (600,))):
        for count in counts:
            lines = "\n".join(f"    x{i + 1} = {operator.format(i=i)}" for i in range(count))
            text = f"func main(x0: f32[n]) -> f32[n] where n in 0..64 {{\n  dataflow {{\n{lines}\n  }}\n  return x{count}\n}}\n"
            seconds = best_s(lambda text=text: compile_module(parse(text)), most=5)
            figures.append(Figure(f"compile a chain of {count} {name}", seconds, "s", 1.0))
    return figures


# --- launching ---------------------------------------------------------------------------------------------------------

_KERNEL = """
prim touch(a: f32[n], out b: f32[n]) where n in 0..64 attrs {schedule="none"} {
  for parallel p in 16 { for vector l in 4 { when dim(4*p + l) < dim(n) { b[4*p + l] = a[4*p + l] } } }
}
"""


def step_cost() -> list[Figure]:
    figures: list[Figure] = []
    for threads, goal in ((1, 1.5), (2, 3.0)):
        times = {}
        for count in (1, 301):
            calls = "\n".join(f"    v{i + 1} = call_tir @touch(v{i}) -> f32[n]" for i in range(count))
            text = f"func main(v0: f32[n]) -> f32[n] where n in 0..64 {{\n  dataflow {{\n{calls}\n  }}\n  return v{count}\n}}\n{_KERNEL}"
            session = Session(compile_module(parse(text)), device_threads=threads, pinned=True)
            x = np.zeros(64, np.float32)
            times[count] = best_s(lambda s=session, x=x: s.call("main", x, views=True), most=500)
            session.close()
        figures.append(Figure(f"captured launch, threads: {threads}", (times[301] - times[1]) / 300 * 1e6, "us", goal))
    session = Session(compile_module(parse(text)), device_threads=2, pinned=True)
    session.call("main", x)
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1.0)
    figures.append(Figure("CPU time per second of an idle team of threads", time.process_time() - before, "s", 0.005))
    session.close()
    return figures


_EMPTY = {
    "empty_call_us": ("func main(x: f32[n]) -> f32[n] where n in 0..64 { return x }", 4.0, "the argument is returned"),
    "empty_launch_us": (
        "func main(x: f32[n]) -> f32[n] where n in 0..64 { dataflow { y = negative(x) } return y }",
        3.0,
        "one kernel on one element; the result is copied",
    ),
}


def empty_call() -> list[Figure]:
    """Measure the overhead of a call from Python: of a function that returns its argument, and of a kernel on one element."""
    figures: list[Figure] = []
    x = np.zeros(1, np.float32)
    for name, (text, goal, note) in _EMPTY.items():
        session = Session(compile_module(parse(text)), device_threads=1)

        def calls(session: Session = session) -> None:
            for _ in range(1000):
                session.call("main", x)

        figures.append(Figure(name, best_s(calls) * 1000, "us", goal, note=note))
        session.close()
    return figures


# --- products ----------------------------------------------------------------------------------------------------------


def matmul() -> list[Figure]:
    n = 1024
    a, b = Var("a", tensor((DimVar("m", 0, n), n), F32)), Var("b", tensor((n, n), F32))
    builder = Builder()
    with builder.function("main", (a, b)):
        with builder.dataflow():
            y = builder.call(MATMUL, a, b)
        builder.returns(y)
    session = Session(compile_module(builder.finish()), device_threads=2, pinned=True)
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((n, n), np.float32) for _ in range(2))
    ours = best_s(lambda: session.call("main", x, w, views=True))
    blas = best_s(lambda: x @ w)
    session.close()
    rate = 2 * n**3 / 1e9
    return [Figure("f32 matmul 1024^3 over BLAS", blas / ours, "x", 0.8, True, f"{rate / ours:.0f} and {rate / blas:.0f} GFLOP/s")]


# --- planned memory ----------------------------------------------------------------------------------------------------


def memory() -> list[Figure]:
    """Compare the planned arena for the step's activations with the memory of a pool that keeps blocks of exact sizes, over a series of
    sequence lengths and batch sizes."""
    module = pipeline(Options().target).until("plan_memory")(decoder(28))
    planned = module.graph("step").arena
    assert planned is not None and planned.is_const
    figures = [Figure("planned arena", planned.const / 2**20, "MiB", note="for all lengths and batch sizes within the bounds")]
    for name, sizes, goal in (("prefill 128 256 512 1024", (128, 256, 512, 1024), 0.22), ("decode 1 16 32 64", (1, 16, 32, 64), 0.40)):
        own = pipeline(Options().target).until("plan_memory")(decoder(28, StepBounds(max(sizes), 64, 4096)))
        pool = exact_pool_bytes(own, sizes)
        arena = own.graph("step").arena
        assert arena is not None and arena.is_const
        figures.append(
            Figure(
                f"saved relative to an exact-size pool, {name}", 1 - arena.const / pool, "of bytes", goal, True, f"{pool / 2**20:.1f} MiB"
            )
        )
    return figures


def memory_over_tvm() -> list[Figure]:
    """Compare the size of our memory plan with TVM's for the same calls with the same lifetimes."""
    figures: list[Figure] = []
    for most_tokens in (1024, 64):
        module = pipeline(Options().target).until("lift_workspace")(decoder(28, StepBounds(most_tokens, 64, 4096)))
        arena = pipeline(Options().target).only(("explicit_memory", "plan_memory"))(module).graph("step").arena
        assert arena is not None and arena.is_const
        theirs = planned_bytes(module.graph("step"))
        note = f"{arena.const} and {theirs} bytes; at most {most_tokens} tokens of 64 sequences"
        figures.append(Figure("bytes of our plan over those of TVM Relax", arena.const / theirs, "x", 1.0, note=note))
    return figures


def exact_pool_bytes(module: IRModule, sizes: tuple[int, ...]) -> int:
    """Return the bytes that a memory pool holds after steps of these sizes. The pool has free lists, keyed by size rounded up to pages of 4
    KiB."""
    func = module.graph("step")
    bindings = func.body.bindings
    last: dict[Var, int] = {}
    for i, binding in enumerate(bindings):
        for atom in operands(binding.value):
            if isinstance(atom, Var):
                last[atom] = i
    tokens, rows = _variable(func.params[0]), _variable(func.params[5])
    free: dict[int, int] = {}
    total = 0
    for size in sizes:
        env = {tokens: size, rows: min(size, 64)}
        live: dict[int, list[int]] = {}
        for i, binding in enumerate(bindings):
            if isinstance(binding.value, Alloc) and isinstance(binding.value.type, TensorType):
                num_bytes = _bytes(binding.value.type, env)
                if free.get(num_bytes):
                    free[num_bytes] -= 1
                else:
                    total += num_bytes
                live.setdefault(last.get(binding.var, i), []).append(num_bytes)
            for num_bytes in live.pop(i, []):
                free[num_bytes] = free.get(num_bytes, 0) + 1
        for blocks in live.values():
            for num_bytes in blocks:
                free[num_bytes] = free.get(num_bytes, 0) + 1
    return total


def _variable(param: Var) -> DimVar:
    assert isinstance(param.type, TensorType) and param.type.shape is not None
    var = param.type.shape[0].var
    assert var is not None
    return var


def _bytes(type_: TensorType, env: dict[DimVar, int]) -> int:
    assert type_.shape is not None and type_.dtype is not None
    count = 1
    for dim in type_.shape:
        unknown = {v: v.upper if isinstance(v.upper, int) else (v.upper.const if isinstance(v.upper, Dim) else 1) for v in dim.vars()}
        count *= dim.evaluate({**{v: u or 1 for v, u in unknown.items()}, **env})
    return -(-count * type_.dtype.num_bytes // 4096) * 4096


if __name__ == "__main__":
    main(sys.argv[1:])
