"""compressed-tensors: integers, packed or one per byte, 8-bit floats (fp8.py) or 4-bit floats (fp4.py), with scales per group, per block,
per row or per matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from compiler.frontend.errors import ConfigError, DamagedFile
from compiler.frontend.fields import Fields
from compiler.frontend.quantized.fp4 import MXFP4, NVFP4
from compiler.frontend.quantized.fp8 import Scaled, block_of
from compiler.frontend.quantized.held import Form, Offset, halves
from compiler.frontend.quantized.method import (
    ACTIVATION_PARTS,
    OTHER_FILE,
    Array,
    Floats,
    Infos,
    Layout,
    Method,
    Parts,
    Read,
    are_even,
    expect,
    is_even,
    order_of,
    per_group,
    scale_type,
    unpack,
)

FLOATS_OF_FOUR_BITS = {"nvfp4-pack-quantized": NVFP4, "mxfp4-pack-quantized": MXFP4}


@dataclass(frozen=True, slots=True)
class Packed:
    """Integers of 4 or 8 bits, packed along the input dimension. The stored number is the integer plus half the range of its type (8 or
    128), so no stored number is negative."""

    bits: int

    @property
    def layout(self) -> Layout:
        return Layout("weight_packed", ("weight_scale", "weight_shape"), ("weight_zero_point", "weight_g_idx"), unused=ACTIVATION_PARTS)

    def shape(self, infos: Infos, read: Read) -> tuple[int, ...]:
        words = infos["weight_packed"].shape
        if len(words) != 2:
            raise DamagedFile(f"its weight_packed is {list(words)}, expected two axes")
        outputs, inputs = words[0], words[1] * 32 // self.bits
        expect(infos, "weight_packed", words, "w")
        groups = _check_scale(infos, (outputs, inputs))
        if "weight_zero_point" in infos:
            expect(infos, "weight_zero_point", (-(-outputs * self.bits // 32), groups), "w")
        if "weight_g_idx" in infos:
            expect(infos, "weight_g_idx", (inputs,), "w")
        return outputs, inputs

    def values(self, parts: Parts) -> Floats:
        half = 1 << self.bits - 1
        numbers = unpack(parts["weight_packed"], self.bits, 1) - half
        stated = tuple(int(n) for n in parts["weight_shape"])
        if stated != numbers.shape:
            raise DamagedFile(f"its weight_shape is {list(stated)}, expected {list(numbers.shape)}")
        scales = parts["weight_scale"].astype(np.float32)
        zeros = np.zeros(scales.shape, np.int32)
        if "weight_zero_point" in parts:
            zeros = unpack(parts["weight_zero_point"], self.bits, 0)[: len(numbers)] - half
        if "weight_g_idx" in parts:
            groups = parts["weight_g_idx"].astype(np.int64)
            order_of(groups, scales.shape[1], "weight_g_idx")
            return scales[:, groups] * (numbers - zeros[:, groups]).astype(np.float32)
        length = numbers.shape[1]
        return per_group(scales, length) * (numbers - per_group(zeros, length)).astype(np.float32)

    def form(self, infos: Infos, read: Read) -> Form | None:
        form = _form(infos, self.bits, self.shape(infos, read)[1])
        if form is None or "weight_g_idx" not in infos:
            return form
        groups, count = read("weight_g_idx").astype(np.int64), infos["weight_scale"].shape[1]
        ordered = order_of(groups, count, "weight_g_idx") is not None
        return replace(form, ordered=ordered) if are_even(groups, count) else None

    def held(self, parts: Parts) -> Parts:
        numbers, count = unpack(parts["weight_packed"], self.bits, 1), parts["weight_scale"].shape[1]
        # programs read integers of 4 bits as they are stored, 0 to 15, and integers of 8 bits as signed bytes
        subtracted = 0 if self.bits == 4 else 128
        found: dict[str, Array] = {"scale": parts["weight_scale"]}
        if "weight_g_idx" in parts and (order := order_of(parts["weight_g_idx"].astype(np.int64), count, "weight_g_idx")) is not None:
            numbers, found["order"] = numbers[:, order], order
        found["q"] = halves(numbers) if self.bits == 4 else (numbers - subtracted).astype(np.int8)
        if "weight_zero_point" not in parts:
            return found
        return {**found, "zero": unpack(parts["weight_zero_point"], self.bits, 0)[: len(numbers)] - subtracted}


@dataclass(frozen=True, slots=True)
class Bytes:
    """Integers of 8 bits, one per byte."""

    @property
    def layout(self) -> Layout:
        return Layout("weight_scale", ("weight",), ("weight_zero_point",), unused=ACTIVATION_PARTS)

    def shape(self, infos: Infos, read: Read) -> tuple[int, ...]:
        shape = infos["weight"].shape
        if len(shape) != 2 or infos["weight"].dtype != np.int8:
            raise DamagedFile(f"its weight is {infos['weight'].dtype.name} {list(shape)}, expected a matrix of int8")
        groups = _check_scale(infos, (shape[0], shape[1]))
        if "weight_zero_point" in infos:
            expect(infos, "weight_zero_point", (shape[0], groups), "i")
        return shape

    def values(self, parts: Parts) -> Floats:
        numbers, scales = parts["weight"].astype(np.int32), parts["weight_scale"].astype(np.float32)
        length = numbers.shape[1]
        if "weight_zero_point" in parts:
            numbers = numbers - per_group(parts["weight_zero_point"].astype(np.int32), length)
        return per_group(scales, length) * numbers.astype(np.float32)

    def form(self, infos: Infos, read: Read) -> Form | None:
        return _form(infos, 8, infos["weight"].shape[1])

    def held(self, parts: Parts) -> Parts:
        found = {"q": parts["weight"], "scale": parts["weight_scale"]}
        return {**found, "zero": parts["weight_zero_point"]} if "weight_zero_point" in parts else found


def _form(infos: Infos, bits: int, length: int) -> Form | None:
    """Return the form of a matrix whose groups are consecutive inputs, or None if products of integers do not support these groups."""
    groups = infos["weight_scale"].shape[1]
    if not is_even(length, groups):
        return None
    return Form(bits, length // groups, scale_type(infos, "weight_scale"), Offset.ZERO if "weight_zero_point" in infos else Offset.NONE)


def _check_scale(infos: Infos, shape: tuple[int, int]) -> int:
    """Return the number of groups. Raise DamagedFile if the scales do not fit the matrix."""
    found = infos["weight_scale"].shape
    groups = found[1] if len(found) == 2 else 0
    if groups < 1 or shape[1] % groups:
        raise DamagedFile(f"its weight_scale is {list(found)}, expected [{shape[0]}, groups] with groups that divide {shape[1]} inputs")
    expect(infos, "weight_scale", (shape[0], groups), "f")
    return groups


def read_compressed(fields: Fields) -> tuple[Method, ...]:
    """Read the schemes of the quantised matrices. Schemes for activations, and for cached keys and values, are ignored, since relaxserve
    chooses the types of these values itself. Raise ConfigError for sparse or transformed matrices, and for schemes that are unknown or
    cannot be told apart by their tensors."""
    fields.skip("ignore", "version", "global_compression_ratio", "quantization_status", "sparsity_config", "transform_config")
    fields.skip("kv_cache_scheme", "provider")  # provider: the program that wrote the file
    for name, inner in (("sparsity_config", "format"), ("transform_config", "config_groups")):
        if isinstance(found := fields.raw(name), Mapping) and found.get(inner) not in (None, "dense", {}):
            raise fields.error(name, "no value")
    kind, groups = fields.text("format"), fields.raw("config_groups")
    if kind == "dense" and groups == {}:
        return (Scaled("weight_scale"),)  # no matrix is quantised; the file has only scales of cached keys and values
    if not isinstance(groups, Mapping) or not groups:
        raise fields.error("config_groups", "an object of schemes")
    schemes = [Fields(group, f"{name} of config_groups") for name, group in groups.items()]
    found = [_read_scheme(scheme, scheme.text("format", kind)) for scheme in schemes if "weights" in scheme]
    # A matrix has the first method that fits its tensors. NVFP4 also has tensors `weight_packed` and `weight_scale`, so `Packed` is last.
    methods = sorted(dict.fromkeys(found), key=lambda method: isinstance(method, Packed))
    if sum(isinstance(method, Packed) or method == MXFP4 for method in methods) > 1:
        raise fields.error("config_groups", f"the same number of bits in all pack-quantized schemes. {OTHER_FILE}")
    return tuple(methods)


def _read_scheme(scheme: Fields, kind: str) -> Method:
    """Return the method of a scheme that has the format `kind`. Raise ConfigError if the scheme is not supported."""
    weights = scheme.fields("weights")
    bits, number = weights.integer("num_bits"), weights.text("type")
    if number == "float" and bits == 4 and kind in FLOATS_OF_FOUR_BITS:
        return FLOATS_OF_FOUR_BITS[kind]
    if kind == "pack-quantized" and number == "int" and bits in (4, 8):
        _require_strategy(weights, "group", "channel")
        return Packed(bits)
    if kind in ("int-quantized", "naive-quantized") and number == "int" and bits == 8:
        _require_strategy(weights, "group", "channel")
        return Bytes()
    if kind in ("float-quantized", "naive-quantized") and number == "float" and bits == 8:
        _require_strategy(weights, "tensor", "channel", "block")
        return Scaled("weight_scale", block_of(weights, "block_structure"))
    known = f"pack-quantized (int4, int8), int-quantized (int8), float-quantized (fp8), {' or '.join(FLOATS_OF_FOUR_BITS)}"
    raise ConfigError(f"{scheme.where} has the format {kind!r} of {number}{bits}, expected {known}. {OTHER_FILE}")


def _require_strategy(weights: Fields, *known: str) -> None:
    """Raise ConfigError unless the strategy, which states the part of a matrix that has a scale, is one of `known`."""
    if weights.raw("strategy", known[0]) not in known:
        raise weights.error("strategy", f"{' or '.join(known)}. {OTHER_FILE}")
