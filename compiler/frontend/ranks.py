"""Divide a decoder over ranks, GPUs of one machine that run the same program on different parts of the weights (tensor parallelism).

A rank computes some of the heads, some of the outputs of each matrix, and some of the logits, each from the whole input. Then every rank
gathers the outputs of all ranks. A rank has only the rows of a checkpoint's tensor that belong to its outputs, but the whole of a tensor
that all ranks need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from compiler.frontend.config import ModelConfig
from compiler.frontend.errors import ModelError
from compiler.frontend.registry import decoder_family
from compiler.frontend.weights import Derived, Tensor, TensorInfo, WeightSource
from compiler.ir.module import IRModule
from compiler.ir.types import TensorType

Shape = tuple[int, ...]


class CannotDivide(ModelError):
    """Raised if a model, or a tensor of it, cannot be divided over this number of ranks."""


def require_divisible(config: ModelConfig, num_ranks: int) -> None:
    """Raise CannotDivide if the model is of a kind without a division over ranks, such as an encoder, or if the number of ranks does not
    divide one of its sizes. The number of ranks may also be a multiple of the number of key and value heads."""
    family = decoder_family(config.family) if config.is_causal else None
    obstacles = {
        **config.beyond_text,
        f"is of the family {config.family}, whose layers have no such division yet": family is not None and not family.divides,
    }
    if reason := next((reason for reason, applies in obstacles.items() if applies), ""):
        raise CannotDivide(f"the model {reason}, so tensor_parallel is not supported: leave tensor_parallel out")
    kv_heads = config.num_kv_heads
    sizes = {
        "attention heads": config.num_heads,
        "inputs of a layer (hidden_size)": config.hidden_size,
        "columns of an MLP (intermediate_size)": config.intermediate_size,
        "tokens in its vocabulary": config.vocab_size,
    }
    for name, size in sizes.items():
        if size % num_ranks:
            text = f"the model has {size} {name}, and tensor_parallel is {num_ranks}"
            raise CannotDivide(f"{text}: choose a divisor of {size}, or leave tensor_parallel out")
    if kv_heads % num_ranks and num_ranks % kv_heads:
        text = f"the model has {kv_heads} heads of keys and values, and tensor_parallel is {num_ranks}"
        raise CannotDivide(f"{text}: choose a divisor or a multiple of {kv_heads}, or leave tensor_parallel out")


def of_rank(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """Return the configuration of what one rank computes. If there are more ranks than heads of keys and values, several ranks have the
    same head of keys and values. Raise CannotDivide if the model cannot be divided over this number of ranks."""
    if num_ranks == 1:
        return config
    require_divisible(config, num_ranks)
    return replace(
        config,
        num_heads=config.num_heads // num_ranks,
        num_kv_heads=max(1, config.num_kv_heads // num_ranks),
        intermediate_size=config.intermediate_size // num_ranks,
    )


def shapes_of(module: IRModule) -> Mapping[str, Shape]:
    """Return the shapes of the weights of a program."""
    found: dict[str, Shape] = {}
    for function in module.graph_functions.values():
        for weight in function.weights:
            assert isinstance(weight.type, TensorType) and weight.type.shape is not None, weight
            found[weight.name] = tuple(dim.const for dim in weight.type.shape)
    return found


class RankWeights(Derived):
    """The weights of one rank. `shapes` has the shapes that the program of a rank needs. A tensor with more rows is cut into parts of the
    needed shape, and ranks have the parts in order. If there are fewer parts than ranks, neighbouring ranks have the same part. Raise
    CannotDivide if a tensor cannot be cut into such parts."""

    def __init__(self, whole: WeightSource, shapes: Mapping[str, Shape], rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._rows: dict[str, slice] = {}
        tensors: dict[str, TensorInfo] = {}
        for name, info in whole.tensors.items():
            wanted = shapes.get(name, info.shape)
            tensors[name] = info
            if wanted != info.shape:
                self._rows[name] = self._rows_of(name, info.shape, wanted)
                num_parts = info.shape[0] // wanted[0]
                tensors[name] = TensorInfo(wanted, info.dtype, info.num_bytes // num_parts)
        super().__init__(whole, tensors)

    def _rows_of(self, name: str, shape: Shape, wanted: Shape) -> slice:
        """Return the rows of a tensor that this rank has."""
        num_parts, rest = divmod(shape[0], wanted[0]) if shape and wanted and wanted[0] else (0, 0)
        if num_parts == 0 or rest or self._num_ranks % num_parts or shape[1:] != wanted[1:]:
            raise CannotDivide(f"tensor {name!r} is {list(shape)}, which cannot be cut into {list(wanted)} for {self._num_ranks} ranks")
        begin = self._rank * num_parts // self._num_ranks * wanted[0]
        return slice(begin, begin + wanted[0])

    def read(self, name: str) -> Tensor:
        found = self.source.read(name)
        return found[self._rows[name]] if name in self._rows else found

    def digest(self) -> str:
        about = f"rank {self._rank} of {self._num_ranks} of {self.source.digest()}"
        return hashlib.blake2b(about.encode(), digest_size=16).hexdigest()
