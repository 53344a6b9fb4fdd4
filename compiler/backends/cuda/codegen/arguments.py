"""Keep the arguments of a kernel in shared memory, if a tile leaves threads no registers for them.

One thread of a block stores the arguments and the number of the block. All threads read them again at the beginning of each iteration of a
loop around the tile, and after the tile. Values that depend on the arguments are then computed again.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from compiler.codegen.expressions import Expressions
from compiler.codegen.memory import Storage
from compiler.codegen.parameters import Parameters, from_word
from compiler.ir.dims import DimVar
from compiler.llvm.indices import Index
from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.block_code import GLOBAL, SHARED

WORD_BYTES = 8
BLOCK = "%block"  # the number of the block, an argument of the function that computes an iteration of the block loop


class KeptArguments:
    """The arguments of a kernel in shared memory. `keep` stores them, and `again` reads them."""

    def __init__(self, code: Code, expressions: Expressions, parameters: Parameters, memory: str, at: int) -> None:
        """`memory` is the name of the shared memory of a block, and `at` the offset of the arguments in it."""
        self.code, self.expressions, self.parameters, self._memory, self._at = code, expressions, parameters, memory, at
        self._block: DimVar | None = None  # the variable of the loop over blocks, once `keep` has stored the number of the block

    @staticmethod
    def num_bytes(parameters: Parameters) -> int:
        """Return the number of bytes that the arguments and the number of the block take."""
        return WORD_BYTES * (len(parameters.buffers) + len(parameters.dims) + 1)

    @property
    def block_place(self) -> str:
        """The place of the number of the block, after the arguments."""
        return self._place(len(self.parameters.buffers) + len(self.parameters.dims))

    def keep(self, block: DimVar) -> None:
        """Store the arguments and the number of the block, which is the value of the variable `block`. One thread runs this code."""
        code, words = self.code, list[tuple[str, str]]()
        words += [(GLOBAL, code.op(f"addrspacecast ptr %b{i} to {GLOBAL}")) for i in range(len(self.parameters.buffers))]
        words += [("i64", f"%d{i}") for i in range(len(self.parameters.dims))]
        for i, (kind, value) in enumerate([*words, ("i64", BLOCK)]):
            code.do(f"store {kind} {value}, {SHARED} {self._place(i)}, align {WORD_BYTES}")
        self._block = block

    @contextmanager
    def again(self) -> Generator[None]:
        """Open a block of code that reads the arguments and the number of the block. Compilers do not know what a volatile load returns. So
        they cannot let registers hold the arguments, or values that depend on them, before this code."""
        code, expressions = self.code, self.expressions
        storage, env, params = expressions.memory.storage, expressions.indices.env, expressions.params
        expressions.memory.storage, expressions.indices.env, expressions.params = dict(storage), dict(env), dict(params)
        kinds, level = [GLOBAL] * len(self.parameters.buffers) + ["i64"] * (len(self.parameters.dims) + 1), code.level + 1
        words = [code.op(f"load volatile {kind}, {SHARED} {self._place(i)}, align {WORD_BYTES}") for i, kind in enumerate(kinds)]
        for buffer in self.parameters.buffers:
            expressions.memory.storage[buffer] = Storage(code.op(f"addrspacecast {GLOBAL} {words.pop(0)} to ptr"), level=level)
        with code.scope():
            for dim, word in zip((*self.parameters.dims, self._block), words, strict=True):
                if isinstance(dim, DimVar):
                    expressions.indices.env[dim] = Index(word, level)
                elif dim is not None:
                    expressions.params[dim] = from_word(code, word, dim.dtype, level)
            yield
        expressions.memory.storage, expressions.indices.env, expressions.params = storage, env, params

    def _place(self, number: int) -> str:
        """Return the address of an argument in shared memory, as a constant expression of LLVM IR."""
        return f"getelementptr (i8, {SHARED} {self._memory}, i64 {self._at + WORD_BYTES * number})"
