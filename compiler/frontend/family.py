"""What makes up a family of models. Each family is one file in compiler/frontend/families, with a `FAMILY` of this kind."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from compiler.frontend.config import ModelConfig
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, Step
from compiler.frontend.layers.encoder import EncoderLayer, Head, Stem, embedded
from compiler.frontend.mixture import ExpertNames
from compiler.ir.graph.atoms import Var

Read = Callable[[Fields], ModelConfig]  # a config.json
Complete = Callable[[dict[str, Any], Mapping[str, Any], Container[str]], None]


def _complete_nothing(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    return


@dataclass(frozen=True, slots=True)
class Gguf:
    """How GGUF files spell the family, beyond what all decoders share (gguf/model.py)."""

    architecture: str  # as `general.architecture` names it
    fields: Mapping[str, str] = field(default_factory=dict[str, str])  # key of the metadata -> field of config.json
    # GGUF's name -> the hub's, both within a layer. Names without `weight` or `bias` stand for both.
    layer_names: Mapping[str, str] = field(default_factory=dict[str, str])
    biases: Mapping[str, str] = field(default_factory=dict[str, str])  # flag of config.json -> GGUF's name of the projection that has it
    mark: str | None = None  # of families that share an architecture: the key of the metadata that only files of this one have
    pairs_interleaved: bool = False  # converters reordered the rows of query and key projections
    halves_mark: str | None = None  # key of the metadata: where it is, converters reordered the rows so that pairs are no neighbours
    norm_offset: float = 0.0  # converters added it to the weights of norms
    # complete(config, metadata, tensor names): adds to the config what no single entry of the metadata says.
    complete: Complete = _complete_nothing


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    model_types: tuple[str, ...]  # as config.json names them
    read: Read
    layer: Callable[[Layer, Var], Var]  # one layer of the residual stream
    embedding: str = "embed_tokens"  # the name of the table of tokens
    last_norm: str = "norm"  # the name of the norm before the head
    layer_inputs: Callable[[Step, Var], Var | None] | None = None  # made of the embeddings: see LayerInputs
    experts: ExpertNames | None = None
    gguf: Gguf | None = None


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    model_types: tuple[str, ...]
    read: Read
    layer: Callable[[EncoderLayer, Var], Var]
    head: Callable[[Head, Var], Var] | None  # the numbers of each class, from the vectors of first tokens; None: no model has classes
    prefix: str  # of all names, in models that were saved with a head for some task
    embed: Callable[[Stem], Var] = embedded
    layers: str = "encoder.layer"  # the name that the numbers of layers stand behind
    last_norm: str | None = None  # the name of a norm behind the layers


Family = DecoderFamily | EncoderFamily
