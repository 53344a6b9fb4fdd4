"""Join tensors that checkpoints store one by one and programs read as one tensor, such as those of experts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np

from compiler.frontend.weights import Derived, Tensor, TensorInfo, WeightSource


def joint_name(pattern: str) -> str:
    """Return the name of the tensor that joins all tensors whose names match the pattern."""
    return pattern.replace(".*", "")


class Joint(Derived):
    """A source that joins several tensors of the same shape along a new first axis when the joint tensor is read, and then releases them.
    `members` maps the name of each joint tensor to the names of the tensors that it joins, in order."""

    def __init__(self, source: WeightSource, members: Mapping[str, tuple[str, ...]]) -> None:
        self.members = members
        taken = {name for names in members.values() for name in names}
        infos = {name: info for name, info in source.tensors.items() if name not in taken}
        for whole, names in members.items():
            first = source.tensors[names[0]]
            infos[whole] = TensorInfo((len(names), *first.shape), first.dtype, sum(source.tensors[name].num_bytes for name in names))
        super().__init__(source, infos)

    def read(self, name: str) -> Tensor:
        if name not in self.members:
            return self.source.read(name)
        info = self.tensors[name]
        whole = np.empty(info.shape, info.dtype)
        for number, member in enumerate(self.members[name]):
            whole[number] = self.source.read(member)
            self.source.release(member)  # otherwise memory would hold both the copy and the pages of the file
        return whole

    def release(self, name: str) -> None:
        if name not in self.members:
            self.source.release(name)


def joint(source: WeightSource, patterns: Iterable[str]) -> WeightSource:
    """Return the source with joined tensors: tensors whose names differ only in the number for which `*` stands in a pattern become one
    tensor, in the order of their numbers. A pattern is a name within a layer, without the ending such as `.weight`; patterns without `*`
    are ignored. Tensors whose numbers are not 0, 1, 2 and so on, or that differ in shape or type, are not joined, so `Accounting` reports
    them later."""
    found: dict[str, dict[int, str]] = {}
    for pattern in (pattern for pattern in patterns if "*" in pattern):
        before, after = map(re.escape, pattern.split("*"))
        for name in source.tensors:
            if match := re.fullmatch(rf"(.*\.){before}(\d+){after}(\.\w+(?:\.\w+)?)", name, re.ASCII):
                found.setdefault(f"{match[1]}{joint_name(pattern)}{match[3]}", {})[int(match[2])] = name
    members = {whole: tuple(by_number[i] for i in sorted(by_number)) for whole, by_number in found.items() if _complete(source, by_number)}
    return Joint(source, members) if members else source


def _complete(source: WeightSource, by_number: Mapping[int, str]) -> bool:
    """Return whether the numbers are 0, 1, 2 and so on, and all tensors have the same shape and type."""
    kinds = {(source.tensors[name].shape, source.tensors[name].dtype) for name in by_number.values()}
    return len(kinds) == 1 and _are_counted(by_number)


def _are_counted(numbers: Iterable[int]) -> bool:
    return all(i == number for i, number in enumerate(sorted(numbers)))
