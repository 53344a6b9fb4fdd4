"""Print the machine, the commit and the date of a day with a card, and which packages the machine lacks that it should have."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from datetime import UTC, datetime

from tests.lab.gpu_day.day import CARRIED
from tests.lab.gpu_day.packages import PRESENT
from tests.lab.reporting.record import commit_name, machine_name

ASKED = "name,driver_version,memory.total,clocks.max.sm"


def missing() -> list[str]:
    installed = {distribution.name.lower().replace("_", "-") for distribution in importlib.metadata.distributions()}
    return sorted(PRESENT - installed)


def card() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"], capture_output=True, text=True, check=False, timeout=20
        )
    except OSError as error:
        return str(error)
    return (done.stdout or done.stderr).strip()


def main() -> None:
    carried = CARRIED / "commit"
    found = {
        "machine": machine_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": carried.read_text().strip() if carried.is_file() else commit_name(),
        "is_rehearsal": any(name.startswith("SOFTWARE_GPU_") for name in os.environ),
        "card": card(),
        "missing": missing(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
