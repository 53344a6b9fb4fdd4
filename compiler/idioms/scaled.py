"""Match quantised weights in a product: integers, or floats of 8 or 4 bits, times the scale of their group."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops.functions import Fn
from compiler.ir.loops.scalars import Apply, Cast, Const, Contraction, DimScalar, Element, Format, Load, Scalar, ScalarParam, without_cast
from compiler.ir.numbers import Kind
from compiler.machine.formats import IntegerFragments, TablePanels, looked_up

F32 = DType.F32
_BITS = ScalarParam("bits", DType.I32)  # stands for a half byte in a pattern


@dataclass(frozen=True, slots=True)
class Scaled:
    """The columns of a product that are stored numbers times scales."""

    bits: int
    kind: Kind
    number: Load | Element  # the stored number: a byte that holds one 8-bit weight or two 4-bit weights, or a packed element
    scale: Load
    group: int  # number of weights along k that share a scale

    def fits(self, format: Format) -> bool:
        """Return whether numbers that are not packed yet can be packed in this format."""
        return self.bits == format.bits and self.kind is _kind_of(format)


def scaled_numbers(s: Contraction) -> Scaled | None:
    """Match a matrix product whose weights are symmetric integers or floats, with a scale for each group of weights in a column. Return
    None for any other product."""
    match s.columns:
        case Apply(fn=Fn.MUL, args=(number, scale)):
            pass
        case _:
            return None
    found, factor = stored_number(number), without_cast(scale)
    if found is None or not isinstance(factor, Load) or not s.extent.is_const or not all(d.is_const for d in factor.buffer.shape):
        return None
    stored = found.place
    shape = factor.buffer.shape
    at = len(shape) - (2 if isinstance(stored, Element) else 1)  # the axis of groups; in packed scales the columns follow it
    num_groups, length, axis = shape[at].const, s.extent.const, s.axes[0][0]
    if length % num_groups or factor.indices[at] != (axis.dim // (length // num_groups) if num_groups > 1 else Dim.of(0)):
        return None
    return Scaled(found.bits, found.kind, stored, factor, length // num_groups)


@dataclass(frozen=True, slots=True)
class Stored:
    """A number of a quantised weight, as it is stored in memory."""

    bits: int
    kind: Kind
    place: Load | Element  # the load or the element that reads the number


def stored_number(number: Scalar) -> Stored | None:
    """Match a conversion of a stored number to f32. Return None for any other scalar."""
    match number:
        case Cast(value=Element(format=format) as element, dtype=DType.F32):
            return Stored(format.bits, _kind_of(format), element)
        case Cast(value=Load(buffer=buffer) as load, dtype=DType.F32) if buffer.dtype in (DType.I8, DType.E4M3):
            return Stored(8, Kind.E4M3 if buffer.dtype is DType.E4M3 else Kind.INT, load)
        case Apply(fn=Fn.SUB, args=(Cast(value=half, dtype=DType.F32), Const(value=8.0))):
            load = _half_byte(half)
            return None if load is None else Stored(4, Kind.INT, load)
        case Cast(value=Apply() as looked, dtype=DType.F32):
            load = _looked_up(looked, Kind.E2M1)
            return None if load is None else Stored(4, Kind.E2M1, load)
        case _:
            return None


def _kind_of(format: Format) -> Kind:
    if isinstance(format, IntegerFragments | TablePanels):
        return format.kind
    return Kind.E4M3 if format.dtype is DType.E4M3 else Kind.INT


def _looked_up(number: Scalar, kind: Kind) -> Load | None:
    """Match the number for which a half byte stands in the table of `kind`, and return the load of the byte. Return None for any other
    scalar."""
    loads = list[Load]()

    def matches(found: Scalar, pattern: Scalar) -> bool:
        if pattern is _BITS:
            if (load := _half_byte(found)) is not None:
                loads.append(load)
            return load is not None and load.indices == loads[0].indices and load.buffer is loads[0].buffer
        match found, pattern:
            case Apply(fn=fn, args=args), Apply():
                return fn is pattern.fn and all(map(matches, args, pattern.args))
            case Const(value=value), Const():
                return value == pattern.value
            case _:
                return False

    return loads[0] if matches(number, looked_up(_BITS, kind)) else None


def _half_byte(scalar: Scalar) -> Load | None:
    """Match a nibble of the byte at k // 2, selected by k % 2. Return the load of the byte, or None for any other scalar."""
    match scalar:
        case Apply(fn=Fn.AND, args=(Apply(fn=Fn.SHR, args=(Cast(value=Load() as load), Cast(value=DimScalar(dim=by)))), Const() as mask)):
            pass
        case _:
            return None
    variables = load.indices[-1].vars()
    if load.buffer.dtype is not DType.U8 or len(variables) != 1 or mask.value != 15:
        return None
    k = variables[0].dim
    return load if load.indices[-1] == k // 2 and by == k % 2 * 4 else None
