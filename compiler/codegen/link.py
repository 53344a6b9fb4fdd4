"""Compile kernels to one object file.

The module is freestanding: it defines all it calls. `no-builtins` keeps LLVM from turning loops into calls of memset and memcpy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import llvmlite.binding as llvm

from compiler.bytecode.kernel import KernelCode
from compiler.codegen import vector_math
from compiler.ir.loops.functions import Fn
from compiler.machine.target import Target
from runtime.executable import HostCode

ATTRIBUTES: Final = 'attributes #0 = { nounwind "no-builtins" }'


@dataclass(frozen=True, slots=True)
class LinkedCode:
    object: bytes
    unoptimised: str  # LLVM IR as emitted
    target: Target
    host: HostCode | None = None  # the functions that the host calls, where it cannot run the object

    def optimised(self) -> str:
        """LLVM IR after the optimiser (`.ll`)."""
        with optimised(self.unoptimised, self.target) as module:
            return str(module)

    def assembly(self) -> str:
        """The object as text (`.s`)."""
        with optimised(self.unoptimised, self.target) as module:
            return llvm_machine(self.target).emit_assembly(module)


def link(kernels: Iterable[KernelCode], target: Target, extra: str = "") -> LinkedCode:
    """`extra` is the text of further functions, such as those that compute shapes."""
    text = module_text(kernels, target, extra)
    with optimised(text, target) as module:
        return LinkedCode(llvm_machine(target).emit_object(module), text, target)


def module_text(kernels: Iterable[KernelCode], target: Target, extra: str = "", attributes: str = ATTRIBUTES) -> str:
    kernels = list(kernels)
    math = set[tuple[Fn, int]]().union(*(k.math for k in kernels))
    parts = [*(k.text for k in kernels), extra, *vector_math.definitions(math, target)]
    return "\n\n".join(p for p in parts if p) + f"\n\n{attributes}\n"


def optimised(text: str, target: Target) -> llvm.ModuleRef:
    llvm_machine(target)  # parsing needs an initialised LLVM
    module = llvm.parse_assembly(text)
    module.verify()  # what LLVM does not accept must not reach its passes, which would end the process
    module.triple = target.triple
    module.data_layout = str(llvm_machine(target).target_data)
    _passes().run(module, llvm.create_pass_builder(llvm_machine(target), llvm.create_pipeline_tuning_options()))
    optimised = str(module)
    mended = _MASKED_STORE.sub(_plain_if_single, optimised)
    return module if mended == optimised else llvm.parse_assembly(mended)


# LLVM 22 turns a store under a mask with one lane into one of a scalar, for x86 as wide as the number was before it was truncated: it
# writes over what lies behind. Which masks are known, and have one lane, shows when loops are unrolled.
_MASKED_STORE: Final = re.compile(
    r"call void @llvm\.masked\.store\.v\d+\w+\.p0\((?P<kind><\d+ x (?P<element>\w+)>) %(?P<value>\S+), "
    r"ptr align (?P<align>\d+) (?P<pointer>%\S+), <\d+ x i1> <(?P<mask>[^>]*)>\)"
)


def _plain_if_single(call: re.Match[str]) -> str:
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
    """The passes that scheduled kernels need. LLVM's own list at its lowest level takes six times as long for the same code."""
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_sroa_pass()
    passes.add_simplify_cfg_pass()
    passes.add_loop_unroll_pass()
    passes.add_sroa_pass()  # again: what short loops went over lies in registers only now
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()  # what has been inlined
    return passes


@lru_cache(maxsize=8)
def llvm_machine(target: Target) -> llvm.TargetMachine:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    made = llvm.Target.from_triple(target.triple)
    return made.create_target_machine(
        cpu=target.cpu, features=target.feature_string, opt=2, reloc=target.relocation, codemodel=target.code_model, abiname=target.abi
    )
