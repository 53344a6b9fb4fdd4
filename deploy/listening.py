"""Open the socket of a server, find the sockets on which processes listen, and say who holds a port that is taken."""

from __future__ import annotations

import errno
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

from server.settings import SettingsError

LISTENING = "0A"  # the state of a socket in /proc/net/tcp
SOCKET = "socket:["  # what precedes the inode in the target of a descriptor's link


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
    wanted = {inode for _, other, inode in listeners() if other == port}
    for process in Path("/proc").glob("[0-9]*"):
        if wanted.isdisjoint(sockets_of(process)):
            continue
        with suppress(OSError):  # the process has ended
            said = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            return f" by process {process.name} ({said:.80})"
    return ""


def sockets_of(process: Path) -> set[str]:
    """Return the inodes of the open sockets of a process, a folder in /proc. Return an empty set if the process has ended, or belongs to
    another user."""
    try:
        found = [_target(file) for file in (process / "fd").iterdir()]
    except OSError:
        return set()
    return {target[len(SOCKET) : -1] for target in found if target.startswith(SOCKET)}


def _target(file: Path) -> str:
    """Return what a link of /proc points to, or "" if the link is gone."""
    try:
        return os.readlink(file)
    except OSError:  # another thread of that process has closed the file since it was listed
        return ""


def listeners() -> list[tuple[str, int, str]]:
    """Return the address, the port and the inode of each TCP socket on which a process of this network namespace listens."""
    found: list[tuple[str, int, str]] = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            rows = [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
        except OSError:  # there is no such table, for example without IPv6
            continue
        for row in (row for row in rows if row[3] == LISTENING):
            address, _, port = row[1].rpartition(":")
            words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]  # in the byte order of this machine
            found.append((socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16), row[9]))
    return found
