"""The memory of a model's cache: each cache group has tensors with the pages of all sequences.

The engine assigns pages to sequences. Page 0 serves as padding and belongs to no sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from runtime.cache_groups import CacheGroup
from runtime.device.base import Device, Tensor
from runtime.executable import DTYPES
from runtime.memory import MemoryAccount


class KVPool:
    """The pages of all cache groups of a model, in memory of the device."""

    def __init__(self, groups: Sequence[CacheGroup], num_pages: Sequence[int], account: MemoryAccount, device: Device) -> None:
        """Allocate the tensors. Raise OutOfMemory if they exceed the limit of `account` or the memory of the device. On a CPU, the system
        provides physical memory only when pages are written. A group without layers in this process gets no tensors."""
        self.num_pages = tuple(num_pages)  # number of pages of each group
        self.groups = tuple(groups)
        account.resize("kv pool", sum(group.bytes_per_page * count for group, count in zip(groups, num_pages, strict=True)))
        self._device = device
        self.tensors = tuple(
            tuple(_tensor(device, shape, dtype) for shape, dtype in group.arrays(count)) if group.layers else ()
            for group, count in zip(groups, num_pages, strict=True)
        )

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """The tensors of all groups, in the order of the step's parameters."""
        return tuple(tensor for tensors in self.tensors for tensor in tensors)

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Copy a page in all layers of its group."""
        self._check(group, source)
        self._check(group, target)
        for tensor in self.tensors[group]:
            axis, count = self.groups[group].page_axis, self.groups[group].num_parts
            for part in range(count):
                self._device.copy_index(tensor, axis, source * count + part, target * count + part)

    def read_page(self, group: int, page: int) -> bytes:
        """Return the bytes of a page: for each tensor of the group in turn, the page's bytes in all layers."""
        self._check(group, page)
        axis, count = self.groups[group].page_axis, self.groups[group].num_parts
        places = [(tensor, page * count + part) for tensor in self.tensors[group] for part in range(count)]
        return b"".join(self._device.read_index(tensor, axis, index) for tensor, index in places)

    def write_page(self, group: int, page: int, data: bytes | memoryview) -> None:
        """Set a page to bytes that `read_page` of a pool with equal groups has returned. Raise ValueError if `data` has a wrong length."""
        self._check(group, page)
        axis, count = self.groups[group].page_axis, self.groups[group].num_parts
        if len(data) != (wanted := self.groups[group].bytes_per_page):
            raise ValueError(f"a page of group {group} is to have {len(data)} bytes; expected {wanted}")
        left = memoryview(data)
        for tensor in self.tensors[group]:
            num_bytes = tensor.nbytes // tensor.shape[axis]
            for part in range(count):
                self._device.write_index(tensor, axis, page * count + part, left[:num_bytes])
                left = left[num_bytes:]

    def _check(self, group: int, page: int) -> None:
        if not 0 <= page < self.num_pages[group]:
            raise IndexError(f"page {page} does not exist; the pool has pages 0 to {self.num_pages[group] - 1}")


def _tensor(device: Device, shape: tuple[int, ...], dtype: str) -> Tensor:
    return device.tensor(device.allocate(prod(shape) * DTYPES[dtype].itemsize, sparse=True), 0, shape, DTYPES[dtype])
