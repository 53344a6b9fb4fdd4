"""Test that disassembled code is read with its scoreboards and loops, and which facts and times are found for the sample."""

from __future__ import annotations

from tests.lab.sass.facts import LoopFacts, facts_of
from tests.lab.sass.sample import sample
from tests.lab.sass.tools import Usage, read_usage
from tests.lab.sass.warp import cycles_of, cycles_of_trip

SAID = """
ptxas info    : Compiling entry function 'one$p0' for 'sm_90a'
ptxas info    : Function properties for one$p0
    8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 72 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compiling entry function 'other$p0' for 'sm_90a'
ptxas info    : Function properties for other$p0
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers
"""


def test_an_instruction_says_what_it_sets_and_awaits() -> None:
    load, wait = sample().instructions[3], sample().instructions[5]
    assert (load.name, load.kind, load.num_bytes, load.stall, load.sets, load.waits) == ("LDG.E.64", "LDG", 8, 1, 2, {0})
    assert (wait.sets, wait.waits) == (None, {2})
    assert sample().instructions[2].predicate == "!P2"


def test_a_wait_for_an_mbarrier_is_no_loop() -> None:
    (loop,) = sample().loops
    assert (loop.begin, loop.end) == (1, 11) and sample().innermost == (loop,)


def test_the_facts_of_a_loop() -> None:
    (loop,) = sample().loops
    assert facts_of(sample(), loop) == LoopFacts(
        num_instructions=10, num_loads=3, loads_in_flight=2, bytes_in_flight=12, round_trips=2, load_use=0, copies=0, barriers=1
    )


def test_a_trip_waits_for_each_round_trip_to_memory() -> None:
    (loop,) = sample().loops
    near, far = (cycles_of_trip(sample(), loop, cycles, lambda _: 1) for cycles in (100, 400))
    assert far - near == 2 * 300


def test_a_range_counts_the_trips_of_its_loops() -> None:
    once, thrice = (cycles_of(sample(), 0, len(sample().instructions), 100, lambda _, n=n: n) for n in (1, 3))
    (loop,) = sample().loops
    assert thrice - once == 2 * cycles_of_trip(sample(), loop, 100, lambda _: 1)


def test_the_assembler_says_what_a_kernel_uses() -> None:
    assert read_usage(SAID) == {"one$p0": Usage(72, 1024, 12, 8), "other$p0": Usage(30, 0, 0, 0)}
