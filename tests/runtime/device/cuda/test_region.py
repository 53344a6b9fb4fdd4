"""Captured regions on a GPU: integers that the host passes, one graph per order of magnitude (power of two) of the sizes, and faults that
name their kernel."""

from __future__ import annotations

import gc
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from compiler.bind import bind_values
from compiler.driver import Options, compile_module
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from runtime import flags
from runtime.device.cuda import driver
from runtime.device.cuda.card import Card
from runtime.device.cuda.driver import Graph
from runtime.device.cuda.memory import CudaTensor
from runtime.errors import DeviceFault
from runtime.executable import Executable
from runtime.session import Session
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda

pytestmark = needs_pycuda

PROGRAM = """
func main(x: f32[n, 16], weight w: f32[8, 16], weight v: f32[4, 16]) -> object where n in 0..64 {
  dataflow {
    both = concat(w, v, axis=0)
    y = linear(x, both)
    m = max(y, axes=[1], keepdims=false)
    r = (y, m)
  }
  return r
}
"""
RNG = np.random.default_rng(0)
X, W, V = (RNG.standard_normal(shape, np.float32) for shape in ((40, 16), (8, 16), (4, 16)))


@pytest.fixture(scope="module")
def executable() -> Executable:
    return compile_module(parse(PROGRAM), Options(get("sm_80")))


@pytest.fixture
def session(software_gpu: SoftwareGpu, executable: Executable) -> Generator[Session]:
    yield opened(executable)


def opened(executable: Executable) -> Session:
    session = Session(executable)
    bind_values(session, executable, "main", {"w": W, "v": V})
    return session


@pytest.mark.gpu
def test_a_gpu_computes_what_the_cpu_does(session: Session) -> None:
    on_cpu = compile_module(parse(PROGRAM))
    other = Session(on_cpu)
    bind_values(other, on_cpu, "main", {"w": W, "v": V})
    for n in (0, 1, 7, 40, 3):
        for found, expected in zip(session.call("main", X[:n].copy()), other.call("main", X[:n].copy()), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    other.close()


@pytest.mark.gpu
def test_rows_have_the_same_bits_alone_and_in_any_batch(session: Session) -> None:
    whole, _ = session.call("main", X)
    for n in (1, 2, 17):
        np.testing.assert_array_equal(session.call("main", X[:n].copy())[0], whole[:n])


@pytest.mark.gpu
def test_a_run_is_one_launch_of_a_graph_which_sizes_of_one_magnitude_share(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Graph] = []
    original = Graph.launch

    def launch(self: Graph, stream: int, about: str) -> None:
        launched.append(self)
        original(self, stream, about)

    monkeypatch.setattr(Graph, "launch", launch)
    for n in (32, 40, 33, 3, 2, 40):
        session.call("main", X[:n].copy())
    assert len(launched) == 6
    assert [launched.index(graph) for graph in launched] == [0, 0, 0, 3, 3, 0]


@pytest.mark.gpu
def test_a_call_in_parts_has_one_part(session: Session) -> None:
    """Its results stay when other calls follow."""
    with pytest.raises(StopIteration) as end:
        next(session.in_parts("main", X))
    session.call("main", X[:7] + 1)
    for found, expected in zip(end.value.value, session.call("main", X), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.gpu
def test_a_region_that_is_prepared_captures_nothing_when_it_runs(session: Session, executable: Executable) -> None:
    """After `prepare`, calls capture no further graphs. A call uses the smallest prepared graph that is large enough, or the largest graph
    if none is large enough."""
    prepared = Session(executable)
    bind_values(prepared, executable, "main", {"w": W, "v": V})
    for n in (7, 31):
        prepared.prepare("main", {"n": n})
    assert prepared.device.card_usage.num_graphs == 2
    for n in (3, 40, 3, 40):
        np.testing.assert_array_equal(prepared.call("main", X[:n].copy())[0], session.call("main", X[:n].copy())[0])
    assert prepared.device.card_usage.num_graphs == 2


@pytest.mark.parametrize(
    ("target", "debug", "overlapping"), [("sm_90a", 0, [False, True]), ("sm_90a", 1, [False, False]), ("sm_80", 0, [False, False])]
)
def test_launches_overlap(
    target: str, debug: int, overlapping: list[bool], software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On sm_90a, a launch begins before the one before it has ended, except for the first launch. With debugging none does, because the
    kernel that began last is the one that a fault names."""
    with flags.scope(debug=debug):
        session = opened(compile_module(parse(PROGRAM), Options(get(target))))
    found: list[bool] = []
    original = driver.launch

    def launch(*args: Any, overlaps: bool) -> None:
        found.append(overlaps)
        original(*args, overlaps=overlaps)

    monkeypatch.setattr(driver, "launch", launch)
    session.call("main", X)
    assert found == overlapping


@pytest.mark.gpu
def test_memory_that_is_dropped_during_a_capture_is_freed_after_it(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver aborts a capture if its thread frees memory. So the device frees dropped memory only after the capture, and collects no
    garbage meanwhile, because this may be a session with memory of its own."""
    num_bytes = 64 << 20
    free_before = session.device.limits.free_bytes
    dropped = [session.device.allocate(num_bytes)]
    original = driver.launch

    def launch(*args: Any, **options: Any) -> None:
        dropped.clear()
        assert not gc.isenabled()
        original(*args, **options)

    monkeypatch.setattr(driver, "launch", launch)
    session.call("main", X)
    assert gc.isenabled()
    assert not dropped and session.device.card_usage.num_graphs == 1
    assert session.device.limits.free_bytes > free_before - num_bytes // 2


def test_what_a_session_has_on_the_card_is_freed_with_it(software_gpu: SoftwareGpu, executable: Executable) -> None:
    """When a session is dropped, its modules, graphs, events and memory are freed on the card."""
    gc.collect()
    before = software_gpu.num_objects
    session = Session(executable)
    bind_values(session, executable, "main", {"w": W, "v": V})
    session.call("main", X)
    session.call("main", X[:2].copy())
    during = software_gpu.num_objects
    assert during["LoadedModule"] == before["LoadedModule"] + 1 and during["Executable"] == before["Executable"] + 2
    session.close()
    del session
    gc.collect()
    assert software_gpu.num_objects == before


def test_a_graph_that_does_not_fit_the_card_leaves_nothing(
    session: Session, software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.gpu.driver.card import machine

    session.call("main", X)
    gc.collect()
    before = software_gpu.num_objects
    with monkeypatch.context() as patch:
        patch.setattr(machine, "card_bytes", machine.used(0))
        with pytest.raises(DeviceFault, match="out of memory"):
            session.call("main", X[:2].copy(), views=True)
    assert software_gpu.num_objects == before
    session.call("main", X[:2].copy())


def test_the_events_of_a_clock_are_used_again(session: Session, software_gpu: SoftwareGpu) -> None:
    """A server that never asks for the time of its GPU must not make an event per step."""
    session.call("main", X)
    before = software_gpu.num_objects["Event"]
    for _ in range(10):
        session.call("main", X)
    assert software_gpu.num_objects["Event"] <= before + 2


def test_the_time_of_the_card_is_counted(session: Session) -> None:
    """The session adds up the time during which the card is busy. The software GPU reports one millisecond between any two events."""
    for _ in range(3):
        session.call("main", X)
    assert session.busy_s == pytest.approx(0.003)


def test_the_usage_of_the_card_counts_graphs_launches_and_bytes(session: Session) -> None:
    before = session.device.card_usage
    for n in (40, 40, 2):
        session.call("main", X[:n].copy())
    after = session.device.card_usage
    assert before is not None and after is not None
    assert (after.device, after.total_bytes) == ("cuda:0", 1 << 30) and 0 < after.free_bytes < after.total_bytes
    assert (before.num_graphs, after.num_graphs) == (0, 2) and after.num_graph_launches == before.num_graph_launches + 3
    inputs = X[:40].nbytes * 2 + X[:2].nbytes
    assert inputs < after.uploaded_bytes - before.uploaded_bytes < inputs + 4096, "the inputs and the records of three runs"


@pytest.mark.gpu
def test_arguments_of_a_call_are_one_copy(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy uploads all arguments of a call. A second copy uploads the launch records."""
    copied: list[int] = []
    original = Card.copy_pinned

    def copy_pinned(self: Card, address: int, words: Any) -> None:
        copied.append(words.nbytes)
        original(self, address, words)

    monkeypatch.setattr(Card, "copy_pinned", copy_pinned)
    monkeypatch.setattr(Card, "upload", lambda *_: pytest.fail("an argument was copied alone"))
    session.call("main", X)
    assert len(copied) == 2 and copied[0] == X.nbytes


@pytest.mark.gpu
def test_a_profile_tells_the_time_of_each_kernel_by_the_card_s_clock(session: Session, software_gpu: SoftwareGpu) -> None:
    for _ in range(2):  # the second profile uses the events of the first
        with session.profile() as profile:
            session.call("main", X)
        assert profile.seconds and all(seconds > 0 for seconds in profile.seconds.values())
        if software_gpu.library is not None:  # between any two of its events is a millisecond
            assert {name: count / 1000 for name, count in profile.count.items()} == pytest.approx(profile.seconds)


@pytest.mark.parametrize(
    ("debug", "named"), [(0, "in run 2 .*RELAXSERVE_DEBUG=1"), (1, r"kernel linear\w*, launch 0 of \d of main, in run 2")]
)
def test_a_fault_names_the_run_and_with_debugging_the_kernel(
    debug: int, named: str, executable: Executable, software_gpu: SoftwareGpu
) -> None:
    """The kernel is named only with debugging, because a kernel then writes to memory of the host, and its end waits for this."""
    with flags.scope(debug=debug):
        session = opened(executable)
    session.call("main", X)
    wild: Any = CudaTensor(session.device.empty((1,), np.dtype(np.float32)).block, 1 << 40, X.shape, X.dtype)
    with pytest.raises(DeviceFault, match=rf"{named}.*: .*(illegal|ILLEGAL)"):
        session.call("main", wild)
    software_gpu.reset()
