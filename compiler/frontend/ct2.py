"""Whisper in the format of CTranslate2: a file `model.bin` with named variables, and a config.json that states neither family nor sizes.

    version, name of the model's class, revision, number of variables
    per variable: name, rank, dimensions, type, number of bytes, bytes
    number of aliases; per alias: name, name of the variable

Numbers are little-endian. A text is preceded by its length and ends with a zero byte. This module offers the tensors under their names in
transformers. It splits joined projections by rows, and divides matrices of integers by their scales.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from compiler.frontend.errors import ConfigError, DamagedFile
from compiler.frontend.weights import MappedFile, Tensor, TensorInfo

FILE, VERSION, CLASS = "model.bin", 6, "WhisperSpec"
MOST_VARIABLES, MAX_NAME_BYTES, MAX_RANK = 100_000, 4096, 4
TYPES = tuple(map(np.dtype, (np.float32, np.int8, np.int16, np.int32, np.float16, ml_dtypes.bfloat16)))
GELU = 3  # the number of this activation in a file
SCALE = "_scale"  # end of the name of the scales of a matrix
NORM = {"weight": "gamma", "bias": "beta"}


@dataclass(frozen=True, slots=True)
class _Variable:
    """Where a variable's data begin in the file, and their shape and type."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a variable that form a tensor. The variable is cut into `parts` equal parts, and the tensor is the part with the index
    `part`."""

    variable: str
    part: int = 0
    parts: int = 1


class Ct2Whisper:
    """The tensors of a model.bin, under the names of transformers. Raise ConfigError if the file has another model than Whisper, and
    DamagedFile if it violates the format, or if a variable that Whisper has is missing or unfit."""

    def __init__(self, path: Path) -> None:
        self._file = MappedFile(path)
        self._variables, self._header_bytes = _Header(self._file).variables()
        self._places = dict(self._named())
        self.tensors: Mapping[str, TensorInfo] = {name: self._info(rows) for name, rows in self._places.items()}

    def fields(self) -> dict[str, Any]:
        """Return the fields that transformers writes to a config.json, derived from the variables. Raise ConfigError if the model scales
        embeddings or has another activation than GELU, and DamagedFile if a variable is missing or has an unexpected rank."""
        if self._number("decoder/activation") != GELU or self._number("decoder/scale_embeddings"):
            raise ConfigError(f"{FILE} has another activation than GELU, or scales embeddings; convert the model again from its original")
        vocab_size, size = self._shape("decoder/embeddings/weight", 2)
        return {
            "model_type": "whisper",
            "architectures": ["WhisperForConditionalGeneration"],
            "vocab_size": vocab_size,
            "d_model": size,
            "num_mel_bins": self._shape("encoder/conv1/weight", 3)[1],
            "max_source_positions": self._shape("encoder/position_encodings/encodings", 2)[0],
            "max_target_positions": self._shape("decoder/position_encodings/encodings", 2)[0],
            **{f"{side}_layers": self._num_layers(side) for side in ("encoder", "decoder")},
            **{f"{side}_attention_heads": self._number(f"{side}/num_heads") for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": self._shape(f"{side}/layer_0/ffn/linear_0/weight", 2)[0] for side in ("encoder", "decoder")},
        }

    def read(self, name: str) -> Tensor:
        """Return a tensor: some rows of a variable. Integers are divided by their scales (one per row, or one for the variable), and so
        become floats."""
        rows = self._places[name]
        found = self._array(rows.variable)
        count = len(found) // rows.parts
        found = found[rows.part * count : (rows.part + 1) * count]
        if found.dtype.kind != "i":
            return found
        scale = self._array(rows.variable + SCALE).astype(np.float32)
        each = scale if scale.ndim == 0 else scale[rows.part * count : (rows.part + 1) * count].reshape(-1, *[1] * (found.ndim - 1))
        return found.astype(np.float32) / each

    def release(self, name: str) -> None:
        variable = self._variables[self._places[name].variable]
        self._file.release(variable.start, _num_bytes(variable))

    def digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        self._file.add_to(digest, self._header_bytes)
        return digest.hexdigest()

    # --- names -----------------------------------------------------------------------------------------------------------

    def _named(self) -> Any:
        """Yield the name in transformers of each tensor, and the rows that form the tensor."""
        yield "model.decoder.embed_tokens.weight", _Rows("decoder/embeddings/weight")
        for side in ("encoder", "decoder"):
            yield f"model.{side}.embed_positions.weight", _Rows(f"{side}/position_encodings/encodings")
            yield from _norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
            for number in range(self._num_layers(side)):
                yield from _layer(f"model.{side}.layers.{number}.", f"{side}/layer_{number}/", crosses=side == "decoder")
        for name in ("conv1", "conv2"):
            yield from ((f"model.encoder.{name}.{part}", _Rows(f"encoder/{name}/{part}")) for part in ("weight", "bias"))

    def _num_layers(self, side: str) -> int:
        """Return the number of layers of a side, `encoder` or `decoder`: the number of layers that names of variables mention."""
        layers = {name.split("/")[1] for name in self._variables if name.startswith(f"{side}/layer_") and name.count("/") > 2}
        return len(layers - {"layer_norm"})

    # --- variables -------------------------------------------------------------------------------------------------------

    def _info(self, rows: _Rows) -> TensorInfo:
        """Return the description of a tensor. Raise DamagedFile if its variable is missing, has no equal parts, or has unfit scales."""
        variable = self._variable(rows.variable)
        shape, dtype = variable.shape, variable.dtype
        if not shape or shape[0] % rows.parts:
            raise DamagedFile(f"{FILE}: {rows.variable} has shape {list(shape)}, expected rows in {rows.parts} equal parts")
        if dtype.kind == "i":
            scale = self._variable(rows.variable + SCALE)
            if scale.dtype.kind != "f" or scale.shape not in ((), (1,), (shape[0],)):
                raise DamagedFile(f"{FILE}: {rows.variable}{SCALE} has shape {list(scale.shape)}, expected a float per row, or one")
            dtype = np.dtype(np.float32)
        return TensorInfo((shape[0] // rows.parts, *shape[1:]), dtype, _num_bytes(variable) // rows.parts)

    def _variable(self, name: str) -> _Variable:
        if name not in self._variables:
            raise DamagedFile(f"{FILE} has no variable {name}; expected a Whisper model that CTranslate2 converted")
        return self._variables[name]

    def _array(self, name: str) -> Tensor:
        variable = self._variable(name)
        return self._file.array(variable.dtype, variable.shape, variable.start)

    def _number(self, name: str) -> int:
        if self._variable(name).shape not in ((), (1,)):
            raise DamagedFile(f"{FILE}: {name} is no single number")
        return int(self._array(name).reshape(()))

    def _shape(self, name: str, rank: int) -> tuple[int, ...]:
        if len(shape := self._variable(name).shape) != rank:
            raise DamagedFile(f"{FILE}: {name} has shape {list(shape)}, expected {rank} dimensions")
        return shape


def _layer(name: str, variable: str, *, crosses: bool) -> Any:
    """Yield the name in transformers of each tensor of a layer, and the rows that form the tensor. `name` begins these names, and
    `variable` begins the names of the layer's variables. `crosses` says whether the layer also attends to the audio."""
    own = f"{variable}self_attention/"
    for part, projection in enumerate(("q_proj", "k_proj", "v_proj")):
        yield from _linear(f"{name}self_attn.{projection}", _Rows(f"{own}linear_0", part, 3))
    yield from _linear(f"{name}self_attn.out_proj", _Rows(f"{own}linear_1"))
    yield from _norm(f"{name}self_attn_layer_norm", f"{own}layer_norm")
    if crosses:
        other = f"{variable}attention/"
        yield from _linear(f"{name}encoder_attn.q_proj", _Rows(f"{other}linear_0"))
        for part, projection in enumerate(("k_proj", "v_proj")):
            yield from _linear(f"{name}encoder_attn.{projection}", _Rows(f"{other}linear_1", part, 2))
        yield from _linear(f"{name}encoder_attn.out_proj", _Rows(f"{other}linear_2"))
        yield from _norm(f"{name}encoder_attn_layer_norm", f"{other}layer_norm")
    for number in (0, 1):
        yield from _linear(f"{name}fc{number + 1}", _Rows(f"{variable}ffn/linear_{number}"))
    yield from _norm(f"{name}final_layer_norm", f"{variable}ffn/layer_norm")


def _linear(name: str, rows: _Rows) -> Any:
    yield f"{name}.weight", _Rows(f"{rows.variable}/weight", rows.part, rows.parts)
    if not name.endswith("k_proj"):  # Whisper's keys have no bias; the file stores zeros in its place
        yield f"{name}.bias", _Rows(f"{rows.variable}/bias", rows.part, rows.parts)


def _norm(name: str, variable: str) -> Any:
    return ((f"{name}.{part}", _Rows(f"{variable}/{own}")) for part, own in NORM.items())


def _num_bytes(variable: _Variable) -> int:
    return math.prod(variable.shape) * variable.dtype.itemsize


class _Header:
    """Reads the variables' descriptions, and checks that the data of each variable lies within the file."""

    def __init__(self, file: MappedFile) -> None:
        self._file, self._at = file, 0

    def variables(self) -> tuple[dict[str, _Variable], int]:
        """Return the variables by name and by alias, and the number of bytes before the first variable's data. Raise ConfigError if the
        file has another model than Whisper, and DamagedFile if it violates the format."""
        if (version := self._number(4)) != VERSION:
            raise DamagedFile(f"{FILE} has version {version}, expected {VERSION}; convert the model with a newer CTranslate2")
        if (found := self._text()) != CLASS:
            raise ConfigError(f"{FILE} is a {found!r:.80}; of CTranslate2's models, only {CLASS} is supported")
        self._number(4)  # the revision of the class
        variables: dict[str, _Variable] = {}
        first = 0
        for _ in range(self._count()):
            name = self._text()
            variables[name] = self._variable(name)
            first = first or variables[name].start
        for _ in range(self._count()):
            alias, name = self._text(), self._text()
            if name not in variables:
                raise DamagedFile(f"{FILE}: the alias {alias!r:.80} names {name!r:.80}, which does not exist")
            variables[alias] = variables[name]
        return variables, first

    def _variable(self, name: str) -> _Variable:
        """Read the description of a variable, and skip its data. Raise DamagedFile if its rank or type is not supported, or if its shape
        needs another number of bytes than the file states."""
        rank = self._number(1)
        if rank > MAX_RANK:
            raise DamagedFile(f"{FILE}: {name} has {rank} dimensions; at most {MAX_RANK} are read")
        shape = tuple(self._number(4) for _ in range(rank))
        kind, num_bytes = self._number(1), self._number(4)
        if kind >= len(TYPES):
            raise DamagedFile(f"{FILE}: {name} has type {kind}; known are 0 to {len(TYPES) - 1}")
        found = _Variable(shape, TYPES[kind], self._at)
        if num_bytes != _num_bytes(found):
            raise DamagedFile(f"{FILE}: {name} has {num_bytes} bytes; its shape {list(shape)} of {TYPES[kind]} needs {_num_bytes(found)}")
        self._take(num_bytes)
        return found

    def _count(self) -> int:
        if (count := self._number(4)) > MOST_VARIABLES:
            raise DamagedFile(f"{FILE} announces {count} variables; at most {MOST_VARIABLES} are read")
        return count

    def _text(self) -> str:
        if (length := self._number(2)) > MAX_NAME_BYTES:
            raise DamagedFile(f"{FILE} has a name of {length} bytes; at most {MAX_NAME_BYTES} are read")
        at = self._take(length)
        return bytes(self._file.memory[at : at + length]).rstrip(b"\0").decode(errors="replace")

    def _number(self, num_bytes: int) -> int:
        at = self._take(num_bytes)
        return int.from_bytes(self._file.memory[at : at + num_bytes], "little")

    def _take(self, num_bytes: int) -> int:
        """Skip bytes, and return where they begin. Raise DamagedFile if the file has fewer bytes."""
        at, self._at = self._at, self._at + num_bytes
        if self._at > self._file.num_bytes:
            raise DamagedFile(f"{FILE} ends after {self._file.num_bytes} bytes, in the middle of a variable. Is the download complete?")
        return at
