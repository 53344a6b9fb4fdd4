"""Find and open the files of a model: a folder in the hub's layout, a folder of a Whisper model in CTranslate2's format, or a GGUF file.
The configuration and the headers of the weights are read once; all later stages of a load use the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from compiler.frontend.config import ModelConfig
from compiler.frontend.ct2 import FILE as CT2_FILE
from compiler.frontend.ct2 import Ct2Whisper
from compiler.frontend.decoder import table_and_head
from compiler.frontend.errors import ModelError, UnknownModel
from compiler.frontend.gguf.file import GgufFile
from compiler.frontend.gguf.model import GgufModel
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.quantized.held import HeldWeights, forms_of
from compiler.frontend.quantized.source import QuantizedWeights, method_named, methods_beside
from compiler.frontend.registry import config_of, read_config, weights_of
from compiler.frontend.unknown import remedy
from compiler.frontend.weights import BesideFolders, Tensor, WeightSource, open_safetensors
from compiler.ir.dtypes import DType
from deploy.model_loading.known import Asked, carried, refusals
from deploy.model_loading.locate import locate
from deploy.model_loading.tokenizer import TokenizerSource
from runtime.files import is_there
from server.messages import FETCH

if TYPE_CHECKING:
    from server.text.tokenizer import Tokenizer

ROWS = 4096  # rows of a table that are compared at a time
Settings = tuple[int, float, str, bool]  # what decides a quantisation: version, bits per weight, digest of the text, whether for a GPU


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The opened files of a model."""

    path: Path
    config: ModelConfig
    weights: WeightSource
    is_embedder: bool  # whether the model was trained for embeddings, even if it could generate text
    architectures: tuple[str, ...] = ()  # class names from config.json
    method: str = ""  # name of the method by which a folder's weights are quantised; "" if they are not
    gguf: GgufFile | None = None  # the file, if the model is a GGUF file; None: it is a folder
    # Returns the numbers that encode matrices of a quantised checkpoint. None: the checkpoint has no matrices that programs keep in this
    # form.
    held: WeightSource | None = None
    # Returns the numbers of the matrices that this program has quantised to a number of bits (deploy/quantizing). None: it has quantised
    # none.
    quantised: WeightSource | None = None

    def source(self, format: WeightFormat) -> WeightSource:
        """Return the source of weights for a program with this format: if the format has a budget of bits, the source of the numbers to
        which matrices were quantised; if the format keeps the checkpoint's quantised matrices, the source of their numbers; otherwise the
        source of the decoded values."""
        if format.budget and self.quantised is not None:
            return self.quantised
        return self.held if self.held is not None and format.as_stored else self.weights


@dataclass(frozen=True, kw_only=True, eq=False)
class Located(Asked):
    """The state of a load once its files are on this machine."""

    path: Path  # the folder or the GGUF file, on this machine


@dataclass(frozen=True, kw_only=True, eq=False)
class Opened(Located):
    """The state of a load once its files are open."""

    files: ModelFiles
    tokenizer_source: TokenizerSource
    eos_ids: tuple[int, ...]  # ids of the tokens that end an answer

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises LoadError if the tokenizer is missing or damaged. A worker does not need it."""
        return self.tokenizer_source.build()


@dataclass(frozen=True, kw_only=True, eq=False)
class Formed(Opened):
    """The state of a load once its weights are quantised, if the load names a number of bits per weight. `files` have the result."""

    quantised_by: Settings | None  # settings that decide the quantised numbers (deploy/quantizing/kept.py); None: the load names no bits


def find_source(known: Asked) -> Located:
    """Find the source on this machine, or download it. Raise LoadError if the source is not found and cannot be downloaded."""
    known.progress(FETCH, 0.0)
    path = locate(known.load.source, partial(known.progress, FETCH), known.load.hub_token)
    return Located(**carried(known, Asked), path=path)


def open_source(known: Located) -> Opened:
    """Open the files. If the load names no `max_context`, use that of the file of the model's defaults (locate.py), if the file has one. In
    this case, a worker that replaces another uses the former worker's context, `least_context`, even if the file has changed: running
    requests rely on it. Raise LoadError if the files cannot be read or are not supported."""
    files = open_files(known.path)
    known.progress("verify", 0.0)  # from now on, the front reads the tokenizer; a model that cannot be opened is refused first
    tokenizer_source = TokenizerSource(files.path, files.gguf)
    load = known.load
    if load.max_context is None and (beside := tokenizer_source.defaults().max_context) is not None:
        load = msgspec.structs.replace(load, max_context=load.least_context if load.restart else beside)
    located = carried(known, Located, load=load)
    return Opened(**located, files=files, tokenizer_source=tokenizer_source, eos_ids=tokenizer_source.eos_ids())


@refusals()
def open_files(path: Path) -> ModelFiles:
    """Read the configuration and the headers of the weights. Read no weights, except the table of embeddings and the head of a folder whose
    configuration ties them. Raise LoadError if the files cannot be read or are not supported."""
    return _open_gguf(path) if path.is_file() else _open_folder(path)


def dtypes_of(source: WeightSource) -> dict[str, DType]:
    """Return the types of the tensors. Raise ModelError for a type that no program reads."""
    found: dict[str, DType] = {}
    for name, info in source.tensors.items():
        try:
            found[name] = DType.from_numpy(np.dtype(info.dtype))
        except ValueError as error:
            raise ModelError(f"tensor {name!r}: {error}; convert the checkpoint, or take another one") from error
    return found


def _open_gguf(path: Path) -> ModelFiles:
    model = GgufModel(path)
    held = HeldWeights(model) if model.forms else None
    return ModelFiles(path, model.config, model, model.config.embedding.is_stated, gguf=model.file, held=held)


def _open_ct2(path: Path) -> ModelFiles:
    """Open the folder of a Whisper model in the format of CTranslate2."""
    model = Ct2Whisper(path / CT2_FILE)
    fields = model.fields()
    config = config_of(path, fields)
    return ModelFiles(path, config, weights_of(config, model), is_embedder=False, architectures=_architectures_of(fields))


def _open_folder(path: Path) -> ModelFiles:
    """Open a folder. Raise UnknownModel, with a remedy, for an architecture that is not supported, and ModelError for other faults."""
    if (path / CT2_FILE).is_file():
        return _open_ct2(path)
    fields = read_config(path)
    try:
        config = config_of(path, fields)
    except UnknownModel as error:
        raise UnknownModel(f"{error}{remedy(path)}") from None
    weights, held = open_weights(path, config, fields)
    if config.is_causal and config.tie_word_embeddings and _has_own_head(config, weights, held):
        config = replace(config, tie_word_embeddings=False)
    is_embedder = not config.is_causal or config.classes is not None or is_there(path / "modules.json")
    return ModelFiles(path, config, weights, is_embedder, _architectures_of(fields), method_named(fields), held=held)


def open_weights(folder: Path, config: ModelConfig, fields: Mapping[str, Any]) -> tuple[WeightSource, WeightSource | None]:
    """Open the tensors of a folder under the names that the family's programs use, including the projections that follow the pooling.
    Return a source of their values, and a source of the numbers that encode matrices, or None if programs keep no such numbers of this
    checkpoint. `fields` are those of config.json."""
    methods = methods_beside(folder, fields)
    stored = open_safetensors(folder)
    parts = {dense.folder: open_safetensors(folder / dense.folder) for dense in config.embedding.dense}

    def named(source: WeightSource) -> WeightSource:
        weights = weights_of(config, source)
        return BesideFolders(weights, parts) if parts else weights

    if not methods:
        return named(stored), None
    decoded = QuantizedWeights(stored, methods)
    held = named(HeldWeights(decoded))
    return named(decoded), held if forms_of(held.tensors) else None


def _has_own_head(config: ModelConfig, weights: WeightSource, held: WeightSource | None) -> bool:
    """Return whether the files of a decoder with tied embeddings have a head that differs from the table of embeddings. A head of another
    shape does not count. If there is one, the model uses it, as in transformers, whose version 5 writes into the files of Mistral
    Small 3 and InternVL 3 that their embeddings are tied, although they are not."""
    table, head = table_and_head(config, weights.tensors)
    if not {table, head} <= weights.tensors.keys() or weights.tensors[table].shape != weights.tensors[head].shape:
        return False
    if held is not None and (table in held.tensors) is not (head in held.tensors):
        return True  # only one of them is quantised
    first, second = weights.read(table), weights.read(head)
    has_one_type = first.dtype == second.dtype

    def rows(array: Tensor, at: int) -> NDArray[Any]:
        """Return ROWS rows to compare: as bytes if both tables have the same type, since comparing bytes takes a fraction of the time,
        otherwise as f32."""
        part = array[at : at + ROWS]
        return part.view(np.uint8) if has_one_type else part.astype(np.float32)

    found = any(not np.array_equal(rows(first, at), rows(second, at)) for at in range(0, len(first), ROWS))
    weights.release(table)
    weights.release(head)
    return found


def _architectures_of(fields: Mapping[str, Any]) -> tuple[str, ...]:
    named = fields.get("architectures")
    return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()
