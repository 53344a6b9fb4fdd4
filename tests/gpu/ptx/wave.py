"""A wave: blocks of a grid that run together. Their threads are the elements of NumPy arrays.

Threads at the same instruction form a context. A branch that only some threads take splits a context into two. The two are merged again
where the paths of the branch meet (a join), as the hardware reconverges warps. Warps need not wait for each other at a join, so when
nothing else can run, the join releases the warps whose threads have all arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gpu.ptx.faults import Fault
from tests.gpu.ptx.known import Known
from tests.gpu.ptx.memory import UNSIGNED, UNWRITTEN, AddressFault, Memory
from tests.gpu.ptx.order import Order
from tests.gpu.ptx.program import LOCAL_WINDOW, SHARED_BASE, SHARED_WINDOW, Array, Index, KeptViews, Program
from tests.gpu.ptx.races import Races, Signal
from tests.gpu.ptx.shadow import Shadow

WARP = 32
POISON = 0xA5  # value of every byte of a register before it is written
PATIENCE = 1 << 18  # number of pieces after which a context counts as an endless loop
TURN = 4096  # number of pieces that a context runs before another context runs


@dataclass(slots=True, eq=False)
class Join:
    """The point where threads that a branch separated are merged again. `awaited` counts the threads that have not arrived yet."""

    at: int
    outer: Join | None
    members: NDArray[np.int64]
    awaited: int
    arrived: list[NDArray[np.int64]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Context:
    """Threads that all continue at the same piece."""

    piece: int
    threads: NDArray[np.int64]
    index: Index
    join: Join | None
    age: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    program: Program
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: bytes
    dynamic_bytes: int
    memory: Memory
    arch: tuple[int, int] = (9, 0)  # compute capability of the card, which decides how matrix units round
    patience: int = PATIENCE
    uneven: int | None = None  # least number of rows with which wgmma adds like an older generation; None: it never does
    number: int = 1  # number of the launch among all launches of a card
    since: int | None = None  # number of the earliest launch that may still run when this one begins; None: all earlier ones have ended
    begin: int = 0  # when it begins, in the time of `Memory.history`
    signals: dict[int, Signal] = field(default_factory=dict[int, Signal])  # by the offset of a word in global memory: see races.py

    @property
    def threads_per_block(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]


class Wave:
    def __init__(self, launch: Launch, blocks: NDArray[np.int64], random: np.random.Generator | None) -> None:
        """With `random`, work whose order is free runs in random order. Without `random`, asynchronous work runs as late as the rules
        allow."""
        self.launch, self.program, self.memory, self.random = launch, launch.program, launch.memory, random
        self.blocks = blocks
        self.per_block = launch.threads_per_block
        count = self.per_block * len(blocks)
        self.threads: NDArray[np.int64] = np.arange(count)
        self.slot = self.threads // self.per_block  # for each thread, the number of its block within this wave
        self.thread = self.threads % self.per_block
        self.lane = self.thread % WARP
        self.warps_per_block = -(-self.per_block // WARP)
        self.warp = self.slot * self.warps_per_block + self.thread // WARP
        self.warpgroup = self.slot * -(-self.warps_per_block // 4) + self.thread // (4 * WARP)  # a block may end with a part of one
        self.alive = np.ones(count, bool)
        self.cluster = launch.program.cluster  # number of blocks of a cluster; a wave has whole clusters
        self.rank = self.blocks % self.cluster  # for each block
        self._special: dict[str, Array] = {}
        self.views = _views(self.program, count)
        self.parameters = np.frombuffer(launch.parameters.ljust(-(-len(launch.parameters) // 16) * 16, b"\0"), np.uint8)
        self.parameter_words = {bits: self.parameters.view(dtype) for bits, dtype in UNSIGNED.items()}
        self.shared_bytes = self.program.static_bytes + launch.dynamic_bytes
        self.shared_stride = -(-self.shared_bytes // 128) * 128
        self.shared, self.shared_words = _block_of(self.shared_stride * len(blocks))
        self.shadow = Shadow(len(self.shared), self.program.shared_grain, self, self.memory.history.time)
        self.local_stride = -(-self.program.local_bytes // 16) * 16
        self.local, self.local_words = _block_of(self.local_stride * count)
        self.held: dict[int, frozenset[int]] = {}  # First thread of a warpgroup -> register slots that its products in flight use.
        # For each register of the matrix unit and each thread, whether the thread has written the register since its last fence.
        self.written = np.ones((len(self.program.unit_registers), count), bool)
        self.contexts: list[Context] = []  # contexts that can run
        self.joins: list[Join] = []  # Points at which separated threads wait for each other.
        # Functions that are called in order when no context can run. Each returns True if a context can run now.
        self.stalls: list[Callable[[Wave], bool]] = []
        self.last_stalls: list[Callable[[Wave], bool]] = []  # called like `stalls`, but only after all asynchronous work is done
        self._later: list[Callable[[], None]] = []  # asynchronous work that has not run yet
        self.ends: list[Callable[[Wave], None]] = []  # functions that raise a fault if something is unfinished when all threads have ended
        self.known = Known(self)
        self.order = Order(self)
        self.races = Races(self)
        self.state: dict[str, Any] = {}  # state of barriers and asynchronous work: each file of instructions has keys of its own

    # --- running contexts --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.resume(0, self.threads, None)
        while self.contexts or self._unstall():
            self._advance(self._next())

    def _next(self) -> Context:
        """Choose the context that runs next, and merge it with the contexts at the same piece and join."""
        if self._later and self.random is not None and self.random.random() < 0.3:
            self._do_one()
        number = 0 if self.random is None else int(self.random.integers(len(self.contexts)))
        context = self.contexts.pop(number)
        same = [c for c in self.contexts if c.piece == context.piece and c.join is context.join]
        if same:
            self.contexts = [c for c in self.contexts if c not in same]
            context.threads = self.union([context.threads, *(c.threads for c in same)])
            context.index = self.index(context.threads)
        return context

    def resume(self, piece: int, threads: NDArray[np.int64], join: Join | None, age: int = 0) -> None:
        if threads.size:
            self.contexts.append(Context(piece, threads, self.index(threads), join, age))

    def index(self, threads: NDArray[np.int64]) -> Index:
        """Return the index by which steps select these threads: a slice if they are adjacent, because NumPy then copies nothing, otherwise
        their numbers."""
        if len(threads) == len(self.threads):
            return slice(None)
        first, last = int(threads[0]), int(threads[-1])
        return slice(first, last + 1) if last - first + 1 == len(threads) else threads

    def union(self, parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
        mask = np.zeros(len(self.threads), bool)
        for part in parts:
            mask[part] = True
        return np.flatnonzero(mask)

    def _advance(self, context: Context) -> None:
        codes, watches = self.program.codes, bool(self.program.unit_registers)
        until = context.age + min(TURN, self.launch.patience)
        while True:
            while context.join is not None and context.piece == context.join.at:
                if not self._meet(context):
                    return
            if context.piece == self.program.exit:
                self.order.end(context.threads)
                self.alive[context.threads] = False
                return
            code = codes[context.piece]
            index = context.index
            number = -1
            try:
                for number, step in enumerate(code.steps):
                    if watches and code.touches[number]:
                        self._check_registers(context, code.touches[number], code.writes[number])
                    step(self, index)
                if self.held and code.ending.arrive is None:
                    self._check_registers(context, code.touches[-1], frozenset())
                ending = code.ending
                if ending.predicate is not None:
                    if not self._branch(context, ending.predicate(self, index), ending.target, ending.otherwise, code):
                        return
                elif ending.arrive is not None:
                    number = -1
                    ending.arrive(self, context)
                    return
                elif ending.select is not None:
                    self._choose(context, ending.select(self, index), ending.targets, code.join)
                    return
                else:
                    context.piece = ending.target
            except AddressFault as fault:
                thread = context.threads[min(fault.position, len(context.threads) - 1)]
                raise Fault(f"{code.texts[number]}: {fault} ({self.name(thread)})") from fault
            except Fault as fault:
                if fault.args and str(fault).startswith(code.texts[number]):
                    raise
                raise Fault(f"{code.texts[number]}: {fault} ({self.name(context.threads[0])})") from fault
            context.age += 1
            if context.age > until:
                if context.age > self.launch.patience:
                    raise Fault(
                        f"hang: {len(context.threads)} threads run an endless loop near {code.texts[0] if code.texts else 'a jump'}"
                    )
                self.contexts.append(context)
                return

    def _branch(self, context: Context, taken: NDArray[np.bool_], target: int, otherwise: int, code: Any) -> bool:
        """Take a branch. Return whether all threads of the context take the same path, so that the context continues. Otherwise new
        contexts have replaced the context."""
        if taken.shape != context.threads.shape:
            taken = np.broadcast_to(taken, context.threads.shape)
        count = int(np.count_nonzero(taken))
        waits = code.ending.arrive
        if count == 0 or (count == len(taken) and waits is None):
            context.piece = target if count else otherwise
            return True
        if count == len(taken):
            assert waits is not None
            waits(self, context)
            return False
        join = self._join(context, code.join)
        here, there = context.threads[taken], context.threads[~taken]
        self.resume(otherwise, there, join, context.age)
        if waits is None:
            self.resume(target, here, join, context.age)
        else:
            waits(self, Context(context.piece, here, here, join, context.age))
        return False

    def _choose(self, context: Context, numbers: Array, targets: tuple[int, ...], at: int) -> None:
        numbers = np.broadcast_to(numbers, context.threads.shape)
        if numbers.max() >= len(targets):
            raise Fault(f"a jump to entry {numbers.max()} of a table of {len(targets)} entries")
        join = self._join(context, at)
        for number in np.unique(numbers):
            self.resume(targets[number], context.threads[numbers == number], join, context.age)

    def _join(self, context: Context, at: int) -> Join | None:
        """Return the join for a branch whose paths meet at the piece `at`. Threads that leave a loop at different times share one join. If
        the paths meet only at the end of the kernel, no join is needed."""
        if at == self.program.exit:
            return None
        if context.join is not None and context.join.at == at:
            return context.join
        join = Join(at, context.join, context.threads, len(context.threads))
        self.joins.append(join)
        return join

    def _meet(self, context: Context) -> bool:
        """Let a context arrive at its join. Return whether all threads of the join have arrived. In this case the context continues with
        all these threads."""
        join = context.join
        assert join is not None
        join.arrived.append(context.threads)
        join.awaited -= len(context.threads)
        if join.awaited:
            return False
        self.joins.remove(join)
        context.threads = join.arrived[0] if len(join.arrived) == 1 else self.union(join.arrived)
        context.index = self.index(context.threads)
        context.join = join.outer
        return True

    # --- registers of products in flight ---------------------------------------------------------------------------------------

    def _check_registers(self, context: Context, touched: frozenset[int], written: frozenset[int]) -> None:
        for first, registers in self.held.items():
            if touched & registers and ((context.threads >= first) & (context.threads < first + 128)).any():
                slot = min(touched & registers)
                raise Fault(f"{self.program.kernel.registers[slot].name} belongs to a wgmma product that the kernel has not waited for")
        for slot in written:
            self.written[self.program.unit_registers[slot], context.index] = True

    # --- asynchronous work ---------------------------------------------------------------------------------------------------

    def later(self, work: Callable[[], None]) -> None:
        """Queue asynchronous work. It runs when no context can run, or at a random time."""
        self._later.append(work)

    def _do_one(self) -> None:
        number = len(self._later) - 1 if self.random is None else int(self.random.integers(len(self._later)))
        self._later.pop(number)()

    # --- when no context can run -------------------------------------------------------------------------------------------

    def _unstall(self) -> bool:
        while True:
            if self.contexts or any(stall(self) for stall in self.stalls):
                return True
            if not self._later:
                break
            self._do_one()
        if any(stall(self) for stall in self.last_stalls) or any(self._release(join) for join in self.joins):
            return True
        if self.alive.any():
            raise Fault(f"hang: {int(self.alive.sum())} threads wait for ever: {self._waiting()}")
        for check in self.ends:
            check(self)
        return False

    def _release(self, join: Join) -> bool:
        """Release the warps whose threads have all arrived at the join. Return whether any warp was released."""
        if not join.arrived:
            return False
        here = self.union(join.arrived)
        expected = np.bincount(self.warp[join.members], minlength=self.warp[-1] + 1)
        complete = np.bincount(self.warp[here], minlength=len(expected)) == expected
        leaving = complete[self.warp[here]]
        if not leaving.any():
            return False
        gone = here[leaving]
        join.members = np.setdiff1d(join.members, gone, assume_unique=True)
        join.arrived = [here[~leaving]] if not leaving.all() else []
        self.resume(join.at, gone, join.outer)
        return True

    def _waiting(self) -> str:
        parts = [f"{sum(map(len, join.arrived))} where a branch ends" for join in self.joins if join.arrived]
        for name, described in self.state.items():
            if isinstance(described, list) and described:
                parts.append(f"{sum(len(w.threads) for w in described)} at {name}")
        return ", ".join(parts)

    def name(self, thread: int) -> str:
        x, y, _ = self.launch.block
        number = int(self.blocks[self.slot[thread]])
        gx, gy, _ = self.launch.grid
        t = int(self.thread[thread])
        return f"block ({number % gx}, {number // gx % gy}, {number // (gx * gy)}), thread ({t % x}, {t // x % y}, {t // (x * y)})"

    # --- registers that the hardware sets ----------------------------------------------------------------------------------

    def special(self, name: str) -> Array:
        if name not in self._special:
            self._special[name] = np.ascontiguousarray(np.broadcast_to(self._hardware(name), self.threads.shape))
        return self._special[name]

    def _hardware(self, name: str) -> Any:
        register, _, axis = name.partition(".")
        number = "xyz".index(axis) if axis else 0
        match register:
            case "tid":
                return self.thread // int(np.prod(self.launch.block[:number], dtype=int)) % self.launch.block[number]
            case "ctaid":
                blocks = self.blocks[self.slot]
                return blocks // int(np.prod(self.launch.grid[:number], dtype=int)) % self.launch.grid[number]
            case "ntid":
                return np.int64(self.launch.block[number])
            case "nctaid":
                return np.int64(self.launch.grid[number])
            case "laneid":
                return self.lane
            case "warpid":
                return self.thread // WARP
            case "nwarpid":
                return np.int64(self.warps_per_block)
            case "smid":
                return self.blocks[self.slot] % 132
            case "nsmid":
                return np.int64(132)
            case "clock" | "clock64" | "globaltimer" | "globaltimer_lo":
                return np.int64(0)
            case "lanemask_eq" | "lanemask_lt" | "lanemask_le" | "lanemask_gt" | "lanemask_ge":
                bit = np.int64(1) << self.lane
                below = {"eq": bit, "lt": bit - 1, "le": 2 * bit - 1, "gt": ~(2 * bit - 1), "ge": ~(bit - 1)}[register[-2:]]
                return below & 0xFFFFFFFF
            case "total_smem_size":
                return np.int64(self.shared_bytes)
            case "dynamic_smem_size":
                return np.int64(self.launch.dynamic_bytes)
            case "cluster_ctarank":
                return self.rank[self.slot]
            case "cluster_nctarank":
                return np.int64(self.cluster)
            case _:
                raise Fault(f"the register %{name} is not known")

    # --- memory ------------------------------------------------------------------------------------------------------------

    def reads(
        self, index: Index, offsets: Array, num_bytes: int, *, constant: bool = False, strong: bool = False, signals: bool = True
    ) -> None:
        """Note that threads read global memory. `constant`: the load takes it for unchanging. `strong`: threads may signal by it, to other
        blocks if `signals`."""
        self.order.read(index, offsets, num_bytes)
        if strong and signals:
            self.races.signal(index, offsets, reads=True, writes=False)
        elif not strong:
            self.races.read(index, offsets, num_bytes, constant=constant)

    def writes(self, index: Index, offsets: Array, num_bytes: int, *, strong: bool = False, signals: bool = True) -> None:
        """Note that threads write global memory. `strong`: threads may signal by it, to other blocks if `signals`."""
        self.order.write(index, offsets, num_bytes)
        if strong and signals:
            self.races.signal(index, offsets, reads=False, writes=True)
        elif not strong:
            self.races.write(index, offsets, num_bytes)

    def locate(self, space: str, index: Index, addresses: Array, size: int) -> tuple[dict[int, Array], Array]:
        """Return the memory of a state space and the byte offset of each address. The memory is a dictionary from word size in bits to an
        array of words."""
        match space:
            case "global" | "const":
                return self.memory.words, self.memory.offsets(addresses, size)
            case "shared":
                inside = _inside(addresses - SHARED_BASE, size, self.shared_bytes, "shared")
                return self.shared_words, self.slot[index] * self.shared_stride + inside
            case "local":
                return self.local_words, self.threads[index] * self.local_stride + _inside(addresses, size, self.local_stride, "local")
            case "param":
                return self.parameter_words, _inside(addresses, size, len(self.parameters), "parameter")
            case _:
                raise Fault(f"the state space {space} is not known")

    def space_of(self, addresses: Array) -> Array:
        """Return the state space of each generic address: 0 for global, 1 for shared, 2 for local memory."""
        shared = (addresses >= SHARED_WINDOW) & (addresses < LOCAL_WINDOW)
        local = (addresses >= LOCAL_WINDOW) & (addresses < LOCAL_WINDOW + (1 << 32))
        return shared + 2 * local


def _inside(offsets: Array, size: int, limit: int, space: str) -> Array:
    if offsets.size:
        low, high = int(offsets.min()), int(offsets.max())
        if low < 0 or high + size > limit:
            wrong = int(np.flatnonzero((offsets < 0) | (offsets + size > limit))[0])
            raise AddressFault(wrong, f"the {size} bytes at offset {offsets[wrong]} lie outside the {limit} bytes of {space} memory")
        if size > 1 and np.bitwise_or.reduce(offsets) & (size - 1):
            wrong = int(np.flatnonzero(offsets & (size - 1))[0])
            raise AddressFault(wrong, f"the {space} offset {offsets[wrong]} is not a multiple of {size}")
    return offsets


_memory: dict[int, NDArray[np.uint8]] = {}  # bits of a register -> the memory of all such registers of a wave


def _views(program: Program, count: int) -> list[Array]:
    """Return the arrays that steps read, for registers of `count` threads that are filled with POISON (predicates with zeros). Waves use
    the same memory one after another, because only one runs at a time in a process, and allocating it takes longer than most kernels
    run."""
    widths = Counter(register.bits for register in program.kernel.registers)
    used: dict[int, NDArray[np.uint8]] = {}
    for bits, number in widths.items():
        num_bytes = number * count * max(1, bits // 8)
        if bits not in _memory or len(_memory[bits]) < num_bytes:
            _memory[bits] = np.empty(num_bytes, np.uint8)
        used[bits] = _memory[bits]
        used[bits][:num_bytes].fill(0 if bits == 1 else POISON)
    kept = program.kept_views
    if kept is None or kept.count != count or any(kept.memory[bits] is not memory for bits, memory in used.items()):
        rows = {bits: iter(_rows(memory, (widths[bits], count), bits)) for bits, memory in used.items()}
        registers = [next(rows[register.bits]) for register in program.kernel.registers]
        kept = program.kept_views = KeptViews(count, used, [_view(registers[slot], dtype) for slot, dtype in program.views])
    return kept.views


def _rows(memory: NDArray[np.uint8], shape: tuple[int, int], bits: int) -> Array:
    data = memory[: shape[0] * shape[1] * max(1, bits // 8)].reshape(shape[0], -1)
    return data if bits == 1 else data.view(UNSIGNED[min(bits, 64)])


def _view(register: Array, dtype: Any) -> Array:
    if dtype is np.bool_:
        return register.view(np.bool_)
    ratio = register.dtype.itemsize // np.dtype(dtype).itemsize
    return register.view(dtype) if ratio == 1 else register.view(dtype)[::ratio]


def _block_of(num_bytes: int) -> tuple[NDArray[np.uint8], dict[int, Array]]:
    data = np.full(-(-num_bytes // 16) * 16, UNWRITTEN, np.uint8)
    return data, {bits: data.view(dtype) for bits, dtype in UNSIGNED.items()}
