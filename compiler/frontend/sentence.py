"""How token vectors become one vector per text, as the files of sentence-transformers in a model directory describe it: by pooling, then by
projections, then by normalisation. The files also state prompts, and the maximum length of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from compiler.frontend.errors import ConfigError
from compiler.frontend.fields import MAX_TOKENIZER_BYTES, Fields, read_json
from runtime.files import is_there


class Pooling(StrEnum):
    """How the vectors of a text's tokens become one vector."""

    MEAN = "mean"  # mean over all tokens
    CLS = "cls"  # vector of the first token
    LAST = "last"  # vector of the last token
    MAX = "max"  # maximum over all tokens, per element
    WEIGHTED_MEAN = "weighted mean"  # mean over all tokens, each weighted by its position in the text, from 1
    ROOT_MEAN = "mean over the root"  # sum over all tokens, divided by the square root of their number


# Names in 1_Pooling/config.json, without the prefix `pooling_mode_`.
POOLING_MODES = {
    "mean_tokens": Pooling.MEAN,
    "cls_token": Pooling.CLS,
    "lasttoken": Pooling.LAST,
    "max_tokens": Pooling.MAX,
    "weightedmean_tokens": Pooling.WEIGHTED_MEAN,
    "mean_sqrt_len_tokens": Pooling.ROOT_MEAN,
}
# Values of the field `pooling_mode`, which newer files have instead of the fields `pooling_mode_*`.
POOLING_NAMES = {
    "mean": Pooling.MEAN,
    "cls": Pooling.CLS,
    "lasttoken": Pooling.LAST,
    "max": Pooling.MAX,
    "weightedmean": Pooling.WEIGHTED_MEAN,
    "mean_sqrt_len_tokens": Pooling.ROOT_MEAN,
}


# The first of these files that exists is read. The first versions of sentence-transformers named the file after the kind of model.
SENTENCE_FILES = tuple(
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
MOST_TOKENS = 8192  # if the tokenizer's file states a larger maximum length, it is not taken as the longest text of an embedding model
# Kind of a module -> the kinds of modules that it may follow directly. Kinds that are not listed may follow any kind.
FOLLOWS = {"Transformer": ("Transformer",), "Pooling": ("Transformer", "LogitScore"), "Dense": ("Pooling", "Dense")}
DENSE_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")  # classes of torch.nn


@dataclass(frozen=True, slots=True)
class Dense:
    """A projection of the pooled vector, followed by an activation. The names of its weights begin with the name of its folder:
    `2_Dense.linear.weight`."""

    folder: str
    in_size: int
    size: int
    bias: bool
    activation: str  # one of DENSE_ACTIVATIONS


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """How a text becomes an embedding."""

    pooling: Pooling
    normalize: bool  # whether embeddings have length 1
    prompts: tuple[tuple[str, str], ...] = ()  # (name, text that precedes an input) of each prompt
    default_prompt: str | None = None  # name of the prompt that is used by default
    max_tokens: int | None = None  # longest text that the files state, often less than the context; None: they state none
    dense: tuple[Dense, ...] = ()
    is_stated: bool = False  # whether the model's files state the pooling
    projected_size: int | None = None  # size to which the model itself projects pooled vectors; None: it does not project them

    def size_of(self, hidden_size: int) -> int:
        """Return the size of an embedding, given the hidden size of the model."""
        return self.dense[-1].size if self.dense else self.projected_size or hidden_size


def load_embedding(directory: Path, default: EmbeddingConfig) -> EmbeddingConfig:
    """Read from the files of sentence-transformers how texts are embedded. Without these files, return the family's `default`. Raise
    ConfigError if the files state something that is not supported."""
    stated = next((file for file in SENTENCE_FILES if is_there(directory / file)), SENTENCE_FILES[0])
    sentence, prompts = (_load(directory / file) for file in (stated, "config_sentence_transformers.json"))
    if sentence.flag("do_lower_case", False) and not _tokenizer_lowers(directory):
        raise sentence.error("do_lower_case", "false, because the tokenizer must do the lower-casing")
    embedding, max_tokens = default, sentence.integer("max_seq_length", None)
    if is_there(modules := directory / "modules.json"):
        embedding = _read_modules(read_json(modules), directory, default)
        max_tokens = max_tokens or _length_of_tokenizer(directory)
    texts = prompts.raw("prompts", {})
    if not isinstance(texts, Mapping) or not all(isinstance(text, str) for text in texts.values()):
        raise prompts.error("prompts", "an object of texts")
    name = prompts.text("default_prompt_name", None)
    if name is not None and name not in texts:
        expected = f"one of {', '.join(sorted(texts))}" if texts else "null, because `prompts` defines no prompts"
        raise prompts.error("default_prompt_name", expected)
    return replace(embedding, prompts=tuple(texts.items()), default_prompt=name, max_tokens=max_tokens)


def _length_of_tokenizer(directory: Path) -> int | None:
    """Return the maximum number of tokens of a text that the tokenizer's file states, or None if it states none, or one above MOST_TOKENS.
    Newer versions of sentence-transformers store the length of the longest text in this file. But the file of a tokenizer without a limit
    states a huge number, and a file that comes from a decoder states the decoder's context."""
    found = _load(directory / "tokenizer_config.json").raw("model_max_length")
    return found if type(found) is int and 0 < found <= MOST_TOKENS else None


def _tokenizer_lowers(directory: Path) -> bool:
    """Return whether the normalizer of tokenizer.json makes texts lower case. If it does, the setting `do_lower_case` of
    sentence-transformers changes no tokens, except that of a capital sigma at the end of a word."""
    if not is_there(file := directory / "tokenizer.json"):
        return False
    return _lowers(Fields(read_json(file, most_bytes=MAX_TOKENIZER_BYTES), file.name).raw("normalizer"))


def _lowers(normalizer: object) -> bool:
    """Return whether a normalizer of tokenizer.json, or one in a sequence of them, makes texts lower case."""
    match normalizer:
        case {"type": "Lowercase"} | {"type": "BertNormalizer", "lowercase": True}:
            return True
        case {"type": "Sequence", "normalizers": [*parts]}:
            return any(map(_lowers, parts))
        case _:
            return False


def _load(path: Path) -> Fields:
    """Return the fields of a file, or no fields if there is no such file."""
    return Fields(read_json(path) if is_there(path) else {}, path.name)


def read_kinds(modules: Any) -> list[tuple[str, Fields]]:
    """Return the entries of a modules.json, each with the name of its class."""
    if not isinstance(modules, list):
        raise ConfigError("modules.json is not a list")
    entries = [Fields(entry, "an entry of modules.json") for entry in modules]
    return [(module.text("type").rsplit(".", 1)[-1], module) for module in entries]


def settings_of(module: Fields, directory: Path) -> Fields:
    """Return the fields of the config.json in the folder of a module; none if there is no such file. Raise ConfigError if the path of the
    module is anything but the name of a folder."""
    path = module.text("path")
    if Path(path).name != path:
        raise module.error("path", "the name of a folder in the model's folder")
    return _load(directory / path / "config.json")


def _read_modules(modules: Any, directory: Path, default: EmbeddingConfig) -> EmbeddingConfig:
    """Read the modules: pooling, then projections, then normalisation, each optional. Without a module for pooling, the pooling is that of
    `default`; without one for normalisation, embeddings are not normalised. `reranker.py` reads the module `LogitScore`. Raise ConfigError
    for other modules or another order, and for settings that are not supported."""
    found, last = replace(default, normalize=False), "Transformer"
    for kind, module in read_kinds(modules):
        if last not in (before := FOLLOWS.get(kind, (last,))):
            raise module.error("type", f"{kind} only after {' or '.join(before)}, but it follows {last}")
        match kind:
            case "Transformer" | "LogitScore":
                pass
            case "Pooling":
                found = replace(found, pooling=_read_pooling(settings_of(module, directory)), is_stated=True)
            case "Dense":
                found = replace(found, dense=(*found.dense, _read_dense(module.text("path"), settings_of(module, directory))))
            case "Normalize":
                settings = settings_of(module, directory) if "path" in module else module
                settings.require(module_input_name="sentence_embedding", module_output_name="sentence_embedding")
                found = replace(found, normalize=True)
            case _:
                raise module.error("type", "Transformer, Pooling, Dense, Normalize or LogitScore")
        last = kind
    return found


def _read_dense(folder: str, fields: Fields) -> Dense:
    name = fields.text("activation_function", "torch.nn.modules.activation.Tanh").rsplit(".", 1)[-1]
    if name not in DENSE_ACTIVATIONS:
        raise fields.error("activation_function", f"one of {', '.join(DENSE_ACTIVATIONS)}")
    fields.require(module_input_name="sentence_embedding", module_output_name="sentence_embedding", use_residual=False)
    return Dense(folder, fields.integer("in_features"), fields.integer("out_features"), fields.flag("bias", True), name)


def _read_pooling(fields: Fields) -> Pooling:
    """Return the pooling that the config.json of a module states. Raise ConfigError if the pooling is unknown, if the file states none or
    several, or if it excludes tokens of prompts from pooling."""
    fields.require("because tokens of the prompt cannot be excluded from pooling", include_prompt=True)
    if "pooling_mode" in fields:
        found = POOLING_NAMES.get(fields.text("pooling_mode"))
        if found is None:
            raise fields.error("pooling_mode", f"one of {', '.join(POOLING_NAMES)}")
        return found
    prefix = "pooling_mode_"
    chosen = [name.removeprefix(prefix) for name, value in fields.values.items() if name.startswith(prefix) and value is True]
    if len(chosen) != 1 or chosen[0] not in POOLING_MODES:
        raise ConfigError(f"{fields.where} pools by {', '.join(chosen) or 'nothing'}, expected one of {', '.join(POOLING_MODES)}")
    return POOLING_MODES[chosen[0]]
