"""A GGUF file presented as a safetensors model: its configuration as the fields of a config.json, and its tensors under the names and in
the layout of safetensors files. So most of the compiler need not distinguish the two kinds of files.

Changes that converters made to the tensors are undone. For example, rows of Llama's query and key projections were reordered so that
rotated pairs are adjacent, 1 was added to the norm weights of Gemma, and some files stack queries, keys and values, or gate and up
projections of experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import translate
from pathlib import Path

import numpy as np

from compiler.frontend.config import ModelConfig
from compiler.frontend.errors import DamagedFile, ModelError, UnknownModel
from compiler.frontend.gguf.config import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, num_ahead, read_config, read_embedding
from compiler.frontend.gguf.file import GgufFile
from compiler.frontend.quantized.held import Form, form_of_blocks, is_held
from compiler.frontend.registry import GGUF_FAMILIES, decoder_family, gguf_family, parse_config
from compiler.frontend.weights import Tensor, TensorInfo
from compiler.ir.coded_blocks import CodedBlocks

FLOAT32 = np.dtype(np.float32)
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
COMMON_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
# Kinds of files that contain no model, by `general.type` or, in older files, `general.architecture`: what the file is, and a remedy.
MODELS_OWN = "load the file of the model itself"
OTHERS = {
    "adapter": "an adapter (LoRA), and adapters are not supported: merge it into its model with llama.cpp's llama-export-lora",
    "mmproj": f"the image encoder of a model; {MODELS_OWN}, which answers texts",
    "clip": f"the image encoder of a model; {MODELS_OWN}, which answers texts",
    "imatrix": f"an importance matrix, from which a quantiser reads what matters; {MODELS_OWN}",
    "controlvector": f"a control vector, which changes the answers of a model; {MODELS_OWN}",
}
STACKED, GATE_UP = "attn_qkv", "ffn_gate_up_exps"
UNSHIFTED = ".ssm_norm."  # norms to whose weights converters add nothing


@dataclass(frozen=True, slots=True)
class Part:
    """Where a GGUF file stores a tensor: `name` is the tensor's name in the file (if stacked, the name that it would have alone), and
    `stored_as` is the name of the stored tensor that contains its rows."""

    name: str
    stored_as: str
    rows: slice | None = None  # its rows in the stored tensor; None: all rows
    matrix: int | None = None  # its number in a stack of matrices; None: the stored tensor is no such stack


class GgufModel:
    """A WeightSource that reads a GGUF file, and the configuration of the file's model. Raise UnknownModel if no family reads the file, and
    another ModelError if it is damaged, has something else than a model, or has a configuration that is not supported."""

    def __init__(self, path: str | Path) -> None:
        self.file = GgufFile(path)
        _require_model(self.file)
        if (found := gguf_family(self.file.metadata)) is None:
            name = self.file.metadata.get("general.architecture")
            known = f"known are {', '.join(GGUF_FAMILIES)}. Encoders are read from their safetensors files"
            raise UnknownModel(f"{self.file.path.name}: general.architecture is {name!r}; {known}")
        self._gguf, model_type = found
        experts = decoder_family(model_type).experts
        count = self.file.metadata.get(f"{self._gguf.architecture}.expert_count", 0)
        if count and experts is None:
            raise UnknownModel(f"{self.file.path.name} has {count} experts; {self._gguf.architecture} is supported only without experts")
        config = self._gguf.adapt(parse_config(read_config(self.file, self._gguf, model_type)), self.file.tensors)
        embedding = read_embedding(self.file, self._gguf)
        self.config: ModelConfig = config if embedding is None else replace(config, embedding=embedding)
        self._has_halves = f"{self._gguf.architecture}.{self._gguf.halves_mark}" in self.file.metadata
        self._names = {**NAMES, "output_norm": f"model.{decoder_family(model_type).last_norm}", **self._gguf.names}
        self._layer_names = {**COMMON_LAYER_NAMES, **(experts.by_gguf_name if experts is not None else {}), **self._gguf.layer_names}
        self._parts: dict[str, Part] = {}
        unused = re.compile("|".join(map(translate, self.config.unused)) or r"(?!)")
        for part in self._read_parts():
            if unused.match(name := self._hub_name(part.name)):
                continue
            other = self._parts.setdefault(name, part)
            if other is not part:
                raise DamagedFile(f"{self.file.path.name} has both {other.stored_as} and {part.stored_as}, expected one of them")
        self.tensors: Mapping[str, TensorInfo] = {hub: self._info(part) for hub, part in self._parts.items()}
        matrices = {name: part for name, part in self._parts.items() if is_held(name) and self._restore(part) is None}
        blocks = {name: self.file.tensors[part.stored_as].format.blocks for name, part in matrices.items()}
        self.forms: Mapping[str, Form] = {name: form_of_blocks(format) for name, format in blocks.items() if format is not None}

    def read(self, name: str) -> Tensor:
        part = self._parts[name]
        tensor = self._rows_of(self.file.read(part.stored_as), part)
        if self._is_shifted_norm(part):
            return tensor.astype(FLOAT32) - np.float32(self._gguf.norm_offset)
        restore = self._restore(part)
        return tensor if restore is None else restore(tensor)

    def parts(self, name: str) -> Mapping[str, Tensor]:
        """Return the parts of the matrix's form: the blocks as they are in the file, or, for coded blocks, the parts into which NumPy
        unpacks them."""
        part = self._parts[name]
        rows, format = self._rows_of(self.file.blocks(part.stored_as), part), self.file.tensors[part.stored_as].format.blocks
        found = format.parts(rows) if isinstance(format, CodedBlocks) else (rows,)
        return dict(zip(self.forms[name].parts, found, strict=True))

    def _rows_of(self, tensor: Tensor, part: Part) -> Tensor:
        """Return the rows of a stored tensor that belong to a part, in the order of safetensors files."""
        if part.matrix is not None:
            return tensor[part.matrix]
        if part.rows is not None:
            tensor = tensor[part.rows] if tensor.ndim == 1 else tensor[..., part.rows, :]
        if self._is_rotated(part):
            num_heads = self.config.num_heads if ".attn_q." in part.name else self.config.num_kv_heads
            if self._gguf.pairs_interleaved:
                return _split_pairs(tensor, num_heads)
            if self._has_halves and self.config.rope is not None:
                return _join_pairs(tensor, num_heads, self.config.rope.size)
        return tensor

    def release(self, name: str) -> None:
        self.file.release(self._parts[name].stored_as)

    def digest(self) -> str:
        return self.file.digest()

    def _read_parts(self) -> Iterator[Part]:
        """Yield the tensors of the model, with stacked tensors split, and without the layers of multi-token prediction. Raise DamagedFile
        if the projections of queries, keys and values are stacked, but have an unexpected number of rows."""
        for own, tensor in self.file.tensors.items():
            if own in (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS):
                continue  # these tensors are part of the configuration
            stem, _, kind = own.rpartition(".")
            if stem in self._gguf.stacked and len(tensor.shape) == 3:
                yield from (Part(f"{stem}.{number}.{kind}", own, matrix=number) for number in range(tensor.shape[0]))
                continue
            if (number := re.match(r"blk\.(\d+)\.", own, re.ASCII)) is not None and int(number[1]) in self._ahead:
                continue
            layer, _, kind = own.partition(f".{GATE_UP}.")
            if kind and len(tensor.shape) == 3:
                half = tensor.shape[1] // 2
                yield Part(f"{layer}.ffn_gate_exps.{kind}", own, slice(half))
                yield Part(f"{layer}.ffn_up_exps.{kind}", own, slice(half, 2 * half))
                continue
            layer, _, kind = own.partition(f".{STACKED}.")
            if not kind or STACKED in self._layer_names:
                yield Part(own, own)
                continue
            q, k = self.config.num_heads * self.config.head_dim, self.config.num_kv_heads * self.config.head_dim
            if tensor.shape[:1] != (q + 2 * k,):
                raise DamagedFile(f"{own} is {list(tensor.shape)}, expected {q + 2 * k} rows: those of queries, keys and values")
            for name, start, stop in (("attn_q", 0, q), ("attn_k", q, q + k), ("attn_v", q + k, q + 2 * k)):
                yield Part(f"{layer}.{name}.{kind}", own, slice(start, stop))

    @property
    def _ahead(self) -> range:
        """The numbers of the layers of multi-token prediction."""
        first = self.config.num_layers
        return range(first, first + num_ahead(self.file.metadata, f"{self._gguf.architecture}."))

    def _hub_name(self, own: str) -> str:
        """Return the name in safetensors files of a tensor of the GGUF file. An unknown name is returned unchanged; `Accounting` reports
        it."""
        stem, _, kind = own.rpartition(".")
        if stem in self._names:
            return f"{self._names[stem]}.{kind}"
        stack, _, number = stem.rpartition(".")
        if stack in self._gguf.stacked and number.isdecimal():
            return f"{self._gguf.stacked[stack].replace('*', number)}.{kind}"
        match = re.fullmatch(r"blk\.(\d+)\.([\w.]+)", own, re.ASCII)
        if match is None:
            return own
        if (whole := self._layer_names.get(match[2])) is not None:
            return f"model.layers.{match[1]}.{whole}"
        stem, _, kind = match[2].rpartition(".")
        return own if stem not in self._layer_names else f"model.layers.{match[1]}.{self._layer_names[stem]}.{kind}"

    def _restore(self, part: Part) -> Callable[[Tensor], Tensor] | None:
        """Return the function that undoes a change by converters to this tensor, or None if there is no such function."""
        return self._gguf.restored.get(self._hub_name(part.name).partition(".layers.")[2].partition(".")[2])

    def _is_rotated(self, part: Part) -> bool:
        """Return whether RoPE rotates the results of this tensor, so that converters may have reordered its rows."""
        return re.search(r"\.attn_[qk]\.", part.name) is not None

    def _is_shifted_norm(self, part: Part) -> bool:
        """Return whether converters added a number to this tensor, the weights of a norm."""
        return self._gguf.norm_offset != 0 and part.name.endswith("norm.weight") and UNSHIFTED not in part.name

    def _info(self, part: Part) -> TensorInfo:
        """Return the description of a tensor as `read` returns it. Raise DamagedFile if a change by converters cannot be undone."""
        tensor = self.file.tensors[part.stored_as]
        dtype = FLOAT32 if self._is_shifted_norm(part) else tensor.format.dtype or FLOAT32
        if (restore := self._restore(part)) is not None:
            try:
                restored = restore(-np.ones(tensor.shape, dtype))
            except (IndexError, ValueError) as error:
                raise DamagedFile(f"{part.stored_as} is {list(tensor.shape)}: {error}") from error
            return TensorInfo(restored.shape, restored.dtype, tensor.num_bytes)
        if part.matrix is not None:
            return TensorInfo(tensor.shape[1:], dtype, tensor.num_bytes // tensor.shape[0])
        if part.rows is None:
            return TensorInfo(tensor.shape, dtype, tensor.num_bytes)
        axis = max(0, len(tensor.shape) - 2)
        num_rows = len(range(*part.rows.indices(tensor.shape[axis])))
        shape = (*tensor.shape[:axis], num_rows, *tensor.shape[axis + 1 :])
        return TensorInfo(shape, dtype, tensor.num_bytes * num_rows // tensor.shape[axis])


def _require_model(file: GgufFile) -> None:
    """Raise ModelError if a file contains something other than the weights of a model."""
    kind, architecture = file.metadata.get("general.type", "model"), file.metadata.get("general.architecture")
    if (other := OTHERS.get(str(kind)) or OTHERS.get(str(architecture))) is not None:
        raise ModelError(f"{file.path.name} is {other}")
    if not file.tensors and "tokenizer.ggml.model" in file.metadata:
        raise ModelError(f"{file.path.name} has no tensors, only a vocabulary; take the file with the model's weights")


def _split_pairs(tensor: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of each head from the file's order a0 b0 a1 b1 ... of pairs to a0 a1 ... b0 b1 ..., the order of safetensors files.
    Raise DamagedFile if the rows cannot be divided into heads with an even number of rows."""
    if tensor.shape[0] % (2 * num_heads):
        raise DamagedFile(f"a projection of {tensor.shape[0]} rows cannot be split into {num_heads} heads with an even number of rows")
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _join_pairs(tensor: Tensor, num_heads: int, rotated: int) -> Tensor:
    """Reorder the first `rotated` rows of each head from the file's order a0 a1 ... b0 b1 ... to a0 b0 a1 b1 ..., the order of safetensors
    files. Raise DamagedFile if the rows cannot be divided into heads with at least `rotated` rows."""
    if tensor.shape[0] % num_heads or tensor.shape[0] // num_heads < rotated:
        raise DamagedFile(f"a projection of {tensor.shape[0]} rows cannot be split into {num_heads} heads with {rotated} rotated rows each")
    heads = tensor.reshape(num_heads, tensor.shape[0] // num_heads, *tensor.shape[1:]).copy()
    heads[:, :rotated] = np.stack([heads[:, : rotated // 2], heads[:, rotated // 2 : rotated]], axis=2).reshape(heads[:, :rotated].shape)
    return heads.reshape(tensor.shape)
