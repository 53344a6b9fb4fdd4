"""The software GPU computes fused multiply-adds and matrix products of floats to the same bits in C as in NumPy, and records the same
histories of shared and global memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.gpu.fixtures import _library as _library
from tests.gpu.ptx import native
from tests.gpu.ptx.faults import Fault
from tests.gpu.ptx.instructions.floats import fused_multiply_add
from tests.gpu.ptx.instructions.rounding import ELEMENTS, product
from tests.gpu.ptx.memory import History
from tests.gpu.ptx.native import Native
from tests.gpu.ptx.races import Races
from tests.gpu.ptx.shadow import Shadow

Array = NDArray[Any]
FLOATS = [kind for kind in ELEMENTS if kind not in ("s8", "u8")]


@pytest.fixture
def both(_library: Path | None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Array, Array]]:
    """Return a function that computes in C and in NumPy."""
    if _library is None:
        pytest.skip("a real card has no sums in C")
    fast = Native(str(_library))

    def compute(function: Callable[..., Array], *arguments: Any) -> tuple[Array, Array]:
        found: list[Array] = []
        for loaded in ([fast], []):
            monkeypatch.setattr(native, "_loaded", loaded)
            found.append(function(*arguments))
        return found[0], found[1]

    return compute


def numbers(random: np.random.Generator, shape: tuple[int, ...], spread: int) -> Array:
    """Return numbers whose exponents differ by up to twice `spread`; every eighth is zero."""
    drawn = random.standard_normal(shape) * 2.0 ** random.integers(-spread, spread + 1, shape)
    return np.where(random.random(shape) < 0.125, 0.0, drawn)


@pytest.mark.parametrize("arch", [(8, 0), (9, 0)])
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("spread", [0, 4, 60])
def test_matrix_units(kind: str, spread: int, arch: tuple[int, int], both: Callable[..., tuple[Array, Array]]) -> None:
    random = np.random.default_rng(spread)
    depth = 32 if kind.startswith("e") else 16
    for rows, columns in ((16, 8), (64, 8), (64, 200), (64, 256)):
        with np.errstate(over="ignore"):
            a, b = (numbers(random, (3, size, depth), min(spread, 6)).astype(ELEMENTS[kind]) for size in (rows, columns))
        c = numbers(random, (3, rows, columns), spread).astype(np.float32)
        assert np.isfinite(a.astype(np.float32)).all() and np.isfinite(b.astype(np.float32)).all()
        fast, slow = both(product, a, b, c, kind, kind, arch)
        assert fast.dtype == slow.dtype == np.float32
        np.testing.assert_array_equal(fast.view(np.uint32), slow.view(np.uint32))
        assert (fast != c).any()


def test_sums_that_are_not_finite_or_too_large(both: Callable[..., tuple[Array, Array]]) -> None:
    a, b = np.ones((1, 16, 16), ELEMENTS["bf16"]), np.ones((1, 8, 16), ELEMENTS["bf16"])
    b[0, 0], b[0, 1, 3], b[0, 2, 5], b[0, 2, 6] = 3e38, np.nan, np.inf, -np.inf
    for some in (b, b[:, :1]):  # not finite, and finite
        c = np.full((1, 16, some.shape[1]), 3e38, np.float32)
        with np.errstate(all="ignore"):  # as in a launch
            fast, slow = both(product, a, some, c, "bf16", "bf16", (9, 0))
        np.testing.assert_array_equal(fast.view(np.uint32), slow.view(np.uint32))


def test_fused_multiply_adds(both: Callable[..., tuple[Array, Array]]) -> None:
    random = np.random.default_rng(0)
    a, b, c = (random.integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32) for _ in range(3))
    with np.errstate(all="ignore"):
        near = -(a.astype(np.float64) * b).astype(np.float32)  # so that almost everything cancels
        for arguments in ((a, b, c), (a, b, near), (a, b[:1], c), (a[:1], b[:1], c[:1])):
            fast, slow = both(fused_multiply_add, *arguments)
            assert fast.shape == slow.shape and fast.dtype == slow.dtype
            np.testing.assert_array_equal(fast.view(np.uint32), slow.view(np.uint32))


@pytest.mark.parametrize("grain", [1, 4])
def test_the_history_of_shared_memory(grain: int, both: Callable[..., tuple[Array, Array]]) -> None:
    """Random accesses are faults for the same reason, and leave the same history. Barriers are so frequent that most are no faults."""
    random, threads, num_bytes = np.random.default_rng(grain), np.arange(128), 4096
    wave: Any = SimpleNamespace(threads=threads, warp=threads // 32, slot=threads // 64, blocks=np.arange(2), cluster=1, shared_stride=2048)
    wave.name = lambda thread: f"thread {thread}"
    shadows = both(Shadow, num_bytes, grain, wave, 1)
    assert [each._native is None for each in shadows] == [False, True]  # pyright: ignore[reportPrivateUsage]
    counts = {"good": 0, "faulty": 0}
    begun: list[Array] = []
    copies: list[tuple[Any, ...]] = []

    def same(name: str, *arguments: Any, **options: Any) -> bool:
        """Call a method of both. Return whether it is no fault."""
        said: list[str] = []
        for shadow in shadows:
            try:
                getattr(shadow, name)(*arguments, **options)
                said.append("")
            except Fault as fault:
                said.append(str(fault))
        assert said[0] == said[1]
        for field in ("writer", "reader", "write_time", "read_time", "arriving", "leaving", "generic"):
            np.testing.assert_array_equal(*(getattr(shadow, field) for shadow in shadows), f"{field} after {name}: {said[0]}")
        return not said[0]

    for _ in range(1200):
        some = np.sort(random.choice(threads, random.integers(1, 128), replace=False))
        size = 1 << int(random.integers(grain.bit_length() - 1, 5))
        offsets = random.integers(0, 64, len(some)) * 64 if random.random() < 0.5 else some * 16  # many at one place, or each at its own
        action = random.choice(["read", "write", "copy", "product", "barrier", "warps", "fence"], p=[0.2, 0.15, 0.1, 0.1, 0.3, 0.1, 0.05])
        good = True
        match action:
            case "read" | "write":
                good = same(action, some, offsets, size)
            case "copy" if copies and random.random() < 0.6:
                same("arrive", *copies.pop(), asynchronous=bool(random.integers(2)))
            case "copy":
                at = some // 2 * 32 if random.random() < 0.3 else some * 16  # several copies to one place, or each to its own
                if good := same("announce", some, at, 16, asynchronous=bool(random.integers(2))):
                    copies.append((some, at, 16))
            case "product" if begun and random.random() < 0.6:
                same("end_reading", begun.pop())
            case "product":
                pieces = np.unique(random.integers(0, num_bytes // grain, 40))
                if good := same("begin_reading", int(some[0]), pieces):
                    begun.append(pieces)
            case "barrier":
                same("synchronise", threads)
            case "warps":
                same("synchronise_warps", some)
            case _:
                same("fence", threads)
        counts["good" if good else "faulty"] += 1
    assert min(counts.values()) > 120, counts


@pytest.mark.parametrize("grain", [1, 4])
def test_the_history_of_global_memory(grain: int, both: Callable[..., tuple[Array, Array]]) -> None:
    """Random accesses are faults for the same reason, and leave the same history. The threads of a warp, of a block or of a launch use the
    same places, and launches follow one another."""
    random, threads = np.random.default_rng(grain), np.arange(256)
    slots = threads // 128
    histories = [History(), History()]
    counts = {"good": 0, "faulty": 0}
    time = 1
    for _ in range(12):
        waves: list[Any] = []
        for history in histories:
            history.time = time
            shadow = SimpleNamespace(time=time, epoch=np.zeros(256, np.int32), warp_epoch=np.zeros(256, np.int32))
            launch = SimpleNamespace(begin=time, signals={}, grid=(2, 1, 1))
            wave: Any = SimpleNamespace(memory=SimpleNamespace(history=history, top=4096), launch=launch, shadow=shadow, threads=threads)
            wave.program, wave.blocks, wave.slot, wave.thread = SimpleNamespace(global_grain=grain), np.arange(2), slots, threads % 128
            wave.per_block, wave.cluster, wave.name = 128, 1, lambda thread: f"thread {thread}"
            waves.append(wave)
        made = iter(waves)
        races = both(lambda made=made: Races(next(made)))
        assert [each._native is None for each in races] == [False, True]  # pyright: ignore[reportPrivateUsage]
        for _ in range(100):
            some = np.sort(random.choice(threads, random.integers(1, 256), replace=False))
            some = some[slots[some] == random.integers(2)] if random.random() < 0.7 else some
            size = 1 << int(random.integers(grain.bit_length() - 1, 5))
            offsets = (some if random.random() < 0.6 else random.integers(0, 32, len(some))) * 16 + int(random.integers(2)) * 2048 % 4096
            offsets = offsets % 4096
            action = random.choice(["read", "constant", "write", "barrier", "warps"], p=[0.25, 0.05, 0.25, 0.3, 0.15])
            said: list[str] = []
            for race, wave in zip(races, waves, strict=True):
                try:
                    match action:
                        case "read" | "constant":
                            race.read(some, offsets, size, constant=action == "constant")
                        case "write":
                            race.write(some, offsets, size)
                        case _:
                            wave.shadow.time += 1
                            (wave.shadow.epoch if action == "barrier" else wave.shadow.warp_epoch)[some] = wave.shadow.time
                    said.append("")
                except Fault as fault:
                    said.append(str(fault))
            assert said[0] == said[1]
            for field in ("writer", "write_time", "reader", "read_time", "constant_time"):
                np.testing.assert_array_equal(*(getattr(each, field) for each in histories), f"{field} after {action}: {said[0]}")
            counts["faulty" if said[0] else "good"] += 1
        time = waves[0].shadow.time + 1
    assert min(counts.values()) > 120, counts
