"""A quantised checkpoint as a source of weights: each matrix under its name in the model, as f32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from compiler.frontend.errors import ConfigError, DamagedFile
from compiler.frontend.fields import REQUIRED, Fields, read_json
from compiler.frontend.quantized.awq import read_awq
from compiler.frontend.quantized.bitsandbytes import read_bitsandbytes
from compiler.frontend.quantized.compressed import read_compressed
from compiler.frontend.quantized.fp4 import read_modelopt
from compiler.frontend.quantized.fp8 import read_fbgemm, read_fp8
from compiler.frontend.quantized.gptq import read_auto_round, read_gptq
from compiler.frontend.quantized.held import Form, is_held
from compiler.frontend.quantized.method import Method, Parts, Read
from compiler.frontend.quantized.mxfp4 import read_mxfp4
from compiler.frontend.weights import Tensor, TensorInfo, WeightSource
from runtime.files import is_there

T = TypeVar("T")

METHODS: Final[Mapping[str, Callable[[Fields], tuple[Method, ...]]]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed,
    "fbgemm_fp8": read_fbgemm,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
}
FIELDS: Final = ("quantization_config", "compression_config", "quantization")  # fields of a config.json; the last one is that of MLX
# Ends of the names of scales for queries and for cached keys and values, which are unused: relaxserve chooses the types of these values.
CACHE_SCALES: Final = tuple(f".{part}_{kind}" for part in "qkv" for kind in ("scale", "zero_point"))
MODELOPT_FILE = "hf_quant_config.json"  # the file in which older versions of Model Optimizer state what newer ones state in config.json


def methods_beside(folder: Path, config: Mapping[str, Any]) -> tuple[Method, ...]:
    """Return the methods by which the weights in a folder with this config.json are quantised. If config.json states none, read
    MODELOPT_FILE. Raise ConfigError as `methods_of` does."""
    if is_there(file := folder / MODELOPT_FILE) and not any(config.get(name) for name in FIELDS):
        stated = Fields(read_json(file), MODELOPT_FILE).raw("quantization", {})
        config = {FIELDS[0]: {**stated, "quant_method": "modelopt"}} if isinstance(stated, Mapping) else {}
    return methods_of(config)


def method_named(config: Mapping[str, Any]) -> str:
    """Return, in capitals, the name of the method by which the weights next to this config.json are quantised. For bitsandbytes, return the
    name of the codes (NF4 or FP4) if config.json states it. If config.json names no method, return QUANTISED."""
    stated = next((config[field] for field in FIELDS if isinstance(config.get(field), dict)), {})
    return str(stated.get("bnb_4bit_quant_type", stated.get("quant_method", "quantised"))).upper()


def methods_of(config: Mapping[str, object]) -> tuple[Method, ...]:
    """Return the methods by which the weights next to this config.json are quantised: none if they are not quantised, several if matrices
    are quantised by different methods. Raise ConfigError for an unknown method or fields that are not supported."""
    name = next((name for name in FIELDS if config.get(name) is not None), None)
    if name is None:
        return ()
    fields = Fields(config[name], f"{name} of config.json")
    if "quant_method" not in fields and {"group_size", "bits"} <= fields.values.keys():
        raise ConfigError("the weights are quantised by MLX; take the model's original checkpoint or a GGUF file")
    # Model Optimizer's first versions of this field lack the name of the method.
    kind = fields.text("quant_method", "modelopt" if "quant_algo" in fields else REQUIRED).removeprefix("intel/")
    if kind not in METHODS:
        known = f"{', '.join(METHODS)}, and GGUF files. Take the model in one of these, or without quantisation and with --quantize"
        raise ConfigError(f"the weights are quantised by {kind}; known are {known}")
    methods = METHODS[kind](fields)
    if unread := [f"{path} {value!r:.60}" for path, value in fields.unread()]:
        raise ConfigError(f"{fields.where} has unsupported fields: {', '.join(unread)}")
    return methods


class QuantizedWeights:
    """A WeightSource that decodes the quantised tensors of another source. `tensors` omits the parts of quantised matrices, scales of the
    cache and scales of activations. Raise DamagedFile if the parts of a matrix do not fit together."""

    def __init__(self, stored: WeightSource, methods: tuple[Method, ...]) -> None:
        self._stored = stored
        found = _matrices(stored, methods)
        self._methods = {name: method for name, (method, _) in found.items()}
        self._parts = {name: parts for name, (_, parts) in found.items()}
        hidden = {name for parts in self._parts.values() for name in parts.values()}
        unused = (*CACHE_SCALES, *(_joined("", part) for method in methods for part in method.layout.unused))
        self.tensors: Mapping[str, TensorInfo] = {
            **{name: info for name, info in stored.tensors.items() if name not in hidden and not name.endswith(unused)},
            **{name: self._info(name) for name in self._parts},
        }

        forms = {name: self._form(name) for name in self._parts if is_held(name)}
        self.forms: Mapping[str, Form] = {name: form for name, form in forms.items() if form is not None}

    def read(self, name: str) -> Tensor:
        if name not in self._parts:
            return self._stored.read(name)
        return self._checked(name, self._methods[name].values)

    def parts(self, name: str) -> Mapping[str, Tensor]:
        """Return the numbers that encode a matrix, with their scales, in the matrix's form."""
        return self._checked(name, self._methods[name].held)

    def release(self, name: str) -> None:
        for own in self._parts.get(name, {"": name}).values():
            self._stored.release(own)

    def digest(self) -> str:
        return self._stored.digest()

    def _form(self, name: str) -> Form | None:
        """Return the form in which a program keeps the matrix, as numbers with scales. Return None if it keeps the decoded floats. Raise
        DamagedFile, with the matrix's name, if its parts do not fit together."""
        try:
            return self._methods[name].form(self._infos(name), self._read_part(name))
        except DamagedFile as error:
            raise DamagedFile(f"tensor {name!r}: {error}") from None

    def _info(self, name: str) -> TensorInfo:
        """Describe a quantised matrix: its shape once decoded to float32, and the bytes that its parts take. Raise DamagedFile, with the
        matrix's name, if its parts do not fit together."""
        infos = self._infos(name)
        try:
            shape = self._methods[name].shape(infos, self._read_part(name))
        except DamagedFile as error:
            raise DamagedFile(f"tensor {name!r}: {error}") from None
        return TensorInfo(shape, np.dtype(np.float32), sum(info.num_bytes for info in infos.values()))

    def _infos(self, name: str) -> Mapping[str, TensorInfo]:
        return {part: self._stored.tensors[own] for part, own in self._parts[name].items()}

    def _read_part(self, name: str) -> Read:
        return lambda part: self._stored.read(self._parts[name][part])

    def _checked(self, name: str, read: Callable[[Parts], T]) -> T:
        """Call `read` with the parts of a matrix, and return its result. Add the matrix's name to the message of a DamagedFile that is
        raised."""
        try:
            return read({part: self._stored.read(own) for part, own in self._parts[name].items()})
        except DamagedFile as error:
            raise DamagedFile(f"tensor {name!r}: {error}") from None


def _matrices(stored: WeightSource, methods: tuple[Method, ...]) -> dict[str, tuple[Method, Mapping[str, str]]]:
    """Map the name of each quantised matrix to its method, and to the tensors that hold its parts. If there are several methods, a matrix
    has the first method that its tensors fit; tensors that fit no method stay as they are. If there is one method, raise DamagedFile if a
    part of a matrix is missing."""
    found: dict[str, tuple[Method, Mapping[str, str]]] = {}
    tensors = stored.tensors
    for method in methods:
        layout = method.layout
        marker = _joined("", layout.marker)
        for name in tensors:
            matrix = f"{name.removesuffix(marker)}{layout.ending}"
            if not name.endswith(marker) or matrix in found:
                continue
            parts = {part: own for part in layout.parts if (own := _joined(name.removesuffix(marker), part)) in tensors}
            if len(methods) > 1 and not _fits(method, parts, stored):
                continue
            if absent := [part for part in layout.needed if part not in parts]:
                raise DamagedFile(f"tensor {name!r} has no {_joined(name.removesuffix(marker), absent[0])!r} beside it")
            found[matrix] = method, parts
    return found


def _fits(method: Method, parts: Mapping[str, str], stored: WeightSource) -> bool:
    """Return whether these tensors can be the parts of a matrix that this method quantised."""
    if not parts.keys() >= set(method.layout.needed):
        return False
    try:
        method.shape({part: stored.tensors[own] for part, own in parts.items()}, lambda part: stored.read(parts[part]))
    except DamagedFile:
        return False
    return True


def _joined(stem: str, part: str) -> str:
    return f"{stem}{part}" if part.startswith("_") else f"{stem}.{part}"
