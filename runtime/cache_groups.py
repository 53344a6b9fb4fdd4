"""Groups of layers that cache the same kind of data per token. Each group has separate pages.

A page of keys and values holds what all layers of the group store for PAGE_SIZE consecutive tokens; pages of states and of audio hold
other data. A group tells the compiler which cache tensors are parameters of the step, the memory plan how many bytes a page has, and the
engine which pages a sequence still needs:

    keys and values of all tokens     a sequence keeps its pages to the end
    keys alone                        a sequence keeps its pages to the end; each value is the beginning of its key (multi-head latent
                                      attention)
    keys and values in a window       pages whose tokens no later token reads go back to the pool
    one state per sequence            a page holds the state after the last token that was computed in it. Every sequence that begins with
                                      the same tokens can continue from the state of a full page. A page of large states covers more
                                      than PAGE_SIZE tokens.
    keys and values of audio          one page per sequence holds the keys and values of all frames of its window of audio

A process that computes only some layers of a model has all groups of the model. A group takes no memory, and no parameter of the step, in
a process that computes none of the group's layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar, TypeVar

from runtime.executable import DTYPES

PAGE_SIZE = 16  # tokens
KV_DTYPES = ("f32", "f16", "bf16", "i8")

P = TypeVar("P")  # number of pages: an integer, or a dimension of a program
Array = tuple[tuple[int | P, ...], str]  # shape and element type


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Keys and values: [layers, 2, pages, kv_heads, PAGE_SIZE * head_dim], where the axis of 2 selects keys or values. If each value is the
    beginning of its key, only keys are stored, and this axis has length 1.

    8-bit pages also have a scale per token and head: [layers, 2, pages, kv_heads, PAGE_SIZE] in f32. Inside a page the rows of one head are
    adjacent: decoding reads them as one stream, and a tile of prefill attention is a dense matrix.
    """

    layers: tuple[int, ...]  # numbers of the group's layers in the model; layer i of the cache is layers[i]
    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None  # number of tokens to which a token attends: itself and the tokens just before it; None: all
    value_size: int | None = None  # a value is the first `value_size` elements of its key; None: values are stored beside the keys
    page_size: ClassVar[int] = PAGE_SIZE
    page_axis: ClassVar[int] = 2  # the axis of pages in the arrays
    num_parts: ClassVar[int] = 1  # number of entries on the axis of pages that form one page
    keeps_states: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.dtype not in KV_DTYPES:
            raise ValueError(f"the type of KV pages is {self.dtype!r}; expected one of {', '.join(KV_DTYPES)}")
        if self.value_size is not None and not 0 < self.value_size <= self.head_dim:
            raise ValueError(f"value_size is {self.value_size}; expected 1 to {self.head_dim}, the size of a key")

    def arrays(self, pages: P) -> tuple[Array[P], ...]:
        """Return the shape and element type of each array of the group, with room for this many pages."""
        before = len(self.layers), 2 if self.value_size is None else 1, pages, self.num_kv_heads
        data = (*before, PAGE_SIZE * self.head_dim), self.dtype
        return (data, ((*before, PAGE_SIZE), "f32")) if self.dtype == "i8" else (data,)

    @property
    def bytes_per_page(self) -> int:
        """The bytes of one page, summed over all layers of the group."""
        return _num_bytes(self.arrays(1))


@dataclass(frozen=True, slots=True)
class StateGroup:
    """States. The state of a layer consists of parts; each part has an array [layers, pages, size]. The type is always f32, so a state
    stored in a page equals the computed state bit for bit."""

    layers: tuple[int, ...]
    sizes: tuple[int, ...]  # number of elements of each part of a layer's state
    page_size: int = PAGE_SIZE  # number of tokens from one stored state to the next; a multiple of PAGE_SIZE
    page_axis: ClassVar[int] = 1
    num_parts: ClassVar[int] = 1
    keeps_states: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.page_size <= 0 or self.page_size % PAGE_SIZE:
            raise ValueError(f"page_size of states is {self.page_size}; expected a multiple of {PAGE_SIZE} tokens")

    @property
    def window(self) -> int:
        """The number of most recent tokens whose pages a sequence keeps. A token reads the state after the previous token. One more full
        page is kept, so that the sequence can go back to the state after that page."""
        return self.page_size + 1

    def arrays(self, pages: P) -> tuple[Array[P], ...]:
        """Return the shape and element type of each array of the group, with room for this many pages."""
        return tuple(((len(self.layers), pages, size), "f32") for size in self.sizes)

    @property
    def bytes_per_page(self) -> int:
        return _num_bytes(self.arrays(1))


@dataclass(frozen=True, slots=True)
class HeardGroup:
    """Keys and values of the frames of audio to which the decoder's layers attend: [layers, 2, parts, kv_heads, PAGE_SIZE * head_dim],
    with scales as in a KVGroup if they have 8 bits. A part has the layout of a page of a KVGroup. A page consists of the parts of all
    frames. `page_size` is at least the length of the longest sequence, so a sequence has one page. No other sequence finds this page in the
    prefix cache."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: str
    num_frames: int
    page_size: int  # tokens: a multiple of PAGE_SIZE, at least the longest sequence
    window: ClassVar[None] = None
    page_axis: ClassVar[int] = 2
    keeps_states: ClassVar[bool] = False

    @property
    def num_parts(self) -> int:
        """The number of parts that form one page."""
        return -(-self.num_frames // PAGE_SIZE)

    def arrays_of(self, parts: P) -> tuple[Array[P], ...]:
        """Return the shape and element type of each array of the group, with room for this many parts."""
        return KVGroup(self.layers, self.num_kv_heads, self.head_dim, self.dtype).arrays(parts)

    def arrays(self, pages: int) -> tuple[Array[int], ...]:
        """Return the shape and element type of each array of the group, with room for this many pages."""
        return self.arrays_of(pages * self.num_parts)

    @property
    def bytes_per_page(self) -> int:
        return _num_bytes(self.arrays(1))


CacheGroup = KVGroup | StateGroup | HeardGroup


def _num_bytes(arrays: tuple[Array[int], ...]) -> int:
    return sum(prod(shape) * DTYPES[dtype].itemsize for shape, dtype in arrays)
