"""If the last process that used a cached file did not end cleanly, the file is verified before the model starts. Otherwise it is verified
while the worker runs."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy import use, verification
from deploy.use import begin_use, left_behind, markers_of
from deploy.verification import damage_of
from runtime import sections
from runtime.sealed import key_of
from runtime.sections import SectionFile
from tests.deploy.flushing import join_flush
from tests.disk import refuse_new_files
from tests.process_states import is_running

ROOT = Path(__file__).parents[2]
HOLD = """
import sys
from pathlib import Path
from deploy.use import begin_use
begin_use(Path(sys.argv[1]))
print("ready", flush=True)
input()
"""


def write(path: Path, contents: dict[str, bytes]) -> None:
    sizes = {name: len(content) for name, content in contents.items()}
    with sections.writing(path, sizes, key_of(path.parent), synced=False) as put:
        for name, content in contents.items():
            put(name, memoryview(content))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights" / "w.rsw"
    write(path, {"a": bytes(100), "b": bytes(range(256)) * 4000})
    return path


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@contextmanager
def user(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process that has the file marked as used until the process's standard input is closed."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        if process.poll() is None:
            process.communicate("\n", timeout=60)


def test_a_process_that_ends_in_order_leaves_no_marker(path: Path) -> None:
    with user(path):
        (marker,) = markers_of(path)
        assert marker.name.startswith("w.rsw.used-") and left_behind(path) == []
    assert markers_of(path) == []


def test_the_marker_stays_until_the_disk_has_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start that writes a file does not wait for the disk. A power failure before an orderly end leaves the marker."""
    found: list[int] = []
    monkeypatch.setattr(use.os, "fsync", lambda _: found.append(len(markers_of(path))))
    write(path, {"a": bytes(100)})
    assert found == []
    own = use.Use(path)
    own.end()
    assert found == [1] and markers_of(path) == []


def test_a_file_that_the_disk_refuses_is_verified_by_the_next_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(use.os, "fsync", fail)
        use.Use(path).end()
    assert len(left_behind(path)) == 1
    flip(path)
    assert begin_use(path) == path and not path.exists()


def test_a_file_that_cannot_be_opened_is_verified_by_the_next_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without free file descriptors does not know whether the disk has the file."""

    def refuse(*_: object, **__: object) -> int:
        raise OSError(24, "Too many open files")

    own = use.Use(path)
    with monkeypatch.context() as patched:
        patched.setattr(use.os, "open", refuse)
        own.end()
    assert len(left_behind(path)) == 1
    flip(path)
    assert begin_use(path) == path and not path.exists()


def test_a_missing_file_needs_no_marker(path: Path) -> None:
    own = use.Use(path)
    path.unlink()
    own.end()
    assert markers_of(path) == []


def test_a_failure_of_the_disk_that_a_thread_has_seen_counts_at_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first wait after a failure reports it."""
    results = iter([OSError(5, "Input/output error"), None])

    def report_once(_: int) -> None:
        if (fault := next(results)) is not None:
            raise fault

    own = use.Use(path)
    monkeypatch.setattr(use.os, "fsync", report_once)
    use.flush([path, path.with_name("missing")])
    join_flush()
    own.end()
    assert next(results, "none") == "none" and len(left_behind(path)) == 1


def test_markers_stay_if_none_can_be_added(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing would show after a power failure that the file may be incomplete."""
    with user(path) as process:
        process.kill()
    before = left_behind(path)
    with monkeypatch.context() as patched:
        refuse_new_files(patched, errno.ENOSPC)
        assert begin_use(path) == path and left_behind(path) == before != []
    assert begin_use(path) == path and left_behind(path) == []


def test_a_process_that_was_killed_leaves_a_marker(path: Path) -> None:
    with user(path) as process, user(path):
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        assert len(markers_of(path)) == 2 and len(left_behind(path)) == 1


def test_a_damaged_file_is_removed_where_the_last_user_was_killed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with user(path) as process:
        process.kill()
    flip(path)
    assert begin_use(path) == path and not path.exists() and left_behind(path) == []
    assert "section 'b' is damaged: its checksum differs" in caplog.text and "built again" in caplog.text


def test_a_sound_file_stays_and_is_verified_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with user(path) as process:
        process.kill()
    verified: list[Path] = []
    monkeypatch.setattr(SectionFile, "verify", lambda self, _: verified.append(self.path))
    for _ in range(2):
        assert begin_use(path) == path and path.exists()
    assert verified == [path]


def test_a_start_after_an_orderly_end_reads_no_weights(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with user(path):
        pass
    monkeypatch.setattr(SectionFile, "verify", lambda *_: pytest.fail("it was read"))
    assert begin_use(path) == path


def test_a_restart_by_the_server_reads_no_weights(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with user(path) as process:
        process.kill()
    with monkeypatch.context() as patched:
        patched.setattr(SectionFile, "verify", lambda *_: pytest.fail("it was read"))
        assert begin_use(path, restart=True) == path and left_behind(path) == []
    flip(path)
    # A restart verifies the file only with `verify=True`, which the server passes if the last worker found damage.
    assert begin_use(path, restart=True, verify=True) == path and not path.exists()


def test_a_start_that_is_told_to_verifies(path: Path) -> None:
    flip(path)
    assert begin_use(path, verify=True) == path and not path.exists()


def test_a_damaged_file_that_cannot_be_removed_is_not_used(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    flip(path)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert begin_use(path, verify=True) is None
    assert "cannot be removed (Permission denied): remove it as the user that owns the folder" in caplog.text


def test_a_file_of_which_the_disk_cannot_read_a_page_is_not_used(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the page were read in the mapped file, SIGBUS would kill the worker. If the file also stays, because the file system is read-only,
    the same would happen in each worker."""

    class Unreadable(io.BytesIO):
        def read(self, _size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(use, "opened", lambda _: Unreadable(), raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        assert begin_use(path, verify=True) is None and path.exists()
    assert f"{path} cannot be read: Input/output error; it cannot be removed (Read-only file system)" in caplog.text
    assert begin_use(path, verify=True) == path and not path.exists()


def test_each_half_of_a_verification_tells_its_progress(path: Path) -> None:
    """A load that tells no progress for some minutes is given up, and reading the file may take that long."""
    seen: list[float] = []
    begin_use(path, verify=True, progress=seen.append)
    assert seen == [0.5, 0.75, 1.0]


def test_a_folder_that_may_only_be_read_needs_no_marker(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_new_files(monkeypatch, errno.EROFS)
    assert begin_use(path) == path and markers_of(path) == []


def test_a_file_system_without_locks_keeps_no_files_of_markers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each start would leave one."""

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    before = sorted(path.parent.iterdir())
    monkeypatch.setattr(use.fcntl, "flock", refuse)
    assert begin_use(path) == path and sorted(path.parent.iterdir()) == before


# --- verification in the background -------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", ["a", "b"])
def test_another_process_tells_what_is_damaged(section: str, path: Path) -> None:
    assert damage_of(path) == ""
    flip(path, SectionFile(path, key_of(path.parent))._sections[section].offset)
    assert damage_of(path) == f"{path}: section {section!r} is damaged: its checksum differs"
    path.unlink()
    assert damage_of(path) == "", "a missing file is not damaged: it is built again"


CUT = """
import os, sys
from pathlib import Path
import deploy.verification as v
v._Pace.__call__ = lambda _: os.truncate(sys.argv[1], 4096)
v.main([Path(sys.argv[1])])
"""


def test_a_file_that_kills_its_verification_is_damaged(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel kills a process that reads a mapped page which the disk cannot read, or which lies beyond the end of the file."""
    write(path, {"a": bytes(100), "b": bytes(1 << 16)})
    monkeypatch.setattr(verification, "COMMAND", (sys.executable, "-c", CUT))
    assert damage_of(path) == f"{path} cannot be read: its verification was killed by SIGBUS"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("/missing/python",), "No such file or directory"),
        ((sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"), "ended early (killed by SIGKILL)"),
        ((sys.executable, "-c", "raise SystemExit(3)"), "ended early (exit status 3)"),
    ],
    ids=["not started", "killed", "failed"],
)
def test_a_file_that_could_not_be_verified_is_named(
    path: Path, command: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That nothing was verified is no reason to remove an undamaged file, but nobody may take it for verified. Nobody would verify it
    later, because the process that uses it may end normally."""
    monkeypatch.setattr(verification, "COMMAND", command)
    assert damage_of(path) == ""
    assert f"{path} could not be verified" in caplog.text and why in caplog.text


def test_verification_runs_when_nothing_else_does() -> None:
    script = "import os, deploy.verification as v; v.main([]); print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))"
    said = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said == f"{os.SCHED_IDLE} 19\n"


def test_verification_ends_with_its_worker(path: Path) -> None:
    """A verification process ends when its worker ends, because nobody would read its result."""
    write(path, {"large": bytes(64 << 20)})
    script = "import os, sys, subprocess; print(subprocess.Popen([sys.executable, '-m', 'deploy.verification', sys.argv[1]]).pid)"
    orphan = int(subprocess.run([sys.executable, "-c", script, str(path)], cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    while is_running(orphan):
        os.sched_yield()
