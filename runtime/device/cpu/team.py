"""A team of threads that execute launch lists together. Its loop is native code (team.ll). Helper threads enter it through ctypes, which
releases the GIL, and return only when the team stops. Each thread runs on a stack that the team allocates, as large as the kernels need.
The system's own stack may be too small: its size depends on the machine, on limits, and on how the thread was created.

Forking: a child process has no helper threads, so its teams continue with the calling thread alone. Do not fork while another thread runs a
launch list.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.cpu.ahead import Ahead
from runtime.device.cpu.code import COPIES, ObjectCode
from runtime.device.cpu.host import ARCH
from runtime.device.cpu.layouts import Plan
from runtime.device.cpu.memory import host_buffer
from runtime.device.cpu.numa import limit_thread
from runtime.errors import OutOfMemory
from runtime.remembered import remembered
from runtime.sections import align

if TYPE_CHECKING:
    import llvmlite.binding as llvm

# Maximum number of groups of threads if the threads are on one memory node (`_groups`). The thread that begins a record writes a word per
# group, so more would slow down records.
MOST_GROUPS = 8
# An idle helper spins for SPIN_S before it sleeps: longer than the host works between two steps, and too short to load an idle machine.
SPIN_S = 50e-6
# The spinning time with more threads than cores is shorter: a spinning thread may occupy the core that the thread it waits for needs.
OVERSUBSCRIBED_SPIN_S = 1e-6
GUARD = 64 << 10  # size of the inaccessible memory below a stack, in bytes: a multiple of the page size of every machine
# A stack has STACK_SPARE more bytes than kernels declare, for spilled registers, signals and the loop that calls kernels. Pages take memory
# only when they are used.
STACK_SPARE = 256 << 10

SLEEPING = frozenset({"syscall", "usleep"})  # functions of the C library with which a thread sleeps
_FUTEX = {"x86_64": 202, "aarch64": 98}
_PAUSE = {
    "x86_64": "call void @llvm.x86.sse2.pause()\n  ret void\n}\ndeclare void @llvm.x86.sse2.pause()",
    "aarch64": "call void @llvm.aarch64.hint(i32 1)\n  ret void\n}\ndeclare void @llvm.aarch64.hint(i32)",
}

# The size of %Team in team.ll, and the offsets of its fields, in bytes. There is one %Team per group.
_TEAM_BYTES = 384
_BEFORE, _THROUGH, _GROUPS, _ACTIVE, _THREADS, _SPINS = 8, 16, 72, 192, 320, 328


_OPTIONS: Mapping[str, Any] = {"opt": 3, "reloc": "pic", "codemodel": "small"}  # options with which LLVM compiles team.ll


def native_texts(arch: str, system: str) -> list[str]:
    """Return team.ll, and the code that differs by machine: how a thread pauses, and how it sleeps."""
    futex = _FUTEX.get(arch) if system == "linux" else None
    sleep = _text("sleep_poll.ll") if futex is None else _text("sleep_futex.ll").replace("@FUTEX@", str(futex))
    return [_text("team.ll"), sleep, "define void @cpu_pause() {\n  " + _PAUSE.get(arch, "ret void\n}")]


def linked_module(texts: Sequence[str]) -> llvm.ModuleRef:
    """Parse modules of LLVM IR and join them into one."""
    import llvmlite.binding as llvm  # imported late: see runtime/remembered.py

    module, *others = map(llvm.parse_assembly, texts)
    for other in others:
        module.link_in(other)
    return module


def _compiled(texts: Sequence[str]) -> bytes:
    """Compile modules of LLVM IR for this machine, and return the object code."""
    import llvmlite.binding as llvm  # imported late: see runtime/remembered.py

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(**_OPTIONS)
    return machine.emit_object(linked_module(texts))


class _Native:
    """The functions of team.ll, compiled."""

    def __init__(self) -> None:
        # layouts.ll has the functions that take NumPy arrays; exported C libraries (compiler/c_library) are built without it
        texts = [*native_texts(ARCH, sys.platform), _text("layouts.ll").replace("@HEAD@", str(object.__basicsize__))]
        code = remembered("team", "".join([str(_OPTIONS), *texts]).encode(), lambda: _compiled(texts))
        self._code = ObjectCode(code, COPIES | SLEEPING)
        self.run_alone = self._function("run_alone", ctypes.c_void_p, ctypes.c_void_p)
        self.lead = self._function("lead", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self.help = self._function("help", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self.repeat_alone = self._function("repeat_alone", *[ctypes.c_void_p] * 4, result=ctypes.c_int32)
        self.repeat_lead = self._function("repeat_lead", *[ctypes.c_void_p] * 5, result=ctypes.c_int32)
        self.stop = self._function("stop", ctypes.c_void_p)
        self.spin = self._function("spin", ctypes.c_uint32)

    def _function(self, name: str, *types: Any, result: Any = None) -> Callable[..., Any]:
        return ctypes.CFUNCTYPE(result, *types)(self._code.address(name))

    def spins_per_second(self) -> float:
        """Measure how often a thread of this machine can pause per second."""
        start = perf_counter()
        self.spin(2000)
        return 2000 / (perf_counter() - start)


@cache
def _native() -> _Native:
    return _Native()


def _text(name: str) -> str:
    return (files("runtime.device.cpu") / name).read_text()


NO_SIZES: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Record:
    """One phase of a kernel in a launch list, with its operands."""

    body: int  # address of the phase's function
    grid: int  # address of the function that returns the number of iterations
    buffers: tuple[tuple[int, int], ...]  # (base: see `Bases` in runtime/device/base.py, heap slot of the offset)
    dims: tuple[int, ...]  # heap slots

    def words(self, ahead: range) -> list[int]:
        """Return the words of the record. `ahead` are the numbers of the ranges that waiting threads prefetch."""
        pairs = [word for pair in self.buffers for word in pair]
        return [self.body, self.grid, len(self.buffers), len(self.dims), ahead.start, ahead.stop, *pairs, *self.dims]


class LaunchList:
    """A launch list, the struct %List of team.ll. The owner fills in `bases` and `heap`, which threads read during a run."""

    def __init__(self, records: Sequence[Record], num_bases: int, sizes: Mapping[int, int] = NO_SIZES, readers: int = 0) -> None:
        """`sizes` has the number of bytes of each base that is a constant or a weight of known shape. `readers` is the team's
        `num_readers`."""
        self._ahead = Ahead([[(base, sizes[base]) for base, _ in record.buffers if base in sizes] for record in records], readers)
        words = (record.words(following) for record, following in zip(records, self._ahead.following, strict=True))
        self._words = np.array([word for some in words for word in some], np.int64)
        self._bases = np.zeros(max(num_bases, 1), np.int64)
        self.bases, self.base_address = self._bases.data, self._bases.ctypes.data
        self._records = records
        most_buffers = max((len(r.buffers) for r in records), default=0)
        most_dims = max((len(r.dims) for r in records), default=0)
        ahead = self._ahead.ranges.ctypes.data, self._ahead.ranges.shape[1]
        fields = self._words.ctypes.data, len(records), self._bases.ctypes.data, 0, most_buffers, most_dims, *ahead
        self._fields = np.array(fields, np.int64)
        self.heap = self._fields.data[3:4]  # holds the address of the heap
        self.address = self._fields.ctypes.data

    def place(self, base: int, address: int) -> None:
        """Set the address of a base that does not change between runs."""
        self.bases[base] = address
        self._ahead.place(base, address)

    def single(self, number: int) -> LaunchList:
        """Return a launch list of one of the records, which uses the bases of `self`."""
        single = LaunchList([self._records[number]], 0)
        single._fields[2] = self._fields[2]
        return single


class Team:
    """Threads that run launch lists together. `num_threads` includes the calling thread."""

    def __init__(
        self,
        num_threads: int,
        *,
        num_cores: int = 0,
        limits: Sequence[set[int]] = (),
        nodes: Sequence[int] = (),
        stack_bytes: int = 0,
    ) -> None:
        """Allocate the stacks and start the helpers. `num_cores`: the number of cores that the process may use, if it is known. `limits`:
        the cores on which each thread may run, if not on all; the first limit is the caller's, see `limit_caller`. `nodes`: the memory node
        of each thread, if there are several nodes; the caller's node is 0. `stack_bytes`: the maximum stack memory of a kernel."""
        assert num_threads >= 1, num_threads
        self.num_threads = num_threads
        self.busy_s = 0.0  # seconds spent in launch lists so far
        self._num_cores = num_cores
        self._limits = tuple(limits) if hasattr(os, "sched_setaffinity") else ()
        self._groups = _groups(num_threads, nodes)
        # The number of threads if there are several and each is a group: only then is it known which part of a product each thread reads
        # first. Otherwise 0.
        self.num_readers = num_threads if 1 < num_threads == len(set(self._groups)) else 0
        native = _native()
        self._stack_bytes = align(stack_bytes + STACK_SPARE)
        self._stack = _stack(self._stack_bytes)  # stack of the calling thread
        self._top = _top(self._stack)
        self._memory = host_buffer(_TEAM_BYTES * (1 + max(self._groups)))
        address = self._memory.ctypes.data
        self._run = partial(native.run_alone, self._top) if num_threads == 1 else partial(native.lead, self._top, address)
        self._repeat = partial(native.repeat_alone, self._top) if num_threads == 1 else partial(native.repeat_lead, self._top, address)
        threads: list[threading.Thread] = []
        # is also called when the interpreter exits, and when a helper cannot be started
        self.close = weakref.finalize(self, _close, native, self._memory, threads)
        if num_threads > 1:
            self._write_layout(self._spins(native))
            for number in range(1, num_threads):
                threads.append(self._start_helper(native, number))
        _teams.add(self)

    def _write_layout(self, spins: int) -> None:
        """Write the fields of %Team that stay the same. `spins` is how often a waiting thread pauses before it sleeps."""

        def put(offset: int, value: int) -> None:
            self._memory[offset : offset + 8].view(np.int64)[0] = value

        put(_THREADS, self.num_threads)
        put(_SPINS, spins)
        put(_GROUPS, 1 + max(self._groups))
        for group in range(1 + max(self._groups)):
            put(_TEAM_BYTES * group + _BEFORE, sum(g < group for g in self._groups))
            put(_TEAM_BYTES * group + _THROUGH, sum(g <= group for g in self._groups))

    def _spins(self, native: _Native) -> int:
        """Return how often a waiting thread pauses before it sleeps."""
        oversubscribed = 0 < self._num_cores < self.num_threads
        return max(1, int((OVERSUBSCRIBED_SPIN_S if oversubscribed else SPIN_S) * native.spins_per_second()))

    def _start_helper(self, native: _Native, number: int) -> threading.Thread:
        limit = self._limits[number] if self._limits else None
        name = f"relaxserve-team-{number}"
        args = native, self._memory, _stack(self._stack_bytes), limit, self._groups[number]
        thread = threading.Thread(target=_help, args=args, name=name, daemon=True)
        thread.start()
        return thread

    def limit_caller(self) -> None:
        """Limit the calling thread to its cores, as each helper is limited to its own. Threads and processes that the calling thread starts
        later inherit the limit."""
        if self._limits:
            limit_thread(self._limits[0])

    def run(self, launches: LaunchList) -> None:
        """Run a list. Only one thread at a time may call this."""
        began_s = perf_counter()
        self._run(launches.address)
        self.busy_s += perf_counter() - began_s

    def repeat(self, launches: LaunchList, plan: Plan) -> Callable[[], bool]:
        """Return a function that runs a list on the arrays of a plan, unless an array has another layout than the plan states. The function
        returns whether the list ran."""
        native = partial(self._repeat, launches.address, launches.base_address, plan.address)

        def run() -> bool:
            began_s = perf_counter()
            ran = native()
            self.busy_s += perf_counter() - began_s
            return ran != 0

        return run

    def forget_helpers(self) -> None:
        """Forget the helpers after a fork: they exist only in the parent process."""
        self._memory[_ACTIVE : _ACTIVE + 4] = 0


def _groups(num_threads: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """Assign each thread to a group. The threads of a group claim chunks of work from the same span. If there are several memory nodes,
    each node's threads form a group. Otherwise each thread is a group, up to MOST_GROUPS groups: a thread then reads contiguous memory,
    which hardware prefetching needs."""
    if any(nodes):
        return tuple(nodes[:num_threads])
    count = min(num_threads, MOST_GROUPS)
    return tuple(number * count // num_threads for number in range(num_threads))


def _stack(num_bytes: int) -> NDArray[np.uint8]:
    """Allocate a stack with inaccessible memory below it: a kernel that uses more stack than it declares ends the process instead of
    overwriting memory. Raise OutOfMemory if the system gives no memory, or OSError if it does not make the memory below inaccessible."""
    try:
        memory = np.frombuffer(mmap.mmap(-1, GUARD + num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    except (OSError, OverflowError) as error:
        raise OutOfMemory("stack", required=GUARD + num_bytes) from error
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(GUARD), 0):
        raise OSError("mprotect refused to guard a stack")
    return memory[GUARD:]


def _top(stack: NDArray[np.uint8]) -> int:
    """Return the address at which a stack begins: stacks grow downwards."""
    return stack.ctypes.data + stack.nbytes


def _help(native: _Native, memory: NDArray[np.uint8], stack: NDArray[np.uint8], limit: set[int] | None, group: int) -> None:
    """Work as a helper until the team stops. `limit` contains the cores on which the thread may run; None: all cores."""
    if limit is not None:
        limit_thread(limit)
    native.help(_top(stack), memory.ctypes.data, group)


def _close(native: _Native, memory: NDArray[np.uint8], threads: list[threading.Thread]) -> None:
    """Stop the helpers of the team that has this memory, and wait for their threads to end."""
    native.stop(memory.ctypes.data)
    for thread in threads:
        thread.join()


_teams: weakref.WeakSet[Team] = weakref.WeakSet()


def _after_fork() -> None:
    for team in _teams:
        team.forget_helpers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
