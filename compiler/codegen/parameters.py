"""The parameters of a kernel in LLVM IR: `%bI` is the address of buffer I, and `%dI` is integer I, which holds a dimension or a scalar.

A scalar is passed in a 64-bit word: an integer as it is, a float as a double.
"""

from __future__ import annotations

from collections.abc import Callable

from compiler.codegen.expressions import Expressions
from compiler.codegen.memory import Storage
from compiler.codegen.scalars import Value, register
from compiler.ir.dims import DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import ScalarParam
from compiler.ir.prove import bounds
from compiler.llvm.indices import Index, Indices
from compiler.llvm.ssa import Code
from compiler.machine.target import Target

INT64 = range(-(2**63), 2**63)


class Parameters:
    """The parameters of a kernel: its buffers, then `dims`: its variables and its scalars. `text` is the list of parameters in LLVM IR. A
    buffer that may share memory with another one (`inplace`) is not `noalias`."""

    def __init__(self, prim: PrimFunc) -> None:
        """Number the buffers, and then the variables and scalars, of a loop nest. A buffer that is no output is `readonly`."""
        self.buffers = prim.buffers
        self.dims: tuple[DimVar | ScalarParam, ...] = (*prim.dim_vars, *(p for p in prim.params if isinstance(p, ScalarParam)))
        shared = {number for pair in prim.attrs.get("inplace", ()) for number in pair}
        num_inputs = len(self.buffers) - prim.num_outputs
        pointers = [
            f"ptr {'' if i in shared else 'noalias '}{'readonly ' if i < num_inputs else ''}noundef %b{i}" for i in range(len(self.buffers))
        ]
        self.text = ", ".join([*pointers, *(f"i64 {_range(d)}%d{i}" for i, d in enumerate(self.dims))])

    def expressions(self, code: Code, target: Target) -> Expressions:
        """Return an emitter of expressions for a function with these parameters, whose body is `code`."""
        scalars = {p: from_word(code, f"%d{i}", p.dtype) for i, p in enumerate(self.dims) if isinstance(p, ScalarParam)}
        expressions = Expressions(code, scalars, target)
        expressions.memory.storage = {b: Storage(f"%b{i}") for i, b in enumerate(self.buffers)}
        expressions.indices.env = {d: Index(f"%d{i}") for i, d in enumerate(self.dims) if isinstance(d, DimVar)}
        return expressions

    def grid(self, symbol: str, size: Callable[[Indices], Index]) -> str:
        """Emit the function `i64 (ptr dims)`, named `symbol`, that returns the size of a grid. `size` emits the computation of the size,
        which may use the variables but not the scalars."""
        code = Code()
        indices = Indices(code)
        for i, dim in enumerate(self.dims):
            if isinstance(dim, DimVar):
                pointer = code.hoist(0, f"getelementptr i64, ptr %dims, i64 {i}")
                indices.env[dim] = Index(code.hoist(0, f"load i64, ptr {pointer}, align 8"))
        result = size(indices).value
        return f"define i64 @{symbol}(ptr %dims) #0 {{\nentry:\n{code.text()}\n  ret i64 {result}\n}}"


def _range(dim: DimVar | ScalarParam) -> str:
    """Return LLVM's attribute for the range of a variable. Return "" for a scalar, or if the variable has no known lower bound."""
    if isinstance(dim, ScalarParam):
        return ""
    low, high = bounds(dim)
    if low is None or low <= INT64.start:
        return ""  # LLVM refuses a range that has all integers
    return f"range(i64 {low}, {INT64.start if high is None or high + 1 >= INT64.stop else high + 1}) "


def from_word(code: Code, word: str, dtype: DType, level: int = 0) -> Value:
    """Return the scalar that is passed in a word, which is known in scope `level`. A float is returned as an f32 that is not yet rounded to
    a smaller `dtype`."""
    if dtype.is_float:
        double = code.hoist(level, f"bitcast i64 {word} to double")
        single = code.hoist(level, f"fptrunc double {double} to float")
        return Value(_odd(code, double, single, level) if dtype is DType.F16 else single, dtype)
    return Value(word if dtype is DType.I64 else code.hoist(level, f"trunc i64 {word} to {register(dtype)}"), dtype)


def _odd(code: Code, double: str, single: str, level: int) -> str:
    """Return an f32 that rounds to the same f16 as the f64 `double` does. `single` is the f64 rounded to f32. If `single` is inexact, take
    the f32 next to the f64 on the side of zero, and set its last bit: such an f32 is never halfway between two f16."""
    back = code.hoist(level, f"fpext float {single} to double")
    sizes = [code.hoist(level, f"call double @llvm.fabs.f64(double {x})") for x in (back, double)]
    above = code.hoist(level, f"fcmp ogt double {sizes[0]}, {sizes[1]}")
    inexact = code.hoist(level, f"fcmp one double {back}, {double}")
    bits = code.hoist(level, f"bitcast float {single} to i32")
    below = code.hoist(level, f"sub i32 {bits}, {code.hoist(level, f'zext i1 {above} to i32')}")
    odd = code.hoist(level, f"or i32 {below}, {code.hoist(level, f'zext i1 {inexact} to i32')}")
    return code.hoist(level, f"bitcast i32 {odd} to float")
