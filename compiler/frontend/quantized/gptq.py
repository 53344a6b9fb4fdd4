"""GPTQ: integers packed along the inputs, a scale and a zero point for each group of inputs; `g_idx` tells the group of each input."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compiler.frontend.errors import DamagedFile
from compiler.frontend.fields import Fields
from compiler.frontend.quantized.held import Form, Offset, halves
from compiler.frontend.quantized.method import Floats, Infos, Layout, Method, Parts, expect, is_even, scale_type, unpack


@dataclass(frozen=True, slots=True)
class Gptq:
    bits: int
    zero_offset: int  # what files store less than the zero point
    is_ordered: bool  # groups are neighbours, whatever g_idx there is
    is_symmetric: bool  # zero points are all in the middle

    @property
    def layout(self) -> Layout:
        return Layout("qweight", ("qzeros", "scales"), optional=("g_idx",))

    def shape(self, infos: Infos) -> tuple[int, ...]:
        packed = infos["qweight"].shape
        if len(packed) != 2:
            raise DamagedFile(f"its qweight is {list(packed)}, expected two axes")
        inputs, outputs = packed[0] * 32 // self.bits, packed[1]
        groups = infos["scales"].shape[0] if infos["scales"].shape else 0
        if groups < 1 or inputs % groups:
            raise DamagedFile(f"its scales are {list(infos['scales'].shape)}, expected groups that divide {inputs} inputs")
        expect(infos, "qweight", packed, "w")
        expect(infos, "scales", (groups, outputs), "f")
        expect(infos, "qzeros", (groups, outputs * self.bits // 32), "w")
        if "g_idx" in infos:
            expect(infos, "g_idx", (inputs,), "w")
        return outputs, inputs

    def values(self, parts: Parts) -> Floats:
        numbers = unpack(parts["qweight"], self.bits, 0)
        zeros = unpack(parts["qzeros"], self.bits, 1) + self.zero_offset
        scales = parts["scales"].astype(np.float32)
        groups = np.arange(len(numbers)) // (len(numbers) // len(scales))
        if "g_idx" in parts:
            groups = parts["g_idx"].astype(np.int64)
            if groups.size and not 0 <= groups.min() <= groups.max() < len(scales):
                raise DamagedFile(f"its g_idx names groups {groups.min()} to {groups.max()}, expected 0 to {len(scales) - 1}")
        return np.ascontiguousarray((scales[groups] * (numbers - zeros[groups]).astype(np.float32)).T)

    def form(self, infos: Infos) -> Form | None:
        length, groups = self.shape(infos)[1], infos["scales"].shape[0]
        if self.bits == 2 or not self.is_ordered or not is_even(length, groups):
            return None
        return Form(self.bits, length // groups, scale_type(infos, "scales"), Offset.NONE if self.is_symmetric else Offset.ZERO)

    def held(self, parts: Parts) -> Parts:
        numbers = unpack(parts["qweight"], self.bits, 0).T
        zeros = unpack(parts["qzeros"], self.bits, 1).T + self.zero_offset
        size = numbers.shape[1] // zeros.shape[1]
        if "g_idx" in parts and not np.array_equal(parts["g_idx"], np.arange(numbers.shape[1]) // size):
            raise DamagedFile("its g_idx parts neighbours, though desc_act is false; take --quantize bf16")
        half = 1 << self.bits - 1
        if self.is_symmetric and (zeros != half).any():
            raise DamagedFile(f"its zero points are not all {half}, though sym is true; take --quantize bf16")
        offset = 0 if self.bits == 4 else half
        found = {"q": halves(numbers) if self.bits == 4 else (numbers - half).astype(np.int8), "scale": parts["scales"].T}
        return found if self.is_symmetric else {**found, "zero": zeros - offset}


def read_gptq(fields: Fields) -> Method:
    bits = fields.integer("bits")
    if bits not in (2, 4, 8):
        raise fields.error("bits", "2, 4 or 8")
    kind = fields.text("checkpoint_format", "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise fields.error("checkpoint_format", "gptq or gptq_v2")
    if fields.raw("dynamic"):
        raise fields.error("dynamic", "nothing: all matrices of one form")
    fields.skip(*(name for name in fields.values if name not in ("quant_method", "bits", "checkpoint_format", "dynamic")))
    return Gptq(bits, 1 if kind == "gptq" else 0, not fields.flag("desc_act", True), fields.flag("sym", False))
