from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest

from runtime.device.cpu import team as team_module
from runtime.device.cpu.code import COPIES, ObjectCode
from runtime.device.cpu.cores import available_cores
from runtime.device.cpu.host import ARCH
from runtime.device.cpu.team import GUARD, SLEEPING, STACK_SPARE, LaunchList, Record, Team, linked_module, native_texts
from runtime.errors import OutOfMemory


@pytest.fixture(scope="module")
def code(object_code: bytes) -> ObjectCode:
    return ObjectCode(object_code)


@pytest.fixture(params=[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0, 0), (0, 1), (0, 2, 1, 2, 2), (0,) * 12], ids=str)
def team(request: pytest.FixtureRequest):
    """Yield a team of threads. The parameter lists the NUMA node of each thread."""
    team = Team(len(request.param), num_cores=len(available_cores()), nodes=request.param)
    yield team
    team.close()


def make_list(
    code: ObjectCode, kernel: str, sizes: list[int], arrays: list[np.ndarray], pick, *, found_in: ObjectCode | None = None
) -> tuple[LaunchList, np.ndarray]:
    """Return a list of launches with one record per size. Record r uses the arrays whose indices pick(r) returns. The kernel may be in
    other code, `found_in`, than the function `grid`."""
    heap = np.array([*sizes, 0], np.int64)
    zero = len(sizes)
    body, grid = (found_in or code).address(kernel), code.address("grid")
    records = [Record(body, grid, tuple((b, zero) for b in pick(r)), (r, r)) for r in range(len(sizes))]
    launches = LaunchList(records, len(arrays))
    for i, array in enumerate(arrays):
        launches.bases[i] = array.ctypes.data
    launches.heap[0] = heap.ctypes.data
    return launches, heap


def test_every_iteration_runs_once(team: Team, code: ObjectCode) -> None:
    sizes = [1000, 0, 1, 7, 0, 0, 33, 128, 2]
    counts = [np.zeros(1000, np.int64) for _ in sizes]
    launches, _heap = make_list(code, "count", sizes, counts, lambda r: (r,))
    for repeat in range(1, 301):
        team.run(launches)
        for size, count in zip(sizes, counts, strict=True):
            assert (count[:size] == repeat).all() and not count[size:].any()


def test_a_record_sees_all_of_the_one_before(team: Team, code: ObjectCode) -> None:
    n, steps = 257, 60
    start = np.arange(n, dtype=np.int64)
    expected = start
    for _ in range(steps):
        expected = 3 * expected + expected[::-1]
    for _ in range(50):
        arrays = [start.copy(), np.zeros(n, np.int64)]
        launches, _heap = make_list(code, "mix", [n] * steps, arrays, lambda r: (r % 2, 1 - r % 2))
        team.run(launches)
        assert (arrays[steps % 2] == expected).all()


@pytest.mark.parametrize("size", [1, 15, 28, 152, 4748, 1000003])
def test_the_last_chunks_of_a_span_are_short(code: ObjectCode, compile_object, size: int) -> None:
    """Both threads have as many iterations. The lengths of their chunks fall, so that they finish together."""
    text = """
    define void @ends(ptr %buffers, ptr %dims, i64 %begin, i64 %end) {
      %p = load ptr, ptr %buffers
      %number = atomicrmw add ptr %p, i64 2 seq_cst
      %place = getelementptr i64, ptr %p, i64 %number
      %first = getelementptr i64, ptr %place, i64 1
      %second = getelementptr i64, ptr %place, i64 2
      store i64 %begin, ptr %first
      store i64 %end, ptr %second
      ret void
    }
    """
    found = np.zeros(1 + 2 * size, np.int64)
    ends = ObjectCode(compile_object(text))
    launches, _heap = make_list(code, "ends", [size], [found], lambda r: (r,), found_in=ends)
    team = Team(2)
    team.run(launches)
    team.close()
    chunks = found[1 : 1 + found[0]].reshape(-1, 2)
    chunks = chunks[chunks[:, 0].argsort()]
    assert chunks[0, 0] == 0 and chunks[-1, 1] == size and (chunks[1:, 0] == chunks[:-1, 1]).all()
    lengths, count = chunks[:, 1] - chunks[:, 0], -(-len(chunks) // 2)
    for span in lengths[:count], lengths[count:]:
        assert (np.diff(span) <= 1).all(), "rounding adds at most one iteration"
        assert len(span) == 0 or (span.min() >= 1 and span[-1] <= 1 + span.sum() // (len(span) * (len(span) + 1) // 2))
    assert len(chunks) % 2 or abs(lengths[:count].sum() - lengths[count:].sum()) <= 1


def test_an_empty_list(team: Team) -> None:
    team.run(LaunchList([], 0))


def test_helpers_take_part(code: ObjectCode, compile_object) -> None:
    """All threads of the team claim chunks. Each chunk waits until another chunk runs at the same time, so one thread alone would never
    finish."""
    text = """
    define void @meet(ptr %buffers, ptr %dims, i64 %begin, i64 %end) {
    entry:
      %p = load ptr, ptr %buffers
      %old = atomicrmw add ptr %p, i64 1 seq_cst
      br label %wait
    wait:
      %now = load atomic i64, ptr %p seq_cst, align 8
      %alone = icmp slt i64 %now, 2
      br i1 %alone, label %wait, label %exit
    exit:
      ret void
    }
    """
    meet = ObjectCode(compile_object(text))
    count = np.zeros(1, np.int64)
    launches, _heap = make_list(code, "meet", [2], [count], lambda r: (r,), found_in=meet)
    team = Team(2)
    for _ in range(20):
        count[:] = 0
        time.sleep(0.002)  # meanwhile the helper thread falls asleep
        team.run(launches)
        assert count[0] == 2
    team.close()


@pytest.mark.parametrize("nodes", [(), (0, 1)])
def test_a_thread_claims_what_is_in_its_own_span_first(code: ObjectCode, compile_object, nodes: tuple[int, ...]) -> None:
    """A thread first claims the chunks of its own half of the grid. Each chunk waits until another chunk runs, too, so each of the two
    threads runs two chunks. The address of a local variable tells which thread ran a chunk."""
    text = """
    define void @pairs(ptr %buffers, ptr %dims, i64 %begin, i64 %end) {
    entry:
      %here = alloca i64
      %p = load ptr, ptr %buffers
      %who = getelementptr i64, ptr %p, i64 %begin
      %mine = getelementptr i64, ptr %who, i64 1
      %address = ptrtoint ptr %here to i64
      store i64 %address, ptr %mine
      %old = atomicrmw add ptr %p, i64 1 seq_cst
      %even = and i64 %old, -2
      %both = add i64 %even, 2
      br label %wait
    wait:
      %now = load atomic i64, ptr %p seq_cst, align 8
      %alone = icmp slt i64 %now, %both
      br i1 %alone, label %wait, label %exit
    exit:
      ret void
    }
    """
    pairs = ObjectCode(compile_object(text))
    found = np.zeros(5, np.int64)
    launches, _heap = make_list(code, "pairs", [4], [found], lambda r: (r,), found_in=pairs)
    team = Team(2, nodes=nodes)
    for _ in range(20):
        found[:] = 0
        team.run(launches)
        assert found[1] == found[2] != found[3] == found[4]
    team.close()


def test_an_idle_team_uses_no_cpu(code: ObjectCode) -> None:
    team = Team(3)
    counts = [np.zeros(1000, np.int64)]
    launches, _heap = make_list(code, "count", [1000] * 5, counts, lambda r: (0,))
    team.run(launches)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    team.close()


def test_teams_share_a_process(code: ObjectCode) -> None:
    teams = [Team(2), Team(3)]
    failures: list[str] = []

    def work(team: Team) -> None:
        counts = [np.zeros(200, np.int64) for _ in range(4)]
        launches, _heap = make_list(code, "count", [200] * 4, counts, lambda r: (r,))
        for repeat in range(1, 101):
            team.run(launches)
            if not all((c == repeat).all() for c in counts):
                failures.append(f"repeat {repeat}")

    threads = [threading.Thread(target=work, args=(team,)) for team in teams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for team in teams:
        team.close()
    assert not failures


def test_threads_end_with_their_team() -> None:
    before = threading.active_count()
    team = Team(4)
    assert threading.active_count() == before + 3
    del team
    assert threading.active_count() == before


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_a_limited_caller_stays_on_the_first_core() -> None:
    cores = available_cores()
    found: list[set[int]] = []

    def work() -> None:
        team = Team(1, limits=[{cores[0]}])
        team.limit_caller()
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [{cores[0]}]


def test_a_team_runs_although_its_cores_were_taken_away(code: ObjectCode, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system then refuses the limit, as it does if the cores of a container change after the start."""

    def refuse(_thread: int, _cores: set[int]) -> None:
        raise OSError("Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    team = Team(2, limits=[{0}, {1}])
    team.limit_caller()
    count = np.zeros(9, np.int64)
    launches, _heap = make_list(code, "count", [9], [count], lambda r: (r,))
    team.run(launches)
    assert (count == 1).all()
    team.close()


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False)


def test_the_interpreter_exits_cleanly_with_a_team_running() -> None:
    result = run_python("""
        from runtime.device.cpu.team import Team
        kept = [Team(3), Team(2)]
        print("done")
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


DEEP = """
define void @deep(ptr %buffers, ptr %dims, i64 %begin, i64 %end) {
entry:
  %local = alloca [4000000 x i8], align 64
  br label %next
next:  ; every page of it, from the one that lies deepest
  %at = phi i64 [ 0, %entry ], [ %at.next, %next ]
  %byte = getelementptr i8, ptr %local, i64 %at
  store volatile i8 7, ptr %byte
  %at.next = add i64 %at, 4000
  %more = icmp slt i64 %at.next, 4000000
  br i1 %more, label %next, label %exit
exit:
  %out = load ptr, ptr %buffers
  %element = getelementptr i64, ptr %out, i64 %begin
  store i64 7, ptr %element
  ret void
}
define i64 @grid(ptr %dims) {
  ret i64 8
}
"""


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_kernel_that_keeps_more_than_it_says_ends_the_process(num_threads: int, compile_object, tmp_path: Path) -> None:
    """A kernel that uses more stack than it declares ends the process. A new worker replaces a dead one, but nothing could repair
    overwritten memory."""
    (tmp_path / "deep.o").write_bytes(compile_object(DEEP.replace("4000000", str(STACK_SPARE + GUARD // 2))))
    result = run_python(f"""
        import numpy as np
        from pathlib import Path
        from runtime.device.cpu.code import ObjectCode
        from runtime.device.cpu.team import LaunchList, Record, Team
        code = ObjectCode(Path({str(tmp_path / "deep.o")!r}).read_bytes())
        out, heap = np.zeros(8, np.int64), np.zeros(1, np.int64)
        launches = LaunchList([Record(code.address("deep"), code.address("grid"), ((0, 0),), ())], 1)
        launches.bases[0] = out.ctypes.data
        launches.heap[0] = heap.ctypes.data
        Team({num_threads}).run(launches)
        print("it ran")
    """)
    assert (result.returncode, result.stdout) == (-signal.SIGSEGV, "")


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("limited", ["process", "thread"])
def test_a_kernel_has_the_stack_that_it_asks_for(num_threads: int, limited: str, compile_object, tmp_path: Path) -> None:
    """A kernel gets the stack that it declares, even if the system gives threads only little stack. The cases are `ulimit -s 1024`, and a
    thread that was created with a small stack."""
    (tmp_path / "deep.o").write_bytes(compile_object(DEEP))
    result = run_python(f"""
        import resource, sys, threading
        if "{limited}" == "process" and not sys.argv[1:]:
            import os
            resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))
            os.execv(sys.executable, [*sys.orig_argv, "limited"])
        import numpy as np
        from pathlib import Path
        from runtime.device.cpu.code import ObjectCode
        from runtime.device.cpu.team import LaunchList, Record, Team
        def work():
            code = ObjectCode(Path({str(tmp_path / "deep.o")!r}).read_bytes())
            out, heap = np.zeros(8, np.int64), np.zeros(1, np.int64)
            records = [Record(code.address("deep"), code.address("grid"), ((0, 0),), ())] * 50
            launches = LaunchList(records, 1)
            launches.bases[0] = out.ctypes.data
            launches.heap[0] = heap.ctypes.data
            team = Team({num_threads}, stack_bytes=4_000_000)
            for _ in range(20):
                team.run(launches)
            team.close()
            print(out[0])
        if "{limited}" == "thread":
            threading.stack_size(512 << 10)
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        else:
            work()
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "7\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_goes_on_alone() -> None:
    result = run_python("""
        import os, warnings
        warnings.simplefilter("ignore")
        import numpy as np
        from runtime.device.cpu.team import LaunchList, Team
        team = Team(3)
        team.run(LaunchList([], 0))
        child = os.fork()
        if child == 0:
            team.run(LaunchList([], 0))
            team.close()
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "7\n", "")


@pytest.mark.parametrize(("arch", "pause"), [("x86_64", "pause"), ("aarch64", "yield")])
@pytest.mark.parametrize(("system", "sleep"), [("linux", "syscall"), ("darwin", "usleep")])
def test_the_loop_compiles_for_every_machine(arch: str, pause: str, system: str, sleep: str) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(f"{arch}-unknown-linux-gnu").create_target_machine()
    module = linked_module(native_texts(arch, system))
    module.verify()
    text = machine.emit_assembly(module)
    assert pause in text and sleep in text


def test_a_waiting_thread_prefetches_the_next_ranges_once() -> None:
    """Turns of waiting for a record continue with its ranges, unless the thread has prefetched them before, and then pause."""
    lines = np.zeros(1 + 1000, np.int64)  # the number of recorded lines, and their addresses
    recorder = f"""
    define void @record_line(ptr %line, i32, i32, i32) {{
      %number = atomicrmw add ptr inttoptr (i64 {lines.ctypes.data} to ptr), i64 1 seq_cst
      %place = getelementptr i64, ptr inttoptr (i64 {lines.ctypes.data + 8} to ptr), i64 %number
      %address = ptrtoint ptr %line to i64
      store i64 %address, ptr %place
      ret void
    }}
    define void @take_turns(ptr %ahead, ptr %record, ptr %ranges, i64 %turns) {{
    entry:
      call void @look_ahead(ptr %ahead, ptr %record, ptr %ranges)
      br label %turn
    turn:
      %i = phi i64 [ 0, %entry ], [ %i.next, %turn ]
      call void @prefetch_or_pause(ptr %ahead)
      %i.next = add i64 %i, 1
      %more = icmp ult i64 %i.next, %turns
      br i1 %more, label %turn, label %exit
    exit:
      ret void
    }}
    """
    text = str(linked_module(native_texts(ARCH, sys.platform))) + recorder
    text = "".join(line for line in text.splitlines(keepends=True) if "declare void @llvm.prefetch" not in line)
    module = llvm.parse_assembly(text.replace("@llvm.prefetch.p0", "@record_line"))
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic", codemodel="small")
    native = ObjectCode(machine.emit_object(module), COPIES | SLEEPING)
    take_turns = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(native.address("take_turns"))

    ranges = np.array([[1 << 20, 1024], [1 << 21, 300], [1 << 22, 2048]], np.int64)
    records = [np.array(Record(0, 0, (), ()).words(ahead), np.int64) for ahead in (range(2), range(2, 3), range(0))]
    ahead = np.zeros(3, np.int64)

    def turns(record: int, count: int) -> list[int]:
        lines[0] = 0
        take_turns(ahead.ctypes.data, records[record].ctypes.data, ranges.ctypes.data, count)
        return lines[1 : 1 + lines[0]].tolist()

    def lines_of(begin: int, count: int) -> list[int]:
        return [begin + 64 * n for n in range(count)]

    assert turns(0, 1) == lines_of(1 << 20, 8)
    assert turns(0, 2) == lines_of((1 << 20) + 512, 8) + lines_of(1 << 21, 8)
    assert turns(0, 2) == []
    assert turns(1, 3) == lines_of(1 << 22, 24)
    assert turns(1, 9) == lines_of((1 << 22) + 24 * 64, 8)
    assert turns(2, 1) == []


@pytest.mark.skipif(len(available_cores()) < 2 or not hasattr(os, "sched_getaffinity"), reason="needs two cores")
def test_helpers_are_limited_to_the_cores_after_the_first() -> None:
    cores = available_cores()
    before = set(threading.enumerate())
    team = Team(2, limits=[{core} for core in cores[:2]])
    (helper,) = set(threading.enumerate()) - before
    deadline = time.monotonic() + 60
    while os.sched_getaffinity(helper.native_id or 0) != {cores[1]} and time.monotonic() < deadline:
        time.sleep(0.001)
    assert os.sched_getaffinity(helper.native_id or 0) == {cores[1]}
    team.close()


def test_a_team_that_cannot_be_completed_leaves_no_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = iter([team_module._stack(1 << 16) for _ in range(3)])  # for the caller and two of three helpers

    def allocate(num_bytes: int) -> np.ndarray:
        if (stack := next(stacks, None)) is None:
            raise OutOfMemory("stack", required=num_bytes)
        return stack

    monkeypatch.setattr(team_module, "_stack", allocate)
    before = {*threading.enumerate()}
    with pytest.raises(OutOfMemory) as found:
        Team(4)
    helpers = {*threading.enumerate()} - before
    del found
    gc.collect()  # drops the frames of the traceback, and with them the team
    for helper in helpers:
        helper.join(60)
    assert helpers and not any(helper.is_alive() for helper in helpers)
