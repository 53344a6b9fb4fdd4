"""Writes matrices in the layouts of GPTQ, AWQ and bitsandbytes checkpoints."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from compiler.ir.numbers import FLOATS_OF_CODES, Kind

Array = np.ndarray[Any, Any]
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the columns of the eight 4-bit numbers in a 32-bit word, beginning with the lowest bits


def gptq(numbers: Array, zeros: Array, scales: Array, bits: int, *, zero_offset: int = 1, groups: Array | None = None) -> dict[str, Array]:
    """Pack unsigned `numbers` [in, out] as a GPTQ checkpoint does, with unsigned `zeros` [groups, out] and `scales` [groups, out]."""
    per_word = 32 // bits
    qweight = np.zeros((len(numbers) // per_word, numbers.shape[1]), np.uint32)
    for k in range(len(numbers)):
        qweight[k // per_word] |= numbers[k].astype(np.uint32) << np.uint32(bits * (k % per_word))
    qzeros = np.zeros((len(zeros), zeros.shape[1] // per_word), np.uint32)
    for n in range(zeros.shape[1]):
        qzeros[:, n // per_word] |= (zeros[:, n] - zero_offset).astype(np.uint32) << np.uint32(bits * (n % per_word))
    found = {"qweight": qweight.view(np.int32), "qzeros": qzeros.view(np.int32), "scales": scales}
    return found if groups is None else {**found, "g_idx": groups.astype(np.int32)}


def awq(numbers: Array, zeros: Array, scales: Array) -> dict[str, Array]:
    def packed(values: Array) -> Array:
        words = np.zeros((len(values), values.shape[1] // 8), np.uint32)
        for word in range(words.shape[1]):
            for place, column in enumerate(AWQ_COLUMNS):
                words[:, word] |= values[:, 8 * word + column].astype(np.uint32) << np.uint32(4 * place)
        return words.view(np.int32)

    return {"qweight": packed(numbers), "qzeros": packed(zeros), "scales": scales}


def bitsandbytes(codes: Array, absmax: Array, kind: str, **fields: Any) -> dict[str, Array]:
    """Pack codes [out, in] in order, the first one of a byte in its upper bits, with a scale for each 64 of them."""
    flat = codes.reshape(-1)
    state = json.dumps({"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(codes.shape), **fields})
    return {
        "weight": (flat[0::2] << 4 | flat[1::2])[:, None],
        "weight.absmax": absmax.reshape(-1),
        "weight.quant_map": FLOATS_OF_CODES[Kind(kind)],
        f"weight.quant_state.bitsandbytes__{kind}": np.frombuffer(state.encode(), np.uint8),
    }
