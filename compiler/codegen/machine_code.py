"""Turn LLVM IR into machine code. Each helper (helpers.py) imports this module at its start, so it imports few others."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from compiler.machine.target import GPU, Target

if TYPE_CHECKING:
    import llvmlite.binding as llvm

Emit = Callable[[str, Target], bytes]  # returns the machine code of a module of LLVM IR: an object, or PTX for a GPU


def emitted(text: str, target: Target) -> bytes:
    """Optimise LLVM IR and compile it to an object, or to PTX for a GPU."""
    with optimised(text, target) as module:
        machine = llvm_machine(target)
        return machine.emit_assembly(module).encode() if target.system == GPU else machine.emit_object(module)


def optimised(text: str, target: Target) -> llvm.ModuleRef:
    """Parse LLVM IR, verify it, and run the passes of `_passes`. Replace masked stores that LLVM would compile wrongly
    (`_plain_if_single`). Raise RuntimeError if the IR is not valid."""
    import llvmlite.binding as llvm  # imported late: a start that compiles nothing does without LLVM (runtime/remembered.py)

    llvm_machine(target)  # initialises LLVM's targets, which parsing requires
    module = llvm.parse_assembly(text)
    module.verify()  # check first: LLVM's passes would crash the process on invalid IR
    module.triple = target.triple
    module.data_layout = str(llvm_machine(target).target_data)
    _passes().run(module, llvm.create_pass_builder(llvm_machine(target), llvm.create_pipeline_tuning_options()))
    optimised = str(module)
    mended = _MASKED_STORE.sub(_plain_if_single, optimised)
    return module if mended == optimised else llvm.parse_assembly(mended)


# Work around a bug of LLVM 22, which turns a masked store with one active lane into a scalar store. On x86 the scalar store has the width
# of the number before it was truncated, so it overwrites the next elements. Such masks appear when loops are unrolled, which makes masks
# constant. `_plain_if_single` writes the scalar store itself.
_MASKED_STORE: Final = re.compile(
    r"call void @llvm\.masked\.store\.v\d+\w+\.p0\((?P<kind><\d+ x (?P<element>\w+)>) %(?P<value>\S+), "
    r"ptr align (?P<align>\d+) (?P<pointer>%\S+), <\d+ x i1> <(?P<mask>[^>]*)>\)"
)


def _plain_if_single(call: re.Match[str]) -> str:
    """Return a plain store if exactly one lane is active; otherwise return the call unchanged."""
    active = [i for i, lane in enumerate(call["mask"].split(", ")) if lane == "i1 true"]
    if len(active) != 1:
        return call[0]
    number, at = f"%single.{call.start()}", f"%place.{call.start()}"
    return (
        f"{number} = extractelement {call['kind']} %{call['value']}, i64 {active[0]}\n"
        f"  {at} = getelementptr {call['element']}, ptr {call['pointer']}, i64 {active[0]}\n"
        f"  store {call['element']} {number}, ptr {at}, align {call['align']}"
    )


def _passes() -> llvm.ModulePassManager:
    """Return the passes that scheduled kernels need. LLVM's own pipeline at its lowest level produces the same code in six times the
    time."""
    import llvmlite.binding as llvm

    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_sroa_pass()
    passes.add_simplify_cfg_pass()
    passes.add_loop_unroll_pass()
    passes.add_sroa_pass()  # again: once loops are unrolled, their indices are constant and more arrays can move to registers
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()  # remove functions that have been inlined
    return passes


@lru_cache(maxsize=8)
def llvm_machine(target: Target) -> llvm.TargetMachine:
    """Return LLVM's machine for a target, and initialise LLVM's targets."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    made = llvm.Target.from_triple(target.triple)
    return made.create_target_machine(
        cpu=target.cpu, features=target.feature_string, opt=2, reloc=target.relocation, codemodel=target.code_model, abiname=target.abi
    )
