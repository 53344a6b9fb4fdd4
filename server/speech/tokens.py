"""Find the special tokens of Whisper's vocabulary by their texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from server.interfaces import Tokenizer

END, START, BEFORE, NO_STAMPS = "<|endoftext|>", "<|startoftranscript|>", "<|startofprev|>", "<|notimestamps|>"
TRANSCRIBE, TRANSLATE, ONE_SPEAKER = "<|transcribe|>", "<|translate|>", "<|startoflm|>"
SILENCE = ("<|nospeech|>", "<|nocaptions|>")
LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
ENGLISH_END = 50256  # id of END in the vocabulary of models that only know English; their prompts have no tokens for languages and tasks
# Texts that transcripts of speech do not contain. The token of such a text is banned if the text is one token. Of a musical note (NOTES),
# the first token is always banned; all notes have the same first token.
MARKS = (
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *("<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("', "((", "))", "(((", ")))", "[[", "]]", "{{", "}}", "♪♪", "♪♪♪"),
)
NOTES = "♩♪♫♬♭♮♯"
STAMP_S = 0.02  # seconds from one time stamp to the next
MOST_BEFORE = 223  # largest number of tokens of earlier text in a prompt; half of the context, if that is less


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """The special tokens of a model that transcribes."""

    end: int  # token that ends a transcript; all tokens from it on are special
    start: int  # token that begins a transcript
    before: int  # token before the text of earlier windows
    no_stamps: int  # token after which a transcript has no time stamps
    tasks: Mapping[str, int]  # "transcribe" and "translate"
    silence: int  # token that says that there is no speech
    languages: Mapping[str, int]  # by code; empty for models that only know English
    banned: tuple[int, ...]  # tokens that no transcript has

    @property
    def first_stamp(self) -> int:
        """The token of the time stamp 0.00. The tokens of time stamps are the last ones of the vocabulary."""
        return self.no_stamps + 1

    @staticmethod
    def of(tokenizer: Tokenizer) -> SpeechTokens | None:
        """Return the tokens, or None if the vocabulary lacks one that every model that transcribes has."""
        ids = {text.decode(errors="replace"): token_id for token_id, text in tokenizer.special_texts.items()}
        silence = next((ids[name] for name in SILENCE if name in ids), None)
        if silence is None or not ids.keys() >= {END, START, BEFORE, NO_STAMPS, TRANSCRIBE, TRANSLATE}:
            return None
        languages = {found[1]: token_id for text, token_id in ids.items() if (found := LANGUAGE.fullmatch(text))}
        tasks = {"transcribe": ids[TRANSCRIBE], "translate": ids[TRANSLATE]}
        special = {ids[name] for name in (START, BEFORE, NO_STAMPS, ONE_SPEAKER) if name in ids} | {
            silence,
            *tasks.values(),
            *languages.values(),
        }
        return SpeechTokens(
            end=ids[END],
            start=ids[START],
            before=ids[BEFORE],
            no_stamps=ids[NO_STAMPS],
            tasks=tasks,
            silence=silence,
            languages={} if ids[END] == ENGLISH_END else languages,
            banned=tuple(sorted(special | _banned_marks(tokenizer))),
        )

    def prompt(self, language: str | None, task: str, earlier: list[int]) -> list[int]:
        """Return the prompt for a transcript of a window, with time stamps. `earlier` are the tokens of the text before the window.
        `language` is a code of `languages`; it may be None, and `task` is ignored, if the model only knows English."""
        before = [self.before, *earlier] if earlier else []
        if not self.languages:
            return [*before, self.start]
        assert language is not None
        return [*before, self.start, self.languages[language], self.tasks[task]]


def _banned_marks(tokenizer: Tokenizer) -> set[int]:
    """Return the tokens to ban for texts that transcripts do not contain: each of MARKS and NOTES, with and without a space before it. Also
    ban the first token of a hyphen and of an apostrophe after a space. Inside words, hyphens and apostrophes stay allowed."""
    found = {token for text in (" -", " '") for token in tokenizer.encode(text, False)[:1]}
    marks = [*MARKS, *NOTES]
    encoded = tokenizer.encode_all([text for mark in marks for text in (mark, f" {mark}")], False)
    for index, ids in enumerate(encoded):
        if len(ids) == 1 or (ids and marks[index // 2] in NOTES):
            found.add(ids[0])
    return found
