"""Tokenizers from every supported file format: ids, bytes, special tokens, and the accompanying configuration files."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from server.isolated.calls import Calls
from server.text import tokenizer as tokenizer_module
from server.text.tokenizer import GenerationDefaults, Tokenizer
from server.text.tokenizer_files import ModelFilesError, TokenizerFiles

TEXT = "Hello world, 世界 🎉\nGrüße!"
CORPUS = ["hello world, hello there", "Grüße an die Welt", "世界 world", "one two  three\nfour"]


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=["<s>", "</s>", "<end>"], initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def sentencepiece() -> tokenizers.Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for piece in ["▁", *"helowrd,", "el", "▁w", "lo", "ld"]:
        vocab.setdefault(piece, len(vocab))
    merges = [("e", "l"), ("▁", "w"), ("l", "o"), ("l", "d")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def wordpiece() -> tokenizers.Tokenizer:
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "wor", "##ld", "##s", ","]
    tokenizer = tokenizers.Tokenizer(models.WordPiece({piece: id for id, piece in enumerate(vocab)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    return tokenizer


def load(tokenizer: tokenizers.Tokenizer, **files: object) -> Tokenizer:
    contents = {f"{name}.json": json.dumps(value).encode() for name, value in files.items()}
    return Tokenizer({"tokenizer.json": tokenizer.to_str().encode(), **contents})


@given(st.text())
def test_bytes_of_byte_level_tokens_are_the_text(text: str) -> None:
    tokenizer = BYTE_LEVEL
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not tokenizer.special_ids & set(ids):
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert tokenizer.decode(ids) == text


BYTE_LEVEL = load(byte_level())


def test_sentencepiece_bytes_are_the_text_behind_a_space() -> None:
    tokenizer = load(sentencepiece())
    ids = tokenizer.encode(TEXT, add_special_tokens=True)
    assert ids[0] == 1
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == " " + TEXT
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.token_bytes(3 + 0xE4) == b"\xe4"


@pytest.mark.parametrize("normalized", [True, False])
def test_an_added_run_of_spaces_is_spaces(normalized) -> None:
    """Gemma's vocabulary adds runs of the mark that stands for a space: the indentation of code."""
    raw = sentencepiece()
    raw.normalizer = normalizers.Replace(" ", "▁")  # like Gemma's, which puts no space before a text
    raw.add_tokens([tokenizers.AddedToken("▁▁▁▁", normalized=normalized, special=False)])
    tokenizer = load(raw)
    (run,) = [id for id, token in raw.get_added_tokens_decoder().items() if token.content == "▁▁▁▁"]
    assert tokenizer.token_bytes(run) == b"    "
    assert tokenizer.decode([3 + 0x41, run, 3 + 0x42]) == "A    B"


def test_wordpiece_bytes_begin_words_with_a_space() -> None:
    tokenizer = load(wordpiece())
    ids = tokenizer.encode("Hello worlds", add_special_tokens=True)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == " hello worlds"


def test_neither_truncated_nor_padded() -> None:
    tokenizer = load(wordpiece())
    assert len(tokenizer.encode("hello " * 20, add_special_tokens=True)) == 22
    assert len(tokenizer.encode("hello", add_special_tokens=False)) == 1


def test_special_and_added_tokens() -> None:
    tokenizer = load(byte_level())
    end, tool = (tokenizer.encode(text, add_special_tokens=False) for text in ("<end>", "<tool>"))
    assert len(end) == len(tool) == 1
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.token_bytes(end[0]) == b""
    assert tokenizer.token_bytes(tool[0]) == b"<tool>"
    assert tokenizer.token_bytes(1 << 20) == b""  # padding rows of an embedding table have ids without a token, and thus without bytes
    assert tokenizer.decode([*end, *tool]) == "<tool>"
    assert tokenizer.decode([*end, *tool], skip_special_tokens=False) == "<end><tool>"


def test_the_files_around_it() -> None:
    tokenizer = load(
        byte_level(),
        tokenizer_config={
            "eos_token": {"content": "</s>"},
            "chat_template": "{{ bos_token }}{{ messages[0].content }}",
        },
        special_tokens_map={"bos_token": "<s>", "eos_token": "<end>"},
        generation_config={"eos_token_id": [2, 1], "temperature": 0.6, "top_k": 20, "do_sample": True},
        config={"text_config": {"eos_token_id": 7}},
    )
    assert tokenizer.eos_ids == (1, 2, 7)
    assert tokenizer.vocab_size == 302
    assert tokenizer.generation_defaults == GenerationDefaults(do_sample=True, temperature=0.6, top_k=20)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([{"content": "hi"}]) == "<s>hi"
    assert tokenizers.Tokenizer.from_str(tokenizer.to_json()).get_vocab_size() == 302


def test_the_template_is_compiled_while_the_vocabulary_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[str] = []
    start, read = Calls.start, tokenizer_module.read_tokenizer
    monkeypatch.setattr(Calls, "start", lambda self: began.append("template") or start(self))
    monkeypatch.setattr(tokenizer_module, "read_tokenizer", lambda content: began.append("vocabulary") or read(content))
    tokenizer = load(byte_level(), tokenizer_config={"chat_template": "{{ messages[0].content }}"})
    assert began == ["template", "vocabulary"]
    assert tokenizer.chat_template is not None and tokenizer.chat_template.render([{"content": "hi"}]) == "hi"


def test_only_tokenizer_json_is_indispensable() -> None:
    tokenizer = load(byte_level())
    assert (tokenizer.eos_ids, tokenizer.chat_template) == ((), None)
    assert tokenizer.generation_defaults == GenerationDefaults()
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json is missing.*save_pretrained"):
        Tokenizer({})


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("a\n{% for %}", "line 2: Expected an expression"),
        ("a\n\n\ud800", r"line 3: the template has U\+D800"),
        ("{% extends 'x' %}", "line 1: 'extends' is not allowed"),
        ("{{ x | center(3) }}", "line 1: No filter named 'center'"),
        ("{{ " + "(" * 5000 + " }}", "RecursionError|at most"),
    ],
)
def test_a_broken_template_is_refused_when_the_model_is_loaded(source: str, complaint: str) -> None:
    """A model with a broken chat template cannot be loaded. The error is the one for damaged model files, so both `serve` and `inspect`
    refuse the model. It names the line of the template."""
    with pytest.raises(ModelFilesError, match="the chat template is broken: .*(" + complaint + ")"):
        load(byte_level(), tokenizer_config={"chat_template": source})


def test_from_a_directory_with_a_template_of_its_own(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}]})
    )
    template = Tokenizer(TokenizerFiles.from_dir(tmp_path).contents).chat_template
    assert template is not None
    assert template.render([]) == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    template = Tokenizer(TokenizerFiles.from_dir(tmp_path).contents).chat_template
    assert template is not None
    assert (template.render([]), template.render([], tools=[{}])) == ("new", "tools")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", b"[", "not JSON"),
        ("generation_config.json", b"[" * 100_000, "not JSON"),
        ("generation_config.json", b"[1]", "expected an object"),
        ("generation_config.json", b'{"temperature": "hot"}', r"temperature.*'hot'.*a number from 0 to 100"),
        ("generation_config.json", b'{"temperature": 1e999}', "temperature"),
        ("generation_config.json", b'{"top_k": -1}', "top_k"),
        ("config.json", b'{"eos_token_id": "x"}', "eos_token_id in config.json"),
        ("config.json", b"\xff", "config.json is not JSON"),
        ("tokenizer.json", b"{}", "tokenizer.json is not understood"),
        ("tokenizer.json", b"[" * 100_000, "tokenizer.json is not understood"),
    ],
)
def test_damaged_files_are_named(name: str, content: bytes, message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        Tokenizer({"tokenizer.json": byte_level().to_str().encode(), name: content})


SAVED = sentencepiece().to_str().encode()


@given(st.integers(0, len(SAVED) - 1), st.binary(max_size=6), st.integers(0, 6))
def test_a_changed_tokenizer_loads_or_is_refused(position: int, insert: bytes, removed: int) -> None:
    content = SAVED[:position] + insert + SAVED[position + removed :]
    try:
        tokenizer = Tokenizer({"tokenizer.json": content})
    except ModelFilesError:
        return
    tokenizer.token_bytes(5)


def test_a_tokenizer_that_cannot_read_every_text_is_refused() -> None:
    """A model whose tokenizer has no token for unknown text cannot be loaded, because some requests would fail later."""
    lacking = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    with pytest.raises(ModelFilesError, match=r"Missing .* token from the vocabulary"):
        Tokenizer({"tokenizer.json": lacking.to_str().encode()})


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_special_token_with_a_lone_surrogate_is_refused(file: str) -> None:
    files = {"tokenizer.json": byte_level().to_str().encode(), file: b'{"bos_token": {"content": "\\ud800"}}'}
    with pytest.raises(ModelFilesError, match=r"bos_token is .*, expected a text without lone surrogates"):
        Tokenizer(files)


@pytest.mark.parametrize("extra", [[], ["<one>", "<a much longer token than all others>"]], ids=["plain", "added"])
@pytest.mark.parametrize(
    "vocab",
    [{}, {"a": 0, "bcd": 1}, {"a": 0, "bcd": 7}, {"a": 3, "bcd": 3}, {"a": 5, "bcd": 0, "e": 5}],
    ids=["empty", "full", "gap", "one id", "an id twice"],
)
def test_the_size_and_the_longest_token_are_those_of_the_whole_vocabulary(vocab: dict[str, int], extra: list[str]) -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({**vocab, "?": len(vocab)}, unk_token="?"))
    tokenizer.add_tokens(extra)
    whole = tokenizers.Tokenizer.from_str(tokenizer.to_str()).get_vocab(with_added_tokens=True)  # reading gives some tokens other ids
    loaded = load(tokenizer)
    assert loaded.vocab_size == max(whole.values()) + 1 and loaded.max_token_chars == max(map(len, whole))
