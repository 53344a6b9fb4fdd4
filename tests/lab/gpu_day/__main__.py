"""`make gpu-day`: prepare a visit to a machine with a card, rehearse it here without one, and print the command to run there."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from deploy.cli.root import run
from tests.gpu.driver.library import ROOT
from tests.lab.gpu_day.day import FIRST
from tests.lab.gpu_day.prepare import prepare
from tests.lab.gpu_day.rehearse import alone, rehearse

COMMAND = ("-m", "tests.lab.gpu_day.day")
REHEARSED = Path(".venv/gpu-day")  # results of the rehearsal
SECONDS = 480
THERE = """
On the machine with the card, in the root of this checkout and with the folder .gpu:

    PYTHONPATH={first} python3 {command} --seconds {seconds}

with a limit of {limit} s; results are in $OUT, or else in gpu-day. Afterwards, here:

    python -m tests.lab report --day gpu-day/day.jsonl
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.gpu_day", description=__doc__)
    parser.add_argument(
        "--plant", action="store_true", help="also rehearse a step that dies and one that hangs; both are counted as failed"
    )
    parser.add_argument("--only", metavar="TEXT", help="rehearse only steps whose names contain the text")
    options = parser.parse_args()
    with alone():
        began = os.times()
        python = prepare()
        between = os.times()
        print(f"prepared in {_spent(began, between)}; rehearsing on a card in software", flush=True)
        chosen = [*(["--plant"] if options.plant else []), *(["--only", options.only] if options.only else [])]
        status = rehearse(python, [*COMMAND, *chosen], REHEARSED)
        print(f"rehearsed in {_spent(between, os.times())}; load {os.getloadavg()[0]:.1f}", flush=True)
    if status:
        raise SystemExit(status)
    print(THERE.format(first=FIRST.relative_to(ROOT), command=" ".join(COMMAND), seconds=SECONDS, limit=SECONDS + 20))


def _spent(began: os.times_result, ended: os.times_result) -> str:
    processor_s = sum(after - before for before, after in zip(began[:4], ended[:4], strict=True))
    return f"{ended.elapsed - began.elapsed:.0f} s, of which {processor_s:.0f} s of processor time"


if __name__ == "__main__":
    run(main)
