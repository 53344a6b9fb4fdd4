"""Facts about the loops of a kernel that decide its speed: what is in flight, how soon the warp waits for what it loads, and barriers."""

from __future__ import annotations

from dataclasses import dataclass

from tests.lab.sass.listing import Listing, Loop

ASYNCHRONOUS = ("UBLKCP", "LDGSTS")  # copies to shared memory, which no register waits for


@dataclass(frozen=True, slots=True)
class LoopFacts:
    num_instructions: int
    num_loads: int  # loads from global memory to registers
    loads_in_flight: int  # the largest number of them that are in flight at once
    bytes_in_flight: int  # the largest number of bytes that a lane has in flight
    round_trips: int  # the number of times that a trip of the loop loads and then waits
    load_use: int | None  # the smallest number of instructions between a load and the wait for it; None: nothing is loaded
    copies: int  # asynchronous copies to shared memory
    barriers: int  # barriers of the block


def facts_of(listing: Listing, loop: Loop) -> LoopFacts:
    body = [x for x in listing.body(loop) if not x.never_runs]
    pending: dict[int, list[int]] = {}  # the loads that each scoreboard stands for
    most, most_bytes, trips, distances, has_loaded = 0, 0, 0, list[int](), False
    for number, x in enumerate(body):
        waited = [loads for board in x.waits if (loads := pending.pop(board, None))]
        distances += [number - loads[0] - 1 for loads in waited]
        trips += bool(waited) and has_loaded
        has_loaded = has_loaded and not waited
        if x.kind == "LDG" and x.sets is not None:
            pending.setdefault(x.sets, []).append(number)
            has_loaded = True
            in_flight = [i for loads in pending.values() for i in loads]
            most, most_bytes = max(most, len(in_flight)), max(most_bytes, sum(body[i].num_bytes for i in in_flight))
    return LoopFacts(
        num_instructions=len(body),
        num_loads=sum(x.kind == "LDG" for x in body),
        loads_in_flight=most,
        bytes_in_flight=most_bytes,
        round_trips=trips + has_loaded,
        load_use=min(distances, default=None),
        copies=sum(x.kind in ASYNCHRONOUS for x in body),
        barriers=sum(x.kind == "BAR" for x in body),
    )
