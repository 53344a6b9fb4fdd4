"""Keys and values of all sequences of one model: pages of 16 tokens in one block of memory.

    [layers, 2, pages, kv_heads, PAGE_SIZE, head_dim]        2: keys, values

8-bit pages have a scale per token and head beside them, [layers, 2, pages, kv_heads, PAGE_SIZE] in f32.

Inside a page the rows of one head stand together: decoding reads them as one stream, and a tile of prefill attention is a dense
matrix. A layer is a slice, so a kernel sees [2, pages, ...] whatever the depth of the model. Which page belongs to whom is the
engine's business; page 0 is padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from runtime.device.base import Device, Tensor
from runtime.executable import DTYPES
from runtime.memory import MemoryAccount

PAGE_SIZE = 16  # tokens
KV_DTYPES = ("f32", "f16", "bf16", "i8")
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVLayout:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in KV_DTYPES:
            raise ValueError(f"KV pages of type {self.dtype!r}: expected one of {', '.join(KV_DTYPES)}")

    @property
    def bytes_per_page(self) -> int:
        """In all layers together."""
        per_token = self.head_dim * DTYPES[self.dtype].itemsize + (SCALE_BYTES if self.has_scales else 0)
        return self.num_layers * 2 * self.num_kv_heads * PAGE_SIZE * per_token

    @property
    def has_scales(self) -> bool:
        return self.dtype == "i8"

    def pages_for(self, budget_bytes: int) -> int:
        return max(0, budget_bytes // self.bytes_per_page)


class KVPool:
    def __init__(self, layout: KVLayout, num_pages: int, account: MemoryAccount, device: Device) -> None:
        """Takes no memory before a page is written: the block is mapped, not filled."""
        self.layout = layout
        self.num_pages = num_pages
        account.resize("kv pool", num_pages * layout.bytes_per_page)
        shape = (layout.num_layers, 2, num_pages, layout.num_kv_heads, PAGE_SIZE, layout.head_dim)
        dtype = DTYPES[layout.dtype]
        self._device = device
        self.data = device.tensor(device.allocate(prod(shape) * dtype.itemsize), 0, shape, dtype)
        self.scales: Tensor | None = None
        if layout.has_scales:
            self.scales = device.tensor(device.allocate(prod(shape[:-1]) * SCALE_BYTES), 0, shape[:-1], DTYPES["f32"])

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """What a step takes: the pages, flat per head, and the scales if there are any."""
        shape = self.data.shape
        pages = self.data.reshape((*shape[:4], shape[4] * shape[5]))
        return (pages,) if self.scales is None else (pages, self.scales)

    def copy_page(self, source: int, target: int) -> None:
        """In every layer, keys and values."""
        for page in (source, target):
            if not 0 <= page < self.num_pages:
                raise IndexError(f"page {page}: the pool has pages 0 to {self.num_pages - 1}")
        for tensor in (self.data,) if self.scales is None else (self.data, self.scales):
            self._device.copy_index(tensor, 2, source, target)
