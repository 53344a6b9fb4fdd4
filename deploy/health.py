"""The health check of a container: `python -I -m deploy.health` fails if no server of this container answers. Options, variables or a file
may set the address of the server, so the check finds the address by the socket on which the server listens."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from http.client import HTTPConnection, HTTPException
from ipaddress import ip_address
from pathlib import Path
from typing import NoReturn

from deploy.listening import listeners, sockets_of

WAIT_S = 2.0
LOOPBACK = {4: "127.0.0.1", 6: "::1"}


def lives(processes: Iterable[Path]) -> bool:
    """Return whether a server answers on one of the addresses on which these processes, folders in /proc, listen. Once one answers, do not
    wait for the other sockets, which may never answer."""
    own = {inode for process in processes for inode in sockets_of(process)}
    places = [(address, port) for address, port, inode in listeners() if inode in own]
    threads = ThreadPoolExecutor(max(len(places), 1))
    try:
        return any(answer.result() for answer in as_completed(threads.submit(_answers, place) for place in places))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _answers(place: tuple[str, int]) -> bool:
    """Return whether a server answers that its process is alive. Whether it is ready does not matter: the first start takes long, because
    it compiles the model. The request ignores proxies, which a container engine may set in the environment of every container."""
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


def main() -> NoReturn:
    """End this process, with status 0 if a server of this container answers, and 1 otherwise. Do not wait for threads that still wait for
    other sockets."""
    os._exit(not lives(Path("/proc").glob("[0-9]*")))


if __name__ == "__main__":
    main()
