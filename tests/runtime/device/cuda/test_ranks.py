"""Several GPUs as ranks: kernels read the memory of other ranks, bits are those of one GPU, and a missing wait between ranks is noticed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.bind import bind_values
from compiler.driver import Options, compile_module
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from runtime.device.cuda import driver, records
from runtime.device.cuda.device import CudaDevice
from runtime.device.cuda.lockstep import Lockstep
from runtime.errors import DeviceFault, InvalidProgram, NoDevice
from runtime.executable import OWN, Executable
from runtime.session import Session
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda

pytestmark = needs_pycuda

SIZE = 64
WHOLE = f"""
func main(ids: i32[n], weight table: f32[8, {SIZE}], weight w: f32[{SIZE}, {SIZE}], weight v: f32[{SIZE}, {SIZE}]) -> f32[n, {SIZE}]
    where n in 0..64 {{
  dataflow {{
    x = embedding(table, ids)
    a = softmax(x)
    y = linear(a, w)
    z = silu(y)
    r = linear(z, v)
    s = softmax(r)
  }}
  return s
}}
"""


def divided(count: int) -> str:
    """Return the program of a rank: each rank computes some columns of `y` and `r`."""
    part, rows = SIZE // count, 8 // count
    return f"""
func main(ids: i32[n], weight table: f32[{rows}, {SIZE}], weight w: f32[{part}, {SIZE}], weight v: f32[{part}, {SIZE}]) -> f32[n, {SIZE}]
    where n in 0..64 {{
  dataflow {{
    x = rank_embedding(ids, {", ".join(["table"] * count)}, size=8)
    a = softmax(x)
    y = linear(a, w)
    z = silu(y)
    g = all_gather({", ".join(["z"] * count)}, axis=1)
    r = linear(g, v)
    h = all_gather({", ".join(["r"] * count)}, axis=1)
    s = softmax(h)
  }}
  return s
}}
"""


RNG = np.random.default_rng(0)
WEIGHTS = {name: RNG.standard_normal((rows, SIZE), np.float32) for name, rows in (("table", 8), ("w", SIZE), ("v", SIZE))}
IDS = np.arange(23, dtype=np.int32) % 8
OTHER_IDS = IDS[::-1].copy()
OVERLAPPING = "sm_90a"  # a target whose launches may begin before others have ended


class Part:
    """The rows of one rank, as a source of weights."""

    def __init__(self, rank: int, count: int) -> None:
        self._rows = {name: np.split(rows, count)[rank].copy() for name, rows in WEIGHTS.items()}
        self.tensors: Mapping[str, Any] = {}

    def read(self, name: str) -> NDArray[Any]:
        return self._rows[name]

    def release(self, name: str) -> None:
        """Keep the tensor in memory."""

    def digest(self) -> str:
        raise AssertionError("nothing is stored")


@cache
def executable(count: int, target: str) -> Executable:
    return compile_module(parse(WHOLE if count == 1 else divided(count)), Options(get(target)))


def opened(executable: Executable, count: int) -> Session:
    session = Session(executable, num_ranks=count)
    if count == 1:
        bind_values(session, executable, "main", WEIGHTS)
        return session
    ranks: Sequence[Any] = session.device.ranks
    names = [param.name for param in executable.meta.functions["main"].weights]
    parts = [Part(rank, count) for rank in range(count)]
    assert not executable.preparations("main"), "the weights of this program are bound as they are"
    values = {
        name: session.device.of_ranks([own.upload(part.read(name)) for own, part in zip(ranks, parts, strict=True)]) for name in names
    }
    session.bind("main", values)
    return session


@pytest.mark.gpu
@pytest.mark.parametrize("target", ["sm_80", OVERLAPPING])
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_compute_the_bits_of_one_gpu(count: int, target: str, software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    software_gpu.has_cards(4, monkeypatch)
    alone, together = opened(executable(1, target), 1), opened(executable(count, target), count)
    for n in (23, 1, 0, 7, 23):
        np.testing.assert_array_equal(together.call("main", IDS[:n].copy()), alone.call("main", IDS[:n].copy()))
    assert len(together.device.ranks) == count


@pytest.mark.gpu
def test_a_region_of_all_ranks_is_one_graph(software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    software_gpu.has_cards(2, monkeypatch)
    session = opened(executable(2, "sm_80"), 2)
    assert len(executable(2, "sm_80").meta.regions) == 1
    session.call("main", IDS)
    session.call("main", IDS)
    assert session.device.card_usage is not None
    assert (session.device.card_usage.num_graphs, session.device.card_usage.num_graph_launches) == (1, 2)


@pytest.mark.gpu
def test_kernels_can_be_timed_one_by_one(software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    software_gpu.has_cards(2, monkeypatch)
    session = opened(executable(2, "sm_80"), 2)
    expected = session.call("main", IDS)
    with session.profile() as profile:
        np.testing.assert_array_equal(session.call("main", IDS), expected)
    assert {"all_gather", "rank_embedding"} <= set(profile.seconds)


def test_the_program_of_a_rank_names_whose_memory_it_reads() -> None:
    """A kernel lists the ranks whose memory it reads. Nothing is fused into a kernel that reads other ranks, because it reads what they
    have stored in memory."""
    found = {kernel.name: kernel.ranks for kernel in executable(2, "sm_80").meta.kernels if kernel.ranks}
    assert found == {"rank_embedding": (OWN, 0, 1, OWN), "all_gather": (0, 1, OWN)}


@pytest.mark.parametrize(("count", "num_ranks"), [(4, 2), (2, 4), (2, 1)])
def test_a_program_for_another_number_of_gpus_is_refused(
    count: int, num_ranks: int, software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    software_gpu.has_cards(4, monkeypatch)
    with pytest.raises(
        InvalidProgram, match=f"main: kernel .* is for {count} GPUs, and the program runs on {num_ranks}; compile it for this"
    ):
        Session(executable(count, "sm_80"), num_ranks=num_ranks)


def test_launches_next_to_a_gathering_do_not_overlap(software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gathering, and the launches before and after it, begin only when the launch before them has ended, because the cards wait for each
    other in between."""
    software_gpu.has_cards(2, monkeypatch)
    session = opened(executable(2, OVERLAPPING), 2)
    found: list[tuple[str, bool]] = []
    original = driver.launch

    def launch(*args: Any, overlaps: bool) -> None:
        found.append((args[-1], overlaps))
        original(*args, overlaps=overlaps)

    monkeypatch.setattr(driver, "launch", launch)
    session.call("main", IDS)
    assert found[::2] == found[1::2], "launches of rank 0, and of rank 1"
    assert found[::2] == [
        ("kernel rank_embedding", False),
        ("kernel softmax", False),
        ("kernel linear_silu", True),
        ("kernel all_gather", False),
        ("kernel linear", False),
        ("kernel all_gather", False),
        ("kernel softmax", False),
    ]


@pytest.mark.parametrize("count", [1, 2])
def test_a_capture_that_fails_raises_its_error_and_leaves_no_graph(
    count: int, software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is that of the launch. The driver has another error for a capture that ends before the streams of all cards have joined."""
    software_gpu.has_cards(2, monkeypatch)
    session, num_launches = opened(executable(count, "sm_80"), count), 0
    gc.collect()
    before, original = software_gpu.num_objects, driver.launch

    def launch(*args: Any, **options: Any) -> None:
        nonlocal num_launches
        num_launches += 1
        if num_launches == 2:
            raise DeviceFault("the second launch fails")
        original(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "launch", launch)
        with pytest.raises(DeviceFault, match="the second launch fails"):
            session.call("main", IDS)
    after = software_gpu.num_objects
    assert (after["Graph"], after["Executable"]) == (before["Graph"], before["Executable"])
    np.testing.assert_array_equal(session.call("main", IDS), opened(executable(1, "sm_80"), 1).call("main", IDS))


# --- mistakes ------------------------------------------------------------------------------------------------------------


def right() -> list[NDArray[np.float32]]:
    session = opened(executable(1, OVERLAPPING), 1)
    return [session.call("main", ids) for ids in (IDS, OTHER_IDS)]


def wrong(software_gpu: SoftwareGpu, expected: Sequence[NDArray[np.float32]]) -> bool:
    """Return whether a mistake is noticed: some call fails, or returns other numbers. A second call, with other inputs, is made before the
    host waits for the first one. The host then waits for rank 0 before rank 1, or the other way round: the software GPU does the work of
    the other rank as late as it may."""
    try:
        session = opened(executable(2, OVERLAPPING), 2)
        for first in session.device.ranks:
            views = [session.call("main", IDS, views=True), session.call("main", OTHER_IDS, views=True, keep_last=True)]
            first.close()
            if any(not np.array_equal(session.download(view), rows) for view, rows in zip(views, expected, strict=True)):
                return True
        return False
    except DeviceFault:
        return True
    finally:
        software_gpu.reset()


def only_in_captures(wait: Callable[[Lockstep], None]) -> Callable[[Lockstep], None]:
    return lambda lockstep: wait(lockstep) if lockstep._cards[0]._capturing else None


MISTAKES: dict[str, Any] = {
    "no waits of ranks for each other": (Lockstep, "meet", lambda _: None),
    "launches next to these waits overlap": (records, "_after_waits", lambda *_: set[int]()),
    "a graph without the launches of other ranks": (Lockstep, "fork", lambda _: None),
    "a graph that ends before the launches of other ranks": (Lockstep, "join", lambda _: None),
    "no wait for the ranks before a run": (Lockstep, "join", only_in_captures(Lockstep.join)),
    "no wait of the ranks for the run before": (Lockstep, "fork", only_in_captures(Lockstep.fork)),
    "no access to the memory of other ranks": (CudaDevice, "reach", lambda *_: None),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_between_ranks_is_noticed(name: str, software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    software_gpu.has_cards(2, monkeypatch)
    expected = right()
    assert not wrong(software_gpu, expected)
    if name == "no access to the memory of other ranks":
        from tests.gpu.driver.card import machine

        for context in machine.contexts.values():  # an earlier session has enabled it in the contexts that all sessions share
            context.peers.clear()
    monkeypatch.setattr(*MISTAKES[name])
    assert wrong(software_gpu, expected)


@pytest.mark.parametrize("missing", [1, 0], ids=["before", "after"])
def test_a_missing_wait_on_one_side_of_a_gathering_is_noticed(
    missing: int, software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait before a gathering, a rank reads what another one has not computed yet; without the one after it, what another one
    has overwritten already."""
    software_gpu.has_cards(2, monkeypatch)
    expected = right()
    meet, calls = Lockstep.meet, [0]

    def sometimes(lockstep: Lockstep) -> None:
        calls[0] += 1
        if calls[0] % 2 != missing:
            meet(lockstep)

    monkeypatch.setattr(Lockstep, "meet", sometimes)
    assert wrong(software_gpu, expected)


def test_gpus_that_cannot_reach_each_other_are_refused(software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.device.cuda.card import require_reachable
    from tests.gpu.driver.card import machine

    software_gpu.has_cards(2, monkeypatch)
    require_reachable(range(2))
    monkeypatch.setattr(machine, "reaches_peers", False)
    with pytest.raises(NoDevice, match="GPU 0 cannot read the memory of GPU 1, which tensor_parallel needs: choose GPUs that NVLink"):
        require_reachable(range(2))


def test_a_context_without_access_is_refused_by_the_driver(software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.device.cuda.card import Card
    from tests.gpu.driver.card import machine

    software_gpu.has_cards(2, monkeypatch)
    first, second = Card(0), Card(1)
    monkeypatch.setattr(machine, "reaches_peers", False)
    for context in machine.contexts.values():
        context.peers.clear()
    with second:
        context = driver.current_context()
    with first, pytest.raises(DeviceFault, match=r"access to the memory of another GPU: .*peer access is not supported"):
        driver.enable_peer_access(context)
