"""Flat programs: what a flat program stores of a planned function, and which functions cannot be made flat."""

from __future__ import annotations

import msgspec
import pytest

from compiler.driver import compile_module
from compiler.frontend.layers.nn import Net, WeightFormat
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Var
from compiler.ir.text.parser import parse
from compiler.ir.types import tensor
from runtime.errors import InvalidProgram
from runtime.executable import Executable
from runtime.flat_program import FlatBase, FlatProgram, flat_program

PROGRAM = """
func main(x: f32[n, 32], w: f32[32, 32]) -> object where n in 1..8 {
  dataflow {
    y = linear(x, w)
    z = exp(y)
  }
  return z
}
"""


def compiled(text: str) -> Executable:
    return compile_module(parse(text))


def test_records_name_what_the_virtual_machine_launches() -> None:
    executable = compiled(PROGRAM)
    flat = flat_program(executable, "main")
    main = flat.functions["main"]
    launches = [launch for region in executable.meta.regions for launch in region.launches]
    kernels = [executable.meta.kernels[launch.kernel] for launch in launches]
    assert [r.body for r in main.records] == [phase.body for kernel in kernels for phase in kernel.phases]
    assert main.definitions[0].slot == main.inputs[0].shape[0] and main.slots[main.definitions[0].slot] == "n"
    last = main.records[-1].buffers[-1]
    assert last == (FlatBase.ARENA, main.outputs[0].offset) and main.outputs[0].dtype == "f32"
    assert flat.most_buffers == max(len(r.buffers) for r in main.records)
    words = [*main.slots, *main.literals]
    assert all(0 <= slot < len(words) for r in main.records for slot in (*r.dims, *(s for _, s in r.buffers)))


def test_functions_lie_side_by_side_in_the_arena() -> None:
    """Each function of a flat program has its own range of the arena, so that a function can read what an earlier function stored there."""
    both = PROGRAM.replace("main", "step") + PROGRAM.replace("main", "sample")
    executable = compiled(both)
    flat = flat_program(executable, "step", ["sample"])
    begins = [f.arena_begin for f in flat.functions.values()]
    step = executable.meta.functions["step"].arena_bytes
    assert isinstance(step, int) and begins[0] == 0 and begins[1] >= step and flat.arena_bytes >= begins[1] + step


def test_each_function_has_weights_of_its_own() -> None:
    """Functions may have different weights of the same name. Constants come after the weights of all functions."""
    net = Net({"w.weight": DType.F32}, WeightFormat(32))
    for name, size in (("step", 32), ("hear", 48)):
        x = Var("x", tensor((4, 32), DType.F32))
        with net.function(name, (x,)):
            net.builder.returns(net.linear(x, "w", 32, size))
    flat = flat_program(compile_module(net.builder.finish()), "step", ["hear"])
    shapes = {stored.name: stored.shape for stored in flat.weights}
    own = {function: [shape for name, shape in shapes.items() if name.startswith(f"{function}: ")] for function in ("step", "hear")}
    assert [len(found) for found in own.values()] == [1, 1] and own["step"] != own["hear"]
    ends = [stored.offset + stored.num_bytes for stored in flat.weights]
    assert all(end <= stored.offset for end, stored in zip(ends, flat.weights[1:], strict=False)) and ends[-1] <= flat.weights_bytes


def test_it_is_read_as_it_is_written() -> None:
    flat = flat_program(compiled(PROGRAM), "main")
    assert msgspec.json.decode(msgspec.json.encode(flat), type=FlatProgram) == flat


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PROGRAM.replace(" where n in 1..8", ""), "its arena grows with 128\\*n"),
        (
            "func main(x: f32[4], c: bool[]) -> object { y = if c { a = exp(x) return a } else { b = log(x) return b } return y }",
            "it calls vm.read_bool",
        ),
        ("func main(x: f32[4]) -> object { return x }", "register 0 is not a tensor of the arena"),
        ("func main(x: f32[n], s: shape[n]) -> object where n in 1..8 { y = exp(x) return y }", "is not a tensor of known rank"),
    ],
    ids=["bounds", "branch", "input", "shape"],
)
def test_what_is_not_flat_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidProgram, match=said):
        flat_program(compiled(text), "main")
