"""The cache folder: which files may be pruned, and that no file is pruned while a load is writing it."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from compiler.cache import Cache, Key, Range
from deploy.cache import CannotRemove, Item, Kept, NoKey, Part
from deploy.quality.label import keep_label, kept_label
from runtime import flags, sealed, sections
from runtime.executable import Bound, Executable, ExecutableMeta, VMFunction
from runtime.whole_files import ABANDONED_S
from server.messages import QualityLabel
from tests.disk import refuse_renames

KEYS = [digit * 32 for digit in "abc"]
DIGEST = "1" * 32
SIZE = 10_000  # size of each file of packed weights in bytes; programs are smaller


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def program(kept: Kept, key: str, *, upper: int = 8, age_s: float = 0.0) -> Path:
    main = VMFunction("main", (), 0, ("n",), (Bound("n", 0, 0, upper),), (), variables=(0,))
    executable = Executable(ExecutableMeta("none", {"main": main}, (), ()), b"", [], {})
    return aged(kept.executables.store(Key(key, "", {"main": {"n0": Range(0, upper, 1)}}), executable), age_s)


def weights(kept: Kept, key: str, digest: str = DIGEST, *, age_s: float = 0.0) -> Path:
    path = kept.weights_of(key, digest)
    with sections.writing(path, {"w": SIZE}, sealed.key_of(path.parent)) as put:
        put("w", memoryview(bytes(SIZE)))
    return aged(path, age_s)


def aged(path: Path, age_s: float) -> Path:
    os.utime(path, (then := time.time() - age_s, then))
    return path


def names(items: list[Item]) -> list[str]:
    return [item.paths[0].name for item in items]


def files(kept: Kept) -> set[str]:
    return {path.name for path in kept.folder.rglob("*") if path.is_file() and path.name != sealed.KEY_FILE}


def test_weights_go_with_the_last_program_that_reads_them(kept: Kept) -> None:
    narrow, wide = program(kept, KEYS[0]), program(kept, KEYS[0], upper=16)
    packed, orphan = weights(kept, KEYS[0]), weights(kept, KEYS[1])
    assert names(kept.prune()) == [orphan.name] and packed.exists() and not orphan.exists()
    narrow.unlink()
    assert packed.name not in names(kept.prune())
    wide.unlink()
    assert packed.name in names(kept.prune())


def test_a_dry_run_says_the_same_and_does_nothing(kept: Kept) -> None:
    program(kept, KEYS[0], age_s=100)
    weights(kept, KEYS[0], age_s=100)
    weights(kept, KEYS[1])
    before = files(kept)
    for options in ({}, {"keep_bytes": SIZE}, {"keep_bytes": 0}, {"keep_bytes": 0, "keep_s": 50.0}):
        said = kept.prune(**options, dry_run=True)
        assert said and files(kept) == before
    assert kept.prune(keep_bytes=0, keep_s=50.0) == said


def test_the_longest_unused_goes_first_of_either_kind(kept: Kept) -> None:
    programs = [program(kept, key, age_s=1000) for key in KEYS]
    packed = [weights(kept, key, age_s=age) for key, age in zip(KEYS, (900, 600, 300), strict=True)]
    small = sum(path.stat().st_size for path in programs)
    size = packed[0].stat().st_size
    assert kept.prune(keep_bytes=3 * size + small) == []
    assert names(kept.prune(keep_bytes=2 * size + small)) == [packed[0].name], "a program is as recent as its weights"
    assert names(kept.prune(keep_bytes=0, keep_s=700)) == [programs[0].name]
    assert names(kept.prune(keep_bytes=0, keep_s=450)) == [packed[1].name, programs[1].name]
    assert names(kept.prune(keep_bytes=0)) == [packed[2].name, programs[2].name]
    assert files(kept) == set()


def test_of_many_checkpoints_of_a_program_the_unused_go(kept: Kept) -> None:
    """If several checkpoints have packed weights for one program, the packed weights that are no longer used are pruned. This happens when
    a model is retrained and replaced several times."""
    path = program(kept, KEYS[0], age_s=1)
    packed = [weights(kept, KEYS[0], str(i) * 32, age_s=100 * (i + 1)) for i in range(4)]
    assert set(names(kept.prune(keep_bytes=0, keep_s=150))) == {p.name for p in packed[1:]}
    assert packed[0].exists() and path.exists()


def test_what_a_load_is_writing_stays_and_what_it_left_long_ago_goes(kept: Kept) -> None:
    program(kept, KEYS[0])
    with sections.writing(kept.weights_of(KEYS[0], DIGEST), {"w": SIZE}) as put:
        assert kept.prune() == []
        (half,) = kept.weights_of(KEYS[0], DIGEST).parent.iterdir()
        put("w", memoryview(bytes(SIZE)))
    assert not half.exists() and kept.prune() == []
    half.write_bytes(bytes(10))
    without_ranges = kept.executables.folder / f"{KEYS[1]}-00000000.rsx"
    without_ranges.write_bytes(bytes(10))
    cut_import = kept.executables.folder / ".import-abc"
    cut_import.mkdir()
    (cut_import / "x").write_bytes(bytes(10))
    assert kept.prune() == []
    for path in (half, without_ranges, cut_import):
        aged(path, 2 * ABANDONED_S)
    gone = kept.prune()
    assert {item.part for item in gone} == {Part.LEFTOVER} and sum(item.num_bytes for item in gone) == 30
    assert not (half.exists() or without_ranges.exists() or cut_import.exists())
    assert len(list(kept.executables.entries())) == 1


def test_what_starts_read_counts_as_used(kept: Kept) -> None:
    """A label, a tokenizer or a digest is written once and read by every start."""
    keep_label(kept, "fp", label := QualityLabel(0.1, 0.9, 8.0, 7.5, 100))
    (path,) = kept.label_of(KEYS[0]).parent.glob("*.label")
    aged(path, 100)
    assert names(kept.prune(keep_bytes=0, keep_s=50, dry_run=True)) == [path.name]
    assert kept_label(kept, "fp") == label
    assert kept.prune(keep_bytes=0, keep_s=50) == []


def test_what_is_not_ours_stays(kept: Kept) -> None:
    program(kept, KEYS[0])
    weights(kept, KEYS[0])
    for folder in (kept.executables.folder, kept.weights_of(KEYS[0], DIGEST).parent):
        for name in ("notes.txt", ".hidden", "mine.rsw"):
            (folder / name).touch()
            aged(folder / name, 2 * ABANDONED_S)
    kept.prune(keep_bytes=0)
    assert files(kept) == {"notes.txt", ".hidden", "mine.rsw"}


def test_what_is_mapped_is_read_on(kept: Kept) -> None:
    program(kept, KEYS[0])
    path = kept.weights_of(KEYS[0], DIGEST)
    with sections.writing(path, {"w": 40_000}) as put:
        put("w", memoryview(np.arange(5000, dtype=np.int64)).cast("B"))
    mapped = np.frombuffer(sections.SectionFile(path).read("w", verify=False), np.int64)
    kept.prune(keep_bytes=0)
    assert not path.exists() and mapped.sum() == 5000 * 4999 // 2


def test_markers_go_with_their_weights_and_not_before(kept: Kept) -> None:
    """A file's marker of use is pruned only together with the file, even if the marker is days old: a running server may have written it,
    and it is needed to find out whether that server ended cleanly."""
    program(kept, KEYS[0])
    packed = weights(kept, KEYS[0])
    (marker := packed.with_name(f"{packed.name}.used-abc")).touch()
    aged(marker, 2 * ABANDONED_S)
    assert kept.prune() == [] and marker.exists()
    kept.prune(keep_bytes=0)
    assert not marker.exists() and not packed.exists()


def test_verifying_names_what_is_damaged_and_what_is_sound(kept: Kept) -> None:
    programs = [program(kept, key) for key in KEYS]
    packed = [weights(kept, key) for key in KEYS[:2]]
    assert [(path, fault) for path, fault in kept.verify()] == [(path, "") for path in (*programs, *packed)]
    programs[0].with_suffix(".json").write_text("{")
    for path, section, keys in ((programs[1], "program", ()), (packed[1], "w", (sealed.key_of(packed[1].parent),))):
        content = bytearray(path.read_bytes())
        content[sections.SectionFile(path, *keys)._sections[section].offset] ^= 1
        path.write_bytes(content)
    programs[2].with_suffix(".json").unlink()
    faults = dict(kept.verify())
    assert "section 'sidecar' is damaged" in faults[programs[0]] and "section 'sidecar' is damaged: it is missing" in faults[programs[2]]
    assert "section 'seal' is damaged" in faults[programs[1]] and "section 'w' is damaged: its checksum differs" in faults[packed[1]]
    assert faults[packed[0]] == ""
    for path, fault in faults.items():
        if fault:
            kept.remove(path)
    assert files(kept) == {packed[0].name}


def test_what_is_removed_during_a_verification_is_not_damaged(kept: Kept) -> None:
    """A server that runs meanwhile trims the machine code of kernels."""
    removed = [weights(kept, key) for key in KEYS]
    found = kept.verify()
    assert next(found) == (removed[0], "")
    removed[1].unlink()
    assert list(found) == [(removed[2], "")]


@pytest.mark.parametrize("cause", ["named", "open", "absent", "fifo"])
def test_without_the_key_nothing_counts_as_damaged(kept: Kept, tmp_path: Path, cause: str) -> None:
    """Otherwise a wrong path in RELAXSERVE_CACHE_KEY_FILE would let `cache verify --remove` empty a cache that replicas share."""
    packed = weights(kept, KEYS[0])
    key_file = tmp_path / "nowhere" if cause == "named" else None
    if cause == "open":
        (packed.parent / sealed.KEY_FILE).chmod(0o644)
    if cause in ("absent", "fifo"):
        (packed.parent / sealed.KEY_FILE).unlink()
    if cause == "fifo":
        os.mkfifo(packed.parent / sealed.KEY_FILE)
    remedy = f"set RELAXSERVE_CACHE_KEY_FILE to .*, or remove the files in {packed.parent}, which are built again"
    with flags.scope(cache_key_file=key_file), pytest.raises(NoKey, match=remedy):
        list(kept.verify())
    assert packed.exists() and (packed.parent / sealed.KEY_FILE).exists() == (cause != "absent")


def test_the_administration_clears_weights_too_but_no_labels(kept: Kept) -> None:
    """A label, a quantised matrix or a kernel is of use without a compiled model, and a loaded model may have it."""
    for key in KEYS:
        program(kept, key)
        weights(kept, key)
    keep_label(kept, "fp", QualityLabel(0.1, 0.9, 8.0, 7.5, 100))
    staying = {path.name for path in (*kept.folder.rglob(f"{KEYS[1]}*"), *kept.folder.rglob("*.label"))}
    assert kept.clear(keep=frozenset({KEYS[1]})) > 2 * SIZE
    assert files(kept) == staying and len(staying) == 4


def test_a_full_disk_gets_no_parts_of_files(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start would add some, and nothing but a prune would remove them."""
    program(kept, KEYS[0])
    before = files(kept)
    refuse_renames(monkeypatch, errno.ENOSPC, (".json", ".models"))
    kept.remember_model(KEYS[0], "org/model")
    with pytest.raises(OSError, match="No space left"):
        program(kept, KEYS[1])
    assert files(kept) == before


def test_a_full_disk_takes_away_no_entry(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server has stored the same program before."""
    path = program(kept, KEYS[0])
    refuse_renames(monkeypatch, errno.ENOSPC, (".json",))
    with pytest.raises(OSError, match="No space left"):
        program(kept, KEYS[0])
    assert list(kept.verify()) == [(path, "")]


def test_an_empty_folder_has_nothing(tmp_path: Path) -> None:
    nowhere = Kept(tmp_path / "nowhere")
    assert nowhere.items() == [] == nowhere.prune(keep_bytes=0) and not nowhere.folder.exists()


def test_who_may_not_remove_is_told(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    program(kept, KEYS[0])

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(CannotRemove, match=r"rsx cannot be removed: Permission denied; remove it as the user that owns the folder"):
        kept.prune(keep_bytes=0)


def test_what_may_be_removed_is_removed_although_something_else_may_not(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that once ran as another user has left a folder of that user, for example."""
    packed, unlink = [weights(kept, key) for key in KEYS], Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == packed[0]:
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(CannotRemove, match=f"{packed[0].name} cannot be removed"):
        kept.clear(keep=frozenset())
    assert files(kept) == {packed[0].name}


@pytest.mark.parametrize(
    "content",
    ['{"levels": [{"target": "wasm-simd128"}]}', '{"levels": [{"shards": [{"file": 1, "sha256": ""}]}]}', "{}"]
    + ['{"levels": [{"shards": [{"file": "w\\u0000", "sha256": ""}]}]}'],
)
def test_an_export_that_does_not_state_its_weights_is_damaged(kept: Kept, content: str) -> None:
    place = kept.export_of(KEYS[0])
    place.mkdir(parents=True)
    (place / "program.json").write_text(content)
    ((path, fault),) = kept.verify()
    assert path == place and fault.startswith("program.json is damaged: ")


def test_an_export_is_removed_from_a_full_disk_and_is_no_export_before(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new folder needs room on the disk, and a prune is to make room."""
    place = kept.export_of(KEYS[0])
    place.mkdir(parents=True)
    (place / "program.json").write_text("{}")
    aged(place, 2 * ABANDONED_S)
    rmtree = shutil.rmtree

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(shutil, "rmtree", interrupt)
    with pytest.raises(KeyboardInterrupt):
        kept.prune(keep_bytes=0)
    assert [item.part for item in kept.items()] == [Part.LEFTOVER]
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert len(kept.prune()) == 1 and not [*place.parent.iterdir()]


def test_an_import_that_is_cut_off_is_known(kept: Kept, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Path] = []
    monkeypatch.setattr(Cache, "paths", lambda self, _="": seen.append(self.folder) or [])
    program(kept, KEYS[0])
    kept.executables.export(tmp_path / "all.tar", [])
    kept.executables.load_archive(tmp_path / "all.tar")
    assert seen[0].parent == kept.executables.folder and seen[0].name.startswith(".import-")


def test_a_program_remembers_the_models_that_were_loaded_with_it(tmp_path: Path) -> None:
    """A record lists the last models that were loaded with a program, newest first and without duplicates. It is pruned together with the
    program."""
    folder = Kept(tmp_path)
    (tmp_path / "executables").mkdir()
    key = "a" * 32
    assert folder.models_of(key) == []
    for source in ("/models/one", "/models/two", "/models/one", *(f"/models/{n}" for n in range(9))):
        folder.remember_model(key, source)
    assert folder.models_of(key)[0] == "/models/8" and len(folder.models_of(key)) == 8
    assert len(set(folder.models_of(key))) == 8
    folder.remember_model("b" * 32, "demo")
    assert folder.models_of("b" * 32) == ["demo"]


def test_a_cache_that_may_only_be_read_remembers_nothing(tmp_path: Path) -> None:
    Kept(tmp_path / "absent").remember_model("a" * 32, "demo")
    assert Kept(tmp_path / "absent").models_of("a" * 32) == []


def test_assembled_code_goes_with_its_program_and_is_verified(kept: Kept) -> None:
    used, orphan = (kept.assembled_of(key).with_name(f"{key}-{DIGEST[:16]}.cubin") for key in KEYS[:2])
    path = program(kept, KEYS[0])
    for file in (used, orphan):
        sealed.store(file, b"code")
    assert names(kept.prune()) == [orphan.name] and used.exists()
    assert [fault for file, fault in kept.verify() if file == used] == [""]
    used.write_bytes(used.read_bytes()[:-1])
    ((_, fault),) = ((file, fault) for file, fault in kept.verify() if fault)
    assert "section 'seal' is damaged" in fault
    kept.remove(used)
    assert not used.exists() and path.exists() and path.with_suffix(".json").exists()


def test_a_source_is_known_as_loaded_once_its_program_and_its_weights_are_stored(tmp_path: Path) -> None:
    folder, key = Kept(tmp_path), "a" * 32
    assert not folder.has_loaded("/models/one")
    (tmp_path / "executables").mkdir()
    (tmp_path / "weights").mkdir()
    folder.remember_model(key, "/models/one")
    assert not folder.has_loaded("/models/one"), "its weights are not packed yet"
    folder.weights_of(key, "0" * 32).touch()
    assert folder.has_loaded("/models/one") and not folder.has_loaded("/models/two")
