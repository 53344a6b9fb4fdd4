"""bitsandbytes: matrices of 4-bit codes (NF4, FP4) that stand for floats, with a scale per group of consecutive values (usually 64). A
tensor of JSON text beside the codes states the shape of the matrix. Scales may be codes of 8 bits themselves ("double quantisation"): a
scale is then a float of a table, times a scale of a second level per group of codes (usually 256), plus an offset. The library bitsandbytes
rounds the product of a float and its scale to the type in which the model computes; relaxserve keeps this product in f32. In a `Form`, the
floats of NF4 are rounded by at most 3.9e-5 of a scale.

"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod

import numpy as np

from compiler.frontend.errors import ConfigError, DamagedFile
from compiler.frontend.fields import Fields
from compiler.frontend.quantized.held import NUMBERS, SCALE, Form
from compiler.frontend.quantized.method import Array, Floats, Infos, Layout, Method, Parts, Read, expect, is_even
from compiler.ir.dtypes import DType
from compiler.ir.numbers import FLOATS_OF_CODES, SPLIT, SPLIT_STEP, Kind

MOST_STATE_BYTES = 4096  # largest size of the JSON beside a matrix, which has a dozen short fields
MOST_OFFSET = 1e30  # largest magnitude of the offset of scales
WEIGHT, ABSMAX, MAP = "weight", "weight.absmax", "weight.quant_map"
NESTED, NESTED_MAP = "weight.nested_absmax", "weight.nested_quant_map"


@dataclass(frozen=True, slots=True)
class _State:
    """The fields of the JSON beside a matrix."""

    shape: tuple[int, int]
    block: int  # number of values that share a scale
    nested_block: int  # number of scales that share a scale of the second level; 0: scales are floats
    offset: float


@dataclass(frozen=True, slots=True)
class Codes:
    """Matrices of codes of this kind, NF4 or FP4."""

    kind: Kind

    @property
    def layout(self) -> Layout:
        return Layout(self._state_part, (WEIGHT, ABSMAX, MAP), (NESTED, NESTED_MAP))

    def shape(self, infos: Infos, read: Read) -> tuple[int, ...]:
        state, weight = self._state(read(self._state_part)), infos[WEIGHT]
        count, groups = prod(state.shape), -(-prod(state.shape) // state.block)
        if weight.num_bytes * 2 != count:
            raise DamagedFile(f"its weight has {weight.num_bytes} bytes, expected {count // 2} for {list(state.shape)} codes of 4 bits")
        if (NESTED in infos) != bool(state.nested_block):
            raise DamagedFile(f"its scales are {'nested' if NESTED in infos else 'not nested'}, expected what its quant_state says")
        expect(infos, ABSMAX, (groups,), "u" if state.nested_block else "f")
        if state.nested_block and infos[ABSMAX].num_bytes != groups:
            raise DamagedFile(f"its {ABSMAX} has {infos[ABSMAX].num_bytes} bytes, expected {groups}: one for each group")
        expect(infos, MAP, (16,), "f")
        if state.nested_block:
            expect(infos, NESTED, (-(-groups // state.nested_block),), "f")
            expect(infos, NESTED_MAP, (256,), "f")
        return state.shape

    def values(self, parts: Parts) -> Floats:
        state, codes = self._state(parts[self._state_part]), self._codes(parts)
        numbers = FLOATS_OF_CODES[self.kind][np.stack([codes & 15, codes >> 4], -1).reshape(-1)]
        return (numbers * np.repeat(self._scales(parts, state), state.block)[: numbers.size]).reshape(state.shape)

    def form(self, infos: Infos, read: Read) -> Form | None:
        """Return None, so that programs read floats, if a group spans two rows, or if the length of groups is no multiple of 8."""
        state = self._state(read(self._state_part))
        length = state.shape[1]
        if length % state.block or not is_even(length, length // state.block):
            return None
        return Form(4, state.block, DType.F32, kind=self.kind)

    def held(self, parts: Parts) -> Parts:
        """Return the codes, and the scales. A code stands for the sum of two integers, in steps (`Split` in compiler/ir/numbers.py); the
        returned scales multiply the first integer, whose unit is `SPLIT_STEP` steps."""
        state, rows = self._state(parts[self._state_part]), self._state(parts[self._state_part]).shape[0]
        scales = self._scales(parts, state) * np.float32(SPLIT_STEP / SPLIT[self.kind].steps)
        return {NUMBERS[self.kind]: self._codes(parts).reshape(rows, -1), SCALE: scales.reshape(rows, -1)}

    @property
    def _state_part(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    def _state(self, stored: Array) -> _State:
        """Read the bytes of the JSON beside a matrix. Raise DamagedFile if there are too many bytes, or if they are malformed."""
        where = "its quant_state"
        try:
            found = json.loads(stored.tobytes()) if stored.nbytes <= MOST_STATE_BYTES else None
        except (ValueError, RecursionError):
            raise DamagedFile(f"{where} is {stored.tobytes()[:40]!r}, expected JSON") from None
        try:
            fields = Fields(found, where)
            shape, block = fields.raw("shape"), fields.integer("blocksize", maximum=1 << 16)
            if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in shape):
                raise fields.error("shape", "two positive integers")
            nested_block = fields.integer("nested_blocksize", 0, maximum=1 << 16)
            offset = fields.raw("nested_offset", 0.0)
            if type(offset) not in (int, float) or not abs(offset) < MOST_OFFSET:
                raise fields.error("nested_offset", "a number")
        except ConfigError as error:
            raise DamagedFile(str(error)) from None
        return _State((shape[0], shape[1]), block, nested_block, float(offset))

    def _codes(self, parts: Parts) -> Array:
        """Return the codes, two per byte. A code with an even index is in the lower four bits; in files, it is in the upper four bits."""
        stored = np.ascontiguousarray(parts[WEIGHT]).reshape(-1).view(np.uint8)
        return stored >> np.uint8(4) | stored << np.uint8(4)

    def _scales(self, parts: Parts, state: _State) -> Floats:
        """Return the scale of each group as a float. Raise DamagedFile if the codes stand for other floats than those of their kind."""
        if not np.array_equal(parts[MAP].astype(np.float32), FLOATS_OF_CODES[self.kind]):
            raise DamagedFile(f"its {MAP} is {parts[MAP].tolist()!r:.80}, expected the floats of {self.kind}")
        if not state.nested_block:
            return parts[ABSMAX].astype(np.float32)
        codes, nested = parts[ABSMAX], parts[NESTED].astype(np.float32)
        own = np.repeat(nested, state.nested_block)[: codes.size]
        return parts[NESTED_MAP].astype(np.float32)[codes] * own + np.float32(state.offset)


def read_bitsandbytes(fields: Fields) -> tuple[Method, ...]:
    """Return the method for the kind of codes that the fields state. Raise ConfigError for codes of 8 bits and unknown kinds. Skip the
    fields that say in which type the library computes, since `--quantize` decides this."""
    if fields.flag("load_in_8bit", fields.flag("_load_in_8bit", False)):
        raise fields.error("load_in_8bit", "false: of bitsandbytes, codes of 4 bits (NF4, FP4) are read")
    kind = fields.text("bnb_4bit_quant_type", "fp4").lower()
    if kind not in FLOATS_OF_CODES:
        raise fields.error("bnb_4bit_quant_type", " or ".join(FLOATS_OF_CODES))
    fields.skip(*(name for name in fields.values if name.startswith(("bnb_4bit_", "llm_int8_", "load_in_", "_load_in_"))))
    return (Codes(Kind(kind)),)
