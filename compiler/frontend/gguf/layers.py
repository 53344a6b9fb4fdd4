"""Functions of several families: read from GGUF files which kind each layer has, and restore the tensors of layers with a state."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.weights import Tensor

MAMBA_FIELDS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}


def are_integers(value: object) -> TypeGuard[NDArray[np.integer[Any]]]:
    return isinstance(value, np.ndarray) and value.dtype.kind in "iu"


def read_attending(config: dict[str, Any]) -> list[bool] | None:
    """Return for each layer whether it has attention, or None if the file does not state it. Files state the number of key heads of each
    layer, which is 0 in layers without attention. Replace `num_key_value_heads` in `config`, the list of these numbers, by their
    maximum."""
    heads, count = config.get("num_key_value_heads"), config.get("num_hidden_layers")
    if not are_integers(heads) or type(count) is not int or len(heads) < count or count < 1:
        return None
    config["num_key_value_heads"] = int(heads[:count].max())
    return [bool(number) for number in heads[:count]]


def has_tensor(name: str, config: Mapping[str, Any], tensors: Container[str]) -> bool:
    """Return whether any layer has a tensor of this name."""
    count = config.get("num_hidden_layers")
    return any(f"blk.{layer}.{name}" in tensors for layer in range(count if type(count) is int else 0))


def inner_size(metadata: Mapping[str, Any], divisor: object) -> int | None:
    """Return the number of elements of all value heads together, divided by `divisor` and rounded down. Return None if the file does not
    state this number, or if the divisor is no positive integer."""
    size = metadata.get("ssm.inner_size")
    return size // divisor if type(size) is int and type(divisor) is int and divisor > 0 else None


def mamba_names(module: str) -> dict[str, str]:
    """Map the names of Mamba-2's tensors in GGUF files to those in safetensors files, in which the module has the name `module`."""
    return {
        "ssm_in": f"{module}.in_proj",
        "ssm_conv1d": f"{module}.conv1d",
        "ssm_dt.bias": f"{module}.dt_bias",
        "ssm_a": f"{module}.A_log",
        "ssm_d": f"{module}.D",
        "ssm_norm": f"{module}.norm",
        "ssm_out": f"{module}.out_proj",
    }


def mamba_restored(module: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return `Gguf.restored` for the tensors of Mamba-2, whose module in safetensors files has the name `module`."""
    return {
        f"{module}.A_log": lambda stored: rates(stored.reshape(-1)),
        f"{module}.D": flat,
        f"{module}.norm.weight": flat,
        f"{module}.conv1d.weight": taps,
    }


def rates(stored: Tensor) -> Tensor:
    """Return the logarithms of the rates at which states decay. Files store the negative rates."""
    with np.errstate(invalid="ignore", divide="ignore"):  # a damaged file may have any values
        return np.log(-stored)


def taps(stored: Tensor) -> Tensor:
    """Return the taps of a convolution in the shape of safetensors files, [channels, 1, taps]."""
    return stored[:, None]


def flat(stored: Tensor) -> Tensor:
    return stored.reshape(-1)
