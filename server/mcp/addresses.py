"""Resolve the names of MCP servers. A server on the internet must not lead a request to this machine or to its private network."""

from __future__ import annotations

import ipaddress
import socket

from server.addresses import is_public, parsed
from server.mcp.errors import McpLost


def resolve(host: str, port: int, name: str, *, may_be_private: bool) -> list[str]:
    """Return the addresses of a host. Raise McpLost if it has none, or if one of them is private and may not be."""
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise McpLost(f"MCP server {name!r} cannot be reached: {host} has no address ({error})") from None
    if not may_be_private:
        for text in found:
            if not is_public(parsed(text)):
                raise McpLost(f"MCP server {name!r} has the private address {text}; allow it in its entry, as NAME=private+URL")
    return list(dict.fromkeys(found))


def is_address(host: str) -> bool:
    """Return whether a host is given as an address, or as `localhost`."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True
