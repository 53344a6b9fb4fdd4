"""Open a model in a format with a budget of bits per weight: quantise its matrices, or find them in the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from compiler.frontend.config import ModelConfig
from compiler.frontend.decoder import table_and_head
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.quantized.held import Form, HeldWeights, Width, two_level_form
from compiler.frontend.weights import Tensor, TensorInfo, WeightSource
from compiler.machine.target import GPU
from deploy.cache import keep_sections
from deploy.model_loading.files import Formed, ModelFiles, Opened, Settings
from deploy.model_loading.known import carried, refusals
from deploy.model_loading.locate import CONFIG
from deploy.quality.text import CALIBRATION, read_text, tokens_of
from deploy.quantizing.mix import CPU_WIDTHS, GPU_WIDTHS
from deploy.use import remove_damaged
from runtime.errors import DamagedFile
from runtime.sealed import key_of
from runtime.sections import SectionFile, read_kept
from server.interfaces import LoadError
from server.messages import ErrorCode, Load

VERSION = 4  # part of the cache's keys; increase it when the same model and text give other numbers than before
WIDTHS = "widths"  # the section of a file that names the matrices and their widths

Array = NDArray[Any]


@refusals()
def form_weights(known: Opened) -> Formed:
    """Quantise the matrices if the format has a budget, or find them in the cache. Raise LoadError if the model cannot be quantised in this
    way, or if the text on which it is measured cannot be read, is too short, or is named although nothing is measured."""
    named, budget = known.load.quantize, WeightFormat.parse(known.load.quantize).budget
    if not budget and known.load.calibrate:
        message = f"calibrate is {known.load.calibrate!r}, and quantize is {named!r}, for which nothing is measured"
        raise LoadError(ErrorCode.INVALID_VALUE, f"{message}: leave calibrate out, or set quantize to 4bit or another number of bits")
    if not budget:
        return Formed(**carried(known, Opened), quantised_by=None)
    text = Path(known.load.calibrate or CALIBRATION)
    settings = VERSION, budget, hashlib.sha256(read_text(text)).hexdigest(), known.target.system == GPU
    return Formed(**carried(known, Opened, files=_quantised(known, settings, text)), quantised_by=settings)


def in_format(load: Load, quantize: str) -> Load:
    """Return the load in another format, without the text to calibrate on if nothing is measured for this format."""
    return msgspec.structs.replace(load, quantize=quantize, calibrate=load.calibrate if WeightFormat.parse(quantize).budget else "")


def _quantised(known: Opened, settings: Settings, text: Path) -> ModelFiles:
    """Return the files of the model with quantised weights: from the cache, or quantised now and stored there. `text` is the file on which
    the importance of each input of a matrix is measured. Raise LoadError if the model does not predict text."""
    files, (_, budget, _, on_gpu), named = known.files, settings, known.load.quantize
    if not files.config.is_causal or files.config.classes is not None:
        message = f"quantize is {named!r}, which is measured on what a model predicts; {files.path.name} generates no text: choose int8"
        raise LoadError(ErrorCode.INVALID_VALUE, message)
    digest = hashlib.blake2b(msgspec.json.encode((files.weights.digest(), *_beside(known), *settings)), digest_size=16).hexdigest()
    place = None if known.cache is None else known.cache.quantised_of(digest)
    heads = heads_of(files.config, files.weights.tensors)
    result = None if place is None else read_kept(place, partial(_read, place, files.weights.tensors, heads))
    if result is None:
        # imported only here: a start from the cache runs no search and is faster without its imports
        from deploy.quantizing.quantize import quantise

        widths = GPU_WIDTHS if on_gpu else CPU_WIDTHS
        result = quantise(files, budget, widths, tokens_of(known.tokenizer_source, text), known.progress)
        if place is not None:
            _keep(place, result)
    source = Quantised(files.weights, result, digest, heads)
    has_head = not result.widths.keys().isdisjoint(heads.values())
    config = replace(files.config, tie_word_embeddings=files.config.tie_word_embeddings and not has_head)
    return replace(files, config=config, quantised=HeldWeights(source))


def _beside(known: Opened) -> list[str]:
    """Return the digests of the configuration and of the tokenizer, because the inputs of the matrices depend on them, too. A GGUF file has
    both in its header, which is part of the digest of its weights."""
    if known.files.gguf is not None:
        return []
    found = known.tokenizer_source.files()
    return [hashlib.sha256(content).hexdigest() for content in (found.contents[CONFIG], found.tokenizer())]


# --- the file in the cache ---------------------------------------------------------------------------------------------


def _keep(place: Path, result: Result) -> None:
    sections = {f"{name}.{part}": array.reshape(-1).view(np.uint8).data for name, of in result.parts.items() for part, array in of.items()}
    sections[WIDTHS] = memoryview(msgspec.json.encode(result.widths))
    keep_sections(place, sections, "quantised weights")


def _read(place: Path, tensors: Mapping[str, TensorInfo], heads: Mapping[str, str]) -> Result:
    """Return what an earlier start stored. `heads` is what `heads_of` returns."""
    file = SectionFile(place, key_of(place.parent))
    widths = msgspec.json.decode(bytes(file.read(WIDTHS, verify=True)), type=dict[str, Width])
    shapes = {name: info.shape for name, info in tensors.items()} | {heads[name]: tensors[name].shape for name in heads if name in tensors}
    return Result(widths, _Stored(file, widths, shapes))


class _Stored(Mapping[str, Mapping[str, Array]]):
    """The arrays of each quantised matrix in a file, which are verified when a matrix is read: only packing reads a matrix, and it reads
    all of it anyway. If a matrix is damaged, the file is removed if possible, and LoadError is raised."""

    def __init__(self, file: SectionFile, widths: Mapping[str, Width], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`widths` and `shapes` are those of the matrices, by their names."""
        self._file, self._widths, self._shapes = file, widths, shapes

    def __getitem__(self, name: str) -> Mapping[str, Array]:
        shape = self._shapes[name]
        infos = two_level_form(self._widths[name], shape[-1]).infos(shape)
        try:
            found = {part: self._file.read(f"{name}.{part}") for part in infos}
        except DamagedFile as fault:
            if remove_damaged(self._file.path, str(fault)):
                remedy = "it is removed: load the model again, which quantises it anew"
            else:
                remedy = "it cannot be removed: remove it as the user that owns the folder"
            raise LoadError(ErrorCode.LOAD_FAILED, f"{fault}; {remedy}") from fault
        return {
            part: np.frombuffer(data, infos[part].dtype, prod(infos[part].shape)).reshape(infos[part].shape) for part, data in found.items()
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._widths)

    def __len__(self) -> int:
        return len(self._widths)


# --- the weights -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """Quantised matrices by their names: the width that was chosen for each, and the arrays that represent it."""

    widths: Mapping[str, Width]
    parts: Mapping[str, Mapping[str, Array]]  # the arrays of each matrix, by the names of its parts


def heads_of(config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return the name that the quantised head gets, by the name of the matrix that is the head in the files: the table of embeddings if
    these are tied, otherwise the head itself."""
    table, head = table_and_head(config, tensors)
    return {table if config.tie_word_embeddings else head: head}


class Quantised:
    """The weights of a model with quantised matrices. `parts` returns the arrays of a quantised matrix, `read` the values that the files
    have. The head of a model with tied embeddings becomes a tensor of its own, which only has parts."""

    def __init__(self, source: WeightSource, result: Result, digest: str, heads: Mapping[str, str]) -> None:
        """`heads` is what `heads_of` returns."""
        self._source, self._result, self._digest = source, result, digest
        given = source.tensors
        self.tensors: Mapping[str, TensorInfo] = {
            **given,
            **{head: given[name] for name, head in heads.items() if head in result.widths},
        }
        self.forms: Mapping[str, Form] = {
            name: two_level_form(width, self.tensors[name].shape[-1]) for name, width in result.widths.items()
        }

    def read(self, name: str) -> Tensor:
        return self._source.read(name)

    def parts(self, name: str) -> Mapping[str, Array]:
        return self._result.parts[name]

    def release(self, name: str) -> None:
        if name in self._source.tensors:
            self._source.release(name)

    def digest(self) -> str:
        return self._digest
