"""The output of a benchmark and the conditions of its measurement. There is one JSON file in tests/lab/results/ per command and machine;
a later run of the same command replaces it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from deploy.machine import survey

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "tests" / "lab" / "results"


@dataclass(frozen=True, slots=True)
class Record:
    benchmark: str
    arguments: tuple[str, ...]
    machine: str
    date: str
    commit: str
    found: Any  # output of the benchmark with --json

    @classmethod
    def of(cls, benchmark: str, arguments: Sequence[str], printed: str) -> Self:
        return cls(benchmark, tuple(arguments), machine_name(), datetime.now(UTC).date().isoformat(), commit_name(), json.loads(printed))

    @classmethod
    def read(cls, file: Path) -> Self:
        fields: dict[str, Any] = json.loads(file.read_text())
        return cls(arguments=tuple(fields.pop("arguments")), **fields)

    @property
    def command(self) -> str:
        return " ".join(("python -m tests.lab", self.benchmark.replace("_", "-"), *self.arguments))

    def keep(self) -> Path:
        file = RESULTS / file_name(self.machine) / f"{file_name(' '.join((self.benchmark, *self.arguments)))}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return file


def read_all() -> list[Record]:
    return [Record.read(file) for file in sorted(RESULTS.glob("*/*.json"))]


def file_name(text: str) -> str:
    return "-".join(re.findall(r"[a-z0-9.]+", text.lower()))


def machine_name() -> str:
    found = survey()
    facts: Iterable[str] = (
        found.processor,
        f"{found.num_cores} cores",
        f"{found.memory.total_bytes / (1 << 30):.0f} GiB",
        found.features[0] if found.features else found.target.arch,
        *found.gpus,
    )
    return ", ".join(facts)


def commit_name() -> str:
    """Return the commit of the checkout, followed by + if files differ from the commit."""
    described = subprocess.run(
        ("git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=9"), capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "not a checkout"
