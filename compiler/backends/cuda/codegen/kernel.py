"""Emit a loop nest of blocks and threads as LLVM IR for a GPU.

A kernel has phases: the statements of the body's top-level `Seq`, each of which is a launch. Phase K becomes three functions:

    name$pK         void (ptr record, i32 tells)                             on the GPU: loads the arguments from the record, calls $run
    name$pK$run     void (ptr noalias b0, ..., i64 n, ..., ptr counters)     on the GPU: runs the statement
    name.pK.grid    i64 (ptr dims)                                           on the host: returns the number of blocks

Arrays in shared memory are variables, `name$pK$sharedI`. If they exceed what every block may use, or if arguments are kept in shared
memory, each launch requests one piece of shared memory for all of them, `name$pK$shared`.

A record is an array of 64-bit words. The first word is an address, to which the first thread writes the record's own address when the
launch begins, if `tells` is not 0 (runtime/device/cuda/last_launch.py). Then come the addresses of the buffers, the integers (`dims`) and,
if the phase has counters, their address.

If the target begins kernels early, each phase lets the launch after it begin at once, and reads its record, which no kernel writes. Then
the phase waits for the end of the launches before it, or a tile that reads some operands earlier waits for this end (early.py).

Block i runs iteration i of a block loop, then iteration i + grid size, and so on. So any grid size gives the same result. The iterations of
a thread loop run in parallel, and all threads of a block may run a tile together. A barrier separates each thread loop and each such tile
from the next statement of the block.

Some tiles leave threads no registers for anything else (`Intrinsic.crowded`). Then arguments are kept in shared memory (arguments.py), and
$run computes one iteration of the block loop; the number of the iteration is its last argument.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod

from compiler.backends.cuda.codegen.arguments import BLOCK, WORD_BYTES, KeptArguments
from compiler.backends.cuda.codegen.early import early_buffers
from compiler.bytecode.kernel import KernelCode, PhaseSymbols
from compiler.codegen.kernel import Phase, kernel_of
from compiler.codegen.parameters import Parameters
from compiler.codegen.statements import Statements, constant_extent
from compiler.ir.dims import Dim, DimVar
from compiler.ir.errors import CompileError
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.statements import Allocate, For, LoopKind, Stmt, Store, Tile
from compiler.ir.loops.visit import walk_stmts
from compiler.llvm.indices import Index, Indices
from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.base import Intrinsic
from compiler.machine.intrinsics.block_code import GLOBAL, SHARED, SHARED_BYTES, hidden
from compiler.machine.intrinsics.block_product import BlockProduct
from compiler.machine.target import Target

COUNTERS = "%counters"
BARRIER = "call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)"
THREAD_AGAIN, GRID_AGAIN = (f'call i32 asm sideeffect "mov.u32 $0, %{x}.x;", "=r"()' for x in ("tid", "nctaid"))
WARP = 32  # threads of a warp; a thread of a smaller block gets as many registers as a thread of a warp
ENOUGH_THREADS = 512  # threads that keep a multiprocessor busy; each can then have 128 of the multiprocessor's 65,536 registers
MOST_IN_HALF = 96  # number of elements of a local array up to which 128 registers suffice; for more, a thread gets twice as many
_LET_BEGIN, _WAIT = (f'  call void asm sideeffect "griddepcontrol.{x};", "~{{memory}}"() convergent' for x in ("launch_dependents", "wait"))
_BEGUN = f"""  %thread = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %number = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %either = or i32 %thread, %number
  %first = icmp eq i32 %either, 0
  %wanted = icmp ne i32 %tells, 0
  %begins = and i1 %first, %wanted
  br i1 %begins, label %begin, label %work
begin:
  %begun = load {GLOBAL}, {GLOBAL} %record, align 8
  store volatile {GLOBAL} %record, {GLOBAL} %begun, align 8
  br label %work
work:""".splitlines()


def emit_kernel(name: str, prim: PrimFunc, target: Target) -> KernelCode:
    """Emit a scheduled kernel. The names of its functions begin with `name`. Raise CompileError, which names the kernel, if the kernel's
    schedule is not for this target."""
    return kernel_of(name, prim, partial(_phase, target))


def ptx_name(symbol: str) -> str:
    """Return the name of a symbol in PTX, where a name has only letters, digits, `_` and `$`."""
    return re.sub(r"\W", "$", symbol)


def _phase(target: Target, symbol: str, parameters: Parameters, stmt: Stmt) -> Phase:
    """Emit phase `stmt` of a kernel. The names of its functions begin with `symbol`. Raise CompileError if a block needs more shared memory
    than the target has, or if the phase is no loop over blocks."""
    name, threads, code = ptx_name(symbol), _num_threads(stmt), Code()
    shared = _Shared.of(stmt, KeptArguments.num_bytes(parameters))
    if shared.num_bytes > target.shared_bytes:
        raise CompileError(
            f"phase {symbol} has {shared.num_bytes} bytes of shared memory; a block for {target.name} may have at most "
            f"{target.shared_bytes}. Choose a smaller tile or fewer threads in its schedule"
        )
    statements = _Statements(code, parameters, target, name, threads, shared)
    statements.run(stmt)
    counters, blocks = _counters(stmt)
    if not isinstance(blocks, For) or blocks.kind is not LoopKind.BLOCK:
        raise CompileError(f"phase {symbol} is not a loop over blocks; schedule it first (pass schedule_kernels)")
    text = ", ".join(
        filter(None, (parameters.text, f"ptr noalias {COUNTERS}" if counters else "", "" if statements.kept is None else f"i64 {BLOCK}"))
    )
    run = f"define internal void @{name}$run({text}) #1 {{\nentry:\n{code.text()}\n  ret void\n}}"
    early: tuple[int, ...] | None = None
    if target.begins_early:
        buffers = early_buffers(stmt)
        early = tuple(i for i, b in enumerate(parameters.buffers) if b in buffers)
    symbols = PhaseSymbols(name, f"{symbol}.grid", threads, counters, shared.requested_bytes, early)
    grid = parameters.grid(symbols.grid, lambda indices: indices.value(blocks.extent))
    loop = None if statements.kept is None else _BlockLoop(blocks.extent, statements.kept.block_place)
    entry = _entry(symbols, parameters, _launched(stmt, threads), loop)
    return Phase(symbols, code, "\n".join((*statements.shared, run, entry)), grid)


def _counters(stmt: Stmt) -> tuple[int, Stmt]:
    """Return the number of counters that the blocks share, and the statement inside their allocation. Return 0 and the statement itself if
    there are no counters."""
    match stmt:
        case Allocate(buffer=buffer, body=body) if buffer.scope is Scope.COUNTERS:
            return prod(extent.const for extent in buffer.shape), body
        case _:
            return 0, stmt


def _launched(stmt: Stmt, threads: int) -> str:
    """Return the attributes of a phase's entry function: threads per block, the number of blocks that must fit a multiprocessor, and blocks
    per cluster. An attribute that is 0 is left out. If no number of blocks is declared, the assembler limits registers so that many blocks
    run at once, even if values then spill to memory."""
    attributes = {"nvvm.reqntid": threads, "nvvm.minctasm": _enough_blocks(stmt, threads), "nvvm.cluster_dim": _cluster(stmt)}
    return " ".join(f'"{name}"="{value}"' for name, value in attributes.items() if value)


def _entry(symbols: PhaseSymbols, parameters: Parameters, attributes: str, blocks: _BlockLoop | None) -> str:
    """Emit the entry function of a phase, which loads the arguments from the launch record and calls the phase's code: once for each
    iteration of the loop `blocks` that the block runs, or once if the phase's code has the loop itself."""
    name = symbols.body
    # The assembler may move an invariant load behind the wait for earlier launches, and no other load. A phase that waits when it begins
    # loads its arguments before it waits. Products, which wait later, have no registers to keep arguments, so their loads may move.
    may_move = "" if symbols.early == () else ", !invariant.load !0"
    kinds = [*(GLOBAL for _ in parameters.buffers), *("i64" for _ in parameters.dims), *([GLOBAL] if symbols.num_counters else [])]
    head = f"define ptx_kernel void @{name}({GLOBAL} noundef %record, i32 noundef %tells) nounwind {attributes}"
    begins, waits, ends = list[str](), list[str](), list[str]()
    if symbols.early is not None:  # every thread waits before it ends. So the end of a launch means that all launches before it have ended
        begins, waits, ends = ([_LET_BEGIN], [], [_WAIT]) if symbols.early else ([_LET_BEGIN], [_WAIT], [])
    first = [f"%first{i}" for i in range(len(kinds))]
    body = _call(name, kinds, first) if blocks is None else _calls(name, kinds, parameters, blocks)
    return "\n".join(
        (f"{head} {{", "entry:", *begins, *_loads("first", "%record", kinds, may_move), *waits, *_BEGUN, *body, *ends, "  ret void", "}")
    )


def _call(name: str, kinds: Sequence[str], words: Sequence[str], *others: str) -> list[str]:
    """Return lines that call a phase's code with the words of its record."""
    casts = [f"  %g{i} = addrspacecast {GLOBAL} {word} to ptr" for i, word in enumerate(words) if kinds[i] == GLOBAL]
    arguments = [f"ptr %g{i}" if kinds[i] == GLOBAL else f"i64 {word}" for i, word in enumerate(words)]
    return [*casts, f"  call void @{name}$run({', '.join((*arguments, *others))})"]


@dataclass(frozen=True, slots=True)
class _BlockLoop:
    """The block loop around the calls of a phase's code, if this code computes one iteration and leaves no registers for anything else."""

    extent: Dim
    kept_block: str  # the place in shared memory where the phase keeps the number of its block


def _calls(name: str, kinds: Sequence[str], parameters: Parameters, blocks: _BlockLoop) -> list[str]:
    """Return lines that call a phase's code for each iteration of a block. Before each further iteration, the lines load the arguments
    again, from an address that LLVM cannot know to be that of the record, and compute from the arguments whether there is a further
    iteration."""
    words = [f"%a{i}" for i in range(len(kinds))]
    counting, end = _extent(parameters, blocks.extent)
    return [
        "  %begin64 = zext i32 %number to i64",
        "  br label %head",
        "head:",
        f"  {BLOCK} = phi i64 [ %begin64, %work ], [ %following, %again ]",
        *(f"  {word} = phi {kinds[i]} [ %first{i}, %work ], [ %later{i}, %again ]" for i, word in enumerate(words)),
        counting,
        f"  %some = icmp slt i64 {BLOCK}, {end}",
        "  br i1 %some, label %again, label %done",
        "again:",
        *_call(name, kinds, words, f"i64 {BLOCK}"),
        f'  %same = call {GLOBAL} asm sideeffect "mov.b64 $0, $1;", "=l,l"({GLOBAL} %record)',
        *_loads("later", "%same", kinds, ""),
        f"  %kept = load volatile i64, {SHARED} {blocks.kept_block}, align 8",
        f"  {BARRIER}",
        f"  %width = {GRID_AGAIN}",
        "  %step = zext i32 %width to i64",
        "  %following = add nuw nsw i64 %kept, %step",
        "  br label %head",
        "done:",
    ]


def _loads(name: str, record: str, kinds: Sequence[str], attributes: str) -> Iterator[str]:
    """Yield the loads of all arguments from a record, as `%nameI`."""
    for i, kind in enumerate(kinds):
        yield f"  %{name}.p{i} = getelementptr i64, {GLOBAL} {record}, i64 {i + 1}"
        yield f"  %{name}{i} = load {kind}, {GLOBAL} %{name}.p{i}, align 8{attributes}"


def _extent(parameters: Parameters, extent: Dim) -> tuple[str, str]:
    """Return code that computes the extent of the block loop from the arguments of an iteration, and the name of its result."""
    code, first = Code(), len(parameters.buffers)
    indices = Indices(code)
    indices.env = {d: Index(f"%a{first + i}") for i, d in enumerate(parameters.dims) if isinstance(d, DimVar)}
    result = str(indices.value(extent).value)
    return code.text(), result


def _thread_loops(stmt: Stmt) -> list[For]:
    """Return the thread loops in a statement."""
    return [s for s in walk_stmts(stmt) if isinstance(s, For) and s.kind is LoopKind.THREAD]


def _together(tile: Tile) -> int:
    """Return the number of threads of a block that run the tile together; 1 if each thread runs the tile by itself."""
    return tile.op.threads if isinstance(tile.op, Intrinsic) else 1


def _parts(stmt: Stmt) -> list[For | Tile]:
    """Return the thread loops, and the tiles that several threads run together."""
    return [*_thread_loops(stmt), *(s for s in walk_stmts(stmt) if isinstance(s, Tile) and _together(s) > 1)]


def _is_crowded(stmt: Stmt) -> bool:
    """Return whether a statement contains a tile that leaves no registers for other values."""
    return any(isinstance(s, Tile) and isinstance(s.op, Intrinsic) and s.op.crowded for s in walk_stmts(stmt))


def _hides_thread(stmt: Stmt) -> bool:
    """Return whether a statement contains products that hide the number of the thread."""
    return any(isinstance(s, Tile) and isinstance(s.op, BlockProduct) and s.op.hides_thread for s in walk_stmts(stmt))


def _is_around_products(loop: For) -> bool:
    """Return whether a loop is serial and contains products, which need most registers."""
    return loop.kind is LoopKind.SERIAL and any(isinstance(s, Tile) and isinstance(s.op, BlockProduct) for s in walk_stmts(loop.body))


def _enough_blocks(stmt: Stmt, threads: int) -> int:
    """Return the number of blocks that must fit a multiprocessor at once; 0: no limit is declared. A tile that several threads run together
    declares this number (`enough_blocks`). Without such tiles, it is the number of blocks that have ENOUGH_THREADS threads together, or
    half as many if a local array has more than MOST_IN_HALF elements."""
    tiles = [part.op for part in _parts(stmt) if isinstance(part, Tile)]
    if not tiles:
        arrays = (s.buffer for s in walk_stmts(stmt) if isinstance(s, Allocate) and s.buffer.scope is Scope.LOCAL)
        kept = max((prod(extent.const for extent in buffer.shape) for buffer in arrays), default=0)
        if kept > MOST_IN_HALF:
            return max(1, ENOUGH_THREADS // 2 // max(threads, WARP))
        return ENOUGH_THREADS // max(threads, WARP)
    return max(op.enough_blocks if isinstance(op, Intrinsic) else 0 for op in tiles)


def _cluster(stmt: Stmt) -> int:
    """Return the number of blocks of a cluster, or 0 if blocks run alone."""
    most = max((part.op.cluster for part in _parts(stmt) if isinstance(part, Tile) and isinstance(part.op, Intrinsic)), default=1)
    return most if most > 1 else 0


def _num_threads(stmt: Stmt) -> int:
    """Return the number of threads of a block: enough for the longest thread loop and for every tile, and 1 if there is neither."""
    return max((constant_extent(part) if isinstance(part, For) else _together(part) for part in _parts(stmt)), default=1)


@dataclass(frozen=True, slots=True)
class _Shared:
    """The places of a block's arrays in shared memory."""

    offsets: Mapping[Buffer, int]  # offset of each array in bytes, if a launch requests the memory
    num_bytes: int  # bytes of the arrays, and of the arguments if they are kept
    alignment: int  # alignment of each array in bytes
    arguments: int | None  # offset of the arguments, if threads have no registers to keep them

    @staticmethod
    def of(stmt: Stmt, argument_bytes: int) -> _Shared:
        """Place the shared arrays of a phase, and its arguments, which take `argument_bytes`, if a tile leaves no registers for them."""
        tiles = [part.op for part in _parts(stmt) if isinstance(part, Tile)]
        alignment = max((op.shared_alignment for op in tiles if isinstance(op, Intrinsic)), default=Intrinsic.shared_alignment)
        offsets, end = dict[Buffer, int](), 0
        for s in walk_stmts(stmt):
            if isinstance(s, Allocate) and s.buffer.scope is Scope.SHARED:
                offsets[s.buffer] = -(-end // alignment) * alignment
                end = offsets[s.buffer] + prod(extent.const for extent in s.buffer.shape) * s.buffer.dtype.num_bytes
        if not _is_crowded(stmt):
            return _Shared(offsets, end, alignment, None)
        arguments = -(-end // WORD_BYTES) * WORD_BYTES
        return _Shared(offsets, arguments + argument_bytes, alignment, arguments)

    @property
    def requested_bytes(self) -> int:
        """The bytes of shared memory that a launch must request; 0: nothing, because variables in shared memory are enough."""
        return self.num_bytes if self.num_bytes > SHARED_BYTES or self.arguments is not None else 0


class _Statements(Statements):
    """Emits the statements of a block. Outside of thread loops, all threads of a block run the statements together. In a thread loop, each
    thread runs its own iteration."""

    def __init__(self, code: Code, parameters: Parameters, target: Target, name: str, num_threads: int, shared: _Shared) -> None:
        """`name` is the name of the phase in PTX, and `num_threads` the number of threads of a block. `shared` says where the shared arrays
        are, and whether arguments are kept there."""
        expressions = parameters.expressions(code, target)
        super().__init__(code, expressions, target)
        self.shared: list[str] = []  # definitions of variables in shared memory
        self.in_thread = False  # whether the statement that is emitted is inside a thread loop
        self._name, self._num_threads, self._places = name, num_threads, shared
        self.kept: KeptArguments | None = None  # the arguments in shared memory, if a tile leaves no registers for them
        self._block: DimVar | None = None  # the variable of the loop over blocks
        self._hides_thread = False  # whether each thread loop hides the number of the thread, as the products do
        if shared.arguments is not None:
            self.kept = KeptArguments(code, expressions, parameters, self._requested(), shared.arguments)

    def sequence(self, stmts: Sequence[Stmt]) -> None:
        """Run statements in order. Outside of thread loops, a barrier separates each statement that contains a thread loop, or a tile that
        several threads run, from the next statement. If arguments are kept, they are read again after each tile that leaves no registers
        for them."""
        for i, stmt in enumerate(stmts):
            self.run(stmt)
            if not self.in_thread and i + 1 < len(stmts) and _parts(stmt):
                self._barrier()
            if self.kept is not None and isinstance(stmt, Tile) and _is_crowded(stmt):
                with self.kept.again():
                    self.sequence(stmts[i + 1 :])
                return

    def loop(self, loop: For) -> None:
        """Emit a loop over blocks or threads. Raise CompileError for a parallel or a vector loop, which is for a CPU."""
        match loop.kind:
            case LoopKind.BLOCK:
                self._blocks(loop)
            case LoopKind.THREAD:
                self._threads(loop)
            case kind:
                raise CompileError(f"{kind} loop {loop.var.name} is for a CPU; schedule it in blocks and threads")

    def iteration(self, loop: For) -> None:
        """Emit one iteration. Read kept arguments again if the loop is around the tile for which they are kept. End with a barrier if the
        body has several parts that threads run together."""
        is_around = self.kept is not None and loop.kind is LoopKind.SERIAL and _is_crowded(loop.body)
        with self.kept.again() if self.kept is not None and is_around else self._block_again(loop):
            super().iteration(loop)
        if not self.in_thread and len(_parts(loop.body)) > 1:  # a thread may still read what the next iteration overwrites
            self._barrier()

    @contextmanager
    def _block_again(self, loop: For) -> Generator[None]:
        """Hide the number of the block from LLVM in each iteration of a serial loop around products, as `_blocks` does in each iteration of
        the loop over blocks. Otherwise LLVM would compute addresses before the loop and keep them in registers."""
        env, block = self.indices.env, self._block
        if block is None or not _is_around_products(loop):
            yield
            return
        outer = env[block]
        number = self.code.hoist(self.code.level, f'call i64 asm sideeffect "mov.b64 $0, $1;", "=l,l"(i64 {outer.value})')
        env[block] = Index(number, self.code.level)
        yield
        env[block] = outer

    def store(self, store: Store) -> None:
        """Emit a store. Raise CompileError outside of a thread loop, where all threads of a block would write the element."""
        if not self.in_thread:
            raise CompileError(f"buffer {store.buffer.name} is written outside of a thread loop; write it inside one")
        super().store(store)

    def tile(self, tile: Tile) -> None:
        """Emit a tile. Raise CompileError if a tile that several threads run is inside of a thread loop, or needs another number of threads
        than the block has. Also raise it if a tile that one thread runs is outside of thread loops."""
        together = _together(tile)
        if self.in_thread != (together == 1) or together not in (1, self._num_threads):
            place = f"in a block of {together} threads" if together > 1 else "inside of a thread loop"
            raise CompileError(f"tile {tile.op.name} is in the wrong place; expected it {place}")
        super().tile(tile)

    def allocator(self, buffer: Buffer) -> Callable[[str], str]:
        """Return a function that allocates memory for a buffer: on the stack of a thread, in shared memory, or as the counters of the
        launch. Raise CompileError if a buffer of this scope cannot be allocated at this place of the kernel."""
        match buffer.scope:
            case Scope.LOCAL if self.in_thread:
                return self.code.alloca
            case Scope.SHARED if not self.in_thread:
                return partial(self._shared_array, buffer)
            case Scope.COUNTERS if self.code.level == 0:
                return lambda _: COUNTERS
            case scope:
                wanted = "local inside of a thread loop, shared outside of thread loops, or counters around all blocks"
                raise CompileError(f"buffer {buffer.name} is allocated in {scope} memory in the wrong place; expected {wanted}")

    def _blocks(self, loop: For) -> None:
        """Emit the loop over blocks. A block runs the iterations whose numbers are its own plus multiples of the size of the grid. If
        arguments are kept, emit one iteration only: the entry function has the loop (`_calls`)."""
        if self.kept is not None:
            with self.code.when(self.code.op(f"icmp eq i64 {self._special('tid')}, 0")):
                self.kept.keep(loop.var)
            self.indices.env[loop.var] = Index(BLOCK)
            self.iteration(loop)
            return
        self._hides_thread = _hides_thread(loop)
        end = str(self.indices.value(loop.extent).value)
        has_runs = any(isinstance(s, For) and _is_around_products(s) for s in walk_stmts(loop.body))
        step = self.code.fresh("grid") if has_runs else self._special("nctaid")
        with self.code.loop(self._special("ctaid"), end, step=step) as counter:
            # LLVM would compute addresses of all tiles before the loop, and keep them in registers. LLVM cannot do that if the number of
            # the block is hidden.
            number = self.code.hoist(self.code.level, f'call i64 asm "mov.b64 $0, $1;", "=l,l"(i64 {counter})')
            self.indices.env[loop.var], self._block = Index(number, self.code.level), loop.var
            self.iteration(loop)
            if has_runs:  # read the size of the grid again after each block, so that it takes no register meanwhile
                self.code.do(f"{step} = zext i32 {self.code.op(GRID_AGAIN)} to i64")

    def _threads(self, loop: For) -> None:
        """Emit a loop, of which each thread of a block runs one iteration. Threads after the last iteration run none. Raise CompileError if
        the loop is inside another thread loop, or if its extent is not a constant."""
        if self.in_thread:
            raise CompileError(f"thread loop {loop.var.name} is inside another thread loop; make one of them serial")
        thread = self._thread()
        with self.code.scope() if self.kept is not None or self._hides_thread else nullcontext(0) as level:
            self.indices.env[loop.var] = Index(thread, level)
            self.in_thread = True
            with self.code.when(self.code.op(f"icmp slt i64 {thread}, {constant_extent(loop)}")):
                self.run(loop.body)
            self.in_thread = False

    def _barrier(self) -> None:
        self.code.do(BARRIER)

    def _thread(self) -> str:
        """Return the number of the thread. If a tile leaves no registers, read the number again here. If products hide the number, hide it
        here, too. So values that are computed from the number take no registers elsewhere."""
        if self.kept is not None:
            return self.code.op(f"zext i32 {self.code.op(THREAD_AGAIN)} to i64")
        thread = self._special("tid")
        return hidden(self.code, thread) if self._hides_thread else thread

    def _special(self, register: str) -> str:
        """Return the value of a special register, such as the number of the thread, as an i64."""
        return self.code.hoist(0, f"zext i32 {self.code.hoist(0, f'call i32 @llvm.nvvm.read.ptx.sreg.{register}.x()')} to i64")

    def _requested(self) -> str:
        """Return the name of the shared memory that a launch requests, and declare it at the first call."""
        name = f"@{self._name}$shared"
        if not self.shared:
            self.shared.append(f"{name} = external addrspace(3) global [0 x i8], align {self._places.alignment}")
        return name

    def _shared_array(self, buffer: Buffer, type_: str) -> str:
        """Return the address of an array of type `type_` in shared memory: its place in the memory that the launch requests, or a variable
        of its own if the launch requests none."""
        if self._places.requested_bytes:
            name, place = self._requested(), self._places.offsets[buffer]
            address = f"getelementptr (i8, {SHARED} {name}, i64 {place})" if place else name
        else:
            address = f"@{self._name}$shared{len(self.shared)}"
            self.shared.append(f"{address} = internal addrspace(3) global {type_} poison, align {self._places.alignment}")
        return self.code.hoist(0, f"addrspacecast {SHARED} {address} to ptr")
