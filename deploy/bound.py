"""Run a command that the kernel kills when the process PARENT, which started it, ends: `python bound.py PARENT COMMAND ARGUMENTS`.

So the server of a fleet's replica ends when the replica is killed, the stages that a model's worker or a fleet starts end with the process
that started them, the server of `relaxserve run` ends with the conversation, and a process that plans, exports or downloads a model ends
with the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def bound(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command that runs `command`, and that the kernel kills when this process ends. `command` begins with the path of a program.
    The kernel also kills the command when the thread that started it ends, so start the command on a thread that outlives it."""
    return (sys.executable, __file__, str(os.getpid()), *command)


def main() -> None:
    parent, *words = sys.argv[1:]
    end_with(int(parent))
    os.execv(words[0], words)


def end_with(parent: int) -> None:
    """Let the kernel kill this process, and a command that replaces it, when its parent process ends, or the thread of the parent that
    started it. `parent` is the id of the parent process. If the parent has ended already, exit."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the process that started this one has ended")


if __name__ == "__main__":
    main()
