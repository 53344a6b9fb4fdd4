"""Write LLVM IR as text in one pass.

A function is a list of lines. Some items of the list are holes: lists to which further lines are added while later code is written. `hoist`
writes an instruction into the hole of a scope; callers name the outermost scope in which all operands are known. So index arithmetic stays
out of inner loops without LLVM's loop passes. The output is text because LLVM parses text faster than Python builds an object model.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

from compiler.ir.loops.functions import Fn

Lines = list["str | Lines"]

ALIGNMENT = 64  # alignment in bytes of values on the stack
MULTIPLY_ADD = "llvm.fma"  # LLVM's function for a * b + c, which `multiply_add` calls
_WIDTHS = {"half": 2, "float": 4, "double": 8, "ptr": 8}  # bytes of LLVM's types; the name of an integer type states its bits


@dataclass(slots=True)
class Scope:
    """A part of a function, such as the body of a loop. `lines` is a hole: its instructions run before everything else in the scope.
    `known` has the name of the result of each of these instructions, by the text of the instruction."""

    lines: Lines
    known: dict[str, str] = field(default_factory=dict[str, str])


class Code:
    """The body of one function while it is written."""

    def __init__(self) -> None:
        self.lines: Lines = []
        self.label = "entry"  # name of the current basic block, without %
        self.allocas: Lines = []
        self.scopes = [Scope([])]
        self.math: set[tuple[Fn, int]] = set()  # the functions of vector_math.py that the text calls, each with its number of lanes
        self.stack_bytes = 0  # bytes of the allocas, each rounded up to its alignment
        # instructions that a back end for CPUs writes before the function returns; a dict because each is written once
        self.endings: dict[str, None] = {}
        self._count = 0
        self.lines += [self.allocas, self.scopes[0].lines]

    @property
    def level(self) -> int:
        """The number of the innermost scope. An instruction in this scope may use all variables."""
        return len(self.scopes) - 1

    def fresh(self, hint: str = "") -> str:
        """Return a name for a value or a label that the function does not use yet, with the leading %."""
        self._count += 1
        return f"%{hint}{self._count}" if hint else f"%t{self._count}"

    def op(self, text: str) -> str:
        """Write an instruction at the current place, and return its result."""
        name = self.fresh()
        self.lines.append(f"{name} = {text}")
        return name

    def do(self, text: str) -> None:
        """Write an instruction without a result at the current place."""
        self.lines.append(text)

    def call_math(self, fn: Fn, args: Sequence[str], lanes: int = 1) -> str:
        """Write a call of a function that compiler/codegen/vector_math.py defines, and return its result."""
        self.math.add((fn, lanes))
        kind = vec("float", lanes)
        return self.op(f"call {kind} {symbol(fn, lanes)}({', '.join(f'{kind} {a}' for a in args)})")

    def hoist(self, level: int, text: str) -> str:
        """Write an instruction into the hole of the scope `level`, where it runs before everything else in the scope, and return its
        result. The same text is written only once per scope, so the instruction must not depend on when or how often it runs there."""
        scope = self.scopes[level]
        name = scope.known.get(text)
        if name is None:
            name = scope.known[text] = self.fresh()
            scope.lines.append(f"{name} = {text}")
        return name

    def alloca(self, type_: str) -> str:
        """Reserve memory for a value on the stack, at the entry of the function, and return its address."""
        name = self.fresh("m")
        self.allocas.append(f"{name} = alloca {type_}, align {ALIGNMENT}")
        self.stack_bytes += -(-num_bytes(type_) // ALIGNMENT) * ALIGNMENT
        return name

    # --- control flow --------------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self) -> Generator[int]:
        """Open a new innermost scope at the current place, and close it at the end of the `with`. Yield its number."""
        hole: Lines = []
        self.lines.append(hole)
        self.scopes.append(Scope(hole))
        yield self.level
        self.scopes.pop()

    def block(self, label: str) -> None:
        """Begin the basic block with this label."""
        self.lines.append(f"{label[1:]}:")
        self.label = label[1:]

    def jump(self, label: str) -> None:
        """End the basic block with a jump to a label."""
        self.lines.append(f"br label {label}")

    def branch(self, cond: str, then: str, orelse: str) -> None:
        """End the basic block with a jump to `then` if the i1 `cond` is true, and to `orelse` if it is false. Both are labels."""
        self.lines.append(f"br i1 {cond}, label {then}, label {orelse}")

    @contextmanager
    def loop(self, begin: str, end: str, *, step: str = "1", runs: bool = False) -> Generator[str]:
        """Write a loop whose i64 counter runs from `begin` to `end`, exclusive, in steps of `step`. The code that is written inside the
        `with` is its body. `runs` states that the loop has at least one iteration."""
        body, done = self.fresh("loop"), self.fresh("done")
        if runs:
            self.jump(body)
        else:
            self.branch(self.op(f"icmp slt i64 {begin}, {end}"), body, done)
        before = self.label
        self.block(body)
        counter, following = self.fresh("i"), self.fresh("next")
        phi: Lines = []
        self.lines.append(phi)
        with self.scope():
            yield counter
        self.do(f"{following} = add nuw nsw i64 {counter}, {step}")
        phi.append(f"{counter} = phi i64 [ {begin}, %{before} ], [ {following}, %{self.label} ]")
        self.branch(self.op(f"icmp slt i64 {following}, {end}"), body, done)
        self.block(done)

    @contextmanager
    def when(self, cond: str) -> Generator[None]:
        """Run the code that is written inside the `with` only if the i1 `cond` is true."""
        then, done = self.fresh("then"), self.fresh("done")
        self.branch(cond, then, done)
        self.block(then)
        yield
        self.jump(done)
        self.block(done)

    def either(self, cond: str, then: Callable[[], None], orelse: Callable[[], None]) -> None:
        """Emit a branch: the code that `then` writes runs if the i1 `cond` is true, and the code that `orelse` writes if it is false."""
        yes, no, done = self.fresh("yes"), self.fresh("no"), self.fresh("done")
        self.branch(cond, yes, no)
        for label, emit in ((yes, then), (no, orelse)):
            self.block(label)
            emit()
            self.jump(done)
        self.block(done)

    def choose(self, cond: str, kind: str, then: Callable[[], str], orelse: Callable[[], str]) -> str:
        """Emit a branch with two sides, of which `then` runs if the i1 `cond` is true. Return the operand that holds the result of the side
        that ran. The results have the LLVM type `kind`."""
        yes, no, done = self.fresh("yes"), self.fresh("no"), self.fresh("done")
        self.branch(cond, yes, no)
        arms: list[str] = []
        for label, arm in ((yes, then), (no, orelse)):
            self.block(label)
            operand = arm()
            arms.append(f"[ {operand}, %{self.label} ]")
            self.jump(done)
        self.block(done)
        return self.op(f"phi {kind} {', '.join(arms)}")

    def text(self) -> str:
        """Return the lines as text, without `endings`."""
        return "\n".join(_flatten(self.lines))


def _flatten(lines: Lines) -> Iterator[str]:
    for line in lines:
        if isinstance(line, str):
            yield line if line.endswith(":") else f"  {line}"
        else:
            yield from _flatten(line)


def in_register(code: Code, value: str, kind: str) -> str:
    """Return a register that holds a constant, loaded once per function by an empty instruction. Without this instruction, LLVM would load
    the constant again in each loop."""
    return code.hoist(0, f'call {kind} asm "", "=r,0"({kind} {value})')


def fence(code: Code, values: Sequence[str], kind: str) -> list[str]:
    """Return copies of the values after an empty instruction. LLVM computes the values before this instruction. LLVM moves
    neither later accesses to memory nor code that uses the copies before this instruction."""
    kinds = f"{{ {', '.join([kind] * len(values))} }}"
    constraints = ",".join([*(["=r"] * len(values)), *map(str, range(len(values))), "~{memory}"])
    operands = ", ".join(f"{kind} {value}" for value in values)
    both = code.op(f'call {kinds} asm sideeffect "", "{constraints}"({operands})')
    return [code.op(f"extractvalue {kinds} {both}, {i}") for i in range(len(values))]


# --- types and constants -----------------------------------------------------------------------------------------------


def symbol(fn: str, lanes: int) -> str:
    """Return the name of a function of compiler/codegen/vector_math.py."""
    return f"@math.{fn}.{lanes}"


def vec(element: str, lanes: int) -> str:
    """Return the type of a vector; with one lane, return the element type."""
    return element if lanes == 1 else f"<{lanes} x {element}>"


def num_bytes(type_: str) -> int:
    """Return an upper bound of the bytes that a value of the type takes in memory. A type is, for example, `[200 x <16 x float>]`."""
    *counts, element = re.sub(r"[\[\]<>]", "", type_).split(" x ")
    return prod(map(int, counts)) * (_WIDTHS.get(element) or -(-int(element[1:]) // 8))


def suffix(element: str, lanes: int) -> str:
    """Return the spelling of a type in the name of an LLVM intrinsic: `f32`, or `v16f32` for a vector."""
    short = {"float": "f32", "half": "f16", "double": "f64", "ptr": "p0"}.get(element, element)
    return short if lanes == 1 else f"v{lanes}{short}"


def float_literal(value: float) -> str:
    """Write a float constant exactly, by the bits of the f64 of equal value, as LLVM requires even for an f32."""
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def splat(literal: str, element: str, lanes: int) -> str:
    """Return a constant vector that has a literal in every lane; with one lane, the literal."""
    return literal if lanes == 1 else f"splat ({element} {literal})"


def vector_literal(element: str, values: Iterable[object]) -> str:
    """Return a constant vector of these values, one per lane."""
    return f"<{', '.join(f'{element} {v}' for v in values)}>"


def broadcast(code: Code, operand: str, element: str, lanes: int, level: int | None = None) -> str:
    """Return the vector with `operand` in every lane; with one lane, `operand`. Instructions are written into the scope `level`, or at the
    current place if it is None."""
    if lanes == 1:
        return operand
    if not operand.startswith("%"):
        return splat(operand, element, lanes)
    at = code.level if level is None else level
    kind = vec(element, lanes)
    one = f"insertelement {kind} poison, {element} {operand}, i64 0"
    if level is None:
        return code.op(f"shufflevector {kind} {code.op(one)}, {kind} poison, <{lanes} x i32> zeroinitializer")
    return code.hoist(at, f"shufflevector {kind} {code.hoist(at, one)}, {kind} poison, <{lanes} x i32> zeroinitializer")


def multiply_add(code: Code, a: str, b: str, c: str, element: str, lanes: int) -> str:
    """Emit a * b + c, rounded once. All multiply-adds of f32 and f64 are emitted here, so that a back end without such an instruction can
    replace the calls of MULTIPLY_ADD by calls of a function of its own."""
    kind = vec(element, lanes)
    return code.op(f"call {kind} @{MULTIPLY_ADD}.{suffix(element, lanes)}({kind} {a}, {kind} {b}, {kind} {c})")
