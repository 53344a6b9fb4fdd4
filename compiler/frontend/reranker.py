"""Rerankers that are decoders: the prompt has a query and a document. The score is computed from the logits of two tokens after the prompt,
or from the output of a classification head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.frontend.classes import Classes, read_scores
from compiler.frontend.errors import ConfigError
from compiler.frontend.fields import MAX_TOKENIZER_BYTES, Fields, read_json
from compiler.frontend.sentence import read_kinds, settings_of
from runtime.files import is_there

FIELDS = ("classifier_from_token", "is_original_qwen3_reranker")  # fields of config.json, named as in vLLM
FAMILY = "qwen3"
WORDS = ("no", "yes")  # the tokens with which Qwen3-Reranker answers
TASK = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """The text of a prompt around an instruction, a query and a document."""

    before: str
    marks: tuple[str, str, str]  # texts that precede the instruction, the query and the document
    after: str
    instruction: str  # instruction for requests that state none


QWEN3 = PairPrompt(
    f"<|im_start|>system\n{TASK}<|im_end|>\n<|im_start|>user\n",
    ("<Instruct>: ", "\n<Query>: ", "\n<Document>: "),
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "Given a web search query, retrieve relevant passages that answer the query",
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ids of the two tokens whose logits give the score: the logit of `yes` minus the logit of `no` is the output of the only class."""

    yes: int
    no: int


def read_verdict(directory: Path, config: Mapping[str, Any], family: str, vocab_size: int) -> tuple[Classes, Verdict] | None:
    """Return the classes of a reranker, and the verdict: the two tokens whose logits give the score. The files of such a reranker have a
    certain module of sentence-transformers, a certain field of config.json, or the chat template of Qwen3-Reranker. Return None if they
    have none of these. Raise ConfigError if they describe a reranker that is not supported."""
    found = _tokens_of_module(directory) or _tokens_of_field(directory, config)
    if found is None and family == FAMILY and _is_causal(config) and _has_template(directory):
        found = _tokens_of_words(directory, f"the chat template is that of Qwen3-Reranker; state {FIELDS[0]} in config.json", *WORDS)
    if found is None:
        return None
    if family != FAMILY:
        raise ConfigError(f"the model reranks by the tokens {found[0]} and {found[1]}; only the prompt of Qwen3-Reranker is supported")
    if max(found) >= vocab_size:
        raise ConfigError(f"the model reranks by the tokens {found[0]} and {found[1]}; its vocabulary has only {vocab_size}")
    return Classes(("relevant",), read_scores(Fields(config, "config.json"), 1)), Verdict(*found)


def read_pair_prompt(directory: Path, family: str, classes: Classes, verdict: Verdict | None) -> PairPrompt | None:
    """Return the prompt around a pair of texts, or None if the tokenizer joins the texts. A model with a verdict has the prompt of
    Qwen3-Reranker. A conversion of Qwen3-Reranker to a classification head also has this prompt: it has no verdict, but the same chat
    template."""
    converted = family == FAMILY and len(classes.names) == 1 and _has_template(directory)
    return QWEN3 if verdict is not None or converted else None


def _has_template(directory: Path) -> bool:
    return any(TASK in _text_of(directory / name) for name in ("chat_template.jinja", "tokenizer_config.json"))


def _tokens_of_module(directory: Path) -> tuple[int, int] | None:
    """Return the ids of the tokens for "yes" and "no" that the sentence-transformers module `LogitScore` names, or None if the model has no
    such module. A model with this module must have the chat template of Qwen3-Reranker."""
    path = directory / "modules.json"
    module = next((module for kind, module in read_kinds(read_json(path)) if kind == "LogitScore"), None) if is_there(path) else None
    if module is None:
        return None
    fields = settings_of(module, directory)
    if not _has_template(directory):
        raise ConfigError("modules.json has a LogitScore module; expected the chat template of Qwen3-Reranker, the only supported one")
    return fields.integer("true_token_id", minimum=0), fields.integer("false_token_id", minimum=0)


def _text_of(path: Path) -> str:
    """Return the text of a file, with plain quotes in place of quotes that JSON escapes, or "" if there is no file."""
    return path.read_text(errors="replace").replace('\\"', '"') if is_there(path) else ""


def _tokens_of_field(directory: Path, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the ids of the tokens for "yes" and "no" that config.json names as texts, or None if it names none."""
    match config.get(FIELDS[0]):
        case None:
            return None
        case [str(no), str(yes)]:
            return _tokens_of_words(directory, f"{FIELDS[0]} of config.json is {[no, yes]}", no, yes)
        case _:
            raise Fields(config, "config.json").error(FIELDS[0], 'two tokens, as ["no", "yes"]')


def _tokens_of_words(directory: Path, reason: str, no: str, yes: str) -> tuple[int, int]:
    """Return the ids of two tokens, that of `yes` first. If tokenizer.json lacks one of them, raise a ConfigError whose message begins with
    `reason`."""
    vocabulary = _vocabulary(directory)
    if absent := [word for word in (no, yes) if word not in vocabulary]:
        raise ConfigError(f"{reason}; tokenizer.json has no token {absent[0]!r}")
    return vocabulary[yes], vocabulary[no]


def _is_causal(config: Mapping[str, Any]) -> bool:
    """Return whether config.json describes a model that generates text, without a classification head, as Qwen3-Reranker's file does."""
    stated = config.get("architectures")
    return isinstance(stated, list) and any(isinstance(name, str) and name.endswith("ForCausalLM") for name in stated)


def _vocabulary(directory: Path) -> Mapping[str, int]:
    tokenizer = read_json(directory / "tokenizer.json", most_bytes=MAX_TOKENIZER_BYTES)
    model = tokenizer.get("model") if isinstance(tokenizer, Mapping) else None
    found = model.get("vocab") if isinstance(model, Mapping) else None
    return found if isinstance(found, Mapping) else {}
