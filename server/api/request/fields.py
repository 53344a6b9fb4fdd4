"""Refuse fields that are not supported, with a remedy for each, and find unknown fields."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from typing import Annotated, cast
from urllib.parse import quote

from pydantic import BaseModel, Discriminator, Field, model_validator

from server.errors import INVALID_VALUE, UNKNOWN_FIELD, UNSUPPORTED_FIELD, ApiError

log = logging.getLogger(__name__)

NO_LORA = "adapters are not served; merge them into the weights and load the result"
NO_SPECULATION = "speculative decoding is not implemented"
NO_DISTRIBUTED = "prefill and decode run in one worker; there is nothing to transfer"
NO_SAMPLER = "this sampler is not implemented; use temperature, top_p, top_k, min_p or typical_p"
NO_MULTIMODAL = "answers are text, and images and recordings are read only as parts of messages"

# fields that other servers have: by name, why this server refuses the field, or what a client can do instead
UNSUPPORTED: Mapping[str, str] = {
    "audio": NO_MULTIMODAL,
    "mm_processor_kwargs": NO_MULTIMODAL,
    "features": NO_MULTIMODAL,
    "moderation": "moderation is not implemented; ask a model to check the text",
    "web_search_options": "the server has no access to the web",
    "suffix": "only completions have this field",
    "use_beam_search": "beam search is not implemented; use n and best_of",
    "length_penalty": "beam search is not implemented; use n and best_of",
    "early_stopping": "beam search is not implemented; use n and best_of",
    "mirostat": NO_SAMPLER,
    "mirostat_tau": NO_SAMPLER,
    "mirostat_eta": NO_SAMPLER,
    "dry_multiplier": NO_SAMPLER,
    "dry_base": NO_SAMPLER,
    "dry_allowed_length": NO_SAMPLER,
    "xtc_probability": NO_SAMPLER,
    "xtc_threshold": NO_SAMPLER,
    "top_n_sigma": NO_SAMPLER,
    "logits_processors": NO_SAMPLER,
    "custom_logit_processor": NO_SAMPLER,
    "repetition_ngram_size": NO_SAMPLER,
    "repetition_ngram_threshold": NO_SAMPLER,
    "logprob_token_ids": "use top_logprobs",
    "stop_regex": "use stop, or a regex constraint",
    "structural_tag": "use response_format with type structural_tag",
    "best_of": "only completions have this field",
    "guided_decoding_backend": "there is only one backend",
    "guided_whitespace_pattern": "use grammar",
    "thinking_token_budget": "only chat has this field",
    "reasoning_budget": "only chat has this field",
    "chat_template": "templates come with the model; a request cannot bring its own",
    "lora": NO_LORA,
    "lora_path": NO_LORA,
    "lora_request": NO_LORA,
    "adapter_id": NO_LORA,
    "adapter_name": NO_LORA,
    "speculative": NO_SPECULATION,
    "kv_transfer_params": NO_DISTRIBUTED,
    "bootstrap_host": NO_DISTRIBUTED,
    "bootstrap_port": NO_DISTRIBUTED,
    "bootstrap_room": NO_DISTRIBUTED,
    "migration_request": NO_DISTRIBUTED,
    "disaggregated_params": NO_DISTRIBUTED,
    "session_id": "send the whole conversation; the prefix cache has its earlier turns",
    "id_slot": "requests have no slots; the prefix cache finds shared prefixes",
    "n_keep": "the context is never shifted; use truncate_prompt_tokens",
    "input_ids": "use /v1/completions with token ids as prompt",
    "prompt_embeds": NO_MULTIMODAL,
    "repetition_detection": "use repetition_penalty, or stop",
    "spaces_between_special_tokens": "special tokens are shown without spaces between them",
    "vllm_xargs": "the server has no extensions that read this field",
    "extra_args": "the server has no extensions that read this field",
    "skip_reading_prefix_cache": "use a cache_salt of your own",
    "ec_transfer_params": NO_DISTRIBUTED,
    "return_token_offsets": "use logprobs of a completion, which have text_offset",
    "return_prompt_text": "ask /v1/chat/completions/render for the prompt",
    "stream_interval": "every step is sent as an event",
    "watermarking": "nothing is watermarked",
    "n_probs": "use logprobs and top_logprobs",
    "samplers": "the order of samplers is fixed",
    "dynatemp_range": NO_SAMPLER,
    "dynatemp_exponent": NO_SAMPLER,
    "min_keep": NO_SAMPLER,
    "repeat_last_n": "penalties apply to the whole text",
    "dry_penalty_last_n": NO_SAMPLER,
    "dry_sequence_breakers": NO_SAMPLER,
    "adaptive_target": NO_SAMPLER,
    "adaptive_decay": NO_SAMPLER,
    "t_max_predict_ms": "use timeout",
    "reasoning_format": "use separate_reasoning and include_reasoning",
    "grammar_lazy": "offer tools; their grammar constrains calls from the marker on",
    "grammar_triggers": "use response_format with type structural_tag",
    "response_fields": "answers have all their fields",
    "timings_per_token": "use stream_options.continuous_usage_stats",
    "reasoning": "use reasoning_effort",
    "thinking": "use enable_thinking and thinking_token_budget",
    "options": "put the fields of options into the request itself",
    "return_hidden_states": "use /v1/embeddings",
    "input_type": "only embeddings have this field",
    "task": "only embeddings have this field",
    "instruction": "put the instruction before each text, or use prompt_name",
    "late_chunking": "texts are embedded one by one",
    "embd_normalize": "use normalize",
    "padding": "texts are never padded",
    "priority": "embeddings have no priorities",
    "cache_salt": "the server chooses the salt of embeddings",
    "conversation": "use previous_response_id",
    "context_management": "the context is never shifted; send a shorter conversation",
    "prompt": "prompt templates are not stored; send the text itself",
    "image": NO_MULTIMODAL,
    "prewarm": "each request stores its prompt in the prefix cache; ask for an answer of one token",
    "access_programs": "this server has no access programs",
    "container": "this server runs no containers",
    "mcp_servers": "only /v1/responses calls MCP servers; give them there as tools, or offer their functions as tools here",
    "logprobs": "ask /v1/chat/completions for them",
    "top_logprobs": "ask /v1/chat/completions for them",
    "template": "templates come with the model; a request cannot bring its own",
    "context": "send the whole conversation; the prefix cache has its earlier turns",
    "tfs_z": NO_SAMPLER,
    "penalize_newline": NO_SAMPLER,
    "num_keep": "the context is never shifted",
    "embed_dtype": "embeddings are float32",
    "endianness": "embeddings are little-endian",
}
# Samplers and other options of UNSUPPORTED, by their main field. The first tuple has the values of the main field that turn the option off.
# These are accepted, because clients send all fields that they know. The second tuple names the option's further fields, which have no
# effect while the option is off.
OFF: Mapping[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "mirostat": ((0,), ("mirostat_tau", "mirostat_eta")),
    "dynatemp_range": ((0,), ("dynatemp_exponent",)),
    "dry_multiplier": ((0,), ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers")),
    "xtc_probability": ((0,), ("xtc_threshold",)),
    "top_n_sigma": ((0, -1), ()),
    "adaptive_target": ((-1,), ("adaptive_decay",)),
    "tfs_z": ((1,), ()),
    "n_keep": ((0, -1), ()),
}
ON_AT_ZERO = ("adaptive_target", "repeat_last_n", "tfs_z")  # 0 is not NEUTRAL for these: for example, repeat_last_n 0 turns penalties off
UNKNOWN_TYPE = "unknown_type"  # kind of the validation error for an object whose `type` is not known
MAX_NAMES = 32  # most names of ignored fields in a header
KNOWN, FOREIGN = "of a known type", "of a foreign type"  # tags of a union; error paths leave out tags that are no identifiers
NEUTRAL: tuple[object, ...] = (None, False, 0, "", [], {})  # an unsupported field with such a value requests nothing, so it is accepted


def check_unknown(body: Options, *, strict: bool) -> list[str]:
    """Raise ApiError for unsupported fields whose values are not NEUTRAL, and for ON_AT_ZERO fields that are 0. Return the names of other
    unknown fields, and of objects of foreign types, which are also logged; if `strict`, raise ApiError for these fields and objects, too.
    Names are paths. In an item of a list, an unsupported field is treated as an unknown one. A field that is None is never reported:
    clients that send an earlier answer back write null for the fields that the answer lacks."""
    ignored: list[str] = []
    for name, value in _unknown(body, None, []):
        if value is None:
            continue
        if isinstance(value, Foreign):
            if strict:
                raise ApiError(INVALID_VALUE, f"{name}.type is {value.type!r}; expected function", param=f"{name}.type")
            log.info("%s is ignored: its type is %r, and only functions are offered to the model", name, value.type)
            ignored.append(name)
            continue
        reason = None if "[" in name else UNSUPPORTED.get(name.rpartition(".")[2])  # UNSUPPORTED does not apply to list items
        if reason is not None:
            if value not in NEUTRAL or (value == 0 and value is not False and name.rpartition(".")[2] in ON_AT_ZERO):
                raise ApiError(UNSUPPORTED_FIELD, f"{name} is not supported: {reason}", param=name)
        elif strict:
            raise ApiError(UNKNOWN_FIELD, f"{name} is not a field of this request", param=name)
        else:
            ignored.append(name)
    return ignored


def ignored_header(ignored: list[str]) -> dict[str, str]:
    """Return the header that lists ignored fields. The names come from the client, so they are percent-encoded, and at most MAX_NAMES are
    listed."""
    names = [quote(name[:64], safe="!#$&'*+-.^_`|~:/@()<>?[]{}=") for name in ignored[:MAX_NAMES]]
    if len(ignored) > MAX_NAMES:
        names.append(f"and {len(ignored) - MAX_NAMES} more")
    return {"x-ignored-params": ", ".join(names)} if names else {}


class Options(BaseModel):
    """A JSON object in a request. Unknown fields are reported for objects at any depth of the request."""

    model_config = {"extra": "allow", "strict": True, "allow_inf_nan": False, "protected_namespaces": (), "defer_build": True}

    @property
    def unknown(self) -> Mapping[str, object]:
        """The fields that this class does not declare, by name."""
        return self.model_extra or {}


class Foreign(Options):
    """An object of a type that this server does not know, such as a tool that only another server runs. Like an unknown field, the object
    is ignored; only its type is stored."""

    type: Annotated[str, Field(max_length=64)]

    @model_validator(mode="before")
    @classmethod
    def _only_type(cls, value: object) -> object:
        """Return an object with only the type, as a text of at most 64 characters. Return a value that is no object as it is."""
        return {"type": str(cast("dict[str, object]", value).get("type"))[:64]} if isinstance(value, dict) else value


def without_off(further: Mapping[str, object], *, has_penalty: bool) -> Mapping[str, object]:
    """Return unknown fields without those that belong to an option which is turned off, and without `repeat_last_n` if `has_penalty` (the
    request penalises tokens) is false, or if the value is -1, which asks for what this server does: apply penalties to the whole text."""
    if not further:
        return further
    off: set[str] = set()
    for switch, (values, companions) in OFF.items():
        if (value := further.get(switch)) is None or value in values:
            off |= {switch, *companions}
    if not has_penalty or further.get("repeat_last_n") == -1:
        off.add("repeat_last_n")
    return {name: value for name, value in further.items() if name not in off}


def only_type(value: object, known: Container[str | None]) -> object:
    """Return an object of an unknown type with only its type: the object is refused as a whole later, and its fields may have values that
    fields of known objects cannot have. Return any other value as it is."""
    kind = cast("dict[str, object]", value).get("type") if isinstance(value, dict) else None
    return {"type": kind} if isinstance(kind, str) and kind not in known else value


def foreign_unless(*known: str, further: Mapping[str, str] | None = None) -> Discriminator:
    """Return the discriminator of a union of a known object, whose `type` is absent or one of `known`, and of a foreign object. `further`
    maps other types to the tags of further members of the union."""
    tags = further or {}

    def kind_of(value: object) -> str:
        kind = cast("dict[str, object]", value).get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return tags.get(kind, FOREIGN) if isinstance(kind, str) and kind not in known else KNOWN

    return Discriminator(kind_of)


# path of an object in the request: the parent's path, the field's name, and the index in a list or -1
Place = tuple["Place", str, int] | None


def _unknown(body: Options, place: Place, found: list[tuple[str, object]]) -> list[tuple[str, object]]:
    """Add the unknown fields of `body` and of the objects in it to `found`, with their paths, and also each object of a foreign type in a
    list. Return `found`. A body may have ten thousand objects, so paths are formatted only for entries of `found`."""
    if unknown := body.unknown:
        found += [(_written(place) + name, value) for name, value in unknown.items()]
    for name, value in body.__dict__.items():
        if value is None:
            continue  # most fields are absent
        if isinstance(value, Options):
            _unknown(value, (place, name, -1), found)
        elif isinstance(value, list) and value and not isinstance(value[0], int):  # skip token ids, which are many
            for index, item in enumerate(cast("list[object]", value)):
                if isinstance(item, Foreign):
                    found.append((_written((place, name, index)).removesuffix("."), item))
                elif isinstance(item, Options):
                    _unknown(item, (place, name, index), found)
    return found


def _written(place: Place) -> str:
    """Return the path of an object as a text, with a dot at its end."""
    if place is None:
        return ""
    outer, name, index = place
    return _written(outer) + name + (f"[{index}]." if index >= 0 else ".")
