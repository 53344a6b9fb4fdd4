"""Matrices of 4-bit floats (e2m1), two per byte. Either each 16 inputs have a scale of 8 bits (e4m3) that is multiplied or divided by a
factor of the whole matrix (NVFP4), or each 32 inputs have a power of two as their scale (MXFP4 of compressed-tensors)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compiler.frontend.errors import ConfigError, DamagedFile
from compiler.frontend.fields import Fields
from compiler.frontend.quantized.fp8 import E4M3, Scaled
from compiler.frontend.quantized.held import NUMBERS, SCALE, Form
from compiler.frontend.quantized.method import ACTIVATION_PARTS, OTHER_FILE, Floats, Infos, Layout, Method, Parts, Read, expect
from compiler.frontend.quantized.mxfp4 import PAIRS, powers_of
from compiler.ir.dtypes import DType
from compiler.ir.numbers import Kind

NVFP4_GROUP, MXFP4_GROUP = 16, 32


@dataclass(frozen=True, slots=True)
class PackedFloats:
    """Matrices of 4-bit floats with their scales. Layouts differ in the names of the tensors, and in whether there is a factor."""

    packed: str  # name of the tensor with the floats
    # The name of the factor of the whole matrix; None: scales are powers of two, without a factor. If `divides`, the factor divides scales.
    factor: str | None
    divides: bool = False

    @property
    def layout(self) -> Layout:
        if self.factor is None:
            return Layout(self.packed, ("weight_scale",), unused=ACTIVATION_PARTS)
        return Layout(self.factor, (self.packed, "weight_scale"), unused=ACTIVATION_PARTS)

    @property
    def group(self) -> int:
        return MXFP4_GROUP if self.factor is None else NVFP4_GROUP

    def shape(self, infos: Infos, read: Read) -> tuple[int, ...]:
        packed, scale = infos[self.packed], infos["weight_scale"]
        if len(packed.shape) != 2 or packed.dtype != np.uint8:
            raise DamagedFile(f"its {self.packed} is {packed.dtype.name} {list(packed.shape)}, expected a matrix of uint8")
        outputs, inputs = packed.shape[0], packed.shape[1] * 2
        held = np.dtype(np.uint8) if self.factor is None else E4M3
        if scale.dtype != held or scale.shape != (outputs, inputs // self.group) or inputs % self.group:
            expected = f"{held.name} [{outputs}, {inputs}/{self.group}]"
            raise DamagedFile(f"its weight_scale is {scale.dtype.name} {list(scale.shape)}, expected {expected}")
        if self.factor is not None and infos[self.factor].shape != ():
            expect(infos, self.factor, (1,), "f")
        return outputs, inputs

    def values(self, parts: Parts) -> Floats:
        numbers = PAIRS.take(parts[self.packed]).view(np.float32)
        return numbers * np.repeat(self._halved_scales(parts), self.group, 1)

    def form(self, infos: Infos, read: Read) -> Form | None:
        return Form(4, self.group, DType.BF16 if self.factor is None else DType.F32, kind=Kind.E2M1)

    def held(self, parts: Parts) -> Parts:
        scales = self._halved_scales(parts)
        return {NUMBERS[Kind.E2M1]: parts[self.packed], SCALE: scales.astype(DType.BF16.numpy) if self.factor is None else scales}

    def _halved_scales(self, parts: Parts) -> Floats:
        """Return half of each scale, because programs multiply scales by the doubles of the floats."""
        if self.factor is None:
            return powers_of(parts["weight_scale"])
        scales, factor = parts["weight_scale"].astype(np.float32), parts[self.factor].astype(np.float32).reshape(())
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            found = scales / factor if self.divides else scales * factor
        if not np.isfinite(found).all():
            raise DamagedFile(f"its weight_scale and {self.factor} give scales that are no numbers")
        return found * np.float32(0.5)


NVFP4 = PackedFloats("weight_packed", "weight_global_scale", divides=True)  # as compressed-tensors stores it
MXFP4 = PackedFloats("weight_packed", None)
# The formats of NVIDIA's Model Optimizer, by the names that its files give them.
MODELOPT: dict[str, tuple[Method, ...]] = {
    "FP8": (Scaled("weight_scale"),),
    "NVFP4": (PackedFloats("weight", "weight_scale_2"),),
}


def read_modelopt(fields: Fields) -> tuple[Method, ...]:
    """Read the format of NVIDIA's Model Optimizer. Raise ConfigError for an unknown format. If formats are mixed, the stated format of each
    matrix is ignored, because the tensors show the format."""
    algorithm = fields.text("quant_algo")
    fields.skip("config_groups", "ignore", "exclude_modules", "producer", "kv_cache_scheme", "kv_cache_quant_algo", "quantized_layers")
    fields.skip("group_size", "activation_scheme", "quant_type")
    if algorithm == "MIXED_PRECISION":
        return tuple(method for methods in reversed(MODELOPT.values()) for method in methods)
    if algorithm not in MODELOPT:
        raise ConfigError(f"quant_algo of {fields.where} is {algorithm!r}, expected {', '.join(MODELOPT)} or MIXED_PRECISION. {OTHER_FILE}")
    return MODELOPT[algorithm]
