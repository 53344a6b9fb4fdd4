"""Files of the cache that hold machine code: who may write them, and a seal that only the holder of a key can make.

    store(path, code)          write the code and its seal
    code = load(path)          return the code; raise DamagedFile if the seal is wrong, OSError or UnsafeCache if the file cannot be used
    code = recall(path)        return the code, or None if `load` would raise an error
    seal, unseal               the same for bytes in memory

Nothing of a file is parsed before its seal is verified. The key of a folder is in its file `.key`, which only its owner can read. Another
user can replace this file only by a file that he owns, and such a file is refused. RELAXSERVE_CACHE_KEY_FILE names a key that is kept
elsewhere, for replicas that share one volume. Somebody who can write to the volume but lacks this key cannot run code, so with this
variable the owners of files do not matter.
"""

from __future__ import annotations

import fcntl
import grp
import hashlib
import hmac
import mmap
import os
import pwd
import secrets
import stat
from contextlib import suppress
from functools import cache
from io import BufferedReader
from itertools import takewhile
from pathlib import Path

from runtime import flags
from runtime.errors import DamagedFile, RuntimeFault, UnsafeCache
from runtime.files import regular
from runtime.whole_files import replacing

KEY_FILE = ".key"
SEAL_BYTES = 32
MIN_KEY_BYTES, MAX_KEY_BYTES = 32, 4096
_VARIABLE = "RELAXSERVE_CACHE_KEY_FILE"


# --- seals ---------------------------------------------------------------------------------------------------------------


def store(path: Path, content: bytes, name: str = "") -> None:
    """Write content and its seal. Readers see either the old file or the complete new file. After a power failure the file may be
    incomplete, which the seal reveals. If `name` is given, it is sealed instead of the name of the file."""
    make_private(path.parent)
    sealed = seal(content, name or path.name, key_of(path.parent))
    with replacing(path, synced=False) as file:
        file.write(sealed)


def load(path: Path, name: str = "", key: bytes | None = None) -> memoryview:
    """Return the content of a file that `store` wrote, aligned to pages. It is a copy in memory, because a mapped file could change after
    its seal is verified. Raise DamagedFile if the seal does not match the content, the name and the key."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < SEAL_BYTES:
            raise DamagedFile(path, "seal", f"the file has {size} bytes, expected at least {SEAL_BYTES}")
        sealed = mmap.mmap(-1, size)
        if file.readinto(sealed) != size:
            raise DamagedFile(path, "seal", "the file was cut while it was read")
    content = unseal(memoryview(sealed), name or path.name, key or key_of(path.parent))
    if content is None:
        raise DamagedFile(path, "seal", "it was made with another key, or the file was changed afterwards")
    return content.toreadonly()


def recall(path: Path) -> bytes | None:
    """Return the content of a file that `store` wrote, and set the file's times to now, so that its age is the time since its last use.
    Return None if the file is missing or damaged, or cannot be trusted."""
    try:
        content = bytes(load(path))
    except (OSError, RuntimeFault):
        return None
    with suppress(OSError):  # the folder may be read-only
        os.utime(path)
    return content


def seal(content: bytes | memoryview, name: str, key: bytes) -> bytes:
    """Return the content with its seal behind it. The name is sealed too, so a file cannot take the place of another."""
    return b"".join((content, seal_of(content, name, key)))


def unseal(sealed: memoryview, name: str, key: bytes) -> memoryview | None:
    """Return the content of sealed bytes, or None if the seal does not match the content, the name and the key."""
    content, found = sealed[:-SEAL_BYTES], sealed[-SEAL_BYTES:]
    return content if hmac.compare_digest(found, seal_of(content, name, key)) else None


def seal_of(content: bytes | memoryview, name: str, key: bytes) -> bytes:
    """Return the seal: the HMAC-SHA256 of the name and the content under the key."""
    label = name.encode()
    made = hmac.new(key, len(label).to_bytes(8, "little") + label, hashlib.sha256)
    made.update(content)
    return made.digest()


# --- the key -------------------------------------------------------------------------------------------------------------


def is_shared() -> bool:
    """Return whether the key is kept outside the cache. If so, seals protect files whoever owns the files."""
    return flags.current().cache_key_file is not None


def key_of(folder: Path) -> bytes:
    """Return the key of a folder's files, and make a key if there is none. Raise OSError if the key cannot be read or made, and UnsafeCache
    if others can change or read it."""
    named = flags.current().cache_key_file
    if named is not None:
        return _named_key(named)
    path = folder / KEY_FILE
    with suppress(FileNotFoundError):
        return _own_key(path)
    make_private(folder)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # so that only one of the processes that start at the same time makes the key
        if not path.exists():
            with replacing(path) as file:
                file.write(secrets.token_bytes(MIN_KEY_BYTES))
    finally:
        os.close(lock)
    return _own_key(path)


def _own_key(path: Path) -> bytes:
    """Return the key in the `.key` file of a folder. Raise UnsafeCache if others can read the key, or if it is too short."""
    with opened(path) as file:
        status = os.fstat(file.fileno())
        if status.st_mode & stat.S_IROTH or (status.st_mode & stat.S_IRGRP and not _is_private(status.st_gid)):
            raise UnsafeCache(
                f"the key {path} can be read by others ({_described(status)}); remove it, and the files beside it are built again"
            )
        key = file.read(MAX_KEY_BYTES)
    if len(key) < MIN_KEY_BYTES:
        raise UnsafeCache(
            f"the key {path} has {len(key)} bytes, expected {MIN_KEY_BYTES}; remove it, and the files beside it are built again"
        )
    return key


def _named_key(path: Path) -> bytes:
    """Return the key in the file that RELAXSERVE_CACHE_KEY_FILE names. Secret stores often provide a link to a file of root that a group
    may read. Raise UnsafeCache if the file belongs to a user other than root and this one, if others can access it, if its group can write
    to it, or if the key is too short or too long."""
    with regular(path).open("rb") as file:
        status = os.fstat(file.fileno())
        key = file.read(MAX_KEY_BYTES + 1)
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise UnsafeCache(
            f"{_VARIABLE} {path} is open to others ({_described(status)}); expected a file of root or of this user with mode 0400 or 0440"
        )
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise UnsafeCache(
            f"{_VARIABLE} {path} has {len(key)} bytes; expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES}, such as `openssl rand -hex 32` prints"
        )
    return key


# --- owners and modes ----------------------------------------------------------------------------------------------------


def require_private(folder: Path) -> None:
    """Raise UnsafeCache if a user other than root and this one owns the folder or can write to it, or if this user may not read its owner
    and mode. If the key is kept outside the cache, owners do not matter, and only a folder to which all users can write is refused. A
    missing folder is private. The folder's parents do not matter: a user who replaces the folder owns the replacement."""
    try:
        status = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UnsafeCache(f"{folder} cannot be read: {error.strerror}; set RELAXSERVE_CACHE to a folder of this user") from error
    _require_trusted(folder, status, "chmod go-w")


def opened(path: Path) -> BufferedReader:
    """Open a stored file. Raise UnsafeCache if `_require_trusted` refuses it, DamagedFile if it is no regular file, and OSError for a
    symbolic link."""
    # O_NONBLOCK: otherwise, opening a FIFO would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    file = os.fdopen(descriptor, "rb")
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedFile(path, "header", "it is not a regular file")
        _require_trusted(path, status, "rm")
    except BaseException:
        file.close()
        raise
    return file


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents for this user alone, whatever the umask is. Folders that exist stay as they are."""
    missing = takewhile(lambda path: not path.exists(), (folder, *folder.parents))
    for path in reversed([*missing]):
        path.mkdir(mode=0o700, exist_ok=True)


def _require_trusted(path: Path, status: os.stat_result, command: str) -> None:
    """Raise UnsafeCache if a user other than root and this one owns the file or folder, or can write to it. If the key is kept outside the
    cache, raise it only if all users can write. `command` is a shell command that removes the problem; the message states it."""
    is_sticky = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)  # others may add files, but not replace them
    by_all = bool(status.st_mode & stat.S_IWOTH) and not is_sticky
    by_group = bool(status.st_mode & stat.S_IWGRP) and not is_sticky and not _is_private(status.st_gid)
    is_foreign = status.st_uid not in (0, os.geteuid())
    if by_all or (not is_shared() and (is_foreign or by_group)):
        problem = "belongs to another user" if is_foreign else "can be written by others"
        remedy = "" if is_foreign else f"run `{command} {path}`, or "
        raise UnsafeCache(
            f"the cache {path} {problem} ({_described(status)}; this process is user {os.geteuid()}), who could run code in this server; "
            f"{remedy}set RELAXSERVE_CACHE to another folder"
        )


def _described(status: os.stat_result) -> str:
    """Return the owner, group and mode of a file as text."""
    return f"owner {status.st_uid}, group {status.st_gid}, mode {stat.S_IMODE(status.st_mode):04o}"


@cache
def _is_private(gid: int) -> bool:
    """Return whether this process is in a group, and the system lists no other user in it. Only two kinds of groups count: a group with the
    user's name, which systems with umask 002 make for each user, and a group that the system does not list, such as the one that Kubernetes
    gives to a volume (fsGroup)."""
    if gid not in (os.getegid(), *os.getgroups()):
        return False
    accounts = {account.pw_name for account in pwd.getpwall() if account.pw_gid == gid}
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        group = None
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        name = ""
    if group is None:
        return accounts <= {name}
    return group.gr_name == name and accounts | set(group.gr_mem) <= {name}
