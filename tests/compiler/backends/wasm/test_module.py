"""LLVM object files become WebAssembly modules that run. No external linker is needed."""

from __future__ import annotations

import json
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from compiler.backends.wasm.codegen.module import DATA_BEGIN, linked, signed, unsigned
from compiler.backends.wasm.codegen.object import Reader, read_object
from compiler.codegen.machine_code import llvm_machine
from compiler.ir.errors import CompileError
from compiler.machine.target import get
from tests.node import run_node

TARGET = get("wasm-simd128")


def object_of(text: str) -> bytes:
    machine = llvm_machine(TARGET)
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = TARGET.triple, str(machine.target_data)
    return machine.emit_object(module)


TABLES = """
@first = internal constant [3 x i32] [i32 10, i32 20, i32 30]
@second = internal constant [2 x ptr] [ptr getelementptr (i8, ptr @first, i32 4), ptr @counter]
@counter = internal global i32 7

define internal i32 @twice(i32 %x) noinline {
  %y = add i32 %x, %x
  ret i32 %y
}
define i32 @from_table(i32 %n) {
  %entry = getelementptr [2 x ptr], ptr @second, i32 0, i32 %n
  %place = load ptr, ptr %entry
  %value = load i32, ptr %place
  %result = call i32 @twice(i32 %value)
  ret i32 %result
}
define i32 @count() {
  %old = load i32, ptr @counter
  %new = add i32 %old, 1
  store i32 %new, ptr @counter
  ret i32 %new
}
define i32 @sum(i32 %n) {
  %room = alloca [64 x i32]
  %a = getelementptr [64 x i32], ptr %room, i32 0, i32 %n
  store volatile i32 %n, ptr %a
  %x = load volatile i32, ptr %a
  ret i32 %x
}
"""
RUN = """
import { readFileSync } from 'node:fs';
const module = new WebAssembly.Module(readFileSync(process.argv[1]));
const __stack_pointer = new WebAssembly.Global({ value: 'i32', mutable: true }, 32768);
const env = { memory: new WebAssembly.Memory({ initial: 1, maximum: 1 }), __stack_pointer };
const { from_table, count, sum, __heap_base, ...others } = new WebAssembly.Instance(module, { env }).exports;
console.log(JSON.stringify([from_table(0), from_table(1), count(), count(), from_table(1), sum(9), __heap_base.value, Object.keys(others),
  WebAssembly.Module.imports(module).map(({ module, name }) => `${module}.${name}`)]));
"""


def test_data_calls_and_the_stack_are_linked(tmp_path: Path) -> None:
    """The linker resolves references to data, functions and the stack pointer. The object that is linked here has addresses in code and in
    data, functions with internal linkage, and a local array."""
    (tmp_path / "m.wasm").write_bytes(linked(read_object(object_of(TABLES))))
    found = json.loads(run_node(RUN, tmp_path / "m.wasm"))
    assert found[:6] == [40, 14, 8, 9, 18, 9]
    heap_base, others, imports = found[6:]
    assert heap_base > DATA_BEGIN and heap_base % 64 == 0 and others == [], "a local function is exported"
    assert imports == ["env.memory", "env.__stack_pointer"]


def test_a_function_that_nothing_defines_is_named() -> None:
    text = "declare float @sinf(float)\ndefine float @f(float %x) {\n %y = call float @sinf(float %x)\n ret float %y\n}"
    with pytest.raises(CompileError, match="call sinf, which nothing defines"):
        linked(read_object(object_of(text)))


def test_a_function_that_is_called_by_address_is_refused() -> None:
    text = "define void @f() {\n ret void\n}\ndefine ptr @g() {\n ret ptr @f\n}"
    with pytest.raises(CompileError, match="relocation of kind"):
        read_object(object_of(text))


def test_other_files_are_refused() -> None:
    with pytest.raises(CompileError, match="begins with"):
        read_object(b"\x7fELF....")


@pytest.mark.parametrize("number", [0, 1, 63, 64, 127, 128, 300, 16383, 16384, 2**31, 2**32 - 1])
def test_numbers_are_read_as_they_are_written(number: int) -> None:
    assert Reader(unsigned(number)).unsigned() == number
    assert Reader(signed(number)).signed() == number and Reader(signed(-number)).signed() == -number
