"""The tokenizer inside a GGUF file, converted to the tokenizer files of a model directory.

Three kinds are read: `gpt2`, byte-level BPE with its merges; `llama`, sentencepiece BPE with a score per piece and byte fallback; and
`gemma4`, the same with merges instead of scores. For `gpt2`, a file only names the regular expressions that split text into words; this
module has the expressions of the known names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers

from compiler.frontend.errors import DamagedFile, ModelError
from compiler.frontend.gguf.file import Texts
from compiler.frontend.vocabulary.pieces import UNKNOWN, add_ends, merges_by_score, tokenizer_of_pieces, tokens_in_texts
from compiler.frontend.vocabulary.words import (
    LLAMA3_WORDS,
    QWEN2_WORDS,
    QWEN35_WORDS,
    as_gpt2,
    as_gpt2_with_single_digits,
    by_expressions,
)

SEED_WORDS = QWEN2_WORDS.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")


def _cased(upper: str, lower: str) -> tuple[str, str]:
    """Return the expressions of words that end where a lower-case letter precedes an upper-case letter."""
    return rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+", rf"[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*"


UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SHORT_FORM = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
CASED = _cased(UPPER, LOWER)
CASED_WITHOUT_HAN = _cased(*(rf"(?:(?!\p{{Han}}){letter})" for letter in (UPPER, LOWER)))
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN_WORDS = "|".join((*CASED, r"\p{N}", OTHERS))
GPT4O_WORDS = "|".join((*(words + SHORT_FORM for words in CASED), r"\p{N}{1,3}", OTHERS))
KIMI_WORDS = "|".join((r"\p{Han}+", *(words + SHORT_FORM for words in CASED_WITHOUT_HAN), r"\p{N}{1,3}", OTHERS.replace("/", "")))
PUNCTUATED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
DEEPSEEK3_WORDS = PUNCTUATED + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED_LETTERS = r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"
EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_SIGNS = r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
# The expressions that split a text, in the order in which they are applied, by the value of `tokenizer.ggml.pre`.
WORDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), (LLAMA3_WORDS,)),
    **dict.fromkeys(("lfm2", "jina-v5-nano", "glm4", "chatglm-bpe", "dbrx", "smaug-bpe"), (LLAMA3_WORDS,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "hunyuan", "stablelm2", "f2llmv2"), (QWEN2_WORDS,)),
    "qwen35": (QWEN35_WORDS,),
    "seed-coder": (SEED_WORDS,),
    "tekken": (TEKKEN_WORDS,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (GPT4O_WORDS,)),
    "kimi-k2": (KIMI_WORDS,),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O_WORDS),
    "deepseek-llm": (r"[\r\n]", CASED_LETTERS, DEEPSEEK_SIGNS, r"\s+$", EAST_ASIAN, r"\p{N}+"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", EAST_ASIAN, r"\p{N}"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3_WORDS)),
}
# SINGLE_DIGITS: values of `tokenizer.ggml.pre` for tokenizers that split texts as GPT-2 does, except that they split digits one by one.
# PLAIN_WORDS: values for tokenizers that split texts exactly as GPT-2 does.
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
PLAIN_WORDS = (
    "gpt-2",
    "default",
    "phi-2",
    "exaone4",
    "olmo",
    "mpt",
    "jais",
    "trillion",
    "granite-docling",
    "mellum",
    "a.x-4.0",
    "gigachat",
)
LLAMA3_LIKE = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken")
IGNORE_MERGES = LLAMA3_LIKE  # vocabularies for which a word that is a piece becomes one token without merging
BEGIN_BY_DEFAULT = LLAMA3_LIKE  # vocabularies of kind `gpt2` whose begin token precedes a text unless the file says otherwise

ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # GGUF spells the key like this
    "mask_token": "mask_token_id",
}


TEMPLATE = "tokenizer.chat_template"
# Many files state only one of the tokens that end an answer: the one that ends a text, or the one that ends a turn.
TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>")
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>")  # tokens with which chat templates end a turn
CALL_ENDS = ("<|eom_id|>", "<|call|>", "<|tool_response>")  # tokens with which chat templates end a call, or begin its result
HARMONY_END = "<|return|>"  # in vocabularies with this token, `<|end|>` ends only a part of an answer
# Tokens of Phi-3 after which spaces and line breaks are kept. Files do not state this.
# Spaces and line breaks are removed after any other token that is recognised in a text before the text is split into words.
PHI3_KEEPS = ("<unk>", "<s>", "<|endoftext|>")
SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
UNSTATED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # the defaults of llama.cpp


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the contents of files by file name: tokenizer.json, tokenizer_config.json with special tokens and chat template,
    generation_config.json, and a config.json with only the context length. Raise ModelError for a vocabulary of an unsupported kind, and
    DamagedFile if the metadata describe no valid tokenizer."""
    vocabulary = _Vocabulary(metadata)
    try:
        tokenizer = _written(vocabulary)
    except ModelError:
        raise
    except Exception as error:  # the package `tokenizers` raises bare Exception for invalid input
        raise DamagedFile(f"tokenizer.ggml does not describe a valid tokenizer: {error}") from error
    config: dict[str, Any] = {role: vocabulary.tokens[id] for role in ROLES if (id := vocabulary.role_id(role)) is not None}
    if (templates := _templates(metadata)) is not None:
        config["chat_template"] = templates
    generation = {"eos_token_id": vocabulary.end_ids(), **_sampling(metadata)}
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return {
        "config.json": json.dumps({"max_position_embeddings": context} if type(context) is int else {}).encode(),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps(generation).encode(),
    }


def _templates(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """Return the chat template, or templates by name, as tokenizer_config.json has them. Return None if the file has no template."""
    default, tool_use = (metadata.get(name) for name in (TEMPLATE, f"{TEMPLATE}.tool_use"))
    if not isinstance(default, str) or not isinstance(tool_use, str):
        return default if isinstance(default, str) else None
    return [{"name": name, "template": template} for name, template in (("default", default), ("tool_use", tool_use))]


def _sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that the file recommends. If the file recommends none, as most files, return the defaults of
    llama.cpp, for which GGUF files are made, and `origin`: "llama.cpp". Without them, many small models would ramble at the temperature
    1."""
    stated = {field: metadata[key] for key, field in SAMPLING.items() if key in metadata}
    if not stated:
        return {**UNSTATED, "origin": "llama.cpp"}
    return {field: round(value, 6) if isinstance(value, float) else value for field, value in stated.items()}


def end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids of the tokens that end an answer, in ascending order. Raise DamagedFile if the file's vocabulary is damaged."""
    return _Vocabulary(metadata).end_ids()


def _written(vocabulary: _Vocabulary) -> bytes:
    """Return the tokenizer.json. Only a tokenizer without tokens is built, and the tokens are written into its JSON text, because building
    a tokenizer of 150,000 tokens takes half a second. Raise ModelError for a vocabulary of an unsupported kind."""
    match vocabulary.model:
        case "gpt2":
            tokenizer, merges = _byte_level(vocabulary), vocabulary.merges()
        case "llama":
            tokenizer, merges = _sentencepiece(vocabulary), merges_by_score(vocabulary.ids, vocabulary.types, vocabulary.scores().tolist())
        case "gemma4":
            tokenizer, merges = _sentencepiece(vocabulary), vocabulary.merges()
        case other:
            raise ModelError(
                f"tokenizer.ggml.model is {other!r}, expected gpt2, llama or gemma4; take the model's safetensors files instead"
            )
    _add_ends(tokenizer, vocabulary)
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = tokens_in_texts(vocabulary.ids, vocabulary.types)
    if vocabulary.model == "llama" and vocabulary.architecture == "phi3":
        for token in fields["added_tokens"]:
            token["rstrip"] = token["content"] not in PHI3_KEEPS
    fields["model"] |= {"vocab": vocabulary.ids, "merges": _as_texts(merges) or merges}
    return msgspec.json.encode(fields)


def _as_texts(merges: Sequence[tuple[str, str]]) -> list[str]:
    """Return the merges as texts like `a b`, or an empty list if one of these texts would be read as other tokens, or as a version line.
    Texts are preferred because a decoder of JSON makes one object per text, and three per pair."""
    texts = [f"{left} {right}" for left, right in merges]
    is_clear = all(text.count(" ") == 1 and not text.startswith("#version") for text in texts)
    return texts if is_clear else []


class _Vocabulary:
    """The checked `tokenizer.ggml.*` entries of the metadata."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.architecture = metadata.get("general.architecture")
        self.model = self.get("model")
        self.pre = self.get("pre", "default")
        self._texts = self._strings("tokens")

    @cached_property
    def tokens(self) -> list[str]:
        return list(self._texts)

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each token by its text. Several tokens that pad a vocabulary may have the same text; the id of the first one is
        used."""
        found: dict[str, int] = {}
        for id, text in enumerate(self.tokens):
            found.setdefault(text, id)
        return found

    @cached_property
    def types(self) -> list[int]:
        """The kind of each token (`vocabulary/pieces.py`). If the file states no kinds, all tokens are normal."""
        types = self._numbers("token_type", len(self._texts))
        return [1] * len(self._texts) if types is None else [int(kind) for kind in types]

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise DamagedFile(f"tokenizer.ggml.{name} is {value!r}, expected a boolean")
        return value

    def token_id(self, name: str) -> int | None:
        """Return the id that an entry states, or None if it states none. Raise DamagedFile if no token has the id."""
        value = self.get(name)
        if value is None or value == 0xFFFFFFFF:  # 0xFFFFFFFF stands for no token
            return None
        if type(value) is not int or not 0 <= value < len(self._texts):
            raise DamagedFile(f"tokenizer.ggml.{name} is {value!r}, expected the id of one of {len(self._texts)} tokens")
        return value

    def end_ids(self) -> tuple[int, ...]:
        """Return the ids of the tokens that end an answer, by what the file states or by the texts of tokens, in ascending order."""
        ends = {id for key in ("eos_token_id", "eot_token_id", "eom_token_id") if (id := self.token_id(key)) is not None}
        return tuple(sorted(ends | self._listed_ends() | self._unstated_ends()))

    def _listed_ends(self) -> set[int]:
        """Return the ids in the list of end tokens, which only Ollama writes."""
        listed = self.get("eos_token_ids")
        if listed is None:
            return set()
        are_integers = isinstance(listed, np.ndarray) and listed.dtype.kind in "iu"
        if not are_integers or not all(0 <= id < len(self._texts) for id in listed.tolist()):
            raise DamagedFile(f"tokenizer.ggml.eos_token_ids is {listed!r:.80}, expected ids of the {len(self._texts)} tokens")
        return set(listed.tolist())

    def _unstated_ends(self) -> set[int]:
        """Return the ids of the tokens that are known by their texts to end an answer: those that end a text, those with which the chat
        template ends a call or begins its result, and the token with which the template ends a turn. The token that ends a turn is left out
        if the file states an `eot_token_id`, or if the vocabulary has HARMONY_END."""
        template = self._metadata.get(TEMPLATE)
        in_template = template if isinstance(template, str) else ""
        turns = [] if self.get("eot_token_id") is not None else [text for text in TURN_ENDS if text in in_template]
        calls = [text for text in CALL_ENDS if text in in_template]
        found = {text: id for text in (*TEXT_ENDS, *turns, *calls, HARMONY_END) if (id := self._id_of(text)) is not None}
        turn = None if HARMONY_END in found else next((text for text in turns if text in found), None)
        return {id for text, id in found.items() if text in TEXT_ENDS or text in calls or text == turn}

    def _id_of(self, text: str) -> int | None:
        return self._texts.place(text) if isinstance(self._texts, Texts) else self.ids.get(text)

    def role_id(self, role: str) -> int | None:
        return self.token_id(ROLES[role])

    def merges(self) -> list[tuple[str, str]]:
        """Return the merges in order, each as its two tokens. Raise DamagedFile if a merge does not join two tokens to a token."""
        pairs: list[tuple[str, str]] = []
        for text in self._strings("merges"):
            left, gap, right = text.partition(" ")
            if not gap or left not in self.ids or right not in self.ids or left + right not in self.ids:
                raise DamagedFile(f"tokenizer.ggml.merges has {text!r}, expected two tokens whose concatenation is a token")
            pairs.append((left, right))
        return pairs

    def scores(self) -> np.ndarray:
        scores = self._numbers("scores", len(self._texts))
        if scores is None:
            raise DamagedFile("tokenizer.ggml.scores is missing; a sentencepiece vocabulary has one per token")
        return scores

    def _strings(self, name: str) -> Texts | list[str]:
        value = self.get(name)
        if not isinstance(value, Texts | list):
            raise DamagedFile(f"tokenizer.ggml.{name} is a {type(value).__name__}, expected an array of texts")
        return value

    def _numbers(self, name: str, length: int) -> np.ndarray | None:
        value = self.get(name)
        if value is not None and not (isinstance(value, np.ndarray) and len(value) == length):
            raise DamagedFile(f"tokenizer.ggml.{name} is not an array of {length} numbers, one per token")
        return value


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer without tokens, which splits texts into words as `tokenizer.ggml.pre` says. Raise ModelError for an
    unknown value of this key."""
    pre = vocabulary.pre
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in IGNORE_MERGES))
    if pre in PLAIN_WORDS:
        tokenizer.pre_tokenizer = as_gpt2()
    elif pre in SINGLE_DIGITS:
        tokenizer.pre_tokenizer = as_gpt2_with_single_digits()
    elif pre in WORDS:
        tokenizer.pre_tokenizer = by_expressions(*WORDS[pre])
    else:
        known = ", ".join(sorted((*PLAIN_WORDS, *SINGLE_DIGITS, *WORDS)))
        raise ModelError(f"tokenizer.ggml.pre is {pre!r}; known are {known}. Take the model's safetensors files instead")
    if pre in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Return a sentencepiece tokenizer without tokens. Its unknown token is the one that the file names, or else the first token of the
    kind UNKNOWN, or none."""
    unknown = vocabulary.role_id("unk_token")
    if unknown is None:
        unknown = next((id for id, kind in enumerate(vocabulary.types) if kind == UNKNOWN), None)
    model = models.BPE(
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    return tokenizer_of_pieces(model, has_prefix=vocabulary.flag("add_space_prefix", vocabulary.model == "llama"))


def _add_ends(tokenizer: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Let the tokenizer put the begin token before a text, and the end token after the text, if the file says so. If the file says nothing,
    add only the begin token, and only in sentencepiece vocabularies and in those of BEGIN_BY_DEFAULT."""
    by_default = vocabulary.model != "gpt2" or vocabulary.pre in BEGIN_BY_DEFAULT
    bos, eos = vocabulary.role_id("bos_token"), vocabulary.role_id("eos_token")
    begins = vocabulary.flag("add_bos_token", by_default) or vocabulary.model == "gemma4"  # the first converters stated false by mistake
    before = bos if begins else None
    after = eos if vocabulary.flag("add_eos_token", False) else None
    begin, end = (None if id is None else (vocabulary.tokens[id], id) for id in (before, after))
    add_ends(tokenizer, begin, end)
