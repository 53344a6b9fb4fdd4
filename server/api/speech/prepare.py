"""Build the request that all windows of a transcription share, from the form and the model's defaults."""

from __future__ import annotations

from server.api.answer.generate import Generation
from server.api.context import Caller
from server.api.request.prepare import context_of, invalid, off_loop
from server.api.request.texts import encode_prompts
from server.api.speech import transcribe
from server.api.speech.form import SpeechForm
from server.messages import IDLE, SamplingParams, Submit
from server.metrics import ModelSeries
from server.models.model import Loaded
from server.speech.languages import code_of
from server.speech.tokens import MOST_BEFORE, SpeechTokens


def run_of(loaded: Loaded, series: ModelSeries, who: Caller) -> transcribe.Run:
    """Return a function that makes the generations of a caller's request: one for each attempt at a window, and one that finds the
    language."""
    parts = who.parts()
    return lambda job: Generation(loaded, job, series, next(parts))


async def request_of(asked: SpeechForm, task: str, loaded: Loaded, tokens: SpeechTokens, who: Caller) -> transcribe.Request:
    """Return the request. `task` is "transcribe" or "translate". Raise ApiError if the model does not know the language or the task, or if
    the prompt has a special token."""
    language = None if asked.language is None else code_of(asked.language)
    if not tokens.languages:
        if task == "translate" or language not in (None, "en"):
            raise invalid("model" if task == "translate" else "language", "this model only transcribes English")
        language = "en"
    elif language is not None and language not in tokens.languages:
        raise invalid(
            "language",
            f"language is {asked.language!r:.40}; expected a code such as en, one of {len(tokens.languages)} that the model knows",
        )
    text = asked.prompt.strip()
    prompt_ids = await off_loop(len(text), lambda: _prompt_ids(text, loaded, tokens))
    params = SamplingParams(max_tokens=1, seed=asked.seed)
    common = Submit("", (), params, priority=IDLE if who.is_idle else 0, fairness_key=who.key_digest, cache_salt=who.salt())
    return transcribe.Request(
        tokens=tokens,
        submit=common,
        decode=loaded.tokenizer.decode,
        num_hops=loaded.ready.num_hops,
        most_context=context_of(loaded),
        language=language,
        task=task,
        prompt_ids=prompt_ids,
        align=loaded.worker.embed if "word" in asked.times else None,
        temperatures=transcribe.TEMPERATURES if asked.temperature == 0 else (asked.temperature,),
    )


def _prompt_ids(text: str, loaded: Loaded, tokens: SpeechTokens) -> tuple[int, ...]:
    """Return the last tokens of the text that precedes the speech, at most as many as a window reads. Raise ApiError if the text has a
    special token."""
    if not text:
        return ()
    (ids,) = encode_prompts([f" {text}"], loaded.tokenizer, "prompt", special=False, context=MOST_BEFORE, keep=MOST_BEFORE, side="left")
    if special := next((token for token in ids if token >= tokens.end), None):
        found = loaded.tokenizer.special_texts.get(special, b"").decode(errors="replace")
        raise invalid("prompt", f"prompt has {found!r}, the text of a special token of the model; leave it out, or write it otherwise")
    return tuple(ids)
