"""Fetch an image or audio from a host that the operator allows (`image_hosts`, `audio_hosts`), and read files in `data:` URLs.

The host's name is resolved once, and the connection goes to the address that was checked, so a name cannot lead to another address
afterwards. A redirect is followed only to an allowed host. Time, bytes and the number of fetches at a time are limited.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Self
from urllib.parse import SplitResult, urljoin, urlsplit
from weakref import WeakValueDictionary

import h11

from server.addresses import is_public, parsed
from server.errors import AUDIO_NOT_DECODED, IMAGE_NOT_DECODED, INVALID_AUDIO, INVALID_IMAGE, ApiError, ErrorKind

PORTS = {"http": 80, "https": 443}
SCHEMES = ("http://", "https://")
SCHEME_CHARS = 256  # longest beginning of a data: URL, before its data
REDIRECTS = (301, 302, 303, 307, 308)
MOST_REDIRECTS = 3
AT_ONCE = 8  # fetches of one Fetcher at a time, each of which holds one file
AT_ONCE_OF_HOST = 4  # fetches from one host at a time, so that a slow host holds up no fetch from others
PIECE_BYTES = 1 << 12  # bytes parsed at a time: a host may send them as a thousand chunks, each of which takes time
MAX_HEADER_BYTES = 1 << 16
PRIVATE = "private+"  # begins an entry of `image_hosts` or `audio_hosts` that names a host on a private network
# errors that mean that this machine lacks descriptors or memory; the last one is an error of the resolver of names
OWN_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, socket.EAI_MEMORY)


class FetchFault(ValueError):
    """Raised if a file cannot be fetched. The message is for the client."""


class OwnLack(Exception):
    """Raised if this machine has no descriptor or no memory for a fetch. This error says nothing about the URL."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file that is fetched, and the settings that limit it."""

    names: str  # what messages call such files, in the plural
    accept: str  # media types that the header `accept` names
    example: str  # how a `data:` URL begins
    hosts: str  # name of the setting with the allowed hosts
    most_bytes: str  # name of the setting with the size of the largest file
    patience: str  # name of the setting with the longest time of a fetch
    invalid: ErrorKind  # error for a file that cannot be used
    not_decoded: ErrorKind  # error if the server is at fault


IMAGES = FileKind(
    "images",
    "image/*",
    "data:image/png;base64,DATA",
    "image_hosts",
    "max_image_bytes",
    "image_fetch_s",
    INVALID_IMAGE,
    IMAGE_NOT_DECODED,
)
AUDIO = FileKind(
    "audio",
    "audio/*",
    "data:audio/wav;base64,DATA",
    "audio_hosts",
    "max_audio_bytes",
    "audio_fetch_s",
    INVALID_AUDIO,
    AUDIO_NOT_DECODED,
)


@dataclass(frozen=True, slots=True)
class Allowed:
    """Hosts from which files are fetched: one host, all hosts below a domain if `host` begins with `*.`, or all hosts if it is `*`."""

    host: str
    port: int | None  # None: the port of the scheme
    may_be_private: bool

    @classmethod
    def of(cls, entry: str) -> Self:
        """Return the hosts that an entry of a setting means."""
        host, _, port = entry.removeprefix(PRIVATE).partition(":")
        return cls(host.lower(), int(port) if port else None, entry.startswith(PRIVATE))

    def covers(self, host: str, port: int, scheme: str) -> bool:
        """Return whether files may be fetched from a host and port."""
        below = self.host == "*" or (self.host.startswith("*.") and host.endswith(self.host[1:]))
        return (below or host == self.host) and port == (self.port or PORTS[scheme])


class Fetcher:
    """Fetches files of one kind."""

    def __init__(self, kind: FileKind, hosts: Sequence[str], most_bytes: int, patience_s: float) -> None:
        self.kind = kind
        self._allowed = [Allowed.of(host) for host in hosts]
        self._most_bytes = most_bytes
        self._patience_s = patience_s
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._turns_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by host, while files are fetched from it
        # A slow name server holds up these threads, and not those of other work.
        self._resolvers = ThreadPoolExecutor(AT_ONCE, "resolve") if hosts else None
        self._context: ssl.SSLContext | None = None  # made once, because reading the certificates takes 20 ms

    async def given(self, url: str, param: str) -> str | bytes:
        """Return the content of a URL: the base64 text of a `data:` URL, or the bytes that are fetched. Raise ApiError if the URL is not
        allowed or the fetch fails. `param` is the field with the URL."""
        if not url[:8].lower().startswith(SCHEMES):
            return self._data_of(url, param)
        try:
            return await self.fetch(url)
        except FetchFault as fault:
            raise ApiError(self.kind.invalid, f"{param} cannot be fetched: {fault}", param=param) from None
        except OwnLack as lack:
            text = f"{param} was not fetched, because the server cannot open a connection now ({lack}); try again later"
            raise ApiError(self.kind.not_decoded, text, param=param) from None

    def _data_of(self, url: str, param: str) -> str:
        """Return the base64 text of a data: URL. Raise ApiError for any other URL, and for a data: URL that is not base64 or has more than
        SCHEME_CHARS characters before its data."""
        begin, comma, data = url[:SCHEME_CHARS].partition(",")
        scheme = begin.partition(":")[0].lower()
        if scheme != "data" or ":" not in begin:
            message = f"{param} begins with {url[:24]!r}; expected a data: URL, or http(s) from a host of {self.kind.hosts}"
            raise ApiError(self.kind.invalid, message, param=param)
        if not comma or not begin.lower().endswith(";base64"):
            raise ApiError(self.kind.invalid, f"{param} begins with {url[:60]!r}; expected {self.kind.example}", param=param)
        return data + url[SCHEME_CHARS:]

    async def fetch(self, url: str) -> bytes:
        """Return the file at a URL, after at most MOST_REDIRECTS redirects. Raise FetchFault if the file may not be fetched, or cannot be
        fetched within the time, or OwnLack if this machine cannot open a connection."""
        try:
            async with asyncio.timeout(self._patience_s):
                for _ in range(1 + MOST_REDIRECTS):
                    found = await self._get(url)
                    if isinstance(found, bytes):
                        return found
                    url = _joined(url, found)
        except TimeoutError:
            raise FetchFault(f"it was not fetched within {self._patience_s:g} s ({self.kind.patience})") from None
        except (OSError, h11.ProtocolError) as error:  # errors of TLS are OSErrors
            _raise_own_lack(error)
            raise FetchFault(f"its host did not send it ({type(error).__name__})") from None
        raise FetchFault(f"its host redirects more than {MOST_REDIRECTS} times")

    async def _get(self, url: str) -> bytes | str:
        """Return the file at a URL, or the URL to which its host redirects. Raise FetchFault if the host may not be asked, cannot be
        reached, answers with an error, or sends too large a file; other errors of the connection are raised as they are."""
        parts, port = _split(url)
        host, entry = _host_of(parts), self._entry_of(parts, port)
        async with self._turns_of.setdefault(host, asyncio.Semaphore(AT_ONCE_OF_HOST)), self._turns:
            context = await self._certificates() if parts.scheme == "https" else None
            for address in await self._addresses(host, port, may_be_private=entry.may_be_private):
                try:
                    reader, writer = await asyncio.open_connection(address, port, ssl=context, server_hostname=host if context else None)
                except OSError as error:
                    _raise_own_lack(error)
                    continue
                try:
                    return await self._exchange(parts, reader, writer)
                finally:
                    writer.close()
            raise FetchFault("its host cannot be reached")

    def _entry_of(self, parts: SplitResult, port: int) -> Allowed:
        """Return the entry that allows a URL. Raise FetchFault if there is none."""
        host = _host_of(parts)
        for entry in self._allowed:
            if entry.covers(host, port, parts.scheme):
                return entry
        raise FetchFault(f"this server fetches no {self.kind.names} from {host!r:.80}, port {port} ({self.kind.hosts}); send a data: URL")

    async def _certificates(self) -> ssl.SSLContext:
        """Return the TLS settings with the certificates of authorities, which are read once."""
        if self._context is not None:
            return self._context
        self._context = made = await asyncio.get_running_loop().run_in_executor(self._resolvers, ssl.create_default_context)
        return made

    async def _addresses(self, host: str, port: int, *, may_be_private: bool) -> list[str]:
        """Return the addresses of a host. Raise FetchFault if there are none, or if one is private and `may_be_private` is false."""
        loop = asyncio.get_running_loop()
        try:
            entries = await loop.run_in_executor(self._resolvers, _resolve, host, port)
        except (OSError, UnicodeError) as error:
            _raise_own_lack(error)
            raise FetchFault("its host has no address") from None
        if not may_be_private and not all(is_public(parsed(address)) for address in entries):
            raise FetchFault("its host has a private address, to which no URL may lead")
        return entries

    async def _exchange(self, parts: SplitResult, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes | str:
        """Ask for a file on an open connection. Return the file, or the URL to which the host redirects, which may be relative. Raise
        FetchFault if the host answers with an error, or if the file is too large. Raise h11.ProtocolError if the answer is not HTTP."""
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEADER_BYTES)
        host = parts.netloc.rpartition("@")[2]
        headers = [("host", host), ("accept", self.kind.accept), ("user-agent", "relaxserve"), ("connection", "close")]
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        request = connection.send(h11.Request(method="GET", target=target, headers=headers))
        writer.write((request or b"") + (connection.send(h11.EndOfMessage()) or b""))
        content = bytearray()
        while True:
            match connection.next_event():
                case h11.NEED_DATA:
                    # Reading bytes that have arrived already lets no other task run. Without this sleep, other requests would wait until
                    # all such bytes are parsed.
                    await asyncio.sleep(0)
                    connection.receive_data(await reader.read(PIECE_BYTES))
                case h11.Response() as response:
                    found = dict(response.headers)
                    if response.status_code in REDIRECTS and (place := found.get(b"location")):
                        return place.decode("latin-1")
                    if response.status_code != 200:
                        raise FetchFault(f"its host answered with status {response.status_code}")
                    self._check(int(found.get(b"content-length", b"0")))
                case h11.Data() as piece:
                    content += piece.data
                    self._check(len(content))
                case h11.EndOfMessage():
                    return bytes(content)
                case _:
                    pass  # an informational response

    def _check(self, num_bytes: int) -> None:
        """Raise FetchFault if a file has too many bytes."""
        if num_bytes > self._most_bytes:
            raise FetchFault(f"it has more than {self._most_bytes} bytes ({self.kind.most_bytes})")


def _split(url: str) -> tuple[SplitResult, int]:
    """Return the parts of a URL, and its port. Raise FetchFault if the URL is malformed, is neither http nor https, or has a user."""
    if not re.fullmatch(r"[!-~]+", url):
        raise FetchFault("its URL has characters that no URL may have; write them as %XX")
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in PORTS and parts.hostname and parts.username is None and parts.password is None:
            return parts, parts.port or PORTS[parts.scheme]
    raise FetchFault(f"its URL is {url!r:.80}; expected http or https, a host, and no user")


def _joined(url: str, place: str) -> str:
    """Return the URL of a redirect from `url` to `place`, which may be relative. Raise FetchFault if `place` is so malformed that it cannot
    be joined to `url`."""
    try:
        return urljoin(url, place)
    except ValueError:
        raise FetchFault(f"its host redirects to {place!r:.80}; expected a URL") from None


def _raise_own_lack(error: Exception) -> None:
    """Raise OwnLack if the error of a fetch says that this machine lacks something, and not that the host is at fault."""
    if isinstance(error, OSError) and error.errno in OWN_LACKS:
        raise OwnLack(error) from error


def _host_of(parts: SplitResult) -> str:
    """Return the host of a URL in lower case, or an empty text if there is none."""
    return (parts.hostname or "").lower()


def _resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host. Raise OSError if there are none."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
