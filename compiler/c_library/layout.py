"""The layout of a sequence's state in one block of memory, which the caller's function `allocate` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from compiler.c_library.team import TEAM_BYTES
from runtime.executable import DTYPES
from runtime.flat_program import FlatFunction, FlatProgram
from runtime.sections import align

MODEL, LENGTH, LOGITS, TEAM = 0, 8, 16, 64  # offsets of fields at the beginning of a sequence's block
HEADER_BYTES = TEAM + TEAM_BYTES  # size of these fields together
WORD: Final = 8  # bytes of a slot of a shape heap
SAMPLE: Final = "sample"  # name of the sampler among the functions of the program
FINGERPRINT_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Decoder:
    """A flat program that decodes one sequence, and its limits."""

    program: FlatProgram
    entry: str  # name of the function that runs a step
    vocab_size: int
    max_tokens: int  # largest number of tokens of one step
    max_context: int
    page_size: int
    cache_shapes: Mapping[str, tuple[int, ...]]  # shapes of the inputs that hold keys and values
    fingerprint: int  # number that identifies the weights
    prefix: str = "rs"  # prefix of the functions' names

    @property
    def weights_bytes(self) -> int:
        """The size of the weights with their fingerprint, which comes last."""
        return self.program.weights_bytes + FINGERPRINT_BYTES

    @property
    def most_pages(self) -> int:
        """The largest number of pages of a sequence."""
        return -(-self.max_context // self.page_size)

    def most(self, name: str) -> tuple[int, ...]:
        """Return the largest shape of an input of the step or of the sampler. The library passes no biases, seen tokens or masks, so these
        inputs have extent 0. `logits` has extent 0, too, because the sampler reads the logits in the arena."""
        kind = name.rstrip("0123456789")
        known = {
            **dict.fromkeys(("tokens", "positions", "slots", "seq_ids"), (self.max_tokens,)),
            "page_tables": (1, self.most_pages),
            **dict.fromkeys(("logit_rows", "hidden_rows", "rows"), (1,)),
            "numbers": (1, 5),
            "settings": (1, 9),
            **dict.fromkeys(("bias_starts", "seen_starts"), (2,)),
            **dict.fromkeys(("bias_ids", "bias_values", "seen_ids", "seen_counts", "masks", "logits"), (0,)),
        }
        return self.cache_shapes[name] if name in self.cache_shapes else known[kind]


@dataclass(frozen=True, slots=True)
class Layout:
    """The offsets of the parts of a sequence's block in bytes, and its size."""

    heaps: Mapping[str, int]  # offset of each function's shape heap, by the function's name
    inputs: Mapping[str, int]  # offset of each input, by name
    arena: int  # offset of the memory for intermediate results
    num_bytes: int


def layout_of(decoder: Decoder) -> Layout:
    """Place the header, then the shape heap and the inputs of each function, then the arena."""
    end = HEADER_BYTES
    heaps, inputs = dict[str, int](), dict[str, int]()
    for name, function in decoder.program.functions.items():
        heaps[name], end = end, align(end + WORD * len(function.slots))
        for tensor in function.inputs:
            inputs[tensor.name] = end
            end = align(end + prod(decoder.most(tensor.name)) * DTYPES[tensor.dtype].itemsize)
    return Layout(heaps, inputs, end, align(end + decoder.program.arena_bytes))


def literal(function: FlatFunction, slot: int) -> int | None:
    """Return the value of a slot that never changes, or None for other slots."""
    first = len(function.slots)
    return int(function.literals[slot - first]) if slot >= first else None
