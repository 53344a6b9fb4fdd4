"""The builtins that instructions call as "vm.NAME". When a program is loaded, the function of a builtin checks the operands of a call, and
returns the closure that performs the call.

vm.match(value, label, spec, symbol)      check the value, fill the slots that the specification defines, call the shape function `symbol`
                                          if there is one
vm.make_shape(*dims)                      a shape; a register among the dims that holds a shape stands for all its dims
vm.make_scalar(word, dtype)               a number; the word of a float is the bits of its f64
vm.shape_of(array)                        the shape of the array
vm.tensor_to_shape(array)                 the shape whose dimensions are the elements of the array
vm.alloc_arena(offset, dtype, *dims)      an array at this offset of the arena
vm.alloc(dtype, *dims)                    an array in newly allocated memory
vm.reshape(array, *dims)                  an array of this shape in the memory of `array`
vm.tuple(*values)                         a tuple of the values
vm.tuple_get(tuple, index)                one field of the tuple
vm.run_region(number)                     run a captured region, see regions.py
vm.read_bool(value)                       the truth value of a scalar or of an array of rank 0
vm.copy(value)                            the same value in another register
vm.invoke(function, *args)                call the function whose name is the value of `function`
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from runtime.errors import ArgumentMismatch
from runtime.executable import (
    DTYPES,
    AnySpec,
    Arg,
    Imm,
    Reg,
    ScalarSpec,
    ShapeSpec,
    Slot,
    TensorSpec,
    TupleSpec,
)
from runtime.vm.machine import Builtin, Frame, Loader, Read, Step, on_host
from runtime.vm.matching import Item, word_scalar
from runtime.vm.regions import region_step

Args = tuple[Arg, ...]

_SPECS = (TensorSpec, ShapeSpec, ScalarSpec, TupleSpec, AnySpec)


def _match(loader: Loader, args: Args, dst: int | None) -> Step:
    value, label, spec, symbol = _exactly(loader, args, 4)
    if not isinstance(value, Reg):
        raise loader.invalid(f"vm.match takes a register, got {value}")
    register = loader.register(value.index)
    item = Item(register, loader.literal(label, str), loader.literal(spec, _SPECS))
    match = loader.match([item], loader.literal(symbol, (str, type(None))), item.label)

    def step(frame: Frame) -> None:
        match(frame.registers, frame.heap, frame.heap_handle)
        if dst is not None:
            frame.registers[dst] = frame.registers[register]

    return step


def _make_shape(loader: Loader, args: Args, dst: int | None) -> Step:
    return _to(dst, _dims(loader, args))


def _make_scalar(loader: Loader, args: Args, dst: int | None) -> Step:
    word, name = _exactly(loader, args, 2)
    read = loader.read(word)
    dtype = _dtype(loader, name)
    if isinstance(word, Slot):
        return _to(dst, lambda frame: word_scalar(read(frame), dtype))
    return _to(dst, read)


def _shape_of(loader: Loader, args: Args, dst: int | None) -> Step:
    (array,) = _exactly(loader, args, 1)
    read = loader.read(array)
    return _to(dst, lambda frame: read(frame).shape)


def _tensor_to_shape(loader: Loader, args: Args, dst: int | None) -> Step:
    (array,) = _exactly(loader, args, 1)
    read = loader.read(array)
    download = loader.machine.device.download
    return _to(dst, lambda frame: tuple(map(int, download(read(frame)))))


def _alloc_arena(loader: Loader, args: Args, dst: int | None) -> Step:
    offset, name, *dims = args
    read_offset = loader.read(offset)
    dtype = _dtype(loader, name)
    shape = _dims(loader, dims)

    item_bytes, tensor = dtype.itemsize, loader.machine.device.tensor

    def read(frame: Frame) -> Any:
        dims, at, arena = shape(frame), read_offset(frame), frame.arena
        if at < 0 or at + prod(dims) * item_bytes > arena.num_bytes:
            raise loader.invalid(f"an array of shape {dims} at offset {at} lies outside the arena of {arena.num_bytes} bytes")
        return tensor(arena, at, dims, dtype)

    return _to(dst, read)


def _alloc(loader: Loader, args: Args, dst: int | None) -> Step:
    name, *dims = args
    dtype = _dtype(loader, name)
    shape = _dims(loader, dims)
    account, empty = loader.machine.account, loader.machine.device.empty

    def read(frame: Frame) -> Any:
        dims = shape(frame)
        if min(dims, default=0) < 0:
            raise loader.invalid(f"an array cannot have the shape {dims}; expected extents of at least 0")
        account.check("result", prod(dims) * dtype.itemsize)
        return empty(dims, dtype)

    return _to(dst, read)


def _reshape(loader: Loader, args: Args, dst: int | None) -> Step:
    array, *dims = args
    read = loader.read(array)
    shape = _dims(loader, dims)

    def reshaped(frame: Frame) -> Any:
        value, dims = read(frame), shape(frame)
        if prod(dims) != value.size or min(dims, default=0) < 0:
            raise ArgumentMismatch(f"{loader.source.name}: an array of shape {value.shape} cannot be reshaped to {dims}")
        try:
            return value.reshape(dims)
        except ValueError:  # an extent is 0, and the product of the others does not fit 64 bits
            raise ArgumentMismatch(f"{loader.source.name}: an array of shape {value.shape} cannot be reshaped to {dims}") from None

    return _to(dst, reshaped)


def _tuple(loader: Loader, args: Args, dst: int | None) -> Step:
    reads = [loader.read(a) for a in args]
    return _to(dst, lambda frame: tuple(read(frame) for read in reads))


def _tuple_get(loader: Loader, args: Args, dst: int | None) -> Step:
    value, number = _exactly(loader, args, 2)
    read = loader.read(value)
    index = loader.literal(number, int)
    return _to(dst, lambda frame: read(frame)[index])


def _run_region(loader: Loader, args: Args, dst: int | None) -> Step:
    (number,) = _exactly(loader, args, 1)
    regions = loader.machine.executable.meta.regions
    index = loader.literal(number, int)
    if not 0 <= index < len(regions):
        raise loader.invalid(f"region {index} does not exist, there are {len(regions)} regions")
    return region_step(loader, regions[index])


def _read_bool(loader: Loader, args: Args, dst: int | None) -> Step:
    (value,) = _exactly(loader, args, 1)
    read = loader.read(value)
    device = loader.machine.device
    return _to(dst, lambda frame: bool(on_host(device, read(frame))))


def _copy(loader: Loader, args: Args, dst: int | None) -> Step:
    (value,) = _exactly(loader, args, 1)
    return _to(dst, loader.read(value))


def _invoke(loader: Loader, args: Args, dst: int | None) -> Step:
    name, *rest = [loader.read(a) for a in args]
    machine = loader.machine
    return _to(dst, lambda frame: machine.function(name(frame)).call_with_weights([read(frame) for read in rest]))


BUILTINS: dict[str, Builtin] = {
    "match": _match,
    "make_shape": _make_shape,
    "make_scalar": _make_scalar,
    "shape_of": _shape_of,
    "tensor_to_shape": _tensor_to_shape,
    "alloc_arena": _alloc_arena,
    "alloc": _alloc,
    "reshape": _reshape,
    "tuple": _tuple,
    "tuple_get": _tuple_get,
    "run_region": _run_region,
    "read_bool": _read_bool,
    "copy": _copy,
    "invoke": _invoke,
}


# --- operands ----------------------------------------------------------------------------------------------------------


def _to(dst: int | None, read: Read) -> Step:
    """Return a step that stores what `read` returns in register `dst`, or drops it if `dst` is None."""

    def step(frame: Frame) -> None:
        value = read(frame)
        if dst is not None:
            frame.registers[dst] = value

    return step


def _exactly(loader: Loader, args: Args, count: int) -> Args:
    """Return the operands. Raise InvalidProgram unless their number is `count`."""
    if len(args) != count:
        raise loader.invalid(f"a builtin that takes {count} operands was given {len(args)}")
    return args


def _dtype(loader: Loader, arg: Arg) -> np.dtype[Any]:
    """Return the element type whose name is a literal. Raise InvalidProgram for an unknown name."""
    name = loader.literal(arg, str)
    if name not in DTYPES:
        raise loader.invalid(f"unknown element type {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def _dims(loader: Loader, args: Args | list[Arg]) -> Callable[[Frame], tuple[int, ...]]:
    """Return a function that computes a list of dimensions. The operands are integers, slots, and registers that hold an integer or a whole
    shape."""
    refs = [a.value if isinstance(a, Imm) else a for a in args]
    numbers = [ref for ref in refs if isinstance(ref, (int, Slot))]
    if len(numbers) == len(refs):
        places = [loader.slot(ref) for ref in numbers]

        def dims_of(frame: Frame) -> tuple[int, ...]:
            heap = frame.heap
            return tuple([heap[place] for place in places])

        return dims_of
    reads = [loader.read(a) for a in args]

    def shape(frame: Frame) -> tuple[int, ...]:
        dims: list[int] = []
        for read in reads:
            value = read(frame)
            dims += value if isinstance(value, tuple) else (int(value),)
        return tuple(dims)

    return shape
