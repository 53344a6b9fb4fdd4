"""Fill models of transformers with drawn weights (`drawn.py`), for the goldens of models that see or hear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.golden.drawn import Draw, draw


def tensors_of(model: Any) -> dict[str, Any]:
    """Return the tensors of a model's checkpoint. Of tensors that share memory, only the first is returned."""
    found: dict[int, tuple[str, Any]] = {}
    for name, tensor in model.state_dict().items():
        found.setdefault(tensor.data_ptr(), (name, tensor))
    return dict(found.values())


def fill(tensors: Mapping[str, Any], draws: Mapping[str, Draw], seed: int) -> None:
    """Write drawn numbers into the tensors of a model."""
    import torch

    for name, tensor in tensors.items():
        tensor.copy_(torch.from_numpy(draw(seed, name, draws[name])))


def as_it_is(name: str, tensor: Any) -> Draw:
    """Describe a tensor that a model already has, all of whose numbers are equal."""
    shift = tensor.flatten()[0].item()
    assert (tensor == shift).all(), f"{name} has different numbers, so it must be drawn"
    return Draw(tuple(tensor.shape), 0.0, shift)


def one_by_one(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors as some checkpoints of the hub have them: those of GLM-4.5V and Qwen3-Omni store experts one by one. They share the
    memory of the given tensors."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        whole, _, part = name.partition(".experts.")
        if not part:
            found[name] = tensor
            continue
        for number, matrix in enumerate(tensor):
            halves = matrix.chunk(2) if part == "gate_up_proj" else (matrix,)
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            found |= {f"{whole}.experts.{number}.{own}.weight": half for own, half in zip(names, halves, strict=True)}
    return found
