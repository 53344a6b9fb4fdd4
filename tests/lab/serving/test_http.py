"""The benchmark of the HTTP front runs, and its figures are consistent with each other. Speed is not tested."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

from tests.lab.serving.http import _arrival_us


def test_it_measures():
    command = [sys.executable, "-m", "tests.lab.serving.http", "--json", "--seconds", "0.5", "--rate", "400", "--streams", "8"]
    ended = subprocess.run(command, check=False, capture_output=True, timeout=120, text=True)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    paced = result["paced"]
    assert paced["num_tokens"] == 8 * round(0.5 * 400 / 8) and paced["num_streams"] == 8
    assert paced["tokens_per_s"] <= 400 * 1.3, "the requests were not paced"
    assert 0 <= paced["added_ms_p50"] <= paced["added_ms_p99"] <= paced["added_ms_max"]
    assert paced["server_cpu_s"] > 0 and result["saturated"]["tokens_per_s"] > paced["tokens_per_s"]
    assert result["idle"]["connections"] == 1000 and result["idle"]["bytes"] < 100 << 20
    assert result["metrics"]["scrape_ms"] > 0


def test_bytes_without_a_stamp_of_the_kernel_have_none() -> None:
    """Received bytes without a kernel timestamp have no arrival time; then the client uses the time at which it reads them. Linux adds no
    timestamps for a moment after the first socket enables them."""
    assert _arrival_us([]) is None
    assert _arrival_us([(0, 0, struct.pack("@qq", 3, 5_000))]) == 3_000_005
