from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runtime import flags
from runtime.errors import InvalidFlag


def test_defaults() -> None:
    assert flags.parse({}) == flags.Flags()


def test_values() -> None:
    environment = {"RELAXSERVE_DEBUG": "3", "RELAXSERVE_DUMP": "out", "RELAXSERVE_VERIFY": "1", "RELAXSERVE_THREADS": "2"}
    assert flags.parse(environment) == flags.Flags(debug=3, dump=Path("out"), verify=True, threads=2)


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("RELAXSERVE_DEBUG", "6", "a level from 0 to 5"),
        ("RELAXSERVE_DEBUG", "", "a level from 0 to 5"),
        ("RELAXSERVE_VERIFY", "yes", "0 or 1"),
        ("RELAXSERVE_THREADS", "0", "a number of at least 1"),
        ("RELAXSERVE_DUMP", "", "a directory"),
        ("RELAXSERVE_CACHE", "~no-such-user/cache", "a directory"),
        ("RELAXSERVE_TARGET", "", "a target of compiler/machine/target.py"),
    ],
)
def test_what_does_not_parse_is_refused_by_name(variable: str, value: str, expected: str) -> None:
    with pytest.raises(InvalidFlag, match=f"{variable}='{value}': expected {expected}"):
        flags.parse({variable: value})


def test_the_cache_lies_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cache folder follows the XDG base directory specification, which says that a relative path in XDG_CACHE_HOME is ignored."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for named, expected in (("", ".cache"), ("relative", ".cache"), (str(tmp_path / "elsewhere"), "elsewhere")):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert flags.parse({}).cache == tmp_path / expected / "relaxserve"


def test_a_scope_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAXSERVE_DEBUG", "1")
    with flags.scope(verify=True) as inside:
        assert inside == flags.current() and inside.verify and inside.debug == 1
    assert not flags.current().verify


def test_the_table_names_every_switch_and_field() -> None:
    text = flags.table()
    assert all(switch.variable in text and switch.meaning in text for switch in flags.SWITCHES)
    assert sorted(switch.field for switch in flags.SWITCHES) == sorted(flags.Flags.__slots__)


def test_a_bad_value_stops_the_program() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "runtime.flags"], env={"RELAXSERVE_DEBUG": "loud"}, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0 and "RELAXSERVE_DEBUG='loud': expected a level from 0 to 5" in result.stderr


def test_nothing_else_reads_the_environment() -> None:
    root = Path(flags.__file__).parent.parent
    files = [f for package in ("compiler", "runtime") for f in (root / package).rglob("*.py") if f != Path(flags.__file__)]
    assert [f for f in files if "environ" in f.read_text() or "getenv" in f.read_text()] == []
