"""Write a synthetic model as a folder of files, so that a server can load it like any other model."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from compiler.frontend.config import ModelConfig
from deploy import demo
from deploy.bench.synthetic import RandomWeights, shapes_of, synthetic_config
from runtime.own_folder import OwnFolder
from server.settings import SettingsError

FOLDER = "relaxserve-synthetic-"  # beginning of the names of temporary folders
PREFIX = "synthetic-"  # beginning of the name of a synthetic model; the name of its shape follows


@contextmanager
def model_folder(model: str) -> Generator[Path]:
    """Yield the folder of a model: `demo`, a path (which need not exist), or `synthetic-SHAPE`. The files of a synthetic model are written
    first, and deleted at the end of the `with` block. Raise SettingsError for a shape that is unknown or cannot be written."""
    if model == demo.NAME:
        yield demo.MODEL
    elif model.startswith(PREFIX):
        with OwnFolder(Path(tempfile.gettempdir()), FOLDER) as made:
            write_checkpoint(synthetic_config(model.removeprefix(PREFIX)), made.path)
            yield made.path
    else:
        yield Path(model)


def write_checkpoint(config: ModelConfig, folder: Path) -> None:
    """Write the files of a model into a folder. The weights are random, in bfloat16. The tokenizer is the demo model's, with further tokens
    and merges up to the vocabulary size, so that it takes as long to read as a real one. No text is encoded with the further tokens,
    because they contain digits, and the tokenizer makes each digit a token of its own. Raise SettingsError for models without rotary
    positions and for those with latent attention."""
    if config.rope is None or config.latent is not None:
        raise SettingsError(
            f"synthetic models of the family {config.family} are not written as files; `relaxserve bench model` measures them"
        )
    shapes = shapes_of(config)
    source = RandomWeights(shapes)
    save_file({name: source.read(name) for name in shapes}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(config)))
    tokenizer = json.loads((demo.MODEL / "tokenizer.json").read_text())
    num_known = len(tokenizer["model"]["vocab"]) + sum(t["id"] >= len(tokenizer["model"]["vocab"]) for t in tokenizer["added_tokens"])
    further = range(config.vocab_size - num_known)
    tokenizer["model"]["vocab"] |= {f"w{i}": num_known + i for i in further}
    tokenizer["model"]["merges"] += [(f"w{i // 10 if i > 9 else ''}", str(i % 10)) for i in further]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo.MODEL / name, folder / name)


def _config(c: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
    assert c.rope is not None, c
    return {
        **_mixture(c),
        **_recurrence(c),
        "model_type": c.family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope.theta,
        "max_position_embeddings": c.max_context,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }


def _recurrence(c: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json for layers with the gated delta rule, or {} if the model has none."""
    if (r := c.recurrence) is None:
        return {}
    return {
        "layer_types": ["linear_attention" if layer in r.layers else "full_attention" for layer in range(c.num_layers)],
        "linear_conv_kernel_dim": r.taps,
        "linear_num_key_heads": r.num_keys,
        "linear_num_value_heads": r.num_heads,
        "linear_key_head_dim": r.key_size,
        "linear_value_head_dim": r.size,
        "partial_rotary_factor": 1.0,
    }


def _mixture(c: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json for experts, or {} if the model has none."""
    if c.mixture is None:
        return {}
    chosen = {"num_experts_per_tok": c.mixture.num_chosen}
    if c.family == "gpt_oss":
        return {**chosen, "num_local_experts": c.mixture.num_experts, "rope_scaling": {"rope_type": "default"}}
    return {
        **chosen,
        "num_experts": c.mixture.num_experts,
        "moe_intermediate_size": c.mixture.size,
        "norm_topk_prob": c.mixture.normalized,
    }
