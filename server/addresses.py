"""Tell addresses on the internet from those of this machine and of private networks. A URL from a client may lead to this machine or a
private network only if the operator allows the URL's host as private."""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
EMBEDDING = tuple(ipaddress.IPv6Network(text) for text in ("64:ff9b::/96", "::/96", "::ffff:0:0:0/96"))  # they contain IPv4 addresses
UNICAST = ipaddress.IPv6Network("2000::/3")  # the only network from which IPv6 addresses of the internet are assigned


def parsed(text: str) -> Address:
    """Parse an address as `getaddrinfo` writes it. Drop the zone that may follow it: `fe80::1%eth0`."""
    return ipaddress.ip_address(text.partition("%")[0])


def is_public(address: Address) -> bool:
    """Return whether an address is a unicast address on the internet. An IPv6 address that contains an IPv4 address (6to4, Teredo, mapped,
    or in a network of EMBEDDING) is judged by that IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if any(address in network for network in EMBEDDING):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        return address.is_global and address in UNICAST
    return address.is_global and not address.is_multicast
