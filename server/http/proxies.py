"""Undo what proxies change about a request: its path, to which they may add a prefix, its scheme, and the address that it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address, ip_network

MOST_HOPS = 32  # most addresses of X-Forwarded-For that are read, from the end
PREFIX = "relaxserve.prefix"  # key of a scope; the value is the prefix that was removed from the path in the scope, or an empty text


class Proxies:
    """Undoes what the proxies in front of this server change."""

    def __init__(self, networks: Sequence[str], root_path: str | None) -> None:
        """`networks` are the addresses of proxies. Requests may have the prefix `root_path` in front of their paths; None: no prefix."""
        self._networks = [ip_network(each, strict=False) for each in networks]
        self._root_path = (root_path or "").rstrip("/")

    def prefix(self, path: str) -> str:
        """Return the prefix if a request's path has it, or an empty text."""
        return self._root_path if path == self._root_path or path.startswith(f"{self._root_path}/") else ""

    def path(self, path: str) -> str:
        """Return a request's path without the prefix."""
        return path[len(self.prefix(path)) :] or "/"

    def scheme(self, peer: str, scheme: str, forwarded: str) -> str:
        """Return the scheme of a request. If `peer` is a proxy and its header X-Forwarded-Proto, given as `forwarded`, is http or https,
        return this value. Otherwise return `scheme`."""
        return forwarded if forwarded in ("http", "https") and self._is_proxy(peer) else scheme

    def client(self, peer: str, forwarded: str) -> str:
        """Return the address of a client. The client is `peer`, unless `peer` is a proxy. A proxy appends the address of its own client to
        the header X-Forwarded-For, given as `forwarded`. So the client is the last address of the header that is no proxy's; the client
        itself wrote all addresses before it. The header is read from its end, for at most MOST_HOPS addresses. If all of these are proxies,
        or a malformed one comes before the client is found, return the last proxy that was found."""
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
