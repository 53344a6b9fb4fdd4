"""The definition of a family of models. Each file in compiler/frontend/families defines one family, and assigns it to `FAMILY`."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from compiler.frontend.config import ModelConfig
from compiler.frontend.fields import Fields
from compiler.frontend.layers.decoder import Layer, Step
from compiler.frontend.layers.encoder import EncoderLayer, Head, Stem, embedded
from compiler.frontend.mixture import ExpertNames
from compiler.frontend.weights import Tensor
from compiler.ir.graph.atoms import Var

Read = Callable[[Fields], ModelConfig]  # reads a config.json
Complete = Callable[[dict[str, Any], Mapping[str, Any], Container[str]], None]  # see `Gguf.complete`


def _complete_nothing(config: dict[str, Any], metadata: Mapping[str, Any], tensors: Container[str]) -> None:
    return


def _as_it_is(config: ModelConfig, tensors: Container[str]) -> ModelConfig:
    return config


@dataclass(frozen=True, slots=True)
class Gguf:
    """How GGUF files of the family differ from those of most decoders (gguf/model.py). In the file, each key of the metadata begins with
    the name of the architecture, which the keys below omit. Converters are the programs that write GGUF files."""

    architecture: str  # value of `general.architecture`
    fields: Mapping[str, str] = field(default_factory=dict[str, str])  # key of the metadata -> name of the field in config.json
    # `layer_names` maps names in GGUF files to names in safetensors files, both within a layer. A name without `weight` or `bias` stands
    # for both tensors.
    layer_names: Mapping[str, str] = field(default_factory=dict[str, str])
    # `names` maps names in GGUF files to names in safetensors files, both outside layers and without `weight` or `bias` at the end.
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    # `stacked` maps names of stacks of matrices, outside layers, to names in safetensors files, in which `*` stands for a matrix's number.
    stacked: Mapping[str, str] = field(default_factory=dict[str, str])
    # `biases` maps a flag of config.json to a projection's name in GGUF files. The flag is true if the projection has a bias.
    biases: Mapping[str, str] = field(default_factory=dict[str, str])
    query_norm: str | None = None  # a flag of config.json, which is true if queries have a norm
    with_experts: str | None = None  # value of `general.architecture` of models with experts; None: the same value
    # A metadata key that distinguishes the family from others of the same architecture: only in its files, the value is true, or a number
    # other than 0.
    mark: str | None = None
    pairs_interleaved: bool = False  # true if converters interleaved the rows of query and key projections
    halves_mark: str | None = None  # a metadata key: if present, converters moved the rows of each pair into separate halves
    norm_offset: float = 0.0  # converters added this to the weights of norms, except those of Mamba-2 and similar layers (`ssm_norm`)
    # `restored` maps names in safetensors files, within a layer, to functions that undo a change by converters.
    restored: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict[str, Callable[[Tensor], Tensor]])
    # `complete(config, metadata, tensor names)` adds fields to `config`, the fields of a config.json, that no single metadata entry states.
    complete: Complete = _complete_nothing
    # `adapt(configuration, tensor names)` adapts the configuration to how converters arrange tensors.
    adapt: Callable[[ModelConfig, Container[str]], ModelConfig] = _as_it_is


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """A family of decoders: how its configuration is read, how a layer is built, and how its weights are named."""

    model_types: tuple[str, ...]  # values of `model_type` in config.json
    read: Read
    layer: Callable[[Layer, Var], Var]  # applies one layer to the residual stream
    embedding: str = "embed_tokens"  # name of the token embedding
    last_norm: str = "norm"  # name of the norm before the head
    # `layer_inputs` computes the per-layer embeddings from the token embeddings (see LayerInputs), or returns None if a model has none.
    layer_inputs: Callable[[Step, Var], Var | None] | None = None
    # `widen` computes the residual stream from the token embeddings, and `narrow` computes the input of the last norm from the residual
    # stream.
    widen: Callable[[Step, Var], Var] | None = None
    narrow: Callable[[Step, Var], Var] | None = None
    experts: ExpertNames | None = None
    divides: bool = False  # whether ranks can divide the layers: see `compiler/frontend/ranks.py`
    joined: tuple[str, ...] = ()  # patterns of the names, within a layer, of tensors that programs read as one tensor: see `joint`
    gguf: Gguf | None = None
    # `renamed` maps parts of names in safetensors files to parts of names in programs. The parts are replaced in this order.
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """A family of encoders: how its configuration is read, how its parts are built, and how its weights are named."""

    model_types: tuple[str, ...]  # values of `model_type` in config.json
    read: Read
    layer: Callable[[EncoderLayer, Var], Var]  # applies one layer to the vectors of tokens
    # `head` computes the outputs of the classes from the pooled vectors of texts. None: no model of the family classifies.
    head: Callable[[Head, Var], Var] | None
    prefix: str  # prefix of all weight names in models that were saved with a head for some task
    embed: Callable[[Stem], Var] = embedded  # computes the input of the first layer
    layers: str = "encoder.layer"  # name that precedes the layer numbers
    last_norm: str | None = None  # name of a norm that follows the layers; None: no norm
    # `join` projects the vectors of texts to the space that the model has for texts and images. None: vectors stay as they are.
    join: Callable[[Stem, Var], Var] | None = None
    both_ways: frozenset[str] = frozenset()  # model types of decoders that this family reads if their attention is not causal


Family = DecoderFamily | EncoderFamily
