"""Match values against specifications. An error names the place where a value differs.

A match has three passes. The first checks the structure of values and fills the slots that specifications define. The second checks the
bounds of those slots and calls the native function that derives further slots. The last compares values with the slots that specifications
only mention.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import numpy as np

from runtime.device.base import Derive, Device, HeapHandle
from runtime.errors import ArgumentMismatch, BoundExceeded, InvalidProgram
from runtime.executable import DTYPES, AnySpec, Bound, DimRef, ScalarSpec, ShapeSpec, Slot, Spec, TensorSpec, TupleSpec

Heap = memoryview  # its elements are int64
Check = Callable[[Heap, Any], None]  # raises ArgumentMismatch if the value does not fit; may fill slots of the heap

INT64 = range(-(2**63), 2**63)
MOST_BITS = 4096  # maximum number of bits of an integer that a message shows


@dataclass(frozen=True, slots=True)
class Item:
    """A value to match: its register, its name in messages, and its specification."""

    register: int
    label: str
    spec: Spec


class Match:
    """Matches the values of some registers."""

    def __init__(
        self,
        function: str,
        slots: Sequence[str],
        bounds: Sequence[Bound],
        items: Sequence[Item],
        derive: Derive | None,
        device: Device,
        place: str = "",
    ) -> None:
        """`slots` are the expressions that the slots of the function hold, for messages. `derive` is the shape function of the match.
        `place` says in messages where in the function the match is; "" for the match at its entry."""
        self.defined = {slot for item in items for slot in _defined(item.spec)}
        self._place = f"{function}: {place}" if place else function
        self._slots = slots
        self._derive = derive
        compilers = [(_Compiler(f"{function}: {item.label}", slots, device), item) for item in items]
        self._binds = [(c.bind(item.spec, ""), item.register) for c, item in compilers]
        compares = [(c.compare(item.spec, ""), item.register) for c, item in compilers]
        self._compares = [(check, register) for check, register in compares if check is not None]
        # Bounds that are constants are checked before the derivation, since the derivation may divide by a value that the bounds exclude.
        own = [b for b in bounds if b.slot in self.defined]
        self._bounds = [(b.slot, b.lower, _plain_upper(b), b.multiple_of, b) for b in own]
        self._symbolic = [(b, b.upper.index) for b in own if isinstance(b.upper, Slot)]

    def __call__(self, registers: Sequence[Any], heap: Heap, handle: HeapHandle) -> None:
        """Run the three passes."""
        for bind, register in self._binds:
            bind(heap, registers[register])
        self.derive(heap, handle)
        for compare, register in self._compares:
            compare(heap, registers[register])

    def derive(self, heap: Heap, handle: HeapHandle) -> None:
        """Run the second pass: check the bounds of the slots that are filled, and derive all others. Raise BoundExceeded if a value is
        outside its bounds, or if another slot cannot be derived from the values."""
        for slot, lower, upper, multiple_of, bound in self._bounds:
            value = heap[slot]
            if not lower <= value <= upper or (multiple_of > 1 and value % multiple_of):
                self._out_of_bounds(bound, value, upper)
        if self._derive is not None and (status := self._derive(handle)):
            self._underivable(heap, status)
        for bound, slot in self._symbolic:
            if heap[bound.slot] > heap[slot]:
                self._out_of_bounds(bound, heap[bound.slot], heap[slot])

    def _underivable(self, heap: Heap, status: int) -> NoReturn:
        """Raise the error for the result `status` of a shape function: see runtime/executable.py."""
        size = self._slots[abs(status) - 1]
        problem = "does not fit 64 bits" if status > 0 else "divides by zero"
        given = ", ".join(f"{self._slots[slot]} = {heap[slot]}" for slot in sorted(self.defined))
        raise BoundExceeded(f"{self._place}: {size} {problem} where {given}; declare the ranges of these variables")

    def _out_of_bounds(self, bound: Bound, value: int, upper: int) -> NoReturn:
        """Raise the error for a value that violates a bound, whose upper end is `upper` in this call."""
        if bound.lower <= value <= upper:
            raise BoundExceeded(f"{self._place}: {bound.name} = {value} is not a multiple of {bound.multiple_of}, as declared")
        most = "" if bound.upper is None else f" <= {upper}"
        raise BoundExceeded(f"{self._place}: {bound.name} = {value} is outside its declared range {bound.lower} <= {bound.name}{most}")


def _plain_upper(bound: Bound) -> int:
    """Return the upper end of a bound, or a number above all 64-bit integers if the upper end is no constant."""
    return bound.upper if isinstance(bound.upper, int) else INT64.stop


def _dims(spec: Spec) -> Iterator[DimRef]:
    """Yield the dimensions of a specification, and the value of a scalar. Yield nothing where they are not specified."""
    match spec:
        case TensorSpec(shape=dims) | ShapeSpec(dims=dims):
            yield from dims or ()
        case ScalarSpec(value=value):
            yield from () if value is None else (value,)
        case TupleSpec(fields=fields):
            for spec_ in fields:
                yield from _dims(spec_)
        case AnySpec():
            return


def mentions_slots(spec: Spec) -> bool:
    """Return whether a dimension or a scalar of the specification is in a heap slot."""
    return any(isinstance(d, Slot) for d in _dims(spec))


def _defined(spec: Spec) -> list[int]:
    """Return the slots that a specification defines."""
    return [d.index for d in _dims(spec) if isinstance(d, Slot) and d.defines]


class _Compiler:
    """Compiles specifications into closures, so that calls do not interpret specifications."""

    def __init__(self, where: str, slots: Sequence[str], device: Device) -> None:
        self._where = where
        self._slots = slots
        self._device = device

    # --- first pass: structure, and slots that are defined --------------------------------------------------------

    def bind(self, spec: Spec, path: str) -> Check:
        """Compile the first pass. `path` names the part of the value in messages: "[0][2]", or "" for the whole."""
        match spec:
            case TensorSpec():
                return self._bind_tensor(spec, path)
            case ShapeSpec():
                return self._bind_shape(spec, path)
            case ScalarSpec():
                return self._bind_scalar(spec, path)
            case TupleSpec(fields=fields):
                return self._bind_tuple([self.bind(f, f"{path}[{i}]") for i, f in enumerate(fields)], path)
            case AnySpec():
                return lambda heap, value: None

    def _bind_tensor(self, spec: TensorSpec, path: str) -> Check:
        """Compile the first pass for an array: check its element type and that it is compact, and bind its dimensions."""
        dtype = None if spec.dtype is None else _dtype(spec.dtype)
        bind_dims = self._bind_dims(spec.shape, spec.ndim, path)
        expected = self._text(spec)
        tensor_type, is_compact = self._device.tensor_type, self._device.is_compact

        def bind(heap: Heap, value: Any) -> None:
            if not isinstance(value, tensor_type):
                self._fail(path, f"expected an array {expected}, got {_kind(value)}")
            if dtype is not None and value.dtype is not dtype and value.dtype != dtype:
                self._fail(path, f"expected element type {dtype} ({expected}), got {value.dtype}")
            if not is_compact(value):
                self._fail(path, "expected a compact row-major array; pass numpy.ascontiguousarray of it")
            bind_dims(heap, value.shape)

        return bind

    def _bind_shape(self, spec: ShapeSpec, path: str) -> Check:
        """Compile the first pass for a value that is itself a shape."""
        bind_dims = self._bind_dims(spec.dims, spec.ndim, path)

        def bind(heap: Heap, value: Any) -> None:
            if not isinstance(value, tuple):
                self._fail(path, f"expected a shape (a tuple of 64-bit integers), got {_kind(value)}")
            for i, d in enumerate(value):
                if not isinstance(d, int) or d not in INT64:
                    self._fail(path, f"expected a shape (a tuple of 64-bit integers), but entry {i} is {described(d)}")
            bind_dims(heap, value)

        return bind

    def _bind_dims(self, dims: tuple[DimRef, ...] | None, ndim: int | None, path: str) -> Check:
        """Compile the first pass for dimensions: check the rank and the constant dimensions, and write the dimensions that define a slot
        into the heap. `ndim` is the rank if `dims` is None; if it is None, too, any rank matches."""
        rank = ndim if dims is None else len(dims)
        fixed = [(i, d) for i, d in enumerate(dims or ()) if isinstance(d, int)]
        defines = [(i, self._slot(d)) for i, d in enumerate(dims or ()) if isinstance(d, Slot) and d.defines]

        def bind(heap: Heap, shape: tuple[int, ...]) -> None:
            if rank is not None and len(shape) != rank:
                self._fail(path, f"expected rank {rank}, got rank {len(shape)} (shape {shape})")
            for i, expected in fixed:
                if shape[i] != expected:
                    self._fail(path, f"dimension {i}: expected {expected}, got {shape[i]}")
            for i, slot in defines:
                heap[slot] = shape[i]

        return bind

    def _bind_scalar(self, spec: ScalarSpec, path: str) -> Check:
        """Compile the first pass for a number: check its type, compare it with a constant, or write it into the slot that it defines."""
        dtype = None if spec.dtype is None else _dtype(spec.dtype)
        ref = spec.value
        defines = self._slot(ref) if isinstance(ref, Slot) and ref.defines else None

        def bind(heap: Heap, value: Any) -> None:
            word = scalar_word(value, dtype)
            if word is None:
                self._fail(path, f"expected a scalar of type {spec.dtype or 'number'}, got {described(value)}")
            if isinstance(ref, int) and word != ref:
                self._fail(path, f"expected {ref}, got {value}")
            if defines is not None:
                heap[defines] = word

        return bind

    def _bind_tuple(self, binds: list[Check], path: str) -> Check:
        """Compile the first pass for a tuple. `binds` are the first passes of its fields."""

        def bind(heap: Heap, value: Any) -> None:
            if not isinstance(value, tuple) or len(value) != len(binds):
                self._fail(path, f"expected a tuple of {len(binds)} values, got {_kind(value)}")
            for bind_field, item in zip(binds, value, strict=True):
                bind_field(heap, item)

        return bind

    # --- last pass: slots that are only mentioned ------------------------------------------------------------------

    def compare(self, spec: Spec, path: str) -> Check | None:
        """Compile the last pass, or return None if there is nothing to compare. For `path` see `bind`."""
        match spec:
            case TensorSpec(shape=dims):
                compare_shape = self._compare_dims(dims, path)
                return compare_shape and (lambda heap, value: compare_shape(heap, value.shape))
            case ShapeSpec(dims=dims):
                return self._compare_dims(dims, path)
            case ScalarSpec(dtype=dtype, value=Slot(defines=False) as slot):
                return self._compare_scalar(slot, None if dtype is None else _dtype(dtype), path)
            case TupleSpec(fields=fields):
                checks = [(i, self.compare(f, f"{path}[{i}]")) for i, f in enumerate(fields)]
                return self._compare_fields([(i, check) for i, check in checks if check is not None])
            case _:
                return None

    def _compare_dims(self, dims: tuple[DimRef, ...] | None, path: str) -> Check | None:
        """Compile the last pass for dimensions: compare them with the slots that they mention. Return None if they mention no slot."""
        pairs = [(i, self._slot(d)) for i, d in enumerate(dims or ()) if isinstance(d, Slot) and not d.defines]

        def compare(heap: Heap, shape: tuple[int, ...]) -> None:
            for i, slot in pairs:
                if shape[i] != heap[slot]:
                    self._fail(path, f"dimension {i}: expected {readable(self._slots[slot], heap[slot])}, got {shape[i]}")

        return compare if pairs else None

    def _compare_scalar(self, ref: Slot, dtype: np.dtype[Any] | None, path: str) -> Check:
        """Compile the last pass for a number that must equal a slot."""
        slot = self._slot(ref)

        def compare(heap: Heap, value: Any) -> None:
            if scalar_word(value, dtype) != heap[slot]:
                self._fail(path, f"expected {readable(self._slots[slot], heap[slot])}, got {value}")

        return compare

    def _compare_fields(self, checks: list[tuple[int, Check]]) -> Check | None:
        """Compile the last pass for a tuple. `checks` are the last passes of its fields, each with the field's index. Return None if
        `checks` is empty."""

        def compare(heap: Heap, value: Any) -> None:
            for i, check in checks:
                check(heap, value[i])

        return compare if checks else None

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _slot(self, slot: Slot) -> int:
        if not 0 <= slot.index < len(self._slots):
            raise InvalidProgram(f"{self._where}: slot {slot.index} does not exist, the function has {len(self._slots)} slots")
        return slot.index

    def _fail(self, path: str, problem: str) -> NoReturn:
        raise ArgumentMismatch(f"{self._where}{path}: {problem}")

    def _text(self, spec: TensorSpec) -> str:
        if spec.shape is None:
            return f"{spec.dtype or 'of any type'}, rank {'any' if spec.ndim is None else spec.ndim}"
        dims = (str(d) if isinstance(d, int) else self._slots[self._slot(d)] for d in spec.shape)
        return f"{spec.dtype or ''}[{', '.join(dims)}]"


def scalar_word(value: Any, dtype: np.dtype[Any] | None) -> int | None:
    """Return the heap word of a number: an integer itself, a float as the bits of its f64. Return None if the value is no number of type
    `dtype`, or is out of the range of that type."""
    if not isinstance(value, (int, float)) and getattr(value, "ndim", None) == 0:  # NumPy scalars
        value = value.item()
    is_float = isinstance(value, float) if dtype is None else dtype.kind in "fV"
    if is_float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return None
        try:
            return struct.unpack("<q", struct.pack("<d", float(value)))[0]
        except OverflowError:
            return None  # an integer beyond the range of an f64
    if not isinstance(value, int) or (dtype is not None and isinstance(value, bool) != (dtype.kind == "b")):
        return None
    if dtype is not None and dtype.kind in "iu":
        return int(value) if value in _values_of(dtype) else None
    return int(value) if value in INT64 else None


@cache
def _values_of(dtype: np.dtype[Any]) -> range:
    """Return the values of an integer type."""
    limits = np.iinfo(dtype)
    return range(limits.min, limits.max + 1)


def word_scalar(word: int, dtype: np.dtype[Any]) -> int | float | bool:
    """Return the number whose heap word is `word`: the inverse of `scalar_word`."""
    if dtype.kind in "fV":
        return struct.unpack("<d", struct.pack("<q", word))[0]
    return bool(word) if dtype.kind == "b" else word


def readable(formula: str, value: int) -> str:
    """Return the formula and its value, or only the value if the formula is long and contains `min` or `max`. Such a formula comes from a
    check, and the message already says what the check requires."""
    return str(value) if len(formula) > 24 and ("min(" in formula or "max(" in formula) else f"{formula} = {value}"


def _dtype(name: str) -> np.dtype[Any]:
    dtype = DTYPES.get(name)
    if dtype is None:
        raise InvalidProgram(f"unknown element type {name!r}; known: {', '.join(DTYPES)}")
    return dtype


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def described(value: Any) -> str:
    """Return the kind of a value, and also the value itself if it is a number. Python prints no integer of many thousands of bits."""
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return f"{_kind(value)} of {value.bit_length()} bits"
    return f"{_kind(value)} {value!r}" if isinstance(value, (int, float, np.number, np.bool_)) else _kind(value)
