"""The demo model in PyTorch, for training only: the Llama architecture on packed sequences.

The compiler serves the model; this file exists to compute gradients. Module names are those of the Hugging Face checkpoint, so the state
dict is stored unchanged as a snapshot.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 5
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def hf_config(self, *, bos_token_id: int, eos_token_id: int) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "use_cache": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
        }


def rotation(shape: Shape, num_positions: int) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of every angle as [positions, head_dim]. The two halves of head_dim are equal, as Llama's rotation
    needs."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * shape.rope_theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x: [batch, heads, tokens, head_dim]
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Past:
    """The keys and values of one layer so far; used only in generation."""

    def __init__(self) -> None:
        self.k: Tensor | None = None  # [batch, kv heads, tokens, head_dim]
        self.v: Tensor | None = None

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.k = k if self.k is None else torch.cat((self.k, k), dim=2)
        self.v = v if self.v is None else torch.cat((self.v, v), dim=2)
        return self.k, self.v


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past: Past | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (proj(x).view(batch, tokens, -1, self.shape.head_dim).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        if past is not None:
            k, v = past.extended(k, v)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past: Past | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        cos, sin = rotation(shape, shape.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, token_ids: Tensor, document_ids: Tensor) -> Tensor:
        """Return the final hidden states, [batch, tokens, hidden]. A token attends only to earlier tokens of the same document.

        Positions continue across documents. This has no effect, because rotary attention depends only on differences of positions.
        """
        tokens = token_ids.shape[1]
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=token_ids.device).tril()
        mask = causal & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
        x = self.model.embed_tokens(token_ids)
        cos, sin = self.get_buffer("cos")[:tokens], self.get_buffer("sin")[:tokens]
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return self.model.norm(x)

    def extend(self, token_ids: Tensor, start: int, past: list[Past]) -> Tensor:
        """Return the final hidden states of tokens from position `start` on. `past` has the keys and values of earlier tokens, one entry
        per layer."""
        end = start + token_ids.shape[1]
        mask = torch.ones(end, end, dtype=torch.bool).tril()[start:]
        x = self.model.embed_tokens(token_ids)
        cos, sin = self.get_buffer("cos")[start:end], self.get_buffer("sin")[start:end]
        for layer, of_layer in zip(self.model.layers, past, strict=True):
            x = layer(x, cos, sin, mask, of_layer)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)
