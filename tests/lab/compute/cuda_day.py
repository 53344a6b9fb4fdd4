"""`python -m tests.lab cuda-day`: the steps of `make gpu-day`, on a machine with a card where the packages of relaxserve are installed."""

from __future__ import annotations

from tests.lab.gpu_day import day


def main(argv: list[str] | None = None) -> None:
    day.main(argv, prog="python -m tests.lab cuda-day")
