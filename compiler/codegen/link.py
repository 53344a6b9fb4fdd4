"""Compile kernels to one object file.

Each kernel is compiled by itself, under the name `kernel`, and the objects are merged (relocatable.py). So the code of a kernel depends on
its loop nest and the target alone, and can be kept for other programs (kept.py).

The object is freestanding: it defines every function that it calls. The attribute `no-builtins` keeps LLVM from replacing loops by calls of
memset and memcpy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from compiler.bytecode.kernel import KernelCode
from compiler.codegen import vector_math
from compiler.codegen.halves import with_conversions
from compiler.codegen.relocatable import KERNEL, merged
from compiler.ir.loops.functions import Fn
from compiler.machine.target import GPU, Target
from runtime.executable import HostCode

if TYPE_CHECKING:
    import llvmlite.binding as llvm

ATTRIBUTES: Final = 'attributes #0 = { nounwind "no-builtins" }'


@dataclass(frozen=True, slots=True)
class LinkedCode:
    object: bytes
    unoptimised: str  # LLVM IR before the optimiser; without kernels whose machine code was kept
    target: Target
    host: HostCode | None = None  # the functions that run on the host, if the host cannot run the object
    objects: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  # the object of each kernel, if it is compiled by itself

    def optimised(self) -> str:
        """Return the LLVM IR after the optimiser (the dump `.ll`)."""
        with optimised(self.unoptimised, self.target) as module:
            return str(module)

    def assembly(self) -> str:
        """Return the assembly of the object (the dump `.s`)."""
        with optimised(self.unoptimised, self.target) as module:
            return llvm_machine(self.target).emit_assembly(module)


Emit = Callable[[str, Target], bytes]  # returns the machine code of a module of LLVM IR: an object, or PTX for a GPU


def emitted(text: str, target: Target) -> bytes:
    with optimised(text, target) as module:
        machine = llvm_machine(target)
        return machine.emit_assembly(module).encode() if target.system == GPU else machine.emit_object(module)


def link(kernels: Iterable[KernelCode], target: Target, extra: str = "", emit: Emit = emitted) -> LinkedCode:
    """Compile and link all kernels. `extra` is LLVM IR of further functions, such as those that compute shapes."""
    kernels = list(kernels)
    objects = {k.name: k.object or emitted(module_text([_anonymous(k)], target), target) for k in kernels}
    parts = [*objects.items()]
    if extra or not kernels:
        parts.append(("", emit(module_text([], target, extra), target)))
    return LinkedCode(merged(parts, target.arch), module_text(kernels, target, extra), target, objects=objects)


def _anonymous(kernel: KernelCode) -> KernelCode:
    return replace(kernel, text=kernel.text.replace(f"@{kernel.name}.p", f"@{KERNEL}.p"))


def module_text(kernels: Iterable[KernelCode], target: Target, extra: str = "", attributes: str = ATTRIBUTES) -> str:
    kernels = list(kernels)
    math = set[tuple[Fn, int]]().union(*(k.math for k in kernels))
    parts = [*(k.text for k in kernels), extra, *vector_math.definitions(math, target)]
    text = "\n\n".join(p for p in parts if p) + f"\n\n{attributes}\n"
    return text if target.has_f16 else with_conversions(text)


def optimised(text: str, target: Target) -> llvm.ModuleRef:
    import llvmlite.binding as llvm  # imported late: a start that compiles nothing does without LLVM (runtime/remembered.py)

    llvm_machine(target)  # parsing requires an initialised LLVM
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
# constant.
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
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    made = llvm.Target.from_triple(target.triple)
    return made.create_target_machine(
        cpu=target.cpu, features=target.feature_string, opt=2, reloc=target.relocation, codemodel=target.code_model, abiname=target.abi
    )
