"""Undo what proxies change about a request: its path, to which they may add a prefix, and the address that it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address, ip_network

MOST_HOPS = 32  # addresses of X-Forwarded-For that are read


class Proxies:
    """Knows the proxies in front of this server."""

    def __init__(self, networks: Sequence[str], root_path: str | None) -> None:
        """`networks` are the addresses of proxies; requests may have the prefix `root_path` in front of their paths."""
        self._networks = [ip_network(each, strict=False) for each in networks]
        self._root_path = (root_path or "").rstrip("/")

    def path(self, path: str) -> str:
        """Return a request's path without the prefix."""
        if self._root_path and (path == self._root_path or path.startswith(f"{self._root_path}/")):
            return path[len(self._root_path) :] or "/"
        return path

    def client(self, peer: str, forwarded: str) -> str:
        """Return the address of a client. If `peer` is a proxy, that is the last address of its header X-Forwarded-For that is no proxy's:
        a proxy appends the address of its client, and everything before comes from that client."""
        found = peer
        for hop in reversed(forwarded.split(",")[-MOST_HOPS:]):
            if not self._is_proxy(found) or not _is_address(hop := hop.strip()):
                break
            found = hop
        return found

    def _is_proxy(self, address: str) -> bool:
        """Return whether an address is that of a proxy."""
        return bool(self._networks) and _is_address(address) and any(ip_address(address) in network for network in self._networks)


def _is_address(text: str) -> bool:
    """Return whether a text is an IP address."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
