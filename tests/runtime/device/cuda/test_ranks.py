"""Several GPUs as ranks: kernels read the memory of other ranks, bits are those of one GPU, and a missing wait between ranks is noticed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.bind import bind_values
from compiler.driver import Options, compile_module
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from runtime.device.cuda import driver
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
    y = linear(x, w)
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
    y = linear(x, w)
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


@pytest.fixture(scope="module")
def executables() -> dict[int, Executable]:
    texts = {1: WHOLE, 2: divided(2), 4: divided(4)}
    return {count: compile_module(parse(text), Options(get("sm_80"))) for count, text in texts.items()}


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
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_compute_the_bits_of_one_gpu(
    count: int, software_gpu: SoftwareGpu, executables: dict[int, Executable], monkeypatch: pytest.MonkeyPatch
) -> None:
    software_gpu.has_cards(4, monkeypatch)
    alone, together = opened(executables[1], 1), opened(executables[count], count)
    for n in (23, 1, 0, 7, 23):
        np.testing.assert_array_equal(together.call("main", IDS[:n].copy()), alone.call("main", IDS[:n].copy()))
    assert len(together.device.ranks) == count


@pytest.mark.gpu
def test_a_region_of_all_ranks_is_one_graph(
    software_gpu: SoftwareGpu, executables: dict[int, Executable], monkeypatch: pytest.MonkeyPatch
) -> None:
    software_gpu.has_cards(2, monkeypatch)
    session = opened(executables[2], 2)
    assert len(executables[2].meta.regions) == 1
    session.call("main", IDS)
    session.call("main", IDS)
    assert session.device.card_usage is not None
    assert (session.device.card_usage.num_graphs, session.device.card_usage.num_graph_launches) == (1, 2)


@pytest.mark.gpu
def test_kernels_can_be_timed_one_by_one(
    software_gpu: SoftwareGpu, executables: dict[int, Executable], monkeypatch: pytest.MonkeyPatch
) -> None:
    software_gpu.has_cards(2, monkeypatch)
    session = opened(executables[2], 2)
    expected = session.call("main", IDS)
    with session.profile() as profile:
        np.testing.assert_array_equal(session.call("main", IDS), expected)
    assert {"all_gather", "rank_embedding"} <= set(profile.seconds)


def test_the_program_of_a_rank_names_whose_memory_it_reads(executables: dict[int, Executable]) -> None:
    """Nothing is fused into a kernel that reads other ranks, because they read what is in memory."""
    found = {kernel.name: kernel.ranks for kernel in executables[2].meta.kernels if kernel.ranks}
    assert found == {"rank_embedding": (OWN, 0, 1, OWN), "all_gather": (0, 1, OWN)}


def test_a_program_for_more_ranks_is_refused(
    software_gpu: SoftwareGpu, executables: dict[int, Executable], monkeypatch: pytest.MonkeyPatch
) -> None:
    software_gpu.has_cards(2, monkeypatch)
    with pytest.raises(InvalidProgram, match="reads the memory of rank 3, and the program runs on 2 GPUs; compile it for this number"):
        Session(executables[4], num_ranks=2)


# --- mistakes ------------------------------------------------------------------------------------------------------------


def wrong(software_gpu: SoftwareGpu, executable: Executable, right: NDArray[np.float32]) -> bool:
    """Return whether a mistake is noticed: some call fails, or returns other numbers."""
    try:
        session = opened(executable, 2)
        return any(not np.array_equal(session.call("main", IDS), right) for _ in range(2))
    except DeviceFault:
        return True
    finally:
        software_gpu.reset()


MISTAKES: dict[str, Any] = {
    "no waits of ranks for each other": (Lockstep, "meet", lambda _: None),
    "no wait for the ranks before a run": (Lockstep, "join", lambda _: None),
    "no access to the memory of other ranks": (CudaDevice, "reach", lambda *_: None),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_between_ranks_is_noticed(
    name: str, software_gpu: SoftwareGpu, executables: dict[int, Executable], monkeypatch: pytest.MonkeyPatch
) -> None:
    software_gpu.has_cards(2, monkeypatch)
    right = opened(executables[1], 1).call("main", IDS)
    assert not wrong(software_gpu, executables[2], right)
    if name == "no access to the memory of other ranks":
        from tests.gpu.driver.card import machine

        for context in machine.contexts.values():  # an earlier session has enabled it in the contexts that all sessions share
            context.peers.clear()
    monkeypatch.setattr(*MISTAKES[name])
    assert wrong(software_gpu, executables[2], right)


@pytest.mark.parametrize("missing", [1, 0], ids=["before", "after"])
def test_a_missing_wait_on_one_side_of_a_gathering_is_noticed(
    missing: int, software_gpu: SoftwareGpu, executables: dict[int, Executable], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait before a gathering, a rank reads what another one has not computed yet; without the one after it, what another one
    has overwritten already."""
    software_gpu.has_cards(2, monkeypatch)
    right = opened(executables[1], 1).call("main", IDS)
    meet, calls = Lockstep.meet, [0]

    def sometimes(lockstep: Lockstep) -> None:
        calls[0] += 1
        if calls[0] % 2 != missing:
            meet(lockstep)

    monkeypatch.setattr(Lockstep, "meet", sometimes)
    assert wrong(software_gpu, executables[2], right)


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
