"""Which machine this is, and whether code made for a target runs on it."""

from __future__ import annotations

import platform

import llvmlite.binding as llvm

from runtime.errors import IncompatibleExecutable

ARCH = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())  # as LLVM names it


def check_target(target: str) -> None:
    """`target` is "arch:+feature,+feature". An instruction that the machine lacks would end the process."""
    arch, _, features = target.partition(":")
    if arch != ARCH:
        raise IncompatibleExecutable(f"the executable is for {arch}, this machine is {ARCH}; compile the program here")
    here = llvm.get_host_cpu_features()
    if missing := [f for f in features.replace("+", "").split(",") if f and not here.get(f)]:
        raise IncompatibleExecutable(f"the executable needs {', '.join(missing)}, which this machine lacks; compile the program here")
