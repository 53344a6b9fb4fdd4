"""Driver functions for modules of PTX text, kernels and launches."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field

from tests.gpu.driver.calls import DriverError, Result, function, put
from tests.gpu.driver.card import SHARED_LIMITS, Context, current, machine
from tests.gpu.driver.links import MAGIC
from tests.gpu.driver.streams import Work, refuse_in_capture, stream_of, submit
from tests.gpu.ptx.faults import Fault, UnknownPtx
from tests.gpu.ptx.launch import LoadedModule, arch_of, launch, load

DEFAULT_SHARED = 48 << 10  # bytes of shared memory that a block may use without a request
INFO_LOG, INFO_ROOM, ERROR_LOG, ERROR_ROOM = 3, 4, 5, 6  # CUjit_option numbers of a module load
WILD = 1 << 50  # an address at which no memory is ever mapped
MAX_DYNAMIC_SHARED = 8  # number of the function attribute that requests more shared memory
OVERLAPS = 6  # number of the launch attribute that lets a kernel begin before the kernel before it has ended


@dataclass(slots=True, eq=False)
class Function:
    module: LoadedModule
    name: str
    context: Context
    attributes: dict[int, int] = field(default_factory=dict)


def _load(image: int) -> LoadedModule:
    text = ctypes.string_at(image)
    if text.startswith(MAGIC):
        arch, _, text = text.removeprefix(MAGIC).partition(b"\n")
        if arch.decode() != "{}.{}".format(*machine.arch):
            raise DriverError(Result.NO_BINARY_FOR_GPU)
    else:
        machine.assembled += 1
    if text[:4] == b"\x7fELF" or b".target" not in text:
        raise DriverError(Result.INVALID_IMAGE)
    module = load(text.decode(), machine.memory)
    wanted = arch_of(module.module.target)
    if wanted > machine.arch or (module.module.target.endswith("a") and wanted != machine.arch):
        raise DriverError(Result.NO_BINARY_FOR_GPU)
    for name in module.module.kernels:
        module.program(name)  # compile the kernel now: an unknown instruction fails the load, as with the real driver
    return module


@function("cuModuleLoadDataEx", "ppupp")
def module_load_ex(out: int, image: int, count: int, options: int | None, values: int | None) -> Result:
    context = current()
    refuse_in_capture()
    try:
        handle = machine.handle(_load(image))
        machine.homes[handle] = context
        put(out, ctypes.c_void_p, handle)
    except UnknownPtx as error:
        machine.faults.append(str(error))
        _write_log(str(error), count, options, values)
        return Result.INVALID_PTX
    return Result.SUCCESS


def _write_log(text: str, count: int, options: int | None, values: int | None) -> None:
    if not options or not values:
        return
    numbers = (ctypes.c_int * count).from_address(options)
    words = (ctypes.c_void_p * count).from_address(values)
    given = dict(zip(numbers, words, strict=True))
    if given.get(ERROR_LOG) and given.get(ERROR_ROOM):
        data = text.encode()[: int(given[ERROR_ROOM] or 0) - 1] + b"\0"
        ctypes.memmove(given[ERROR_LOG], data, len(data))


@function("cuModuleLoadData", "pp")
def module_load(out: int, image: int) -> Result:
    result = module_load_ex(out, image, 0, None, None)
    if result == Result.INVALID_PTX:
        print(f"software GPU: {machine.faults[-1]}")
    return result


@function("cuModuleUnload", "p")
def module_unload(handle: int) -> None:
    refuse_in_capture()
    module = machine.find(handle, LoadedModule)
    for address in module.globals.values():
        machine.memory.free(address)
    del machine.objects[handle], machine.homes[handle]


@function("cuModuleGetFunction", "ppp")
def module_function(out: int, handle: int, name: int) -> Result:
    module, text = machine.find(handle, LoadedModule), ctypes.string_at(name).decode()
    if text not in module.module.kernels:
        return Result.NOT_FOUND
    put(out, ctypes.c_void_p, machine.handle(Function(module, text, machine.homes[handle])))
    return Result.SUCCESS


@function("cuModuleGetGlobal_v2", "pppp")
def module_global(address: int | None, size: int | None, handle: int, name: int) -> Result:
    module, text = machine.find(handle, LoadedModule), ctypes.string_at(name).decode()
    if text not in module.globals:
        return Result.NOT_FOUND
    if address:
        put(address, ctypes.c_uint64, module.globals[text])
    if size:
        put(size, ctypes.c_size_t, next(v.num_bytes for v in module.module.variables if v.name == text))
    return Result.SUCCESS


@function("cuFuncSetAttribute", "pii")
def function_set_attribute(handle: int, attribute: int, value: int) -> Result:
    chosen = machine.find(handle, Function)
    if attribute == MAX_DYNAMIC_SHARED and value + chosen.module.program(chosen.name).static_bytes > SHARED_LIMITS[machine.arch]:
        return Result.INVALID_VALUE
    chosen.attributes[attribute] = value
    return Result.SUCCESS


@function("cuFuncGetAttribute", "pip")
def function_attribute(out: int, attribute: int, handle: int) -> None:
    chosen = machine.find(handle, Function)
    program = chosen.module.program(chosen.name)
    known = {
        0: 1024,
        1: program.static_bytes,
        3: program.local_bytes,
        4: 32,
        MAX_DYNAMIC_SHARED: chosen.attributes.get(MAX_DYNAMIC_SHARED, DEFAULT_SHARED),
    }
    put(out, ctypes.c_int, known.get(attribute, 0))


@function("cuFuncSetCacheConfig", "pi")
def function_cache_config(handle: int, config: int) -> None:
    machine.find(handle, Function)


@function("cuFuncSetBlockShape", "piii")
def function_block_shape(handle: int, x: int, y: int, z: int) -> None:
    machine.find(handle, Function)


@function("cuOccupancyMaxActiveBlocksPerMultiprocessor", "ppiz")
def occupancy(out: int, handle: int, threads: int, dynamic_bytes: int) -> None:
    chosen = machine.find(handle, Function)
    shared = chosen.module.program(chosen.name).static_bytes + dynamic_bytes + 1024
    put(out, ctypes.c_int, max(0, min(2048 // max(threads, 1), (SHARED_LIMITS[machine.arch] + 1024) // shared, 32)))


# --- launches ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_bytes: int


def parameters_of(chosen: Function, pointers: int | None, extra: int | None) -> bytes:
    """Return the bytes of a launch's parameters. The caller passes one pointer per parameter, or in `extra` a buffer with all
    parameters."""
    kernel = chosen.module.module.kernels[chosen.name]
    if extra:
        words, given = (ctypes.c_void_p * 5).from_address(extra), {}
        for number in range(0, 4, 2):
            if words[number] is None:
                break
            given[words[number]] = words[number + 1]
        size = ctypes.c_size_t.from_address(given[2]).value if 2 in given else 0
        data = ctypes.string_at(given[1], size) if size else b""
        if len(data) < kernel.parameter_bytes:
            raise DriverError(Result.INVALID_VALUE)
        return data
    if not kernel.parameters:
        return b""
    if not pointers:
        raise DriverError(Result.INVALID_VALUE)
    data = bytearray(kernel.parameter_bytes)
    addresses = (ctypes.c_void_p * len(kernel.parameters)).from_address(pointers)
    for parameter, address in zip(kernel.parameters, addresses, strict=True):
        data[parameter.offset : parameter.offset + parameter.num_bytes] = ctypes.string_at(address, parameter.num_bytes)
    return bytes(data)


def check_launch(chosen: Function, config: LaunchConfig) -> None:
    kernel = chosen.module.module.kernels[chosen.name]
    threads = math.prod(config.block)
    shared = chosen.module.program(chosen.name).static_bytes + config.dynamic_bytes
    limit = max(DEFAULT_SHARED, chosen.attributes.get(MAX_DYNAMIC_SHARED, 0) + chosen.module.program(chosen.name).static_bytes)
    wrong = (
        min(*config.grid, *config.block) < 1
        or config.grid[0] >= 2**31
        or max(config.grid[1:]) > 65535
        or max(config.block[:2]) > 1024
        or config.block[2] > 64
        or threads > 1024
        or (kernel.max_threads is not None and threads > math.prod(kernel.max_threads))
        or (kernel.required_threads is not None and config.block[: len(kernel.required_threads)] != kernel.required_threads)
        or shared > limit
        or config.grid[0] % chosen.module.program(chosen.name).cluster
    )
    if wrong:
        raise DriverError(Result.INVALID_VALUE)


def enqueue(chosen: Function, config: LaunchConfig, parameters: bytes, stream: int | None, *, overlaps: bool = False) -> None:
    into = stream_of(stream)
    if into.context is not chosen.context:
        raise DriverError(Result.INVALID_HANDLE)
    check_launch(chosen, config)

    def run(work: Work) -> None:
        machine.launches += 1
        work.number = machine.launches
        given = parameters
        if machine.wild is not None and machine.wild.exists():
            machine.wild.unlink()
            given = WILD.to_bytes(8, "little") * (len(parameters) // 8)
        seed = machine.seed and machine.seed + machine.launches
        try:
            with machine.memory.without(machine.hidden_from(chosen.context)):
                launch(
                    chosen.module,
                    chosen.name,
                    config.grid,
                    config.block,
                    given,
                    dynamic_bytes=config.dynamic_bytes,
                    seed=seed,
                    arch=machine.arch,
                    uneven=machine.uneven,
                    number=work.number,
                    since=work.since,
                )
        except Fault as fault:
            raise Fault(f"launch {machine.launches}: {fault}") from fault

    submit(into, run, overlaps=overlaps)


@function("cuLaunchKernel", "puuuuuuuppp")
def launch_kernel(
    handle: int,
    gx: int,
    gy: int,
    gz: int,
    bx: int,
    by: int,
    bz: int,
    shared: int,
    stream: int | None,
    pointers: int | None,
    extra: int | None,
) -> None:
    chosen = machine.find(handle, Function)
    enqueue(chosen, LaunchConfig((gx, gy, gz), (bx, by, bz), shared), parameters_of(chosen, pointers, extra), stream)


class _Config(ctypes.Structure):
    """The layout of CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    """The layout of CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


@function("cuLaunchKernelEx", "pppp")
def launch_kernel_ex(config: int, handle: int, pointers: int | None, extra: int | None) -> None:
    chosen, c = machine.find(handle, Function), _Config.from_address(config)
    where = LaunchConfig((c.gx, c.gy, c.gz), (c.bx, c.by, c.bz), c.shared)
    given = (_Attribute * c.num_attributes).from_address(c.attributes) if c.num_attributes else ()
    if any(x.id != OVERLAPS for x in given) or (given and machine.arch < (9, 0)):
        raise DriverError(Result.NOT_SUPPORTED)
    overlaps = any(x.value for x in given)
    enqueue(chosen, where, parameters_of(chosen, pointers, extra), c.stream, overlaps=overlaps)
