"""Describe the contents of a model's files: family, number of parameters, type of the weights, bytes on disk."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from compiler.frontend.gguf.file import GgufFile
from compiler.frontend.weights import TensorInfo, WeightSource
from compiler.ir.dtypes import DType
from deploy.model_loading.files import ModelFiles
from deploy.model_loading.locate import CT2, files_of_model
from server.messages import Facts

WEIGHTS = (".safetensors", ".gguf")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GGUF_EMBEDDING, GGUF_HEAD = "token_embd.weight", "output.weight"
COMPARED_ROWS = 8  # first rows of embedding and head that are compared, to find whether both are one table
MOST_DIFFERENCE = 0.5  # relative; two roundings of one table differ by less than 0.2, two tables that were trained apart by more than 1

# Names of the mixes of types in which llama.cpp stores a model, by `general.file_type`.
MIXES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
}


def facts_of(files: ModelFiles) -> Facts:
    """Return what the server tells its users about the files of a model."""
    counts = values_by_type(files)
    return Facts(
        family=files.config.family,
        format=_format(files),
        num_parameters=sum(counts.values()),
        weight_type=_weight_type(files, counts),
        file_bytes=sum(file.stat().st_size for file in files_of_model(files.path) if file.suffix in WEIGHTS or file.name == CT2),
        max_context=files.config.max_context,
    )


def _format(files: ModelFiles) -> str:
    if files.gguf is not None:
        return "gguf"
    return "ctranslate2" if (files.path / CT2).is_file() else "safetensors"


def values_by_type(files: ModelFiles) -> dict[str, int]:
    """Return the number of parameters by the type in which the files store them. A table that is embedding and head counts once, even if
    the files have it twice."""
    counts: dict[str, int] = {}
    copies = (HEAD, GGUF_HEAD) if _is_head_copied(files) else ()
    for name, type_, count in _stored(files):
        if name not in copies:
            counts[type_] = counts.get(type_, 0) + count
    return counts


def _stored(files: ModelFiles) -> list[tuple[str, str, int]]:
    """Return name, type and number of values of each tensor that has parameters."""
    if files.gguf is not None:
        return [(name, tensor.format.name, prod(tensor.shape)) for name, tensor in files.gguf.tensors.items()]
    kept = set(files.held.tensors) if files.held is not None else set(files.weights.tensors)
    tensors = files.weights.tensors.items()
    # An integer tensor, such as a table of positions, holds no parameters.
    plain = [(name, info) for name, info in tensors if info.dtype.kind not in "iub"]
    return [(name, _type_of(info) if name in kept else files.method, prod(info.shape)) for name, info in plain]


def _type_of(info: TensorInfo) -> str:
    return DType.from_numpy(np.dtype(info.dtype)).value.upper()


def _weight_type(files: ModelFiles, counts: Mapping[str, int]) -> str:
    """Return the name of a GGUF file's mix of types. If there is none, return the type of most values, or "" if there are no values."""
    if files.gguf is not None and (mix := MIXES.get(files.gguf.metadata.get("general.file_type", -1))) is not None:
        return mix
    return max(counts, key=counts.__getitem__, default="")


def _is_head_copied(files: ModelFiles) -> bool:
    """Return whether the files store one table both as embedding and as head. Return False if one of the two is missing, or if their shapes
    differ. Unless the configuration says that the two are tied, decide from their first rows."""
    tensors = files.weights.tensors
    if EMBEDDING not in tensors or HEAD not in tensors or tensors[EMBEDDING].shape != tensors[HEAD].shape:
        return False
    if files.config.tie_word_embeddings:
        return True
    embedding, head = _first_rows(files.weights, files.gguf, EMBEDDING), _first_rows(files.weights, files.gguf, HEAD)
    return float(np.linalg.norm(embedding - head)) <= MOST_DIFFERENCE * float(np.linalg.norm(embedding))


def _first_rows(source: WeightSource, gguf: GgufFile | None, name: str) -> np.ndarray:
    if gguf is not None:
        rows = gguf.first_rows({EMBEDDING: GGUF_EMBEDDING, HEAD: GGUF_HEAD}[name], COMPARED_ROWS)
    else:
        rows = source.read(name)[:COMPARED_ROWS]
    return rows.astype(np.float32)
