"""Open the socket of a server, and say who holds a port that is taken."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from server.settings import SettingsError

LISTENING = "0A"  # the state of a socket in /proc/net/tcp


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket, on any free port if `port` is 0. Raise SettingsError if that fails. The server does this before models
    load, so that a taken port is reported at once."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)  # type: ignore[arg-type]  # an internet address
    except UnicodeError as error:  # a part of the name is empty or too long
        raise SettingsError(f"cannot listen on {host} port {port}: it is no name of a host; choose another address or port") from error
    except OSError as error:
        # a negative errno is an error of name resolution
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        holder = holder_of(port) if error.errno == errno.EADDRINUSE else ""
        raise SettingsError(f"cannot listen on {host} port {port}: {reason}{holder}; choose another address or port") from error


def holder_of(port: int) -> str:
    """Return " by process ..." with the process that listens on a port. Return "" if no such process can be seen, because none listens or
    it belongs to another user."""
    wanted = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _inodes(Path("/proc/net", table), port)}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(_target(file) in wanted for file in (process / "fd").iterdir()):
                said = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f" by process {process.name} ({said:.80})"
        except OSError:  # the process has ended, or belongs to another user
            continue
    return ""


def _target(file: Path) -> str:
    """Return what a link of /proc points to, or "" if the link is gone."""
    try:
        return os.readlink(file)
    except OSError:  # another thread of that process has closed the file since it was listed
        return ""


def _inodes(table: Path, port: int) -> list[str]:
    """Return the inodes of the sockets in a table of the kernel that listen on a port."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:  # there is no such table, for example without IPv6
        return []
    return [row[9] for row in rows if row[3] == LISTENING and int(row[1].rpartition(":")[2], 16) == port]
