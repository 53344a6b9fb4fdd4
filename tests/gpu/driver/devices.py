"""Driver functions for devices and contexts."""

from __future__ import annotations

import ctypes

from tests.gpu.driver.calls import MESSAGES, DriverError, Result, function, put
from tests.gpu.driver.card import SHARED_LIMITS, Context, current, machine, stack

_texts = {code: ctypes.create_string_buffer(MESSAGES.get(code, code.name).encode()) for code in Result}
_names = {code: ctypes.create_string_buffer(f"CUDA_ERROR_{code.name}".encode()) for code in Result}
_names[Result.SUCCESS] = ctypes.create_string_buffer(b"CUDA_SUCCESS")


def check_card(card: int) -> int:
    if not 0 <= card < machine.cards:
        raise DriverError(Result.INVALID_DEVICE)
    return card


@function("cuInit", "u")
def init(flags: int) -> Result:
    if machine.cards == 0:
        return Result.NO_DEVICE
    machine.initialized = True
    return Result.SUCCESS


@function("cuDriverGetVersion", "p")
def driver_version(out: int) -> None:
    put(out, ctypes.c_int, machine.driver_version)


@function("cuGetErrorString", "ip")
def error_string(code: int, out: int) -> Result:
    return _error_text(_texts, code, out)


@function("cuGetErrorName", "ip")
def error_name(code: int, out: int) -> Result:
    return _error_text(_names, code, out)


def _error_text(texts: dict[Result, ctypes.Array[ctypes.c_char]], code: int, out: int) -> Result:
    if code not in texts:
        put(out, ctypes.c_void_p, None)
        return Result.INVALID_VALUE
    put(out, ctypes.c_void_p, ctypes.addressof(texts[Result(code)]))
    return Result.SUCCESS


@function("cuDeviceGetCount", "p")
def device_count(out: int) -> None:
    put(out, ctypes.c_int, machine.cards)


@function("cuDeviceGet", "pi")
def device_get(out: int, ordinal: int) -> None:
    put(out, ctypes.c_int, check_card(ordinal))


@function("cuDeviceGetName", "pii")
def device_name(out: int, room: int, card: int) -> None:
    name = f"software GPU {check_card(card)}".encode()[: room - 1]
    ctypes.memmove(out, name + b"\0", len(name) + 1)


@function("cuDeviceGetUuid_v2", "pi")
def device_uuid(out: int, card: int) -> None:
    ctypes.memmove(out, b"software GPU 000" + bytes([check_card(card)]), 16)


@function("cuDeviceTotalMem_v2", "pi")
def total_memory(out: int, card: int) -> None:
    check_card(card)
    put(out, ctypes.c_size_t, machine.card_bytes)


@function("cuDeviceComputeCapability", "ppi")
def compute_capability(major: int, minor: int, card: int) -> None:
    check_card(card)
    put(major, ctypes.c_int, machine.arch[0])
    put(minor, ctypes.c_int, machine.arch[1])


@function("cuDeviceGetPCIBusId", "pii")
def pci_bus(out: int, room: int, card: int) -> None:
    name = f"0000:{check_card(card):02x}:00.0".encode()[: room - 1]
    ctypes.memmove(out, name + b"\0", len(name) + 1)


def _attributes() -> dict[int, int]:
    """Return the attributes of a device, by their numbers in CUdevice_attribute. Attributes that are not listed read 0."""
    return {
        1: 1024,  # largest number of threads per block
        2: 1024, 3: 1024, 4: 64,  # largest size of a block in x, y and z
        5: 2**31 - 1, 6: 65535, 7: 65535,  # largest size of a grid in x, y and z
        8: 49152,  # bytes of shared memory per block
        9: 65536,  # bytes of constant memory
        10: 32,  # warp size
        12: 65536,  # registers per block
        13: 1_755_000,  # clock rate in kHz
        16: 132,  # multiprocessors
        31: 1,  # kernels can run concurrently
        36: 2_619_000,  # memory clock rate in kHz
        37: 5120,  # width of the memory bus in bits
        38: 50 << 20,  # bytes of the L2 cache
        39: 2048,  # resident threads per multiprocessor
        40: 3,  # number of asynchronous copy engines
        41: 1,  # unified addressing is supported
        75: machine.arch[0], 76: machine.arch[1],  # compute capability, major and minor
        78: 1,  # stream priorities are supported
        81: SHARED_LIMITS[machine.arch] + 1024,  # bytes of shared memory per multiprocessor
        82: 65536,  # registers per multiprocessor
        95: 1,  # cooperative launches are supported
        97: SHARED_LIMITS[machine.arch],  # bytes of shared memory per block that a kernel may request
        106: 32,  # resident blocks per multiprocessor
        111: 1024,  # bytes of shared memory per block that the system reserves
    }  # fmt: skip


@function("cuDeviceGetAttribute", "pii")
def device_attribute(out: int, attribute: int, card: int) -> None:
    check_card(card)
    put(out, ctypes.c_int, _attributes().get(attribute, 0))


@function("cuDeviceCanAccessPeer", "pii")
def can_access_peer(out: int, card: int, peer: int) -> None:
    put(out, ctypes.c_int, _can_access(check_card(card), check_card(peer)))


def _can_access(card: int, peer: int) -> bool:
    return card != peer and machine.reaches_peers


# --- contexts ------------------------------------------------------------------------------------------------------------


def _new_context(card: int) -> int:
    if not machine.initialized:
        raise DriverError(Result.NOT_INITIALIZED)
    handle = machine.handle(None)
    machine.contexts[handle] = Context(check_card(card))
    return handle


@function("cuDevicePrimaryCtxRetain", "pi")
def primary_retain(out: int, card: int) -> None:
    if card not in machine.primary:
        machine.primary[card] = _new_context(card)
    machine.contexts[machine.primary[card]].retained += 1
    put(out, ctypes.c_void_p, machine.primary[card])


@function("cuDevicePrimaryCtxRelease_v2", "i")
def primary_release(card: int) -> Result:
    if card not in machine.primary:
        return Result.INVALID_CONTEXT
    context = machine.contexts[machine.primary[card]]
    context.retained -= 1
    if context.retained == 0:
        del machine.contexts[machine.primary.pop(card)]
    return Result.SUCCESS


@function("cuDevicePrimaryCtxReset_v2", "i")
def primary_reset(card: int) -> None:
    if check_card(card) in machine.primary:
        machine.contexts[machine.primary[card]].fault = Result.SUCCESS


@function("cuDevicePrimaryCtxGetState", "ipp")
def primary_state(card: int, flags: int, active: int) -> None:
    put(flags, ctypes.c_uint, 0)
    put(active, ctypes.c_int, check_card(card) in machine.primary)


@function("cuCtxCreate_v4", "ppui")
def context_create(out: int, parameters: int, flags: int, card: int) -> None:
    handle = _new_context(card)
    stack().append(handle)
    put(out, ctypes.c_void_p, handle)


@function("cuCtxCreate_v2", "pui")
def context_create_v2(out: int, flags: int, card: int) -> None:
    context_create(out, 0, flags, card)


@function("cuCtxDestroy_v2", "p")
def context_destroy(handle: int) -> Result:
    if machine.contexts.pop(handle, None) is None:
        return Result.INVALID_CONTEXT
    if stack() and stack()[-1] == handle:
        stack().pop()
    return Result.SUCCESS


@function("cuCtxAttach", "pu")
def context_attach(out: int, flags: int) -> None:
    current()
    put(out, ctypes.c_void_p, stack()[-1])


@function("cuCtxDetach", "p")
def context_detach(handle: int) -> Result:
    return context_destroy(handle) if handle not in machine.primary.values() else Result.SUCCESS


@function("cuCtxPushCurrent_v2", "p")
def context_push(handle: int) -> Result:
    if handle not in machine.contexts:
        return Result.INVALID_CONTEXT
    stack().append(handle)
    return Result.SUCCESS


@function("cuCtxPopCurrent_v2", "p")
def context_pop(out: int | None) -> Result:
    if not stack():
        return Result.INVALID_CONTEXT
    handle = stack().pop()
    if out:
        put(out, ctypes.c_void_p, handle)
    return Result.SUCCESS


@function("cuCtxSetCurrent", "p")
def context_set(handle: int | None) -> None:
    if stack():
        stack().pop()
    if handle:
        stack().append(handle)


@function("cuCtxGetCurrent", "p")
def context_get(out: int) -> None:
    put(out, ctypes.c_void_p, stack()[-1] if stack() else None)


@function("cuCtxGetDevice", "p")
def context_device(out: int) -> None:
    put(out, ctypes.c_int, current().card)


@function("cuCtxEnablePeerAccess", "pu")
def enable_peer_access(handle: int, flags: int) -> Result:
    context, peer = current(), machine.contexts.get(handle)
    if peer is None:
        return Result.INVALID_CONTEXT
    if not _can_access(context.card, peer.card):
        return Result.PEER_ACCESS_UNSUPPORTED
    if peer.card in context.peers:
        return Result.PEER_ACCESS_ALREADY_ENABLED
    context.peers.add(peer.card)
    return Result.SUCCESS


@function("cuCtxGetApiVersion", "pp")
def context_api_version(handle: int, out: int) -> None:
    put(out, ctypes.c_uint, 3020)


@function("cuCtxGetStreamPriorityRange", "pp")
def priority_range(least: int, greatest: int) -> None:
    if least:
        put(least, ctypes.c_int, 0)
    if greatest:
        put(greatest, ctypes.c_int, -5)


@function("cuProfilerStart", "")
@function("cuProfilerStop", "")
def profiler() -> None:
    """Do nothing: the software card has no profiler."""
