"""Models with random weights, generated on demand to measure speed. Dense models resemble Llama, mixtures of experts resemble Qwen3-MoE,
gpt-oss or DeepSeek V2 Lite, and hybrids resemble Qwen3.5 or Granite 4, but have attention in every eighth layer."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.config import Activation, Latent, ModelConfig, Recurrence
from compiler.frontend.fields import Fields
from compiler.frontend.mixture import ClippedGate, ExpertNames, Mixture, joint_experts
from compiler.frontend.quantized.fp8 import read_fp8
from compiler.frontend.quantized.held import HeldWeights
from compiler.frontend.quantized.source import QuantizedWeights
from compiler.frontend.registry import decoder_family
from compiler.frontend.rope import Rope
from compiler.frontend.weights import Derived, TensorInfo, WeightSource
from compiler.ir.dtypes import DType
from server.settings import SettingsError

# name: (hidden, layers, heads, kv heads, head size, ffn, vocabulary)
SHAPES = {
    "0.5b": (1024, 24, 16, 4, 64, 5632, 32000),
    "1.5b": (1536, 28, 12, 2, 128, 8960, 151936),
    "8b-shape": (4096, 32, 32, 8, 128, 14336, 128256),
    "4b-gemma-shape": (2560, 34, 8, 4, 256, 10240, 262144),
    "30b-a3b": (2048, 48, 32, 4, 128, 768, 151936),
    "gpt-oss-shape": (2880, 24, 64, 8, 64, 2880, 201088),
    "0.6b-hybrid": (1024, 24, 8, 2, 128, 3584, 32000),
    "0.6b-mamba": (1024, 24, 8, 2, 128, 3584, 32000),
    "16b-latent": (2048, 27, 16, 1, 576, 10944, 102400),
}
MIXTURES = {
    "30b-a3b": Mixture(num_experts=128, num_chosen=8, size=768),
    "gpt-oss-shape": Mixture(num_experts=32, num_chosen=4, size=2880, bias=True, clipped=ClippedGate(1.702, 7.0)),
    "16b-latent": Mixture(num_experts=64, num_chosen=6, size=1408, normalized=False, shared_size=2816),
}
LATENTS = {"16b-latent": Latent(rank=512, query_rank=None, plain_size=128, rotated_size=64, value_size=128)}
DELTA, MAMBA = "qwen3_5_text", "granitemoehybrid"  # families of the hybrids: with the gated delta rule, and with Mamba-2
# `synthetic_config` replaces the empty set by the numbers of the recurrent layers.
HYBRIDS = {
    "0.6b-hybrid": (DELTA, Recurrence(frozenset(), taps=4, num_keys=16, num_heads=16, key_size=128, size=128)),
    "0.6b-mamba": (MAMBA, Recurrence(frozenset(), taps=4, num_keys=1, num_heads=32, key_size=128, size=64, convolution_bias=True)),
}
ATTENTION_EVERY = 8  # in a hybrid, every eighth layer is an attention layer
WINDOW = 128  # length of the window, in tokens, in every second layer of gpt-oss
FP8 = "fp8"  # matrices as in an fp8 checkpoint
FP8_SCALE = "_scale_inv"  # ending of the names of scales
HEAD_SIZES = (64, 80, 96, 128, 256)


def check_shape(name: str, option: str) -> None:
    """Raise SettingsError unless there is a shape of this name. The message names the option that has the name as its value."""
    if name not in SHAPES:
        raise SettingsError(f"{option} is {name!r}; expected one of {', '.join(SHAPES)}")


def synthetic_config(name: str, *, head_size: int | None = None, kv_heads: int | None = None, layers: int | None = None) -> ModelConfig:
    """Return the configuration of a shape. `head_size`, `kv_heads` and `layers` replace those of the shape; the number of heads does not
    change. Raise SettingsError if there is no such shape, or if `kv_heads` does not divide the heads."""
    check_shape(name, "--synthetic")
    hidden, own_layers, heads, own_kv_heads, own_size, ffn, vocab = SHAPES[name]
    if heads % (kv_heads := kv_heads or own_kv_heads):
        raise SettingsError(f"--kv-heads is {kv_heads}; expected a divisor of the {heads} heads of {name}")
    config = llama_config(hidden, layers or own_layers, heads, kv_heads, head_size or own_size, ffn, vocab)
    if name in HYBRIDS:
        stateful = frozenset(layer for layer in range(config.num_layers) if (layer + 1) % ATTENTION_EVERY)
        family, recurrence = HYBRIDS[name]
        config = replace(config, family=family, recurrence=replace(recurrence, layers=stateful))
        return replace(config, rope=None) if family == MAMBA else replace(config, norm_offset=1.0)
    if name not in MIXTURES:
        return config
    config = replace(config, family="qwen3_moe", mixture=MIXTURES[name])
    if (latent := LATENTS.get(name)) is not None:
        return replace(config, family="deepseek_v2", latent=latent, rope=Rope(1e4, latent.rotated_size, interleaved=True))
    return config if MIXTURES[name].clipped is None else _like_gpt_oss(config)


def _like_gpt_oss(config: ModelConfig) -> ModelConfig:
    """Return the configuration with the properties that distinguish gpt-oss: windows in every second layer, sinks, and biases of
    attention."""
    windows = tuple(None if layer % 2 else WINDOW for layer in range(config.num_layers))
    return replace(config, family="gpt_oss", windows=windows, sinks=True, qkv_bias=True, output_bias=True)


def llama_config(hidden: int, layers: int, heads: int, kv_heads: int, size: int, ffn: int, vocab: int) -> ModelConfig:
    """Return the configuration of a model of the Llama family with these sizes. `size` is the size of a head."""
    return ModelConfig(
        "llama",
        vocab,
        hidden,
        ffn,
        layers,
        heads,
        kv_heads,
        size,
        Activation.SILU,
        1e-5,
        8192,
        size**-0.5,
        (None,) * layers,
        Rope(1e4, size),
    )


def shapes_of(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the checkpoint's tensors by name. One tensor has the weights of a projection for all experts of a layer."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
        "lm_head.weight": (c.vocab_size, c.hidden_size),
    }
    for layer in range(c.num_layers):
        parts = {
            **(_recurrent(c) if layer in c.stateful else _attention(c)),
            "input_layernorm.weight": (c.hidden_size,),
            "post_attention_layernorm.weight": (c.hidden_size,),
            **_biases(c),
            **_feed_forward(c),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes


def _attention(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an attention layer. In a hybrid with the gated delta rule, the query projection includes gates. In such a hybrid
    and in Qwen3-MoE, heads have norms. Latent attention has projections of its own."""
    if (m := c.latent) is not None:
        return {
            "self_attn.q_proj.weight": (c.num_heads * (m.plain_size + m.rotated_size), c.hidden_size),
            "self_attn.kv_a_proj_with_mqa.weight": (m.kept_size, c.hidden_size),
            "self_attn.kv_a_layernorm.weight": (m.rank,),
            "self_attn.kv_b_proj.weight": (c.num_heads * (m.plain_size + m.value_size), m.rank),
            "self_attn.o_proj.weight": (c.hidden_size, c.num_heads * m.value_size),
        }
    size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    norms: dict[str, tuple[int, ...]] = {"self_attn.q_norm.weight": (c.head_dim,), "self_attn.k_norm.weight": (c.head_dim,)}
    return {
        "self_attn.q_proj.weight": (2 * size if gates_attention(c) else size, c.hidden_size),
        "self_attn.k_proj.weight": (kv_size, c.hidden_size),
        "self_attn.v_proj.weight": (kv_size, c.hidden_size),
        "self_attn.o_proj.weight": (c.hidden_size, size),
        **(norms if c.family in ("qwen3_moe", "qwen3_5_text") else {}),
    }


def gates_attention(c: ModelConfig) -> bool:
    """Return whether the query projection also makes gates for the result of attention."""
    return c.family == DELTA


def _recurrent(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer with the gated delta rule or with Mamba-2."""
    r = c.recurrence
    assert r is not None, c
    if c.family == MAMBA:
        return {
            "mamba.in_proj.weight": (r.values + r.channels + r.num_heads, c.hidden_size),
            "mamba.conv1d.weight": (r.channels, 1, r.taps),
            "mamba.conv1d.bias": (r.channels,),
            "mamba.A_log": (r.num_heads,),
            "mamba.D": (r.num_heads,),
            "mamba.dt_bias": (r.num_heads,),
            "mamba.norm.weight": (r.values,),
            "mamba.out_proj.weight": (c.hidden_size, r.values),
        }
    parts: dict[str, tuple[int, ...]] = {
        "in_proj_qkv.weight": (r.channels, c.hidden_size),
        "in_proj_z.weight": (r.values, c.hidden_size),
        "in_proj_a.weight": (r.num_heads, c.hidden_size),
        "in_proj_b.weight": (r.num_heads, c.hidden_size),
        "conv1d.weight": (r.channels, 1, r.taps),
        "A_log": (r.num_heads,),
        "dt_bias": (r.num_heads,),
        "norm.weight": (r.size,),
        "out_proj.weight": (c.hidden_size, r.values),
    }
    return {f"linear_attn.{name}": shape for name, shape in parts.items()}


def _feed_forward(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's MLP, or of its router, its experts and the shared expert if it has one."""
    if c.mixture is None:
        wide, narrow = (c.intermediate_size, c.hidden_size), (c.hidden_size, c.intermediate_size)
        if c.family == MAMBA:
            return {"shared_mlp.input_linear.weight": (2 * wide[0], wide[1]), "shared_mlp.output_linear.weight": narrow}
        return {"mlp.gate_proj.weight": wide, "mlp.up_proj.weight": wide, "mlp.down_proj.weight": narrow}
    experts, size, shared = c.mixture.num_experts, c.mixture.size, _names(c).shared
    beside: dict[str, tuple[int, ...]] = {}
    if shared is not None:
        wide = (c.mixture.shared_size, c.hidden_size)
        beside = {f"{shared}.gate_proj.weight": wide, f"{shared}.up_proj.weight": wide, f"{shared}.down_proj.weight": wide[::-1]}
    return {
        **beside,
        f"{_names(c).router}.weight": (experts, c.hidden_size),
        "mlp.experts.gate_proj.weight": (experts, size, c.hidden_size),
        "mlp.experts.up_proj.weight": (experts, size, c.hidden_size),
        "mlp.experts.down_proj.weight": (experts, c.hidden_size, size),
    }


def _biases(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the biases and sinks of a gpt-oss layer, or {} for other models."""
    if c.mixture is None or not c.mixture.bias:
        return {}
    experts, size, kv_size = c.mixture.num_experts, c.mixture.size, c.num_kv_heads * c.head_dim
    return {
        "self_attn.q_proj.bias": (c.num_heads * c.head_dim,),
        "self_attn.k_proj.bias": (kv_size,),
        "self_attn.v_proj.bias": (kv_size,),
        "self_attn.o_proj.bias": (c.hidden_size,),
        "self_attn.sinks": (c.num_heads,),
        f"{_names(c).router}.bias": (experts,),
        "mlp.experts.gate_proj.bias": (experts, size),
        "mlp.experts.up_proj.bias": (experts, size),
        "mlp.experts.down_proj.bias": (experts, c.hidden_size),
    }


def _names(c: ModelConfig) -> ExpertNames:
    """Return the names that the checkpoints of a mixture's family have for the tensors of experts."""
    names = decoder_family(c.family).experts
    assert names is not None, c.family
    return names


def dtypes_of(config: ModelConfig) -> dict[str, DType]:
    """Return the element type of each tensor of the checkpoint: bfloat16."""
    return dict.fromkeys(shapes_of(config), DType.BF16)


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """A weight source that generates arrays in bfloat16 on demand; the same name and shape always give the same values. All elements of
    vectors are 1."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        dtype = DType.BF16.numpy
        return {name: TensorInfo(shape, dtype, prod(shape) * dtype.itemsize) for name, shape in self.shapes.items()}

    def read(self, name: str) -> NDArray[Any]:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        shape = self.shapes[name]
        if len(shape) <= 1:
            return np.ones(shape, DType.BF16.numpy)
        scale = shape[-1] ** -0.5
        block = (
            rng.standard_normal((min(prod(shape[:-1]), 256), shape[-1]), np.float32) * scale
        )  # repeat a block of random numbers, because drawing a billion numbers takes minutes
        return np.resize(block.astype(DType.BF16.numpy), shape)

    def release(self, name: str) -> None:
        """Do nothing, since this source stores no arrays."""

    def digest(self) -> str:
        """Return a digest of the names and shapes, which decide all values."""
        return hashlib.blake2b(repr(sorted(self.shapes.items())).encode(), digest_size=16).hexdigest()


class Fp8Weights(Derived):
    """Another source's weights as an fp8 checkpoint stores them: matrices of layers, except routers of experts, are 8-bit floats with a
    scale per square block. Other tensors stay as they are."""

    def __init__(self, source: WeightSource, block: int) -> None:
        """`block`: the number of rows of a block, and of its columns."""
        self.block = block
        self._last: dict[str, NDArray[Any]] = {}  # the tensors that were read last
        found: dict[str, TensorInfo] = {}
        for name, info in source.tensors.items():
            found[name] = info
            if _is_quantised(name, info):
                rows, columns = info.shape
                found[name] = TensorInfo(info.shape, DType.E4M3.numpy, rows * columns)
                blocks = -(-rows // block), -(-columns // block)
                found[name + FP8_SCALE] = TensorInfo(blocks, DType.F32.numpy, 4 * prod(blocks))
        super().__init__(source, found)

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor. All experts of a layer have the weights of the first expert, because rounding billions of numbers takes
        minutes."""
        name = re.sub(r"\.experts\.\d+\.", ".experts.0.", name)
        matrix = name.removesuffix(FP8_SCALE)
        if matrix + FP8_SCALE not in self.tensors:
            return self.source.read(name)
        if matrix not in self._last:
            values = self.source.read(matrix)
            scales, (rows, columns) = self._scales(values), values.shape
            spread = scales.repeat(self.block, 0)[:rows].repeat(self.block, 1)[:, :columns]
            self._last.clear()
            self._last.update({matrix: (values.astype(np.float32) / spread).astype(DType.E4M3.numpy), matrix + FP8_SCALE: scales})
        return self._last[name]

    def release(self, name: str) -> None:
        self.source.release(name.removesuffix(FP8_SCALE))

    def _scales(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Return the scales with which the largest weight of each block becomes the largest number of the format."""
        sizes, starts = np.abs(values.astype(np.float32)), [np.arange(0, length, self.block) for length in values.shape]
        largest = np.maximum.reduceat(np.maximum.reduceat(sizes, starts[0], 0), starts[1], 1)
        return (np.maximum(largest, 1e-12) / DType.E4M3.ends[1]).astype(np.float32)


def _is_quantised(name: str, info: TensorInfo) -> bool:
    """Return whether an fp8 checkpoint stores a tensor in 8 bits: a matrix of a layer that is not the router of experts."""
    return ".layers." in name and name.endswith(".weight") and "mlp.gate." not in name and len(info.shape) == 2


def fp8_weights(source: WeightSource, block: int = 128) -> HeldWeights:
    """Return another source's weights rounded to 8-bit floats with a scale per block of `block` rows and columns, as a load reads them from
    an fp8 checkpoint: the program keeps their 8 bits."""
    method = read_fp8(Fields({"weight_block_size": [block, block]}, "quantization_config"))
    return HeldWeights(QuantizedWeights(Fp8Weights(source, block), method))


def fp8_model(config: ModelConfig) -> WeightSource:
    """Return random weights of a model as a load reads them from an fp8 checkpoint. As in such a checkpoint, each expert has tensors of its
    own, which the returned source joins to one tensor per projection and layer. Raise SettingsError for gpt-oss, whose files have all
    experts in one tensor."""
    if config.family == "gpt_oss":
        raise SettingsError(f"synthetic models of the family {config.family} have no fp8 weights; choose another --quantize")
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes_of(config).items():
        before, experts, after = name.partition(".experts.")
        are_matrices = experts and len(shape) == 3
        shapes |= {f"{before}{experts}{i}.{after}": shape[1:] for i in range(shape[0])} if are_matrices else {name: shape}
    return joint_experts(fp8_weights(RandomWeights(shapes)), None if config.mixture is None else _names(config))
