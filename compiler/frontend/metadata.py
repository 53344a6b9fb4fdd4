"""The fields of a config.json that a family may leave unread, since they do not change what the model computes."""

from __future__ import annotations

from fnmatch import fnmatchcase

from compiler.frontend.errors import ConfigError, listed
from compiler.frontend.fields import Fields

# Shell patterns of field names.
METADATA = (
    # names, versions, and the classes that transformers uses
    *(
        "_*",
        "name_or_path",
        "architectures",
        "auto_map",
        "transformers_version",
        "js_config",
        "sentence_transformers",
        "tokenizer_class",
        "*unsloth*",
    ),
    *("dtype", "torch_dtype", "torchscript", "use_bfloat16", "tf_legacy_loss", "is_llama_config", "neuron", "model_name"),
    # special tokens, labels and limits of the tokenizer
    *("*_token_id", "*_token_ids", "*_token_index", "*_tokens", "im_start_id", "im_end_id", "text_start_id", "text_end_id"),
    *("id2label", "label2id", "num_labels", "problem_type", "classifier_*", "finetuning_task", "task_specific_params", "vocab_type"),
    *("model_max_length", "max_sequence_length", "max_seq_len", "seq_length"),
    # training
    *("*dropout*", "*_pdrop", "initializer_*", "*_init_std", "gradient_checkpointing*", "pretraining_tp", "finetuned", "directionality"),
    *("router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef", "aux_loss_alpha"),
    *("pooler_*", "cross_attention_hidden_size", "tie_encoder_decoder", "pruned_heads", "summary_*", "matryoshka_dimensions"),
    # settings of the cache and the execution in transformers
    *("use_cache", "cache_implementation", "attn_implementation", "chunk_size_feed_forward", "return_dict*", "output_*"),
    *("use_flash_attn", "use_flash_attention", "fuse_*", "compression_ratio"),
    # defaults of generation
    *("do_sample", "early_stopping", "temperature", "top_k", "top_p", "typical_p", "min_length", "max_length", "num_beam*"),
    *("num_return_sequences", "*_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("remove_invalid_values", "prefix"),
)
# field -> the value that selects the supported behaviour
NEUTRAL = {"full_attn_mod": 1, "interpolate_factor": 1, "is_decoder": True, "activation": "swiglu"}


def require_read(fields: Fields, model_type: str) -> None:
    """Raise ConfigError if the family left fields unread that neither match METADATA nor have the value in NEUTRAL: such fields might
    change what the model computes."""
    found = {path: value for path, value in fields.unread() if not _may_stay_unread(path.rpartition(".")[2], value)}
    if found:
        raise ConfigError(
            f"{fields.where} has fields that are not supported for {model_type}: "
            + listed(f"{path}: {value!r:.40}" for path, value in found.items())
            + ". Delete a field only if the model computes the same without it"
        )


def _may_stay_unread(name: str, value: object) -> bool:
    return (name in NEUTRAL and value == NEUTRAL[name]) or any(fnmatchcase(name, pattern) for pattern in METADATA)
