"""Determine whether a GPU of a compute capability runs the code of a target."""

from __future__ import annotations

import re

from runtime.errors import IncompatibleExecutable

Capability = tuple[int, int]  # compute capability (major, minor), such as (9, 0)


def runs(target: str, capability: Capability) -> bool:
    """Return whether a GPU of this capability runs code for `target`, which is "nvptx64:+ptxN,+sm_N@system". Code for one generation of
    GPUs also runs on later generations; with the suffix "a" it runs on one generation alone. Raise IncompatibleExecutable if the target
    names no generation."""
    found = re.search(r"\+sm_(\d+)(\d)(a?)", target)
    if found is None:
        raise IncompatibleExecutable(f"the executable is for {target}, which names no generation of GPUs; compile the program again")
    wanted = int(found[1]), int(found[2])
    return wanted == capability if found[3] else wanted <= capability


def check_target(target: str, capability: Capability) -> None:
    """Raise IncompatibleExecutable unless a GPU of this capability runs code for `target`: see `runs`."""
    if not runs(target, capability):
        here = f"this GPU has compute capability {capability[0]}.{capability[1]}"
        raise IncompatibleExecutable(f"the executable is for {target}, and {here}; compile the program for this GPU")
