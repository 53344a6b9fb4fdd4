"""The code with which a C library runs kernels on several threads of its caller (team.ll). A thread that waits never sleeps, because the
code calls no library."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from compiler.machine.target import Target

TEAM_BYTES: Final = 128  # size of %Team in team.ll
THREADS: Final = 72  # offset in %Team of the number of threads
_PAUSE: Final = {"x86_64": "call void @llvm.x86.sse2.pause()", "aarch64": "call void @llvm.aarch64.hint(i32 1)"}


def team_text(target: Target) -> str:
    """Return team.ll with the pause instruction of the target, or without such an instruction if `_PAUSE` lacks the target."""
    text, pause = (files("compiler.c_library") / "team.ll").read_text(), _PAUSE.get(target.arch, "")
    return text.replace("declare void @cpu_pause()", f"define internal void @cpu_pause() #0 {{\n  {pause}\n  ret void\n}}")
