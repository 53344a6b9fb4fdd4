"""Driver functions for device memory, pinned host memory, and copies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from tests.gpu.driver.calls import DriverError, Result, function, put
from tests.gpu.driver.card import current, machine
from tests.gpu.driver.streams import Work, default_stream, finish, finish_all, refuse_in_capture, stream_of, submit


@function("cuMemGetInfo_v2", "pp")
def memory_info(free: int, total: int) -> None:
    put(free, ctypes.c_size_t, machine.card_bytes - machine.used(current().card))
    put(total, ctypes.c_size_t, machine.card_bytes)


@function("cuMemAlloc_v2", "pz")
def allocate(out: int, num_bytes: int) -> Result:
    context = current()
    refuse_in_capture()
    if num_bytes == 0:
        return Result.INVALID_VALUE
    if machine.used(context.card) + num_bytes > machine.card_bytes:
        return Result.OUT_OF_MEMORY
    address = machine.memory.allocate(num_bytes)
    if address is None:
        return Result.OUT_OF_MEMORY
    machine.owners[address] = (context.card, num_bytes)
    machine.tell(context.card)
    put(out, ctypes.c_uint64, address)
    return Result.SUCCESS


@function("cuMemFree_v2", "q")
def free(address: int) -> Result:
    if address == 0:
        return Result.SUCCESS
    finish_all(current())
    if machine.owners.pop(address, None) is None:
        return Result.INVALID_VALUE
    machine.tell(current().card)
    machine.memory.free(address)
    return Result.SUCCESS


@function("cuMemGetAddressRange_v2", "ppq")
def address_range(base: int | None, size: int | None, address: int) -> Result:
    found = machine.memory.allocation(address)
    if found is None:
        return Result.NOT_FOUND
    if base:
        put(base, ctypes.c_uint64, found[0])
    if size:
        put(size, ctypes.c_size_t, found[1])
    return Result.SUCCESS


@function("cuMemHostAlloc", "pzu")
def host_allocate(out: int, num_bytes: int, flags: int) -> Result:
    current()
    refuse_in_capture()
    address = machine.memory.allocate(num_bytes, pinned=True)
    if address is None:
        return Result.OUT_OF_MEMORY
    machine.pinned[address] = num_bytes
    put(out, ctypes.c_void_p, address)
    return Result.SUCCESS


@function("cuMemAllocHost_v2", "pz")
def host_allocate_v2(out: int, num_bytes: int) -> Result:
    return host_allocate(out, num_bytes, 0)


@function("cuMemFreeHost", "p")
def host_free(address: int) -> Result:
    finish_all(current())
    if machine.pinned.pop(address, None) is None:
        return Result.INVALID_VALUE
    machine.memory.free(address)
    return Result.SUCCESS


@function("cuMemHostGetDevicePointer_v2", "ppu")
def host_device_pointer(out: int, address: int, flags: int) -> Result:
    if machine.memory.allocation(address) is None:
        return Result.INVALID_VALUE
    put(out, ctypes.c_uint64, address)
    return Result.SUCCESS


@function("cuMemHostGetFlags", "pp")
def host_flags(out: int, address: int) -> None:
    put(out, ctypes.c_uint, 0)


# --- copies --------------------------------------------------------------------------------------------------------------


def is_pinned(address: int, num_bytes: int) -> bool:
    return any(begin <= address and address + num_bytes <= begin + size for begin, size in machine.pinned.items())


def _host(address: int, num_bytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address)) if num_bytes else np.zeros(0, np.uint8)


def _to_device(target: int, source: int, num_bytes: int, *, late: bool) -> Callable[[Work], None]:
    """Return a function that copies to the device. With `late` (pinned memory), this function reads the source when it runs. Otherwise
    (pageable memory) the source is read now, as if into a staging buffer."""
    data = _host(source, num_bytes) if late else _host(source, num_bytes).copy()

    def copy(_: Work) -> None:
        machine.memory.span(target, num_bytes)[:] = data

    return copy


def _to_host(target: int, source: int, num_bytes: int) -> Callable[[Work], None]:
    def copy(_: Work) -> None:
        _host(target, num_bytes)[:] = machine.memory.span(source, num_bytes)

    return copy


def _on_device(target: int, source: int, num_bytes: int) -> Callable[[Work], None]:
    def copy(_: Work) -> None:
        machine.memory.span(target, num_bytes)[:] = machine.memory.span(source, num_bytes).copy()

    return copy


def _now(run: Callable[[Work], None]) -> None:
    """Run a copy in the default stream, and wait until it is done."""
    context = current()
    finish(submit(default_stream(context), run))
    if context.fault:
        raise DriverError(context.fault)


@function("cuMemcpyHtoD_v2", "qpz")
def copy_to_device(target: int, source: int, num_bytes: int) -> None:
    _now(_to_device(target, source, num_bytes, late=True))


@function("cuMemcpyDtoH_v2", "pqz")
def copy_to_host(target: int, source: int, num_bytes: int) -> None:
    _now(_to_host(target, source, num_bytes))


@function("cuMemcpyDtoD_v2", "qqz")
def copy_on_device(target: int, source: int, num_bytes: int) -> None:
    submit(default_stream(current()), _on_device(target, source, num_bytes))


@function("cuMemcpyHtoDAsync_v2", "qpzp")
def copy_to_device_async(target: int, source: int, num_bytes: int, stream: int | None) -> None:
    into = stream_of(stream)
    late = into.capture is not None or is_pinned(source, num_bytes)
    submit(into, _to_device(target, source, num_bytes, late=late))


@function("cuMemcpyDtoHAsync_v2", "pqzp")
def copy_to_host_async(target: int, source: int, num_bytes: int, stream: int | None) -> None:
    into = stream_of(stream)
    work = submit(into, _to_host(target, source, num_bytes))
    if into.capture is None and not is_pinned(target, num_bytes):
        finish(work)  # a copy to pageable memory returns only when it is done


@function("cuMemcpyDtoDAsync_v2", "qqzp")
def copy_on_device_async(target: int, source: int, num_bytes: int, stream: int | None) -> None:
    submit(stream_of(stream), _on_device(target, source, num_bytes))


def _fill(target: int, value: int, count: int, size: int) -> Callable[[Work], None]:
    def fill(_: Work) -> None:
        span = machine.memory.span(target, count * size)
        span[:] = np.frombuffer((value & ((1 << 8 * size) - 1)).to_bytes(size, "little") * count, np.uint8)

    return fill


@function("cuMemsetD8_v2", "quz")
def fill_bytes(target: int, value: int, count: int) -> None:
    submit(default_stream(current()), _fill(target, value, count, 1))


@function("cuMemsetD16_v2", "quz")
def fill_halves(target: int, value: int, count: int) -> None:
    submit(default_stream(current()), _fill(target, value, count, 2))


@function("cuMemsetD32_v2", "quz")
def fill_words(target: int, value: int, count: int) -> None:
    submit(default_stream(current()), _fill(target, value, count, 4))


@function("cuMemsetD8Async", "quzp")
def fill_bytes_async(target: int, value: int, count: int, stream: int | None) -> None:
    submit(stream_of(stream), _fill(target, value, count, 1))


@function("cuMemsetD16Async", "quzp")
def fill_halves_async(target: int, value: int, count: int, stream: int | None) -> None:
    submit(stream_of(stream), _fill(target, value, count, 2))


@function("cuMemsetD32Async", "quzp")
def fill_words_async(target: int, value: int, count: int, stream: int | None) -> None:
    submit(stream_of(stream), _fill(target, value, count, 4))
