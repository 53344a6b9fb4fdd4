"""A quantised checkpoint as a source of weights: each matrix under its name in the model, as f32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar

import numpy as np

from compiler.frontend.errors import ConfigError, DamagedFile
from compiler.frontend.fields import Fields
from compiler.frontend.quantized.awq import read_awq
from compiler.frontend.quantized.compressed import read_compressed
from compiler.frontend.quantized.fp8 import read_fbgemm, read_fp8
from compiler.frontend.quantized.gptq import read_gptq
from compiler.frontend.quantized.held import Form, is_held
from compiler.frontend.quantized.method import Method, Parts
from compiler.frontend.quantized.mxfp4 import read_mxfp4
from compiler.frontend.weights import Tensor, TensorInfo, WeightSource

T = TypeVar("T")

METHODS: Final[Mapping[str, Callable[[Fields], Method]]] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed,
    "fbgemm_fp8": read_fbgemm,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}
FIELDS: Final = ("quantization_config", "compression_config")  # fields of a config.json


def method_of(config: Mapping[str, object]) -> Method | None:
    """Return the method by which the weights next to this config.json are quantised, or None if they are not quantised."""
    name = next((name for name in FIELDS if config.get(name) is not None), None)
    if name is None:
        return None
    fields = Fields(config[name], f"{name} of config.json")
    kind = fields.text("quant_method")
    if kind not in METHODS:
        raise ConfigError(f"the weights are quantised by {kind}; known are {', '.join(METHODS)}, and GGUF files")
    method = METHODS[kind](fields)
    if unread := [f"{path} {value!r:.60}" for path, value in fields.unread()]:
        raise ConfigError(f"{fields.where} has unsupported fields: {', '.join(unread)}")
    return method


class QuantizedWeights:
    """A WeightSource that decodes the quantised tensors of another source."""

    def __init__(self, stored: WeightSource, method: Method) -> None:
        self._stored, self._method = stored, method
        self._parts = dict(_matrices(stored.tensors, method))
        hidden = {name for parts in self._parts.values() for name in parts.values()}
        unused = tuple(_joined("", part) for part in method.layout.unused)
        self.tensors: Mapping[str, TensorInfo] = {
            **{name: info for name, info in stored.tensors.items() if name not in hidden and not name.endswith(unused or ("\0",))},
            **{name: self._info(name) for name in self._parts},
        }

        found = {name: self._form(name) for name in self._parts if is_held(name)}
        self.forms: Mapping[str, Form] = {name: form for name, form in found.items() if form is not None}

    def read(self, name: str) -> Tensor:
        if name not in self._parts:
            return self._stored.read(name)
        return self._checked(name, self._method.values)

    def parts(self, name: str) -> Mapping[str, Tensor]:
        """Return the integers that encode a matrix, with their scales, in the matrix's form."""
        return self._checked(name, self._method.held)

    def release(self, name: str) -> None:
        for own in self._parts.get(name, {"": name}).values():
            self._stored.release(own)

    def digest(self) -> str:
        return self._stored.digest()

    def _form(self, name: str) -> Form | None:
        try:
            return self._method.form(self._infos(name), lambda part: self._stored.read(self._parts[name][part]))
        except DamagedFile as error:
            raise DamagedFile(f"tensor {name!r}: {error}") from None

    def _info(self, name: str) -> TensorInfo:
        infos = self._infos(name)
        try:
            shape = self._method.shape(infos)
        except DamagedFile as error:
            raise DamagedFile(f"tensor {name!r}: {error}") from None
        return TensorInfo(shape, np.dtype(np.float32), sum(info.num_bytes for info in infos.values()))

    def _infos(self, name: str) -> Mapping[str, TensorInfo]:
        return {part: self._stored.tensors[own] for part, own in self._parts[name].items()}

    def _checked(self, name: str, read: Callable[[Parts], T]) -> T:
        try:
            return read({part: self._stored.read(own) for part, own in self._parts[name].items()})
        except DamagedFile as error:
            raise DamagedFile(f"tensor {name!r}: {error}") from None


def _matrices(tensors: Mapping[str, TensorInfo], method: Method) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the name of each quantised matrix, and a mapping from its parts to the tensors that hold them."""
    layout = method.layout
    for name in tensors:
        marker = _joined("", layout.marker)
        if name.endswith(marker):
            stem = name.removesuffix(marker)
            for part in layout.needed:
                if _joined(stem, part) not in tensors:
                    raise DamagedFile(f"tensor {name!r} has no {_joined(stem, part)!r} beside it")
            yield f"{stem}{layout.ending}", {part: own for part in layout.parts if (own := _joined(stem, part)) in tensors}


def _joined(stem: str, part: str) -> str:
    return f"{stem}{part}" if part.startswith("_") else f"{stem}.{part}"
