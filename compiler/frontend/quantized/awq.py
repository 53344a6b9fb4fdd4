"""AWQ: integers of 4 bits packed along the outputs, with a scale and a zero point for each group of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compiler.frontend.errors import DamagedFile
from compiler.frontend.fields import Fields
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
    expect,
    is_even,
    scale_type,
    unpack,
)

EIGHT = 8  # number of integers per 32-bit word
# fields that repeat what the tensors show (how and which matrices were quantised), or that choose the kernels of other programs
UNREAD = (
    *("zero_point", "sym", "group_size", "q_group_size", "modules_to_not_convert", "modules_in_block_to_quantize", "dynamic", "lm_head"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "desc_act", "act_group_aware", "static_groups", "true_sequential"),
    *("damp_percent", "damp_auto_increment", "batch_size", "dataset", "tokenizer", "cache_block_outputs", "model_seqlen"),
    *("pad_token_id", "max_input_length", "meta", "pack_dtype", "backend", "do_fuse", "exllama_config", "fuse_max_seq_len"),
)
PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # position in a word of each of eight columns


@dataclass(frozen=True, slots=True)
class Awq:
    """The method AWQ: matrices of 4-bit integers."""

    @property
    def layout(self) -> Layout:
        return Layout("qweight", ("qzeros", "scales"))

    def shape(self, infos: Infos, read: Read) -> tuple[int, ...]:
        packed = infos["qweight"].shape
        if len(packed) != 2:
            raise DamagedFile(f"its qweight is {list(packed)}, expected two axes")
        inputs, outputs = packed[0], packed[1] * EIGHT
        groups = infos["scales"].shape[0] if infos["scales"].shape else 0
        if groups < 1 or inputs % groups:
            raise DamagedFile(f"its scales are {list(infos['scales'].shape)}, expected a number of groups that divides {inputs} inputs")
        expect(infos, "qweight", packed, "w")
        expect(infos, "scales", (groups, outputs), "f")
        expect(infos, "qzeros", (groups, packed[1]), "w")
        return outputs, inputs

    def values(self, parts: Parts) -> Floats:
        numbers, zeros = _columns(parts["qweight"]), _columns(parts["qzeros"])
        size = len(numbers) // len(zeros)
        scales = np.repeat(parts["scales"].astype(np.float32), size, 0)
        return np.ascontiguousarray((scales * (numbers - np.repeat(zeros, size, 0)).astype(np.float32)).T)

    def form(self, infos: Infos, read: Read) -> Form | None:
        length, groups = infos["qweight"].shape[0], infos["scales"].shape[0]
        return Form(4, length // groups, scale_type(infos, "scales"), Offset.ZERO) if is_even(length, groups) else None

    def held(self, parts: Parts) -> Parts:
        zeros = _columns(parts["qzeros"]).T
        return {"q": halves(_columns(parts["qweight"]).T), "scale": parts["scales"].T, "zero": zeros}


def _columns(words: Array) -> Array:
    """Unpack words [rows, outputs / 8] to numbers [rows, outputs], in the order of the outputs."""
    return unpack(words, 4, 1).reshape(len(words), -1, EIGHT)[..., PLACES].reshape(len(words), -1)


def read_awq(fields: Fields) -> tuple[Method, ...]:
    """Return the method AWQ. Raise ConfigError unless the matrices are integers of 4 bits in the usual order of columns (gemm)."""
    if fields.integer("bits", fields.raw("w_bit", 4)) != 4:
        raise fields.error("bits", "4")
    for name in ("version", "format", "checkpoint_format"):  # names of the field in files of AutoAWQ, transformers 5 and GPTQModel
        if (order := fields.text(name, "gemm")).lower() != "gemm":
            raise fields.error(name, f"gemm; weights packed for {order} have another order")
    if fields.text("data_type", "int") != "int":
        raise fields.error("data_type", f"int. {OTHER_FILE}")
    # AutoRound adds its own settings of the search for integers
    fields.skip(*(fields.values if "autoround_version" in fields.values else UNREAD))
    return (Awq(),)
