"""Run a command that the kernel kills when the process that started it ends: `python bound.py PARENT COMMAND ARGUMENTS`.

A replica of a fleet that is killed takes its server with it, and a worker the other stages of its model, so that nothing runs unwatched.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *words = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit("the process that started this one has ended")
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
