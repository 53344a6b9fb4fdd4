"""Write the weights of a flat program as one block, divided into files that are small enough to be fetched, stored and verified
separately."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from pathlib import Path

import msgspec
import numpy as np

from compiler.bind import prepared_weights
from compiler.frontend.weights import WeightSource
from runtime.executable import Executable
from runtime.flat_program import FlatProgram, constant_name, weight_name

SHARD_BYTES = 128 << 20  # size of all shards but the last


class Shard(msgspec.Struct, frozen=True):
    """A file with consecutive bytes of the block. Its name contains its digest, so programs can share it."""

    file: str  # its name
    begin: int  # offset of its first byte in the block
    num_bytes: int
    sha256: str


def write_shards(folder: Path, flat: FlatProgram, executable: Executable, source: WeightSource) -> tuple[Shard, ...]:
    """Write the block as shards into a folder, and return them in order."""
    shards: list[Shard] = []
    begin = 0
    for content in _cut(_block(flat, executable, source), SHARD_BYTES):
        digest = hashlib.sha256(content).hexdigest()
        shards.append(Shard(f"weights-{digest[:16]}.bin", begin, len(content), digest))
        (folder / shards[-1].file).write_bytes(content)
        begin += len(content)
    return tuple(shards)


def write_block(path: Path, flat: FlatProgram, executable: Executable, source: WeightSource) -> bytes:
    """Write the whole block to one file, and return its digest of 64 bits."""
    digest = hashlib.blake2b(digest_size=8)
    with path.open("wb") as file:
        for part in _block(flat, executable, source):
            file.write(part)
            digest.update(part)
    return digest.digest()


def _block(flat: FlatProgram, executable: Executable, source: WeightSource) -> Iterator[bytes]:
    """Yield the bytes of all weights in order, with zeros in the gaps between arrays."""
    end = 0
    weights = ((weight_name(f, name), array) for f in flat.functions for name, array in prepared_weights(executable, f, source))
    constants = ((constant_name(i), c) for i, c in enumerate(executable.constants))
    arrays = (pair for part in (weights, constants) for pair in part)
    for stored, (name, array) in zip(flat.weights, arrays, strict=True):
        assert (stored.name, stored.num_bytes) == (name, array.nbytes), (stored, name, array.nbytes)
        yield bytes(stored.offset - end)
        yield np.ascontiguousarray(array).tobytes()
        end = stored.offset + stored.num_bytes
    yield bytes(flat.weights_bytes - end)


def _cut(parts: Iterator[bytes], size: int) -> Generator[bytes]:
    """Divide a stream of bytes into pieces of `size` bytes; the last one may be shorter."""
    held = bytearray()
    for part in parts:
        held += part
        while len(held) >= size:
            yield bytes(held[:size])
            del held[:size]
    if held:
        yield bytes(held)
