"""The health check of a container: `python -I -m deploy.health` fails if no server of this container answers. Options, variables or a file
may set the address of the server, so the check finds it by the socket on which the server listens."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from ipaddress import ip_address
from pathlib import Path

from deploy.listening import listeners, sockets_of

WAIT_S = 2.0
LOOPBACK = {4: "127.0.0.1", 6: "::1"}


def lives(processes: Iterable[Path]) -> bool:
    """Return whether a server answers on one of the addresses on which these processes, folders in /proc, listen."""
    own = {inode for process in processes for inode in sockets_of(process)}
    with ThreadPoolExecutor() as threads:  # other sockets may answer nothing
        return any(threads.map(_answers, [(address, port) for address, port, inode in listeners() if inode in own]))


def _answers(place: tuple[str, int]) -> bool:
    """Return whether a server answers that its process is alive. Whether it is ready does not matter: the first start takes long, because
    it compiles the model. Proxies, which an engine may give to every container, are not asked."""
    address, port = place
    ip = ip_address(address)
    connection = HTTPConnection(LOOPBACK[ip.version] if ip.is_unspecified else address, port, timeout=WAIT_S)
    try:
        connection.request("GET", "/health/live")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(not lives(Path("/proc").glob("[0-9]*")))
