"""Tell addresses on the internet from those of this machine and of private networks, to which no URL of a client may lead."""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
NAT64 = ipaddress.ip_network("64:ff9b::/96")


def parsed(text: str) -> Address:
    """Return the address that `getaddrinfo` wrote, which may name a zone."""
    return ipaddress.ip_address(text.partition("%")[0])


def is_public(address: Address) -> bool:
    """Return whether an address is on the internet, also if it stands for an IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast
