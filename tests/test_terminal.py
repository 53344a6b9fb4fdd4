"""Programs in a pseudo-terminal are interrupted while they wait."""

from __future__ import annotations

import os
import sys

from tests.terminal import PROMPT, terminal

# The program computes for a while after its prompt, as readline does for a moment. An interrupt by then would be noted, and never handled.
COMPUTES = """
import signal, time
signal.signal(signal.SIGINT, lambda *_: print("too early", flush=True))
print("\\n> ", end="", flush=True)
end = time.monotonic() + 0.3
while time.monotonic() < end: pass
signal.signal(signal.SIGINT, lambda *_: print("in time", flush=True))
time.sleep(60)
"""


def test_an_interrupt_waits_until_the_program_waits() -> None:
    with terminal([sys.executable, "-c", COMPUTES], dict(os.environ)) as shown:
        shown.until(PROMPT)
        shown.interrupt()
        assert "too early" not in shown.until("in time")
