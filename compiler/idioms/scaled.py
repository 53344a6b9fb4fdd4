"""Match quantised weights in a product: integers, or floats of 8 bits, times the scale of their group."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops.functions import Fn
from compiler.ir.loops.scalars import Apply, Cast, Const, Contraction, DimScalar, Element, Format, Load, Scalar, dtype_of, without_cast

F32 = DType.F32


@dataclass(frozen=True, slots=True)
class Scaled:
    bits: int
    number: Load | Element  # the stored number: a byte that holds one 8-bit weight or two 4-bit weights, or a packed element
    scale: Load
    group: int  # number of weights along k that share a scale

    def fits(self, format: Format) -> bool:
        """Return whether numbers that are not packed yet can be packed in this format."""
        return self.bits == format.bits and (dtype_of(self.number) is DType.E4M3) == (format.dtype is DType.E4M3)


def scaled_numbers(s: Contraction) -> Scaled | None:
    """Match a matrix product whose weights are symmetric integers or floats of 8 bits, with a scale for each group of weights in a column.
    Return None for any other product."""
    match s.columns:
        case Apply(fn=Fn.MUL, args=(number, scale)):
            pass
        case _:
            return None
    found, factor = stored_number(number), without_cast(scale)
    if found is None or not isinstance(factor, Load) or not s.extent.is_const or not all(d.is_const for d in factor.buffer.shape):
        return None
    bits, stored = found
    shape = factor.buffer.shape
    at = len(shape) - (2 if isinstance(stored, Element) else 1)  # the axis of groups; in packed scales the columns follow it
    num_groups, length, axis = shape[at].const, s.extent.const, s.axes[0][0]
    if length % num_groups or factor.indices[at] != (axis.dim // (length // num_groups) if num_groups > 1 else Dim.of(0)):
        return None
    return Scaled(bits, stored, factor, length // num_groups)


def stored_number(number: Scalar) -> tuple[int, Load | Element] | None:
    """Match a conversion of a stored number to f32. Return the number of its bits, and the load or element that reads it, or None for any
    other scalar."""
    match number:
        case Cast(value=Element(format=format) as element, dtype=DType.F32):
            return format.bits, element
        case Cast(value=Load(buffer=buffer) as load, dtype=DType.F32) if buffer.dtype in (DType.I8, DType.E4M3):
            return 8, load
        case Apply(fn=Fn.SUB, args=(Cast(value=half, dtype=DType.F32), Const(value=8.0))):
            load = _half_byte(half)
            return None if load is None else (4, load)
        case _:
            return None


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
