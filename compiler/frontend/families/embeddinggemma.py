"""EmbeddingGemma: the layer of Gemma 3 in an encoder. In layers with a window, a token attends to half a window in each direction. A
config.json of EmbeddingGemma has the model type gemma3_text, and `gemma3_text.read` chooses this family."""

from __future__ import annotations

from compiler.frontend.families import gemma3_text
from compiler.frontend.family import EncoderFamily
from compiler.frontend.layers.encoder import EncoderLayer, Stem, attend, gated_mlp, head_norm, norm, project, rotate
from compiler.ir.graph.atoms import Var


def embed(at: Stem) -> Var:
    net, c = at.net, at.config
    return net.scale(net.embedding(f"{at.prefix}embed_tokens", at.texts.tokens, c.vocab_size, c.hidden_size), c.embedding_scale)


def layer(at: EncoderLayer, x: Var) -> Var:
    x = at.net.add(x, norm(at, _attention(at, norm(at, x, "input_layernorm")), "post_attention_layernorm"))
    wide = gated_mlp(at, norm(at, x, "pre_feedforward_layernorm"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    return at.net.add(x, norm(at, wide, "post_feedforward_layernorm"))


def _attention(at: EncoderLayer, h: Var) -> Var:
    counts = {"q": at.config.num_heads, "k": at.config.num_kv_heads, "v": at.config.num_kv_heads}
    q, k, v = (project(at, h, f"self_attn.{part}_proj", count) for part, count in counts.items())
    q, k = (rotate(at, head_norm(at, heads, f"self_attn.{part}_norm")) for part, heads in (("q", q), ("k", k)))
    return attend(at, q, k, v, "self_attn.o_proj")


FAMILY = EncoderFamily(
    (gemma3_text.BOTH_WAYS,), gemma3_text.read, layer, None, prefix="model.", embed=embed, layers="layers", last_norm="norm"
)
