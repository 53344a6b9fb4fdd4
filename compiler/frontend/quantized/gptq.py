"""GPTQ: integers packed along the inputs, with a scale and a zero point for each group of inputs. `g_idx` has the group of each input.

The tensors of a matrix show its groups, and whether it needs zero points. The configuration's fields `desc_act` and `sym`, which may
contradict the tensors, are ignored. The field `group_size` is used only for matrices without `g_idx`, whose last group may be shorter than
other groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from compiler.frontend.errors import DamagedFile
from compiler.frontend.fields import Fields
from compiler.frontend.quantized.awq import Awq
from compiler.frontend.quantized.held import Form, Offset, halves
from compiler.frontend.quantized.method import (
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
    scale_type,
    unpack,
)

KNOWN_BITS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Gptq:
    """Matrices of integers with this number of bits."""

    bits: int
    zero_offset: int  # zero point minus the number stored for it
    sizes: tuple[int, ...] = ()  # numbers of inputs per group that the configuration states

    @property
    def layout(self) -> Layout:
        return Layout("qweight", ("qzeros", "scales"), optional=("g_idx",))

    def shape(self, infos: Infos, read: Read) -> tuple[int, ...]:
        packed = infos["qweight"].shape
        if len(packed) != 2:
            raise DamagedFile(f"its qweight is {list(packed)}, expected two axes")
        inputs, outputs = packed[0] * 32 // self.bits, packed[1]
        groups = infos["scales"].shape[0] if infos["scales"].shape else 0
        if groups < 1:
            raise DamagedFile(f"its scales are {list(infos['scales'].shape)}, expected a row for each group of inputs")
        if "g_idx" not in infos:
            self._group_size(inputs, groups)
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
        if "g_idx" in parts:
            groups = parts["g_idx"].astype(np.int64)
            order_of(groups, len(scales), "g_idx")
        else:
            groups = np.arange(len(numbers)) // self._group_size(len(numbers), len(scales))
        return np.ascontiguousarray((scales[groups] * (numbers - zeros[groups]).astype(np.float32)).T)

    def form(self, infos: Infos, read: Read) -> Form | None:
        length, groups = self.shape(infos, read)[1], infos["scales"].shape[0]
        if self.bits == 2 or not is_even(length, groups):
            return None
        ordered = False
        if "g_idx" in infos:
            index = read("g_idx").astype(np.int64)
            ordered = order_of(index, groups, "g_idx") is not None
            if not are_even(index, groups):
                return None
        elif self._group_size(length, groups) * groups != length:
            return None
        offset = Offset.NONE if self.is_symmetric(read("qzeros")) else Offset.ZERO
        return Form(self.bits, length // groups, scale_type(infos, "scales"), offset, ordered)

    def held(self, parts: Parts) -> Parts:
        numbers = unpack(parts["qweight"], self.bits, 0).T
        zeros = unpack(parts["qzeros"], self.bits, 1).T + self.zero_offset
        found: dict[str, Array] = {"scale": parts["scales"].T}
        if "g_idx" in parts and (order := order_of(parts["g_idx"].astype(np.int64), zeros.shape[1], "g_idx")) is not None:
            numbers, found["order"] = numbers[:, order], order
        half = 1 << self.bits - 1
        if not self.is_symmetric(parts["qzeros"]):
            found["zero"] = zeros - (0 if self.bits == 4 else half)
        return {**found, "q": halves(numbers) if self.bits == 4 else (numbers - half).astype(np.int8)}

    def _group_size(self, inputs: int, groups: int) -> int:
        """Return the number of inputs per group in a matrix without `g_idx`: the size in `sizes` that gives this number of groups, or else
        the size of equal groups. A size of at least `inputs` means a single group. Raise DamagedFile if no size fits, or if several do."""
        fitting = sorted({size for size in (min(size, inputs) for size in self.sizes) if -(-inputs // size) == groups})
        if len(fitting) > 1:
            raise DamagedFile(
                f"its scales are those of {groups} groups of {' or '.join(map(str, fitting))} inputs, expected one size that fits"
            )
        if not fitting and inputs % groups:
            stated = f", or groups of {' or '.join(map(str, self.sizes))}" if self.sizes else ""
            raise DamagedFile(f"its scales have {groups} groups, expected a number of groups that divides {inputs} inputs{stated}")
        return fitting[0] if fitting else inputs // groups

    def is_symmetric(self, zeros: Array) -> bool:
        """Return whether all stored zero points are in the middle of the range."""
        word = sum((1 << self.bits - 1) - self.zero_offset << shift for shift in range(0, 32, self.bits))
        return (zeros.view(np.uint32) == word).all().item()


def read_gptq(fields: Fields) -> tuple[Method, ...]:
    """Return a method for each number of bits that matrices may have. `dynamic` maps patterns of names to the settings of some matrices; a
    pattern that begins with "-:" stands for matrices that are not quantised. The tensors show which matrix has how many bits."""
    kind = fields.text("checkpoint_format", "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise fields.error("checkpoint_format", "gptq or gptq_v2")
    if (words := fields.text("pack_dtype", "int32").removeprefix("torch.")) != "int32":
        raise fields.error(
            "pack_dtype", f"int32: integers packed into {words} are not read. Pack the model again with pack_dtype=torch.int32"
        )
    several = fields.raw("dynamic", {})
    if not isinstance(several, Mapping):
        raise fields.error("dynamic", "an object of settings by pattern")
    own = [settings for pattern, settings in several.items() if not str(pattern).startswith("-:")]
    fields.skip(*(name for name in fields.values if name not in ("quant_method", "bits", "checkpoint_format", "dynamic", "group_size")))
    sizes = _all_sizes(fields, own)
    return tuple(Gptq(bits, 1 if kind == "gptq" else 0, sizes) for bits in _all_bits(fields, own))


def read_auto_round(fields: Fields) -> tuple[Method, ...]:
    """Read the format of AutoRound, which packs matrices as GPTQ or AWQ do. `extra_config` has the settings of some matrices. The packing
    `auto_round`, which AutoRound chooses for matrices with zero points, is that of GPTQ, but stores zero points without subtracting 1."""
    packing, several = fields.text("packing_format", _former_packing(fields)), fields.raw("extra_config", {})
    read = ("quant_method", "bits", "packing_format", "extra_config", "data_type", "group_size")
    fields.skip(*(name for name in fields.values if name not in read))
    if fields.text("data_type", "int") != "int":
        raise fields.error("data_type", f"int. {OTHER_FILE}")
    if not isinstance(several, Mapping):
        raise fields.error("extra_config", "an object of settings by name")
    sizes = _all_sizes(fields, several.values())
    match packing.removeprefix("auto_round:"):
        case "auto_gptq" | "gptq" | "auto_round" as kind:
            return tuple(Gptq(bits, 0 if kind == "auto_round" else 1, sizes) for bits in _all_bits(fields, several.values()))
        case "auto_awq" | "awq" if _all_bits(fields, several.values()) == [4]:
            return (Awq(),)
        case _:
            raise fields.error("packing_format", "auto_round, auto_round:auto_gptq, or auto_round:auto_awq with 4 bits")


def _former_packing(fields: Fields) -> str:
    """Return the packing of files without a `packing_format`. Older files state instead the kernel that multiplies the matrices:
    `auto_round:exllamav2` for AutoRound's own packing, or `auto_round:gptq:exllamav2`, or `auto_round:awq`."""
    kernel = fields.text("backend", "auto").replace("autoround", "auto_round")
    if "awq" in kernel:
        return "auto_awq"
    return "auto_round" if kernel.startswith("auto_round") and "gptq" not in kernel else "auto_gptq"


def _all_bits(fields: Fields, several: Iterable[object]) -> list[int]:
    """Return the numbers of bits that matrices may have: first the field `bits`, then those in the settings of some matrices. 16 bits and
    more, which stand for floats, are left out. Raise ConfigError for numbers other than 2, 4 and 8."""
    found = [fields.integer("bits"), *(settings["bits"] for settings in several if isinstance(settings, Mapping) and "bits" in settings)]
    found = [bits for bits in dict.fromkeys(found) if type(bits) is not int or bits < 16]
    if not set(KNOWN_BITS).issuperset(found):
        raise fields.error("bits", f"2, 4 or 8, but the file names {', '.join(map(str, found))}. {OTHER_FILE}")
    return found


def _all_sizes(fields: Fields, several: Iterable[object]) -> tuple[int, ...]:
    """Return the sizes of groups that the configuration states, for all matrices or for some. -1 and None, which stand for a single group,
    are left out."""
    found = [fields.raw("group_size", None), *(settings.get("group_size") for settings in several if isinstance(settings, Mapping))]
    return tuple(dict.fromkeys(size for size in found if type(size) is int and size > 0))
