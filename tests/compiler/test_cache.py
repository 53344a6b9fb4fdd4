"""The cache of executables: which programs share a key, which ranges an entry covers, and that no damaged or foreign entry is used."""

from __future__ import annotations

import ast
import errno
import os
import shutil
import tarfile
from functools import cache as cache_results
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import compiler.ops
from compiler.cache import MAX_SIDECAR_BYTES, Cache, CacheError, Key, Range
from compiler.driver import compile_module
from compiler.ir.text.parser import parse
from compiler.signature import SHARED, compiler_version, key_of, signature
from runtime import flags
from runtime.errors import BoundExceeded, DamagedFile, UnsafeCache
from runtime.executable import Executable
from runtime.sealed import KEY_FILE
from runtime.session import Session
from tests.disk import room_for

assert compiler.ops

TARGET = "x86_64:+avx2"


def text(upper: str = "64", *, dim: str = "n", body: str = "y = exp(x)") -> str:
    return f"func main(x: f32[{dim}, 4]) -> object where {dim} in 1..{upper} {{ {body} return y }}"


@cache_results
def made(upper: str = "64", dim: str = "n") -> Executable:
    return compile_module(parse(text(upper, dim=dim)))


@pytest.fixture(scope="module")
def executable() -> Executable:
    return made()


def key(program: str, target: str = TARGET) -> Key:
    return key_of(parse(program), target)


# --- cache keys ----------------------------------------------------------------------------------------------------------


def test_variables_and_ranges_are_no_part_of_a_key() -> None:
    assert key(text()) == key(text(dim="batch"))
    assert key(text()).digest == key(text("128")).digest
    assert key(text()) != key(text("128"))


def test_parameters_are_bound_by_name_so_names_are_part_of_a_key() -> None:
    assert key(text()) != key(text().replace("x", "w").replace("ewp", "exp"))


def test_all_that_changes_code_is_part_of_a_key() -> None:
    others = [key(text(body="y = sin(x)")), key(text(), target="x86_64:+avx512f")]
    assert len({k.digest for k in [key(text()), *others]}) == 3


@pytest.mark.parametrize("name", SHARED)
def test_a_change_of_what_programs_share_with_the_runtime_gives_other_keys(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    version, read = compiler_version.__wrapped__, Path.read_bytes
    before = version()
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + b"#" * (self.parent.name == "runtime" and self.name == name))
    assert version() != before


def test_the_key_covers_all_modules_of_the_runtime_on_which_programs_rely() -> None:
    """These packages decide what a program computes, where its arguments lie and what its instructions mean."""
    packages = ("backends", "bytecode", "idioms", "ir", "machine/intrinsics", "machine/product_steps", "ops", "passes", "sampling")
    folder = Path(compiler.__path__[0])
    nodes = (n for package in packages for path in (folder / package).rglob("*.py") for n in ast.walk(ast.parse(path.read_text())))
    imported = {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module is not None and n.module.startswith("runtime.")}
    assert imported == {f"runtime.{name.removesuffix('.py')}" for name in SHARED}


def test_ranges_of_variables_that_data_defines_count() -> None:
    def program(upper: str) -> str:
        head = f"func main(x: f32[ndim=1], s: shape[n]) -> object where k in 0..{upper}"
        return f"{head} {{ y = match_cast x to f32[k] z = exp(y) return z }}"

    assert key(program("4")) != key(program("8"))
    assert key(program("n")) != key(program("2*n"))


def test_signature() -> None:
    module = parse("func main(x: f32[b, 4*h], s: shape[h]) -> f32[b, 4*h] where b in 1..8 by 2, h in 2.. { return x }")
    assert signature(module, "main") == "(f32[n0, 4*n1], shape[n1]) where n0 in 1..8 by 2, n1 in 2.."


@pytest.mark.parametrize(
    ("mine", "asked", "covered"),
    [
        (Range(1, 64, 1), Range(1, 64, 1), True),
        (Range(1, 64, 1), Range(2, 32, 4), True),
        (Range(1, 64, 1), Range(0, 64, 1), False),
        (Range(1, 64, 1), Range(1, 65, 1), False),
        (Range(1, 64, 1), Range(1, None, 1), False),
        (Range(1, None, 1), Range(1, None, 1), True),
        (Range(0, 64, 4), Range(0, 64, 8), True),
        (Range(0, 64, 4), Range(0, 64, 2), False),
        (Range(0, "n0 - 1", 1), Range(0, "n0 - 1", 1), True),
        (Range(0, "n0 - 1", 1), Range(0, 4, 1), False),
        (Range(0, 8, 1), Range(0, "n0 - 1", 1), False),
        (Range(0, None, 1), Range(0, "n0 - 1", 1), False),
    ],
)
def test_covering(mine: Range, asked: Range, covered: bool) -> None:
    assert mine.covers(asked) is covered


# --- look-ups ------------------------------------------------------------------------------------------------------------


def test_a_wider_plan_serves_and_the_smallest_is_taken(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for upper in ("1024", "64", "4096"):
        cache.store(key(text(upper)), made(upper))
    used = {e.path: e.used_s for e in cache.entries()}
    for path in used:
        os.utime(path, (0, 0))
    assert cache.find(key(text("256"))) is not None
    (touched,) = [e for e in cache.entries() if e.used_s > 0]
    assert touched.ranges["main"]["n0"].upper == 1024
    assert cache.find(key(text("10000"))) is None
    assert cache.find(key(text(body="y = sin(x)"))) is None


def test_what_is_found_runs(tmp_path: Path, executable: Executable) -> None:
    cache = Cache(tmp_path)
    cache.store(key(text()), executable)
    found = cache.find(key(text()))
    assert found is not None
    session = Session(found, device_threads=1)
    np.testing.assert_allclose(session.call("main", np.zeros((3, 4), np.float32)), 1.0)
    session.close()


def test_a_program_refuses_what_it_does_not_declare_although_a_wider_executable_runs_it(tmp_path: Path) -> None:
    """A program refuses sizes outside its declared ranges, even if the cached executable supports them. Here the program declares n in 1..8
    and the executable was compiled for 1..64, and 20 rows are refused."""
    cache = Cache(tmp_path)
    cache.store(key(text("64")), made("64"))
    found = cache.find(key(text("8")))
    assert found is not None
    session = Session(found, device_threads=1)
    np.testing.assert_allclose(session.call("main", np.zeros((8, 4), np.float32)), 1.0)
    for rows in (20, 0):
        with pytest.raises(BoundExceeded, match=rf"n = {rows} is outside its declared range 1 <= n <= 8"):
            session.call("main", np.zeros((rows, 4), np.float32))
    session.close()


def test_variables_of_casts_and_multiples_are_narrowed_too(tmp_path: Path) -> None:
    def program(least: int, most: str, multiple: int) -> str:
        head = f"func main(x: f32[ndim=1], s: shape[n]) -> object where n in 0..100 by {multiple}, k in {least}..{most}"
        return f"{head} {{ y = match_cast x to f32[k] z = exp(y) return z }}"

    cache = Cache(tmp_path)
    wide = program(0, "64", 1)
    cache.store(key(wide), compile_module(parse(wide)))
    found = cache.find(key(program(2, "8", 4)))
    assert found is not None
    session = Session(found, device_threads=1)
    assert session.call("main", np.zeros(8, np.float32), (4,)).shape == (8,)
    for size, n, complaint in ((20, 4, "k = 20 is outside"), (1, 4, "k = 1 is outside"), (8, 5, "n = 5 is not a multiple of 4")):
        with pytest.raises(BoundExceeded, match=complaint):
            session.call("main", np.zeros(size, np.float32), (n,))
    session.close()


def test_a_sidecar_that_states_other_ranges_than_the_executable_is_a_miss(tmp_path: Path) -> None:
    """An entry is not used if its sidecar file states other ranges than its executable. Here the narrow executable has overwritten the wide
    one. It must not run sizes that only the wide executable supports."""
    cache = Cache(tmp_path)
    narrow, wide = cache.store(key(text("8")), made("8")), cache.store(key(text("64")), made("64"))
    wide.write_bytes(narrow.read_bytes())
    assert cache.find(key(text("64"))) is None
    assert not wide.exists() and not wide.with_suffix(".json").exists()
    assert cache.find(key(text("8"))) is not None


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"main": 5}', b'{"main": {"n0": {"lower": 1}}}', b'{"\xff": {}}', b"[" * 100_000]
    + [b'{"main": {"n0": {"lower": 1, "upper": 64, "multiple_of": 0}}}', b" " * (MAX_SIDECAR_BYTES + 1), b"{}", b'{"other": {}}'],
    ids=lambda content: str(content[:40]),
)
def test_a_sidecar_that_does_not_parse_is_a_miss(content: bytes, tmp_path: Path, executable: Executable) -> None:
    cache = Cache(tmp_path)
    path = cache.store(key(text()), executable)
    path.with_suffix(".json").write_bytes(content)
    assert cache.find(key(text())) is None
    cache.store(key(text()), executable)
    assert cache.find(key(text())) is not None


def test_a_named_pipe_in_the_cache_holds_nobody_up(tmp_path: Path, executable: Executable) -> None:
    cache = Cache(tmp_path)
    path = cache.store(key(text()), executable)
    for pipe in (path, path.with_suffix(".json")):
        pipe.unlink()
        os.mkfifo(pipe)
        assert cache.find(key(text())) is None
        pipe.unlink()
        cache.store(key(text()), executable)


@pytest.mark.parametrize("suffix", [".rsx", ".json"])
def test_a_named_pipe_in_an_entry_s_place_is_replaced(suffix: str, tmp_path: Path, executable: Executable) -> None:
    """A named pipe at the path of an entry is replaced. Opening it for writing would block until somebody reads it."""
    path = (cache := Cache(tmp_path)).store(key(text()), executable)
    path.with_suffix(suffix).unlink()
    os.mkfifo(path.with_suffix(suffix))
    cache.store(key(text()), executable)
    assert cache.find(key(text())) is not None
    assert sorted(file.suffix for file in tmp_path.iterdir() if file.name != KEY_FILE) == [
        ".json",
        ".rsx",
    ]


def test_a_damaged_entry_is_removed_and_counts_as_absent(tmp_path: Path, executable: Executable, caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(tmp_path)
    path = cache.store(key(text()), executable)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    path.write_bytes(content)
    assert cache.find(key(text())) is None
    assert str(path) in caplog.text
    assert [file.name for file in tmp_path.iterdir()] == [KEY_FILE]


def test_a_folder_that_may_only_be_read_serves(tmp_path: Path, executable: Executable, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    cache.store(key(text()), executable)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    assert cache.find(key(text())) is not None
    monkeypatch.setattr(Executable, "load", refuse)  # loading fails as if another process had just removed the entry
    assert cache.find(key(text())) is None


def test_hits_and_misses_are_told_at_level_one(tmp_path: Path, executable: Executable, capsys: pytest.CaptureFixture[str]) -> None:
    cache = Cache(tmp_path)
    with flags.scope(debug=1):
        cache.find(key(text()))
        path = cache.store(key(text()), executable)
        cache.find(key(text()))
    miss, hit = capsys.readouterr().err.splitlines()
    assert key(text()).digest in miss and path.name in hit
    cache.find(key(text()))
    assert capsys.readouterr().err == ""


def test_half_an_entry_is_none(tmp_path: Path, executable: Executable) -> None:
    cache = Cache(tmp_path)
    path = cache.store(key(text()), executable)
    path.with_suffix(".json").write_text("{")
    assert cache.find(key(text())) is None
    assert list(cache.entries()) == []


# --- archives of entries -------------------------------------------------------------------------------------------------


def test_an_archive_carries_entries_to_another_folder(tmp_path: Path) -> None:
    here, there = Cache(tmp_path / "here"), Cache(tmp_path / "there")
    for upper in ("16", "32"):
        here.store(key(text(upper)), made(upper))
    archive = tmp_path / "all.tar"
    here.export(archive, here.entries())
    there.folder.mkdir()
    shutil.copyfile(here.folder / KEY_FILE, there.folder / KEY_FILE)
    (there.folder / KEY_FILE).chmod(0o600)
    assert {e.path.name for e in there.load_archive(archive)} == {e.path.name for e in here.entries()}
    assert there.find(key(text("8"))) is not None
    assert sorted(p.name for p in there.folder.iterdir()) == sorted(p.name for p in here.folder.iterdir())


def test_entries_that_a_tool_has_linked_travel_whole(tmp_path: Path, executable: Executable) -> None:
    """Tools that find equal files replace them by hard links."""
    here, there = Cache(tmp_path / "here"), Cache(tmp_path / "there")
    paths = [here.store(key(text(body=body)), executable) for body in ("y = exp(x)", "y = tanh(x)")]
    first, second = (path.with_suffix(".json") for path in paths)
    assert first.read_bytes() == second.read_bytes()
    second.unlink()
    second.hardlink_to(first)
    here.export(tmp_path / "all.tar", here.entries())
    there.folder.mkdir()
    shutil.copy(here.folder / KEY_FILE, there.folder / KEY_FILE)
    assert len(there.load_archive(tmp_path / "all.tar")) == 2


def test_an_archive_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="cannot be written: No such file or directory"):
        Cache(tmp_path).export(tmp_path / "none" / "x.tar", [])


def test_an_older_archive_stays_if_the_new_one_has_no_room(tmp_path: Path, executable: Executable) -> None:
    cache, archive = Cache(tmp_path / "cache"), tmp_path / "all.tar"
    cache.store(key(text()), executable)
    archive.write_bytes(b"older")
    with room_for(10), pytest.raises(CacheError, match="cannot be written: File too large"):
        cache.export(archive, cache.entries())
    assert archive.read_bytes() == b"older" and {path.name for path in tmp_path.iterdir()} == {"cache", "all.tar"}
    (link := tmp_path / "link.tar").symlink_to(archive)
    cache.export(link, cache.entries())
    assert link.is_symlink() and tarfile.is_tarfile(archive)


def test_an_archive_is_written_over_in_a_folder_that_takes_no_new_file(tmp_path: Path, executable: Executable) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write to any folder")
    cache, archive = Cache(tmp_path / "cache"), tmp_path / "closed" / "all.tar"
    cache.store(key(text()), executable)
    archive.parent.mkdir()
    archive.write_bytes(b"older")
    archive.parent.chmod(0o500)
    cache.export(archive, cache.entries())
    assert tarfile.is_tarfile(archive)


def test_an_archive_takes_the_place_of_a_link_to_itself(tmp_path: Path) -> None:
    (loop := tmp_path / "loop.tar").symlink_to(loop)
    Cache(tmp_path / "cache").export(loop, [])
    assert not loop.is_symlink() and tarfile.is_tarfile(loop)


@pytest.mark.parametrize("name", ["../evil.rsx", "/tmp/evil.rsx", "notes.txt", f"{'0' * 32}-{'0' * 8}.py"])
def test_an_archive_that_holds_anything_else_is_refused(tmp_path: Path, name: str) -> None:
    archive = tmp_path / "bad.tar"
    with tarfile.open(archive, "w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    cache = Cache(tmp_path / "cache")
    with pytest.raises(CacheError, match="expected only files that `cache export` writes"):
        cache.load_archive(archive)
    assert not list(cache.folder.iterdir())


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
def test_an_archive_with_a_link_or_a_special_file_is_refused(tmp_path: Path, kind: bytes) -> None:
    archive, member = tmp_path / "bad.tar", tarfile.TarInfo(f"{'0' * 32}-{'0' * 8}.rsx")
    member.type, member.linkname = kind, "nowhere"
    with tarfile.open(archive, "w") as tar:
        tar.addfile(member)
    with pytest.raises(CacheError, match="expected only files that `cache export` writes"):
        Cache(tmp_path / "cache").load_archive(archive)


def test_an_archive_that_cannot_be_taken_in_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match=r"all.tar cannot be imported into .*/file/executables: Not a directory"):
        Cache(tmp_path / "file" / "executables").load_archive(tmp_path / "all.tar")
    with pytest.raises(CacheError, match=r"all.tar cannot be imported into .*: No such file or directory"):
        Cache(tmp_path / "cache").load_archive(tmp_path / "all.tar")


def header_of_huge_extension() -> bytes:
    """Return a damaged header, with more bytes than Python can count."""
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 1 << 66
    return header.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("content", [b"nothing of the kind", header_of_huge_extension()], ids=["text", "size"])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    archive = tmp_path / "bad.tar"
    archive.write_bytes(content)
    with pytest.raises(CacheError, match="is not an archive of cache entries"):
        Cache(tmp_path / "cache").load_archive(archive)


def test_an_archive_with_a_size_beyond_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tarfile, "open", Mock(side_effect=MemoryError))
    with pytest.raises(CacheError, match=r"is not an archive of cache entries \(a size in it is damaged\)"):
        Cache(tmp_path / "cache").load_archive(tmp_path / "bad.tar")


def test_a_damaged_executable_in_an_archive_leaves_the_cache_as_it_was(tmp_path: Path, executable: Executable) -> None:
    here, there = Cache(tmp_path / "here"), Cache(tmp_path / "there")
    path = here.store(key(text()), executable)
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    archive = tmp_path / "bad.tar"
    here.export(archive, here.entries())
    with pytest.raises(CacheError, match="damaged or sealed with another key"):
        there.load_archive(archive)
    assert not list(there.entries())


def test_an_archive_of_another_key_is_refused(tmp_path: Path, executable: Executable) -> None:
    """An archive contains code, so its seals must be those of this installation or of a shared key."""
    here, there = Cache(tmp_path / "here"), Cache(tmp_path / "there")
    here.store(key(text()), executable)
    here.export(tmp_path / "all.tar", here.entries())
    with pytest.raises(CacheError, match=r"another key.*RELAXSERVE_CACHE_KEY_FILE"):
        there.load_archive(tmp_path / "all.tar")
    assert not list(there.entries())


def test_an_archive_of_another_version_is_refused(tmp_path: Path, executable: Executable, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Cache(tmp_path / "here")
    path = here.store(key(text()), executable)
    here.export(tmp_path / "all.tar", here.entries())
    monkeypatch.setattr("runtime.executable.FORMAT_VERSION", 0)
    with pytest.raises(CacheError, match=rf"all.tar holds {path.name}, which another version of relaxserve wrote"):
        here.load_archive(tmp_path / "all.tar")


@pytest.mark.parametrize("content", [None, "{"])
def test_an_archive_without_the_ranges_of_an_executable_is_refused(tmp_path: Path, executable: Executable, content: str | None) -> None:
    here = Cache(tmp_path / "here")
    whole, half = (here.store(key(text(upper)), made(upper)) for upper in ("16", "32"))
    sidecar = half.with_suffix(".json")
    sidecar.unlink()
    if content is not None:
        sidecar.write_text(content)
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        for path in (whole, whole.with_suffix(".json"), half, *([] if content is None else [sidecar])):
            tar.add(path, path.name)
    whole.unlink()
    with pytest.raises(CacheError, match=rf"all.tar holds {sidecar.name}, which is damaged"):
        here.load_archive(tmp_path / "all.tar")
    assert not whole.exists()


# --- who may write to the folder -----------------------------------------------------------------------------------------


def test_code_of_whoever_lacks_the_key_is_compiled_again(tmp_path: Path, executable: Executable, caplog: pytest.LogCaptureFixture) -> None:
    """An entry with valid checksums but a seal of another key counts as damaged, and the log says so."""
    hostile, cache = Cache(tmp_path / "hostile"), Cache(tmp_path / "cache")
    cache.store(key(text()), executable)
    path = hostile.store(key(text()), executable)
    (cache.folder / path.name).write_bytes(path.read_bytes())
    assert cache.find(key(text())) is None
    assert "another key" in caplog.text and not list(cache.entries())


def test_a_sidecar_is_sealed_with_its_executable(tmp_path: Path) -> None:
    """The seal of an executable also covers its sidecar file. So nobody can change ranges that the executable itself cannot check, such as
    those of expressions."""
    cache = Cache(tmp_path)
    path = cache.store(key(text()), made())
    sidecar = path.with_suffix(".json")
    sidecar.write_bytes(sidecar.read_bytes().replace(b"64", b"65"))
    with pytest.raises(DamagedFile, match="seal"):
        cache.verify(path)


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, executable: Executable) -> None:
    """The cache neither reads from nor writes to a folder that other users can write to."""
    cache = Cache(tmp_path)
    cache.store(key(text()), executable)
    tmp_path.chmod(0o777)
    for use in (lambda: cache.find(key(text())), lambda: cache.store(key(text()), executable)):
        with pytest.raises(UnsafeCache, match=f"owner {os.geteuid()}, .*mode 0777.*chmod go-w {tmp_path}"):
            use()
