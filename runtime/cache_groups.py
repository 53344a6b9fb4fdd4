"""What the layers of a model keep of the tokens before. Layers that keep the same make a group, whose pages are its own.

A page of a group holds what all its layers keep of PAGE_SIZE neighbouring tokens. The compiler takes from a group the tensors of the step's
program, the plan its bytes, and the engine which pages a sequence still needs:

    keys and values of all tokens     a sequence holds its pages to the end
    keys and values in a window       pages whose tokens no later token reads go back to the pool
    one state per sequence            a page has the state behind the last token that was computed of it: from that of a full page,
                                      any sequence with that beginning goes on. Large states have pages of more tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar, TypeVar

from runtime.executable import DTYPES

PAGE_SIZE = 16  # tokens
KV_DTYPES = ("f32", "f16", "bf16", "i8")

P = TypeVar("P")  # a number of pages: known, or a dimension of a program
Array = tuple[tuple[int | P, ...], str]  # shape and type


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Keys and values: [layers, 2, pages, kv_heads, PAGE_SIZE * head_dim], where 2 stands for keys and values.

    8-bit pages have a scale per token and head beside them: [layers, 2, pages, kv_heads, PAGE_SIZE] in f32.
    Inside a page the rows of one head stand together: decoding reads them as one stream, and a tile of prefill attention is a dense matrix.
    """

    layers: tuple[int, ...]  # of the model, in the order of the first axis
    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None  # tokens that a token attends to, itself included; None: all before it
    page_size: ClassVar[int] = PAGE_SIZE
    page_axis: ClassVar[int] = 2  # of its arrays
    keeps_states: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.dtype not in KV_DTYPES:
            raise ValueError(f"KV pages of type {self.dtype!r}: expected one of {', '.join(KV_DTYPES)}")

    def arrays(self, pages: P) -> tuple[Array[P], ...]:
        before = len(self.layers), 2, pages, self.num_kv_heads
        data = (*before, PAGE_SIZE * self.head_dim), self.dtype
        return (data, ((*before, PAGE_SIZE), "f32")) if self.dtype == "i8" else (data,)

    @property
    def bytes_per_page(self) -> int:
        """The bytes of a page in all layers together."""
        return _num_bytes(self.arrays(1))


@dataclass(frozen=True, slots=True)
class StateGroup:
    """States: for each part of a state [layers, pages, size] in f32, for the bits of a state must not depend on where it was kept."""

    layers: tuple[int, ...]
    sizes: tuple[int, ...]  # numbers in the parts of a layer's state
    page_size: int = PAGE_SIZE  # tokens from one kept state to the next: a multiple of PAGE_SIZE
    page_axis: ClassVar[int] = 1
    keeps_states: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.page_size <= 0 or self.page_size % PAGE_SIZE:
            raise ValueError(f"page_size of states is {self.page_size}: expected a multiple of {PAGE_SIZE} tokens")

    @property
    def window(self) -> int:
        """A token reads the state before it; one more full page stays, to go back to."""
        return self.page_size + 1

    def arrays(self, pages: P) -> tuple[Array[P], ...]:
        return tuple(((len(self.layers), pages, size), "f32") for size in self.sizes)

    @property
    def bytes_per_page(self) -> int:
        return _num_bytes(self.arrays(1))


CacheGroup = KVGroup | StateGroup


def _num_bytes(arrays: tuple[Array[int], ...]) -> int:
    return sum(prod(shape) * DTYPES[dtype].itemsize for shape, dtype in arrays)
