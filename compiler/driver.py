"""Compile a module, level by level:

    .ir      the program as the front end writes it. `plan` runs the passes on the program
    .loops   scheduled loop nests in planned memory. `build` turns the nests into kernels, and the program into bytecode
    .ll      LLVM IR
    .s       assembly

With `Options.texts`, the executable contains the text of each level. The switches of `runtime.flags` print the levels during compilation.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from compiler.backends.pipeline import PHASES
from compiler.backends.registry import backend_of
from compiler.bytecode.emit import Signature, lower
from compiler.bytecode.kernel import KernelCode
from compiler.codegen.helpers import Helpers
from compiler.codegen.kept import KeptCode, kept_kernel
from compiler.codegen.link import LinkedCode, text_of
from compiler.codegen.machine_code import emitted
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.module import IRModule
from compiler.ir.text.printer import print_module
from compiler.machine.target import Target, host
from compiler.passes.base import Count, Dump, Instrument, Show, ShowChanges, Timing, Verify, name_of
from compiler.passes.lift_weights import lift_weights, num_prepared, parted
from compiler.passes.recall_kernels import KEPT, RecallKernels, signature_of
from compiler.report import say
from compiler.signature import all_vars, signature
from runtime import flags
from runtime.executable import Executable, ExecutableMeta

Progress = Callable[[float], None]  # called with the fraction done, from 0 to 1
# PLANNED and EMITTED are the fractions of the compilation time that have passed when a module is planned, and when its LLVM IR is emitted.
# They were measured with large models.
PLANNED, EMITTED = 0.35, 0.6


@dataclass(frozen=True, slots=True)
class Options:
    """The target of a compilation, and how to compile."""

    target: Target = field(default_factory=host)
    instruments: tuple[Instrument, ...] = ()  # observers of passes, in addition to those that the switches of runtime.flags select
    texts: bool = False  # keep the text of each level in the executable
    progress: Progress = lambda _: None
    # The folder of machine code from earlier compilations, to which this compilation adds its own. None: nothing is reused or kept.
    kept: KeptCode | None = None
    symbols: str = ""  # prefix of the names of all functions in the object code
    num_helpers: int = 0  # number of other processes that help to compile kernels for a CPU; for other targets, none are started


@contextmanager
def _collector_paused() -> Generator[None]:
    """Pause the garbage collector, which would traverse every layer repeatedly and find no garbage: programs have no reference cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_collector_paused()
def compile_module(module: IRModule, options: Options | None = None) -> Executable:
    """Compile a module to an executable. If weights need preparations, and the target does not prepare weights itself or cannot run here,
    the executable contains a second executable, `preparing`, which prepares the weights on this machine."""
    options = options or Options()
    started = time.perf_counter()
    planned = plan(module, options)
    executable = build(planned.module, options, signatures_of(module, planned))
    if planned.preparations is not None:
        executable = replace(executable, preparing=compile_module(planned.preparations, replace(options, target=host(), symbols="")))
    if options.texts:
        executable.texts["program.ir"] = print_module(module)
    counts = (
        f"{len(executable.meta.kernels)} kernels, {len(executable.meta.regions)} regions, {len(executable.object_code):,} bytes of code"
    )
    say(1, f"compiled {', '.join(module.graph_functions)} for {options.target.name} in {time.perf_counter() - started:.2f} s: {counts}")
    return executable


@dataclass(frozen=True, slots=True)
class Planned:
    """The result of the passes."""

    module: IRModule  # after all passes
    num_prepared: Mapping[str, int]  # for each function, the number of weights that preparations compute; these are its last weights
    # The preparations, if the target does not prepare weights itself or cannot run here. Only the passes up to `lift_weights` have run on
    # them; `compile_module` compiles them for the host. None: `module` contains the preparations, or there are none.
    preparations: IRModule | None = None


def plan(module: IRModule, options: Options) -> Planned:
    """Run the passes of the target's back end on a module. With `options.kept`, look up machine code from earlier compilations for each
    loop nest before it is scheduled, if the back end compiles kernels one by one (`keeps_kernels`) and the texts of kernels are not
    wanted."""
    backend = backend_of(options.target)
    with watched() as instruments:
        passes = backend.pipeline(options.target, (*options.instruments, *instruments))
        if options.kept is not None and backend.keeps_kernels and not _wants_texts(options):
            passes = passes.inserted(RecallKernels(options.kept, options.target), "schedule_kernels")
        done = Count(lambda count: options.progress(PLANNED * count / len(passes.passes)))
        passes = replace(passes, instruments=(*passes.instruments, done))
        lifted = passes.until(name_of(lift_weights))(module)
        counts = {name: num_prepared(lifted, name) for name in module.graph_functions}
        prepares_weights = backend.prepares_weights and options.target.can_run_here
        preparations, rest = (None, lifted) if prepares_weights else parted(lifted)
        planned = passes.after(name_of(lift_weights))(rest)
    return Planned(planned, counts, preparations)


@contextmanager
def watched() -> Generator[tuple[Instrument, ...]]:
    """Yield the instruments of a pipeline that RELAXSERVE_DEBUG, RELAXSERVE_DUMP and RELAXSERVE_VERIFY select. At the end, print how long
    each pass took, if RELAXSERVE_DEBUG is at least 2."""
    timing = Timing()
    yield (*_switched_on(), timing)
    for name, seconds in timing.seconds.items():
        say(2, f"{1000 * seconds:9.1f} ms  {name}")


def signatures_of(module: IRModule, planned: Planned) -> dict[str, Signature]:
    """Return the signatures of a module's functions. `planned` is the result of `plan` for the module."""
    return {
        name: Signature(signature(module, name), all_vars(func), planned.num_prepared[name])
        for name, func in module.graph_functions.items()
    }


def build(planned: IRModule, options: Options, signatures: dict[str, Signature]) -> Executable:
    """Emit the machine code and the bytecode of a module on which all passes have run, and link the machine code. With `options.kept`,
    write the machine code of newly compiled kernels to this folder, if the back end compiles kernels one by one (`keeps_kernels`)."""
    target, backend, kept = options.target, backend_of(options.target), options.kept
    started = time.perf_counter()
    kernels: dict[str, KernelCode] = {}
    num_helpers = options.num_helpers if backend.keeps_kernels else 0
    with Helpers(num_helpers, target) as helpers:
        for name, prim in planned.prim_functions.items():
            kernels[name] = kernel = _kernel(name, prim, options)
            if num_helpers and not kernel.object:
                helpers.begin(kernel.name, text_of(kernel, target))
        program = lower(planned, kernels, signatures, options.symbols)
        linking = time.perf_counter()
        options.progress(EMITTED)
        objects = helpers.finish(emitted)
    compiled = [replace(kernel, object=objects.get(kernel.name, kernel.object)) for kernel in kernels.values()]
    code = backend.link(compiled, target, "\n\n".join(t for t in program.shape_functions if t), kept.emit if kept else emitted)
    if kept is not None and backend.keeps_kernels:
        _keep(kept, planned, kernels, code.objects)
    say(2, f"{1000 * (linking - started):9.1f} ms  emit\n{1000 * (time.perf_counter() - linking):9.1f} ms  link")
    meta = ExecutableMeta(target.key, program.functions, tuple(program.kernel_table), tuple(program.regions))
    texts = _texts(planned, code) if options.texts else {}
    options.progress(1.0)
    _show_code(planned, code)
    return Executable(meta, code.object, program.constants, texts, code.host)


def _kernel(name: str, prim: PrimFunc, options: Options) -> KernelCode:
    """Return the code of a kernel that an earlier compilation kept, or emit the kernel if there is none."""
    key, symbol = prim.attrs.get(KEPT), options.symbols + name
    found = options.kept.recall(key) if options.kept is not None and key is not None else None
    return backend_of(options.target).emit(symbol, prim, options.target) if found is None else found.named(symbol)


def _keep(kept: KeptCode, planned: IRModule, kernels: Mapping[str, KernelCode], objects: Mapping[str, bytes]) -> None:
    """Keep the machine code of the kernels that this compilation emitted, and count emitted and reused kernels. A kernel whose function has
    no key (`KEPT`) is not kept. Functions have no keys if the pass RecallKernels did not run."""
    for name, prim in planned.prim_functions.items():
        key, code = prim.attrs.get(KEPT), kernels[name]
        if key is not None and not code.object:
            kept.keep(key, kept_kernel(code, objects[code.name], signature_of(prim)))
        kept.num_reused += bool(code.object)
        kept.num_emitted += not code.object


def _wants_texts(options: Options) -> bool:
    """Return whether options or switches request the loop nests or the LLVM IR of kernels. Kernels from `options.kept` have neither."""
    switches = flags.current()
    return options.texts or switches.verify or switches.debug >= 3 or switches.dump is not None


def _texts(planned: IRModule, code: LinkedCode) -> dict[str, str]:
    return {"program.loops": print_module(planned), "program.ll": code.optimised(), "program.s": code.assembly()}


def _switched_on() -> tuple[Instrument, ...]:
    """Return the instruments that RELAXSERVE_DEBUG, RELAXSERVE_DUMP and RELAXSERVE_VERIFY select."""
    switches = flags.current()
    made: list[Instrument] = []
    if switches.verify:
        made.append(Verify())
    if switches.dump is not None:
        made.append(Dump(switches.dump))
    if switches.debug >= 5:
        made.append(ShowChanges(partial(say, 5)))
    elif switches.debug >= 3:
        made.append(Show(partial(say, 3), frozenset(PHASES.values())))
    return tuple(made)


def _show_code(planned: IRModule, code: LinkedCode) -> None:
    """Print the LLVM IR and the assembly if RELAXSERVE_DEBUG is at least 4. If RELAXSERVE_DUMP names a folder, write them and the loop
    nests to files in it."""
    switches = flags.current()
    if switches.debug < 4 and switches.dump is None:
        return
    for name, text in _texts(planned, code).items():
        if name != "program.loops":
            say(4, text)
        if switches.dump is not None:
            switches.dump.mkdir(parents=True, exist_ok=True)
            (switches.dump / f"99-{name}").write_text(text)
