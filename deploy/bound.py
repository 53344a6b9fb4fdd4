"""Run a command that the kernel kills when the process that started it ends: `python bound.py PARENT COMMAND ARGUMENTS`.

So the server of a fleet's replica ends when the replica is killed, and the other stages of a model end with the model's worker.
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
