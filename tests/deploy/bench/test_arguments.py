"""Numbers that a benchmark cannot use are refused in a line."""

from __future__ import annotations

import pytest

from deploy.bench.compute import model, quality
from deploy.bench.serving import fleet, serve
from server.load_settings import MOST_SEQUENCES
from server.settings import SettingsError


@pytest.mark.parametrize(
    ("command", "argv", "message"),
    [
        (serve, "--clients 4,0", "0 is not a whole number above 0"),
        (serve, "--clients 1,x", "x is not a whole number above 0"),
        (serve, f"--clients {MOST_SEQUENCES + 1}", f"are more than the {MOST_SEQUENCES} sequences of the largest batch"),
        (serve, "--burst 0", "0 is not a whole number above 0"),
        (serve, "--length 1", "1 is not a whole number of at least 2"),
        (model, "--layers -1", "-1 is not a whole number above 0"),
        (model, "--layers 0", "0 is not a whole number above 0"),
        (model, "--kv-heads 0", "0 is not a whole number above 0"),
        (model, "--threads 0", "0 is not a whole number above 0"),
        (quality, "--sequences 0", "0 is not a whole number above 0"),
        (quality, "--length 1", "1 is not a whole number of at least 2"),
        (fleet, "--simulate --rate inf", "inf is not a number above 0"),
    ],
)
def test_a_number_out_of_range_is_refused(command: object, argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(argv.split())  # type: ignore[attr-defined]
    assert message in capsys.readouterr().err


def test_a_length_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(SettingsError, match="--length is 600; expected at most 512"):
        serve.main(["--model", "demo", "--quantize", "bf16", "--clients", "1", "--length", "600"])
