"""Read compressed audio with FFmpeg's libraries, which the optional dependency `media` installs. Only the formats and codecs listed here
are opened. Every codec runs on this thread, because the process may start no further threads."""

from __future__ import annotations

import io
from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.extras import installing
from server.audio.sound import AudioError, Sound, floats, mono

# FFmpeg's name of each format, by the name that clients know.
FORMATS = {"MP3": "mp3", "FLAC": "flac", "Ogg": "ogg", "M4A": "mov", "WebM": "matroska"}
PLAIN = tuple(f"pcm_{kind}" for kind in ("s16le", "s16be", "s24le", "s24be"))  # uncompressed samples, as in the videos of cameras
CODECS = ("mp3float", "mp3", "flac", "vorbis", "libvorbis", "opus", "libopus", "aac", "alac", *PLAIN)
PICTURES = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1", b"avif", b"avis")  # HEIC and AVIF begin like M4A
ID3_BYTES = 10  # bytes of the header of an ID3 tag; its footer, if there is one, has as many
ID3_FOOTER = 0x10  # flag in the header of a tag that has a footer
BLOCK_SAMPLES = 1 << 16  # least number of samples of a block; the last block may have fewer


def format_of(data: bytes) -> str | None:
    """Return which of FORMATS a file has, by its first bytes, or None if it has none of them. Many MP3 files, and some FLAC files, begin
    with an ID3 tag."""
    if data[:3] == b"ID3":
        return "FLAC" if data.startswith(b"fLaC", ID3_BYTES + _id3_size(data)) else "MP3"
    if data[:4] in (b"fLaC", b"OggS"):
        return "FLAC" if data[0] == ord("f") else "Ogg"
    if data[4:8] == b"ftyp":
        return None if data[8:12] in PICTURES else "M4A"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "WebM"
    is_frame = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0 and data[1] & 0x06
    return "MP3" if is_frame else None


def _id3_size(data: bytes) -> int:
    """Return the number of bytes of an ID3 tag after its header. The header has the size without the footer, in digits of 7 bits."""
    size = sum((digit & 127) << 7 * place for place, digit in enumerate(reversed(data[6:ID3_BYTES])))
    return size + (ID3_BYTES if len(data) > 5 and data[5] & ID3_FOOTER else 0)


def load_library() -> None:
    """Import FFmpeg's libraries, with all modules that a call could need. Do nothing if they are not installed."""
    try:
        package = import_module("av")
    except ImportError:
        return
    for module in walk_packages(package.__path__, "av."):
        if not module.name.endswith("__main__"):
            import_module(module.name)


def open_compressed(data: bytes, format: str) -> Sound:
    """Open a file as a Sound, whose samples are decoded when they are read. `format` is one of FORMATS. Raise AudioError if the file cannot
    be read or has no audio in one of CODECS, or if FFmpeg's libraries are not installed."""
    try:
        import av
        from av.error import FFmpegError
    except ImportError:
        text = f"it is {format}, which needs a package that is not installed; send WAV, or {installing('media')}"
        raise AudioError(text) from None
    options = {"codec_whitelist": ",".join(CODECS), "format_whitelist": FORMATS[format]}
    try:
        container = av.open(io.BytesIO(data), "r", format=FORMATS[format], options=options, metadata_errors="replace")
    except MemoryError:
        raise
    except (FFmpegError, ValueError) as error:
        raise _damaged(format, error) from None
    stream = next(iter(container.streams.audio), None)
    if stream is None:
        raise AudioError(f"it is {format} without audio; expected a track of audio")
    codec = stream.codec_context
    name = getattr(codec, "name", "unknown")  # `codec` is None if FFmpeg does not know the codec
    if name not in CODECS:
        raise AudioError(f"its codec is {name!r}; expected one of {', '.join(CODECS)}")
    codec.thread_count = 1
    seconds = None
    if stream.duration is not None and stream.time_base is not None:
        seconds = float(stream.duration * stream.time_base)
    elif container.duration is not None:
        seconds = container.duration / av.time_base
    return Sound(codec.sample_rate, codec.channels, seconds, _blocks(container, stream, format, codec.sample_rate))


def _blocks(container: Any, stream: Any, format: str, rate: int) -> Iterator[NDArray[np.float32]]:
    """Yield the samples of the stream in blocks. Leave out damaged packets, as players do. If the rest of the file cannot be read, stop
    after the samples before the damage. Raise AudioError if nothing can be decoded, or if the rate changes."""
    from av.error import FFmpegError, InvalidDataError

    held, num_held, found = [], 0, False
    try:
        for packet in container.demux(stream):
            try:
                frames = packet.decode()
            except InvalidDataError:
                continue
            for frame in frames:
                if frame.sample_rate != rate:
                    raise AudioError(f"its rate changes from {rate} to {frame.sample_rate} samples per second; expected one rate")
                held.append(_mono(frame))
                num_held += len(held[-1])
            if num_held >= BLOCK_SAMPLES:
                yield np.concatenate(held)
                held, num_held, found = [], 0, True
    except MemoryError:
        raise
    except (FFmpegError, ValueError) as error:
        if isinstance(error, AudioError):
            raise
        if not found and not held:
            raise _damaged(format, error) from None
    if held:
        yield np.concatenate(held)
    elif not found:
        raise AudioError(f"it is {format} without samples; expected audio that can be decoded")


def _mono(frame: Any) -> NDArray[np.float32]:
    """Return the mean of a frame's channels, from -1 to 1."""
    values = frame.to_ndarray()  # [channels, samples] if planar, else [1, samples * channels]
    if values.dtype.kind == "f":
        values = floats(values)
    else:
        bits = 8 * values.dtype.itemsize
        values = (values.astype(np.float64) - (128 if values.dtype.kind == "u" else 0)) / (1 << bits - 1)
    return mono(values, 0) if frame.format.is_planar else mono(values.reshape(-1, frame.layout.nb_channels), 1)


def _damaged(format: str, error: Exception) -> AudioError:
    """Return the error for a file that cannot be read."""
    reason = getattr(error, "strerror", None) or str(error)
    return AudioError(f"it looks like {format}, and cannot be read as such: {reason:.200}")
