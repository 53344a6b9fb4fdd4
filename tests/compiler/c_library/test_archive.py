"""Archives of object files, in the format that the system's linker reads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from compiler.c_library.archive import MAGIC, Member, archive


def test_the_index_names_the_member_of_each_symbol() -> None:
    """The archive's index maps each symbol to the offset of the member that defines it. A member of odd length is padded, so that all
    offsets are even."""
    made = archive({"a.o": Member(b"odd", ["first", "second"]), "b.o": Member(b"even", ["third"])})
    assert made.startswith(MAGIC)
    index = made[68 : 68 + int(made[56:66])]
    count = int.from_bytes(index[:4], "big")
    places = [int.from_bytes(index[4 * i + 4 : 4 * i + 8], "big") for i in range(count)]
    assert index[4 + 4 * count :].split(b"\0")[:count] == [b"first", b"second", b"third"]
    assert [made[p : p + 4] for p in places] == [b"a.o/", b"a.o/", b"b.o/"]
    assert made == archive({"a.o": Member(b"odd", ["first", "second"]), "b.o": Member(b"even", ["third"])})


def test_ar_lists_and_takes_out_what_was_put_in(tmp_path: Path) -> None:
    ar = shutil.which("ar")
    if ar is None:
        pytest.skip("needs ar: install binutils")
    (tmp_path / "x.a").write_bytes(archive({"a.o": Member(b"odd", ["f"]), "kernels.o": Member(b"12345678", ["g"])}))
    assert subprocess.run([ar, "t", tmp_path / "x.a"], capture_output=True, check=True).stdout.split() == [b"a.o", b"kernels.o"]
    assert subprocess.run([ar, "p", tmp_path / "x.a", "kernels.o"], capture_output=True, check=True).stdout == b"12345678"
