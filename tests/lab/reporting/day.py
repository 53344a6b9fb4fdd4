"""The record of a day with a card, made of the lines that its steps wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from server.settings import SettingsError
from tests.lab.reporting.record import Record

BENCHMARK = "cuda_day"
MACHINE = "machine"  # the step that says where and when
OF_STEP = ("step", "outcome", "seconds", "said")


def read_day(file: Path) -> Record:
    """Return the record of a day from its file of lines. Raise SettingsError if the lines do not say on which machine they were measured,
    or if they are those of a rehearsal."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    told = next((line["found"][0] for line in lines if line["step"] == MACHINE and line["found"]), None)
    if told is None:
        raise SettingsError(f"{file} has no result of the step {MACHINE!r}, so its figures belong to no machine; run the day again")
    if told["is_rehearsal"]:
        raise SettingsError(f"{file} is of a rehearsal on a card in software, whose figures mean nothing; name the lines of a visit")
    steps = [{name: line[name] for name in OF_STEP} for line in lines]
    figures = {line["step"]: line["found"] for line in lines if line["found"]}
    return Record(BENCHMARK, (), told["machine"], told["date"], told["commit"], {"steps": steps, **figures})
